"""Traffic to offer an engine: when requests come, how long they are, and trace files that keep both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from jitney.engine.errors import ConfigError


class Arrival(msgspec.Struct, frozen=True):
    """One request to come: `at` in seconds from the start, lengths in tokens; lower priorities board sooner."""

    at: float
    n_prompt: int
    n_output: int
    tenant: str = ""
    priority: int = 0


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True,
                rename={"at": "t", "n_prompt": "in", "n_output": "out"}):
    """One line of a trace file. What follows `priority` was measured, and stands only in recordings (seconds)."""

    at: float
    n_prompt: int
    n_output: int
    tenant: str = ""
    priority: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    finish: str | None = None

    @property
    def arrival(self) -> Arrival:
        return Arrival(self.at, self.n_prompt, self.n_output, self.tenant, self.priority)


_LINE = msgspec.json.Decoder(TraceLine)


def read_trace_lines(path: str | Path) -> list[TraceLine]:
    """All lines of a trace or a recording, by time. ConfigError names the file, the line and what is wrong with it."""
    try:
        rows = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    lines = [_read_line(row, f"{path}, line {number}") for number, row in enumerate(rows, 1) if row.strip()]
    if not lines:
        raise ConfigError(f"{path}: holds no request")
    return sorted(lines, key=lambda line: line.at)


def _read_line(row: bytes, where: str) -> TraceLine:
    try:
        line = _LINE.decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f'{where}: {error}; a line looks like {{"t": 0.5, "in": 120, "out": 64}}') from None
    if not (line.at >= 0 and math.isfinite(line.at)) or line.n_prompt < 1 or line.n_output < 0:
        raise ConfigError(f"{where}: t must be 0 or more, in at least 1 and out at least 0")
    return line


def read_trace(path: str | Path) -> list[Arrival]:
    """The requests of a trace file, by time. ConfigError as in `read_trace_lines`."""
    return [line.arrival for line in read_trace_lines(path)]


def write_trace(path: str | Path, arrivals: Iterable[Arrival]) -> None:
    """Write a trace file, one JSON object a line. ConfigError if the file cannot be written."""
    lines = (TraceLine(at=a.at, n_prompt=a.n_prompt, n_output=a.n_output, tenant=a.tenant, priority=a.priority)
             for a in arrivals)
    try:
        Path(path).write_bytes(msgspec.json.Encoder().encode_lines(lines))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


class Lengths(Protocol):
    """A distribution of token counts."""

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """`count` lengths [count] i8, each at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length."""

    tokens: int

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return np.full(count, self.tokens, np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length from `low` to `high` alike, both included."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.integers(self.low, self.high, count, endpoint=True)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal with this mean (before the cut) and sigma of the logarithm, rounded and cut to [low, high]."""

    mean: float
    sigma: float
    low: int = 1
    high: int = 2**31 - 1

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        mu = math.log(self.mean) - self.sigma**2 / 2
        return np.clip(np.rint(rng.lognormal(mu, self.sigma, count)), self.low, self.high).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Empirical:
    """Drawn from observed lengths, with replacement."""

    observed: tuple[int, ...]

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.choice(np.asarray(self.observed, np.int64), count)


