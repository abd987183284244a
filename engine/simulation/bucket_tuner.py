"""Which padded sizes to compile for: the buckets that waste the fewest rows on steps that were
seen.

Choosing k sizes out of m so that the sum over steps of (bucket - rows) is least is the
one-dimensional k-median with facilities to the right, solved exactly by dynamic programming in O(k
m^2); the two kinds of buckets share one budget of executables.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jitney.engine.errors import ConfigError
from jitney.engine.scheduler.buckets import Bucket, Buckets

#: Executables that a bucket of each kind takes (see `Runner.is_plain`).
DECODE_EXECUTABLES, _MIXED_EXECUTABLES = 2, 1
#: No decode bucket has fewer rows: XLA:CPU takes ten times longer for one bfloat16 row than for
#: four.
_FEWEST_SEATS = 4
#: Padding of what is not possible.
_NEVER = np.iinfo(np.int64).max // 4


@dataclass(frozen=True, slots=True)
class Proposal:
    """Sizes to compile for, and what they would save on the steps seen."""

    #: Ascending.
    seat_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    #: How many they take.
    executables: int
    #: Rows computed for nothing by kind ("decode", "mixed"), with these sizes and the present ones.
    padding: dict[str, int]
    padding_now: dict[str, int]
    #: Rows computed for somebody.
    rows: int

    @property
    def rows_saved(self) -> int:
        """Rows that the proposed sizes do not compute for nothing, and the present ones do."""
        return sum(self.padding_now.values()) - sum(self.padding.values())

    @property
    def share(self) -> float:
        """Padding's share of all rows with the proposed sizes."""
        return _share(sum(self.padding.values()), self.rows)

    @property
    def share_now(self) -> float:
        """Padding's share of all rows with the present sizes."""
        return _share(sum(self.padding_now.values()), self.rows)


@dataclass(frozen=True, slots=True)
class SeenSteps:
    """How often steps of so many rows came, padding excluded: decode-only ones, and those with
    prompt rows, which by rows and by the seats that were taken.
    """

    decode: Mapping[int, int]
    mixed: Mapping[tuple[int, int], int]

    @classmethod
    def of(cls, records: np.ndarray) -> SeenSteps:
        """Rows of the steps in `ledger.STEP_DTYPE` records."""
        rows = records["bucket_tokens"] - records["padding"]
        mixed = records["mixed"] == 1
        together = zip(rows[mixed].tolist(), records["seats_busy"][mixed].tolist(), strict=True)
        return cls(Counter(rows[~mixed].tolist()), Counter(together))

    def propose(self, present: Buckets, executables: int) -> Proposal:
        """The best sizes within a budget of executables, for the seats and the token budget of
        `present`.

        Both largest sizes stay: full steps must fit. Raises ConfigError if the budget does not
        allow one bucket of each kind.
        """
        check_budget(executables)
        seat_sizes, token_sizes = _least_waste(self, present, executables)
        proposed = Buckets.of(
            max_seats=present.seats,
            token_budget=present.token_budget,
            seat_sizes=seat_sizes,
            token_sizes=token_sizes,
        )
        rows_of_prompts = sum(rows * count for (rows, _), count in self.mixed.items())
        return Proposal(
            seat_buckets=seat_sizes,
            token_buckets=token_sizes,
            executables=DECODE_EXECUTABLES * len(seat_sizes)
            + _MIXED_EXECUTABLES * len(token_sizes),
            padding=_paddings(self, proposed),
            padding_now=_paddings(self, present),
            rows=_total(self.decode) + rows_of_prompts,
        )


def check_budget(executables: int) -> None:
    """Raises ConfigError for fewer than any engine needs."""
    least = DECODE_EXECUTABLES + _MIXED_EXECUTABLES
    if executables < least:
        raise ConfigError(
            f"a budget of {executables} executables is too small: one decode and one mixed bucket "
            f"take {least}"
        )


