"""Which padded sizes to compile for: the buckets in which steps that were seen take the least time.

Choosing k sizes out of m so that the sum over steps of the seconds in their bucket is least is the
one-dimensional k-median with facilities to the right, solved exactly by dynamic programming in O(k
m^2); the two kinds of buckets share one budget of executables.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jitney.engine.common.errors import ConfigError
from jitney.engine.core import Bucket, Buckets, StepWork
from jitney.engine.lab.simulation.step_table import StepTimes, works_of

#: Executables that a bucket of each kind takes (see `StepPrograms.runs_greedy_only`).
DECODE_EXECUTABLES, _MIXED_EXECUTABLES = 2, 1
#: Sizes of one kind that are tried at most: of more that were seen, neighbours count as one.
_MOST_SIZES = 400

#: Of seconds, by which choices differ.
_DIGITS = 9

#: Rows of a step, and of the bucket that it runs in -> seconds, of all steps of so many rows.
_Cost = Callable[[int, int], float]


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
    #: Rows that are not padding.
    rows: int
    #: Seconds of all steps seen, with these sizes and the present ones.
    seconds: float
    seconds_now: float

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
    """Counts of steps by their rows, padding excluded: decode-only ones, and those with
    prompt rows, which by rows and by the seats that were taken.
    """

    decode: Mapping[int, int]
    mixed: Mapping[tuple[int, int], int]
    #: What each of these computed, on average; missing: its rows, which attended to nothing.
    works: Mapping[int | tuple[int, int], StepWork] = field(default_factory=dict)

    @classmethod
    def of(cls, records: np.ndarray) -> SeenSteps:
        """The steps in `ledger.STEP_DTYPE` records."""
        rows = (records["bucket_tokens"] - records["padding"]).tolist()
        seats = records["seats_busy"].tolist()
        decode, mixed = Counter[int](), Counter[tuple[int, int]]()
        works: defaultdict[int | tuple[int, int], list[StepWork]] = defaultdict(list)
        for at, work in enumerate(works_of(records)):
            if records["mixed"][at]:
                mixed[rows[at], seats[at]] += 1
                works[rows[at], seats[at]].append(work)
            else:
                decode[rows[at]] += 1
                works[rows[at]].append(work)
        means = {key: StepWork(*np.mean(some, axis=0).tolist()) for key, some in works.items()}
        return cls(decode, mixed, means)

    def propose(self, present: Buckets, executables: int, times: StepTimes) -> Proposal:
        """The best sizes within a budget of executables, for the seats and the token budget of
        `present`, by how long steps take.

        Both largest sizes stay: full steps must fit. Raises ConfigError if the budget does not
        allow one bucket of each kind.
        """
        check_budget(executables)
        seat_sizes, token_sizes = _least_time(self, present, executables, times)
        proposed = Buckets.of(
            max_seats=present.seats,
            token_budget=present.token_budget,
            seat_sizes=seat_sizes,
            token_sizes=token_sizes,
        )
        prompts = sum(rows * count for (rows, _), count in self.mixed.items())
        padding, seconds = self._in(proposed, times)
        padding_now, seconds_now = self._in(present, times)
        return Proposal(
            seat_buckets=seat_sizes,
            token_buckets=token_sizes,
            executables=DECODE_EXECUTABLES * len(seat_sizes)
            + _MIXED_EXECUTABLES * len(token_sizes),
            padding=padding,
            padding_now=padding_now,
            rows=sum(rows * count for rows, count in self.decode.items()) + prompts,
            seconds=seconds,
            seconds_now=seconds_now,
        )

    def _in(self, buckets: Buckets, times: StepTimes) -> tuple[dict[str, int], float]:
        """(padding rows by kind, seconds) of all steps in these buckets."""
        padding, seconds = {"decode": 0, "mixed": 0}, 0.0
        for rows, count in self.decode.items():
            bucket = next(each for each in buckets.decode if rows <= each.tokens)
            padding["decode"] += count * (bucket.tokens - rows)
            seconds += count * times.seconds(bucket, self.work(rows))
        for (rows, taken), count in self.mixed.items():
            bucket = next(each for each in buckets.mixed_for(taken) if rows <= each.tokens)
            padding["mixed"] += count * (bucket.tokens - rows)
            seconds += count * times.seconds(bucket, self.work((rows, taken)))
        return padding, seconds

    def work(self, key: int | tuple[int, int]) -> StepWork:
        """The work of a step of `decode` or `mixed`."""
        if key in self.works:
            return self.works[key]
        return StepWork(decode=key) if isinstance(key, int) else StepWork(prompt=key[0])


def check_budget(executables: int) -> None:
    """Raises ConfigError for fewer than any engine needs."""
    least = DECODE_EXECUTABLES + _MIXED_EXECUTABLES
    if executables < least:
        raise ConfigError(
            f"a budget of {executables} executables is too small: one decode and one mixed bucket "
            f"take {least}"
        )


def _least_time(
    seen: SeenSteps, present: Buckets, executables: int, times: StepTimes
) -> tuple[_Sizes, _Sizes]:
    """(seat sizes, token sizes): the best way to share the executables between both kinds."""
    seats, budget = present.seats, present.token_budget
    decode, mixed = _Steps(), _Steps()
    for rows, count in seen.decode.items():
        decode.add(rows, count, seen.work(rows))
    for (rows, taken), count in seen.mixed.items():
        least = Bucket.least_mixed(rows, taken, seats).tokens
        mixed.add(least, count, seen.work((rows, taken)))
    by_seats = decode.thinned(seats).best_sizes(
        seats,
        (executables - _MIXED_EXECUTABLES) // DECODE_EXECUTABLES,
        lambda work, size: times.seconds(Bucket(size, size), work),
    )
    by_tokens = mixed.thinned(budget).best_sizes(
        budget,
        executables - DECODE_EXECUTABLES,
        lambda work, size: times.seconds(Bucket.mixed(size, seats), work),
    )
    choices = []
    for seconds, seat_sizes in by_seats[1:]:
        left = executables - DECODE_EXECUTABLES * len(seat_sizes)
        for more_seconds, token_sizes in by_tokens[1 : left + 1]:
            choices.append((round(seconds + more_seconds, _DIGITS), seat_sizes, token_sizes))
    # A size that saves nothing is no program.
    _, seat_sizes, token_sizes = min(choices, key=lambda c: (c[0], len(c[1]) + len(c[2])))
    return seat_sizes, token_sizes


class _Steps:
    """Steps of one kind by the least bucket that holds them: how many, and their mean work."""

    def __init__(self) -> None:
        self.counts = Counter[int]()
        self._sums: dict[int, np.ndarray] = {}

    def add(self, rows: int, count: int, work: StepWork) -> None:
        """So many more of so many rows."""
        self.counts[rows] += count
        self._sums[rows] = self._sums.get(rows, 0) + count * np.array(work, float)

    def _work(self, rows: int) -> StepWork:
        return StepWork(*(self._sums[rows] / self.counts[rows]).tolist())

    def thinned(self, largest: int) -> _Steps:
        """The same with at most _MOST_SIZES sizes; others count as the next larger one."""
        sizes = sorted({*self.counts, largest})
        kept = sizes[::-1][:: -(-len(sizes) // _MOST_SIZES)][::-1]
        thin = _Steps()
        for rows, count in self.counts.items():
            thin.add(next(size for size in kept if rows <= size), count, self._work(rows))
        return thin

    def best_sizes(
        self, largest: int, most: int, seconds: Callable[[StepWork, int], float]
    ) -> list[tuple[float, _Sizes]]:
        """See `_best_sizes`. seconds: of a step, from its work and its bucket's size."""

        def cost(rows: int, size: int) -> float:
            count = self.counts[rows]
            return count * seconds(self._work(rows), size) if count else 0.0

        return _best_sizes(sorted({*self.counts, largest}), most, cost)


