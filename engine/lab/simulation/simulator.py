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
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.history import RequestRecords
from jitney.engine.common.messages import StepReport
from jitney.engine.common.records import Ledger
from jitney.engine.common.request_record import RequestRecord, SeatStay, stays_of
from jitney.engine.common.requests import EngineRequest, JsonDict
from jitney.engine.common.summary import QUANTILES, summarise
from jitney.engine.common.trace import Arrival
from jitney.engine.core import (
    Draft,
    EngineCore,
    MaskedRow,
    PagePool,
    Plan,
    Scheduler,
    Sequence,
    StepResult,
)
from jitney.engine.lab.simulation.drive import Offer, StepLog, drive
from jitney.engine.lab.simulation.engine_shape import EngineShape
from jitney.engine.lab.simulation.step_table import StepTimes

#: No request finds anything.
_NO_HITS: Mapping[str, int] = MappingProxyType({})


class _RecordedHits(Scheduler):
    """A scheduler whose prefix cache is a list: each request finds as many tokens as it once did.

    hits: request id -> prompt tokens; requests that are not named find none.
    """

    hits: Mapping[str, int] = _NO_HITS

    def _take_pages(
        self, seq: Sequence, draft: Draft, now: float, *, instead: bool = False
    ) -> bool:
        if not super()._take_pages(seq, draft, now, instead=instead):
            return False
        # The last token's logits are needed.
        found = min(self.hits.get(seq.request.id, 0), seq.n_prompt - 1)
        start = found - found % self.pool.page_size
        if start > seq.scheduled:
            seq.scheduled = start
            saved = max(0, start - seq.computed_high)
            seq.cached_tokens += saved
            draft.cached_tokens += saved
        return True


@dataclass(slots=True)
class SimulatedRun:
    """What a simulation brought."""

    #: In order of the arrivals; virtual seconds.
    requests: list[RequestRecord]
    #: [steps] STEP_DTYPE.
    records: np.ndarray
    #: From the first arrival to the last end.
    seconds: float
    #: Of the engine.
    seats: int
    #: Every wait between two tokens of a request, see `_token_waits`.
    gaps: np.ndarray
    #: How often each came.
    gap_counts: np.ndarray

    @property
    def stays(self) -> list[SeatStay]:
        """Who sat where, by the beginning of each stay."""
        return stays_of(self.requests)

    def figures(self, **options: Any) -> JsonDict:
        """The figures of `summary.summarise`, with its slo and price_per_hour as options;
        inter-token waits are exact though no token's time is kept.
        """
        return summarise(
            self.requests,
            records=self.records,
            seats=self.seats,
            seconds=self.seconds,
            **options,
        ) | {"itl_s": weighted_spread(self.gaps, self.gap_counts)}


class _FlyingStep(NamedTuple):
    """A launched step: when it will be done, and how many tokens it brings."""

    #: Virtual seconds.
    ready: float
    tokens: int


