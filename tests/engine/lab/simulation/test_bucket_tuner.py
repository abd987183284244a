"""The bucket tuner against every choice there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from jitney.engine.common.records import STEP_DTYPE
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.core.scheduler.plan import StepWork
from jitney.engine.lab.simulation import bucket_tuner
from jitney.engine.lab.simulation.bucket_tuner import SeenSteps, _best_sizes
from jitney.engine.lab.simulation.roofline import Roofline
from jitney.engine.lab.simulation.step_table import StepTable


class Rows(StepTable):
    """A second a row of the bucket: what takes the least time pads the least."""

    def __init__(self) -> None:
        pass

    def seconds(self, bucket: Bucket, work: StepWork) -> float:
        return float(bucket.tokens)


def _padding(seen: dict[int, int], sizes: Sequence[int]) -> int:
    return sum(
        count * (min(size for size in sizes if size >= rows) - rows) for rows, count in seen.items()
    )


def best_sizes(
    seen: dict[int, int], largest: int, most: int
) -> list[tuple[float, tuple[int, ...]]]:
    """By padding."""

    def padding(rows: int, size: int) -> float:
        return seen.get(rows, 0) * (size - rows)

    return _best_sizes(sorted({*seen, largest}), most, padding)


def cheapest(seen: dict[int, int], largest: int, most: int) -> int:
    """Padding of the best choice, by trying all."""
    others = sorted({*seen} - {largest})
    return min(
        _padding(seen, sorted({*chosen, largest}))
        for k in range(min(most, len(others) + 1))
        for chosen in itertools.combinations(others, k)
    )


@pytest.mark.parametrize("seed", range(10))
def test_dynamic_programming_finds_what_trying_all_finds(seed: int):
    rng = random.Random(seed)
    largest = rng.randint(8, 40)
    seen = {rng.randint(1, largest): rng.randint(1, 50) for _ in range(rng.randint(1, 9))}
    found = best_sizes(seen, largest, 5)
    for k, (least, sizes) in enumerate(found[1:], 1):
        assert least == _padding(seen, sizes) == cheapest(seen, largest, k)
        assert len(sizes) == k and sizes[-1] == largest and list(sizes) == sorted(set(sizes))


def test_by_hand():
    # 10 steps of 3 rows and one of 7, at most 8: one size wastes 51, two waste 1 with 3 | 8, three
    # nothing.
    found = best_sizes({3: 10, 7: 1}, 8, 3)
    assert found[1:] == [(51, (8,)), (1, (3, 8)), (0, (3, 7, 8))]


def exhaustive(seen: SeenSteps, seats: int, budget: int, executables: int) -> int:
    """Padding of the best pair of size lists within the budget of executables, by trying all splits
    and choices.
    """
    decode = dict(seen.decode)
    mixed: dict[int, int] = {}
    floor = 0
    for (rows, taken), count in seen.mixed.items():
        fits = (tokens for tokens in range(4, budget + 1) if holds(tokens, seats, rows, taken))
        least = next(fits)
        mixed[least] = mixed.get(least, 0) + count
        floor += count * (least - rows)
    return floor + min(
        cheapest(decode, seats, n) + cheapest(mixed, budget, executables - 2 * n)
        for n in range(1, (executables - 1) // 2 + 1)
    )


def holds(tokens: int, seats: int, rows: int, taken: int) -> bool:
    """Whether a mixed bucket of so many rows holds a step."""
    bucket = Bucket.mixed(tokens, seats)
    return rows <= bucket.tokens and taken <= bucket.seats


@pytest.mark.parametrize("seed", range(5))
def test_the_budget_is_shared_between_the_kinds_at_best(seed: int):
    rng = random.Random(seed)
    present = Buckets.of(max_seats=16, token_budget=64)
    seen = SeenSteps(
        {rng.randint(1, 16): rng.randint(1, 300) for _ in range(6)},
        {(rng.randint(4, 64), rng.randint(1, 4)): rng.randint(1, 100) for _ in range(6)},
    )
    for executables in (3, 5, 8, 30):
        proposal = seen.propose(present, executables, Rows())
        assert (
            proposal.executables
            == 2 * len(proposal.seat_buckets) + len(proposal.token_buckets)
            <= executables
        )
        rows = sum(rows * count for rows, count in seen.decode.items())
        rows += sum(rows * count for (rows, _), count in seen.mixed.items())
        assert proposal.seconds == rows + sum(proposal.padding.values())
        assert sum(proposal.padding.values()) == exhaustive(seen, 16, 64, executables)
        assert proposal.seat_buckets[-1] == 16 and proposal.token_buckets[-1] == 64
        assert proposal.token_buckets[0] >= 4
        Buckets.of(
            max_seats=16,
            token_budget=64,
            seat_sizes=proposal.seat_buckets,
            token_sizes=proposal.token_buckets,
        )
    now = 2 * len(present.decode) + len(present.mixed)
    best = seen.propose(present, now, Rows())
    assert (
        sum(best.padding.values()) <= sum(best.padding_now.values())
        and best.share <= best.share_now
    )


def test_rows_are_read_from_records():
    records = np.zeros(4, STEP_DTYPE)
    records["bucket_tokens"], records["padding"], records["mixed"] = (
        [8, 8, 64, 32],
        [3, 3, 10, 0],
        [0, 0, 1, 1],
    )
    records["seats_busy"] = [5, 6, 7, 8]
    records["prefill"] = [0, 0, 10, 32]
    records["keys"], records["longest"] = [100, 200, 7, 0], [50, 70, 0, 0]
    records["pairs"] = [0, 0, 55, 0]
    seen = SeenSteps.of(records)
    assert (seen.decode, seen.mixed) == ({5: 2}, {(54, 7): 1, (32, 8): 1})
    assert seen.work(5) == StepWork(decode=5, keys=150, longest=60)
    assert seen.work((54, 7)) == StepWork(decode=44, prompt=10, keys=7, pairs=55)


def test_short_prompts_beside_few_streams_get_a_small_step():
    present = Buckets.of(max_seats=64, token_budget=512)
    proposal = SeenSteps({4: 100}, {(24, 5): 900, (400, 64): 100}).propose(present, 4, Rows())
    assert (proposal.seat_buckets, proposal.token_buckets) == ((64,), (24, 512))
    assert proposal.padding["mixed"] == 100 * 112
    assert proposal.padding_now["mixed"] == 900 * (128 - 24) + 100 * 112


@pytest.mark.parametrize("seed", range(3))
def test_what_is_least_is_time(seed: int, monkeypatch: pytest.MonkeyPatch):
    """On a device whose steps take as long up to some hundred rows, against every choice."""
    h100 = Roofline.named("llama-3.1-8b", "h100")
    rng = random.Random(seed)
    present = Buckets.of(max_seats=8, token_budget=2048, token_sizes=(2048,), seat_sizes=(8,))
    rows = rng.sample(range(16, 2000), 7)
    seen = SeenSteps({8: 10}, {(each, 1): rng.randint(1, 200) for each in rows})

    def seconds(*sizes: int) -> float:
        return sum(
            count
            * min(
                h100.seconds(Bucket(size, 8), StepWork(prompt=each))
                for size in (*sizes, 2048)
                if size >= each
            )
            for (each, _), count in seen.mixed.items()
        )

    decode = 10 * h100.seconds(Bucket(8, 8), StepWork(decode=8))
    for extra in (1, 2, 3):
        proposal = seen.propose(present, 3 + extra, h100)
        best = min(seconds(*sizes) for sizes in itertools.combinations(rows, extra))
        assert proposal.seconds == pytest.approx(decode + best, abs=1e-6)
        assert proposal.seconds < proposal.seconds_now == pytest.approx(decode + seconds())

    monkeypatch.setattr(bucket_tuner, "_MOST_SIZES", 4)
    thinned = seen.propose(present, 5, h100)
    assert thinned.seconds <= decode + seconds()
    assert {*thinned.token_buckets} <= {*rows, 2048}


def test_rows_that_cost_no_time_are_no_reason_for_a_program():
    """Padding rows that a device computes while it reads the weights are free."""

    class Flat(Rows):
        def seconds(self, bucket: Bucket, work: StepWork) -> float:
            return max(0.01, 0.0001 * bucket.tokens)

    seen = SeenSteps({1: 500, 8: 10}, {(20, 1): 300, (90, 1): 300, (400, 1): 100})
    proposal = seen.propose(Buckets.of(max_seats=8, token_budget=512), 12, Flat())
    assert (proposal.seat_buckets, proposal.token_buckets) == ((8,), (90, 400, 512))
