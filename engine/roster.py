"""Every open sequence and the one place it is in: in a seat, in the queue, held back, or leaving."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from jitney.engine.admission import SchedulerLimits
from jitney.engine.errors import ErrorInfo, RequestError
from jitney.engine.pages import PagePool
from jitney.engine.sequence import Sequence
from jitney.engine.types import EngineRequest, FinishReason, SequenceOutput, Slot
from jitney.engine.waiting import SLACK, Backlog, WaitingQueue

#: What an output says when a sequence ends for this reason and no better error is known.
ERRORS = {"deadline": ErrorInfo("deadline_exceeded", "the request's deadline passed before it was done"),
          "error": ErrorInfo("internal_error", "the request was ended by an internal error")}


@dataclass(slots=True, eq=False)
class Group:
    """The open sequences of one request. leader: computes the prompt; held: siblings that wait to share its pages."""

    request: EngineRequest
    open: list[Sequence]
    leader: Sequence
    held: list[Sequence]
    boarded: bool = False


class Roster:
    """Moves sequences between their places; each gets exactly one terminal output, when it is closed.

    prefilling, decoding: seated, the latter with all known tokens scheduled, both in boarding order. leaving: its last
    token is in flight and it needs no row any more, so its seat and pages are already free.
    """

    def __init__(self, limits: SchedulerLimits, pool: PagePool):
        self.limits, self.pool = limits, pool
        self.groups: dict[str, Group] = {}
        self.queue = WaitingQueue()
        self.backlog = Backlog(limits.max_waiting_requests, limits.max_waiting_tokens)
        self.free_seats = list(range(limits.max_seats))  # a heap: low seats first
        self.prefilling: dict[Sequence, None] = {}
        self.decoding: dict[Sequence, None] = {}
        self.leaving: set[Sequence] = set()
        self.finished = 0
        self._deadlines: list[tuple[float, int, Group]] = []  # a heap of (when, arrival, whom), pruned lazily
        self._outputs: list[SequenceOutput] = []

    @property
    def n_seated(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def n_waiting(self) -> int:
        """Sequences that want a seat: fresh, preempted, or held back for their leader's prompt."""
        return len(self.queue) + sum(len(group.held) for group in self.groups.values() if group.held)

    @property
    def has_outputs(self) -> bool:
        return bool(self._outputs)

    def add(self, request: EngineRequest, sequences: list[Sequence], now: float) -> None:
        """Let a request wait; raises RequestError queue_full (nothing is registered then)."""
        self.backlog.admit(len(request.prompt), len(self.free_seats), now)
        leader = sequences[0]
        group = self.groups[request.id] = Group(request, sequences, leader, sequences[1:])
        self.queue.push(leader)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, leader.rank[1], group))

    def refuse_duplicate(self, request: EngineRequest) -> None:
        """Raise RequestError if the id belongs to an open request."""
        if request.id in self.groups:
            raise RequestError(f"request id {request.id!r} is in use", param="request_id")

    def abort(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        """End a request (index None) or one of its sequences; unknown ids have ended already and are no error."""
        group = self.groups.get(request_id)
        for seq in list(group.open) if group else ():
            if index is None or seq.index == index:
                self.end(seq, reason)

    def expire(self, now: float) -> None:
        """End every request whose deadline has come."""
        while self._deadlines and self._deadlines[0][0] <= now:
            group = heappop(self._deadlines)[2]
            for seq in list(group.open):
                self.end(seq, "deadline")

    def drain(self) -> list[SequenceOutput]:
        """Outputs that have not been handed out yet."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def emit(self, output: SequenceOutput) -> None:
        """Hand out an output with the next batch."""
        self._outputs.append(output)

    def end(self, seq: Sequence, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """Close a sequence and emit its terminal output."""
        self.close(seq, reason)
        self.emit(SequenceOutput(request_id=seq.request.id, index=seq.index, finish=reason,
                                 error=error or ERRORS.get(reason)))

    def close(self, seq: Sequence, reason: FinishReason) -> None:
        """Free all that an open sequence has, at once; the caller emits its one terminal output."""
        group = self.groups[seq.request.id]
        seq.finish = reason
        self.finished += 1
        group.open.remove(seq)
        self._leave_place(seq, group)
        if not group.open:
            self._close_group(group)
        elif seq is group.leader and group.held:  # it cannot compute the prompt for them any more
            group.leader = group.held.pop(0)
            self.queue.push(group.leader)

    def _leave_place(self, seq: Sequence, group: Group) -> None:
        if seq.seat >= 0:
            self._unseat(seq)
        elif seq in self.leaving:
            self.leaving.remove(seq)
        elif seq in group.held:
            group.held.remove(seq)
        else:
            self.queue.discard(seq)

    def _close_group(self, group: Group) -> None:
        del self.groups[group.request.id]
        if not group.boarded:
            self.backlog.leave(len(group.request.prompt))
        if len(self._deadlines) > 2 * len(self.groups) + SLACK:
            self._deadlines = [entry for entry in self._deadlines if entry[2].open]
            heapify(self._deadlines)

    def seat(self, seq: Sequence, now: float) -> None:
        """The head of the queue boards, at the lowest free seat."""
        self.queue.pop()
        group = self.groups[seq.request.id]
        if not group.boarded:
            group.boarded = True
            self.backlog.boarded(seq.n_prompt, now)
        if seq.boarded_at is None:
            seq.boarded_at = now
        seq.seat = heappop(self.free_seats)
        self.prefilling[seq] = None

    def start_decoding(self, seq: Sequence) -> None:
        """All its known tokens are scheduled."""
        del self.prefilling[seq]
        self.decoding[seq] = None

    def leave_early(self, seq: Sequence) -> None:
        """Its last token is in flight: the seat and the pages are free for the step being planned."""
        self._unseat(seq)
        self.leaving.add(seq)

    def preempt(self, seq: Sequence) -> None:
        """Back to the front of the queue; its tokens stay, a token in flight still counts, its KV is recomputed."""
        self._unseat(seq)
        seq.scheduled = 0
        seq.preemptions += 1
        self.queue.push(seq)

    def _unseat(self, seq: Sequence) -> None:
        self.pool.release(seq.pages)
        heappush(self.free_seats, seq.seat)
        seq.pages, seq.published, seq.seat = [], 0, -1
        self.prefilling.pop(seq, None)
        self.decoding.pop(seq, None)

    def release_siblings(self, leader: Sequence) -> None:
        """The leader's whole prompt is scheduled and published: its siblings may board and share it."""
        group = self.groups[leader.request.id]
        if leader is group.leader:
            for sibling in group.held:
                sibling.keys = leader.keys[: leader.n_prompt // self.pool.page_size]
                self.queue.push(sibling)
            group.held = []

    def slots(self) -> list[Slot]:
        """Every seat, in order, with who sits in it."""
        slots = {seat: Slot(seat=seat, state="free") for seat in range(self.limits.max_seats)}
        for seq in (*self.prefilling, *self.decoding):
            slots[seq.seat] = Slot(seat=seq.seat, state="decode" if seq in self.decoding else "prefill",
                                   request_id=seq.request.id, index=seq.index, n_prompt=seq.n_prompt,
                                   n_computed=seq.scheduled, n_output=seq.n_output, max_tokens=seq.max_tokens,
                                   pages=len(seq.pages))
        return list(slots.values())

    def check(self) -> None:
        """Raise RuntimeError unless every sequence, seat, page and waiting token is accounted for exactly once."""
        seated = [*self.prefilling, *self.decoding]
        groups = self.groups.values()
        unseated = [*self.queue.members(), *self.leaving, *(seq for group in groups for seq in group.held)]
        places = seated + unseated
        waiting = [len(group.request.prompt) for group in groups if not group.boarded]
        self.pool.check(seq.pages for seq in seated)
        claims = {
            "every open sequence is in exactly one place":
                len(places) == len(set(places)) and set(places) == {seq for group in groups for seq in group.open},
            "no request without open sequences is kept": all(group.open for group in groups),
            "every seat is free or taken once":
                sorted([*self.free_seats, *(seq.seat for seq in seated)]) == list(range(self.limits.max_seats)),
            "only seated sequences hold pages": not any(seq.pages or seq.seat >= 0 for seq in unseated),
            "a decoding sequence has exactly its next token to compute":
                all(len(seq.tokens) + seq.in_flight == seq.scheduled + 1 for seq in self.decoding),
            "the queue knows its length": len(self.queue) == len(self.queue.members()),
            "the backlog is what waits": (self.backlog.requests, self.backlog.tokens) == (len(waiting), sum(waiting)),
        }
        broken = [claim for claim, holds in claims.items() if not holds]
        if broken:
            raise RuntimeError("not true any more: " + "; ".join(broken))
