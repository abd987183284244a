"""Wrong keys, counted by where they come from: who shows many is told to wait.

A right key is never held up, however many wrong ones its address has shown: whoever shares an
address (a proxy, a building) with somebody who guesses would be locked out with them. What makes
guessing hopeless is a long key; this keeps it from filling logs and taking time.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable

from jitney.engine.api.settings import digest_key

#: Seconds that a wrong key is remembered.
_WINDOW_S = 60.0
#: Wrong keys with the same beginning from one address in that time, as of a client that was given
#: a wrong key and tries again; and wrong keys of any kind from it.
_MOST_ALIKE = 10
_MOST_OF_ADDRESS = 60
#: Characters of a key that are its beginning.
_BEGINNING = 8
#: Addresses and beginnings that are remembered.
_MAX_REMEMBERED = 4096
#: An IPv6 client has a whole network of so many bits to choose its addresses from.
_IPV6_NETWORK = 64


class Guesses:
    """Wrong keys of the last minute. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        #: When wrong keys came, by address and by address and beginning; the quietest first.
        self._times: dict[str, list[float]] = {}

    def wait(self, address: str, key: str) -> float:
        """Seconds until a wrong key like this one is worth another answer, 0: now."""
        waits = [self._wait(place, most) for place, most in _places(address, key)]
        return max(waits)

    def failed(self, address: str, key: str) -> None:
        """This key was wrong. Of too many places the one that was quiet longest is forgotten."""
        for place, _ in _places(address, key):
            recent = [*self._recent(place), self._clock()]
            self._times.pop(place, None)
            self._times[place] = recent
            if len(self._times) > _MAX_REMEMBERED:
                del self._times[next(iter(self._times))]

    def _wait(self, place: str, most: int) -> float:
        recent = self._recent(place)
        if len(recent) < most:
            return 0.0
        return recent[0] + _WINDOW_S - self._clock()

    def _recent(self, place: str) -> list[float]:
        since = self._clock() - _WINDOW_S
        return [when for when in self._times.get(place, ()) if when > since]


def _places(address: str, key: str) -> list[tuple[str, int]]:
    """What a wrong key is counted under, with the most that each may have. A beginning is kept as
    a digest: it may be that of a right key.
    """
    network = _network(address)
    beginning = digest_key(key[:_BEGINNING])
    return [(network, _MOST_OF_ADDRESS), (f"{network} {beginning}", _MOST_ALIKE)]


def _network(address: str) -> str:
    """The address, or of IPv6 the network that its owner surely has."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    mapped = parsed.ipv4_mapped
    if mapped is not None:
        return str(mapped)
    return str(ipaddress.ip_network((int(parsed), _IPV6_NETWORK), strict=False))
