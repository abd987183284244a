"""Whose cached pages go: against the rule by its definition, and through the pool and the
scheduler.
"""

from __future__ import annotations

import pytest
from fakes import make_core, make_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jitney.engine.core.scheduler.cached_pages import _IDLE_TURNS, CachedPages
from jitney.engine.core.scheduler.kv_pages import PagePool

PAGES = 24


def cached(**pages: list[int]) -> tuple[CachedPages, list[str]]:
    """Pages of each tenant, oldest first."""
    shares, tenants = CachedPages(PAGES), [""] * PAGES
    for tenant, numbers in pages.items():
        for page in numbers:
            tenants[page] = tenant
        shares.add(numbers, tenants)
    return shares, tenants


def test_the_tenant_with_most_pages_loses_first_and_equals_take_turns():
    shares, _ = cached(a=[1, 2], b=[3, 4, 5, 6])
    assert [shares.evict() for _ in range(2)] == [3, 4]
    lost = [shares.evict() for _ in range(4)]
    assert sorted(lost[:2]) == [1, 5] and sorted(lost[2:]) == [2, 6]


def test_a_tenant_that_is_gone_keeps_nothing():
    """Its few pages stay while the cache is renewed eight times over, and no longer."""
    shares, tenants = cached(gone=[1, 2], busy=list(range(3, PAGES)))
    lost = set()
    for _ in range(_IDLE_TURNS * PAGES + 1):
        page = shares.evict()
        lost.add(page)
        shares.add([page], tenants)
    assert not lost & {1, 2}
    assert [shares.evict(), shares.evict()] == [1, 2]


def flush(pool: PagePool, tenant: str, count: int, start: int = 0) -> None:
    """Fill and let go of so many pages, one after the other."""
    for number in range(start, start + count):
        [page] = pool.allocate(1) or []
        pool.publish(page, f"{tenant} {number}".encode(), tenant)
        pool.release([page])


def test_one_tenant_cannot_flush_the_pages_of_others():
    """100 pages: b and c keep their 30 and 20 whatever a does, and a has the rest."""
    pool = PagePool(101, 4)
    flush(pool, "b", 30)
    flush(pool, "c", 20)
    flush(pool, "a", 500)
    kept = {name: sum(pool.count([f"{name} {i}".encode()]) for i in range(500)) for name in "abc"}
    assert kept == {"a": 50, "b": 30, "c": 20}
    pool.check([])


def test_a_salt_of_its_own_is_not_another_share():
    """The tenant is the key: one that salts every request has one share like everybody."""
    core = make_core(seats=1, pages=41, context=32, eos=())
    victim = make_request("v", [1] * 24, tenant="victim", max_tokens=1)
    core.add(victim)
    core.run_until_idle()
    for number in range(50):
        salted = make_request(f"s{number}", [2] * 24, tenant="x", salt=str(number), max_tokens=1)
        core.add(salted)
        core.run_until_idle()
    core.check()
    core.add(make_request("again", [1] * 24, tenant="victim", max_tokens=1))
    found = [out.cached_tokens for out in core.run_until_idle() if out.request_id == "again"]
    assert max(found) == 20, "all but the page of the last token"


def test_check_sees_a_share_that_is_not_counted():
    shares, _ = cached(a=[1, 2])
    shares._shares["a"].pages[9] = None
    with pytest.raises(RuntimeError, match="disagree"):
        shares.check()


class ShareMachine(RuleBasedStateMachine):
    """Tenants come and go; the model is a list in order of age."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = CachedPages(PAGES)
        self.tenants = [""] * PAGES
        self.order: list[int] = []

    def count(self, tenant: str) -> int:
        return sum(self.tenants[page] == tenant for page in self.order)

    @rule(tenant=st.sampled_from("abcd"), count=st.integers(1, 6))
    def add(self, tenant: str, count: int) -> None:
        pages = [page for page in range(PAGES) if page not in self.order][:count]
        for page in pages:
            self.tenants[page] = tenant
        if pages:
            self.shares.add(pages, self.tenants)
        self.order += pages

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.order), min_size=1, unique=True))
        self.shares.take(pages)
        self.order = [page for page in self.order if page not in pages]

    @precondition(lambda self: self.order)
    @rule()
    def evict(self) -> None:
        most = max(self.count(tenant) for tenant in "abcd")
        page = self.shares.evict()
        tenant = self.tenants[page]
        assert self.count(tenant) == most, "only who has most loses a page"
        assert page == next(p for p in self.order if self.tenants[p] == tenant), "its oldest"
        self.order.remove(page)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.shares.check()
        assert sorted(self.shares) == sorted(self.order) and len(self.shares) == len(self.order)
        assert all((page in self.shares) == (page in self.order) for page in range(PAGES))


ShareMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
TestShareMachine = ShareMachine.TestCase