class Pattern(Protocol):
    """When requests come."""

    def times(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """`count` arrival times [count] f8, seconds from the start, ascending."""
        ...


@dataclass(frozen=True, slots=True)
class Closed:
    """Closed loop: everything is there at 0, and `concurrency` requests are open at a time (0: all of them)."""

    concurrency: int = 0

    def times(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return np.zeros(count)


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals, `rate` a second."""

    rate: float

    def times(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return np.cumsum(rng.exponential(1 / self.rate, count))


@dataclass(frozen=True, slots=True)
class Gamma:
    """`rate` a second with gamma-distributed gaps of this shape: 1 is Poisson, below 1 comes in bursts."""

    rate: float
    shape: float

    def times(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return np.cumsum(rng.gamma(self.shape, 1 / (self.rate * self.shape), count))


@dataclass(frozen=True, slots=True)
class Recorded:
    """The first `count` of given times (seconds, ascending)."""

    at: tuple[float, ...]

    def times(self, rng: np.random.Generator, count: int) -> np.ndarray:
        if count > len(self.at):
            raise ConfigError(f"the trace holds {len(self.at)} requests, fewer than the {count} wanted")
        return np.asarray(self.at[:count], np.float64)


def synthesise(count: int, lengths_in: Lengths, lengths_out: Lengths, pattern: Pattern, seed: int) -> list[Arrival]:
    """`count` requests, the same for the same seed; lengths do not depend on the pattern."""
    rng_in, rng_out, rng_at = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3))
    columns = zip(pattern.times(rng_at, count).tolist(), lengths_in.draw(rng_in, count).tolist(),
                  lengths_out.draw(rng_out, count).tolist(), strict=True)
    return [Arrival(at, n_prompt, n_output) for at, n_prompt, n_output in columns]


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests with their times stretched or squeezed evenly to a mean of `rate` a second."""
    last = max((a.at for a in arrivals), default=0.0)
    if last <= 0:
        raise ConfigError("a trace whose requests all come at 0 has no rate to change")
    scale = len(arrivals) / rate / last
    return [msgspec.structs.replace(a, at=a.at * scale) for a in arrivals]


def parse_lengths(text: str, flag: str) -> Lengths:
    """The distribution that a flag describes: "128", "50..800" (uniform), "lognormal:mean=200,sigma=0.8" with min and
    max if wanted, or "trace:FILE" (that file's prompt lengths if the flag's name speaks of prompts, else its output
    lengths). ConfigError names the flag.
    """
    try:
        if text.startswith("trace:"):
            lines = read_trace(text.removeprefix("trace:"))
            return Empirical(tuple(max(1, a.n_prompt if "prompt" in flag else a.n_output) for a in lines))
        if text.startswith("lognormal:"):
            return _lognormal(**_named(text.removeprefix("lognormal:")))
        low, dots, high = text.partition("..")
        return _checked(Uniform(int(low), int(high)) if dots else Fixed(int(low)))
    except (ValueError, TypeError):
        raise ConfigError(f"{flag}: {text!r} is no length; write 128, 50..800, lognormal:mean=200,sigma=0.8,min=1,"
                          "max=800 or trace:FILE") from None


def _named(text: str) -> dict[str, float]:
    return {name.strip(): float(value) for name, value in (part.split("=") for part in text.split(","))}


def _lognormal(mean: float, sigma: float, min: float = 1, max: float = 2**31 - 1) -> LogNormal:
    if not (mean > 0 and sigma >= 0 and 1 <= min <= max):
        raise ValueError
    return LogNormal(mean, sigma, int(min), int(max))


def _checked(lengths: Fixed | Uniform) -> Lengths:
    low, high = (lengths.tokens,) * 2 if isinstance(lengths, Fixed) else (lengths.low, lengths.high)
    if not 1 <= low <= high:
        raise ValueError
    return lengths


#: What each arrival pattern is called on the command line, and how it is made of a rate, a shape and a concurrency.
PATTERNS: dict[str, Callable[[float, float, int], Pattern]] = {
    "closed": lambda rate, shape, concurrency: Closed(concurrency),
    "poisson": lambda rate, shape, concurrency: Poisson(rate),
    "gamma": lambda rate, shape, concurrency: Gamma(rate, shape),
}


def make_pattern(name: str, *, rate: float = 0.0, shape: float = 1.0, concurrency: int = 0) -> Pattern:
    """The arrival pattern of that name. ConfigError for an unknown one, or a rate that it needs and lacks."""
    if name not in PATTERNS:
        raise ConfigError(f"unknown arrivals {name!r}; known: {', '.join(PATTERNS)}")
    if name != "closed" and not (rate > 0 and shape > 0):
        raise ConfigError(f"{name} arrivals need a rate (requests a second) and a shape above 0")
    return PATTERNS[name](rate, shape, concurrency)
