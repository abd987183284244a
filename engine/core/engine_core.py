"""The engine core: add, abort, step. It has one thread, and is deterministic given its runner and
clock.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from jitney.engine.common.errors import RequestError
from jitney.engine.common.messages import (
    AdaptersSet,
    AskSeatMap,
    PromptChunk,
    SeatMap,
    SetAdapters,
    StepReport,
)
from jitney.engine.common.outputs import FinishReason, SequenceOutput
from jitney.engine.common.records import Ledger
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.intake import Intake
from jitney.engine.core.reporter import Reporter, prompt_chunks
from jitney.engine.core.scheduler.buckets import Bucket
from jitney.engine.core.scheduler.plan import MaskedRow, Plan, StepResult

if TYPE_CHECKING:
    from jitney.engine.core.scheduler.scheduler import Scheduler

_log = logging.getLogger("jitney.core")

#: Text in XLA's error message when a step did not fit the device's memory.
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
#: Seconds between two checks for compiled grammars and computed masks, while there is no other
#: work.
_COMPILING_S = 0.002
#: Late planning: the share of its time that the device may idle because of it.
_MOST_IDLE = 0.02
#: Late planning: seconds between two checks whether the step is done; they begin after this share
#: of its shortest expected time.
_LOOK_S, _LOOK_FROM = 0.001, 0.85
#: Seconds between two checks whether a segment of a step that is cut is done: a quarter of its
#: expected time, but at least this.
_FEED_S, _FEEDS = 0.003, 4
#: Late planning: number of steps whose median time for planning, packing and launching is expected
#: again, and that time in seconds before any step.
_LAUNCHES, _FIRST_LAUNCH_S = 15, 0.002


class _StepRunner(Protocol):
    """The device side of a step. An exception in `batch`, `launch`, `start` or `fetch` fails the
    step, and perhaps one request (`EngineCore.step`); an exception in `restore` is fatal to the
    engine. `feed` and `finish` raise none: if a segment cannot be launched, `fetch` raises.
    """

    @property
    def compiles(self) -> int:
        """Number of compilations since the engine was ready; it should stay 0."""
        ...

    def batch(self, plan: Plan) -> Any:
        """Pack a plan for upload. It reads the plan's sequences and keeps none of their lists."""
        ...

    def launch(self, batch: Any) -> Any:
        """Start the step without waiting, and return what `fetch` takes; steps run in the order of
        their launches.
        """
        ...

    def start(self, batch: Any) -> Any:
        """Like `launch`, but only the first segments of the step: `feed` and `finish` launch the
        others, and a step launched before them runs before them.
        """
        ...

    def feed(self, launched: Any) -> bool:
        """Launch segments of a step until one waits behind the running one. -> whether some are
        left. Never waits.
        """
        ...

    def has_paused(self, launched: Any) -> bool:
        """Whether the launched segments of a step are done, while others are left."""
        ...

    def finish(self, launched: Any) -> None:
        """Launch all segments of a step that are left."""
        ...

    def is_done(self, launched: Any) -> bool:
        """Whether the device has finished a launched step."""
        ...

    def learn_drafts(self, launched: Any) -> None:
        """Set `Sequence.drafts` of sequences with grammars to the drafts that a launched step
        checks, where the host did not know them before. Called before `choose`.
        """
        ...

    def choose(self, launched: Any, rows: list[MaskedRow], masks: Any) -> None:
        """Choose the tokens of these rows of a launched step under masks. masks: int32 [rows,
        ceil(V / 32)], one bit for each token. Called before any other step is launched.
        """
        ...

    def fetch(self, launched: Any) -> StepResult:
        """Wait for a step's result; called once per launched step, in order, except that a step
        launched between two segments of another is fetched first.
        """
        ...

    def restore(self, error: Exception) -> None:
        """Reset the device state after `error` in a step; steps launched before are not fetched
        any more. Raises if the device cannot compute at all.
        """
        ...

    def sleep(self, alive: Callable[[], None]) -> int:
        """Free the device's memory; nothing is launched until `wake`. alive: called now and then.
        -> bytes freed.
        """
        ...

    def wake(self, alive: Callable[[], None]) -> None:
        """Allocate the memory again, in its initial state. Raises if that is not possible."""
        ...


