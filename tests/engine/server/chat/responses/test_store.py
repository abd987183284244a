"""The store of responses: what it keeps, what goes first, and that it is never larger than said."""

from __future__ import annotations

import json
import random

from fakes import FakeClock

from jitney.engine.server.chat.responses.store import KeptTurn, ResponseStore
from jitney.engine.server.http.errors import HttpError


def items(*ids: str, size: int = 10) -> bytes:
    return json.dumps([{"id": id, "text": "x" * size} for id in ids]).encode()


def put(
    store: ResponseStore, tenant: str, id: str, before: KeptTurn | None = None, size=10
) -> KeptTurn:
    turn = KeptTurn(before, items(f"in-{id}", size=size), items(f"out-{id}", size=size))
    store.put(tenant, id, turn, b"{}")
    return turn


def has(store: ResponseStore, tenant: str, id: str) -> bool:
    try:
        return store.get(tenant, id).id == id
    except HttpError as error:
        assert error.status == 404
        return False


def test_the_oldest_of_who_has_most_goes_first():
    store = ResponseStore(3, 1 << 20, 60)
    put(store, "b", "b1")
    for number in range(5):
        put(store, "a", f"a{number}")
    assert store.count == 3
    assert has(store, "b", "b1") and has(store, "a", "a4") and has(store, "a", "a3")
    assert not has(store, "a", "a2")


def test_bytes_are_bounded_and_one_that_is_too_large_is_not_kept():
    store = ResponseStore(100, 20_000, 60)
    put(store, "b", "b1")
    for number in range(30):
        put(store, "a", f"a{number}", size=1000)
        assert store.n_bytes <= 20_000
    assert has(store, "b", "b1") and has(store, "a", "a29") and not has(store, "a", "a0")
    put(store, "a", "huge", size=30_000)
    assert not has(store, "a", "huge") and has(store, "b", "b1") and store.n_bytes <= 20_000


def test_a_response_is_kept_for_a_time():
    clock = FakeClock()
    store = ResponseStore(10, 1 << 20, 60, clock)
    put(store, "a", "old")
    clock.now = 59
    put(store, "a", "new")
    assert has(store, "a", "old")
    clock.now = 61
    assert not has(store, "a", "old") and store.item("a", "out-old") is None
    assert has(store, "a", "new")
    clock.now = 120
    put(store, "b", "other")
    assert store.count == 1


def test_turns_stay_while_a_later_one_needs_them():
    store = ResponseStore(10, 1 << 20, 60)
    first = put(store, "a", "first", size=5000)
    second = put(store, "a", "second", first)
    full = store.n_bytes
    store.discard("a", "first")
    assert full - 100 < store.n_bytes < full
    assert [json.loads(turn.input)[0]["id"] for turn in second.turns()] == ["in-first", "in-second"]
    store.discard("a", "second")
    assert store.n_bytes == 0 and store.count == 0


def test_a_long_conversation_is_held_once():
    store = ResponseStore(10_000, 1 << 30, 60)
    turn = None
    for number in range(3000):
        turn = put(store, "a", f"r{number}", turn, size=1000)
    assert turn is not None and len(turn.turns()) == 3000
    assert store.n_bytes < 3000 * 4000
    for number in range(3000):
        store.discard("a", f"r{number}")
    assert store.n_bytes == 0


def test_bytes_are_those_of_what_is_there_whatever_happened():
    """Against a count of everything that can be reached."""
    draw = random.Random(5)
    store = ResponseStore(12, 30_000, 60)
    turns: list[tuple[str, KeptTurn]] = []
    for number in range(500):
        tenant = draw.choice("ab")
        own = [turn for owner, turn in turns[-20:] if owner == tenant]
        before = draw.choice(own) if own and draw.random() < 0.7 else None
        turns.append((tenant, put(store, tenant, f"r{number}", before, draw.randrange(3000))))
        if draw.random() < 0.2:
            store.discard(tenant, f"r{draw.randrange(number + 1)}")
        reached: set[KeptTurn] = set()
        bodies = 0
        for owner in "ab":
            for kept in [id for id in range(number + 1) if has(store, owner, f"r{id}")]:
                response = store.get(owner, f"r{kept}")
                reached |= set(response.turn.turns())
                bodies += len(response.body)
        assert store.n_bytes == bodies + sum(turn.n_bytes for turn in reached) <= 30_000
        assert store.count <= 12
