"""The reporter collects the parts of step reports beside outputs: seats, events, prompt chunks."""

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
    """Collects a scheduler's events and answers for the next report."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]):
        self._scheduler = scheduler
        self._clock = clock
        #: Questions that are not answered yet.
        self.questions: list[AskSeatMap] = []
        self._answers: list[SeatMap] = []
        # Clock seconds at which the predicted wait was last reported.
        self._predicted_at = -math.inf

    def answer(self) -> None:
        """Answer all questions with the current state."""
        for question in self.questions:
            self._answers.append(self.seat_map(question.ticket, seats=question.seats))
        self.questions.clear()

    def take_answers(self) -> list[SeatMap]:
        """Return the answers that are not reported yet."""
        answers, self._answers = self._answers, []
        return answers

    def seat_map(self, ticket: int = 0, *, seats: bool = True) -> SeatMap:
        """Every seat (unless `seats` is false) and the state of every page. ticket: number of the
        question that this answers.
        """
        scheduler = self._scheduler
        page_states = scheduler.pool.states().tobytes()
        pools = scheduler.sequences.pages.windows
        windows = {window: pool.counts() for window, pool in pools.items()}
        return SeatMap(ticket, scheduler.seat_map() if seats else [], page_states, windows)

    def predicted_wait(self) -> float | None:
        """Predicted wait of a request that arrives now, seconds; None if reported recently."""
        now = self._clock()
        if now - self._predicted_at < _PREDICT_EVERY_S:
            return None
        self._predicted_at = now
        return self._scheduler.predicted_wait_s

    def events(self, plan: Plan | None, started: float) -> list[SequenceEvent]:
        """Events since the last report: sequences that lost their seat outside of a plan, seats
        that a batch had kept and that are free again, and the events of a plan that was started at
        the clock time `started`.
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
    """The sequences that the plan preempted, then those that boarded. Events of preempted ones have
    no seat: it is known from the time they boarded.
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