@dataclass(slots=True)
class _Flight:
    """A launched step, with the clock times in seconds of each stage of its launch."""

    plan: Plan
    #: The result of `_StepRunner.launch`.
    launched_step: Any
    #: Start and end of planning.
    started: float
    planned: float
    #: End of packing, and end of launching.
    batched: float
    launched: float
    #: Whether a program was compiled during the launch.
    compiled: bool
    #: Late planning: see `EngineCore._plan_within`; None: not computed yet.
    plan_within: tuple[float, float] | None = None
    #: Late planning: time at which the step was found done before its result was fetched.
    done: float | None = None
    #: Whether it is the first of its kind.
    is_first: bool = False
    #: Whether segments of the step are left to launch.
    is_cut: bool = False
    #: Seconds that other steps took between its segments, and when the last of them was done.
    between_s: float = 0.0
    resumed: float | None = None


@dataclass(slots=True)
class _Failure:
    """A failed step: its launch or its fetch raised."""

    plan: Plan
    error: Exception


@dataclass(slots=True)
class _Outcome:
    """The result of a step: outputs, its record and its prompt chunks, or a failure."""

    outputs: list[SequenceOutput]
    record: bytes = b""
    chunks: list[PromptChunk] | None = None
    failure: _Failure | None = None


def _ignore(step: int) -> None:
    pass


def _latest_end(seconds: list[float], most_idle: float) -> float:
    """The latest of these step times, ascending, at which the next step's launch may be finished.
    If a step ends before that, the device idles, for `most_idle` seconds at most, since the end is
    noticed: in all these steps together for at most _MOST_IDLE of their time.
    """
    allowed = _MOST_IDLE * sum(seconds)
    latest = seconds[0]
    for end in seconds[1:]:
        if sum([min(most_idle, end - done) for done in seconds if done < end]) > allowed:
            break
        latest = end
    return latest


