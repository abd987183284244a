"""Which replica a request goes to: what consistent hashing and its brake promise."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from jitney.engine.fleet.routing import Ring, by_least_wait, by_prefix, by_turn, most_load

KEYS = [f"conversation {number}".encode() for number in range(4000)]
NAMES = st.lists(
    st.text("abcdef0123", min_size=1, max_size=8), min_size=2, max_size=12, unique=True
)


def owners(ring: Ring) -> dict[bytes, str]:
    return {key: next(ring.walk(key)) for key in KEYS}


@settings(max_examples=25, deadline=None)
@given(NAMES)
def test_a_replica_that_comes_takes_its_share_and_moves_nothing_else(names: list[str]):
    before, after = owners(Ring(names)), owners(Ring([*names, "new"]))
    moved = [key for key in KEYS if before[key] != after[key]]
    assert all(after[key] == "new" for key in moved)
    fair = len(KEYS) / (len(names) + 1)
    assert 0.5 * fair < len(moved) < 1.7 * fair


@settings(max_examples=25, deadline=None)
@given(NAMES)
def test_a_replica_that_goes_loses_its_keys_alone(names: list[str]):
    before, after = owners(Ring(names)), owners(Ring(names[1:]))
    assert {before[key] for key in KEYS if before[key] != after[key]} <= {names[0]}


def test_one_that_is_gone_for_a_while_gets_its_keys_back():
    ring = Ring(["a", "b", "c"])
    for key in KEYS[:200]:
        here = dict.fromkeys("abc", 0.0)
        first = next(by_prefix(ring, key, here, total=0))
        without = {name: load for name, load in here.items() if name != first}
        second = next(by_prefix(ring, key, without, total=0))
        assert second == next(name for name in ring.walk(key) if name != first)
        assert next(by_prefix(ring, key, here, total=0)) == first


def test_the_ring_does_not_depend_on_the_order_of_names():
    assert owners(Ring(["a", "b", "c"])) == owners(Ring(["c", "a", "b"]))


@settings(max_examples=60, deadline=None)
@given(
    NAMES,
    st.floats(1.0, 3.0),
    st.integers(1, 300),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_nobody_gets_more_than_the_brakes_share(
    names: list[str], brake: float, requests: int, n_keys: int, chance: random.Random
):
    """However few the keys: with one key alone consistent hashing would give all to one replica."""
    ring = Ring(names)
    loads = dict.fromkeys(names, 0.0)
    for number in range(requests):
        key = KEYS[chance.randrange(n_keys)]
        chosen = next(by_prefix(ring, key, loads, total=number, brake=brake))
        loads[chosen] += 1
        assert loads[chosen] <= most_load(number, len(names), brake)


@given(NAMES, st.randoms(use_true_random=False))
def test_every_replica_comes_once(names: list[str], chance: random.Random):
    loads = {name: float(chance.randrange(10)) for name in names}
    order = list(by_prefix(Ring(names), b"key", loads, total=sum(loads.values())))
    assert sorted(order) == sorted(names)


def test_no_brake_while_seats_are_empty():
    ring = Ring(["a", "b"])
    key = next(key for key in KEYS if next(ring.walk(key)) == "a")
    loads = {"a": 3.0, "b": 0.0}
    assert next(by_prefix(ring, key, loads, total=3)) == "b"
    assert next(by_prefix(ring, key, loads, total=3, spare=4)) == "a"


def test_keys_are_spread_evenly():
    counts = Counter(owners(Ring([f"replica-{number}" for number in range(10)])).values())
    assert max(counts.values()) < 1.5 * len(KEYS) / 10


def test_the_least_wait_then_the_least_load():
    waits = {"a": 0.0, "b": 2.0, "c": 0.0}
    assert by_least_wait(waits, {"a": 3, "b": 0, "c": 1}) == ["c", "a", "b"]


def test_turns():
    assert [by_turn("abc", turn)[0] for turn in range(5)] == list("abcab")
    assert by_turn("abc", 1) == ["b", "c", "a"]
    assert by_turn([], 7) == []
