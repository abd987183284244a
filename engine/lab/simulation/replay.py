"""Worker process of the policy lab, which replays traffic under other policies: `python -P -m
jitney.engine.lab.simulation.replay`.

It reads a `ReplayJob` and writes lines of JSON. It runs at the lowest priority, so as not to slow
down the engine on the same machine.
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
from jitney.engine.core import Bucket, Buckets, EngineShape
from jitney.engine.lab.simulation.accuracy import errors, verdict_of
from jitney.engine.lab.simulation.bucket_tuner import DECODE_EXECUTABLES, SeenSteps
from jitney.engine.lab.simulation.engine_run import EngineRun
from jitney.engine.lab.simulation.recordings import Recording
from jitney.engine.lab.simulation.simulator import simulate
from jitney.engine.lab.simulation.step_table import StepTable

_NICENESS = 15
#: Most stays in the result of one policy.
_MAX_STAYS = 20_000
#: Least ended requests for which the error of a prediction is meaningful.
_FEWEST_ENDED = 20


class RecordedEngine(msgspec.Struct, frozen=True):
    """The engine whose traffic was recorded."""

    #: [engine] of its configuration.
    settings: JsonDict
    #: Most tokens of a sequence.
    context_length: int
    #: Pages of the KV pool, without the trash page.
    pages: int
    #: Sizes that its programs were compiled for, rows; empty if unknown.
    seat_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()
    #: Name of the machine.
    machine: str = ""
    #: Whether it runs on a GPU or TPU.
    on_device: bool = False
    #: See `Buckets`.
    padding_is_free: bool = False
    most_segments: int = 1

    def shape(self, changes: JsonDict) -> EngineShape:
        """The engine with changed settings; its buckets stay if seats and budget are the same."""
        settings = EngineSection.model_validate(self.settings | changes, strict=False)
        return EngineShape.of(
            settings,
            context_length=self.context_length,
            pages=(changes.get("pages") or self.pages) + 1,
            on_device=self.on_device,
            padding_is_free=self.padding_is_free,
            most_segments=self.most_segments,
            buckets=self.own_buckets(settings),
        )

    def own_buckets(self, settings: EngineSection) -> Buckets | None:
        """Its compiled buckets if these settings have the same seats and budget; else None."""
        own, sizes = self.compiled, (settings.max_seats, settings.token_budget)
        return own if own is not None and sizes == (own.seats, own.token_budget) else None

    @property
    def compiled(self) -> Buckets | None:
        """Its compiled buckets, without larger ones of drafts; None: unknown."""
        seats = EngineSection.model_validate(self.settings, strict=False).max_seats
        sizes = [size for size in self.seat_buckets if size <= seats]
        if not sizes or not self.token_buckets:
            return None
        decode = [Bucket(size, size) for size in sizes]
        mixed = [Bucket.mixed(size, max(sizes)) for size in self.token_buckets]
        return Buckets(tuple(decode), tuple(mixed), self.padding_is_free, self.most_segments)


class BucketsJob(msgspec.Struct, frozen=True, tag="buckets"):
    """Job that finds better sizes for recorded steps."""

    engine: RecordedEngine
    #: Step records as a .npy file.
    records: bytes

    def result(self) -> JsonDict:
        """The sizes with the least time for these steps, with the present number of programs; and
        padding and seconds of present and proposed sizes.
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
    """Job that replays traffic under several policies."""

    #: Arrivals at their recorded times.
    arrivals: list[Arrival]
    engine: RecordedEngine
    #: Settings that differ from the engine's own.
    changes: JsonDict
    #: Names of the policies to compare.
    policies: list[str]
    #: Step records as a .npy file, from which step times are fitted.
    records: bytes
    #: Records of the arrivals; open requests as of the end of the recording (see
    #: `RequestRecord.until`).
    requests: list[RequestRecord]
    #: Seconds from the first arrival to the end of the recording.
    seconds: float
    #: Step records of that time as a .npy file.
    window: bytes
    #: Seats of the recorded engine.
    seats: int
    #: Sum of the seconds of all requests in seats.
    seated_s: float
    #: Policy of the recorded engine.
    recorded: str
    #: Factor by which the arrivals come faster.
    speed: float = 1.0
    #: Price of the engine; None: no costs.
    price_per_hour: float | None = None

    @property
    def paced(self) -> list[Arrival]:
        """The arrivals at the changed speed."""
        return [msgspec.structs.replace(each, at=each.at / self.speed) for each in self.arrivals]


def _main() -> int:
    """Run the job of standard input. The last line is {"result": ...} or {"error": ...}; exit
    status 0.
    """
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
    """Simulate the recorded policy for its error, then each policy; sends progress."""
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
    # Static waits for a full batch, unless the experiment sets a timeout.
    shape = shape.under(policy, job.changes.get("static_timeout_ms") or 0.0)
    run = simulate(job.paced, shape, table, concurrency=round(clients * job.speed) or None)
    return _result_of(run, job.price_per_hour)


def _measured_figures(job: ReplayJob) -> JsonDict:
    """The figures of the recording; tokens of open requests count, too."""
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
    """`accuracy.errors` of a simulation of the recorded policy, settings and traffic.

    Empty if too few requests ended. Both are compared up to the end of the recording: a request
    that is still running then counts with its tokens so far and without an end.
    """
    if sum(request.served for request in job.requests) < _FEWEST_ENDED:
        return {}
    shape = job.engine.shape({"policy": job.recorded})
    run = simulate(job.arrivals, shape, table, concurrency=clients or None)
    predicted = run.figures() | _seen_until(run.requests, job.seconds)
    # Figures that do not need the end of every request.
    names = ("output_tok_s", "ttft_s", "e2e_s", "itl_s")
    ours, theirs = ({name: each[name] for name in names} for each in (predicted, measured))
    return errors(ours, theirs)


def _seen_until(requests: list[RequestRecord], seconds: float) -> JsonDict:
    """Tokens and latencies up to `seconds` after the first arrival."""
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
    """Tokens of a request up to `end`, assuming an even rate from the first to the last."""
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
    """The stays as columns, with times in seconds since `first`."""

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
    """Spread of the time between tokens: step times, each weighted by its decode rows."""
    steps = records[records["decode"] > 0]
    spans = steps["device_s"].astype(np.float64) + steps["gap_s"]
    return spread(np.repeat(spans, steps["decode"]))


def _array(file: bytes) -> np.ndarray:
    return np.load(io.BytesIO(file), allow_pickle=False)


if __name__ == "__main__":
    sys.exit(_main())