@dataclass(eq=False)
class EngineCore:
    """The engine's loop body. While the device computes step k, the host commits step k - 1 and
    plans step k + 1.
    """

    scheduler: Scheduler
    runner: _StepRunner
    ledger: Ledger
    #: Returns the time in seconds.
    clock: Callable[[], float] = time.monotonic
    #: Called with the number of a step before it runs if it is the first of its kind, which may
    #: take much longer than others.
    on_first_step: Callable[[int], None] = _ignore
    #: Whether to plan the next step as late as the device allows, so that requests that arrive
    #: while a step runs join the next one. For devices whose steps take long compared with the
    #: host's work.
    plans_late: bool = False
    #: Kinds of steps that have run: (bucket, greedy_only).
    _kinds: set[tuple[Bucket, bool]] = field(default_factory=set[tuple[Bucket, bool]])
    #: The step that the device computes.
    _flight: _Flight | None = None
    #: Whether the last step had nothing to compute although sequences are open.
    _all_wait: bool = False
    #: Whether the device's memory is freed, see `sleep`.
    _asleep: bool = False
    #: Clock seconds at which the device finished the last step; None after an idle period.
    _ready: float | None = None
    #: Seconds that planning, packing and launching took in the newest steps.
    _launches_s: deque[float] = field(default_factory=lambda: deque([_FIRST_LAUNCH_S], _LAUNCHES))

    def __post_init__(self) -> None:
        #: Requests before they reach the scheduler.
        self.intake = Intake(self.scheduler)
        self._reporter = Reporter(self.scheduler, self.clock)

    @property
    def has_work(self) -> bool:
        """True while `step` has work or results to report."""
        if self._flight is not None or self.scheduler.has_open or self.has_outputs:
            return True
        return self.intake.is_busy

    @property
    def has_outputs(self) -> bool:
        """True when outputs wait for the next report."""
        return bool(self.intake.rejected) or self.scheduler.has_outputs

    @property
    def pause_s(self) -> float:
        """Seconds during which `step` would do nothing unless a request arrives, because the policy
        lets all sequences wait or all wait for masks, or during which planning can be delayed
        (`late_plan_slack_s`); else 0.
        """
        if self._flight is not None or self.has_outputs or self._reporter.questions:
            return self.late_plan_slack_s
        pause = self.scheduler.pause(self.clock())
        if self._all_wait:
            pause = pause or _COMPILING_S
        if not self.intake.is_busy:
            return pause
        if not self.scheduler.has_open:
            return _COMPILING_S
        return min(pause, _COMPILING_S)

    @property
    def late_plan_slack_s(self) -> float:
        """Seconds by which planning can be delayed so that late arrivals still join the next step,
        while the device stays busy. 0 if the engine does not plan late, or if a late arrival could
        not board.
        """
        flight = self._flight
        if not self.plans_late or flight is None or self.has_outputs or self._reporter.questions:
            return 0.0
        if flight.is_cut and self.scheduler.goes_between(flight.plan):
            return 0.0 if self.runner.has_paused(flight.launched_step) else _LOOK_S
        if not self.scheduler.has_place:
            return 0.0
        if flight.plan_within is None:
            flight.plan_within = self._plan_within(flight.plan)
        earliest, latest = flight.plan_within
        if flight.is_cut:
            flight.is_cut = self.runner.feed(flight.launched_step)
            if flight.is_cut:
                segments = self.scheduler.buckets.segments(flight.plan.bucket)
                return max(_FEED_S, earliest / (_FEEDS * segments))
        began = flight.launched if self._ready is None else max(flight.launched, self._ready)
        began += flight.between_s
        now = self.clock()
        if began + earliest - now >= _LOOK_S:
            return began + earliest - now
        if flight.done is None and self.runner.is_done(flight.launched_step):
            flight.done = now
        if flight.done is not None or began + latest - now < _LOOK_S:
            return 0.0
        return _LOOK_S

    def _plan_within(self, plan: Plan) -> tuple[float, float]:
        """Seconds after the start of this plan's step from which on the next one is planned if the
        step is done, and at which it is planned at the latest.
        """
        seconds = self.scheduler.step_times.newest(plan.bucket, plan.rows, plan.work.pairs)
        if not seconds:
            return 0.0, 0.0
        launch = median(self._launches_s)
        return _LOOK_FROM * seconds[0] - launch, _latest_end(seconds, launch + _LOOK_S) - launch

    def add(self, request: EngineRequest) -> None:
        """Admit a request; a refusal becomes a terminal output per sequence in the next report."""
        self.intake.add(request)

    def learn(self, tokenizer: str) -> None:
        """See `Intake.learn`."""
        self.intake.learn(tokenizer)

    def set_adapters(self, message: SetAdapters) -> AdaptersSet | None:
        """Change the served adapters. -> the answer if it is known at once; else a later report
        contains it.
        """
        return self.intake.set_adapters(message, asleep=self._asleep)

    @property
    def open_adapters(self) -> set[int]:
        """Numbers of the adapters that open requests ask for."""
        return self.intake.open_adapters

    def serve_adapters(self, numbers: set[int]) -> None:
        """Accept requests for these adapters too."""
        self.scheduler.serve_adapters(numbers)

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = "abort"
    ) -> None:
        """End a request (index None) or one of its sequences; the next report contains its terminal
        output.
        """
        self.intake.abort(request_id, index, reason)

    def report_ended(self) -> StepReport | None:
        """Report, between two steps, the sequences that ended since the last report, so that
        refusals and aborts do not wait for the next step to finish. None if none has ended.
        """
        if not self.has_outputs:
            return None
        outputs = self.intake.take_rejected() + self.scheduler.take_outputs()
        return StepReport(outputs, events=self._reporter.events(None, self.clock()))

    def ask(self, question: AskSeatMap) -> None:
        """Ask for a seat map, which the next step's report contains. It shows the state after that
        step's plan: between a step's end and the next plan a seat looks free although a sequence
        waits for it. Without work, use `seat_map`.
        """
        self._reporter.questions.append(question)

    def step(self) -> StepReport:
        """Plan and launch the next step, then fetch and commit the one before it.

        After a failed step all sequences wait again, and the scheduler finds the one to blame
        (`Scheduler.step_failed`). If the runner cannot recover, its exception is raised. After an
        interrupt, which is raised again, all sequences wait again, too.
        """
        try:
            return self._step()
        except KeyboardInterrupt:
            # Not all that was planned may be launched, and not all results may be committed.
            self._forget_launched(InterruptedError("a step was interrupted"))
            self.scheduler.sequences.start_all_over(self.clock())
            raise

    def _step(self) -> StepReport:
        """See `step`."""
        previous, self._flight = self._flight, None
        started = self.clock()
        served = self.intake.tend_adapters(lambda: self.open_adapters)
        if served:
            self.serve_adapters(served)
        self.intake.add_compiled()
        if previous is not None and previous.is_cut:
            if self.runner.has_paused(previous.launched_step):
                plan = self.scheduler.plan_between(previous.plan, started)
                if plan is not None:
                    return self._step_between(previous, plan, started)
            self.runner.finish(previous.launched_step)
        alone = previous is not None and self._is_alone(previous.plan, started)
        plan = None if alone else self.scheduler.plan(started)
        self._all_wait = plan is None and previous is None and self.scheduler.has_open
        failure = self._try_launch(plan, started) if plan is not None else None
        self._reporter.answer()
        outcome = self._take_result(previous) if previous is not None else _Outcome([])
        failure = outcome.failure or failure
        if failure is None and self._flight is not None and self._flight.plan.masked:
            failure = self._try_choose(self._flight)
        if failure is not None:
            self._recover(failure)
        return self._report(self._flight, outcome)

    def _step_between(self, running: _Flight, plan: Plan, started: float) -> StepReport:
        """Run a step between two segments of the running one, which goes on behind it."""
        ready, self._ready = self._ready, None
        failure = self._try_launch(plan, started, whole=True)
        flight, self._flight = self._flight, running
        outcome = _Outcome([], failure=failure)
        if flight is not None:
            running.is_cut = self.runner.feed(running.launched_step)
            outcome = self._take_result(flight)
        if outcome.failure is not None:
            # A failure of the running step is also one of each step that is launched after it.
            chunks = [*plan.chunks, *running.plan.chunks]
            self._recover(_Failure(replace(plan, chunks=chunks), outcome.failure.error))
            return self._report(None, outcome)
        if running.is_first:
            self.on_first_step(running.plan.number)  # the plans have exchanged their numbers
        running.resumed, self._ready = self._ready, ready
        assert running.resumed is not None  # the device is busy
        running.between_s += running.resumed - started
        return self._report(flight, outcome)

    def _is_alone(self, plan: Plan, now: float) -> bool:
        """Whether to launch no step while this one runs: because a failure is being isolated, or
        because the step is background work.
        """
        return self.scheduler.isolating_failure or self.scheduler.lets_others_first(plan, now)

    def _try_launch(self, plan: Plan, started: float, *, whole: bool = False) -> _Failure | None:
        """Launch a plan's step, if it is not whole in segments. -> the failure, if any."""
        cuts = self.plans_late and self.scheduler.buckets.segments(plan.bucket) > 1
        try:
            self._flight = self._launch(plan, started, is_cut=cuts and not whole)
        except Exception as error:
            return _Failure(plan, error)
        return None

    def _try_choose(self, flight: _Flight) -> _Failure | None:
        """Choose the tokens of sequences with grammars, now that the tokens before them are known.
        The device computes the step meanwhile.
        """
        assert self.intake.grammars is not None  # only the grammar manager makes matchers
        try:
            self.runner.learn_drafts(flight.launched_step)
        except Exception as error:
            return _Failure(flight.plan, error)
        masks = self.intake.grammars.masks(flight.plan)
        for seq, reason, error in masks.endings:
            self.scheduler.end(seq, reason, error)
        for chunk in masks.left_out:
            self.scheduler.sit_out(chunk)
        if not masks.rows:
            return None
        try:
            self.runner.choose(flight.launched_step, masks.rows, masks.masks)
        except Exception as error:
            return _Failure(flight.plan, error)
        return None

    def _take_result(self, flight: _Flight) -> _Outcome:
        """Fetch and commit a step."""
        waited = self.clock()
        try:
            result = self.runner.fetch(flight.launched_step)
        except Exception as error:
            return _Outcome([], failure=_Failure(flight.plan, error))
        fetched = self.clock()
        outputs = self.scheduler.commit(flight.plan, result, fetched)
        record = self._record(flight, waited, fetched)
        return _Outcome(outputs, record, prompt_chunks(flight.plan))

    def _recover(self, failure: _Failure) -> None:
        """Recover from a failed step; drops the step launched after it."""
        plan, error = failure.plan, failure.error
        sequences = len({chunk.seq for chunk in plan.chunks})
        _log.error("step %d failed with %d sequences", plan.number, sequences, exc_info=error)
        self._forget_launched(error)
        out_of_memory = isinstance(error, MemoryError) or _OUT_OF_MEMORY in str(error)
        self.scheduler.step_failed(plan, self.clock(), out_of_memory=out_of_memory)

    def _forget_launched(self, error: Exception) -> None:
        """Drop the launched steps, and reset the device state after `error`."""
        self._flight = self._ready = None
        self.runner.restore(error)

    def _launch(self, plan: Plan, started: float, *, is_cut: bool) -> _Flight:
        """Pack a plan and start its step. is_cut: in segments."""
        kind = plan.bucket, plan.greedy_only
        is_first = kind not in self._kinds
        if is_first:
            self._kinds.add(kind)
            self.on_first_step(plan.number)
        compiles = self.runner.compiles
        planned = self.clock()
        batch = self.runner.batch(plan)
        batched = self.clock()
        launched_step = self.runner.start(batch) if is_cut else self.runner.launch(batch)
        launched = self.clock()
        compiled = self.runner.compiles > compiles
        self._launches_s.append(launched - started)
        if compiled and not compiles:
            _log.warning(
                "STEP %d WAITED FOR THE COMPILER while serving (on a GPU XLA then times products, "
                "too), which should have ended before the start; the metric "
                "jitney_compiles_total counts them as late",
                plan.number,
            )
        return _Flight(
            plan,
            launched_step,
            started=started,
            planned=planned,
            batched=batched,
            launched=launched,
            compiled=compiled,
            is_first=is_first,
            is_cut=is_cut and self.runner.feed(launched_step),
        )

    def _report(self, flight: _Flight | None, outcome: _Outcome) -> StepReport:
        """A report of everything since the last one: a launched step and the result of another."""
        intake = self.intake
        answers: list[SeatMap | AdaptersSet] = [*self._reporter.take_answers()]
        if intake.adapters is not None:
            answers += intake.adapters.take_answers()
        plan, started = (flight.plan, flight.started) if flight else (None, 0.0)
        return StepReport(
            intake.take_rejected() + outcome.outputs + self.scheduler.take_outputs(),
            outcome.record,
            self._reporter.events(plan, started),
            outcome.chunks or [],
            answers,
            grammars=None if intake.grammars is None else intake.grammars.take_work(),
            predicted_wait=self._reporter.predicted_wait(),
        )

    def _record(self, flight: _Flight, waited: float, fetched: float) -> bytes:
        """Make the ledger record of a committed step. waited, fetched: clock seconds at which the
        host began to wait for the result, and had it.

        The device time ends when the step was seen done, or else with the result: it is exact
        unless the host looked later.
        """
        plan = flight.plan
        ready = fetched if flight.done is None else flight.done
        before = self._ready
        began = flight.launched
        gap = 0.0
        if before is not None:
            began = max(began, before)
            gap = began - before
        device = ready - began - flight.between_s
        earlier = 0.0 if flight.resumed is None else device - (ready - flight.resumed)
        if not flight.compiled:
            self.scheduler.observe(plan, device, gap)
        # The gap before the next step counts as idle time only if there is work now.
        busy = self._flight is not None or self.scheduler.has_open
        self._ready = ready if busy else None
        return self.ledger.record(
            step=plan.number,
            started=flight.started,
            mixed=not plan.bucket.decode_only,
            bucket_tokens=plan.bucket.tokens,
            bucket_seats=plan.bucket.seats,
            prefill=plan.prefill,
            decode=plan.decode,
            padding=plan.bucket.tokens - plan.rows,
            recomputed=plan.recomputed,
            past_end=plan.past_end,
            cancelled=plan.cancelled,
            accepted=plan.accepted,
            rejected=plan.rejected,
            seats_busy=plan.occupancy.seats_busy,
            seats=self.scheduler.limits.max_seats,
            pages_used=plan.occupancy.pages_used,
            pages_cached=plan.occupancy.pages_cached,
            pages=self.scheduler.pool.capacity,
            waiting=plan.occupancy.waiting,
            waiting_tokens=plan.occupancy.waiting_tokens,
            boarded=len(plan.boarded),
            finished=plan.finished,
            preempted=len(plan.preempted),
            cached_tokens=plan.cached_tokens,
            plan_s=flight.planned - flight.started,
            batch_s=flight.batched - flight.planned,
            launch_s=flight.launched - flight.batched,
            device_s=device,
            earlier_s=earlier,
            fetch_s=fetched - waited,
            commit_s=self.clock() - fetched,
            gap_s=gap,
            compiled=flight.compiled,
            keys=plan.work.keys,
            longest=plan.work.longest,
            pairs=plan.work.pairs,
        )

    def sleep(self, alive: Callable[[], None]) -> int:
        """Free the device's memory until `wake`. alive: called from time to time. -> bytes freed.
        Raises RequestError busy while there is work.
        """
        if self.has_work:
            raise RequestError("there is work to do", code="busy")
        freed = 0
        if not self._asleep:
            self.reset_prefix_cache()
            freed = self.runner.sleep(alive)
        self._asleep = True
        return freed

    def wake(self, alive: Callable[[], None]) -> None:
        """Allocate the memory again. Raises if that is not possible."""
        if self._asleep:
            self.runner.wake(alive)
        self._asleep = False

    def reset_prefix_cache(self) -> None:
        """Drop all cached pages of earlier prompts; running sequences keep theirs."""
        self.scheduler.forget_prefixes()

    def run_until_idle(self, max_steps: int = 100_000) -> list[SequenceOutput]:
        """Step until there is no work, and return all outputs in order. Raises RuntimeError if
        there is still work after max_steps.
        """
        outputs: list[SequenceOutput] = []
        for _ in range(max_steps):
            if not self.has_work:
                return outputs
            outputs += self.step().outputs
        raise RuntimeError(f"still busy after {max_steps} steps")

    def seat_map(self, ticket: int = 0, *, seats: bool = True) -> SeatMap:
        """Return every seat (unless `seats` is false) and the state of every page. ticket: number
        of the question that this answers.
        """
        return self._reporter.seat_map(ticket, seats=seats)

    def check(self) -> None:
        """Raise RuntimeError if a page, seat or sequence is lost, or if the ledger does not
        close.
        """
        self.scheduler.check()
        if not self.ledger.closes():
            raise RuntimeError("the ledger does not close")
