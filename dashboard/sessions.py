"""Who may look when API keys are set: a browser shows a key once and then carries a random session
id in a cookie.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Sequence

from jitney.engine.api.settings import digest_key

COOKIE = "jitney_session"
#: Seconds until a browser must sign in again.
LIFETIME_S = 12 * 3600
#: Sessions kept in memory; the oldest goes first.
MAX_SESSIONS = 1024
#: Wrong keys that an address may show within _WINDOW_S seconds.
MOST_ATTEMPTS = 10
_WINDOW_S = 60.0
#: Addresses that are remembered.
MAX_ADDRESSES = 4096


class Sessions:
    """Open sessions, in memory alone: a restart of the server ends them all.

    keys: `digest_key` of each accepted API key; none means that everybody may look.
    """

    def __init__(self, keys: Sequence[str], clock: Callable[[], float] = time.monotonic):
        self.needed = bool(keys)
        self._keys = tuple(keys)
        self._clock = clock
        #: By digest of the session id: when it ends; oldest first.
        self._ends: dict[str, float] = {}

    def open(self, key: str) -> str | None:
        """A new session id for a valid API key, else None; every key is compared in full."""
        digest = digest_key(key)
        matches = [hmac.compare_digest(digest, key_digest) for key_digest in self._keys]
        if not any(matches):
            return None
        session = secrets.token_urlsafe(32)
        self._ends[digest_key(session)] = self._clock() + LIFETIME_S
        while len(self._ends) > MAX_SESSIONS:
            del self._ends[next(iter(self._ends))]
        return session

    def admits(self, session: str | None) -> bool:
        """True if the holder of this session id may look. Looked up by digest, so timing tells
        nothing of the id.
        """
        if not self.needed:
            return True
        if not session:
            return False
        end = self._ends.get(digest_key(session))
        return end is not None and self._clock() < end


class Attempts:
    """Wrong keys by client address, so that guessing is slow: after MOST_ATTEMPTS within a minute
    an address waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        #: By address: when it showed a wrong key; the quietest address first.
        self._failures: dict[str, list[float]] = {}

    def wait(self, address: str) -> float:
        """Seconds until this address may try again, 0 for now."""
        recent = self._recent(address)
        return recent[0] + _WINDOW_S - self._clock() if len(recent) >= MOST_ATTEMPTS else 0.0

    def failed(self, address: str) -> None:
        """Count a wrong key. Of too many addresses the one that was quiet longest is forgotten."""
        recent = [*self._recent(address), self._clock()]
        self._failures.pop(address, None)
        self._failures[address] = recent
        if len(self._failures) > MAX_ADDRESSES:
            del self._failures[next(iter(self._failures))]

    def _recent(self, address: str) -> list[float]:
        since = self._clock() - _WINDOW_S
        return [when for when in self._failures.get(address, ()) if when > since]
