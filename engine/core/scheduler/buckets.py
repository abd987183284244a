"""Buckets: the padded step sizes for which executables are compiled.

The numbers of decode and mixed buckets add up and do not multiply: decode-only buckets have one
token per seat (T == S); mixed buckets have a few token counts and all seats. A mixed bucket with
fewer rows than seats has only a part of the seats, so that a prompt beside few decoding sequences
does not need a step of hundreds of rows.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

#: Decode-only sizes on a GPU or TPU. Reading the weights takes as long for 1 row as for some 300
#: (operations over bytes per second of an H100, two bytes a weight), so padding to the next size is
#: nearly free, and each size costs a program with the sampler and one without. Beyond 64 rows the
#: time for logits and KV caches matters, so the sizes are closer together.
_DEVICE_SEATS = (1, 4, 16, 64, 128, 192, 256, 384, 512, 768, 1024)
#: Rows of the smallest mixed buckets on a GPU or TPU, if they are smaller than those for all seats.
#: Up to some 300 rows cost little beside the weights; a step of the next size takes twice as long.
_DEVICE_PROMPT_ROWS = (64, 256)
#: The most rows of the decode bucket for full seats with drafts, unless two for each seat are more.
_ROWS_WITH_DRAFTS = 32
#: A mixed bucket with no more rows than there are seats has one sequence, and one logit row, for
#: each of this many rows.
_ROWS_PER_SEQUENCE = 4


class Bucket(NamedTuple):
    """Shapes of one executable: `tokens` rows computed (T), `seats` sequences and logit rows
    (S).

    Step times are looked up by bucket several times a step; a named tuple's hash is C code.
    """

    #: Rows of the smallest possible mixed bucket.
    fewest_rows = _ROWS_PER_SEQUENCE

    tokens: int
    seats: int

    @classmethod
    def mixed(cls, tokens: int, max_seats: int) -> Bucket:
        """The mixed bucket with `tokens` rows (at least `fewest_rows`) and `max_seats` seats."""
        if tokens > max_seats:
            return cls(tokens, max_seats)
        return cls(tokens, tokens // _ROWS_PER_SEQUENCE)

    @classmethod
    def least_mixed(cls, rows: int, sequences: int, max_seats: int) -> Bucket:
        """The smallest possible mixed bucket that holds a step of these rows and sequences."""
        tokens = max(rows, _ROWS_PER_SEQUENCE * sequences)
        if tokens > max_seats:
            tokens = max(rows, max_seats + 1)
        return cls.mixed(tokens, max_seats)

    @property
    def decode_only(self) -> bool:
        return self.tokens == self.seats

    @property
    def kind(self) -> str:
        return "decode" if self.decode_only else "mixed"

    def __str__(self) -> str:
        return f"decode-{self.seats}" if self.decode_only else f"mixed-{self.tokens}"


@dataclass(frozen=True)
class Buckets:
    """All buckets of an engine, each tuple ascending."""

    decode: tuple[Bucket, ...]
    mixed: tuple[Bucket, ...]
    #: Whether padding rows take next to no time, as on a CPU whose kernels skip them. On a GPU or
    #: TPU, whose time depends on shapes, they take as long as any row.
    padding_is_free: bool = False
    #: The most segments of a step, those of the largest one, between which another step can run
    #: (`engine.core.executor.segments`); 1: no step is cut.
    most_segments: int = 1
    #: The same on a CPU: a segment of a step of 512 rows takes about as long as the step of a short
    #: prompt.
    cpu_segments: ClassVar[int] = 12

    @classmethod
    def of(
        cls,
        *,
        max_seats: int,
        token_budget: int,
        seat_sizes: tuple[int, ...] = (),
        token_sizes: tuple[int, ...] = (),
        on_device: bool = False,
        smallest: int = 1,
    ) -> Buckets:
        """Make buckets from the limits; explicit sizes (already validated by the config) replace
        the default ones.

        The default decode sizes on a CPU are `smallest`, for a single sequence, and powers of two
        from 4 on. on_device: use the sizes for a GPU or TPU, _DEVICE_SEATS for decode steps and
        _DEVICE_PROMPT_ROWS for the smallest mixed steps.
        """
        default = (*(size for size in _DEVICE_SEATS if size < max_seats), max_seats)
        if not on_device:
            default = tuple(
                sorted({min(smallest, max_seats), *powers_of_two(min(4, max_seats), max_seats)})
            )
        seats = tuple(sorted({*seat_sizes, max_seats})) if seat_sizes else default
        tokens = token_sizes or _default_rows(max_seats, token_budget, on_device)
        return cls(
            decode=tuple(Bucket(size, size) for size in seats),
            mixed=tuple(Bucket.mixed(rows, max_seats) for rows in sorted({*tokens, token_budget})),
        )

    def with_drafts(self, most: int) -> Buckets:
        """Add a decode bucket with rows for drafts beside full seats: one draft for each seat, or
        with few seats all `most` drafts that a sequence checks in a step. No change if most is 0.
        """
        if not most:
            return self
        rows = max(2 * self.seats, min((1 + most) * self.seats, _ROWS_WITH_DRAFTS))
        rows = min(rows, self.token_budget)
        return replace(self, decode=(*self.decode, Bucket(rows, rows)))

    @cached_property
    def token_budget(self) -> int:
        """The most rows of one step, those of the largest mixed bucket."""
        return self.mixed[-1].tokens

    @cached_property
    def seats(self) -> int:
        return self.mixed[-1].seats

    def all(self) -> tuple[Bucket, ...]:
        return self.decode + self.mixed

    def segments(self, bucket: Bucket) -> int:
        """Number of segments of a bucket's steps: all segments take about as long."""
        if bucket.decode_only:
            return 1
        return max(1, self.most_segments * bucket.tokens // self.token_budget)

    def choose(self, *, tokens: int, sequences: int, decode_only: bool, logit_rows: int) -> Bucket:
        """The smallest bucket that holds the step.

        Raises ValueError if none does; the scheduler never plans more than the budget.
        """
        seats = max(sequences, logit_rows)
        for bucket in self.decode if decode_only else self.mixed:
            if tokens <= bucket.tokens and seats <= bucket.seats:
                return bucket
        raise ValueError(f"no bucket holds {tokens} rows of {sequences} sequences")

    def mixed_for(self, sequences: int) -> tuple[Bucket, ...]:
        """The mixed buckets that hold `sequences` sequences, ascending; at least the largest."""
        least = min(sequences, self.seats)
        return self.mixed[bisect_left(self.mixed, least, key=lambda bucket: bucket.seats) :]

    def thrifty(self, rows: int, count: int, riders: int, sequences: int) -> int:
        """Number of a prompt's next `count` rows to add to a step of `rows` rows that no other
        prompt joins.

        Either all of them, or only enough to fill a smaller bucket, with the rest in the next step
        beside `riders` decoding sequences: whichever computes fewer rows, padding included, over
        both steps. sequences: sequences of this step, including the prompt's own.
        """
        if self.padding_is_free:
            return count
        total = rows + count
        now, later = self.mixed_for(sequences), self.mixed_for(riders + 1)
        lower = 0
        for bucket in now:
            if rows < bucket.tokens < total:
                lower = bucket.tokens
        if not lower:
            return count
        whole = _padded(now, total) + self._padded_decode(riders)
        split = lower + _padded(later, total - lower + riders)
        return lower - rows if split < whole else count

    def _padded_decode(self, sequences: int) -> int:
        return next((b.tokens for b in self.decode if sequences <= b.seats), 0) if sequences else 0


def _padded(mixed: tuple[Bucket, ...], tokens: int) -> int:
    """Rows of the first of these buckets that holds `tokens` rows, or of the largest bucket."""
    return next((b.tokens for b in mixed if tokens <= b.tokens), mixed[-1].tokens)


def powers_of_two(low: int, high: int) -> tuple[int, ...]:
    """The numbers low, 2 low, 4 low, ... below `high`, and then `high` itself."""
    if low >= high:
        return (high,)
    return (low, *powers_of_two(2 * low, high))


def _default_rows(max_seats: int, token_budget: int, on_device: bool) -> tuple[int, ...]:
    """Rows of the mixed buckets."""
    lowest = min(max(2 * max_seats, token_budget // 8), token_budget)
    few = [rows for rows in _DEVICE_PROMPT_ROWS if rows < lowest] if on_device else []
    return (*few, *powers_of_two(lowest, token_budget))
