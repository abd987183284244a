"""How fast places in the queue come free, and the times at which refused requests should return."""

from __future__ import annotations

import math
import random

from jitney.engine.core.scheduler.sequence import Sequence

#: Bounds of Retry-After, in seconds.
SHORTEST_RETRY, LONGEST_RETRY = 0.1, 1800.0
#: Places that came free after which the counts are halved: about the last 128 to 256 count, and
#: the last 20 to 40.
_HALVE_LONG_AT, _HALVE_SHORT_AT = 256, 40
#: Released places that the predicted release rate weighs as much as.
_PRIOR_PLACES = 8
#: Random delay: at most so many seconds, and this share of the wait.
_JITTER_S, _JITTER_SHARE = 0.5, 0.05


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
        # When the first step of the present crowd was planned.
        self._crowded_since: float | None = None

    def released(self, seq: Sequence) -> None:
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

    def per_place(self, predicted: float) -> float:
        """Seconds per place. predicted: what is assumed before places were seen."""
        seconds = self._long.seconds + _PRIOR_PLACES * predicted
        return self._slowed() * seconds / (self._long.places + _PRIOR_PLACES)

    def per_token(self, predicted: float, tokens: float) -> float:
        """Seconds per token. predicted: seconds per place of so many tokens."""
        seconds = self._long.seconds + _PRIOR_PLACES * predicted
        return self._slowed() * seconds / (self._long.tokens + _PRIOR_PLACES * max(1.0, tokens))

    def _slowed(self) -> float:
        return self._short.times_slower_than(self._long)


class ReturnTimes:
    """Spreads refused requests over the time to come: each is told to return when those that were
    told before it should have been served. No place is kept for any of them.
    """

    def __init__(self, seed: int = 0):
        self._random = random.Random(seed)
        # Clock seconds until which the engine is busy with requests that were told to return.
        self._busy_until = -math.inf

    def clear(self) -> None:
        """A request found free seats: those told to return have been served, or do not come."""
        self._busy_until = -math.inf

    def next(self, now: float, free_in: float, work_s: float) -> float:
        """Seconds after which the next refused request should return.

        free_in: seconds until there is room if no request arrives. work_s: seconds in which as
        much work is released as the request has.
        """
        wait = max(self._busy_until - now, free_in, 0.0)
        if wait > LONGEST_RETRY:
            return LONGEST_RETRY * self._random.uniform(0.5, 1.0)
        self._busy_until = now + wait + work_s
        jitter = self._random.uniform(0.0, min(_JITTER_S, _JITTER_SHARE * wait))
        return max(SHORTEST_RETRY, wait + jitter)
