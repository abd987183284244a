"""Which padded sizes to compile for: the buckets that waste the fewest rows on steps that were
seen.

Choosing k sizes out of m so that the sum over steps of (bucket - rows) is least is the
one-dimensional k-median with facilities to the right, solved exactly by dynamic programming in O(k
m^2); the two kinds of buckets share one budget of executables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jitney.engine.errors import ConfigError
from jitney.engine.scheduler.buckets import Buckets

#: Executables that a bucket of each kind takes (see `Runner.is_plain`).
DECODE_EXECUTABLES, _MIXED_EXECUTABLES = 2, 1
#: No decode bucket has fewer rows: XLA:CPU takes ten times longer for one bfloat16 row than for
#: four.
_FEWEST_SEATS = 4


@dataclass(frozen=True, slots=True)
class Seen:
    """How often steps of so many rows came, padding excluded: decode-only ones, and those with
    prompt rows.
    """

    decode: Mapping[int, int]
    mixed: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Sizes ascending, executables they take, and rows computed for nothing per kind with the
    proposed and the present sizes, over the steps seen; rows: those computed for somebody."""

    seat_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    executables: int
    padding: dict[str, int]
    padding_now: dict[str, int]
    rows: int

    @property
    def share(self) -> float:
        """Padding's share of all rows with the proposed sizes."""
        return _share(sum(self.padding.values()), self.rows)

    @property
    def share_now(self) -> float:
        """Padding's share of all rows with the present sizes."""
        return _share(sum(self.padding_now.values()), self.rows)


def seen_in(records: np.ndarray) -> Seen:
    """Rows of the steps in `ledger.STEP_DTYPE` records."""
    rows = records["bucket_tokens"] - records["padding"]
    mixed = records["mixed"] == 1
    return Seen(Counter(rows[~mixed].tolist()), Counter(rows[mixed].tolist()))


def propose(seen: Seen, present: Buckets, executables: int) -> Proposal:
    """The best sizes within a budget of executables, for the seats and the token budget of
    `present`.

    Both largest sizes stay: full steps must fit. Raises ConfigError if the budget does not allow
    one bucket of each kind.
    """
    if executables < DECODE_EXECUTABLES + _MIXED_EXECUTABLES:
        raise ConfigError(
            f"a budget of {executables} executables is too small: one decode and one mixed bucket "
            "take "
            f"{DECODE_EXECUTABLES + _MIXED_EXECUTABLES}"
        )
    seats, budget = present.seats, present.token_budget
    decode = {max(rows, min(_FEWEST_SEATS, seats)): 0 for rows in seen.decode}
    for rows, count in seen.decode.items():
        decode[max(rows, min(_FEWEST_SEATS, seats))] += count
    mixed = Counter[int]()
    for rows, count in seen.mixed.items():
        mixed[max(rows, seats + 1)] += count  # a mixed bucket has more rows than seats
    most_decode = (executables - _MIXED_EXECUTABLES) // DECODE_EXECUTABLES
    by_seats = best_sizes(decode, seats, most_decode)
    by_tokens = best_sizes(mixed, budget, executables - DECODE_EXECUTABLES)

    def total(n: int) -> int:
        return (
            by_seats[n][0]
            + by_tokens[min(len(by_tokens) - 1, executables - DECODE_EXECUTABLES * n)][0]
        )

    n_decode = min(range(1, len(by_seats)), key=total)
    n_mixed = min(len(by_tokens) - 1, executables - DECODE_EXECUTABLES * n_decode)
    seat_sizes, token_sizes = by_seats[n_decode][1], by_tokens[n_mixed][1]
    return Proposal(
        seat_sizes,
        token_sizes,
        DECODE_EXECUTABLES * len(seat_sizes) + _MIXED_EXECUTABLES * len(token_sizes),
        {"decode": padding(seen.decode, seat_sizes), "mixed": padding(seen.mixed, token_sizes)},
        {
            "decode": padding(seen.decode, [b.tokens for b in present.decode]),
            "mixed": padding(seen.mixed, [b.tokens for b in present.mixed]),
        },
        sum(rows * count for kind in (seen.decode, seen.mixed) for rows, count in kind.items()),
    )


def best_sizes(
    seen: Mapping[int, int], largest: int, most: int
) -> list[tuple[int, tuple[int, ...]]]:
    """For every k from 0 to `most`: (least padding, the k sizes), `largest` always among them;
    entry 0 is a filler.

    Fewer than `most` entries if more sizes would not help. seen: rows -> steps, all at most
    `largest`.
    """
    sizes = sorted({*seen, largest})
    counts = np.array([seen.get(size, 0) for size in sizes], np.int64)
    rows = np.array(sizes, np.int64)
    steps, sums = (np.concatenate(([0], np.cumsum(column))) for column in (counts, counts * rows))
    # waste[i, j]: padding when sizes i .. j - 1 all run in the bucket of size j - 1.
    ends = np.arange(1, len(sizes) + 1)
    waste = rows[ends - 1] * (steps[ends] - steps[:-1, None]) - (sums[ends] - sums[:-1, None])
    waste = np.where(ends > np.arange(len(sizes))[:, None], waste, np.iinfo(np.int64).max // 4)
    least = np.concatenate(([0], np.full(len(sizes), np.iinfo(np.int64).max // 4)))
    found: list[tuple[int, tuple[int, ...]]] = [(int(least[-1]), ())]
    choices: list[np.ndarray] = []
    for _ in range(min(most, len(sizes))):
        through = least[:-1, None] + waste
        choices.append(through.argmin(axis=0))
        least = np.concatenate(([np.iinfo(np.int64).max // 4], through.min(axis=0)))
        found.append((int(least[-1]), _traced(sizes, choices)))
    return found


def _traced(sizes: Sequence[int], choices: Sequence[np.ndarray]) -> tuple[int, ...]:
    """The sizes that the last stage's best solution uses, walking back over the stages."""
    chosen, end = [], len(sizes)
    for choice in reversed(choices):
        chosen.append(sizes[end - 1])
        end = int(choice[end - 1])
    return tuple(reversed(chosen))


def padding(seen: Mapping[int, int], sizes: Sequence[int]) -> int:
    """Rows computed for nothing when each step takes the smallest size that holds it."""
    return sum(
        count * (min(size for size in sizes if size >= rows) - rows) for rows, count in seen.items()
    )


def _share(wasted: int, rows: int) -> float:
    return wasted / (wasted + rows) if wasted + rows else 0.0
