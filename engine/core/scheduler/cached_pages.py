"""Eviction of cached pages: the oldest page of the tenant with the most pages is evicted first.

So no tenant can flush another's pages: a tenant with no more than its share of the cached pages
loses none while another has more. A tenant that was inactive while the cache was renewed several
times counts as gone, and its pages are evicted first. With one tenant this is LRU eviction.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

#: A tenant counts as gone if it was inactive while this many times the pool's pages were evicted.
_IDLE_TURNS = 8


@dataclass(slots=True, eq=False)
class _Share:
    """The cached pages of one tenant."""

    tenant: str
    #: Page numbers, oldest first.
    pages: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])
    #: Number of pages under which the share is listed in `CachedPages._by_count`.
    counted: int = 0
    #: Value of `CachedPages._evictions` when the tenant last used a page.
    active_at: int = 0


@dataclass(eq=False)
class CachedPages:
    """Cached pages by tenant. All operations are O(1) per page, amortised."""

    #: Number of pages of the pool.
    n_pages: int
    #: The tenant of each cached page; None for other pages.
    _tenants: list[str | None] = field(init=False)
    #: The shares with pages, by tenant; the most recently active one is last.
    _shares: OrderedDict[str, _Share] = field(default_factory=OrderedDict[str, _Share])
    #: The shares by their number of pages, and the largest such number.
    _by_count: dict[int, dict[_Share, None]] = field(default_factory=dict[int, dict[_Share, None]])
    _most: int = 0
    #: Number of cached pages, and of evictions so far.
    _count: int = 0
    _evictions: int = 0

    def __post_init__(self) -> None:
        self._tenants = [None] * self.n_pages

    def __len__(self) -> int:
        return self._count

    def __contains__(self, page: int) -> bool:
        return self._tenants[page] is not None

    def __iter__(self) -> Iterator[int]:
        """Iterate over all cached pages, in no particular order."""
        return (page for share in self._shares.values() for page in share.pages)

    def add(self, pages: list[int], tenants: list[str], *, evict_first: bool = False) -> None:
        """Add released pages, in the order in which to evict them. tenants: of all pages of the
        pool. evict_first: evict them before all pages that are cached already.
        """
        shares: dict[str, _Share] = {}
        for page in reversed(pages) if evict_first else pages:
            tenant = tenants[page]
            share = shares.get(tenant)
            if share is None:
                share = shares[tenant] = self._share(tenant)
            share.pages[page] = None
            if evict_first:
                share.pages.move_to_end(page, last=False)
            self._tenants[page] = tenant
        self._count += len(pages)
        for share in shares.values():
            self._used(share)

    def take(self, pages: list[int]) -> None:
        """Remove pages that are held again."""
        shares: dict[str, _Share] = {}
        for page in pages:
            share = self._share_of(page)
            del share.pages[page]
            self._tenants[page] = None
            shares[share.tenant] = share
        self._count -= len(pages)
        for share in shares.values():
            self._used(share)

    def evict(self) -> int:
        """Evict a page and return it; there must be one."""
        share = next(iter(self._shares.values()))
        if self._evictions - share.active_at <= _IDLE_TURNS * len(self._tenants):
            share = next(iter(self._by_count[self._most]))
        page, _ = share.pages.popitem(last=False)
        self._tenants[page] = None
        self._count -= 1
        self._evictions += 1
        self._recount(share)
        return page

    def _share(self, tenant: str) -> _Share:
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = _Share(tenant)
        return share

    def _share_of(self, page: int) -> _Share:
        tenant = self._tenants[page]
        assert tenant is not None
        return self._shares[tenant]

    def _used(self, share: _Share) -> None:
        """Mark the tenant of a share as active now."""
        share.active_at = self._evictions
        self._shares.move_to_end(share.tenant)
        self._recount(share)

    def _recount(self, share: _Share) -> None:
        """List a share under its present number of pages."""
        before, now = share.counted, len(share.pages)
        if before:
            equals = self._by_count[before]
            del equals[share]
            if not equals:
                del self._by_count[before]
        share.counted = now
        if now:
            self._by_count.setdefault(now, {})[share] = None
        else:
            del self._shares[share.tenant]
        self._most = max(self._most, now)
        # Amortised: one step down for each page that left.
        while self._most and self._most not in self._by_count:
            self._most -= 1

    def check(self) -> None:
        """Raise RuntimeError unless every page is in its tenant's share, and every share is listed
        correctly.
        """
        in_shares = {page: share.tenant for share in self._shares.values() for page in share.pages}
        named = {page: tenant for page, tenant in enumerate(self._tenants) if tenant is not None}
        if in_shares != named or self._count != len(in_shares):
            raise RuntimeError("cached pages and their tenants disagree")
        listed = {share: count for count, shares in self._by_count.items() for share in shares}
        counts = {share: len(share.pages) for share in self._shares.values()}
        if (
            listed != counts
            or self._most != max(counts.values(), default=0)
            or 0 in listed.values()
        ):
            raise RuntimeError("the shares of cached pages are not counted")
