"""The page pool: who holds which KV page, and which pages can be used again by prompts that start
alike.

Host side only: numbers of pages, never their contents. Page 0 is the trash page that padding rows
write to; it is never handed out. Every other page is in exactly one state:

    free --allocate--> held --match--> shared --release--> held --release--> cached (published) or
    free
    cached --match--> held          cached --allocate (evicts it)--> held
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from itertools import takewhile

import numpy as np

from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.scheduler.cached_pages import CachedPages
from jitney.engine.core.scheduler.sequence import OwnPages, Sequence, WindowPages

_FREE, _HELD, _SHARED, _CACHED = range(4)

#: The pages of each owner.
type _Tables = Iterable[list[int]]


class PagePool:
    """Reference counts and the prefix index of n_pages pages; every operation is O(1) per page it
    touches, amortised.

    retain: keep published pages that nobody holds until their room is needed (the prefix cache).
    Without it they become free at once, and only sequences alive at the same time can share.
    share_outputs: pages that hold output tokens serve other prompts too; without it they serve
    their own sequence alone, after a preemption. shares: without it no sequence finds pages of
    another one, nor its own again: what a model keeps beside its pages would be missing.
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
        # A stack: low numbers go first.
        self._free = list(range(n_pages - 1, 0, -1))
        # References of each page.
        self._owners = [0] * n_pages
        # The key that each page is published under, and the other way round.
        self._keys: list[bytes | None] = [None] * n_pages
        self._index: dict[bytes, int] = {}
        # Whose published pages are.
        self._tenants = [""] * n_pages
        # Published and not referenced.
        self._cached = CachedPages(n_pages)
        # What `states` returns, written as it changes: it is asked for often.
        self._states = bytearray(n_pages)

    @property
    def capacity(self) -> int:
        """Pages that can be held at once: all but the trash page."""
        return self.n_pages - 1

    @property
    def n_cached(self) -> int:
        """Published pages that nobody holds."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Pages that somebody holds; a shared page counts once."""
        return self.n_pages - 1 - len(self._free) - len(self._cached)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many KV positions."""
        return -(-tokens // self.page_size)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Take a reference to the page of each key, in order, up to the first that is not here."""
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
        """Whether `match` would find it."""
        return key in self._index

    def count(self, keys: Iterable[bytes]) -> int:
        """How many of the keys, in order, `match` would find."""
        return sum(1 for _ in takewhile(self._index.__contains__, keys))

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and nothing changed) if there are not
        that many.

        Evicts cached pages once the free ones are gone: see `CachedPages`.
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
        """Let later prompts find a held page whose rows are all computed (or launched: the device
        runs in order). tenant: whose it is.

        If the key is here already the older page keeps it, and this one stays private; nothing is
        copied.
        """
        if key not in self._index and self._keys[page] is None:
            self._index[key] = page
            self._keys[page] = key
            self._tenants[page] = tenant

    def root_of(self, request: EngineRequest) -> bytes:
        """The key before the first page of its sequences: whose pages they may share."""
        alone = "" if self.retain else request.id
        return _root_key(request.tenant, request.cache_salt, alone, request.adapter)

    def shareable_keys(self, seq: Sequence) -> list[bytes]:
        """Keys of the pages a boarding sequence may share: full ones, and never the last token's,
        whose logits we need.
        """
        if not seq.shares:
            return []
        return _keys_of(seq, self.page_size, (len(seq.tokens) - 1) // self.page_size)

    def publish_known(
        self, seq: Sequence, held: Sequence | WindowPages, *, ended: bool = False
    ) -> None:
        """Offer every full page that a seated sequence holds here, whose tokens the host knows and
        whose rows are launched. held: its pages in this pool.

        Prompts as soon as they are computed, outputs when the sequence leaves its seat: naming a
        page takes a hash, and many at once take less time than one in each step. ended: it will not
        come back, so pages that only itself may find are not offered.
        """
        if not seq.shares:
            return
        known = min(seq.scheduled, len(seq.tokens))
        if ended and seq.own_pages:
            known = min(known, seq.own_pages.start)
        full = known // self.page_size
        if full <= held.published:
            return
        keys = _keys_of(seq, self.page_size, full)
        tenant = seq.request.tenant
        for i in range(max(held.published, held.dropped), full):
            self.publish(held.pages[i], keys[i], tenant)
        held.published = full

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """Let no later prompt find the pages of these names, held or cached: what they contain is
        not to be trusted.
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
        """Let nobody find any page again: what they contained is gone."""
        self.withdraw(list(self._index))

    def release(self, pages: list[int]) -> None:
        """Drop one reference of each page; `pages` in the order of the sequence; the trash page
        belongs to nobody.

        The last page goes first, so that a chain is evicted from its tail: its head serves more
        prompts.
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
            self._cached.add(cached, self._tenants)

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
        """uint8[N]: 0 free, 1 held, 2 shared, 3 cached; the trash page reads as free."""
        return np.frombuffer(bytes(self._states), np.uint8)

    def check(self, tables: _Tables | None = None) -> None:
        """Raise RuntimeError unless every page is accounted for; `tables`: the page lists of all
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
                raise RuntimeError("the states of pages disagree with who holds them")
        named = {key: page for page, key in enumerate(self._keys) if key is not None}
        pages = set(named.values())
        if named != self._index or not cached <= pages or free & pages:
            raise RuntimeError("the prefix index and the pages disagree")
        self._cached.check()
        if tables is not None:
            self._check_owners(tables)

    def _state_of(self, page: int) -> int:
        """The state that a page is in by who holds it."""
        if self._owners[page]:
            return min(self._owners[page], _SHARED)
        return _CACHED if page in self._cached else _FREE

    def _check_owners(self, tables: _Tables) -> None:
        owners = Counter(page for table in tables for page in table if page)
        if [owners[page] for page in range(self.n_pages)] != self._owners:
            raise RuntimeError("reference counts differ from the pages that sequences hold")


class NoPages(PagePool):
    """The pool of a model that keeps no keys and values: no sequence takes a page, and there is
    room for all.
    """

    def __init__(self):
        super().__init__(2, 1, retain=False)

    @property
    def available(self) -> int:
        return sys.maxsize

    def pages_for(self, tokens: int) -> int:
        """None, for however many."""
        return 0


_KEY_BYTES = 16


def _root_key(tenant: str, cache_salt: str, request_id: str = "", adapter: int = 0) -> bytes:
    """The key before the first page: only sequences with equal parts can share pages. Keys and
    values of one adapter are not those of another.

    request_id is given when the prefix cache is off: then only the siblings of one request share.
    """
    framed = b"".join(map(_framed, (tenant, cache_salt, request_id, str(adapter))))
    return blake2b(framed, digest_size=_KEY_BYTES).digest()


def _framed(part: str) -> bytes:
    """Its length goes first, so that ("ab", "c") and ("a", "bc") differ."""
    encoded = part.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(8, "little") + encoded


def _extend_keys(
    keys: list[bytes],
    root: bytes,
    tokens: list[int],
    page_size: int,
    n_pages: int,
    own: OwnPages | None = None,
) -> None:
    """Append to `keys` until it names the first n_pages full pages of `tokens`.

    A page's key is blake2b-128 of its parent's key and its tokens as int32, and of the owner's name
    where only the owner may find it.
    """
    for start in range(len(keys) * page_size, n_pages * page_size, page_size):
        parent = keys[-1] if keys else root
        end = start + page_size
        page = array("i", tokens[start:end]).tobytes()
        owner = own.owner if own and end > own.start else b""
        keys.append(blake2b(parent + page + owner, digest_size=_KEY_BYTES).digest())


def _keys_of(seq: Sequence, page_size: int, n_pages: int) -> list[bytes]:
    """The keys of a sequence's first n_pages pages, which are full."""
    _extend_keys(seq.keys, seq.root, seq.tokens, page_size, n_pages, seq.own_pages)
    return seq.keys[:n_pages]
