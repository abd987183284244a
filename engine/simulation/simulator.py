"""The engine on a virtual clock: the very same core, scheduler, policies, pages and ledger, and a
device made of time.

The device takes as long for a step as a step table says, the host as long as it was measured to;
everything else is decided by the code that runs in production. Sequences end by length. Prompts are
lengths only, so the prefix cache is off; what a recorded engine found in it (`Arrival.n_cached`) is
taken as found again, whatever the policy. The pages of such a hit are counted as the sequence's
own.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jitney.engine.config.schema import EngineSection
from jitney.engine.core import EngineCore
from jitney.engine.errors import ConfigError
from jitney.engine.records import STEP_DTYPE, Ledger
from jitney.engine.scheduler.admission import SchedulerLimits
from jitney.engine.scheduler.buckets import Buckets, make_buckets
from jitney.engine.scheduler.kv_pages import PagePool
from jitney.engine.scheduler.plan import Draft, Plan, StepResult
from jitney.engine.scheduler.scheduler import Scheduler
from jitney.engine.scheduler.sequence import Sequence
from jitney.engine.simulation.run_log import Conductor, Ride
from jitney.engine.simulation.step_table import StepTimes, kind_of
from jitney.engine.simulation.workload import Arrival
from jitney.engine.telemetry.summary import QUANTILES, RequestTimes, Slo, seated, summarise
from jitney.engine.types import EngineRequest, SamplingParams

#: No request finds anything.
NO_HITS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The engine to simulate. pages: of the KV pool, the trash page included."""

    limits: SchedulerLimits
    buckets: Buckets
    pages: int
    page_size: int = 16

    @classmethod
    def of(
        cls,
        settings: EngineSection,
        *,
        context_length: int,
        pages: int,
        on_device: bool = False,
        buckets: Buckets | None = None,
    ) -> EngineShape:
        """The engine that these settings describe; pages as in `EngineShape`, because settings may
        leave it to the machine. on_device: on a GPU or TPU. buckets: those of a running engine,
        where they are known."""
        shared = {
            f.name: getattr(settings, f.name)
            for f in fields(SchedulerLimits)
            if hasattr(settings, f.name)
        }
        if buckets is None:
            buckets = make_buckets(
                max_seats=settings.max_seats,
                token_budget=settings.token_budget,
                seat_sizes=settings.seat_buckets,
                token_sizes=settings.token_buckets,
                on_device=on_device,
            )
        return cls(
            SchedulerLimits(context_length=context_length, **shared),
            buckets,
            pages,
            settings.page_size,
        )

    def under(self, policy: str, static_timeout_ms: float | None = None) -> EngineShape:
        """The same engine under another policy; static_timeout_ms: None leaves it as it is."""
        limits = replace(self.limits, policy=policy)
        if static_timeout_ms is not None:
            limits = replace(limits, static_timeout_ms=static_timeout_ms)
        return replace(self, limits=limits)

    def new_core(self, device: VirtualDevice, hits: Mapping[str, int] = NO_HITS) -> EngineCore:
        """A core of this shape on a virtual device; hits: prompt tokens that requests find cached,
        by id.
        """
        pool = PagePool(self.pages, self.page_size, retain=False)
        if hits:
            scheduler = RecordedHits(self.limits, self.buckets, pool, device.clock)
            scheduler.hits = hits
        else:
            scheduler = Scheduler(self.limits, self.buckets, pool, device.clock)
        return EngineCore(scheduler, device, Ledger(), device.clock)


class RecordedHits(Scheduler):
    """A scheduler whose prefix cache is a list: each request finds as many tokens as it once did.

    hits: request id -> prompt tokens; requests that are not named find none.
    """

    hits: Mapping[str, int] = NO_HITS

    def _take_pages(
        self, seq: Sequence, draft: Draft, now: float, *, instead: bool = False
    ) -> bool:
        if not super()._take_pages(seq, draft, now, instead=instead):
            return False
        found = min(
            self.hits.get(seq.request.id, 0), seq.n_prompt - 1
        )  # the last token's logits are needed
        start = found - found % self.pool.page_size
        if start > seq.scheduled:
            seq.scheduled = start
            saved = max(0, start - seq.computed_high)
            seq.cached_tokens += saved
            draft.cached_tokens += saved
        return True


@dataclass(slots=True)
class Run:
    """What a simulation brought. times: in order of the arrivals. records: `ledger.STEP_DTYPE`
    [steps]. seconds: from the first arrival to the last end. gaps, gap_counts: distinct waits
    between two tokens of a request, in seconds, and how many tokens waited so long: together every
    one of them.
    """

    times: list[RequestTimes]
    records: np.ndarray
    rides: list[Ride]
    seconds: float
    seats: int
    gaps: np.ndarray
    gap_counts: np.ndarray

    def figures(
        self, slo: Slo | None = None, price_per_hour: float | None = None
    ) -> dict[str, Any]:
        """The figures of `engine.telemetry.summary.summarise`; inter-token waits are exact though
        no token's time is kept.
        """
        figures = summarise(
            self.times,
            records=self.records,
            seats=self.seats,
            seconds=self.seconds,
            seated_s=seated(self.rides),
            slo=slo,
            price_per_hour=price_per_hour,
        )
        return figures | {"itl_s": weighted_spread(self.gaps, self.gap_counts)}


