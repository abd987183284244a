"""Which replica a request goes to: pure functions of what is known of the replicas.

Each gives the replicas in the order in which they are to be tried: the next one is for when the one
before cannot be reached, or is full.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import blake2b

#: How often each replica stands on the ring. With n points the shares of the replicas differ from
#: each other by about 1 / sqrt(n).
_POINTS = 128
#: How much more than the mean a replica may have before prompts that belong to it go elsewhere.
BRAKE = 1.25


def _place(text: bytes) -> int:
    """A place on the ring, from 0 to 2**64 - 1; the same in every process."""
    return int.from_bytes(blake2b(text, digest_size=8).digest())


class Ring:
    """Consistent hashing: a key belongs to the replica whose point is the next one on a ring.

    A replica that comes or goes moves the keys that it gets or had, 1/n of them, and no others.
    """

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


def most_load(total: float, replicas: int, brake: float = BRAKE) -> int:
    """Requests that one of so many replicas may have once one more has come to `total`."""
    return math.ceil(brake * (total + 1) / replicas)


def by_prefix(
    ring: Ring,
    key: bytes,
    loads: Mapping[str, float],
    *,
    total: float,
    brake: float = BRAKE,
    spare: float = 0.0,
) -> Iterator[str]:
    """By the key, with load as the brake: consistent hashing with bounded loads (Mirrokni, Thorup,
    Zadimoghaddam, 2016).

    loads: requests at each replica that can be had, waiting or in seats; of the ring's others
    nothing is given. total: their sum. Who has `brake` times the mean comes after those that have
    less. spare: up to this load there is no brake: some empty seats are no reason to lose a prefix.
    """
    most = max(spare, most_load(total, max(1, len(loads)), brake))
    full: list[str] = []
    for name in ring.walk(key):
        load = loads.get(name)
        if load is None:
            continue
        if load < most:
            yield name
        else:
            full.append(name)
    full.sort(key=loads.__getitem__)
    yield from full


def by_least_wait(waits: Mapping[str, float], loads: Mapping[str, float]) -> list[str]:
    """By the predicted wait, seconds; of equal ones the replica with fewer requests."""
    return sorted(waits, key=lambda name: (waits[name], loads[name], name))


def by_turn(names: Sequence[str], turn: int) -> list[str]:
    """One after the other. turn: counts the requests."""
    first = turn % len(names) if names else 0
    return [*names[first:], *names[:first]]
