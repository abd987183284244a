"""One engine: add, abort, step. Single-threaded and, given its runner and clock, deterministic."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from jitney.engine.errors import ErrorInfo, RequestError
from jitney.engine.messages import AskSeatMap, PromptChunk, SeatMap, SequenceEvent, StepReport
from jitney.engine.records import Ledger
from jitney.engine.scheduler.plan import Plan, StepResult
from jitney.engine.scheduler.scheduler import Scheduler
from jitney.engine.types import MAX_N, EngineRequest, FinishReason, SequenceOutput


class Runner(Protocol):
    """The device half of a step. Exceptions of any of these are fatal to the engine."""

    @property
    def compiles(self) -> int:
        """Compilations since the engine was ready; should stay 0."""
        ...

    def batch(self, plan: Plan) -> Any:
        """Pack a plan for upload; reads the plan's sequences now, keeps none of their lists."""
        ...

    def launch(self, batch: Any) -> Any:
        """Start the step and return a ticket without waiting; steps run in the order of their
        launches.
        """
        ...

    def fetch(self, ticket: Any) -> StepResult:
        """Wait for a step's result; called once per ticket, in order."""
        ...


class Flight(msgspec.Struct):
    """A launched step and when each part of its launch was done (clock, seconds)."""

    plan: Plan
    ticket: Any
    started: float
    planned: float
    batched: float
    launched: float
    compiled: bool


