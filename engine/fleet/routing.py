"""Which replica a request goes to: pure functions of what is known of the replicas.

Each gives the replicas in the order in which they are to be tried: the next one is for when the one
before cannot be reached, or is full. None looks at all replicas for a request: there may be
thousands.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from typing import ClassVar

from jitney.engine.common.lru import LruCache

#: How often each replica stands on the ring. With n points the shares of the replicas differ from
#: each other by about 1 / sqrt(n).
_POINTS = 128
#: How much more than the mean a replica may have before prompts that belong to it go elsewhere.
_BRAKE = 1.25
#: Beginnings of prompts that are remembered, some 200 bytes each.
_MOST_KNOWN = 1 << 16
#: Replicas that `LeastWait` gives before it sorts the others.
_FIRST = 2


def _place(text: bytes) -> int:
    """A place on the ring, from 0 to 2**64 - 1; the same in every process."""
    return int.from_bytes(blake2b(text, digest_size=8).digest())


class Ring:
    """Consistent hashing: a key belongs to the replica whose point is the next one on a ring.

    A replica that comes or goes moves the keys that it gets or had, 1/n of them, and no others.
    """

    #: See `order`.
    brake: ClassVar[float] = _BRAKE

    def __init__(self, names: Collection[str], points: int = _POINTS):
        marks = sorted(
            (_place(f"{name}\0{point}".encode()), name) for name in names for point in range(points)
        )
        self.names = tuple(sorted(names))
        self._places = [place for place, _ in marks]
        self._owners = [name for _, name in marks]

    def __len__(self) -> int:
        return len(self.names)

    def walk(self, key: bytes) -> Iterator[str]:
        """Every replica once, from the one that the key belongs to around the ring."""
        start = bisect_right(self._places, _place(key))
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
    ) -> Iterator[str]:
        """By the key, with load as the brake: consistent hashing with bounded loads (Mirrokni,
        Thorup, Zadimoghaddam, 2016).

        loads: requests at each replica that can be had, waiting or in seats; of the ring's others
        nothing is given. total: their sum. Who has `brake` times the mean comes after those that
        have less. spare: up to this load there is no brake: some empty seats are no reason to lose
        a prefix. known: the replica that had this beginning last; it is asked before the ring, and
        while fewer than `seats` of its seats are taken there is no brake: nobody waits there, and
        elsewhere the prompt would be computed again. A prompt that nobody is known to have had does
        not wait while some replica has a free seat: who has none comes after those that have one.
        """
        most = max(spare, _most_load(total, max(1, len(loads)), brake))
        if known is None and total < seats * len(loads):
            most = min(most, seats)
        full: list[str] = []
        for name in _known_first(known, self.walk(key)):
            load = loads.get(name)
            if load is None:
                continue
            if load < most or (name == known and load < seats):
                yield name
            else:
                full.append(name)
        full.sort(key=lambda name: loads.get(name, math.inf))
        yield from full


def _most_load(total: float, replicas: int, brake: float = _BRAKE) -> int:
    """Requests that one of so many replicas may have once one more has come to `total`."""
    return math.ceil(brake * (total + 1) / replicas)


def _known_first(known: str | None, names: Iterator[str]) -> Iterator[str]:
    if known is not None:
        yield known
    for name in names:
        if name != known:
            yield name


class KnownBeginnings:
    """Which replica was given which beginnings of prompts, as far as is remembered: who was asked
    for longest ago is forgotten first.

    The ring knows where a conversation begins. This knows where it went when the brake moved it, so
    that its next turn follows its pages and does not go back.
    """

    def __init__(self, most: int = _MOST_KNOWN):
        self._replicas = LruCache[bytes, str](most, lambda beginning: 1)

    def __len__(self) -> int:
        return len(self._replicas)

    def replica_of(self, beginnings: Sequence[bytes]) -> str | None:
        """The replica that was given the longest of these; None: none is known. beginnings: of one
        prompt, the shortest first.
        """
        for beginning in reversed(beginnings):
            name = self._replicas.get(beginning)
            if name is not None:
                return name
        return None

    def given(self, beginnings: Sequence[bytes], name: str) -> None:
        """The prompt went to this replica. Only the longest is noted: a next turn begins with
        it.
        """
        if beginnings:
            self._replicas.put(beginnings[-1], name)


type _Wait = tuple[bool, float, float, str]


class LeastWait:
    """Replicas by their predicted wait, or by another number that is the best one where it is the
    least; of equal ones by their load; full ones last.

    A heap in which a replica's old entries stay until they come up: a change and the first of n
    replicas cost O(log n).
    """

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}
        self._heap: list[_Wait] = []

    def __len__(self) -> int:
        return len(self._waits)

    def put(self, name: str, wait_s: float, load: float, *, full: bool = False) -> None:
        """It is there, and makes a request wait so long. full: by its own word."""
        wait = full, wait_s, load, name
        if self._waits.get(name) == wait:
            return
        self._waits[name] = wait
        heappush(self._heap, wait)
        if len(self._heap) > 4 * len(self._waits) + 16:
            self._heap = list(self._waits.values())
            heapify(self._heap)

    def drop(self, name: str) -> None:
        """It is not there any more."""
        self._waits.pop(name, None)

    def order(self) -> Iterator[str]:
        """All names. Changes meanwhile are seen by the next caller."""
        first = self._first(_FIRST)
        yield from first
        for _, _, _, name in sorted(self._waits.values()):
            if name not in first:
                yield name

    def _first(self, count: int) -> list[str]:
        """So many names, in order."""
        found: list[_Wait] = []
        while self._heap and len(found) < count:
            wait = heappop(self._heap)
            is_old = self._waits.get(wait[-1]) != wait
            if not is_old and wait not in found:
                found.append(wait)
        for wait in found:
            heappush(self._heap, wait)
        return [wait[-1] for wait in found]


def by_turn(names: Sequence[str], turn: int) -> Iterator[str]:
    """One after the other. turn: counts the requests."""
    for step in range(len(names)):
        yield names[(turn + step) % len(names)]
