"""Splits the time to the first token into its parts, in a closed loop of streams: the engine's own
scheduler on a virtual clock, with measured step times.

    jitney bench step MODEL --json steps.json      # the step times of a machine
    python docs/benchmarks/first_token.py [--steps steps.json] [--streams 32] [--json FILE]

The requests are those of `jitney bench peers`; a client sends its next one `--client-ms` after the
last token of the one before, as over HTTP. Without `--steps` the times are those of a CPU of two
Zen 5 cores and SmolLM2-135M in bfloat16, with and without products of the rows that pad a step. The
first request of each stream is left out of the parts, since all streams start at once.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from jitney.engine.common.history import RequestRecords
from jitney.engine.common.records import RecordRing
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.requests import EngineRequest
from jitney.engine.common.trace import Arrival
from jitney.engine.config.schema import AUTO, Share
from jitney.engine.core.measuring.engine_shape import EngineShape
from jitney.engine.core.measuring.virtual import HostTimes, VirtualDevice
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.lab.bench.peers import OUTPUTS, PROMPTS
from jitney.engine.lab.simulation.drive import Offer, StepLog, drive
from jitney.engine.lab.simulation.step_table import Curve, StepTable
from jitney.engine.lab.simulation.workload import Closed, synthesise

#: Milliseconds of a step by the rows of its bucket, without prompt rows and with, measured on a
#: quiet machine, 2026-11-25; each query-key pair takes 20 ns, each key of a decode row 0.2 us.
DECODE_MS = {1: 8, 4: 9.5, 8: 10.5, 16: 13, 32: 17}
MIXED_MS = {64: 26, 128: 43, 256: 84, 512: 160}
#: The same for a step with prompts beside 31 others where padding costs nothing: without a prompt
#: row, and the addition of each prompt row.
BESIDE_MS, ROW_MS = 19, 0.29
HOST = HostTimes(before=0.0004, after=0.0003)
SEATS, TOKEN_BUDGET = 32, 512
#: (label, prefill share, whether the next step is planned late).
VARIANTS: tuple[tuple[str, Share, bool], ...] = (
    ("a quarter, planned at once", 0.25, False),
    ("auto, planned at once", AUTO, False),
    ("auto, planned late", AUTO, True),
    ("all, planned late", 1.0, True),
)
PARTS = ("until_planned", "behind_a_step", "own_steps")


def zen5(*, free: bool) -> StepTable:
    """The step times above; free: padding costs nothing."""
    decode = [Curve(rows, rows, ms / 1000, per_key=2e-7) for rows, ms in DECODE_MS.items()]
    if free:
        beside, row = BESIDE_MS / 1000, ROW_MS / 1000
        mixed = [
            Curve(rows, SEATS, beside, per_prompt=row, per_pair=2e-8, points=1) for rows in MIXED_MS
        ]
        return StepTable(decode + mixed, host=HOST, source="Zen 5, 2 cores, padding is free")
    mixed = [Curve(rows, SEATS, ms / 1000, per_pair=2e-8) for rows, ms in MIXED_MS.items()]
    return StepTable(decode + mixed, host=HOST, source="Zen 5, 2 cores")


def tables(args: argparse.Namespace) -> Iterator[StepTable]:
    """The step tables to simulate."""
    if args.steps:
        yield StepTable.load(args.steps)
    else:
        yield zen5(free=False)
        yield zen5(free=True)


@dataclass
class Clients(Offer):
    """Streams that send their next request some time after their last answer."""

    arrivals: list[Arrival]
    requests: RequestRecords
    streams: int
    #: Seconds between an answer's end and the next request.
    thinks_s: float
    _sent: int = field(default=0, init=False)

    @property
    def empty(self) -> bool:
        return self._sent == len(self.arrivals)

    @property
    def next_at(self) -> float:
        if self.empty:
            return math.inf
        answers_before = self._sent - self.streams
        if answers_before < 0:
            return 0.0
        ends = sorted(record.end for record in self.requests.oldest())
        return ends[answers_before] + self.thinks_s

    def due(self, now: float, n_open: int) -> bool:
        return self.next_at <= now

    def take(self, now: float) -> EngineRequest:
        at, arrival = self.next_at, self.arrivals[self._sent]
        self._sent += 1
        return arrival.request(str(self._sent), [0] * arrival.n_prompt, at)


def run(
    arrivals: list[Arrival], table: StepTable, share: Share, late: bool, args: argparse.Namespace
) -> tuple[list[RequestRecord], StepLog]:
    """Serve all requests on the virtual clock."""
    limits = SchedulerLimits(SEATS, 8192, prefill_share=share)
    sizes = Buckets.of(max_seats=SEATS, token_budget=TOKEN_BUDGET)
    buckets = replace(sizes, padding_is_free=table.padding_is_free)
    device = VirtualDevice(table, args.seed)
    core = device.new_core(EngineShape(limits, buckets, 4097, plans_late=late))
    requests = RequestRecords(keep_times=True)
    clients = Clients(arrivals, requests, args.streams, args.client_ms / 1000)
    log = drive(core, device.clock, clients, requests, device.reported)
    return list(requests.oldest()), log


def steps_of(log: StepLog) -> tuple[np.ndarray, np.ndarray]:
    """(records, ready) of all steps; ready: seconds at which the device finished each."""
    ring = RecordRing(len(log.packed))
    for record in log.packed:
        ring.add(record)
    return ring.steps(-1, log.last_step)


def parts_of(request: RequestRecord, records: np.ndarray, ready: np.ndarray) -> list[float]:
    """Seconds of each of PARTS: until a step with the request's first rows is planned, until the
    device begins that step, and until the first token."""
    stay = request.stays[0]
    at = int(np.searchsorted(records["step"], stay.step))
    planned = float(records["started"][at])
    began = float(ready[at]) - float(records["device_s"][at])
    assert request.first_token is not None
    return [planned - request.arrival, began - planned, request.first_token - began]


def figures(requests: list[RequestRecord], log: StepLog, streams: int) -> dict[str, float]:
    """Figures in milliseconds, and in tokens a second."""
    waits = 1e3 * np.array([(r.first_token or math.nan) - r.arrival for r in requests])
    gaps = 1e3 * np.concatenate([np.diff(r.token_times or []) for r in requests])
    later = requests[streams:]
    timed = steps_of(log)
    parts = 1e3 * np.mean([parts_of(request, *timed) for request in later], axis=0)
    steps = [r.stays[0].first_step - r.stays[0].step + 1 for r in later]
    seconds = max(request.end for request in requests)
    return {
        "first_token_p50": float(np.percentile(waits, 50)),
        "first_token_p99": float(np.percentile(waits, 99)),
        **dict(zip(PARTS, parts.tolist(), strict=True)),
        "steps": float(np.mean(steps)),
        "between_tokens_p50": float(np.percentile(gaps, 50)),
        "between_tokens_p99": float(np.percentile(gaps, 99)),
        "output_tok_s": sum(r.n_output for r in requests) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--steps", type=Path, help="a table that `jitney bench step` has written")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--client-ms", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    arrivals = synthesise(args.requests, PROMPTS, OUTPUTS, Closed(), args.seed)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for table in tables(args):
        own = results[table.source] = {}
        for name, share, late in VARIANTS:
            own[name] = figures(*run(arrivals, table, share, late, args), args.streams)
        show(own, f"{args.streams} streams, ms; {table.source}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


def show(found: dict[str, dict[str, float]], title: str) -> None:
    """A row for each variant."""
    shown = Table(title=title)
    for head in ("", *next(iter(found.values()))):
        shown.add_column(head.replace("_", " "), justify="right" if head else "left")
    for name, values in found.items():
        shown.add_row(name, *[f"{value:,.1f}" for value in values.values()])
    Console(width=160).print(shown)


if __name__ == "__main__":
    main()
