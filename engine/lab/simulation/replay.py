"""Traffic again, under other policies: the policy lab's process, `python -P -m
jitney.engine.lab.simulation.replay`.

A `ReplayJob` comes in, lines of JSON go out. It runs at the lowest priority, so that the engine it
shares the machine with does not notice.
"""

from __future__ import annotations

import io
import math
import os
import sys
from typing import Any

import msgspec
import numpy as np

from jitney.engine.common.errors import ConfigError, JitneyError
from jitney.engine.common.request_record import RequestRecord, SeatStay, stays_of
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.summary import spread, summarise
from jitney.engine.common.trace import Arrival
from jitney.engine.config import EngineSection
from jitney.engine.core import Bucket, Buckets
from jitney.engine.lab.simulation.accuracy import errors, verdict_of
from jitney.engine.lab.simulation.bucket_tuner import DECODE_EXECUTABLES, SeenSteps
from jitney.engine.lab.simulation.engine_run import EngineRun
from jitney.engine.lab.simulation.engine_shape import EngineShape
from jitney.engine.lab.simulation.recordings import Recording
from jitney.engine.lab.simulation.simulator import simulate
from jitney.engine.lab.simulation.step_table import StepTable

_NICENESS = 15
#: Most stays told of one policy.
_MAX_STAYS = 20_000
#: Ended requests below which the error of a prediction is chance.
_FEWEST_ENDED = 20


class RecordedEngine(msgspec.Struct, frozen=True):
    """The engine that recorded."""

    #: [engine] of its configuration.
    settings: JsonDict
    #: Tokens a sequence may have.
    context_length: int
    #: In use by sequences at most, without the trash page.
    pages: int
    #: Rows that its programs were compiled for, empty if it does not tell.
    seat_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()
    #: The machine, in words.
    machine: str = ""
    #: On a GPU or TPU.
    on_device: bool = False
    #: See `Buckets`.
    padding_is_free: bool = False

    def shape(self, changes: JsonDict) -> EngineShape:
        """The engine with changed settings; its buckets stay if seats and budget do."""
        settings = EngineSection.model_validate(self.settings | changes, strict=False)
        return EngineShape.of(
            settings,
            context_length=self.context_length,
            pages=(changes.get("pages") or self.pages) + 1,
            on_device=self.on_device,
            padding_is_free=self.padding_is_free,
            buckets=self.own_buckets(settings),
        )

    def own_buckets(self, settings: EngineSection) -> Buckets | None:
        """Those it was compiled with, if these settings leave them as they are; else None."""
        own, asked = self.compiled, (settings.max_seats, settings.token_budget)
        return own if own is not None and asked == (own.seats, own.token_budget) else None

    @property
    def compiled(self) -> Buckets | None:
        """Its compiled buckets, without larger ones of drafts; None: unknown."""
        seats = EngineSection.model_validate(self.settings, strict=False).max_seats
        sizes = [size for size in self.seat_buckets if size <= seats]
        if not sizes or not self.token_buckets:
            return None
        decode = [Bucket(size, size) for size in sizes]
        mixed = [Bucket.mixed(size, max(sizes)) for size in self.token_buckets]
        return Buckets(tuple(decode), tuple(mixed), self.padding_is_free)


class BucketsJob(msgspec.Struct, frozen=True, tag="buckets"):
    """Steps to find better sizes of programs for."""

    engine: RecordedEngine
    #: A .npy file of step records.
    records: bytes

    def result(self) -> JsonDict:
        """The sizes under which these steps take the least time, with as many programs as now, and
        the shares of padding and seconds of both.
        """
        present, records = self.engine.compiled, _array(self.records)
        if present is None:
            raise ConfigError("this engine does not tell for which sizes it was compiled")
        budget = DECODE_EXECUTABLES * len(present.decode) + len(present.mixed)
        times = StepTable.from_records(records)
        proposal = SeenSteps.of(records).propose(present, budget, times)
        return msgspec.to_builtins(proposal) | {
            "steps": len(records),
            "share": proposal.share,
            "share_now": proposal.share_now,
            "seat_buckets_now": [bucket.seats for bucket in present.decode],
            "token_buckets_now": [bucket.tokens for bucket in present.mixed],
        }


class ReplayJob(msgspec.Struct, frozen=True, tag="replay"):
    """The traffic to replay, and how."""

    #: At their recorded pace.
    arrivals: list[Arrival]
    engine: RecordedEngine
    #: Settings other than the engine's own.
    changes: JsonDict
    #: To compare, by name.
    policies: list[str]
    #: A .npy file of step records to learn step times from.
    records: bytes
    #: The arrivals as they were served, open ones as far as they had come when the recording ended
    #: (see `RequestRecord.until`).
    requests: list[RequestRecord]
    #: From the first arrival to the end of the recording.
    seconds: float
    #: The steps of that time (.npy).
    window: bytes
    #: Of the engine that recorded.
    seats: int
    #: Seconds that the requests sat in seats.
    seated_s: float
    #: The policy under which that was.
    recorded: str
    #: How many times as fast the arrivals shall come.
    speed: float = 1.0
    #: Of the engine; None: no costs are worked out.
    price_per_hour: float | None = None

    @property
    def paced(self) -> list[Arrival]:
        """The arrivals as they shall come."""
        return [msgspec.structs.replace(each, at=each.at / self.speed) for each in self.arrivals]


