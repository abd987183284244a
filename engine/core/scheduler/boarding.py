"""Boarding: gives seats and pages to waiting sequences."""

from __future__ import annotations

from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.open_sequences import OpenSequences
from jitney.engine.core.scheduler.page_demand import PageDemand
from jitney.engine.core.scheduler.passing import Passing
from jitney.engine.core.scheduler.plan import Draft
from jitney.engine.core.scheduler.policies import Policy, Situation
from jitney.engine.core.scheduler.preemption import Preemption
from jitney.engine.core.scheduler.queues import RequestClass
from jitney.engine.core.scheduler.sequence import Sequence


class Boarding:
    """Seats waiting sequences if the policy and the free pages allow it."""

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: Policy,
        sequences: OpenSequences,
        demand: PageDemand,
        preemption: Preemption,
        passing: Passing,
    ):
        self._limits = limits
        self._policy = policy
        self._sequences = sequences
        self._seats = sequences.seats
        self._queue = sequences.live.queue
        self._demand = demand
        self._preemption = preemption
        self._passing = passing
        #: Whether a request can still arrive before an open one ends; the caller of the engine
        #: writes it.
        self.more_to_come = True

    def allowed(self, now: float) -> int:
        """Number of waiting live sequences that the policy lets board now."""
        return self._policy.boarders(self._situation(now)) if self._queue.waiting else 0

    def pause(self, now: float) -> float:
        """Seconds during which no plan is possible because the policy lets all sequences wait; 0 if
        a plan is possible now.
        """
        if self._seats.n_taken or not self._queue.waiting:
            return 0.0
        wakes = self._policy.boards_at(self._situation(now))
        return max(0.0, min(wakes, self._sequences.requests.next_deadline) - now)

    def _situation(self, now: float) -> Situation:
        # When a sequence is about to end, another request may follow: in a closed loop, a client
        # sends its next request then.
        more = self.more_to_come or bool(self._sequences.leaving)
        return Situation(
            now,
            free_seats=len(self._seats.free),
            busy_seats=self._seats.batch,
            waiting=len(self._queue.waiting),
            arrivals=(seq.request.arrival for seq in self._queue.waiting),
            more_to_come=more,
        )

    def seat_next(self, requests: RequestClass, draft: Draft, now: float) -> Sequence | None:
        """Seat the head of a queue and return it. None if it cannot board yet; the sequences behind
        it then wait too.
        """
        seq = requests.queue.head()
        if seq is None or seq.in_flight:
            return None
        if self._limits.encoder and len(seq.tokens) > draft.tokens_left:
            return None  # an encoder's prompt is not split: it goes into the next step
        boards = self.seat(seq, draft, now)
        if not seq.background:
            self._sequences.short_of_pages = not boards
        return seq if boards else None

    def seat(self, seq: Sequence, draft: Draft, now: float) -> bool:
        """Give a waiting sequence pages and a seat; returns whether it got them. A preempted
        sequence does not board while its token is in flight: it would be sampled a second time.
        """
        if seq.in_flight or not self.take_seat(seq, draft, now):
            return False
        if not seq.background:
            self._passing.board(seq.n_left, now)
        return True

    def take_seat(self, seq: Sequence, draft: Draft, now: float, *, instead: bool = False) -> bool:
        """Give a sequence pages and a seat; False if there are too few pages. instead: it replaces
        another sequence, so the number of seated sequences does not grow.
        """

        def lasts(fresh: int) -> bool:
            """Whether the pages last, so that no sequence would soon be preempted."""
            if instead or self._demand.lasts(seq, fresh):
                return True
            return self._preemption.too_long_stalled(seq, now)

        cached_tokens = self._sequences.pages.take(seq, self._seats.n_taken, lasts)
        if cached_tokens is None:
            return False
        draft.cached_tokens += cached_tokens
        self._sequences.seat(seq, now)
        draft.boarded.append(seq)
        return True

    def make_way(self, draft: Draft, now: float) -> Sequence | None:
        """The claimant: the sequence of a tenant with less than its share of the seats, which takes
        a seat before others. The seat is free, or another sequence is preempted for it here. None
        while no tenant has more than its share.
        """
        if not self._queue.waiting:
            return None
        claimant = self._queue.claimant(self._seats.count)
        if claimant is None or claimant.in_flight:
            return None
        if self._seats.free:
            # Preempted sequences that wait for pages go first.
            others = self._queue.crowding(self._seats.count)
            return claimant if others and not self._sequences.lacks_pages else None
        displaced = self._preemption.for_claimant(claimant, now)
        draft.preempted += displaced
        return claimant if displaced else None
