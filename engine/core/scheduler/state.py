"""Every open sequence and the one place it is in: in a seat, in the queue, held back, or
leaving.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from operator import attrgetter

from jitney.engine.common.engine_info import Seat
from jitney.engine.common.errors import ErrorInfo, RequestError
from jitney.engine.common.outputs import FinishReason, SequenceOutput
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.scheduler.admission.release_rate import ReleaseRate
from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.lengths import LengthEstimate
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.queues import (
    Backlog,
    RequestClass,
    RequestWork,
    WaitingQueue,
    overgrown,
)
from jitney.engine.core.scheduler.sequence import Sequence

#: What an output says when a sequence ends for this reason and no better error is known.
_ERRORS = {
    "deadline": ErrorInfo("deadline_exceeded", "the request's deadline passed before it was done"),
    "error": ErrorInfo("internal_error", "the request was ended by an internal error"),
}

#: Positions that a decoding sequence attends to. All who decode are sorted whenever one more does.
_by_context = attrgetter("scheduled")
_by_rank = attrgetter("rank")


@dataclass(slots=True, eq=False)
class _Group:
    """The open sequences of one request."""

    request: EngineRequest
    open: list[Sequence]
    #: Computes the prompt.
    leader: Sequence
    #: Its siblings, while they wait to share the prompt's pages.
    held: list[Sequence]
    #: One of them has had a seat.
    boarded: bool = False


class SchedulerState:
    """Moves sequences between their places; each gets exactly one terminal output, when it is
    closed.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: PagePool,
        make_queue: Callable[[], WaitingQueue],
        *,
        holds: bool = False,
        window: int = 0,
    ):
        """holds: seats are given back all at once, when nobody sits any more. Siblings then do not
        wait for their leader's prompt: they belong to one batch. window: positions that the model's
        layers see at most, 0 for all; see `drop_behind`.
        """
        self.limits = limits
        self.pool = pool
        self.holds = holds
        self.window = window
        #: Open requests by id.
        self.groups: dict[str, _Group] = {}
        #: Requests that somebody waits for, and those in the background.
        self.live = RequestClass(make_queue())
        self.background = RequestClass(make_queue())
        #: Of the live ones: who waits for a seat, and the requests that are not begun.
        self.queue = self.live.queue
        self.backlog = self.live.backlog
        #: When the last live request was here; the scheduler's clock, seconds.
        self.live_at = -math.inf
        #: How fast places come free.
        self.places = ReleaseRate()
        #: A heap: low seats first.
        self.free_seats = list(range(limits.max_seats))
        #: Seated, in boarding order.
        self.prefilling: dict[Sequence, None] = {}
        #: Seated, with all known tokens scheduled; see `longest_first`.
        self.decoding: dict[Sequence, None] = {}
        #: Their last token is in flight and they need no row any more: seats and pages are free.
        self.leaving: set[Sequence] = set()
        #: Of the live ones that wait: who lost its seat, in order of that.
        self.stalled: dict[Sequence, None] = {}
        #: Seats that a batch keeps, and who sat there; seats that were kept and are free again.
        self.kept: dict[int, Sequence] = {}
        self.released: list[int] = []
        #: What is known about the lengths of answers.
        self.lengths = LengthEstimate()
        #: Sequences that ended since the last commit.
        self.finished = 0
        #: Times that somebody gave back its seat and pages.
        self.departures = 0
        #: Who lost its seat other than for a plan, and that was not told yet.
        self.unseated: list[Sequence] = []
        #: Whoever was to board last was turned away for lack of pages; the scheduler writes it.
        self.short_of_pages = False
        #: Outputs not handed out yet.
        self.outputs: list[SequenceOutput] = []
        # Somebody in `decoding` is not in its place yet.
        self._newcomers = False
        # A heap of (when, arrival, whom), pruned lazily.
        self._deadlines: list[tuple[float, int, _Group]] = []

    @property
    def seated(self) -> list[Sequence]:
        """Who has a seat, those with prompt rows to compute first."""
        return [*self.prefilling, *self.decoding]

    @property
    def n_seated(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def live_prompts(self) -> list[Sequence]:
        """Seated, with prompt rows to compute, and somebody waits for it."""
        return [seq for seq in self.prefilling if not seq.background]

    @property
    def n_decoding_live(self) -> int:
        return self.live.n_seated - len(self.live_prompts)

    @property
    def background_decodes(self) -> bool:
        """False while a live prompt wants the rows of a step for itself: it comes sooner where
        nothing else is computed beside it.
        """
        return self.background.n_seated > 0 and not (self.queue or self.live_prompts)

    @property
    def n_waiting(self) -> int:
        """Sequences that want a seat, of both kinds."""
        return self.live.n_waiting + self.background.n_waiting

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the requests that are not begun, of both kinds."""
        return self.live.backlog.tokens + self.background.backlog.tokens

    def class_of_request(self, seq: Sequence) -> RequestClass:
        """The requests that a sequence belongs to."""
        return self.background if seq.background else self.live

    def n_ahead(self, newcomer: Sequence) -> int:
        """Sequences that should board before a newcomer, by the queue's order: of those who wait
        and of those who are held back.
        """
        held = [seq for seq in self._held() if not seq.background]
        return self.queue.ahead(newcomer, held)

    def _held(self) -> list[Sequence]:
        """Who waits for a leader's prompt."""
        if not self.live.n_held and not self.background.n_held:
            return []
        return [seq for group in self.groups.values() for seq in group.held]

    @property
    def n_seatable(self) -> int:
        """Of those who wait for an answer, how many there is a seat for."""
        return min(len(self.queue), len(self.free_seats))

    @property
    def crowded(self) -> bool:
        """True while somebody waits for a first seat and none is open."""
        return self.backlog.sequences > 0 and not self.open_seats

    @property
    def open_seats(self) -> int:
        """Seats that a newcomer could take, those of the background too: none, however many are
        free, where pages are short.
        """
        return 0 if self.lacks_pages else len(self.free_seats) + self.background.n_seated

    @property
    def working_seats(self) -> int:
        """Seats that are in use while somebody waits."""
        return max(1, self.live.n_seated) if self.lacks_pages else self.limits.max_seats

    @property
    def lacks_pages(self) -> bool:
        """True while somebody waits for pages."""
        return self.short_of_pages and bool(self.queue)

    def most_of(self, seq: Sequence) -> int:
        """Pages that a sequence holds at once if it gets as long as it may; its last token needs no
        place.
        """
        pages_for = self.pool.pages_for
        most = pages_for(seq.limit - 1)
        if self.window:  # it boards with pages for all it has
            most = min(most, max(pages_for(len(seq.tokens)), self.window_pages))
        return most

    @property
    def window_pages(self) -> int:
        """Pages that a decoding sequence holds at most in a model with a window: one is begun, one
        not yet dropped.
        """
        return self.pool.pages_for(self.window) + 2

    def drop_behind(self, seq: Sequence) -> bool:
        """Give back the pages behind the window of a sequence's next row; True if there were any.

        A page holds the positions of all layers, so all must have a window, and the largest counts.
        Its rows stay in the prefix index while nobody needs the room.
        """
        behind = (seq.scheduled - self.window + 1) // self.pool.page_size
        if behind <= seq.dropped:
            return False
        self.pool.publish_known(seq)
        self.pool.release(seq.pages[seq.dropped : behind])
        seq.pages[seq.dropped : behind] = [0] * (behind - seq.dropped)
        seq.dropped = behind
        return True

    @property
    def batch(self) -> int:
        """Seats taken by the running batch, those of sequences that have left it included."""
        return self.n_seated + len(self.kept)

    @property
    def next_deadline(self) -> float:
        """When the next request's time is up, which may have ended meanwhile; inf: no deadline is
        known.
        """
        return self._deadlines[0][0] if self._deadlines else float("inf")

    @property
    def has_outputs(self) -> bool:
        return bool(self.outputs)

    def add(self, request: EngineRequest, sequences: list[Sequence], work: RequestWork) -> None:
        """Let a request wait."""
        leader, siblings = sequences[0], sequences[1:]
        lane = self.class_of_request(leader)
        lane.backlog.enter(request, work)
        lane.requests += 1
        group = self.groups[request.id] = _Group(
            request, sequences, leader, [] if self.holds else siblings
        )
        lane.n_held += len(group.held)
        for seq in sequences if self.holds else (leader,):
            self._queue(seq)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, leader.rank[1], group))

    def refuse_duplicate(self, request: EngineRequest) -> None:
        """Raise RequestError if the id belongs to an open request."""
        if request.id in self.groups:
            raise RequestError(f"request id {request.id!r} is in use", param="request_id")

    def abort(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        """End a request (index None) or one of its sequences; unknown ids have ended already and
        are no error.
        """
        for seq in self.open_of(request_id):
            if index is None or seq.index == index:
                self.end(seq, reason)

    def open_of(self, request_id: str) -> list[Sequence]:
        """The open sequences of a request, none if it has ended."""
        group = self.groups.get(request_id)
        return list(group.open) if group else []

    def expire(self, now: float) -> None:
        """End every request whose deadline has come."""
        while self.next_deadline <= now:
            group = heappop(self._deadlines)[2]
            for seq in list(group.open):
                self.end(seq, "deadline")

    def take_outputs(self) -> list[SequenceOutput]:
        """Outputs that have not been handed out yet."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def end(self, seq: Sequence, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """Close a sequence and emit its terminal output."""
        self.close(seq, reason)
        self.outputs.append(
            SequenceOutput(
                request_id=seq.request.id,
                index=seq.index,
                finish=reason,
                error=error or _ERRORS.get(reason),
            )
        )

    def close(self, seq: Sequence, reason: FinishReason) -> None:
        """Free all that an open sequence has, at once; the caller emits its one terminal output."""
        group = self.groups[seq.request.id]
        seq.finish = reason
        self.lengths.observe(seq.kind, seq.counted, seq.n_output, by_itself=reason == "stop")
        self.finished += 1
        group.open.remove(seq)
        self._leave_place(seq, group)
        if not group.open:
            self._close_group(group)
        elif seq is group.leader and group.held:  # it cannot compute the prompt for them any more
            group.leader = group.held.pop(0)
            lane = self.class_of_request(seq)
            lane.n_held -= 1
            self._queue(group.leader)

    def _leave_place(self, seq: Sequence, group: _Group) -> None:
        lane = self.class_of_request(seq)
        if seq.boarded_at is None:
            lane.backlog.leave(seq)
            self._free_place(seq)
        if seq.seated:
            self._unseat(seq)
        elif seq in self.leaving:
            self.leaving.remove(seq)
        elif seq in group.held:
            group.held.remove(seq)
            lane.n_held -= 1
        else:
            lane.queue.remove(seq)
            self.stalled.pop(seq, None)

    def _free_place(self, seq: Sequence) -> None:
        """A sequence has left for good. What is told to live requests goes by their own places."""
        if not seq.background:
            self.places.released(seq)

    def _close_group(self, group: _Group) -> None:
        del self.groups[group.request.id]
        lane = self.class_of_request(group.leader)
        lane.requests -= 1
        if not group.boarded:
            lane.backlog.leave_prompt(len(group.request.prompt))
        if overgrown(self._deadlines, self.groups):
            self._deadlines = [entry for entry in self._deadlines if entry[2].open]
            heapify(self._deadlines)

    def _queue(self, seq: Sequence) -> None:
        """A sequence begins to wait for a seat."""
        found = self.pool.count(self.pool.shareable_keys(seq)) * self.pool.page_size
        seq.wanted_rows = len(seq.tokens) - found
        self.class_of_request(seq).queue.push(seq)

    def seat(self, seq: Sequence, now: float) -> None:
        """A waiting sequence boards, at the lowest free seat."""
        lane = self.class_of_request(seq)
        lane.queue.board(seq)
        self.stalled.pop(seq, None)
        group = self.groups[seq.request.id]
        if not group.boarded:
            group.boarded = True
            lane.backlog.leave_prompt(seq.n_prompt)
        if seq.boarded_at is None:
            lane.backlog.leave(seq)
            seq.boarded_at = now
        seq.sat_at, seq.sat_with = now, len(seq.tokens)
        seq.seat = heappop(self.free_seats)
        self.prefilling[seq] = None
        seq.most_pages = self.most_of(seq)
        lane.most_pages += seq.most_pages
        lane.n_seated += 1

    def start_decoding(self, seq: Sequence) -> None:
        """All its known tokens are scheduled."""
        del self.prefilling[seq]
        self.decoding[seq] = None
        self._newcomers = True

    def longest_first(self) -> dict[Sequence, None]:
        """Those who decode, long contexts first. They all go on together, so only newcomers change
        the order, and those who went on while others paused (`reorder`).
        """
        if self._newcomers:
            self.decoding = dict.fromkeys(sorted(self.decoding, key=_by_context, reverse=True))
            self._newcomers = False
        return self.decoding

    def reorder(self) -> None:
        """Not all who decode go on in the step being planned."""
        self._newcomers = True

    def leave_early(self, seq: Sequence) -> None:
        """Its last token is in flight: the seat and the pages are free for the step being
        planned.
        """
        self._unseat(seq)
        self.leaving.add(seq)

    def preempt(self, seq: Sequence, now: float) -> None:
        """Back to the front of the queue; its tokens stay, a token in flight still counts, its KV
        is recomputed.
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

    def start_over(self, seq: Sequence, now: float) -> None:
        """An open sequence gives up its seat, if it has one, to compute again what it has."""
        if seq.seated:
            self.preempt(seq, now)
        elif seq in self.leaving:
            self.leaving.remove(seq)
            self._wait_again(seq, now)
        else:
            return  # it waits
        self.unseated.append(seq)

    def unseat_all(self, now: float) -> None:
        """The device has lost everything, launched steps included: whoever had a seat waits again,
        with the tokens that are known.
        """
        for seq in sorted([*self.seated, *self.leaving], key=_by_rank):
            self.start_over(seq, now)
        self.pool.clear()
        for seq in self._open():
            _forget_launched(seq)

    def _open(self) -> Iterator[Sequence]:
        for group in self.groups.values():
            yield from group.open

    def _unseat(self, seq: Sequence, *, ended: bool = True) -> None:
        if self.pool.retain:
            self.pool.publish_known(seq, ended=ended)
        self.pool.release(seq.pages)
        lane = self.class_of_request(seq)
        lane.most_pages -= seq.most_pages
        lane.n_seated -= 1
        if ended:
            self._free_place(seq)
        lane.queue.left(seq)
        self.departures += 1
        self.prefilling.pop(seq, None)
        self.decoding.pop(seq, None)
        if self.holds:
            self.kept[seq.seat] = seq
            if not self.n_seated:
                self._release_seats()
        else:
            heappush(self.free_seats, seq.seat)
        seq.seat = -1
        seq.pages = []
        seq.published = seq.shared = seq.dropped = 0

    def _release_seats(self) -> None:
        """The batch is over."""
        self.free_seats = sorted([*self.free_seats, *self.kept])
        self.released += self.kept
        self.kept.clear()

    def release_siblings(self, leader: Sequence) -> None:
        """The leader's whole prompt is scheduled and published: its siblings may board and share
        it.
        """
        group = self.groups[leader.request.id]
        if leader is group.leader:
            lane = self.class_of_request(leader)
            for sibling in group.held:
                # Also what is known, and will be, of the prompt's log-probabilities: it is scored
                # once.
                sibling.prompt_logprobs, sibling.scored = leader.prompt_logprobs, leader.scored
                sibling.keys = leader.keys[: leader.n_prompt // self.pool.page_size]
                self._queue(sibling)
            lane.n_held -= len(group.held)
            group.held = []

    def seat_map(self) -> list[Seat]:
        """Every seat, in order, with who sits in it."""
        seats = [Seat(seat=number, state="free") for number in range(self.limits.max_seats)]
        for number, seq in self.kept.items():
            seats[number] = _seat_of(seq, number, "held")
        for seq in self.prefilling:
            seats[seq.seat] = _seat_of(seq, seq.seat, "prefill")
        for seq in self.decoding:
            seats[seq.seat] = _seat_of(seq, seq.seat, "decode")
        return seats

    def check(self) -> None:
        """Raise RuntimeError unless every sequence, seat, page and waiting token is accounted for
        exactly once.
        """
        self.pool.check(seq.pages for seq in self.seated)
        claims = {
            "every open sequence is in exactly one place": self._places_close(),
            "no request without open sequences is kept": all(g.open for g in self.groups.values()),
            "every seat is free, kept or taken once": self._seats_close(),
            "seats are kept only beside a running batch": not self.kept
            or (self.holds and self.n_seated > 0),
            "only seated sequences hold pages": not any(
                seq.pages or seq.seated for seq in self._unseated()
            ),
            "a decoding sequence has exactly its next token to compute": all(
                len(seq.tokens) + seq.in_flight == seq.scheduled + 1 for seq in self.decoding
            ),
            "who decodes is in order": self._newcomers
            or sorted(self.decoding, key=_by_context, reverse=True) == list(self.decoding),
            "who lost its seat waits": self.stalled.keys() <= self.queue.members(),
            "pages behind the window are the trash page, and no others": all(
                not any(seq.pages[: seq.dropped]) and all(seq.pages[seq.dropped :])
                for seq in self.seated
            ),
            "live requests are what they are said to be": self._lane_closes(self.live, False),
            "and so are those in the background": self._lane_closes(self.background, True),
        }
        broken = [claim for claim, holds in claims.items() if not holds]
        if broken:
            raise RuntimeError("not true any more: " + "; ".join(broken))

    def _unseated(self) -> list[Sequence]:
        """Every open sequence without a seat, wherever it is."""
        return [
            *self.queue.members(),
            *self.background.queue.members(),
            *self.leaving,
            *self._held(),
        ]

    def _places_close(self) -> bool:
        return Counter(self.seated + self._unseated()) == Counter(self._open())

    def _seats_close(self) -> bool:
        seats = sorted([*self.free_seats, *self.kept, *map(_seat, self.seated)])
        return seats == list(range(self.limits.max_seats))

    def _lane_closes(self, lane: RequestClass, background: bool) -> bool:
        groups = [g for g in self.groups.values() if g.request.background == background]
        seated = [seq for seq in self.seated if seq.background == background]
        queue = lane.queue
        return (
            lane.requests == len(groups)
            and lane.n_held == sum(len(group.held) for group in groups)
            and lane.n_seated == len(seated)
            and lane.most_pages == sum(seq.most_pages for seq in seated)
            and queue.expected == sum(seq.expected for seq in queue.members())
            and queue.rows.total() == sum(seq.wanted_rows for seq in queue.members())
            and all(seq.background == background for seq in queue.members())
            and self._backlog_closes(lane.backlog, groups)
        )

    def _backlog_closes(self, backlog: Backlog, groups: list[_Group]) -> bool:
        prompts = [len(group.request.prompt) for group in groups if not group.boarded]
        fresh = [seq for group in groups for seq in group.open if seq.boarded_at is None]
        return (
            backlog.sequences == len(fresh)
            and backlog.tokens == sum(prompts)
            and backlog.expected == sum(seq.expected for seq in fresh)
            and backlog.accounts == Counter(seq.request.account for seq in fresh)
        )


def _seat(seq: Sequence) -> int:
    return seq.seat


def _forget_launched(seq: Sequence) -> None:
    """What launched steps would have brought will not come."""
    seq.in_flight = 0
    if seq.replay is not None and seq.replay.stale:
        seq.replay = None
    # The rows that count as computed before are those of the tokens that are known.
    seq.computed_high = min(seq.computed_high, len(seq.tokens) - 1)
    if seq.first_token_at is None:
        # Its siblings may have had the same list; from now on each scores the rest for itself.
        seq.prompt_logprobs = list(seq.prompt_logprobs)
        seq.scored = len(seq.prompt_logprobs) - 1


def _seat_of(seq: Sequence, seat: int, state: str) -> Seat:
    """A seat and who sits in it, or sat in it last."""
    return Seat(
        seat=seat,
        state=state,
        request_id=seq.request.id,
        background=seq.background,
        index=seq.index,
        n_prompt=seq.n_prompt,
        n_computed=seq.scheduled,
        n_output=seq.n_output,
        max_tokens=seq.max_tokens,
        pages=seq.n_pages,
    )