class EngineCore:
    """The loop's body. The device computes step k while the host takes in step k - 1 and plans step
    k + 1.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        ledger: Ledger,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.scheduler, self.runner, self.ledger, self.clock = scheduler, runner, ledger, clock
        self._flight: Flight | None = None
        self._rejected: list[SequenceOutput] = []
        self._asked: list[AskSeatMap] = []
        self._answers: list[SeatMap] = []
        self._ready: float | None = (
            None  # when the device finished the last step; None after a time without work
        )

    @property
    def has_work(self) -> bool:
        """True while `step` has anything to do or to tell."""
        return self._flight is not None or self.scheduler.has_open or self.has_news

    @property
    def has_news(self) -> bool:
        """True when outputs wait for the next step to hand them out."""
        return bool(self._rejected) or self.scheduler.has_outputs

    @property
    def pause_s(self) -> float:
        """Seconds in which `step` would do nothing unless somebody comes, because the policy lets
        all wait; else 0.
        """
        if self._flight is not None or self.has_news or self._asked:
            return 0.0
        return self.scheduler.pause(self.clock())

    def add(self, request: EngineRequest) -> None:
        """Admit a request; a refusal becomes one terminal output per sequence in the next step's
        report.
        """
        try:
            self.scheduler.add(request)
        except RequestError as error:
            self._reject(request, error.info)

    def _reject(self, request: EngineRequest, error: ErrorInfo) -> None:
        n = min(max(1, request.sampling.n), MAX_N)  # n itself may be what was refused
        self._rejected += [
            SequenceOutput(request_id=request.id, index=index, finish="error", error=error)
            for index in range(n)
        ]

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = "abort"
    ) -> None:
        """End a request (index None) or one of its sequences; its terminal output comes with the
        next step.
        """
        self.scheduler.abort(request_id, index, reason)

    def ask(self, question: AskSeatMap) -> None:
        """Have the next step's report answer, as things stand after its plan: between a step's end
        and the next plan a seat that was just left looks free though somebody waits for it. Without
        work, use `seat_map`."""
        self._asked.append(question)

    def step(self) -> StepReport:
        """Plan and launch the next step, then take in the one before it."""
        clock, previous, self._flight = self.clock, self._flight, None
        started = clock()
        plan = self.scheduler.plan(started)
        if plan is not None:
            compiles, planned = self.runner.compiles, clock()
            batch = self.runner.batch(plan)
            batched = clock()
            ticket = self.runner.launch(batch)
            self._flight = Flight(
                plan, ticket, started, planned, batched, clock(), self.runner.compiles > compiles
            )
        if self._asked:
            self._answer()
        if previous is None:
            return self._report(self.scheduler.drain())
        waited = clock()
        result = self.runner.fetch(previous.ticket)
        ready = clock()
        outputs = self.scheduler.commit(previous.plan, result, ready)
        return self._report(
            outputs, self._record(previous, waited, ready), prompt_rows(previous.plan)
        )

    def _report(
        self, outputs: list[SequenceOutput], record: bytes = b"", chunks: Sequence[PromptChunk] = ()
    ) -> StepReport:
        (rejected, self._rejected), (answers, self._answers) = (
            (self._rejected, []),
            (self._answers, []),
        )
        released = self.scheduler.take_released()
        life = released_at(released, self.scheduler.steps, self.clock()) if released else []
        life += life_of(self._flight.plan, self._flight.started) if self._flight is not None else []
        return StepReport(rejected + outputs, record, life, list(chunks), answers)

    def _answer(self) -> None:
        asked, self._asked = self._asked, []
        self._answers += [
            self.seat_map(question.ticket, seats=question.seats) for question in asked
        ]

    def _record(self, flight: Flight, waited: float, ready: float) -> bytes:
        """Account for one step; what the host waited for it is what the device took, unless the
        host was slower.
        """
        plan, before, began = flight.plan, self._ready, flight.launched
        occupancy, work = plan.occupancy, plan.work
        if before is not None and before > began:
            began = before
        device, gap = ready - began, 0.0 if before is None else began - before
        if not flight.compiled:
            self.scheduler.observe(plan, device)
        # The next step's gap is idle time only while there was something to do.
        self._ready = ready if self._flight is not None or self.scheduler.has_open else None
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
            seats_busy=occupancy.seats_busy,
            seats=self.scheduler.limits.max_seats,
            pages_used=occupancy.pages_used,
            pages_cached=occupancy.pages_cached,
            pages=self.scheduler.pool.capacity,
            waiting=occupancy.waiting,
            waiting_tokens=occupancy.waiting_tokens,
            boarded=len(plan.boarded),
            finished=plan.finished,
            preempted=len(plan.preempted),
            cached_tokens=plan.cached_tokens,
            plan_s=flight.planned - flight.started,
            batch_s=flight.batched - flight.planned,
            launch_s=flight.launched - flight.batched,
            device_s=device,
            fetch_s=ready - waited,
            commit_s=self.clock() - ready,
            gap_s=gap,
            compiled=flight.compiled,
            keys=work.keys,
            longest=work.longest,
            pairs=work.pairs,
        )

    def run_until_idle(self, max_steps: int = 100_000) -> list[SequenceOutput]:
        """Step until there is no work; all outputs in order. RuntimeError if max_steps were not
        enough.
        """
        outputs: list[SequenceOutput] = []
        for _ in range(max_steps):
            if not self.has_work:
                return outputs
            outputs += self.step().outputs
        raise RuntimeError(f"still busy after {max_steps} steps")

    def seat_map(self, ticket: int = 0, *, seats: bool = True) -> SeatMap:
        """Every seat (unless `seats` is false) and the state of every page, for whoever asked with
        this ticket.
        """
        return SeatMap(
            ticket,
            self.scheduler.seat_map() if seats else [],
            self.scheduler.pool.states().tobytes(),
        )

    def check(self) -> None:
        """Raise RuntimeError if a page, seat or sequence is lost, or the ledger does not close."""
        self.scheduler.check()
        if not self.ledger.closes():
            raise RuntimeError("the ledger does not close")


def life_of(plan: Plan, started: float) -> list[SequenceEvent]:
    """Who was preempted for the plan, then who boarded in it; the seat of the preempted is known to
    who kept count.
    """
    return [
        *(
            SequenceEvent(
                "preempted",
                seq.request.id,
                seq.index,
                -1,
                plan.number,
                started,
                seq.n_prompt,
                seq.n_output,
            )
            for seq in plan.preempted
        ),
        *(
            SequenceEvent(
                "seated",
                seq.request.id,
                seq.index,
                seq.seat,
                plan.number,
                started,
                seq.n_prompt,
                seq.n_output,
            )
            for seq in plan.boarded
        ),
    ]


def released_at(seats: list[int], step: int, t: float) -> list[SequenceEvent]:
    """Seats that a batch kept are free again; whoever sat there has ended before, or waits."""
    return [SequenceEvent("released", "", 0, seat, step, t, 0, 0) for seat in seats]


def prompt_rows(plan: Plan) -> list[PromptChunk]:
    """The prompt chunks of a plan, which come after its decode rows."""
    rows = []
    for chunk in reversed(plan.chunks):
        if chunk.decode:
            break
        rows.append(
            PromptChunk(
                chunk.seq.request.id, chunk.seq.index, chunk.start, chunk.count, chunk.recomputed
            )
        )
    return rows[::-1]
