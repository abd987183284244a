"""The engine on a virtual clock: its own core, scheduler, policies, pages and ledger, with a device
that only takes time.

Sequences end by length. Drafts are accepted at random (`EngineShape.acceptance`). Prompts are only
lengths, so recorded hits stand for the prefix cache; the pages of such a hit count as the
sequence's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

import msgspec
import numpy as np

from jitney.engine.common.messages import StepReport
from jitney.engine.common.records import Ledger
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.measuring.engine_shape import EngineShape
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.page_tables import PageTables
from jitney.engine.core.scheduler.plan import MaskedRow, Plan, StepResult, StepWork
from jitney.engine.core.scheduler.sequence import Sequence
from jitney.engine.core.scheduler.state_slots import StateTables


class HostTimes(msgspec.Struct, frozen=True):
    """Seconds of the host for a step of r sequences: `before` its launch (plan, batch, launch) and
    `after` its result (commit), each fixed + r * per_row."""

    before: float = 0.0
    before_per_row: float = 0.0
    after: float = 0.0
    after_per_row: float = 0.0


class StepTimes(Protocol):
    """A source of step times."""

    @property
    def source(self) -> str:
        """One line with the origin of the numbers."""
        ...

    @property
    def host(self) -> HostTimes: ...
    @property
    def noise(self) -> dict[str, list[float]]:
        """Kind -> equally likely factors measured / expected, mean 1; absent: no scatter."""
        ...

    def seconds(self, bucket: Bucket, work: StepWork) -> float:
        """Expected device seconds of a step."""
        ...

    def draft_seconds(self, work: StepWork, drafts: int) -> float:
        """Expected device seconds for drafts after the first, see `Roofline.draft_seconds`."""
        ...


#: Hits of a run in which no request finds cached tokens.
_NO_HITS: Mapping[str, int] = MappingProxyType({})


class _RecordedHits(PageTables):
    """Page tables with recorded hits of a prefix cache.

    hits: request id -> cached prompt tokens; other requests find none.
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
        cached = super().take(seq, n_seated, lasts)
        if cached is None:
            return None
        # The last prompt token is always computed, since its logits are needed.
        hit = min(self.hits.get(seq.request.id, 0), seq.n_prompt - 1)
        start = hit - hit % self.pool.page_size
        if start > seq.scheduled:
            self.skip(seq, start)
            saved = max(0, start - seq.computed_high)
            seq.cached_tokens += saved
            cached += saved
        return cached


@dataclass(slots=True)
class _FlyingStep:
    #: Virtual time at which it is done, seconds.
    ready: float
    result: StepResult
    #: Seconds of a segment, and the number of segments that are not launched.
    segment_s: float
    n_left: int

    @property
    def paused_at(self) -> float:
        """Time at which all launched segments are done."""
        return self.ready - self.n_left * self.segment_s


@dataclass(slots=True)
class _VirtualClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def wait_until(self, t: float) -> None:
        self.now = t


