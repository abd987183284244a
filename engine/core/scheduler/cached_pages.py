"""Which cached page is evicted: the oldest of the tenant that has the most.

So no tenant can flush another's pages: one with no more than its share of the cached pages loses
none while another has more. A tenant that did nothing while the cache was renewed several times
over is taken to be gone, and its pages go first. With one tenant the least recently used page goes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

#: Times that as many pages as there are must be evicted until a tenant that did nothing meanwhile
#: is taken to be gone.
_IDLE_TURNS = 8


@dataclass(slots=True, eq=False)
class _Share:
    """The cached pages of one tenant."""

    tenant: str
    #: Oldest first.
    pages: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])
    #: How many they were when it was put among those with as many.
    counted: int = 0
    #: Evictions there had been when it last used a page.
    active_at: int = 0


@dataclass(eq=False)
class CachedPages:
    """Cached pages by tenant. All is O(1) per page, amortised."""

    #: Of the pool.
    n_pages: int
    #: The tenant of each page that is here.
    _tenants: list[str | None] = field(init=False)
    #: Those that have pages, the one that was active last at the end.
    _shares: OrderedDict[str, _Share] = field(default_factory=OrderedDict[str, _Share])
    #: The shares that have so many pages, and the most that one has.
    _by_count: dict[int, dict[_Share, None]] = field(default_factory=dict[int, dict[_Share, None]])
    _most: int = 0
    #: Pages here, and how many have been taken back.
    _count: int = 0
    _evictions: int = 0

    def __post_init__(self) -> None:
        self._tenants = [None] * self.n_pages

    def __len__(self) -> int:
        return self._count

    def __contains__(self, page: int) -> bool:
        return self._tenants[page] is not None

    def __iter__(self) -> Iterator[int]:
        """All pages, in no order that means anything."""
        return (page for share in self._shares.values() for page in share.pages)

    def add(self, pages: list[int], tenants: list[str], *, evict_first: bool = False) -> None:
        """Pages that were released, the first to be evicted first. tenants: of all pages of the
        pool. evict_first: they go before all that are here.
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
        """These are held again."""
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
        """The page to go; there must be one."""
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
        """Its tenant did something."""
        share.active_at = self._evictions
        self._shares.move_to_end(share.tenant)
        self._recount(share)

    def _recount(self, share: _Share) -> None:
        """Put a share among those that have as many pages as it has now."""
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
        # As many steps down as pages have left.
        while self._most and self._most not in self._by_count:
            self._most -= 1

    def check(self) -> None:
        """Raise RuntimeError unless every page is in its tenant's share, and each share in its
        place.
        """
        found = {page: share.tenant for share in self._shares.values() for page in share.pages}
        named = {page: tenant for page, tenant in enumerate(self._tenants) if tenant is not None}
        if found != named or self._count != len(found):
            raise RuntimeError("cached pages and their tenants disagree")
        listed = {share: count for count, shares in self._by_count.items() for share in shares}
        counts = {share: len(share.pages) for share in self._shares.values()}
        if (
            listed != counts
            or self._most != max(counts.values(), default=0)
            or 0 in listed.values()
        ):
            raise RuntimeError("the shares of cached pages are not counted")
