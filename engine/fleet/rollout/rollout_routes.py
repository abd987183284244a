"""The routes of a fleet that are about candidates."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from jitney.engine.fleet.fleet import Fleet
from jitney.engine.fleet.rollout.candidate import ModelWithCandidate
from jitney.engine.fleet.rollout.comparison import Verdict
from jitney.engine.server import (
    HttpRoute,
    ResponseModel,
    Role,
    checked,
    json_answer,
)


class RolloutBody(BaseModel):
    """A decision on a candidate: promote gives it every request, roll_back none, restart the
    share of the rule again, with nothing known.
    """

    model_config = ConfigDict(extra="forbid")

    action: Literal["promote", "roll_back", "restart"]


class RolloutDecision(ResponseModel):
    """at: seconds since 1970. reason: one line with the intervals."""

    state: str
    by: Literal["rule", "hand"]
    reason: str
    at: float


class RolloutRule(ResponseModel):
    """As in fleet.toml."""

    share: float
    min_requests: int
    may_lose: dict[str, float]
    promote: Literal["rule", "hand"]
    roll_back: Literal["rule", "hand"]
    undecided_after_h: float


class RolloutArm(ResponseModel):
    """An arm: its engines' names and configuration digests, and what was compared."""

    configs: list[str]
    requests: int
    tokens: int
    replicas: list[str]


class RolloutFigure(ResponseModel):
    """One figure of both arms, and how the candidate stands to the stable one.

    kind: estimate, low and high are the ratio of candidate to stable, or the difference. null: not
    known yet. equal, worst_allowed: on the same scale. requests: that have the figure; matched: of
    them, those that are compared, since the other arm has some at equal load.
    """

    name: str
    unit: str
    kind: Literal["ratio", "difference"]
    better: Literal["more", "less"]
    stable: float | None
    candidate: float | None
    requests: dict[str, int]
    matched: dict[str, int]
    estimate: float | None
    low: float | None
    high: float | None
    equal: float
    worst_allowed: float | None
    verdict: Verdict


class RolloutLook(ResponseModel):
    """The comparison at one time: [estimate, low, high] by figure."""

    at: float
    intervals: dict[str, list[float]]


class RolloutReport(ResponseModel):
    """A model's candidate. share: of the keys. confidence: of all intervals together."""

    model: str
    candidate: str
    state: Literal["running", "promoted", "rolled_back"]
    share: float
    since: float
    confidence: float
    decision: RolloutDecision | None
    rule: RolloutRule
    arms: dict[str, RolloutArm]
    figures: list[RolloutFigure]
    looks: list[RolloutLook]


class RolloutList(ResponseModel):
    """GET /fleet/rollouts."""

    rollouts: list[RolloutReport]


async def _list_rollouts(fleet: Fleet, request: Request) -> Response:
    return json_answer({"rollouts": [model.report() for model in fleet.rolled_out]})


async def _show_rollout(fleet: Fleet, request: Request) -> Response:
    return json_answer(_found(fleet, request).report())


async def _decide(fleet: Fleet, request: Request) -> Response:
    model = _found(fleet, request)
    body = checked(RolloutBody, await fleet.json_body(request))
    await model.decide(body.action)
    return json_answer(model.report())


def _found(fleet: Fleet, request: Request) -> ModelWithCandidate:
    return fleet.with_candidate(request.path_params["model"])


ROLLOUT_ROUTES = (
    HttpRoute(
        "GET /fleet/rollouts",
        _list_rollouts,
        "candidates, and how they compare",
        role=Role.ADMIN,
        answer=RolloutList,
    ),
    HttpRoute(
        "GET /fleet/rollouts/{model:path}",
        _show_rollout,
        "a model's candidate, and how it compares",
        role=Role.ADMIN,
        answer=RolloutReport,
    ),
    HttpRoute(
        "POST /fleet/rollouts/{model:path}",
        _decide,
        "promote a model's candidate, roll it back, or begin anew",
        role=Role.ADMIN,
        body=RolloutBody,
        answer=RolloutReport,
    ),
)