class VirtualDevice:
    """A runner whose steps take the times of a table, one after another, parallel to the host."""

    compiles = 0

    def __init__(self, table: StepTimes, seed: int = 0):
        self.clock = _VirtualClock()
        self.table = table
        self._free_at = 0.0
        self._buckets: Buckets | None = None
        # The newest step that was launched in segments.
        self._cut: _FlyingStep | None = None
        #: Probability that a draft is accepted (0: no drafts), and its random generator.
        self._acceptance = 0.0
        self._chance = random.Random(seed)
        self._scatter = {kind: _drawn(factors, seed) for kind, factors in table.noise.items()}

    def new_core(
        self, shape: EngineShape, hits: Mapping[str, int] = _NO_HITS, *, retain: bool = False
    ) -> EngineCore:
        """A core of this shape on this device. hits: request id -> cached prompt tokens. retain:
        with a prefix cache.
        """
        tables = partial(_RecordedHits, hits=hits) if hits else PageTables
        scheduler = shape.new_scheduler(self.clock, retain=retain, tables=tables)
        late, self._acceptance = shape.plans_late, shape.acceptance
        self._buckets = shape.buckets
        return EngineCore(scheduler, self, Ledger(), self.clock, plans_late=late)

    def batch(self, plan: Plan) -> Plan:
        """Add the host's time to plan, pack and launch the step."""
        host = self.table.host
        self.clock.now += host.before + host.before_per_row * len(plan.chunks)
        return plan

    def launch(self, batch: Plan) -> _FlyingStep:
        """Launch a whole step, after the launched segments of one that has paused."""
        seconds = self._seconds(batch)
        cut = self._cut
        if cut is None or not cut.n_left:
            self._free_at = max(self.clock.now, self._free_at) + seconds
            return _FlyingStep(self._free_at, self._result(batch), seconds, 0)
        ready = max(self.clock.now, cut.paused_at) + seconds
        cut.ready += ready - cut.paused_at
        self._free_at = cut.ready
        return _FlyingStep(ready, self._result(batch), seconds, 0)

    def start(self, batch: Plan) -> _FlyingStep:
        """Launch the first segment of a step."""
        assert self._buckets is not None  # `new_core` sets them
        self._cut = step = self.launch(batch)
        # A measured time may be 0; such a step has no time between segments.
        segments = self._buckets.segments(batch.bucket) if step.segment_s else 1
        step.segment_s, step.n_left = step.segment_s / segments, segments - 1
        return step

    def _seconds(self, batch: Plan) -> float:
        """The device's seconds for a step."""
        seconds = self.table.seconds(batch.bucket, batch.work)
        if self._acceptance:
            seconds += self._draft_seconds(batch)
        scatter = self._scatter.get(batch.bucket.kind)
        if scatter is not None:
            seconds *= next(scatter)
        return seconds

    def feed(self, launched: _FlyingStep) -> bool:
        """Launch segments until one waits behind the running one."""
        if not launched.n_left:
            return False
        self._go_on(launched)
        waiting = int((launched.ready - self.clock.now) / launched.segment_s)
        launched.n_left = max(0, min(launched.n_left, waiting - 1))
        return launched.n_left > 0

    def has_paused(self, launched: _FlyingStep) -> bool:
        """Whether the time of the launched segments is over, while others are left."""
        return launched.n_left > 0 and launched.paused_at <= self.clock.now

    def finish(self, launched: _FlyingStep) -> None:
        """Launch all segments that are left."""
        self._go_on(launched)
        launched.n_left = 0

    def _go_on(self, launched: _FlyingStep) -> None:
        """Delay a step with segments left by the time that the device has had none to run."""
        idle = self.clock.now - launched.paused_at
        if launched.n_left and idle > 0:
            launched.ready += idle
            self._free_at += idle

    def _draft_seconds(self, plan: Plan) -> float:
        rows = [chunk for chunk in plan.chunks if chunk.draft]
        firsts = [chunk.start for chunk in rows if chunk.draft == 1]
        most = max((chunk.draft for chunk in rows), default=0)
        return self.table.draft_seconds(StepWork(decode=len(firsts), keys=sum(firsts)), most)

    def _result(self, plan: Plan) -> StepResult:
        if self._acceptance:
            return StepResult.drawn(plan, lambda: self._chance.random() < self._acceptance)
        return StepResult([0] * sum([chunk.sample for chunk in plan.chunks]))

    def is_done(self, launched: _FlyingStep) -> bool:
        """Whether the step's time is over."""
        return launched.ready <= self.clock.now

    def learn_drafts(self, launched: _FlyingStep) -> None:
        """See `choose`."""

    def choose(self, launched: _FlyingStep, rows: list[MaskedRow], masks: object) -> None:
        """Refuse masks: simulated answers have no text, so they have no grammar."""
        raise ValueError("a simulated request has a grammar")

    def fetch(self, launched: _FlyingStep) -> StepResult:
        self.finish(launched)
        if launched.ready > self.clock.now:
            self.clock.now = launched.ready
        return launched.result

    def restore(self, error: Exception) -> None:
        """Raise the error: a simulated device does not fail, so the simulator has a bug."""
        raise error

    def sleep(self, alive: Callable[[], None]) -> int:
        """Free no memory, since there is none."""
        return 0

    def wake(self, alive: Callable[[], None]) -> None:
        """Do nothing: there is no memory to allocate."""

    def reported(self, report: StepReport) -> None:
        """Add the host's time after a step."""
        if report.record:
            host = self.table.host
            self.clock.now += host.after + host.after_per_row * len(report.outputs)


def _drawn(factors: Series[float], seed: int) -> Iterator[float]:
    """The factors in random order, repeated for ever, so that each run has the rare ones."""
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.permutation(factors).tolist()
