"""Synthetic traffic for an engine: arrival times and lengths of requests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.trace import Arrival


class Lengths(Protocol):
    """A distribution of token counts."""

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """`count` lengths [count] i8, each at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    tokens: int

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return np.full(count, self.tokens, np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform lengths from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.integers(self.low, self.high, count, endpoint=True)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal lengths, rounded and clipped to [low, high]. mean: before clipping."""

    mean: float
    sigma: float
    low: int = 1
    high: int = 2**31 - 1

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        mu = math.log(self.mean) - self.sigma**2 / 2
        lengths = np.rint(rng.lognormal(mu, self.sigma, count))
        return np.clip(lengths, self.low, self.high).astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Empirical:
    """Lengths that are drawn from observed ones with replacement."""

    observed: tuple[int, ...]

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.choice(np.asarray(self.observed, np.int64), count)


class _Pattern(Protocol):
    def times(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """`count` arrival times [count] f8, seconds from the start, ascending."""
        ...


@dataclass(frozen=True, slots=True)
class Closed:
    """Closed loop: all requests are due at 0."""

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
    """`rate` arrivals a second with gamma-distributed gaps: shape 1 is Poisson, below 1 bursty."""

    rate: float
    shape: float

    def times(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return np.cumsum(rng.gamma(self.shape, 1 / (self.rate * self.shape), count))


def synthesise(
    count: int, lengths_in: Lengths, lengths_out: Lengths, pattern: _Pattern, seed: int
) -> list[Arrival]:
    """`count` requests, the same for the same seed; lengths do not depend on the pattern."""
    rng_in, rng_out, rng_at = _generators(seed, 3)
    times = pattern.times(rng_at, count).tolist()
    prompts = lengths_in.draw(rng_in, count).tolist()
    outputs = lengths_out.draw(rng_out, count).tolist()
    return list(map(Arrival, times, prompts, outputs))


#: Least turns of each simultaneous conversation, for any number of requests.
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations of several turns, whose prompts contain all earlier messages and answers.

    A turn's prompt is the system prompt (`n_shared` tokens, the same for all), then the earlier
    turns' messages and answers, then its own message. The answers in a prompt are made up: a prefix
    cache can only find the prompt of an earlier turn, not its answer.
    """

    n_shared: int
    #: Number of turns of a conversation.
    turns: Lengths
    #: Most simultaneous conversations; they take turns, so this many requests are between two turns
    #: of one. There are fewer for few requests, so that each has ROUNDS turns.
    live: int

    def requests(
        self, count: int, messages: Lengths, answers: Lengths, pattern: _Pattern, seed: int
    ) -> list[Arrival]:
        """`count` turns. messages, answers: lengths in one turn."""
        in_rng, out_rng, at_rng, turns_rng = _generators(seed, 4)
        times = pattern.times(at_rng, count).tolist()
        n_messages = messages.draw(in_rng, count).tolist()
        n_answers = answers.draw(out_rng, count).tolist()
        n_turns = iter(self.turns.draw(turns_rng, count).tolist())
        talks = [_Talk() for _ in range(min(self.live, max(1, count // _ROUNDS)))]
        numbers = itertools.count(1)
        arrivals = []
        for number, at in enumerate(times):
            talk = talks[number % len(talks)]
            if not talk.turns_left:
                talk.begin(next(numbers), next(n_turns), self.n_shared)
            n_prompt, n_output = talk.take_turn(n_messages[number], n_answers[number])
            arrivals.append(
                Arrival(
                    at, n_prompt, n_output, conversation=talk.conversation, n_shared=self.n_shared
                )
            )
        return arrivals


@dataclass(slots=True)
class _Talk:
    conversation: int = 0
    #: Requests that it has not sent yet.
    turns_left: int = 0
    #: Tokens of earlier text at the start of its next prompt.
    n_said: int = 0

    def begin(self, conversation: int, turns: int, n_shared: int) -> None:
        self.conversation = conversation
        self.turns_left = turns
        self.n_said = n_shared

    def take_turn(self, n_message: int, n_answer: int) -> tuple[int, int]:
        n_prompt = self.n_said + n_message
        self.n_said = n_prompt + n_answer
        self.turns_left -= 1
        return n_prompt, n_answer


def _generators(seed: int, count: int) -> list[np.random.Generator]:
    """Independent generators; the first ones are the same for any count."""
    return list(map(np.random.default_rng, np.random.SeedSequence(seed).spawn(count)))


class _Workload(NamedTuple):
    """Traffic with a name. prompt, output: distributions in the form of `parse_lengths`; with
    conversations, they are the lengths of one turn's message and answer."""

    prompt: str
    output: str
    about: str
    conversations: Conversations | None = None

    def arrivals(
        self,
        count: int,
        pattern: _Pattern,
        seed: int,
        *,
        prompt: Lengths | None = None,
        output: Lengths | None = None,
    ) -> list[Arrival]:
        """`count` requests. prompt, output: lengths that replace its own."""
        n_in = prompt or parse_lengths(self.prompt, "--prompt")
        n_out = output or parse_lengths(self.output, "--output")
        if self.conversations is None:
            return synthesise(count, n_in, n_out, pattern, seed)
        return self.conversations.requests(count, n_in, n_out, pattern, seed)


#: The traffic that the commands offer by name (`--preset`).
WORKLOADS = {
    "short": _Workload("16..48", "8..64", "short questions and answers, every length alike"),
    "mixed": _Workload(
        "lognormal:mean=96,sigma=0.8,min=8,max=512",
        "lognormal:mean=200,sigma=1.0,min=8,max=800",
        "many short and a few long outputs, log-normal with a median of about 120 tokens",
    ),
    "long-form": _Workload(
        "lognormal:mean=64,sigma=0.6,min=8,max=256",
        "lognormal:mean=500,sigma=0.5,min=64,max=1600",
        "short prompts and long outputs, log-normal with a median of about 440 tokens",
    ),
    "chat": _Workload(
        "lognormal:mean=40,sigma=0.6,min=8,max=160",
        "lognormal:mean=90,sigma=0.6,min=16,max=300",
        "conversations of 2 to 6 turns that share a system prompt of 128 tokens; every prompt "
        "begins with all that was "
        "said before",
        Conversations(n_shared=128, turns=Uniform(2, 6), live=64),
    ),
    "uniform": _Workload("16..80", "50..800", "outputs of 50 to 800 tokens, every length alike"),
    "floor50": _Workload(
        "lognormal:mean=48,sigma=0.5,min=8,max=128",
        "lognormal:mean=120,sigma=1.5,min=50,max=800",
        "log-normal outputs raised to 50 tokens: 57 of 100 are exactly 50, the rest reaches up to "
        "800",
    ),
}


class LengthSummary(msgspec.Struct, frozen=True):
    """Summary of lengths, in tokens. Percentiles interpolate linearly."""

    shortest: int
    #: Share of lengths equal to the shortest: for a clipped distribution, those at the bound.
    at_shortest: float
    median: float
    mean: float
    p95: float
    longest: int
    #: Share of lengths equal to the longest.
    at_longest: float

    @classmethod
    def of(cls, lengths: Iterable[int]) -> LengthSummary:
        values = np.fromiter(lengths, np.int64)
        shortest, longest = int(values.min()), int(values.max())
        return cls(
            shortest=shortest,
            at_shortest=_share(values == shortest),
            median=float(np.median(values)),
            mean=float(values.mean()),
            p95=float(np.percentile(values, 95)),
            longest=longest,
            at_longest=_share(values == longest),
        )

    def __str__(self) -> str:
        if self.shortest == self.longest:
            return f"all {self.shortest}"
        return (
            f"{self.shortest} ({self.at_shortest:.0%} exactly) to {self.longest} "
            f"({self.at_longest:.0%}), "
            f"median {self.median:.0f}, mean {self.mean:.0f}, p95 {self.p95:.0f}"
        )


def _share(which: np.ndarray) -> float:
    return float(which.mean())


def parse_lengths(text: str, flag: str) -> Lengths:
    """The distribution in a flag's value: "128", "50..800" (uniform),
    "lognormal:mean=200,sigma=0.8" with optional min and max, or "trace:FILE" (that file's prompt
    lengths if the flag's name contains "prompt", else its output lengths). Raises ConfigError that
    names the flag.
    """
    if text.startswith("trace:"):
        field = "n_prompt" if "prompt" in flag else "n_output"
        return _lengths_in(text.removeprefix("trace:"), field)
    try:
        if text.startswith("lognormal:"):
            return _lognormal(**_named(text.removeprefix("lognormal:")))
        return _plain_lengths(text)
    except (ValueError, TypeError):
        raise ConfigError(
            f"{flag}: {text!r} is no length; write 128, 50..800, "
            "lognormal:mean=200,sigma=0.8,min=1,"
            "max=800 or trace:FILE"
        ) from None


def _lengths_in(file: str, field: str) -> _Empirical:
    observed = [getattr(arrival, field) for arrival in Arrival.read_all(file)]
    return _Empirical(tuple(np.maximum(1, observed).tolist()))


def _named(text: str) -> dict[str, float]:
    """ "a=1,b=2" as numbers by name."""
    named = {}
    for part in text.split(","):
        name, value = part.split("=")
        named[name.strip()] = float(value)
    return named


def _lognormal(mean: float, sigma: float, min: float = 1, max: float = 2**31 - 1) -> LogNormal:
    if not (mean > 0 and sigma >= 0 and 1 <= min <= max):
        raise ValueError
    return LogNormal(mean, sigma, int(min), int(max))


def _plain_lengths(text: str) -> Lengths:
    """The lengths of "128" and "50..800"; ValueError for anything else."""
    first, dots, last = text.partition("..")
    low = high = int(first)
    if dots:
        high = int(last)
    if not 1 <= low <= high:
        raise ValueError
    if dots:
        return Uniform(low, high)
    return Fixed(low)
