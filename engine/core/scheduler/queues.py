"""Waiting sequences: the queue in boarding order, and how much work they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sized
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest
from itertools import chain, count

from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.scheduler.sequence import Sequence

#: Dead entries that a lazily pruned heap may hold beyond its living ones.
_SLACK = 64

#: Key of the order (arrival, priority or length), fresh or preempted, arrival or time of the
#: preemption, index among its siblings.
type _Place = tuple[float, bool, float, int]
type _Entry = tuple[_Place, int, Sequence]
#: The same behind the order of magnitude of its rows.
type _RowsEntry = tuple[int, _Place, int, Sequence]


def overgrown(heap: Sized, living: Sized) -> bool:
    """Whether a lazily pruned heap has too many dead entries."""
    return len(heap) > 2 * len(living) + _SLACK


@dataclass(eq=False)
class WaitingQueue:
    """Sequences by the order's key, then preempted before fresh, then arrival; all is O(log n)
    amortised. `FairQueue` takes turns by tenant.
    """

    #: All sequences in the queue; others only read it.
    waiting: set[Sequence] = field(default_factory=set[Sequence])
    #: Output tokens that they are expected to generate.
    expected: int = 0
    #: Their prompt rows, by the order of magnitude (bits) of what each needs.
    rows: Counter[int] = field(default_factory=Counter[int])
    _heap: list[_Entry] = field(default_factory=list[_Entry])
    #: Prompts with few rows first, within a factor of two in boarding order; pruned lazily, too.
    _by_rows: list[_RowsEntry] = field(default_factory=list[_RowsEntry])
    #: Keeps two entries of one sequence, the older one dead, from being compared.
    _entries: Iterator[int] = field(default_factory=count)

    def push(self, seq: Sequence) -> None:
        """Enter the queue; a preempted sequence goes before fresh ones of its key."""
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
        """The sequence with the fewest prompt rows, within a factor of two the one that boards
        first; None if it has more than `most`.
        """
        heap = self._by_rows
        while heap and heap[0][-1] not in self.waiting:
            heappop(heap)
        return heap[0][-1] if heap and heap[0][-1].wanted_rows <= most else None

    def following(self, head: Sequence, count: int) -> list[Sequence]:
        """The first `count` behind the head, or all if there are fewer; turns of tenants are not
        predicted.
        """
        return nsmallest(count, self.waiting - {head}, key=_place_of)

    def remove(self, seq: Sequence) -> None:
        """A sequence boards, or has ended: its entries are skipped when they come up."""
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
        """A sequence takes a seat."""
        self.remove(seq)

    def ahead(self, seq: Sequence, held: Collection[Sequence] = ()) -> int:
        """How many would board before a newcomer: of the queue, and of `held`, which wait for their
        leader's prompt.
        """
        return sum(other.rank < seq.rank for other in chain(self.waiting, held))

    # Shares of tenants, which only a `FairQueue` has.

    def charge(self, seq: Sequence, tokens: int) -> None:
        """So many tokens, of its prompt or its output, were computed for a sequence."""

    def gave_seat_back(self, seq: Sequence) -> None:
        """A sequence gave back its seat."""

    def claimant(self, seats: int) -> Sequence | None:
        """The sequence that may take a seat of another, of so many seats."""
        return None

    def gives_way(self, seats: int) -> bool:
        """Whether one more tenant, which comes now, might take a seat of another, of so many."""
        return False

    def crowding(self, seats: int) -> set[str]:
        """The tenants (`EngineRequest.account`) that a claimant may take a seat of."""
        return set()


def _place_of(seq: Sequence) -> _Place:
    group, number, index = seq.rank
    if seq.preemptions:  # among these the first to lose its seat
        return (group, False, seq.unseated_at, 0)
    return (group, True, number, index)


class _Backlog:
    """The sequences that wait for their first seat; those that lost a seat are admitted already."""

    def __init__(self) -> None:
        self.sequences = 0
        #: Prompt tokens of the requests none of whose sequences has boarded.
        self.tokens = 0
        #: Output tokens that the sequences are expected to generate.
        self.expected = 0
        #: Sequences by account (`EngineRequest.account`).
        self.accounts: Counter[str] = Counter()

    @property
    def work(self) -> int:
        """Tokens to compute for all that waits."""
        return self.tokens + self.expected

    def enter(self, request: EngineRequest, sequences: list[Sequence]) -> None:
        """A request with all its sequences begins to wait."""
        self.sequences += len(sequences)
        self.tokens += len(request.prompt)
        self.expected += sum(seq.expected for seq in sequences)
        self.accounts[request.account] += len(sequences)

    def leave(self, seq: Sequence) -> None:
        """A sequence boards for the first time, or ends before it did."""
        account = seq.request.account
        self.sequences -= 1
        self.expected -= seq.expected
        self.accounts[account] -= 1
        if not self.accounts[account]:
            del self.accounts[account]


class RequestClass:
    """Requests of one kind: those with a waiting client, or those in the background."""

    def __init__(self, queue: WaitingQueue):
        #: The sequences that wait for a seat.
        self.queue = queue
        #: The requests that are not begun.
        self.backlog = _Backlog()
        #: Open requests.
        self.n_open = 0
        #: Siblings that wait for their leader's prompt.
        self.n_held = 0

    @property
    def n_waiting(self) -> int:
        """Sequences that wait for a seat: fresh, preempted, or held for their leader's prompt."""
        return len(self.queue.waiting) + self.n_held

    def enter(self, request: EngineRequest, sequences: list[Sequence], n_held: int) -> None:
        """A request is admitted. n_held: of its sequences, those that wait for the first one's
        prompt.
        """
        self.n_open += 1
        self.n_held += n_held
        self.backlog.enter(request, sequences)

    def leave(self, request: EngineRequest, *, boarded: bool) -> None:
        """A request has ended. boarded: one of its sequences has had a seat."""
        self.n_open -= 1
        if not boarded:
            self.backlog.tokens -= len(request.prompt)
