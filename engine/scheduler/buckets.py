"""The padded lengths we compile executables for.

Compile keys add, they do not multiply: decode-only buckets have one token per seat (T == S); mixed
buckets have a few token counts and always all the seats.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

#: Decode-only sizes on a GPU or TPU. Reading the weights takes as long for 1 row as for some 300
#: (operations over bytes per second of an H100, two bytes a weight), so padding to the next size is
#: nearly free, and each size costs a program with the sampler and one without. Beyond 64 rows,
#: where logits and caches begin to count, steps are smaller.
_DEVICE_SEATS = (1, 4, 16, 64, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Shapes of one executable: `tokens` rows computed (T), `seats` sequences and logit rows
    (S).
    """

    tokens: int
    seats: int

    @property
    def decode_only(self) -> bool:
        return self.tokens == self.seats

    def __str__(self) -> str:
        return f"decode-{self.seats}" if self.decode_only else f"mixed-{self.tokens}"


@dataclass(frozen=True)
class Buckets:
    """All buckets of an engine, each tuple ascending."""

    decode: tuple[Bucket, ...]
    mixed: tuple[Bucket, ...]

    @cached_property
    def token_budget(self) -> int:
        """The most rows one step computes; no bucket lies above it."""
        return self.mixed[-1].tokens

    @cached_property
    def seats(self) -> int:
        return self.mixed[-1].seats

    def all(self) -> tuple[Bucket, ...]:
        return self.decode + self.mixed

    def choose(self, *, tokens: int, sequences: int, decode_only: bool, logit_rows: int) -> Bucket:
        """The smallest bucket that holds the step.

        Raises ValueError when none does: the scheduler never plans more than the budget.
        """
        seats = max(sequences, logit_rows)
        for bucket in self.decode if decode_only else self.mixed:
            if tokens <= bucket.tokens and seats <= bucket.seats:
                return bucket
        raise ValueError(f"no bucket holds {tokens} rows of {sequences} sequences")

    def thrifty(self, rows: int, count: int, riders: int) -> int:
        """How many of a prompt's next `count` rows to add to a step of `rows` when nobody else will
        board it.

        All of them, or only as many as fill a smaller bucket, the rest riding in the next step with
        `riders` decoding sequences: whichever computes fewer rows, padding included, over the two
        steps.
        """
        total = rows + count
        lower = max((b.tokens for b in self.mixed if rows < b.tokens < total), default=0)
        if not lower:
            return count
        whole = self._padded(total) + self._padded_decode(riders)
        split = lower + self._padded(total - lower + riders)
        return lower - rows if split < whole else count

    def _padded(self, tokens: int) -> int:
        return next((b.tokens for b in self.mixed if tokens <= b.tokens), self.token_budget)

    def _padded_decode(self, sequences: int) -> int:
        return next((b.tokens for b in self.decode if sequences <= b.seats), 0) if sequences else 0


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """low, 2 low, 4 low, ... and always `high` itself as the last."""
    if low >= high:
        return (high,)
    return (low, *powers_of_two(2 * low, high))


def make_buckets(
    *,
    max_seats: int,
    token_budget: int,
    seat_sizes: tuple[int, ...] = (),
    token_sizes: tuple[int, ...] = (),
    on_device: bool = False,
    smallest: int = 1,
) -> Buckets:
    """Buckets from the limits; explicit sizes (already validated by the config) replace the default
    ones.

    On a CPU those are `smallest`, for who is alone, and powers of two from 4 on. on_device: for a
    GPU or TPU, whose decode steps take the sizes of DEVICE_SEATS.
    """
    default = (*(size for size in _DEVICE_SEATS if size < max_seats), max_seats)
    if not on_device:
        default = tuple(
            sorted({min(smallest, max_seats), *powers_of_two(min(4, max_seats), max_seats)})
        )
    seats = tuple(sorted({*seat_sizes, max_seats})) if seat_sizes else default
    lowest = max(2 * seats[-1], token_budget // 8)
    tokens = (
        tuple(sorted({*token_sizes, token_budget}))
        if token_sizes
        else powers_of_two(min(lowest, token_budget), token_budget)
    )
    return Buckets(
        decode=tuple(Bucket(s, s) for s in seats), mixed=tuple(Bucket(t, seats[-1]) for t in tokens)
    )
