"""Traffic for a fleet: requests as columns, because there are millions of them, and shapes of a
day."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.trace import Arrival
from jitney.engine.lab.simulation.fleet_replica import FleetRequest
from jitney.engine.lab.simulation.workload import Lengths


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests by the time at which they come; all columns are [requests]."""

    #: f8, seconds, ascending.
    at: np.ndarray
    #: i8, tokens.
    prompt: np.ndarray
    output: np.ndarray
    #: i8, as in `workload.Arrival`.
    conversation: np.ndarray
    shared: np.ndarray

    def __post_init__(self) -> None:
        if not len(self.at):
            raise ConfigError("there is no request to simulate")

    def __len__(self) -> int:
        return len(self.at)

    @classmethod
    def of(cls, arrivals: Sequence[Arrival]) -> Traffic:
        """Of single requests, in order of their times."""
        ordered = sorted(arrivals, key=lambda arrival: arrival.at)
        return cls(
            np.array([arrival.at for arrival in ordered]),
            np.array([arrival.n_prompt for arrival in ordered], np.int64),
            np.array([max(1, arrival.n_output) for arrival in ordered], np.int64),
            np.array([arrival.conversation for arrival in ordered], np.int64),
            np.array([arrival.n_shared for arrival in ordered], np.int64),
        )

    @property
    def seconds(self) -> float:
        """From the first to the last that comes."""
        return float(self.at[-1] - self.at[0])

    @property
    def mean_prompt(self) -> float:
        return float(self.prompt.mean())

    @property
    def mean_output(self) -> float:
        return float(self.output.mean())

    @property
    def mean_context(self) -> float:
        """KV positions that a decoding sequence has on average: long answers count as long as they
        run."""
        contexts = self.prompt + self.output / 2
        return float(np.average(contexts, weights=self.output))

    @property
    def longest(self) -> int:
        """KV positions of the longest request at its end."""
        return int((self.prompt + self.output).max())

    def requests(self) -> list[FleetRequest]:
        """All of them, new."""
        columns = (self.at, self.prompt, self.output, self.conversation, self.shared)
        numbers = range(len(self))
        return list(map(FleetRequest, numbers, *(column.tolist() for column in columns)))

    def rows(self, which: np.ndarray | slice) -> Traffic:
        """Those of so many numbers, of [requests] bool, or of a slice."""
        return Traffic(
            self.at[which],
            self.prompt[which],
            self.output[which],
            self.conversation[which],
            self.shared[which],
        )

    def between(self, start: float, end: float) -> Traffic:
        """Those that come in [start, end)."""
        first, last = np.searchsorted(self.at, (start, end))
        return self.rows(slice(int(first), int(last)))

    def thinned(self, share: float, seed: int) -> Traffic:
        """A share of them, drawn at random; conversations stay whole."""
        if share >= 1:
            return self
        single = np.where(self.conversation, self.conversation, -1 - np.arange(len(self)))
        kinds, which = np.unique(single, return_inverse=True)
        kept = np.random.default_rng(seed).random(len(kinds)) < share
        return self.rows(kept[which])


class Load(Protocol):
    """What comes, hour by hour, and how long requests are."""

    @property
    def rates(self) -> tuple[float, ...]:
        """Requests a second, by hour."""
        ...

    @property
    def hour_s(self) -> float:
        """Seconds for which each of the rates holds."""
        ...

    def sample(self, rate: float, count: int, seed: int) -> Traffic:
        """`count` requests that come at a steady rate by chance (Poisson), the same for the same
        seed.
        """
        ...

    def busiest(self, share: float, most: int, seed: int) -> Traffic:
        """At most so many requests of the time in which most come, or a share of them as one part
        of a fleet gets it.
        """
        ...


def _drawn_times(rate: float, count: int, seed: np.random.SeedSequence) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


@dataclass(frozen=True, slots=True)
class Day:
    """Traffic as a shape."""

    #: As in `Load`.
    rates: tuple[float, ...]
    prompt: Lengths
    output: Lengths
    hour_s: float = 3600.0

    def __post_init__(self) -> None:
        if not all(0 <= rate < math.inf for rate in self.rates):
            raise ConfigError("requests a second must be 0 or more")
        if not self.rates or max(self.rates) <= 0:
            raise ConfigError("a shape needs an hour with more than 0 requests a second")

    def sample(self, rate: float, count: int, seed: int) -> Traffic:
        times, n_in, n_out = np.random.SeedSequence(seed).spawn(3)
        return self._filled(_drawn_times(rate, count, times), n_in, n_out)

    def busiest(self, share: float, most: int, seed: int) -> Traffic:
        rate = share * max(self.rates)
        return self.sample(rate, max(1, min(most, round(rate * self.hour_s))), seed)

    def whole(self, seed: int) -> Traffic:
        """Every request of all hours."""
        times, n_in, n_out = np.random.SeedSequence(seed).spawn(3)
        rng = np.random.default_rng(times)
        hours = []
        for hour, rate in enumerate(self.rates):
            count = rng.poisson(rate * self.hour_s)
            begin = hour * self.hour_s
            hours.append(np.sort(rng.uniform(begin, begin + self.hour_s, count)))
        return self._filled(np.concatenate(hours), n_in, n_out)

    def _filled(
        self, at: np.ndarray, n_in: np.random.SeedSequence, n_out: np.random.SeedSequence
    ) -> Traffic:
        """Times with lengths."""
        prompt = self.prompt.draw(np.random.default_rng(n_in), len(at))
        output = self.output.draw(np.random.default_rng(n_out), len(at))
        nobody = np.zeros(len(at), np.int64)
        return Traffic(at, prompt, output, nobody, nobody)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Traffic that was recorded. An hour is a minute of it, so that bursts are seen."""

    traffic: Traffic
    hour_s: float = 60.0

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple((self._counts() / self._span_s).tolist())

    @property
    def _span_s(self) -> float:
        """Seconds that a rate is counted over: less than a minute where the record is shorter."""
        return max(1.0, min(self.hour_s, self.traffic.seconds))

    def _counts(self) -> np.ndarray:
        """Requests of each minute."""
        since = self.traffic.at - self.traffic.at[0]
        return np.bincount((since // self.hour_s).astype(np.int64))

    def sample(self, rate: float, count: int, seed: int) -> Traffic:
        times, which = np.random.SeedSequence(seed).spawn(2)
        rows = np.random.default_rng(which).integers(0, len(self.traffic), count)
        drawn = self.traffic.rows(rows)
        nobody = np.zeros(count, np.int64)
        at = _drawn_times(rate, count, times)
        return Traffic(at, drawn.prompt, drawn.output, nobody, nobody)

    def busiest(self, share: float, most: int, seed: int) -> Traffic:
        """The minute in which most came with what came around it, as it was recorded."""
        traffic = self.traffic.thinned(share, seed)
        if len(traffic) <= most:
            return traffic
        minute = int(self._counts().argmax())
        middle = self.traffic.at[0] + (minute + 0.5) * self.hour_s
        begin = int(np.searchsorted(traffic.at, middle)) - most // 2
        begin = max(0, min(len(traffic) - most, begin))
        return traffic.rows(slice(begin, begin + most))
