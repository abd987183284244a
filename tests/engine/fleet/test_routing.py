"""Which replica a request goes to: what consistent hashing and its brake promise."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from jitney.engine.fleet.replica_set import ReplicaSet
from jitney.engine.fleet.replicas import Replica, _loads
from jitney.engine.fleet.routing import HashRing, LeastWait, PrefixIndex, _most_load, round_robin

KEYS = [f"conversation {number}".encode() for number in range(4000)]
NAMES = st.lists(
    st.text("abcdef0123", min_size=1, max_size=8), min_size=2, max_size=12, unique=True
)


def owners(ring: HashRing) -> dict[bytes, str]:
    return {key: next(ring.walk(key)) for key in KEYS}


@settings(max_examples=25, deadline=None)
@given(NAMES)
def test_a_replica_that_comes_takes_its_share_and_moves_nothing_else(names: list[str]):
    before, after = owners(HashRing(names)), owners(HashRing([*names, "new"]))
    moved = [key for key in KEYS if before[key] != after[key]]
    assert all(after[key] == "new" for key in moved)
    fair = len(KEYS) / (len(names) + 1)
    assert 0.5 * fair < len(moved) < 1.7 * fair


@settings(max_examples=25, deadline=None)
@given(NAMES)
def test_a_replica_that_goes_loses_its_keys_alone(names: list[str]):
    before, after = owners(HashRing(names)), owners(HashRing(names[1:]))
    assert {before[key] for key in KEYS if before[key] != after[key]} <= {names[0]}


def test_one_that_is_gone_for_a_while_gets_its_keys_back():
    ring = HashRing(["a", "b", "c"])
    for key in KEYS[:200]:
        here = dict.fromkeys("abc", 0.0)
        first = next(ring.order(key, here, total=0))
        without = {name: load for name, load in here.items() if name != first}
        second = next(ring.order(key, without, total=0))
        assert second == next(name for name in ring.walk(key) if name != first)
        assert next(ring.order(key, here, total=0)) == first


def test_the_ring_does_not_depend_on_the_order_of_names():
    assert owners(HashRing(["a", "b", "c"])) == owners(HashRing(["c", "a", "b"]))


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
    ring = HashRing(names)
    loads = dict.fromkeys(names, 0.0)
    for number in range(requests):
        key = KEYS[chance.randrange(n_keys)]
        chosen = next(ring.order(key, loads, total=number, brake=brake))
        loads[chosen] += 1
        assert loads[chosen] <= _most_load(number, len(names), brake)


@given(NAMES, st.randoms(use_true_random=False))
def test_every_replica_comes_once(names: list[str], chance: random.Random):
    loads = {name: float(chance.randrange(10)) for name in names}
    order = list(HashRing(names).order(b"key", loads, total=sum(loads.values())))
    assert sorted(order) == sorted(names)


def test_no_brake_while_seats_are_empty():
    ring = HashRing(["a", "b"])
    key = next(key for key in KEYS if next(ring.walk(key)) == "a")
    loads = {"a": 3.0, "b": 0.0}
    assert next(ring.order(key, loads, total=3)) == "b"
    assert next(ring.order(key, loads, total=3, spare=4)) == "a"


def test_keys_are_spread_evenly():
    counts = Counter(owners(HashRing([f"replica-{number}" for number in range(10)])).values())
    assert max(counts.values()) < 1.5 * len(KEYS) / 10


def test_who_had_a_beginning_is_asked_before_the_ring_but_not_past_the_brake():
    ring = HashRing(["a", "b", "c"])
    key = next(key for key in KEYS if list(ring.walk(key)) == ["a", "b", "c"])
    loads = {"a": 0.0, "b": 0.0, "c": 1.0}
    assert list(ring.order(key, loads, total=3, known="c")) == ["c", "a", "b"]
    loads["c"] = 9.0
    assert list(ring.order(key, loads, total=9, known="c")) == ["a", "b", "c"]
    assert list(ring.order(key, loads, total=9, known="gone")) == ["a", "b", "c"]


def test_a_turn_stays_where_a_seat_is_free_and_a_stranger_goes_where_there_is_less_to_do():
    ring = HashRing(["a", "b"])
    key = next(key for key in KEYS if next(ring.walk(key)) == "a")
    loads = {"a": 7.0, "b": 0.0}
    assert next(ring.order(key, loads, total=7, seats=8)) == "b"
    assert next(ring.order(key, loads, total=7, seats=8, known="a")) == "a"
    loads["a"] = 8.0
    assert next(ring.order(key, loads, total=8, seats=8, known="a")) == "b"


def test_a_stranger_does_not_wait_while_a_seat_is_free_elsewhere():
    ring = HashRing(["a", "b"])
    key = next(key for key in KEYS if next(ring.walk(key)) == "a")
    loads = {"a": 8.0, "b": 7.0}  # both under the brake: 10
    assert next(ring.order(key, loads, total=15)) == "a"
    assert list(ring.order(key, loads, total=15, seats=8)) == ["b", "a"]
    loads["b"] = 8.0  # all seats are taken: whoever it goes to, it waits
    assert list(ring.order(key, loads, total=16, seats=8)) == ["a", "b"]


@settings(max_examples=60, deadline=None)
@given(NAMES, st.integers(1, 8), st.randoms(use_true_random=False))
def test_as_many_strangers_as_seats_take_every_seat(
    names: list[str], seats: int, chance: random.Random
):
    """Who has an answer asks the next thing at once, as often as each seat 20 times."""
    ring = HashRing(names)
    loads = dict.fromkeys(names, 0.0)
    streams: list[str] = []
    for number in range(20 * seats * len(names)):
        if len(streams) == seats * len(names):
            loads[streams.pop(chance.randrange(len(streams)))] -= 1
        key = KEYS[number % len(KEYS)]
        chosen = next(ring.order(key, loads, total=len(streams), seats=seats))
        streams.append(chosen)
        loads[chosen] += 1
        assert loads[chosen] <= seats
    assert set(loads.values()) == {float(seats)}


def test_the_longest_beginning_that_is_known_counts():
    known = PrefixIndex(most=3)
    known.note([b"1", b"2"], "a")
    known.note([b"1", b"2", b"3"], "b")
    assert known.replica_of([b"1", b"2", b"3", b"4"]) == "b"
    assert known.replica_of([b"1", b"2", b"x"]) == "a"
    assert known.replica_of([b"1"]) is known.replica_of([]) is None
    for number in range(9):
        known.note([b"other %d" % number], "c")
    assert known.replica_of([b"1", b"2", b"3"]) is None


#: (name, predicted wait, load, full); a wait of None: it goes away.
CHANGES = st.lists(
    st.tuples(
        st.sampled_from("abcdefgh"),
        st.none() | st.integers(0, 3).map(float),
        st.integers(0, 3).map(float),
        st.booleans(),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(CHANGES)
def test_the_least_wait_is_what_sorting_all_of_them_gives(changes):
    """After each change: full ones last, then by the wait, the load and the name."""
    waits, there = LeastWait(), {}
    for name, wait_s, load, full in changes:
        if wait_s is None:
            waits.drop(name)
            there.pop(name, None)
        else:
            waits.put(name, wait_s, load, full=full)
            there[name] = full, wait_s, load
        assert list(waits.order()) == sorted(there, key=lambda name: (*there[name], name))
        assert len(waits) == len(there)


def test_the_first_of_many_is_found_without_looking_at_all():
    waits = LeastWait()
    for number in range(2000):
        waits.put(f"{number}", float(number), 0.0)
    for number in range(20_000):  # heaps of old entries go
        waits.put("0", -float(number), 0.0)
    assert next(waits.order()) == "0"
    assert len(waits._heap) <= 4 * 2000 + 16


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_set_of_replicas_knows_what_adding_up_all_of_them_gives(chance: random.Random):
    replicas = [Replica(f"r{number}") for number in range(5)]
    kept = ReplicaSet(replicas[:3])
    for step in range(60):
        if step in (20, 40):
            kept.add(replicas[len(kept.all)])
        _change(chance.choice(kept.all), chance)
        ready = [each for each in kept.all if each.state == "ready"]
        assert kept.names == [each.name for each in ready]
        assert kept.loads == {each.name: each.load for each in ready}
        assert kept.total == sum(kept.loads.values())
        assert kept.least_seats == min((each.seats for each in ready), default=0)
        assert set(kept.waits.order()) == set(kept.fills.order()) == set(kept.names)
        assert kept.ring.names == tuple(sorted(each.name for each in kept.all))
        assert all((kept.ready(each.name) is each) == (each in ready) for each in kept.all)


def _change(replica: Replica, chance: random.Random) -> None:
    match chance.randrange(7):
        case 0:
            replica.became(chance.choice(["ready", "ready", "gone", "unready"]))
        case 1:
            replica.begin()
        case 2 if replica.open:
            replica.end(1.0)
        case 3:
            replica.begin(background=True)
        case 4 if replica.lines:
            replica.end(1.0, background=True)
        case 5:
            replica.seats, replica.running = chance.randrange(1, 9), float(chance.randrange(9))
            replica.open_then = replica.open
            replica.became(replica.state)
        case _:
            replica.refused(60.0)


def test_a_prompt_does_not_wait_longer_than_its_pages_are_worth():
    """Requests take 4 s: a turn may wait 1 s for its pages, one that only hashes there 0.2."""
    replicas = [Replica(name, seats=64, running=32.0, wait_s=0.0, request_s=4.0) for name in "abc"]
    kept = ReplicaSet(replicas)
    for replica in replicas:
        replica.became("ready")

    def first(prefix: bytes) -> str:
        return next(kept.order([prefix])).name

    def report(name: str, wait_s: float) -> None:
        replica = next(each for each in replicas if each.name == name)
        replica.wait_s = wait_s
        replica.changed()

    home = first(b"new")
    kept.sent([b"turn"], home)
    report(home, 0.15)
    assert first(b"new") == first(b"turn") == home
    next(each for each in replicas if each.name == home).begin()
    assert first(b"turn") == home, "it has a seat"
    report(home, 0.9)
    assert first(b"new") != home and first(b"turn") == home
    report(home, 1.1)
    assert first(b"turn") != home
    for each in "abc":
        report(each, 1.1)
    assert first(b"turn") == home, "elsewhere it would wait as long"


METRICS = """# TYPE jitney_seats gauge
jitney_seats 4.0
jitney_requests_running 4.0
jitney_requests_waiting 3.0
jitney_requests_open{lane="live"} 2.0
jitney_requests_open{lane="background"} 5.0
jitney_predicted_wait_seconds 0.25
"""
OF_VLLM = 'vllm:num_requests_running{model_name="a b"} 4.0\n'


def test_a_load_is_what_people_wait_for():
    told = {"seats": 4.0, "running": 4.0, "waiting": 3.0, "background": 5.0, "wait_s": 0.25}
    assert _loads(METRICS) == _loads(METRICS + OF_VLLM) == told
    assert _loads(OF_VLLM) == {"running": 4.0}
    assert _loads("jitney_seats 4 1700000000000\njitney_requests_running +Inf\n<p>") == {"seats": 4}
    replica = Replica("r", seats=4, running=4.0, waiting=3.0, background=5.0, wait_s=0.25)
    assert (replica.load, replica.seat_fill) == (2.0, 0.5)
    for _ in range(6):
        replica.begin(background=True)
    assert (replica.load, replica.seat_fill, replica.predicted_wait) == (2.0, 2.0, 0.25)
    replica.begin()
    assert (replica.load, replica.seat_fill) == (3.0, 2.25)
    replica.end(5.0, background=True)
    assert (replica.lines, replica.request_s) == (5, 0.0)


def test_requests_sent_since_the_last_report_count_with_seats_free_too():
    """Two replicas of 8 seats, requests of 4 s: b reports a wait that is shorter than a request."""
    replicas = [Replica(name, state="ready", seats=8, request_s=4.0, wait_s=0.0) for name in "ab"]
    replicas[1].wait_s = 0.7
    kept = ReplicaSet(replicas, "least-wait")
    assert next(kept.order([])).name == "a"
    for _ in range(14):
        next(kept.order([])).begin()
    assert {replica.name: replica.open for replica in replicas} == {"a": 7, "b": 7}
    assert [replica.predicted_wait for replica in replicas] == [0.0, 0.7]


def test_turns():
    assert [next(round_robin("abc", turn)) for turn in range(5)] == list("abcab")
    assert list(round_robin("abc", 1)) == ["b", "c", "a"]
    assert list(round_robin([], 7)) == []
