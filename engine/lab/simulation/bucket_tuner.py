"""Chooses the padded sizes to compile for: the buckets in which recorded steps take the least time.

Choosing k sizes out of m that minimise the total seconds of all steps in their buckets is the
one-dimensional k-median problem with facilities to the right. Dynamic programming solves it exactly
in O(k m^2). The two kinds of buckets share one budget of executables.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jitney.engine.common.errors import ConfigError
from jitney.engine.core import Bucket, Buckets, StepTimes, StepWork
from jitney.engine.lab.simulation.step_table import works_of

#: Executables per bucket of each kind (see `StepPrograms.runs_greedy_only`).
DECODE_EXECUTABLES, _MIXED_EXECUTABLES = 2, 1
#: Most sizes of one kind that are tried; if more were recorded, neighbours are merged.
_MOST_SIZES = 400

#: Decimals of seconds to which choices are compared.
_DIGITS = 9

#: (rows of a step, rows of its bucket) -> seconds of all steps with that many rows.
_Cost = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Sizes to compile for, and their savings on the recorded steps."""

    #: Sizes, ascending.
    seat_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    #: Executables for these sizes.
    executables: int
    #: Padding rows by kind ("decode", "mixed"), with these sizes and with the present ones.
    padding: dict[str, int]
    padding_now: dict[str, int]
    #: Rows that are not padding.
    rows: int
    #: Seconds of all recorded steps, with these sizes and with the present ones.
    seconds: float
    seconds_now: float

    @property
    def rows_saved(self) -> int:
        """Padding rows that the proposed sizes save compared with the present ones."""
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
    """Counts of steps by their rows without padding: decode-only steps by rows, and steps with
    prompt rows by rows and taken seats.
    """

    decode: Mapping[int, int]
    mixed: Mapping[tuple[int, int], int]
    #: Mean work of the steps with each key; if missing, only the rows, without attention.
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
        """The sizes with the least total step time within a budget of executables, for the seats
        and the token budget of `present`.

        The largest size of each kind stays, since full steps must fit. Raises ConfigError if the
        budget does not allow one bucket of each kind.
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
        if key in self.works:
            return self.works[key]
        return StepWork(decode=key) if isinstance(key, int) else StepWork(prompt=key[0])


def check_budget(executables: int) -> None:
    """Raise ConfigError for fewer executables than any engine needs."""
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
    # Of equally fast choices, the one with the fewest sizes.
    _, seat_sizes, token_sizes = min(choices, key=lambda c: (c[0], len(c[1]) + len(c[2])))
    return seat_sizes, token_sizes


class _Steps:
    """Steps of one kind by their smallest possible bucket: their number and their mean work."""

    def __init__(self) -> None:
        self.counts = Counter[int]()
        self._sums: dict[int, np.ndarray] = {}

    def add(self, rows: int, count: int, work: StepWork) -> None:
        self.counts[rows] += count
        self._sums[rows] = self._sums.get(rows, 0) + count * np.array(work, float)

    def _work(self, rows: int) -> StepWork:
        return StepWork(*(self._sums[rows] / self.counts[rows]).tolist())

    def thinned(self, largest: int) -> _Steps:
        """A copy with at most _MOST_SIZES sizes; others are merged into the next larger one."""
        sizes = sorted({*self.counts, largest})
        allowed = sizes[::-1][:: -(-len(sizes) // _MOST_SIZES)][::-1]
        thin = _Steps()
        for rows, count in self.counts.items():
            thin.add(next(size for size in allowed if rows <= size), count, self._work(rows))
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
    """For every k from 0 to `most`: (least seconds, the k sizes), which include the largest; entry
    0 is a filler.

    There are fewer entries if more sizes would not help. sizes: of the steps, ascending.
    """
    count = len(sizes)
    # [i, j]: seconds when sizes i .. j all run in the bucket of size j.
    together = np.full((count, count), np.inf)
    for j, size in enumerate(sizes):
        alone = [cost(rows, size) for rows in sizes[: j + 1]]
        together[: j + 1, j] = np.cumsum(alone[::-1])[::-1]
    least = np.full(count + 1, np.inf)
    least[0] = 0
    solutions: list[tuple[float, _Sizes]] = [(float(least[-1]), ())]
    choices: list[np.ndarray] = []
    for _ in range(min(most, count)):
        through = least[:-1, None] + together
        choices.append(through.argmin(axis=0))
        least = np.concatenate(([np.inf], through.min(axis=0)))
        solutions.append((float(least[-1]), _traced(sizes, choices)))
    return solutions


def _traced(sizes: Sequence[int], choices: Sequence[np.ndarray]) -> _Sizes:
    """The sizes of the last stage's best solution, walking back over the stages."""
    chosen, end = [], len(sizes)
    for choice in reversed(choices):
        chosen.append(sizes[end - 1])
        end = int(choice[end - 1])
    return tuple(reversed(chosen))


def _share(wasted: int, rows: int) -> float:
    return wasted / max(1, wasted + rows)
