"""Event simulation of a rollout's engines: the requests of an engine share its speed, which falls
with their number. A `Rollout` gets their outcomes as from an ingress.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from jitney.engine.fleet.replicas import EngineShare, Replica
from jitney.engine.fleet.rollout.comparison import (
    ARMS,
    FIGURES,
    ArmName,
    Comparison,
    RequestOutcome,
)
from jitney.engine.fleet.rollout.rollout import KeyPlace, Rollout

#: Seconds of a step, and additional seconds for each request in it.
_STEP_S, _ROW_S = 0.02, 0.004
#: Mean steps of a prompt and mean tokens of an answer; spread of the requests' speeds (standard
#: deviation of the logarithm).
_PROMPT_STEPS, _TOKENS, _SPREAD = 2.0, 60.0, 0.2
_KEYS = 640


@dataclass(eq=False)
class _Request:
    """A request at an engine. Its times are values of `_Engine.steps`."""

    place: KeyPlace
    tokens: int
    arrived: float
    #: `_Engine.steps` at the start and at the end of its answer.
    first_at: float
    end_at: float
    share: EngineShare
    first_s: float = 0.0
    first_load: float = 1.0


@dataclass
class _Engine:
    """An engine. slower: factor by which its steps take longer than usual."""

    slower: float
    replica: Replica = field(default_factory=lambda: Replica("engine"))
    now: float = 0.0
    #: Steps done since the start.
    steps: float = 0.0
    #: Heap of (value of `steps` at the request's next event, number, request).
    events: list[tuple[float, int, _Request]] = field(default_factory=list)
    n: int = 0

    def __post_init__(self) -> None:
        self.replica.clock = lambda: self.now

    @property
    def step_s(self) -> float:
        return self.slower * (_STEP_S + _ROW_S * self.replica.open)

    def until(self, time: float) -> Iterator[tuple[KeyPlace, RequestOutcome]]:
        """Advance to `time`; yields the requests that end before, with their outcomes."""
        while self.events:
            at, _, request = self.events[0]
            arrives = self.now + (at - self.steps) * self.step_s
            if arrives > time:
                break
            heappop(self.events)
            self.now, self.steps = arrives, at
            took = arrives - request.arrived
            if at < request.end_at:
                request.first_s, request.first_load = took, request.share.load
                self._wait(request.end_at, request)
                continue
            load = request.share.load
            cost = request.share.seconds
            self.replica.end()
            yield (
                request.place,
                RequestOutcome(
                    True, request.tokens, took, request.first_s, cost, load, request.first_load
                ),
            )
        self.steps += (time - self.now) / self.step_s
        self.now = time

    def add(self, place: KeyPlace, prompt: float, tokens: int, pace: float) -> None:
        """Add a request now. pace: factor of the usual number of steps."""
        share = self.replica.begin()
        first_at = self.steps + pace * prompt
        request = _Request(place, tokens, self.now, first_at, first_at + pace * tokens, share)
        self._wait(first_at, request)

    def _wait(self, at: float, request: _Request) -> None:
        self.n += 1
        heappush(self.events, (at, self.n, request))


def requests_of(
    seed: int, requests: int, per_s: float, share: float, slower: Mapping[ArmName, float]
) -> Iterator[tuple[KeyPlace, RequestOutcome]]:
    """The outcomes of `requests` requests, with one engine per arm. per_s: requests a second over
    both arms; share: of the keys, for the candidate.
    """
    draw = np.random.default_rng(seed)
    engines = {arm: _Engine(slower[arm]) for arm in ARMS}
    keys = draw.integers(_KEYS, size=requests)
    gaps = draw.exponential(1 / per_s, size=requests)
    prompts = draw.lognormal(math.log(_PROMPT_STEPS), 0.7, size=requests)
    tokens = draw.geometric(1 / _TOKENS, size=requests)
    paces = draw.lognormal(0.0, _SPREAD, size=requests)
    now = 0.0
    for key, gap, prompt, n, pace in zip(
        keys.tolist(), gaps.tolist(), prompts.tolist(), tokens.tolist(), paces.tolist(), strict=True
    ):
        now += gap
        arm: ArmName = "candidate" if key < share * _KEYS else "stable"
        for engine in engines.values():
            yield from engine.until(now)
        engines[arm].add(KeyPlace(arm, key % Comparison.clusters), prompt, n, pace)
    for engine in engines.values():
        yield from engine.until(math.inf)


def run_rollout(rollout: Rollout, outcomes: Iterator[tuple[KeyPlace, RequestOutcome]]) -> set[str]:
    """Give the outcomes to the rollout until it is decided, with a review after each hundred.
    Returns all verdicts.
    """
    verdicts: set[str] = set()
    for number, (place, outcome) in enumerate(outcomes, 1):
        rollout.observe(place, outcome)
        if number % 100 == 0:
            rollout.look()
            intervals = rollout.intervals().items()
            verdicts |= {interval.verdict(FIGURES[name]) for name, interval in intervals}
        if rollout.state != "running":
            break
    return verdicts
