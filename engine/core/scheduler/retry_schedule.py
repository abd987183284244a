"""Retry-After of refused requests: how fast queue places are released, and to which clients the
next ones are promised.

If all refused requests were told when one place is free, all would return for that one. So the n-th
refused request is told when a place is free for the n-th, and newcomers do not get promised places.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import deque
from hashlib import blake2b
from heapq import heappop, heappush

from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.scheduler.sequence import Sequence

#: Bounds of Retry-After, in seconds.
SHORTEST_RETRY, _LONGEST_RETRY = 0.1, 3600.0
#: Places that came free after which the counts are halved: about the last 128 to 256 count, and
#: the last 20 to 40.
_HALVE_LONG_AT, _HALVE_SHORT_AT = 256, 40
#: Released places that the predicted release rate weighs as much as.
_PRIOR_PLACES = 8
#: Promises are spaced a little wider than places are released, so that they can be kept.
_SPARSE = 1.05
#: Places that are released for each one that is promised to a returning request that found none.
_LATE_SPACING = 2.0
#: A promise holds from so many seconds before its time to so many after it, and this share of the
#: time that was to be waited.
_EARLY_S, _LATE_S, _LATE_SHARE = 0.05, 5.0, 0.1
#: Random delay: at most so many seconds, and this share of the wait, so that clients that were
#: refused together do not return together.
_JITTER_S, _JITTER_SHARE = 0.5, 0.05
#: Most promises, in all and for one client; further refusals get a time without a promise.
_MOST, _MOST_OF_ONE = 100_000, 128
#: The share of promises that are taken up starts as if so many had been; counts halve in so many
#: seconds, since the next crowd may behave differently.
_PRIOR_TAKEN, _HALF_LIFE_S = 8.0, 60.0
#: Least share, so that not too many places are promised to the next crowd.
_LEAST_SHARE = 0.4


class _Pace:
    """Places and tokens released while the engine was crowded, and in how many seconds."""

    def __init__(self, halve_at: int):
        self.halve_at = halve_at
        self.seconds = 0.0
        self.places = 0.0
        self.tokens = 0.0

    def add(self, seconds: float, places: int, tokens: float) -> None:
        self.seconds += seconds
        self.places += places
        self.tokens += tokens
        if self.places >= self.halve_at:
            self.seconds /= 2
            self.places /= 2
            self.tokens /= 2

    def times_slower_than(self, other: _Pace) -> float:
        """How many times slower than another average, at least 1; 1 while little is known."""
        if self.places < _PRIOR_PLACES or not (other.tokens and other.seconds):
            return 1.0
        return max(1.0, self.seconds / self.tokens / (other.seconds / other.tokens))


class ReleaseRate:
    """Seconds per released place, and per token of released work, while all seats are taken and
    requests wait. The slower of a long and a short average, since a crowd slows the engine down.

    A place is released when a sequence ends, seated or waiting. Its work is what was expected at
    its admission, so that admitted and released work are counted alike.
    """

    def __init__(self) -> None:
        self._long = _Pace(_HALVE_LONG_AT)
        self._short = _Pace(_HALVE_SHORT_AT)
        # Since the last step.
        self._new_places = 0
        self._new_tokens = 0.0
        # When the last step was planned, if the engine was crowded then.
        self._crowded_at: float | None = None
        # When a step was first planned in the crowd that is here.
        self._crowded_since: float | None = None

    def freed(self, seq: Sequence) -> None:
        """A sequence has ended, in its seat or in the queue."""
        self._new_places += 1
        self._new_tokens += seq.expected + seq.n_prompt / seq.request.sampling.n

    def step(self, now: float, *, crowded: bool) -> None:
        """A step was planned; releases since the last one count if the engine was crowded then."""
        if self._crowded_at is not None:
            for pace in (self._long, self._short):
                pace.add(now - self._crowded_at, self._new_places, self._new_tokens)
        self._new_places, self._new_tokens = 0, 0.0
        self._crowded_at = now if crowded else None
        if not crowded:
            self._crowded_since = None
        elif self._crowded_since is None:
            self._crowded_since = now

    def crowded_s(self, now: float) -> float:
        """Seconds for which the engine has been crowded."""
        return 0.0 if self._crowded_since is None else now - self._crowded_since

    def per_place(self, foreseen: float) -> float:
        """Seconds per place. foreseen: the predicted value."""
        seconds = self._long.seconds + _PRIOR_PLACES * foreseen
        return self._slowed() * seconds / (self._long.places + _PRIOR_PLACES)

    def per_token(self, foreseen: float, tokens: float) -> float:
        """Seconds per token. foreseen: the predicted seconds per place of so many tokens."""
        seconds = self._long.seconds + _PRIOR_PLACES * foreseen
        return self._slowed() * seconds / (self._long.tokens + _PRIOR_PLACES * max(1.0, tokens))

    def _slowed(self) -> float:
        return self._short.times_slower_than(self._long)


class _TakenShare:
    """The share of promises that are taken up, of those that were due."""

    def __init__(self) -> None:
        self._taken = 0.0
        self._lapsed = 0.0
        self._faded_at = 0.0

    def taken(self, now: float) -> None:
        self._fade(now)
        self._taken += 1

    def lapsed(self, now: float) -> None:
        self._fade(now)
        self._lapsed += 1

    def expected(self, now: float) -> float:
        """The share to expect of promises that are made now."""
        self._fade(now)
        taken = self._taken + _PRIOR_TAKEN
        return max(_LEAST_SHARE, taken / (taken + self._lapsed))

    def _fade(self, now: float) -> None:
        kept = 0.5 ** (max(0.0, now - self._faded_at) / _HALF_LIFE_S)
        self._taken *= kept
        self._lapsed *= kept
        self._faded_at = now


class RetrySchedule:
    """The times at which refused requests were told to return; see `name_of`."""

    def __init__(self, seed: int = 0):
        self._random = random.Random(seed)
        # Ascending times by name, and a heap of (when it lapses, name, time) that holds those that
        # were taken up, too.
        self._times: dict[bytes, deque[float]] = {}
        self._lapses: list[tuple[float, bytes, float]] = []
        self._count = 0
        # All places that come free until then are promised.
        self._until = -math.inf
        # The same of those that were put off.
        self._late_until = -math.inf
        self._share = _TakenShare()

    @staticmethod
    def name_of(request: EngineRequest) -> bytes:
        """A digest by which a returning request is recognised: account, prompt and lengths, without
        the seed, which differs each time unless the client gave one.
        """
        sampling = request.sampling
        together = request.whole.requests if request.whole else 1
        parts = (
            request.account,
            request.cache_salt,
            request.adapter,
            sampling.n,
            sampling.max_tokens,
            together,
        )
        digest = blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16)
        digest.update(array("i", request.prompt).tobytes())
        return digest.digest()

    def __len__(self) -> int:
        """Promises that are open."""
        return self._count

    def left(self, now: float) -> float:
        """Seconds for which released places are promised; 0 if none are."""
        return max(0.0, max(self._until, self._late_until) - now)

    def take(self, name: bytes, now: float) -> bool:
        """Whether a place was promised for this time. Uses up the promise."""
        self._lapse(now)
        times = self._times.get(name)
        if not times or times[0] > now + _EARLY_S:
            return False
        self._forget(name, times[0])
        self._share.taken(now)
        return True

    def give(self, name: bytes, now: float, free_in: float, work_s: float) -> float:
        """Promise the next places. Returns the seconds after which to return.

        free_in: seconds until places are free if no request arrives. work_s: seconds in which as
        much work is released as the request has.
        """
        self._lapse(now)
        start = max(self._until, self._late_until, now + free_in)
        if start - now > _LONGEST_RETRY or not self._has_room(name):
            return min(start - now, _LONGEST_RETRY) * self._random.uniform(0.9, 1.0)
        self._until = start + work_s * _SPARSE * self._share.expected(now)
        return self._promise(name, now, start - now)

    def put_off(self, name: bytes, now: float, free_in: float, work_s: float) -> float:
        """As `give`, for a request that returned in time and found no place, because the engine has
        become slower since. Such requests get half of the places before the last promise, and all
        places after it.
        """
        at = max(self._late_until, now + free_in)
        self._late_until = at + work_s * (_LATE_SPACING if at < self._until else _SPARSE)
        return self._promise(name, now, min(at - now, _LONGEST_RETRY))

    def _promise(self, name: bytes, now: float, wait: float) -> float:
        jitter = self._random.uniform(0.0, min(_JITTER_S, _JITTER_SHARE * wait))
        wait = max(SHORTEST_RETRY, wait + jitter)
        times = self._times.setdefault(name, deque())
        at = max(now + wait, times[-1] if times else 0.0)
        times.append(at)
        heappush(self._lapses, (at + _LATE_S + _LATE_SHARE * wait, name, at))
        self._count += 1
        return at - now

    def _has_room(self, name: bytes) -> bool:
        return self._count < _MOST and len(self._times.get(name, ())) < _MOST_OF_ONE

    def _lapse(self, now: float) -> None:
        """Drop the promises that were not taken up."""
        while self._lapses and self._lapses[0][0] <= now:
            _, name, at = heappop(self._lapses)
            if at in self._times.get(name, ()):
                self._forget(name, at)
                self._share.lapsed(now)

    def _forget(self, name: bytes, at: float) -> None:
        times = self._times[name]
        times.remove(at)
        self._count -= 1
        if not times:
            del self._times[name]
