"""The page pool against a model of itself, and its rules one by one."""

from __future__ import annotations

import msgspec
import pytest
from fakes import make_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jitney.engine.core.scheduler.kv_pages import (
    _CACHED,
    _FREE,
    _HELD,
    _SHARED,
    PagePool,
)
from jitney.engine.core.scheduler.page_keys import _extend_keys, root_of
from jitney.engine.core.scheduler.sequence import OwnPages


def keys_of(
    tokens: list[int], n_pages: int, page_size: int = 4, root: bytes = b"root"
) -> list[bytes]:
    keys: list[bytes] = []
    _extend_keys(keys, root, tokens, page_size, n_pages)
    return keys


def n_free(pool: PagePool) -> int:
    """Pages that are not held and that no prompt could find."""
    return pool.available - pool.n_cached


def held(pool: PagePool, keys: list[bytes]) -> list[int]:
    """Pages for the keys: shared as far as found, the rest fresh and published."""
    pages = pool.match(keys)
    fresh = pool.allocate(len(keys) - len(pages))
    assert fresh is not None
    for page, key in zip(fresh, keys[len(pages) :], strict=True):
        pool.publish(page, key)
    return pages + fresh


def test_cached_pages_are_found_again_and_shared():
    pool, keys = PagePool(9, 4), keys_of(list(range(12)), 3)
    first = held(pool, keys)
    second = pool.match(keys)
    assert second == first
    assert [pool.states()[page] for page in first] == [_SHARED] * 3
    pool.release(first)
    pool.release(second)
    assert pool.n_cached == 3 and [pool.states()[page] for page in first] == [_CACHED] * 3
    assert pool.match(keys[:2]) == first[:2]


def test_eviction_takes_the_oldest_chain_from_its_tail():
    pool = PagePool(7, 4)
    old, new = keys_of(list(range(12)), 3), keys_of(list(range(50, 62)), 3)
    old_pages = held(pool, old)
    new_pages = held(pool, new)
    pool.release(old_pages)
    pool.release(new_pages)
    pool.allocate(2)
    assert pool.match(old) == old_pages[:1], "the head of the old chain outlives its tail"
    assert pool.match(new) == new_pages


def test_a_match_makes_a_page_young():
    pool = PagePool(3, 4)
    first, second = keys_of([1] * 4, 1), keys_of([2] * 4, 1)
    pool.release(held(pool, first))
    pool.release(held(pool, second))
    pool.release(pool.match(first))
    pool.allocate(1)
    assert pool.match(first) and not pool.match(second)


def test_the_older_page_keeps_a_key_published_twice():
    pool, keys = PagePool(5, 4), keys_of([1] * 4, 1)
    older, younger = pool.allocate(2) or []
    pool.publish(older, keys[0])
    pool.publish(younger, keys[0])
    pool.release([younger])
    assert pool.match(keys) == [older] and n_free(pool) == 3


def test_without_retention_only_living_owners_share():
    pool, keys = PagePool(5, 4, retain=False), keys_of([1] * 4, 1)
    pages = held(pool, keys)
    assert pool.match(keys) == pages
    pool.release(pages)
    assert pool.match(keys) == pages
    for _ in range(2):
        pool.release(pages)
    assert pool.match(keys) == [] and n_free(pool) == 4


@pytest.mark.parametrize("still_held", [True, False])
def test_withdrawn_pages_are_not_found(still_held: bool):
    """By name: they need not be held any more. A cached one is free at once."""
    pool, keys = PagePool(5, 4), keys_of([1] * 8, 2)
    pages = held(pool, keys)
    if not still_held:
        pool.release(pages)
    pool.withdraw([b"never published", *keys])
    assert pool.match(keys) == []
    if still_held:
        pool.release(pages)
    assert (pool.n_cached, n_free(pool)) == (0, 4)
    pool.check([])


def test_keys_name_the_whole_prefix_and_the_owner():
    assert keys_of([1, 1, 1, 1, 2, 2, 2, 2], 2)[1] != keys_of([3, 3, 3, 3, 2, 2, 2, 2], 2)[1]
    assert keys_of([1] * 4, 1, root=b"a") != keys_of([1] * 4, 1, root=b"b")
    owners = (("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"))
    requests = [
        msgspec.structs.replace(make_request("r", [1], tenant=tenant, salt=salt), adapter=adapter)
        for tenant, salt in owners
        for adapter in (0, 1, 2)
    ]
    roots = [root_of(request, retain=retain) for request in requests for retain in (True, False)]
    assert len(set(roots)) == len(roots)
    assert keys_of(list(range(8)), 1) == keys_of(list(range(8)), 2)[:1]


def test_own_pages_have_names_that_no_other_sequence_has():
    """From the first page on that holds more than the prompt; the ones after it too."""
    tokens = list(range(16))

    def named(own: OwnPages | None) -> list[bytes]:
        keys: list[bytes] = []
        _extend_keys(keys, b"root", tokens, 4, 4, own)
        return keys

    everybody = named(None)
    one, other = (named(OwnPages.of(6, number, 0)) for number in (1, 2))
    assert one[:1] == other[:1] == everybody[:1]
    assert len({*one[1:], *other[1:], *everybody[1:]}) == 9
    assert named(OwnPages.of(16, 1, 0)) == everybody
    assert OwnPages.of(6, 1, 2) != OwnPages.of(6, 2, 1)


def test_check_sees_a_page_lost_or_doubled():
    pool = PagePool(5, 4)
    pages = pool.allocate(2) or []
    pool.check([pages])
    with pytest.raises(RuntimeError, match="reference counts"):
        pool.check([pages, pages])
    pool._free.append(pages[0])
    with pytest.raises(RuntimeError, match="lost or doubled"):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Sequences over few distinct prompts come and go; contents are modelled as the keys the pages
    were filled for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12, 2)
        self.owners: list[list[int]] = []
        self.contents: dict[int, bytes] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=10), extra=st.integers(0, 2))
    def board(self, tokens: list[int], extra: int) -> None:
        keys = keys_of(tokens, len(tokens) // 2, page_size=2)
        pages = self.pool.match(keys)
        assert [self.contents[page] for page in pages] == keys[: len(pages)], (
            "a match is what it was published for"
        )
        before = self.pool.available
        fresh = self.pool.allocate(len(keys) - len(pages) + extra)
        assert (fresh is None) == (before < len(keys) - len(pages) + extra)
        if fresh is None:
            self.pool.release(pages)
            assert self.pool.available >= before
            return
        for page, key in zip(fresh, keys[len(pages) :], strict=False):
            self.contents[page] = key
            self.pool.publish(page, key)
        self.owners.append(pages + fresh)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.owners) - 1))
        self.pool.release(self.owners.pop(which))

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.check(self.owners)
        states = self.pool.states()
        counts = [sum(page in pages for pages in self.owners) for page in range(12)]
        assert [state in (_HELD, _SHARED) for state in states] == [count > 0 for count in counts]
        assert (states == _SHARED).sum() == sum(count > 1 for count in counts)
        assert (states[1:] == _FREE).sum() == n_free(self.pool) and (
            states == _CACHED
        ).sum() == self.pool.n_cached


PoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
TestPoolMachine = PoolMachine.TestCase
