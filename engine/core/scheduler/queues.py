"""Waiting sequences: the queue in boarding order, and the backlog of their work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sized
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest
from itertools import chain, count

from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.scheduler.sequence import Sequence

#: Stale entries that a lazily pruned heap may hold beyond the number of valid ones.
_SLACK = 64

#: (class by the order, whether fresh (not preempted), request number or time of the preemption,
#: index among its siblings).
type _Place = tuple[float, bool, float, int]
type _Entry = tuple[_Place, int, Sequence]
#: The same entry after the bit length of its number of rows.
type _RowsEntry = tuple[int, _Place, int, Sequence]


def overgrown(heap: Sized, living: Sized) -> bool:
    """Whether a lazily pruned heap has too many stale entries."""
    return len(heap) > 2 * len(living) + _SLACK


@dataclass(eq=False)
class WaitingQueue:
    """Sequences sorted by the order's class, then preempted before fresh, then by arrival; all
    operations are O(log n) amortised. `FairQueue` takes turns by tenant.
    """

    #: All sequences in the queue; other classes only read it.
    waiting: set[Sequence] = field(default_factory=set[Sequence])
    #: Output tokens that the waiting sequences are expected to generate.
    expected: int = 0
    #: Sum of the waiting sequences' prompt rows, by the bit length of each one's number of rows.
    rows: Counter[int] = field(default_factory=Counter[int])
    _heap: list[_Entry] = field(default_factory=list[_Entry])
    #: Heap by number of prompt rows; within a factor of two in boarding order. Pruned lazily too.
    _by_rows: list[_RowsEntry] = field(default_factory=list[_RowsEntry])
    #: Entry numbers, so that two entries of one sequence, the older one stale, compare unequal.
    _entries: Iterator[int] = field(default_factory=count)

    def push(self, seq: Sequence) -> None:
        """Add a sequence; a preempted one goes before fresh ones of its class."""
        place, number = _place_of(seq), next(self._entries)
        heappush(self._heap, (place, number, seq))
        size = seq.wanted_rows.bit_length()
        heappush(self._by_rows, (size, place, number, seq))
        self.rows[size] += seq.wanted_rows
        self.waiting.add(seq)
        self.expected += seq.expected

    def head(self) -> Sequence | None:
        """The sequence that boards next, unless a short prompt passes it (`Passing`)."""
        heap = self._heap
        while heap and heap[0][2] not in self.waiting:
            heappop(heap)
        return heap[0][2] if heap else None

    def shortest(self, most: int) -> Sequence | None:
        """The sequence with the fewest prompt rows; within a factor of two, the one that boards
        first. None if it has more than `most` rows.
        """
        heap = self._by_rows
        while heap and heap[0][-1] not in self.waiting:
            heappop(heap)
        return heap[0][-1] if heap and heap[0][-1].wanted_rows <= most else None

    def following(self, head: Sequence, count: int) -> list[Sequence]:
        """The first `count` sequences behind the head, or all if there are fewer. Turns of tenants
        are not predicted.
        """
        return nsmallest(count, self.waiting - {head}, key=_place_of)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that boards or has ended; its heap entries become stale."""
        self.waiting.remove(seq)
        self.rows[seq.wanted_rows.bit_length()] -= seq.wanted_rows
        self.expected -= seq.expected
        if overgrown(self._heap, self.waiting):
            self._heap = self._living(self._heap)
        if overgrown(self._by_rows, self.waiting):
            self._by_rows = self._living(self._by_rows)

    def _living[E: (_Entry, _RowsEntry)](self, heap: list[E]) -> list[E]:
        """The heap without the entries of sequences that have left the queue."""
        living = [entry for entry in heap if entry[-1] in self.waiting]
        heapify(living)
        return living

    def board(self, seq: Sequence) -> None:
        """Remove a sequence that takes a seat."""
        self.remove(seq)

    def ahead(self, seq: Sequence, held: Collection[Sequence] = ()) -> int:
        """Number of sequences that board before a newcomer, among the queue and `held`, the
        sequences that wait for their leader's prompt.
        """
        return sum(other.rank < seq.rank for other in chain(self.waiting, held))

    # The methods below are hooks for `FairQueue`, which gives shares to tenants.

    def charge(self, seq: Sequence, tokens: int) -> None:
        """Charge a sequence's tenant for `tokens` computed prompt or output tokens."""

    def gave_seat_back(self, seq: Sequence) -> None:
        """Note that a sequence gave back its seat."""

    def claimant(self, seats: int) -> Sequence | None:
        """The sequence that may take a seat of another tenant. seats: number of all seats."""
        return None

    def gives_way(self, seats: int) -> bool:
        """Whether a new tenant that arrives now may take a seat of another tenant."""
        return False

    def crowding(self, seats: int) -> set[str]:
        """The tenants (`EngineRequest.account`) whose seats a claimant may take."""
        return set()


def _place_of(seq: Sequence) -> _Place:
    group, number, index = seq.rank
    if seq.preemptions:  # preempted sequences: by the time at which they lost their seat
        return (group, False, seq.unseated_at, 0)
    return (group, True, number, index)


class _Backlog:
    """Counts of the sequences that wait for their first seat. Preempted ones are not counted."""

    def __init__(self) -> None:
        self.sequences = 0
        #: Prompt tokens of the requests of which no sequence has boarded.
        self.tokens = 0
        #: Output tokens that the sequences are expected to generate.
        self.expected = 0
        #: Number of sequences by account (`EngineRequest.account`).
        self.accounts: Counter[str] = Counter()

    @property
    def work(self) -> int:
        """Tokens to compute for all waiting sequences."""
        return self.tokens + self.expected

    def enter(self, request: EngineRequest, sequences: list[Sequence]) -> None:
        """Add a request that begins to wait, with all its sequences."""
        self.sequences += len(sequences)
        self.tokens += len(request.prompt)
        self.expected += sum(seq.expected for seq in sequences)
        self.accounts[request.account] += len(sequences)

    def leave(self, seq: Sequence) -> None:
        """Remove a sequence that boards for the first time, or that ends without having boarded."""
        account = seq.request.account
        self.sequences -= 1
        self.expected -= seq.expected
        self.accounts[account] -= 1
        if not self.accounts[account]:
            del self.accounts[account]


class RequestClass:
    """The requests of one class: live requests, or background requests."""

    def __init__(self, queue: WaitingQueue):
        #: Sequences that wait for a seat.
        self.queue = queue
        #: Work of the sequences that have not boarded yet.
        self.backlog = _Backlog()
        #: Number of open requests.
        self.n_open = 0
        #: Number of siblings that wait for their leader's prompt.
        self.n_held = 0

    @property
    def n_waiting(self) -> int:
        """Number of sequences that wait: fresh, preempted, or held for their leader's prompt."""
        return len(self.queue.waiting) + self.n_held

    def enter(self, request: EngineRequest, sequences: list[Sequence], n_held: int) -> None:
        """Add an admitted request. n_held: number of its sequences that wait for the first one's
        prompt.
        """
        self.n_open += 1
        self.n_held += n_held
        self.backlog.enter(request, sequences)

    def leave(self, request: EngineRequest, *, boarded: bool) -> None:
        """Remove a request that has ended. boarded: whether one of its sequences has had a seat."""
        self.n_open -= 1
        if not boarded:
            self.backlog.tokens -= len(request.prompt)
