"""The page's interface of the policy lab, which simulates recorded traffic."""

from __future__ import annotations

from typing import Protocol

import msgspec

from jitney.engine.common.requests import JsonDict
from jitney.engine.core import POLICIES


class Experiment(msgspec.Struct, forbid_unknown_fields=True):
    """Recorded traffic to simulate again."""

    #: Minutes of recent traffic to simulate.
    minutes: float = 5.0
    #: Names of the policies; each is simulated with the same traffic.
    policies: list[str] = msgspec.field(default_factory=lambda: list(POLICIES))
    #: Settings of [engine] that differ from the engine's own.
    settings: JsonDict = {}
    #: 2.0 means that requests arrive twice as fast.
    speed: float = 1.0
    #: Price of the device in any currency; None leaves costs out of the figures.
    price_per_hour: float | None = None


class PolicyLab(Protocol):
    """Runs one experiment at a time."""

    def status(self) -> JsonDict:
        """State and result of the newest experiment, and what the next one can use."""
        ...

    async def start(self, experiment: Experiment) -> None:
        """Begin an experiment. Raises HttpError 409 while one runs, RequestError for bad fields."""
        ...

    async def stop(self) -> None:
        """End the running experiment, if there is one."""
        ...

    async def buckets(self) -> JsonDict:
        """The compiled sizes under which the newest steps would have taken the least time, with as
        many programs, and what they would save. Raises RequestError where nothing is recorded.
        """
        ...
