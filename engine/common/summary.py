"""Figures of a run from request and step records: throughput, latencies, goodput, use of seats."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jitney.engine.common.records import ROW_KINDS
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.requests import JsonDict, JsonObject

#: Fewest values for a 99.9th percentile; below, it is the largest value.
_ENOUGH_FOR_P999 = 1000
QUANTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p999": 99.9}


@dataclass(frozen=True, slots=True)
class Slo:
    """A service level: limits of the time to first token and the mean time per later token."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def met_by(self, request: RequestRecord) -> bool:
        """True if the request was served within the limits; a single token meets `itl_s`."""
        ttft_s, tpot_s = request.ttft_s, request.tpot_s or 0.0
        if not request.served:
            return False
        if self.ttft_s is not None and (ttft_s is None or ttft_s > self.ttft_s):
            return False
        return self.itl_s is None or tpot_s <= self.itl_s


def summarise(
    requests: Sequence[RequestRecord],
    *,
    records: np.ndarray | None,
    seconds: float,
    seats: int = 0,
    seated_s: float | None = None,
    slo: Slo | None = None,
    price_per_hour: float | None = None,
) -> JsonDict:
    """All figures of a run of `seconds`, as JSON; unknown ones are None.

    Latencies and tokens count served requests only; `finish` counts all. records: [steps]
    STEP_DTYPE or None. seats: 0 if unknown. seated_s: sum of `Stay.seconds`; None: computed from
    the requests. Percentiles interpolate linearly. seat_fill: seated_s divided by all seat-seconds;
    it excludes seats held by a batch policy and the waits of preempted sequences.
    """
    served = [request for request in requests if request.served]
    tokens = _tokens(served, seconds)
    if seated_s is None:
        seated_s = sum(stay.seconds() for request in requests for stay in request.stays)
    return {
        "requests": len(requests),
        "served": len(served),
        "finish": dict(Counter(request.finish for request in requests)),
        "seconds": seconds,
        **tokens,
        **_latencies(served),
        **_goodput(requests, seconds, slo),
        "seat_fill": _seat_fill(seated_s, seats, seconds),
        "price_per_hour": price_per_hour,
        "cost_per_million_tokens": _cost_per_million(
            price_per_hour, seconds, tokens["output_tokens"]
        ),
        **_step_figures(records),
    }


def _tokens(served: Sequence[RequestRecord], seconds: float) -> JsonDict:
    n_prompt = sum(request.n_prompt for request in served)
    n_output = sum(request.n_output for request in served)
    return {
        "prompt_tokens": n_prompt,
        "output_tokens": n_output,
        "req_s": _per(len(served), seconds),
        "output_tok_s": _per(n_output, seconds),
        "total_tok_s": _per(n_prompt + n_output, seconds),
    }


def _goodput(requests: Sequence[RequestRecord], seconds: float, slo: Slo | None) -> JsonDict:
    """Requests per second that met the service level; None without one."""
    if slo is None:
        return {"goodput_req_s": None, "slo": None}
    met = sum(map(slo.met_by, requests))
    return {"goodput_req_s": _per(met, seconds), "slo": dataclasses.asdict(slo)}


def _latencies(served: Sequence[RequestRecord]) -> dict[str, dict[str, float] | None]:
    """Distributions of the time between tokens, and per request of TTFT, TPOT, total and wait."""
    distributions = {"itl_s": spread(token_gaps(served))}
    for name in ("ttft_s", "tpot_s", "e2e_s", "queue_s"):
        distributions[name] = spread([getattr(request, name) for request in served])
    return distributions


def token_gaps(requests: Iterable[RequestRecord]) -> np.ndarray:
    """Times between consecutive tokens of all requests: [gaps] f8 s."""
    gaps = [np.empty(0)]
    for request in requests:
        if request.token_times is not None:
            gaps.append(np.diff(np.asarray(request.token_times, np.float64)))
    return np.concatenate(gaps)


def spread(values: Iterable[float | None] | np.ndarray) -> dict[str, float] | None:
    """Percentiles, mean, max and count of an array [n] f8, or numbers and None; None if empty."""
    if not isinstance(values, np.ndarray):
        values = np.array([value for value in values if value is not None], np.float64)
    if not len(values):
        return None
    points = np.percentile(values, list(QUANTILES.values())).tolist()
    figures = dict(zip(QUANTILES, points, strict=True))
    figures["mean"] = float(values.mean())
    figures["max"] = float(values.max())
    figures["n"] = len(values)
    return figures


def quantile_of(spread: JsonObject, quantile: str) -> float | None:
    """A percentile of `spread`, one of QUANTILES; None with too few values."""
    if quantile == "p999" and spread.get("n", 0) < _ENOUGH_FOR_P999:
        return None
    return spread.get(quantile)


def _seat_fill(seated_s: float | None, seats: int, seconds: float) -> float | None:
    """Share of the seat-seconds in use; None if unknown."""
    if seated_s is None or seats < 1 or seconds <= 0:
        return None
    return seated_s / (seats * seconds)


def _cost_per_million(price_per_hour: float | None, seconds: float, n_output: int) -> float | None:
    """Cost of a million output tokens; None without a price or tokens."""
    if price_per_hour is None or not n_output:
        return None
    return price_per_hour / 3600 * seconds / n_output * 1e6


def _step_figures(records: np.ndarray | None) -> JsonDict:
    """Figures of step records: rows by kind, padding share, KV use (mean over device time)."""
    if records is None or not len(records):
        return dict.fromkeys(("steps", "rows", "padding_share", "kv_use", "device_s", "preempted"))
    rows = {kind: int(records[kind].sum()) for kind in ROW_KINDS}
    return {
        "steps": len(records),
        "rows": rows,
        "padding_share": rows["padding"] / max(1, int(records["bucket_tokens"].sum())),
        "kv_use": _kv_use(records),
        "device_s": math.fsum(records["device_s"].tolist()),
        "preempted": int(records["preempted"].sum()),
    }


def _kv_use(records: np.ndarray) -> float:
    used = records["pages_used"] / np.maximum(1, records["pages"])
    weights = records["device_s"].astype(np.float64)
    if weights.sum() <= 0:
        return float(used.mean())
    return float(np.average(used, weights=weights))


def _per(amount: float, seconds: float) -> float:
    if seconds <= 0:
        return 0.0
    return amount / seconds
