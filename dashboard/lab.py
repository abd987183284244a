"""The page's interface of the policy lab, which simulates recorded traffic."""

from __future__ import annotations

from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jitney.dashboard.routes import read_body, read_json
from jitney.engine.common.requests import JsonDict
from jitney.engine.config import settings
from jitney.engine.server import HttpError, json_answer

_EXPERIMENT_FORM = (
    "an experiment is JSON with minutes (a number), policies (a list of names), settings (an "
    "object) and speed (a number)"
)


class Experiment(msgspec.Struct, forbid_unknown_fields=True):
    """Recorded traffic to simulate again."""

    #: Minutes of recent traffic to simulate.
    minutes: float = 5.0
    #: Names of the policies; each is simulated with the same traffic.
    policies: list[str] = msgspec.field(default_factory=lambda: list(settings()["policy"].choices))
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


class LabHandlers:
    """The handlers of the lab's routes. They answer 404 without a lab."""

    def __init__(self, lab: PolicyLab | None):
        self._lab = lab

    @property
    def lab(self) -> PolicyLab:
        """The lab. Raises HttpError 404."""
        if self._lab is None:
            raise HttpError(404, "this page has no policy lab", code="not_found")
        return self._lab

    async def buckets(self, request: Request) -> Response:
        """The compiled sizes with which the recorded steps would have taken the least time."""
        return json_answer(await self.lab.buckets())

    async def experiment(self, request: Request) -> Response:
        """The state (GET), a new `Experiment` (POST), the end of the running one (DELETE)."""
        lab, status = self.lab, 200
        if request.method == "POST":
            body = await read_body(request)
            await lab.start(read_json(body, Experiment, _EXPERIMENT_FORM, "body"))
            status = 202
        elif request.method == "DELETE":
            await lab.stop()
        return json_answer(lab.status(), status=status)
