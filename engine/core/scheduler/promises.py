"""When whoever is turned away should come back: how fast places come free, and to whom the next
ones are promised.

If everybody were told when one place is free, all would come back for that one. So places are given
away in the order of refusal: the n-th to be turned away is told when a place is free for the n-th,
and a newcomer who finds places promised does not get one of them. It is a queue of clients that
wait at home, at the cost of a line each.
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

#: Bounds of the seconds after which to try again.
SHORTEST_RETRY, _LONGEST_RETRY = 0.1, 3600.0
#: Places that came free after which the counts are halved: about the last 128 to 256 count, and
#: the last 20 to 40.
_HALVE_LONG_AT, _HALVE_SHORT_AT = 256, 40
#: What is foreseen of the pace of places weighs as much as so many that came free.
_PRIOR_PLACES = 8
#: Promises are a little sparser than places come free, so that what was promised is kept.
_SPARSE = 1.05
#: Places that come free for each one that is promised to somebody who was put off.
_LATE_SPACING = 2.0
#: A promise holds from so many seconds before its time to so many after it, and this share of the
#: time that was to be waited.
_EARLY_S, _LATE_S, _LATE_SHARE = 0.05, 5.0, 0.1
#: Most that is added at random to a time, in seconds and as a share of it, so that clients that
#: were turned away together do not come back together.
_JITTER_S, _JITTER_SHARE = 0.5, 0.05
#: Promises remembered, in all and for one name; who is turned away beyond them gets none.
_MOST, _MOST_OF_ONE = 100_000, 128
#: Whether promises are taken up is counted, beside so many that are taken to have been. Half of
#: the counts is forgotten in so many seconds: another crowd may keep better to its times.
_PRIOR_TAKEN, _HALF_LIFE_S = 8.0, 60.0
#: Its least: a crowd that comes again after one that did not finds not too much promised.
_LEAST_SHARE = 0.4


class _Pace:
    """What came free while the engine was crowded, and in how many seconds; newer counts more."""

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
        """At least 1, which it is where little is known."""
        if self.places < _PRIOR_PLACES or not (other.tokens and other.seconds):
            return 1.0
        return max(1.0, self.seconds / self.tokens / (other.seconds / other.tokens))


class PlaceRate:
    """Seconds per place and per token of work that comes free while every seat is taken and
    somebody waits: the slower of a long and a short average, since a crowd itself slows the engine
    down, and promises that come too soon are not kept.

    A place comes free when a sequence ends, in a seat or before it had one. Its work is what was
    expected of it when it was let in, so that work let in and work that leaves are counted alike.
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
        """A sequence has left its seat for good, or the queue."""
        self._new_places += 1
        self._new_tokens += seq.expected + seq.n_prompt / seq.request.sampling.n

    def step(self, now: float, *, crowded: bool) -> None:
        """A step was planned; what came free since the one before counts if it was crowded then."""
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
        """Seconds per place; foreseen: the same, by prediction."""
        seconds = self._long.seconds + _PRIOR_PLACES * foreseen
        return self._slowed() * seconds / (self._long.places + _PRIOR_PLACES)

    def per_token(self, foreseen: float, tokens: float) -> float:
        """Seconds per token of work; foreseen: seconds per place, and how many tokens it has."""
        seconds = self._long.seconds + _PRIOR_PLACES * foreseen
        return self._slowed() * seconds / (self._long.tokens + _PRIOR_PLACES * max(1.0, tokens))

    def _slowed(self) -> float:
        return self._short.times_slower_than(self._long)


class _TakenShare:
    """The share of promises that are taken up, of those whose time has come."""

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
        """Of the promises that are made now."""
        self._fade(now)
        taken = self._taken + _PRIOR_TAKEN
        return max(_LEAST_SHARE, taken / (taken + self._lapsed))

    def _fade(self, now: float) -> None:
        kept = 0.5 ** (max(0.0, now - self._faded_at) / _HALF_LIFE_S)
        self._taken *= kept
        self._lapsed *= kept
        self._faded_at = now


class Promises:
    """Who was told to come back when. A client is known again by what it asks for (`name_of`)."""

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
        """By what a request is known when it comes again: whose it is, its prompt and its lengths.

        Not by its seed: whoever gave none has got another one each time it arrives here.
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
        """Promises that hold."""
        return self._count

    def left(self, now: float) -> float:
        """Seconds for which the places that come free are promised; 0 if none are."""
        return max(0.0, max(self._until, self._late_until) - now)

    def take(self, name: bytes, now: float) -> bool:
        """Whether a place was promised for this time; that promise is used up then."""
        self._lapse(now)
        times = self._times.get(name)
        if not times or times[0] > now + _EARLY_S:
            return False
        self._forget(name, times[0])
        self._share.taken(now)
        return True

    def give(self, name: bytes, now: float, free_in: float, work_s: float) -> float:
        """Promise the next places, and return the seconds after which to come.

        free_in: seconds until places are free if nobody comes. work_s: seconds in which as much
        comes free as is asked for.
        """
        self._lapse(now)
        start = max(self._until, self._late_until, now + free_in)
        if start - now > _LONGEST_RETRY or not self._has_room(name):
            return min(start - now, _LONGEST_RETRY) * self._random.uniform(0.9, 1.0)
        self._until = start + work_s * _SPARSE * self._share.expected(now)
        return self._promise(name, now, start - now)

    def put_off(self, name: bytes, now: float, free_in: float, work_s: float) -> float:
        """As `give` for one who came in time and found no place: it does not go to the end.

        The engine has become slower than it was when the promises were made, so more come than
        there are places for. Those put off are told times one after the other too, among those of
        the others: half of the places are theirs, and all behind the last of the others.
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
        """Forget the promises that nobody came for, and expect fewer to come."""
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
