"""The bucket tuner against every choice there is."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from jitney.engine.errors import ConfigError
from jitney.engine.records import STEP_DTYPE
from jitney.engine.scheduler.buckets import Bucket, Buckets
from jitney.engine.simulation.bucket_tuner import SeenSteps, _best_sizes, _padding


def cheapest(seen: dict[int, int], largest: int, most: int) -> int:
    """Padding of the best choice, by trying all."""
    others = sorted({*seen} - {largest})
    return min(
        _padding(seen, sorted({*chosen, largest}))
        for k in range(min(most, len(others) + 1))
        for chosen in itertools.combinations(others, k)
    )


@pytest.mark.parametrize("seed", range(30))
def test_dynamic_programming_finds_what_trying_all_finds(seed: int):
    rng = random.Random(seed)
    largest = rng.randint(8, 40)
    seen = {rng.randint(1, largest): rng.randint(1, 50) for _ in range(rng.randint(1, 9))}
    found = _best_sizes(seen, largest, 5)
    for k, (least, sizes) in enumerate(found[1:], 1):
        assert least == _padding(seen, sizes) == cheapest(seen, largest, k)
        assert len(sizes) == k and sizes[-1] == largest and list(sizes) == sorted(set(sizes))


def test_by_hand():
    # 10 steps of 3 rows and one of 7, at most 8: one size wastes 51, two waste 1 with 3 | 8, three
    # nothing.
    found = _best_sizes({3: 10, 7: 1}, 8, 3)
    assert found[1:] == [(51, (8,)), (1, (3, 8)), (0, (3, 7, 8))]


def exhaustive(seen: SeenSteps, seats: int, budget: int, executables: int) -> int:
    """Padding of the best pair of size lists within the budget of executables, by trying all splits
    and choices.
    """
    decode: dict[int, int] = {}
    for rows, count in seen.decode.items():
        decode[max(4, rows)] = decode.get(max(4, rows), 0) + count
    mixed: dict[int, int] = {}
    floor = sum(count * (max(4, rows) - rows) for rows, count in seen.decode.items())
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


@pytest.mark.parametrize("seed", range(15))
def test_the_budget_is_shared_between_the_kinds_at_best(seed: int):
    rng = random.Random(seed)
    present = Buckets.of(max_seats=16, token_budget=64)
    seen = SeenSteps(
        {rng.randint(1, 16): rng.randint(1, 300) for _ in range(6)},
        {(rng.randint(4, 64), rng.randint(1, 4)): rng.randint(1, 100) for _ in range(6)},
    )
    for executables in (3, 5, 8, 30):
        proposal = seen.propose(present, executables)
        assert (
            proposal.executables
            == 2 * len(proposal.seat_buckets) + len(proposal.token_buckets)
            <= executables
        )
        assert sum(proposal.padding.values()) == exhaustive(seen, 16, 64, executables)
        assert proposal.seat_buckets[-1] == 16 and proposal.token_buckets[-1] == 64
        assert proposal.seat_buckets[0] >= 4 and proposal.token_buckets[0] >= 4
        Buckets.of(
            max_seats=16,
            token_budget=64,
            seat_sizes=proposal.seat_buckets,
            token_sizes=proposal.token_buckets,
        )
    now = 2 * len(present.decode) + len(present.mixed)
    best = seen.propose(present, now)
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
    seen = SeenSteps.of(records)
    assert seen == SeenSteps({5: 2}, {(54, 7): 1, (32, 8): 1})


def test_short_prompts_beside_few_streams_get_a_small_step():
    present = Buckets.of(max_seats=64, token_budget=512)
    proposal = SeenSteps({4: 100}, {(24, 5): 900, (400, 64): 100}).propose(present, 4)
    assert (proposal.seat_buckets, proposal.token_buckets) == ((64,), (24, 512))
    assert proposal.padding["mixed"] == 100 * 112
    assert proposal.padding_now["mixed"] == 900 * (128 - 24) + 100 * 112


def test_too_small_a_budget_is_refused():
    with pytest.raises(ConfigError, match="too small"):
        SeenSteps({}, {}).propose(Buckets.of(max_seats=8, token_budget=32), 2)


def test_nothing_seen_keeps_the_largest():
    proposal = SeenSteps({}, {}).propose(Buckets.of(max_seats=8, token_budget=32), 12)
    assert (proposal.seat_buckets, proposal.token_buckets, proposal.share) == ((8,), (32,), 0.0)
