"""The seats of the running batch and the sequences in them."""

from __future__ import annotations

from heapq import heappop, heappush
from operator import attrgetter

from jitney.engine.common.engine_info import Seat
from jitney.engine.core.scheduler.sequence import Sequence

#: Positions that a decoding sequence attends to.
_by_context = attrgetter("scheduled")


class Seats:
    """Assigns seats to sequences and keeps track of free seats."""

    def __init__(self, count: int, *, holds: bool = False):
        """holds: a batch keeps its seats until its last sequence has left."""
        self.count = count
        self.holds = holds
        #: Free seat numbers, as a heap with the lowest first.
        self.free = list(range(count))
        #: Seated sequences with prompt rows left to compute, in boarding order.
        self.prefilling: dict[Sequence, None] = {}
        #: Seated sequences whose known tokens are all scheduled; see `longest_first`.
        self.decoding: dict[Sequence, None] = {}
        #: Number of background sequences in seats.
        self.n_background = 0
        #: Seats that a batch keeps, with the sequences that left them.
        self.kept: dict[int, Sequence] = {}
        #: Number of times that a sequence gave back its seat.
        self.departures = 0
        # Seats that a batch had kept, that are free again and are not reported yet.
        self._released: list[int] = []
        # Whether `decoding` is in order.
        self._sorted = True

    @property
    def taken(self) -> list[Sequence]:
        """All seated sequences, those with prompt rows to compute first."""
        return [*self.prefilling, *self.decoding]

    @property
    def n_taken(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def n_live(self) -> int:
        """Number of seated sequences that are not in the background."""
        return len(self.prefilling) + len(self.decoding) - self.n_background

    @property
    def live_prompts(self) -> list[Sequence]:
        """The live sequences with prompt rows to compute."""
        return [seq for seq in self.prefilling if not seq.background]

    @property
    def n_decoding_live(self) -> int:
        return self.n_live - len(self.live_prompts)

    @property
    def batch(self) -> int:
        """Number of seats of the running batch, including those that sequences have left."""
        return self.n_taken + len(self.kept)

    def take(self, seq: Sequence) -> None:
        """Seat a boarding sequence at the lowest free seat."""
        seq.seat = heappop(self.free)
        self.prefilling[seq] = None
        self.n_background += seq.background

    def leave(self, seq: Sequence) -> None:
        """Free the seat of a sequence; a batch keeps the seat until its last sequence leaves."""
        self.prefilling.pop(seq, None)
        self.decoding.pop(seq, None)
        self.n_background -= seq.background
        self.departures += 1
        if self.holds:
            self.kept[seq.seat] = seq
            if not self.n_taken:
                self._end_batch()
        else:
            heappush(self.free, seq.seat)
        seq.seat = -1

    def _end_batch(self) -> None:
        self.free = sorted([*self.free, *self.kept])
        self._released += self.kept
        self.kept.clear()

    def take_released(self) -> list[int]:
        """Return the seats that a batch had kept and that became free since the last call."""
        released, self._released = self._released, []
        return released

    def start_decoding(self, seq: Sequence) -> None:
        """Move a sequence to `decoding`: all its known tokens are scheduled."""
        del self.prefilling[seq]
        self.decoding[seq] = None
        self._sorted = False

    def longest_first(self) -> dict[Sequence, None]:
        """The decoding sequences in descending order of context length. All advance together, so
        the order changes only when sequences join, and when some pause (`reorder`).
        """
        if not self._sorted:
            self.decoding = dict.fromkeys(sorted(self.decoding, key=_by_context, reverse=True))
            self._sorted = True
        return self.decoding

    def reorder(self) -> None:
        """Have `longest_first` sort again: not all decoding sequences advance in this step."""
        self._sorted = False

    def map(self) -> list[Seat]:
        """List every seat with its sequence, in order of seat numbers."""
        seats = [Seat(seat=number, state="free") for number in range(self.count)]
        for number, seq in self.kept.items():
            seats[number] = _seat_of(seq, number, "held")
        for seq in self.prefilling:
            seats[seq.seat] = _seat_of(seq, seq.seat, "prefill")
        for seq in self.decoding:
            seats[seq.seat] = _seat_of(seq, seq.seat, "decode")
        return seats

    def claims(self) -> dict[str, bool]:
        """Check the invariants. Returns whether each one holds, by its description."""
        taken = self.taken
        numbers = [seq.seat for seq in taken]
        return {
            "every seat is free, kept or taken once": sorted([*self.free, *self.kept, *numbers])
            == list(range(self.count)),
            "seats are kept only beside a running batch": not self.kept
            or (self.holds and bool(taken)),
            "background sequences in seats are counted": self.n_background
            == sum(seq.background for seq in taken),
            "a decoding sequence has exactly its next token to compute": all(
                len(seq.tokens) + seq.in_flight == seq.scheduled + 1 for seq in self.decoding
            ),
            "decoding sequences are in order": not self._sorted
            or sorted(self.decoding, key=_by_context, reverse=True) == list(self.decoding),
        }


def _seat_of(seq: Sequence, seat: int, state: str) -> Seat:
    """Describe a seat with the sequence that sits in it, or that sat in it last."""
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
