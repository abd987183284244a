"""The engine on a virtual clock: the very same core, scheduler, policies, pages and ledger, and a
device made of time.

The device takes as long for a step as a step table says, the host as long as it was measured to;
everything else is decided by the code that runs in production. Sequences end by length. Drafts of
an engine that speculates are right by chance (`EngineShape.acceptance`). Prompts are lengths only,
so the prefix cache is off; what a recorded engine found in it (`Arrival.n_cached`) is taken as
found again, whatever the policy. The pages of such a hit are counted as the sequence's own.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.history import RequestRecords
from jitney.engine.common.messages import StepReport
from jitney.engine.common.records import Ledger
from jitney.engine.common.requests import EngineRequest
from jitney.engine.common.trace import Arrival
from jitney.engine.core import (
    EngineCore,
    MaskedRow,
    PagePool,
    PageTables,
    Plan,
    Sequence,
    StateTables,
    StepResult,
    StepWork,
)
from jitney.engine.lab.simulation.drive import Offer, drive
from jitney.engine.lab.simulation.engine_run import EngineRun
from jitney.engine.lab.simulation.engine_shape import EngineShape
from jitney.engine.lab.simulation.step_table import StepTimes

#: No request finds anything.
_NO_HITS: Mapping[str, int] = MappingProxyType({})


class _RecordedHits(PageTables):
    """Pages with a list for a prefix cache: each request finds as many tokens as it once did.

    hits: request id -> prompt tokens; requests that are not named find none.
    """

    def __init__(
        self,
        pool: PagePool,
        window: int,
        windows: Mapping[int, PagePool],
        state: StateTables | None,
        hits: Mapping[str, int],
    ):
        super().__init__(pool, window, windows, state)
        self.hits = hits

    def take(self, seq: Sequence, n_seated: int, lasts: Callable[[int], bool]) -> int | None:
        found = super().take(seq, n_seated, lasts)
        if found is None:
            return None
        # The last token's logits are needed.
        hit = min(self.hits.get(seq.request.id, 0), seq.n_prompt - 1)
        start = hit - hit % self.pool.page_size
        if start > seq.scheduled:
            self.skip(seq, start)
            saved = max(0, start - seq.computed_high)
            seq.cached_tokens += saved
            found += saved
        return found


class _FlyingStep(NamedTuple):
    #: Virtual seconds.
    ready: float
    result: StepResult


@dataclass(slots=True)
class _VirtualClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def wait_until(self, t: float) -> None:
        self.now = t


class VirtualDevice:
    """A runner whose steps take the time of a table, one after another, beside the host."""

    compiles = 0

    def __init__(self, table: StepTimes, seed: int = 0):
        self.clock = _VirtualClock()
        self.table = table
        self._free_at = 0.0
        #: How likely a draft is right, and what draws it; 0: none are made.
        self._acceptance = 0.0
        self._chance = random.Random(seed)
        self._scatter = {kind: _drawn(factors, seed) for kind, factors in table.noise.items()}

    def new_core(
        self, shape: EngineShape, hits: Mapping[str, int] = _NO_HITS, *, retain: bool = False
    ) -> EngineCore:
        """A core of this shape on it. hits: prompt tokens that requests find cached, by id; retain:
        prompts find the pages of earlier ones that begin alike.
        """
        tables = partial(_RecordedHits, hits=hits) if hits else PageTables
        scheduler = shape.new_scheduler(self.clock, retain=retain, tables=tables)
        late, self._acceptance = shape.plans_late, shape.acceptance
        return EngineCore(scheduler, self, Ledger(), self.clock, plans_late=late)

    def batch(self, plan: Plan) -> Plan:
        """The host has planned, and now packs and launches: all three pass here."""
        host = self.table.host
        self.clock.now += host.before + host.before_per_row * len(plan.chunks)
        return plan

    def launch(self, batch: Plan) -> _FlyingStep:
        seconds = self.table.seconds(batch.bucket, batch.work)
        if self._acceptance:
            seconds += self._draft_seconds(batch)
        scatter = self._scatter.get(batch.bucket.kind)
        if scatter is not None:
            seconds *= next(scatter)
        self._free_at = max(self.clock.now, self._free_at) + seconds
        return _FlyingStep(self._free_at, self._result(batch))

    def _draft_seconds(self, plan: Plan) -> float:
        rows = [chunk for chunk in plan.chunks if chunk.draft]
        firsts = [chunk.start for chunk in rows if chunk.draft == 1]
        most = max((chunk.draft for chunk in rows), default=0)
        return self.table.draft_seconds(StepWork(decode=len(firsts), keys=sum(firsts)), most)

    def _result(self, plan: Plan) -> StepResult:
        if self._acceptance:
            return StepResult.drawn(plan, lambda: self._chance.random() < self._acceptance)
        return StepResult([0] * sum([chunk.sample for chunk in plan.chunks]))

    def learn_drafts(self, launched: _FlyingStep) -> None:
        """See `choose`."""

    def choose(self, launched: _FlyingStep, rows: list[MaskedRow], masks: object) -> None:
        """Simulated answers have no text, so none is held to a grammar."""
        raise ValueError("a simulated request has a grammar")

    def fetch(self, launched: _FlyingStep) -> StepResult:
        if launched.ready > self.clock.now:
            self.clock.now = launched.ready
        return launched.result

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
    """The factors in random order, again and again, so that each run has the rare ones."""
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
) -> EngineRun:
    """Run the arrivals (ascending in time) through the engine, as fast as Python goes.

    concurrency: a closed loop, in which a request comes when fewer than so many are open, whatever
    its time says. seed: of the scatter of step times, if the table knows any. Requests that the
    engine refuses end with finish "error". Raises ConfigError if there is nothing to simulate.
    """
    if not arrivals:
        raise ConfigError("there is no request to simulate")
    history = RequestRecords(keep_times=True)
    device = VirtualDevice(table, seed)
    device.clock.now = started = arrivals[0].at
    core = device.new_core(engine, _hits_of(arrivals))
    offer = Offer(
        [arrival.at for arrival in arrivals], partial(_request_at, arrivals), concurrency or 0
    )
    with no_collection():
        log = drive(core, device.clock, offer, history, device.reported)
    core.check()
    return EngineRun(list(history.oldest()), log.records, engine, started, concurrency or 0)


def predict(
    run: EngineRun, table: StepTimes, *, concurrency: int | None = None, seed: int = 0
) -> EngineRun:
    """The requests of a run on its own engine, simulated; concurrency: None takes the run's own."""
    n_open = run.concurrency if concurrency is None else concurrency
    return simulate(run.arrivals, run.shape, table, concurrency=n_open or None, seed=seed)


def _hits_of(arrivals: Series[Arrival]) -> dict[str, int]:
    """Request id -> prompt tokens that were found cached, of those that found any."""
    hits = {str(number): arrival.n_cached for number, arrival in enumerate(arrivals)}
    return {name: n_cached for name, n_cached in hits.items() if n_cached}


def _request_at(arrivals: Series[Arrival], number: int, at: float) -> EngineRequest:
    arrival = arrivals[number]
    return arrival.request(str(number), [0] * arrival.n_prompt, at)


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