@dataclass(slots=True)
class Clock:
    """Virtual seconds; the device and the loop move it."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Ticket(NamedTuple):
    """A launched step: when it will be done, and how many tokens it brings."""

    ready: float
    tokens: int


class VirtualDevice:
    """A runner whose steps take the time that a table says, one after another, while the host goes
    on.
    """

    compiles = 0

    def __init__(self, table: StepTimes, conductor: Conductor, seed: int = 0):
        self.clock, self.table, self.conductor = Clock(), table, conductor
        self._free_at = 0.0
        self._scatter = {kind: drawn(factors, seed) for kind, factors in table.noise.items()}

    def batch(self, plan: Plan) -> Plan:
        """The host has planned, and now packs and launches: all three pass here."""
        self.conductor.planned(plan, self.clock.now)
        host = self.table.host
        self.clock.now += host.before + host.before_per_row * len(plan.chunks)
        return plan

    def launch(self, batch: Plan) -> Ticket:
        seconds = self.table.seconds(batch.bucket, batch.work)
        scatter = self._scatter.get(kind_of(batch.bucket))
        if scatter is not None:
            seconds *= next(scatter)
        self._free_at = max(self.clock.now, self._free_at) + seconds
        return Ticket(self._free_at, sum([chunk.sample for chunk in batch.chunks]))

    def fetch(self, ticket: Ticket) -> StepResult:
        if ticket.ready > self.clock.now:
            self.clock.now = ticket.ready
        return StepResult([0] * ticket.tokens)

    def committed(self, rows: int) -> None:
        """The host took in a step of so many sequences."""
        host = self.table.host
        self.clock.now += host.after + host.after_per_row * rows


def drawn(factors: Series[float], seed: int) -> Iterator[float]:
    """The factors in random order, and again in another: every run has its share of the rare
    ones.
    """
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.permutation(factors).tolist()


def simulate(
    arrivals: Series[Arrival],
    engine: EngineShape,
    table: StepTimes,
    *,
    concurrency: int | None = None,
    seed: int = 0,
    keep_tokens: bool = False,
) -> Run:
    """Run the arrivals (ascending in time) through the engine, as fast as Python goes.

    concurrency: a closed loop, in which a request comes when fewer than so many are open, whatever
    its time says. seed: of the scatter of step times, if the table knows any. keep_tokens: fill
    `RequestTimes.token_times`. Requests that the engine refuses end with finish "error". Raises
    ConfigError if there is nothing to simulate.
    """
    if not arrivals:
        raise ConfigError("there is no request to simulate")
    book = Conductor(keep_tokens)
    device = VirtualDevice(table, book, seed)
    hits = {
        str(number): arrival.n_cached for number, arrival in enumerate(arrivals) if arrival.n_cached
    }
    core = engine.new_core(device, hits)
    with no_collection():
        records = drive(core, device, book, arrivals, concurrency)
    core.check()
    end = max(times.finished for times in book.times)
    return Run(
        book.times,
        np.frombuffer(b"".join(records), STEP_DTYPE),
        [Ride(*ride) for ride in book.rides],
        end - min(times.arrival for times in book.times),
        engine.limits.max_seats,
        np.array(book.gaps),
        np.array(book.gap_counts, np.int64),
    )


def drive(
    core: EngineCore,
    device: VirtualDevice,
    book: Conductor,
    arrivals: Series[Arrival],
    concurrency: int | None,
) -> list[bytes]:
    """The loop of the core's process: take in who has come, step, hand out; returns the step
    records.
    """
    clock, records, limit = device.clock, [], concurrency or len(arrivals)
    clock.now = arrivals[0].at
    coming, total = 0, len(arrivals)
    while coming < total or core.has_work:
        while coming < total and (
            book.n_open < limit if concurrency else arrivals[coming].at <= clock.now
        ):
            arrival = arrivals[coming]
            at = clock.now if concurrency else arrival.at
            core.add(request_of(book.enter(coming, arrival, at), arrival, at))
            coming += 1
        core.scheduler.more_to_come = not concurrency and coming < total
        if not core.has_work:
            clock.now = arrivals[coming].at
            continue
        if (pause := core.pause_s) > 0:
            wakes = math.nextafter(
                clock.now + pause, math.inf
            )  # rounding must not leave it short of the time
            clock.now = (
                min(wakes, arrivals[coming].at) if coming < total and not concurrency else wakes
            )
            continue
        report = core.step()
        if report.record:
            records.append(report.record)
            device.committed(len(report.outputs))
        if report.outputs:
            book.took(report.outputs, clock.now)
    return records


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside: a run makes millions of objects that live on and no cycle (a
    tenth of the time).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def request_of(name: str, arrival: Arrival, at: float) -> EngineRequest:
    """A request of the arrival's lengths that ends by length alone."""
    sampling = SamplingParams(
        temperature=0.0, seed=0, max_tokens=max(1, arrival.n_output), ignore_eos=True
    )
    return EngineRequest(
        id=name,
        prompt=[0] * arrival.n_prompt,
        sampling=sampling,
        arrival=at,
        tenant=arrival.tenant,
        priority=arrival.priority,
    )


def weighted_spread(values: np.ndarray, counts: np.ndarray) -> dict[str, float] | None:
    """Percentiles (linear between neighbours, as numpy's), mean and most of values [n] that stand
    counts [n] times.
    """
    if not len(values):
        return None
    order = np.argsort(values)
    values, counts = values[order], counts[order]
    ends = np.cumsum(counts)
    at = (ends[-1] - 1) * np.array(list(QUANTILES.values())) / 100
    low, high = (
        values[np.searchsorted(ends, np.minimum(rank, ends[-1] - 1), side="right")]
        for rank in (np.floor(at), np.floor(at) + 1)
    )
    points = low + (high - low) * (at - np.floor(at))
    return dict(zip(QUANTILES, points.tolist(), strict=True)) | {
        "mean": float(np.average(values, weights=counts)),
        "max": float(values[-1]),
    }
