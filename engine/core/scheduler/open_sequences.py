"""All open sequences. Each is in exactly one place: in a seat, in a queue, held until its leader's
prompt is computed, or leaving.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import attrgetter

from jitney.engine.common.errors import ErrorInfo
from jitney.engine.common.lengths import LengthEstimate
from jitney.engine.common.outputs import FinishReason, SequenceOutput
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.scheduler.page_tables import PageTables
from jitney.engine.core.scheduler.queues import RequestClass, WaitingQueue
from jitney.engine.core.scheduler.request_table import RequestTable, Siblings
from jitney.engine.core.scheduler.seats import Seats
from jitney.engine.core.scheduler.sequence import Sequence

#: Default errors by finish reason, for sequences that end without a more specific error.
_ERRORS = {
    "deadline": ErrorInfo("deadline_exceeded", "the request's deadline passed before it was done"),
    "error": ErrorInfo("internal_error", "the request was ended by an internal error"),
}

_by_rank = attrgetter("rank")


class OpenSequences:
    """Moves sequences between places. Each gets exactly one terminal output, at its end."""

    def __init__(self, seats: Seats, pages: PageTables, make_queue: Callable[[], WaitingQueue]):
        self.seats = seats
        self.pages = pages
        self.requests = RequestTable()
        #: Requests with a waiting client, and those in the background.
        self.live = RequestClass(make_queue())
        self.background = RequestClass(make_queue())
        #: Estimate of answer lengths.
        self.lengths = LengthEstimate()
        #: Sequences without a seat whose last token is in flight and that need no further row.
        self.leaving: set[Sequence] = set()
        #: Waiting live sequences that lost their seat, in that order.
        self.stalled: dict[Sequence, None] = {}
        #: Sequences that lost their seat outside of a plan and are not reported yet.
        self.unseated: list[Sequence] = []
        #: Whether the last live sequence that tried to board found too few pages; `Boarding` sets
        #: it.
        self.short_of_pages = False
        #: Outputs that are not returned yet.
        self.outputs: list[SequenceOutput] = []
        #: Number of sequences that ended since the last commit.
        self.finished = 0

    def class_of(self, seq: Sequence) -> RequestClass:
        """The request class of a sequence, live or background."""
        return self.background if seq.background else self.live

    @property
    def n_waiting(self) -> int:
        """Number of sequences that wait for a seat, live and background."""
        return self.live.n_waiting + self.background.n_waiting

    def n_ahead(self, newcomer: Sequence) -> int:
        """Number of waiting live sequences that board before a newcomer by the queue's order."""
        held: list[Sequence] = []
        if self.live.n_held:
            held = [seq for seq in self.requests.held if not seq.background]
        return self.live.queue.ahead(newcomer, held)

    @property
    def lacks_pages(self) -> bool:
        """True while a live sequence waits for pages."""
        return self.short_of_pages and bool(self.live.queue.waiting)

    @property
    def open_seats(self) -> int:
        """Number of seats that a newcomer could take, including background ones; 0 while pages are
        short.
        """
        return 0 if self.lacks_pages else len(self.seats.free) + self.seats.n_background

    @property
    def working_seats(self) -> int:
        """Number of seats that are in use while sequences wait."""
        return max(1, self.seats.n_live) if self.lacks_pages else self.seats.count

    @property
    def crowded(self) -> bool:
        """True while a live sequence waits for its first seat and none is open."""
        return self.live.backlog.sequences > 0 and not self.open_seats

    def add(self, request: EngineRequest, sequences: list[Sequence]) -> None:
        """Put a request into its queue. Its other sequences are held until the first one's prompt
        is computed; in a static batch they are not, since they board together.
        """
        leader, *held = sequences
        waiting = sequences if self.seats.holds else sequences[:1]
        if self.seats.holds:
            held = []
        requests = self.class_of(leader)
        requests.enter(request, sequences, len(held))
        self.requests.add(Siblings(request, sequences, leader, held))
        for seq in waiting:
            self._queue(seq)

    def _queue(self, seq: Sequence) -> None:
        """Put a sequence into its class's queue."""
        seq.wanted_rows = len(seq.tokens) - self.pages.found(seq)
        self.class_of(seq).queue.push(seq)

    def seat(self, seq: Sequence, now: float) -> None:
        """Seat a waiting sequence that has its pages."""
        requests = self.class_of(seq)
        requests.queue.board(seq)
        self.stalled.pop(seq, None)
        siblings = self.requests.of(seq)
        if not siblings.boarded:
            siblings.boarded = True
            requests.backlog.tokens -= seq.n_prompt
        if seq.boarded_at is None:
            requests.backlog.leave(seq)
            seq.boarded_at = now
        seq.sat_at, seq.sat_with = now, len(seq.tokens)
        self.seats.take(seq)

    def release_siblings(self, leader: Sequence) -> None:
        """Queue the held siblings of a leader whose whole prompt is scheduled and published, so
        that they share its pages.
        """
        siblings = self.requests.of(leader)
        if leader is not siblings.leader:
            return
        self.class_of(leader).n_held -= len(siblings.held)
        for seq in siblings.held:
            # The prompt is scored once: siblings share the list that the leader's steps fill.
            seq.prompt_logprobs, seq.scored = leader.prompt_logprobs, leader.scored
            seq.keys = leader.keys[: leader.n_prompt // self.pages.pool.page_size]
            self._queue(seq)
        siblings.held = []

    def leave_early(self, seq: Sequence) -> None:
        """Free the seat and the pages of a sequence whose last token is in flight, for the step
        being planned.
        """
        self._unseat(seq)
        self.leaving.add(seq)

    def preempt(self, seq: Sequence, now: float) -> None:
        """Move a seated sequence to the front of its queue. It keeps its tokens, a token in flight
        still counts, and its KV is recomputed.
        """
        self._unseat(seq, ended=False)
        self._wait_again(seq, now)

    def _wait_again(self, seq: Sequence, now: float) -> None:
        seq.computed_high = max(seq.computed_high, seq.scheduled)
        seq.scheduled = 0
        seq.preemptions += 1
        seq.unseated_at = now
        self._queue(seq)
        if not seq.background:
            self.stalled[seq] = None

    def _unseat(self, seq: Sequence, *, ended: bool = True) -> None:
        self.pages.give_back(seq, ended=ended)
        self.class_of(seq).queue.gave_seat_back(seq)
        self.seats.leave(seq)

    def start_over(self, seq: Sequence, now: float) -> None:
        """Have an open sequence wait and recompute its KV; a seated one loses its seat."""
        if seq.seated:
            self.preempt(seq, now)
        elif seq in self.leaving:
            self.leaving.remove(seq)
            self._wait_again(seq, now)
        else:
            return  # it waits already
        self.unseated.append(seq)

    def start_all_over(self, now: float) -> None:
        """Have all sequences wait again with the tokens that are known, after the device has lost
        its state and all launched steps.
        """
        for seq in sorted([*self.seats.taken, *self.leaving], key=_by_rank):
            self.start_over(seq, now)
        self.pages.clear()
        for seq in self.requests.sequences:
            seq.forget_launched()

    def end(self, seq: Sequence, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """Close an open sequence and emit its terminal output."""
        self.close(seq, reason)
        self.outputs.append(
            SequenceOutput(
                request_id=seq.request_id,
                index=seq.index,
                finish=reason,
                error=error or _ERRORS.get(reason),
            )
        )

    def close(self, seq: Sequence, reason: FinishReason) -> None:
        """Free everything that an open sequence holds; the caller emits its terminal output."""
        siblings = self.requests.of(seq)
        seq.finish = reason
        self.lengths.observe(seq.kind, seq.counted, seq.n_output, by_itself=reason == "stop")
        self.finished += 1
        siblings.open.remove(seq)
        self._leave_place(seq, siblings)
        requests = self.class_of(seq)
        if not siblings.open:
            self.requests.remove(siblings)
            requests.leave(siblings.request, boarded=siblings.boarded)
        elif seq is siblings.leader and siblings.held:  # a sibling computes the prompt instead
            siblings.leader = siblings.held.pop(0)
            requests.n_held -= 1
            self._queue(siblings.leader)

    def _leave_place(self, seq: Sequence, siblings: Siblings) -> None:
        requests = self.class_of(seq)
        if seq.boarded_at is None:
            requests.backlog.leave(seq)
        if seq.seated:
            self._unseat(seq)
        elif seq in self.leaving:
            self.leaving.remove(seq)
        elif seq in siblings.held:
            siblings.held.remove(seq)
            requests.n_held -= 1
        else:
            requests.queue.remove(seq)
            self.stalled.pop(seq, None)

    def check(self) -> None:
        """Raise RuntimeError unless every sequence, seat, page and waiting token is accounted for
        exactly once.
        """
        seated = self.seats.taken
        queued = self.live.queue.waiting | self.background.queue.waiting
        unseated = [*queued, *self.leaving, *self.requests.held]
        claims = {
            "every open sequence is in exactly one place": Counter([*seated, *unseated])
            == Counter(self.requests.sequences),
            "no request without open sequences is kept": all(s.open for s in self.requests),
            "stalled sequences wait": self.stalled.keys() <= self.live.queue.waiting,
            "live requests are counted": self._is_counted(self.live, background=False),
            "background requests are counted": self._is_counted(self.background, background=True),
        }
        claims |= self.seats.claims() | self.pages.claims(seated, unseated)
        broken = [claim for claim, holds in claims.items() if not holds]
        if broken:
            raise RuntimeError("not true any more: " + "; ".join(broken))

    def _is_counted(self, requests: RequestClass, *, background: bool) -> bool:
        of_class = [s for s in self.requests if s.request.background == background]
        fresh = [seq for s in of_class for seq in s.open if seq.boarded_at is None]
        queue, backlog = requests.queue, requests.backlog
        return (
            requests.n_open == len(of_class)
            and requests.n_held == sum(len(s.held) for s in of_class)
            and queue.expected == sum(seq.expected for seq in queue.waiting)
            and queue.rows.total() == sum(seq.wanted_rows for seq in queue.waiting)
            and all(seq.background == background for seq in queue.waiting)
            and backlog.sequences == len(fresh)
            and backlog.tokens == sum(len(s.request.prompt) for s in of_class if not s.boarded)
            and backlog.expected == sum(seq.expected for seq in fresh)
            and backlog.accounts == Counter(seq.request.account for seq in fresh)
        )