#: Ascending rows.
_Sizes = tuple[int, ...]


def _best_sizes(sizes: Sequence[int], most: int, cost: _Cost) -> list[tuple[float, _Sizes]]:
    """For every k from 0 to `most`: (least seconds, the k sizes), the largest always among them;
    entry 0 is a filler.

    Fewer than `most` entries if more sizes would not help. sizes: ascending, of the steps.
    """
    count = len(sizes)
    # [i, j]: seconds when sizes i .. j all run in the bucket of size j.
    together = np.full((count, count), np.inf)
    for j, size in enumerate(sizes):
        alone = [cost(rows, size) for rows in sizes[: j + 1]]
        together[: j + 1, j] = np.cumsum(alone[::-1])[::-1]
    least = np.full(count + 1, np.inf)
    least[0] = 0
    found: list[tuple[float, _Sizes]] = [(float(least[-1]), ())]
    choices: list[np.ndarray] = []
    for _ in range(min(most, count)):
        through = least[:-1, None] + together
        choices.append(through.argmin(axis=0))
        least = np.concatenate(([np.inf], through.min(axis=0)))
        found.append((float(least[-1]), _traced(sizes, choices)))
    return found


def _traced(sizes: Sequence[int], choices: Sequence[np.ndarray]) -> _Sizes:
    """The sizes of the last stage's best solution, walking back over the stages."""
    chosen, end = [], len(sizes)
    for choice in reversed(choices):
        chosen.append(sizes[end - 1])
        end = int(choice[end - 1])
    return tuple(reversed(chosen))


def _share(wasted: int, rows: int) -> float:
    return wasted / max(1, wasted + rows)
