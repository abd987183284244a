"""The figures of a run: throughput, latencies, goodput and where the seats and pages went, from
times and records.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jitney.engine.records import ROW_KINDS
from jitney.engine.telemetry.request_record import RequestRecord, Stay

QUANTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p999": 99.9}


@dataclass(frozen=True, slots=True)
class Slo:
    """A service level: limits in seconds on the time to first token and on a request's mean time
    per later token.
    """

    ttft_s: float | None = None
    itl_s: float | None = None

    def met_by(self, request: RequestRecord) -> bool:
        """True when it was served within the limits; a single token has no gap to be late with."""
        if not request.served:
            return False
        late_first = self.ttft_s is not None and (
            request.ttft_s is None or request.ttft_s > self.ttft_s
        )
        late_later = self.itl_s is not None and (request.tpot_s or 0.0) > self.itl_s
        return not (late_first or late_later)


def summarise(
    requests: Sequence[RequestRecord],
    *,
    records: np.ndarray | None,
    seconds: float,
    seats: int = 0,
    seated_s: float | None = None,
    slo: Slo | None = None,
    price_per_hour: float | None = None,
) -> dict[str, Any]:
    """All figures of a run that took `seconds`, ready for JSON; what cannot be known is None.

    Latencies and tokens are those of served requests; `finish` counts the others. records: [steps]
    STEP_DTYPE or None; seats: 0 if unknown. seated_s: seconds that all sequences sat in seats, see
    `seated`; None if unknown. Percentiles interpolate linearly between the sorted values.
    seat_fill: seated_s over all seat-seconds, so that neither a seat that a policy holds for nobody
    counts, nor the time that a preempted sequence waits.
    """
    served = [request for request in requests if request.served]
    n_prompt = sum(request.n_prompt for request in served)
    n_output = sum(request.n_output for request in served)
    figures = {
        "requests": len(requests),
        "served": len(served),
        "finish": dict(Counter(request.finish for request in requests)),
        "seconds": seconds,
        "prompt_tokens": n_prompt,
        "output_tokens": n_output,
        "req_s": _per(len(served), seconds),
        "output_tok_s": _per(n_output, seconds),
        "total_tok_s": _per(n_prompt + n_output, seconds),
        **_latencies(served),
        "goodput_req_s": None
        if slo is None
        else _per(sum(slo.met_by(request) for request in requests), seconds),
        "slo": None if slo is None else {"ttft_s": slo.ttft_s, "itl_s": slo.itl_s},
        "seat_fill": seat_fill(seated_s, seats, seconds),
        "price_per_hour": price_per_hour,
        "cost_per_million_tokens": cost_per_million(price_per_hour, seconds, n_output),
    }
    return figures | _step_figures(records)


def _latencies(served: Sequence[RequestRecord]) -> dict[str, dict[str, float] | None]:
    """Distributions of queue wait, time to first token, gaps between tokens, per-request means of
    them, end to end.
    """
    return {
        "ttft_s": spread(t.ttft_s for t in served),
        "itl_s": spread_of(token_gaps(served)),
        "tpot_s": spread(t.tpot_s for t in served),
        "e2e_s": spread(t.e2e_s for t in served),
        "queue_s": spread(t.queue_s for t in served),
    }


def token_gaps(requests: Iterable[RequestRecord]) -> np.ndarray:
    """All gaps between neighbouring tokens of a request, of all requests [gaps] f8 s."""
    gaps = [
        np.diff(np.asarray(request.token_times, np.float64))
        for request in requests
        if request.token_times is not None
    ]
    return np.concatenate(gaps) if gaps else np.empty(0)


def token_waits(
    requests: Iterable[RequestRecord], steps: np.ndarray, done: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(waits between two tokens of a request, s; how many tokens waited so long), all of them.

    steps: numbers of the run's steps [steps], ascending; done: when each handed out its tokens
    [steps] f8. Every step of a stay brings a token, from its first one on, so the waits are those
    between neighbouring steps; who lost its seat waits from one stay to the next.
    """
    began, ended, lost, found = [], [], [], []
    for request in requests:
        stays = [stay for stay in request.stays if stay.first_step >= 0]
        began += [stay.first_step for stay in stays]
        ended += [stay.last_step for stay in stays]
        lost += [stay.last_step for stay in stays[:-1]]
        found += [stay.first_step for stay in stays[1:]]

    def place(numbers: list[int]) -> np.ndarray:
        return np.searchsorted(steps, np.array(numbers, np.int64))

    # A stay's tokens but the first have waited for one step: add at its second, take off behind
    # its last.
    more = np.bincount(place(began) + 1, minlength=len(steps) + 1)
    fewer = np.bincount(place(ended) + 1, minlength=len(steps) + 1)
    counts = np.cumsum(more - fewer)[1 : len(steps)]
    waited = counts > 0
    between_stays = done[place(found)] - done[place(lost)]
    return (
        np.concatenate((np.diff(done)[waited], between_stays)),
        np.concatenate((counts[waited], np.ones(len(between_stays), np.int64))),
    )


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Percentiles, mean and most of the values that are known; None if none is."""
    return spread_of(np.array([value for value in values if value is not None], np.float64))


def spread_of(values: np.ndarray) -> dict[str, float] | None:
    """As `spread`, of an array [n] f8."""
    if not len(values):
        return None
    points = np.percentile(values, list(QUANTILES.values()))
    return dict(zip(QUANTILES, points.tolist(), strict=True)) | {
        "mean": float(values.mean()),
        "max": float(values.max()),
    }


def seated(stays: Iterable[Stay], since: float = -math.inf, until: float = math.inf) -> float:
    """Seconds that the stays lasted, of those between two times alone; `until` must be finite if
    one lasts still.
    """
    total = 0.0
    for stay in stays:
        end = until if stay.end is None else min(stay.end, until)
        total += max(0.0, end - max(stay.start, since))
    return total


def seat_fill(seated_s: float | None, seats: int, seconds: float) -> float | None:
    """Share of all seat-seconds that somebody sat; None if that or the number of seats is
    unknown.
    """
    if seated_s is None or seats < 1 or seconds <= 0:
        return None
    return seated_s / (seats * seconds)


def cost_per_million(price_per_hour: float | None, seconds: float, n_output: int) -> float | None:
    """What a million delivered output tokens cost; None without a price or tokens."""
    if price_per_hour is None or not n_output:
        return None
    return price_per_hour / 3600 * seconds / n_output * 1e6


def _step_figures(records: np.ndarray | None) -> dict[str, Any]:
    """What the steps tell: rows by kind, padding_share of all rows, KV pages in use (mean over
    device time).
    """
    if records is None or not len(records):
        return dict.fromkeys(("steps", "rows", "padding_share", "kv_use", "device_s", "preempted"))
    computed = int(records["bucket_tokens"].sum())
    weights = records["device_s"].astype(np.float64)
    weights = weights if weights.sum() > 0 else np.ones(len(records))
    return {
        "steps": len(records),
        "rows": {kind: int(records[kind].sum()) for kind in ROW_KINDS},
        "padding_share": float(records["padding"].sum() / computed) if computed else 0.0,
        "kv_use": float(
            np.average(records["pages_used"] / np.maximum(1, records["pages"]), weights=weights)
        ),
        "device_s": math.fsum(records["device_s"].tolist()),
        "preempted": int(records["preempted"].sum()),
    }


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
