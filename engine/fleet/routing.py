"""The routers of a fleet: each decides the order in which replicas are tried for a request.

The next replica is tried if the one before cannot be reached or is full. No router looks at all
replicas for a request, since a fleet may have thousands.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from typing import ClassVar, Literal

from jitney.engine.common.lru import LruCache

type RouterName = Literal["prefix", "least-wait", "round-robin"]

#: Points of each replica on the ring. With n points, the replicas' shares differ by 1 / sqrt(n).
_POINTS = 128
#: Load, divided by the mean load, from which a replica gets no more prompts for their prefix.
_BRAKE = 1.25
#: Most prefixes that are remembered, about 200 bytes each.
_MOST_PREFIXES = 1 << 16
#: Replicas that `LeastWait` yields before it sorts the others.
_FIRST = 2


def _position(text: bytes) -> int:
    """Position on the ring, 0 to 2**64 - 1; the same in every process."""
    return int.from_bytes(blake2b(text, digest_size=8).digest())


def _never(name: str) -> bool:
    return False


class HashRing:
    """Consistent hashing: a key belongs to the replica whose point is the next one on a ring.

    Adding or removing one of n replicas moves only its own keys, 1/n of all.
    """

    #: Default of `brake` in `order`.
    brake: ClassVar[float] = _BRAKE

    def __init__(self, names: Collection[str]):
        marks = sorted(
            (_position(f"{name}\0{point}".encode()), name)
            for name in names
            for point in range(_POINTS)
        )
        self.names = tuple(sorted(names))
        self._positions = [position for position, _ in marks]
        self._owners = [name for _, name in marks]

    def walk(self, key: bytes) -> Iterator[str]:
        """All replicas in ring order, beginning with the one that the key belongs to."""
        start = bisect_right(self._positions, _position(key))
        seen: set[str] = set()
        for step in range(len(self._owners)):
            name = self._owners[(start + step) % len(self._owners)]
            if name not in seen:
                seen.add(name)
                yield name
            if len(seen) == len(self.names):
                return

    def order(
        self,
        key: bytes,
        loads: Mapping[str, float],
        *,
        total: float,
        brake: float = _BRAKE,
        spare: float = 0.0,
        known: str | None = None,
        seats: float = 0.0,
        gives_way: Callable[[str], bool] = _never,
    ) -> Iterator[str]:
        """Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016).

        key: the prompt's key; its replica is the next one on the ring. loads: requests at each
        ready replica, waiting or in seats. total: the sum of `loads`. A replica with `brake` times
        the mean load comes after those with less. spare: load up to which there is no brake. known:
        the replica that computed this prefix last. It comes before the ring, without brake while
        fewer than `seats` of its seats are taken: no request waits there, and another replica would
        compute the prefix again. A prompt of unknown prefix does not wait while any replica has a
        free seat: replicas without one come last. gives_way: whether the wait at a replica costs
        more than its cached pages save; such a replica comes last, too.
        """
        most = max(spare, _most_load(total, max(1, len(loads)), brake))
        if known is None and total < seats * len(loads):
            most = min(most, seats)
        others: list[str] = []
        for name in _known_first(known, self.walk(key)):
            load = loads.get(name)
            if load is None:
                continue
            fits = load < most or (name == known and load < seats)
            if fits and not gives_way(name):
                yield name
            else:
                others.append(name)
        others.sort(key=lambda name: loads.get(name, math.inf))
        yield from others


def _most_load(total: float, replicas: int, brake: float = _BRAKE) -> int:
    """The load limit of one replica if one more request is added to `total`."""
    return math.ceil(brake * (total + 1) / replicas)


def _known_first(known: str | None, names: Iterator[str]) -> Iterator[str]:
    if known is not None:
        yield known
    for name in names:
        if name != known:
            yield name


class PrefixIndex:
    """The replica that each prefix was sent to last. The least recently used ones are evicted.

    The ring decides where a conversation begins. This index records where the brake moved it, so
    that its next turn goes to the replica with its pages.
    """

    def __init__(self, most: int = _MOST_PREFIXES):
        self._replicas = LruCache[bytes, str](most, lambda prefix: 1)

    def replica_of(self, prefixes: Sequence[bytes]) -> str | None:
        """The replica of a prompt's longest known prefix; None if none is known. prefixes: the
        longest is the last.
        """
        for prefix in reversed(prefixes):
            name = self._replicas.get(prefix)
            if name is not None:
                return name
        return None

    def note(self, prefixes: Sequence[bytes], name: str) -> None:
        """Record the replica that got a prompt, by its longest prefix, which a next turn has."""
        self._replicas.put(prefixes[-1], name)


type _Wait = tuple[bool, float, float, str]


class LeastWait:
    """Replicas sorted by (full, predicted wait, load): full ones last.

    The heap keeps a replica's old entries until they reach the top, so that a change and the first
    of n replicas cost O(log n).
    """

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}
        self._heap: list[_Wait] = []

    def __len__(self) -> int:
        return len(self._waits)

    def put(self, name: str, wait_s: float, load: float, *, full: bool = False) -> None:
        """Set a replica's wait and load. full: it refuses requests now."""
        wait = full, wait_s, load, name
        if self._waits.get(name) == wait:
            return
        self._waits[name] = wait
        heappush(self._heap, wait)
        if len(self._heap) > 4 * len(self._waits) + 16:
            self._heap = list(self._waits.values())
            heapify(self._heap)

    def drop(self, name: str) -> None:
        self._waits.pop(name, None)

    @property
    def least_s(self) -> float:
        """The shortest wait; 0 without replicas."""
        return next((self._waits[name][1] for name in self._first(1)), 0.0)

    def order(self) -> Iterator[str]:
        """All names in order. A change during the iteration takes effect in the next call."""
        first = self._first(_FIRST)
        yield from first
        for _, _, _, name in sorted(self._waits.values()):
            if name not in first:
                yield name

    def _first(self, count: int) -> list[str]:
        first_waits: list[_Wait] = []
        while self._heap and len(first_waits) < count:
            wait = heappop(self._heap)
            is_old = self._waits.get(wait[-1]) != wait
            if not is_old and wait not in first_waits:
                first_waits.append(wait)
        for wait in first_waits:
            heappush(self._heap, wait)
        return [wait[-1] for wait in first_waits]


def round_robin(names: Sequence[str], turn: int) -> Iterator[str]:
    """All names in a cycle that starts one name later with each `turn`."""
    for step in range(len(names)):
        yield names[(turn + step) % len(names)]