def _main() -> int:
    """Exit status 0 with a last line {"result": ...} or {"error": ...}."""
    os.nice(_NICENESS)
    try:
        job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ReplayJob | BucketsJob)
        _send(result=job.result() if isinstance(job, BucketsJob) else _work(job))
    except JitneyError as error:
        _send(error=str(error))
    return 0


def _send(**message: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def _work(job: ReplayJob) -> JsonDict:
    """Simulate what was recorded, for the error, then each policy; reports progress."""
    table = StepTable.from_records(_array(job.records))
    clients = Recording(job.requests).clients()
    measured = _measured_figures(job)
    off = {job.recorded: _own_error(job, table, clients, measured)}
    policies = {}
    for number, policy in enumerate(job.policies, 1):
        _send(progress=number / (len(job.policies) + 1))
        policies[policy] = _predicted(job, policy, table, clients)
    return {
        "policies": policies,
        "measured": measured,
        "errors": off,
        "closed_loop": clients,
        "verdict": verdict_of({name: run["figures"] for name, run in policies.items()}, off),
    }


def _predicted(job: ReplayJob, policy: str, table: StepTable, clients: int) -> JsonDict:
    shape = job.engine.shape(job.changes | {"policy": policy})
    # Static is compared as what it is: it waits for its number, unless a timeout was asked for.
    shape = shape.under(policy, job.changes.get("static_timeout_ms") or 0.0)
    run = simulate(job.paced, shape, table, concurrency=round(clients * job.speed) or None)
    return _result_of(run, job.price_per_hour)


def _measured_figures(job: ReplayJob) -> JsonDict:
    """The figures of what was recorded; tokens of open requests count too."""
    window = _array(job.window)
    figures = summarise(
        job.requests,
        records=window,
        seats=job.seats,
        seconds=job.seconds,
        seated_s=job.seated_s,
        price_per_hour=job.price_per_hour,
    )
    return figures | _seen_until(job.requests, job.seconds) | {"itl_s": _gaps_of(window)}


def _own_error(
    job: ReplayJob, table: StepTable, clients: int, measured: JsonDict
) -> dict[str, float]:
    """`accuracy.errors` of simulating the very policy, settings and traffic that were recorded.

    Empty if too few requests ended. Both are looked at until the record ended: a request that was
    still running then has brought so many tokens and no end.
    """
    if sum(request.served for request in job.requests) < _FEWEST_ENDED:
        return {}
    shape = job.engine.shape({"policy": job.recorded})
    run = simulate(job.arrivals, shape, table, concurrency=clients or None)
    predicted = run.figures() | _seen_until(run.requests, job.seconds)
    # The figures that are known before every request has ended.
    names = ("output_tok_s", "ttft_s", "e2e_s", "itl_s")
    ours, theirs = ({name: each[name] for name in names} for each in (predicted, measured))
    return errors(ours, theirs)


def _seen_until(requests: list[RequestRecord], seconds: float) -> JsonDict:
    """Tokens and latencies as known `seconds` after the first arrival."""
    end = min(request.arrival for request in requests) + seconds
    tokens = round(sum(_delivered(request, end) for request in requests))
    begun = [request for request in requests if _first_token(request) <= end]
    ended = [request for request in requests if request.served and request.end <= end]
    return {
        "output_tokens": tokens,
        "output_tok_s": tokens / seconds if seconds > 0 else 0.0,
        "ttft_s": spread([request.ttft_s for request in begun]),
        "e2e_s": spread([request.e2e_s for request in ended]),
    }


def _first_token(request: RequestRecord) -> float:
    return math.inf if request.first_token is None else request.first_token


def _delivered(request: RequestRecord, end: float) -> float:
    """Tokens of a request by then, as if they came evenly from first to last."""
    first, last = _first_token(request), request.end
    if first > end:
        return 0.0
    if last <= max(first, end):
        return request.n_output
    return 1 + (request.n_output - 1) * (end - first) / (last - first)


def _result_of(run: EngineRun, price_per_hour: float | None) -> JsonDict:
    first = min(request.arrival for request in run.requests)
    stays = stays_of(run.requests)
    return {
        "figures": run.figures(price_per_hour=price_per_hour),
        "seats": run.shape.limits.max_seats,
        "seconds": run.seconds,
        "stays_left_out": max(0, len(stays) - _MAX_STAYS),
        "stays": _columns(stays[:_MAX_STAYS], first),
    }


def _columns(stays: list[SeatStay], first: float) -> dict[str, list[Any]]:
    """Seconds since `first`."""

    def column(field: str) -> list[float | None]:
        times = [getattr(stay, field) for _, stay in stays]
        return [None if t is None else round(t - first, 4) for t in times]

    return {
        "from": column("start"),
        "first_token": column("first_token"),
        "to": column("end"),
        "seat": [stay.seat for _, stay in stays],
        "request": [request.number for request, _ in stays],
    }


def _gaps_of(records: np.ndarray) -> dict[str, float] | None:
    """Time between tokens: of the steps, as often as they had decode rows."""
    steps = records[records["decode"] > 0]
    spans = steps["device_s"].astype(np.float64) + steps["gap_s"]
    return spread(np.repeat(spans, steps["decode"]))


def _array(file: bytes) -> np.ndarray:
    return np.load(io.BytesIO(file), allow_pickle=False)


if __name__ == "__main__":
    sys.exit(_main())
