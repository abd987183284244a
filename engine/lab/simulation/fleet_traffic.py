"""Traffic for a fleet: by hourly rates, or recorded."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec
import numpy as np

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.trace import Arrival
from jitney.engine.lab.simulation.workload import Lengths, Poisson, synthesise


@dataclass(frozen=True, slots=True)
class LengthMeans:
    """Mean tokens of a prompt and of an output, and the longest of both together."""

    prompt: float
    output: float
    longest: int

    @classmethod
    def of(cls, arrivals: Sequence[Arrival]) -> LengthMeans:
        """Lengths of at least one request."""
        return cls(
            fmean(arrival.n_prompt for arrival in arrivals),
            fmean(arrival.n_output for arrival in arrivals),
            max(arrival.n_prompt + max(1, arrival.n_output) for arrival in arrivals),
        )


@dataclass(frozen=True, slots=True)
class Day:
    """Poisson arrivals at the rate of each hour."""

    #: Requests a second of each hour.
    rates: tuple[float, ...]
    prompt: Lengths
    output: Lengths
    #: Seconds for which each rate holds.
    hour_s: float = 3600.0

    def __post_init__(self) -> None:
        if not all(0 <= rate < math.inf for rate in self.rates):
            raise ConfigError("requests a second must be 0 or more")
        if not self.rates or max(self.rates) <= 0:
            raise ConfigError("a day needs an hour with more than 0 requests a second")

    def sample(self, rate: float, count: int, seed: int) -> list[Arrival]:
        """`count` requests at a steady rate, the same for the same seed."""
        return synthesise(count, self.prompt, self.output, Poisson(rate), seed)

    def busiest(self, share: float, most: int, seed: int) -> list[Arrival]:
        """At most `most` requests of the busiest hour, at a share of its rate."""
        rate = share * max(self.rates)
        return self.sample(rate, max(1, min(most, round(rate * self.hour_s))), seed)

    def whole(self, seed: int) -> list[Arrival]:
        """Every request of all hours."""
        arrivals: list[Arrival] = []
        for hour, rate in enumerate(self.rates):
            begin, count = hour * self.hour_s, round(1.2 * rate * self.hour_s) + 20
            drawn = self.sample(rate, count, seed + hour) if rate else []
            for arrival in itertools.takewhile(lambda each: each.at < self.hour_s, drawn):
                arrivals.append(msgspec.structs.replace(arrival, at=begin + arrival.at))
        return arrivals


@dataclass(frozen=True, slots=True)
class Recorded:
    """Recorded traffic. Rates are per minute instead of per hour, so that bursts are visible."""

    #: Arrivals by time.
    arrivals: Sequence[Arrival]
    hour_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.arrivals:
            raise ConfigError("there is no request to simulate")

    @property
    def rates(self) -> tuple[float, ...]:
        """Requests a second of each minute."""
        seconds = self.arrivals[-1].at - self.arrivals[0].at
        counted_s = max(1.0, min(self.hour_s, seconds))
        counts = self._counts()
        return tuple(counts[minute] / counted_s for minute in range(max(counts) + 1))

    def _counts(self) -> Counter[int]:
        first = self.arrivals[0].at
        return Counter(int((each.at - first) // self.hour_s) for each in self.arrivals)

    def sample(self, rate: float, count: int, seed: int) -> list[Arrival]:
        """Recorded requests, drawn with replacement, at a steady rate and without conversations."""
        times, which = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(2))
        rows = which.integers(0, len(self.arrivals), count).tolist()
        at = Poisson(rate).times(times, count).tolist()
        return [
            msgspec.structs.replace(self.arrivals[row], at=when, conversation=0, n_shared=0)
            for row, when in zip(rows, at, strict=True)
        ]

    def busiest(self, share: float, most: int, seed: int) -> list[Arrival]:
        """At most `most` requests around the busiest minute, from a share of the conversations."""
        arrivals = _thinned(self.arrivals, share, seed)
        if len(arrivals) <= most:
            return arrivals
        minute = max(self._counts().items(), key=lambda item: item[1])[0]
        middle = self.arrivals[0].at + (minute + 0.5) * self.hour_s
        before = sum(arrival.at < middle for arrival in arrivals)
        begin = max(0, min(len(arrivals) - most, before - most // 2))
        return arrivals[begin : begin + most]


def _thinned(arrivals: Sequence[Arrival], share: float, seed: int) -> list[Arrival]:
    """A random share of the requests; conversations stay complete."""
    rng = np.random.default_rng(seed)
    is_chosen: dict[int, bool] = {}
    chosen = []
    for number, arrival in enumerate(arrivals):
        talk = arrival.conversation or -1 - number
        if talk not in is_chosen:
            is_chosen[talk] = share >= 1 or rng.random() < share
        if is_chosen[talk]:
            chosen.append(arrival)
    return chosen
