"""The page at a fleet's endpoint, with its engines and its candidates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from starlette.routing import BaseRoute

from jitney.dashboard import Endpoint, FleetPage, FleetView, ReplicaAddress
from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.fleet.fleet import Fleet
from jitney.engine.fleet.rollout.comparison import ARMS
from jitney.engine.fleet.rollout.rollout import Action
from jitney.engine.server import ApiKeys, ServerSettings


def fleet_page_routes(
    fleet: Fleet,
    settings: ServerSettings,
    path: str,
    price_per_hour: float = 0.0,
    keys: ApiKeys | None = None,
) -> list[BaseRoute]:
    """Routes of the page of all engines at `path`. price_per_hour: of one engine; 0: not shown.
    keys: the accepted keys; None: those of the settings.
    """
    shown = FleetView(
        find=lambda: dict(_places(fleet)),
        endpoint=lambda: _endpoint(fleet),
        price_per_hour=price_per_hour or None,
    )
    candidates = _Candidates(fleet) if fleet.rolled_out else None
    page = FleetPage(shown, settings, candidates, keys, lambda: fleet.internal_requests)
    return page.mounted(path)


def _places(fleet: Fleet) -> Iterator[tuple[str, ReplicaAddress]]:
    """Addresses of engines by the names that the page shows."""
    for replicas in fleet.replicas.values():
        for replica in replicas:
            if replica.url:
                name = ReplicaAddress.name_of(replica.name)
                yield name, ReplicaAddress(replica.url, replica.key)


def _endpoint(fleet: Fleet) -> Endpoint:
    """The endpoint's own state, as /readyz and /fleet/replicas report it."""
    reason = fleet.unready()
    starting = (
        ReplicaAddress.name_of(replica.name)
        for replicas in fleet.replicas.values()
        for replica in replicas
        if replica.state == "starting"
    )
    return Endpoint(
        unready="" if reason is None else str(reason),
        unready_models=tuple(fleet.unready_models),
        refused=fleet.refusals.lately(),
        refused_ever=fleet.refusals.total,
        choices=fleet.metrics.chosen(),
        starting=frozenset(starting),
    )


class _Candidates:
    """Implements `fleet_page._Rollouts`."""

    def __init__(self, fleet: Fleet):
        self.fleet = fleet

    def reports(self) -> list[JsonDict]:
        return [_with_names_of_the_page(model.report()) for model in self.fleet.rolled_out]

    async def decide(self, model: str, action: str) -> None:
        model_with_candidate = self.fleet.with_candidate(model)
        actions: tuple[Action, ...] = get_args(Action.__value__)
        for allowed in actions:
            if allowed == action:
                await model_with_candidate.decide(allowed)
                return
        raise RequestError(f"must be one of {', '.join(actions)}", param="action")


def _with_names_of_the_page(report: JsonDict) -> JsonDict:
    for name in ARMS:
        arm = report["arms"][name]
        arm["replicas"] = [ReplicaAddress.name_of(replica) for replica in arm["replicas"]]
    return report
