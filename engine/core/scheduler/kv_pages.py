"""The page pool: reference counts of pages, and the prefix index that finds pages by their key.

The pool handles page numbers, not page contents; sequences take pages through `page_tables`. Page 0
is the trash page that padding rows write to; it is never handed out. Every other page is in exactly
one state:

    free --allocate--> held --match--> shared --release--> held --release--> cached (published) or
    free
    cached --match--> held          cached --allocate (evicts it)--> held
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from itertools import takewhile

import numpy as np

from jitney.engine.core.scheduler.cached_pages import CachedPages

_FREE, _HELD, _SHARED, _CACHED = range(4)

#: Page lists, one for each owner.
type _Tables = Iterable[list[int]]


class PagePool:
    """Reference counts and the prefix index of n_pages pages; every operation is O(1) per page it
    touches, amortised.

    retain: keep published pages after their last release until their room is needed (the prefix
    cache). Without it they become free at once, and only sequences alive at the same time share.
    share_outputs: pages that hold output tokens serve other prompts too; without it they serve
    their own sequence alone, after a preemption. shares: without it no sequence finds pages of
    another one, nor its own again, because the state that the model keeps outside pages is missing.
    """

    def __init__(
        self,
        n_pages: int,
        page_size: int,
        *,
        retain: bool = True,
        share_outputs: bool = True,
        shares: bool = True,
    ):
        if n_pages < 2 or page_size < 1:
            raise ValueError(
                f"a pool needs 2 pages (one is trash) of 1 token, not {n_pages} of {page_size}"
            )
        self.n_pages = n_pages
        self.page_size = page_size
        self.retain = retain
        self.share_outputs = share_outputs
        self.shares = shares
        # A stack of free pages; low numbers are handed out first.
        self._free = list(range(n_pages - 1, 0, -1))
        # Number of references of each page.
        self._owners = [0] * n_pages
        # The key of each published page, and the page of each key.
        self._keys: list[bytes | None] = [None] * n_pages
        self._index: dict[bytes, int] = {}
        # The tenants that published pages belong to.
        self._tenants = [""] * n_pages
        # Published pages without references.
        self._cached = CachedPages(n_pages)
        # The result of `states`, kept up to date because it is read often.
        self._states = bytearray(n_pages)

    def renewed(self) -> PagePool:
        """A new pool of the same size and rules, with all pages free."""
        return PagePool(
            self.n_pages,
            self.page_size,
            retain=self.retain,
            share_outputs=self.share_outputs,
            shares=self.shares,
        )

    @property
    def capacity(self) -> int:
        """Pages that can be held at once: all but the trash page."""
        return self.n_pages - 1

    @property
    def n_cached(self) -> int:
        """Number of published pages that are not held."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Number of pages that `allocate` can hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Number of held pages; a shared page counts once."""
        return self.n_pages - 1 - len(self._free) - len(self._cached)

    def pages_for(self, tokens: int) -> int:
        """Number of pages that hold this many KV positions."""
        return -(-tokens // self.page_size)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Take a reference to the page of each key, in order, up to the first missing key."""
        pages: list[int] = []
        cached: list[int] = []
        for key in keys:
            page = self._index.get(key)
            if page is None:
                break
            if not self._owners[page]:
                cached.append(page)
            self._owners[page] += 1
            self._states[page] = _HELD if self._owners[page] == 1 else _SHARED
            pages.append(page)
        if cached:
            self._cached.take(cached)
        return pages

    def has(self, key: bytes) -> bool:
        """Whether `match` would find this key."""
        return key in self._index

    def count(self, keys: Iterable[bytes]) -> int:
        """Number of keys, in order, that `match` would find."""
        return sum(1 for _ in takewhile(self._index.__contains__, keys))

    def allocate(self, count: int) -> list[int] | None:
        """Hand out `count` pages with one reference each. Returns None, and changes nothing, if
        there are too few.

        Evicts cached pages once there are no free ones, see `CachedPages`.
        """
        if count > self.available:
            return None
        return [self._hand_out() for _ in range(count)]

    def _hand_out(self) -> int:
        page = self._free.pop() if self._free else self._evict()
        self._owners[page] = 1
        self._states[page] = _HELD
        return page

    def publish(self, page: int, key: bytes, tenant: str = "") -> None:
        """Enter a held page in the prefix index. All its rows must be computed, or launched, since
        the device runs steps in order. tenant: the owner.

        If the key is in the index already, the older page keeps it and this one stays private.
        """
        if key not in self._index and self._keys[page] is None:
            self._index[key] = page
            self._keys[page] = key
            self._tenants[page] = tenant

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """Remove the pages of these keys, held or cached, from the prefix index, because their
        contents cannot be trusted.
        """
        for key in keys:
            page = self._index.get(key)
            if page is not None:
                self._withdraw(page)

    def _withdraw(self, page: int) -> None:
        self._unpublish(page)
        if page in self._cached:
            self._cached.take([page])
            self._set_free(page)

    def _set_free(self, page: int) -> None:
        self._free.append(page)
        self._states[page] = _FREE

    def clear(self) -> None:
        """Withdraw all pages, because their contents are lost."""
        self.withdraw(list(self._index))

    def release(self, pages: list[int], *, evict_first: bool = False) -> None:
        """Drop one reference of each page. pages: in the order of the sequence; the trash page is
        skipped.

        The last page is released first, so that a chain is evicted from its tail: its head serves
        more prompts. evict_first: evict these pages before all other cached pages.
        """
        cached: list[int] = []
        for page in reversed(pages):
            if not page:
                continue
            self._owners[page] -= 1
            if self._owners[page]:
                self._states[page] = _HELD if self._owners[page] == 1 else _SHARED
                continue
            if self._keys[page] is not None and self.retain:
                cached.append(page)
                self._states[page] = _CACHED
            else:
                self._unpublish(page)
                self._set_free(page)
        if cached:
            self._cached.add(cached, self._tenants, evict_first=evict_first)

    def _evict(self) -> int:
        page = self._cached.evict()
        self._unpublish(page)
        return page

    def _unpublish(self, page: int) -> None:
        key = self._keys[page]
        if key is not None:
            del self._index[key]
            self._keys[page] = None

    def states(self) -> np.ndarray:
        """The state of each page, uint8 [N]: 0 free, 1 held, 2 shared, 3 cached; the trash page
        counts as free.
        """
        return np.frombuffer(bytes(self._states), np.uint8)

    def counts(self) -> list[int]:
        """Numbers of free, held, shared and cached pages, without the trash page."""
        return [self._states.count(state, 1) for state in (_FREE, _HELD, _SHARED, _CACHED)]

    def check(self, tables: _Tables | None = None) -> None:
        """Raise RuntimeError unless every page is accounted for. tables: the page lists of all
        owners.
        """
        free = set(self._free)
        cached = set(self._cached)
        held = {page for page, owners in enumerate(self._owners) if owners}
        counted = len(self._free) + len(cached) + len(held)
        if counted != self.capacity or free | cached | held != set(range(1, self.n_pages)):
            raise RuntimeError(
                f"pages lost or doubled: {len(self._free)} free, {len(self._cached)} cached, "
                f"{len(held)} held of {self.capacity}"
            )
        if len(free) != len(self._free):
            raise RuntimeError("a page is in the free list twice")
        for page, state in enumerate(self._states):
            if state != self._state_of(page):
                raise RuntimeError("the states of pages disagree with their references")
        named = {key: page for page, key in enumerate(self._keys) if key is not None}
        pages = set(named.values())
        if named != self._index or not cached <= pages or free & pages:
            raise RuntimeError("the prefix index and the pages disagree")
        self._cached.check()
        if tables is not None:
            self._check_owners(tables)

    def _state_of(self, page: int) -> int:
        """The state of a page, computed from its references."""
        if self._owners[page]:
            return min(self._owners[page], _SHARED)
        return _CACHED if page in self._cached else _FREE

    def _check_owners(self, tables: _Tables) -> None:
        owners = Counter(page for table in tables for page in table if page)
        if [owners[page] for page in range(self.n_pages)] != self._owners:
            raise RuntimeError("reference counts differ from the pages that sequences hold")


class NoPages(PagePool):
    """The pool of a model without a KV cache: sequences take no pages, and all of them fit."""

    def __init__(self):
        super().__init__(2, 1, retain=False)

    @property
    def available(self) -> int:
        return sys.maxsize

    def pages_for(self, tokens: int) -> int:
        """Always 0."""
        return 0
