"""Collects the parts of step reports besides outputs: seats, events, prompt chunks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from jitney.engine.common.messages import AskSeatMap, PromptChunk, SeatMap, SequenceEvent
from jitney.engine.core.scheduler.plan import Plan
from jitney.engine.core.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from jitney.engine.core.scheduler.scheduler import Scheduler

#: Seconds between two reports of the predicted wait: it is read every few seconds, and each costs
#: some microseconds for every seat.
_PREDICT_EVERY_S = 0.5


class Reporter:
    """Collects what the next report says of a scheduler."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]):
        self._scheduler = scheduler
        self._clock = clock
        #: Not answered yet.
        self.questions: list[AskSeatMap] = []
        self._answers: list[SeatMap] = []
        # When a report last had the predicted wait.
        self._predicted_at = -math.inf

    def answer(self) -> None:
        """Answer all questions with the current state."""
        for question in self.questions:
            self._answers.append(self.seat_map(question.ticket, seats=question.seats))
        self.questions.clear()

    def take_answers(self) -> list[SeatMap]:
        """Take the answers that were not reported yet."""
        answers, self._answers = self._answers, []
        return answers

    def seat_map(self, ticket: int = 0, *, seats: bool = True) -> SeatMap:
        """Every seat (unless `seats` is false) and the state of every page; ticket: of the
        question.
        """
        scheduler = self._scheduler
        page_states = scheduler.pool.states().tobytes()
        pools = scheduler.sequences.pages.windows
        windows = {window: pool.counts() for window, pool in pools.items()}
        return SeatMap(ticket, scheduler.seat_map() if seats else [], page_states, windows)

    def predicted_wait(self) -> float | None:
        """Predicted wait behind all that wait now, seconds; None if just reported."""
        now = self._clock()
        if now - self._predicted_at < _PREDICT_EVERY_S:
            return None
        self._predicted_at = now
        return self._scheduler.predicted_wait_s

    def events(self, plan: Plan | None, started: float) -> list[SequenceEvent]:
        """Events of sequences since the last report: those that lost their seat other than
        for a plan, seats that a batch kept and that are free again, and what a plan brought that
        was begun at `started`.
        """
        step = self._scheduler.steps
        unseated = self._scheduler.take_unseated()
        events = [_event_of("preempted", seq, step, self._clock()) for seq in unseated]
        for seat in self._scheduler.take_released():
            events.append(
                SequenceEvent(
                    event="released",
                    request_id="",
                    index=0,
                    seat=seat,
                    step=step,
                    t=self._clock(),
                    n_in=0,
                    n_out=0,
                )
            )
        if plan is not None:
            events += _seat_events(plan, started)
        return events


def _seat_events(plan: Plan, started: float) -> list[SequenceEvent]:
    """Which sequences were preempted for the plan, then which boarded in it; the seat of the
    preempted is known from when they boarded.
    """
    step = plan.number
    preempted = [_event_of("preempted", seq, step, started) for seq in plan.preempted]
    boarded = [_event_of("seated", seq, step, started, seq.seat) for seq in plan.boarded]
    return preempted + boarded


def _event_of(event: str, seq: Sequence, step: int, t: float, seat: int = -1) -> SequenceEvent:
    return SequenceEvent(
        event=event,
        request_id=seq.request_id,
        index=seq.index,
        seat=seat,
        step=step,
        t=t,
        n_in=seq.n_prompt,
        n_out=seq.n_output,
    )


def prompt_chunks(plan: Plan) -> list[PromptChunk]:
    """The prompt chunks of a plan."""
    return [
        PromptChunk(
            request_id=chunk.seq.request_id,
            index=chunk.seq.index,
            start=chunk.start,
            count=chunk.count,
            recomputed=chunk.recomputed,
        )
        for chunk in plan.prompt_chunks
    ]