@dataclass(slots=True)
class _VirtualClock:
    """Seconds that pass when somebody moves them."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def wait_until(self, t: float) -> None:
        self.now = t


class VirtualDevice:
    """A runner whose steps take the time that a table says, one after another, while the host goes
    on.
    """

    compiles = 0

    def __init__(self, table: StepTimes, seed: int = 0):
        self.clock = _VirtualClock()
        self.table = table
        self._free_at = 0.0
        self._scatter = {kind: _drawn(factors, seed) for kind, factors in table.noise.items()}

    def new_core(self, shape: EngineShape, hits: Mapping[str, int] = _NO_HITS) -> EngineCore:
        """A core of this shape on it; hits: prompt tokens that requests find cached, by id."""
        pool = PagePool(shape.pages, shape.page_size, retain=False)
        kind = _RecordedHits if hits else Scheduler
        scheduler = kind(shape.limits, shape.buckets, pool, self.clock)
        if isinstance(scheduler, _RecordedHits):
            scheduler.hits = hits
        late = shape.plans_late
        return EngineCore(scheduler, self, Ledger(), self.clock, plans_late=late)

    def batch(self, plan: Plan) -> Plan:
        """The host has planned, and now packs and launches: all three pass here."""
        host = self.table.host
        self.clock.now += host.before + host.before_per_row * len(plan.chunks)
        return plan

    def launch(self, batch: Plan) -> _FlyingStep:
        seconds = self.table.seconds(batch.bucket, batch.work)
        scatter = self._scatter.get(batch.bucket.kind)
        if scatter is not None:
            seconds *= next(scatter)
        self._free_at = max(self.clock.now, self._free_at) + seconds
        return _FlyingStep(self._free_at, sum([chunk.sample for chunk in batch.chunks]))

    def choose(self, launched: _FlyingStep, rows: list[MaskedRow], masks: object) -> None:
        """Simulated answers have no text, so none is held to a grammar."""
        raise ValueError("a simulated request has a grammar")

    def fetch(self, launched: _FlyingStep) -> StepResult:
        if launched.ready > self.clock.now:
            self.clock.now = launched.ready
        return StepResult([0] * launched.tokens)

    def restore(self, error: Exception) -> None:
        """A simulated device does not fail: the simulator is wrong."""
        raise error

    def sleep(self, alive: Callable[[], None]) -> int:
        """There is no memory to free."""
        return 0

    def wake(self, alive: Callable[[], None]) -> None:
        """There is none to take."""

    def reported(self, report: StepReport) -> None:
        """The host took in a step."""
        if report.record:
            host = self.table.host
            self.clock.now += host.after + host.after_per_row * len(report.outputs)


def _drawn(factors: Series[float], seed: int) -> Iterator[float]:
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
    keep_times: bool = False,
) -> SimulatedRun:
    """Run the arrivals (ascending in time) through the engine, as fast as Python goes.

    concurrency: a closed loop, in which a request comes when fewer than so many are open, whatever
    its time says. seed: of the scatter of step times, if the table knows any. keep_times: fill
    `RequestRecord.token_times`. Requests that the engine refuses end with finish "error". Raises
    ConfigError if there is nothing to simulate.
    """
    if not arrivals:
        raise ConfigError("there is no request to simulate")
    history = RequestRecords(keep_times=keep_times)
    device = VirtualDevice(table, seed)
    device.clock.now = arrivals[0].at
    core = device.new_core(engine, _hits_of(arrivals))
    offer = _offer_of(arrivals, concurrency or 0)
    with _no_collection():
        log = drive(core, device.clock, offer, history, device.reported)
    core.check()
    return _run_of(list(history.oldest()), log, engine.limits.max_seats)


def _run_of(requests: list[RequestRecord], log: StepLog, seats: int) -> SimulatedRun:
    records = log.records
    gaps, gap_counts = _token_waits(requests, records, np.array(log.done))
    return SimulatedRun(requests, records, span(requests), seats, gaps, gap_counts)


def _token_waits(
    requests: Series[RequestRecord], records: np.ndarray, done: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(waits between two tokens of a request, s; how many tokens waited so long), all of them.

    records: of the run's steps, in order [steps] STEP_DTYPE; done: when each handed out its tokens
    [steps] f8. From its first token on every step with decode rows brings a stay one, so the waits
    are those between such steps; before that who lost its seat waits from one stay to the next.
    """
    first, last, follows = _stay_steps(requests)
    began, ended = np.searchsorted(records["step"], first), np.searchsorted(records["step"], last)
    decodes = np.flatnonzero(records["decode"])
    # Of those steps the one with a stay's second token, and the one behind its last.
    second = np.searchsorted(decodes, began, side="right")
    behind = np.searchsorted(decodes, ended, side="right")
    goes_on = second < behind
    to_second = done[decodes[second[goes_on]]] - done[began[goes_on]]
    more = np.bincount(second[goes_on] + 1, minlength=len(decodes) + 2)
    fewer = np.bincount(behind[goes_on], minlength=len(decodes) + 2)
    counts = np.cumsum(more - fewer)[1 : len(decodes)]
    waited = counts > 0
    latest = began.copy()
    latest[goes_on] = decodes[behind[goes_on] - 1]
    between_stays = done[began[1:][follows]] - done[latest[:-1][follows]]
    alone = np.concatenate((to_second, between_stays))
    waits = np.concatenate((np.diff(done[decodes])[waited], alone))
    return waits, np.concatenate((counts[waited], np.ones(len(alone), np.int64)))


def _stay_steps(requests: Series[RequestRecord]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps of the first [n] i8 and last [n] i8 token of each stay that brought one; and whether
    each but the first stay [n - 1] bool is of the same request as the one before it.
    """
    first, last, owner = [], [], []
    for number, request in enumerate(requests):
        for stay in request.stays:
            if stay.first_step >= 0:
                first.append(stay.first_step)
                last.append(stay.last_step)
                owner.append(number)
    return np.array(first, np.int64), np.array(last, np.int64), np.diff(owner) == 0


def span(requests: Series[RequestRecord]) -> float:
    """Seconds from the first arrival to the last end."""
    first = min(request.arrival for request in requests)
    return max(request.end for request in requests) - first


def _hits_of(arrivals: Series[Arrival]) -> dict[str, int]:
    """Request id -> prompt tokens that were found cached, of those that found any."""
    hits = {str(number): arrival.n_cached for number, arrival in enumerate(arrivals)}
    return {name: n_cached for name, n_cached in hits.items() if n_cached}


def _offer_of(arrivals: Series[Arrival], concurrency: int) -> Offer:
    """The arrivals with prompts of zeros."""
    times = [arrival.at for arrival in arrivals]
    return Offer(times, partial(_request_at, arrivals), concurrency)


def _request_at(arrivals: Series[Arrival], number: int, at: float) -> EngineRequest:
    arrival = arrivals[number]
    return arrival.request(str(number), [0] * arrival.n_prompt, at)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
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


def weighted_spread(values: np.ndarray, counts: np.ndarray) -> dict[str, float] | None:
    """Percentiles (linear between neighbours, as numpy's), mean, most and number of values [n] that
    stand counts [n] times.
    """
    if not len(values):
        return None
    order = np.argsort(values)
    values, counts = values[order], counts[order]
    points = _weighted_percentiles(values, counts, list(QUANTILES.values()))
    figures = dict(zip(QUANTILES, points.tolist(), strict=True))
    figures["mean"] = float(np.average(values, weights=counts))
    figures["max"] = float(values[-1])
    figures["n"] = int(counts.sum())
    return figures


def _weighted_percentiles(
    values: np.ndarray, counts: np.ndarray, percents: Series[float]
) -> np.ndarray:
    """values: ascending."""
    ends = np.cumsum(counts)
    most = ends[-1] - 1
    rank = most * np.array(percents) / 100
    whole = np.floor(rank)
    low = values[np.searchsorted(ends, np.minimum(whole, most), side="right")]
    high = values[np.searchsorted(ends, np.minimum(whole + 1, most), side="right")]
    return low + (high - low) * (rank - whole)