def _least_waste(seen: SeenSteps, present: Buckets, executables: int) -> tuple[_Sizes, _Sizes]:
    """(seat sizes, token sizes): the best way to share the executables between both kinds."""
    seats, budget = present.seats, present.token_budget
    decode = _at_least(seen.decode, min(_FEWEST_SEATS, seats))
    mixed = Counter[int]()
    for (rows, taken), count in seen.mixed.items():
        mixed[Bucket.least_mixed(rows, taken, seats).tokens] += count
    most_decode = (executables - _MIXED_EXECUTABLES) // DECODE_EXECUTABLES
    by_seats = _best_sizes(decode, seats, most_decode)
    by_tokens = _best_sizes(mixed, budget, executables - DECODE_EXECUTABLES)
    choices = []
    for waste, seat_sizes in by_seats[1:]:
        left = executables - DECODE_EXECUTABLES * len(seat_sizes)
        more_waste, token_sizes = by_tokens[min(len(by_tokens) - 1, left)]
        choices.append((waste + more_waste, seat_sizes, token_sizes))
    _, seat_sizes, token_sizes = min(choices, key=lambda choice: choice[0])
    return seat_sizes, token_sizes


def _at_least(seen: Mapping[int, int], fewest: int) -> Counter[int]:
    """Steps of fewer rows counted as steps of that many."""
    raised = Counter[int]()
    for rows, count in seen.items():
        raised[max(rows, fewest)] += count
    return raised


def _total(seen: Mapping[int, int]) -> int:
    return sum(rows * count for rows, count in seen.items())


def _paddings(seen: SeenSteps, buckets: Buckets) -> dict[str, int]:
    """Rows computed for nothing by kind."""
    mixed = 0
    for (rows, taken), count in seen.mixed.items():
        bucket = next(each for each in buckets.mixed_for(taken) if rows <= each.tokens)
        mixed += count * (bucket.tokens - rows)
    decode = _padding(seen.decode, [bucket.tokens for bucket in buckets.decode])
    return {"decode": decode, "mixed": mixed}


#: Ascending rows.
_Sizes = tuple[int, ...]


def _best_sizes(
    seen: Mapping[int, int], largest: int, most: int
) -> list[tuple[int, tuple[int, ...]]]:
    """For every k from 0 to `most`: (least padding, the k sizes), `largest` always among them;
    entry 0 is a filler.

    Fewer than `most` entries if more sizes would not help. seen: rows -> steps, all at most
    `largest`.
    """
    sizes = sorted({*seen, largest})
    waste = _waste(seen, sizes)
    least = np.full(len(sizes) + 1, _NEVER)
    least[0] = 0
    found: list[tuple[int, tuple[int, ...]]] = [(int(least[-1]), ())]
    choices: list[np.ndarray] = []
    for _ in range(min(most, len(sizes))):
        through = least[:-1, None] + waste
        choices.append(through.argmin(axis=0))
        least = np.concatenate(([_NEVER], through.min(axis=0)))
        found.append((int(least[-1]), _traced(sizes, choices)))
    return found


def _waste(seen: Mapping[int, int], sizes: Sequence[int]) -> np.ndarray:
    """[i, j]: padding when sizes i .. j all run in the bucket of size j."""
    rows = np.array(sizes, np.int64)
    counts = np.array([seen.get(size, 0) for size in sizes], np.int64)
    ends = np.cumsum(counts)
    sums = np.cumsum(counts * rows)
    steps_in = ends - (ends - counts)[:, None]
    rows_in = sums - (sums - counts * rows)[:, None]
    order = np.arange(len(sizes))
    return np.where(order >= order[:, None], rows * steps_in - rows_in, _NEVER)


def _traced(sizes: Sequence[int], choices: Sequence[np.ndarray]) -> tuple[int, ...]:
    """The sizes that the last stage's best solution uses, walking back over the stages."""
    chosen, end = [], len(sizes)
    for choice in reversed(choices):
        chosen.append(sizes[end - 1])
        end = int(choice[end - 1])
    return tuple(reversed(chosen))


def _padding(seen: Mapping[int, int], sizes: Sequence[int]) -> int:
    """Rows computed for nothing when each step takes the smallest size that holds it."""
    ascending = sorted(sizes)
    pairs = seen.items()
    return sum(n * (ascending[bisect_left(ascending, rows)] - rows) for rows, n in pairs)


def _share(wasted: int, rows: int) -> float:
    return wasted / max(1, wasted + rows)
