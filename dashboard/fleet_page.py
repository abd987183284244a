"""The page of a fleet: all replicas at "/", each one's own page at "/r/NAME/"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from jitney.dashboard.feed_endpoint import FeedEndpoint
from jitney.dashboard.fleet import FleetView
from jitney.dashboard.fleet_answers import search_requests, tenants_of_all
from jitney.dashboard.fleet_member import Member
from jitney.dashboard.proxy import not_found, proxy_route
from jitney.dashboard.routes import PageRoutes, read_body, read_json
from jitney.dashboard.work import WorkList
from jitney.engine.common.requests import JsonDict
from jitney.engine.server import (
    ApiKeys,
    Identity,
    InternalRequests,
    PageLine,
    Role,
    ServerSettings,
    json_answer,
)

_DECISION_FORM = 'a decision is JSON: {"action": "promote"}, "roll_back" or "restart"'
#: A replica's own page.
_REPLICA = "/r/{name}"


class _Rollouts(Protocol):
    """The rollouts: candidates that run beside their models."""

    def reports(self) -> list[JsonDict]:
        """All rollouts with the data of the page: docs/rollout.md."""
        ...

    async def decide(self, model: str, action: str) -> None:
        """Promote a model's candidate, roll it back, or begin anew. Raises HttpError for one that
        is none, RequestError for another action.
        """
        ...


class _Decision(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a decision."""

    action: str


class FleetPage(PageRoutes):
    """The page of all replicas. settings.api_keys: what visitors of this page must know.

    Replicas are asked with the fleet's key, which may be an administrator's, and not in a client's
    name. So their own pages are for administrators only.
    """

    index = "fleet.html"

    def __init__(
        self,
        fleet: FleetView,
        settings: ServerSettings,
        rollouts: _Rollouts | None = None,
        keys: ApiKeys | None = None,
        tasks: Callable[[], InternalRequests | None] | None = None,
    ):
        """tasks: batches, jobs and files of the endpoint beside the page; None: there is none."""
        super().__init__(settings, keys)
        self.fleet = fleet
        self.rollouts = rollouts
        self.work = None if tasks is None else WorkList(tasks)
        fleet.keeps_work = tasks is not None
        fleet.signed_in = self.sessions.needed
        fleet.compares = rollouts is not None

    def lines(self) -> list[PageLine]:
        """The routes; those of replicas come last, since they match any path."""
        fleet_feed = Route("/feed", FeedEndpoint(self.fleet), methods=["GET"])
        lines = [*self.page_lines(), PageLine(fleet_feed), *self._view_lines()]
        if self.rollouts is not None:
            lines += self._rollout_lines(self.rollouts)
        return [*lines, *self._replica_lines()]

    def _rollout_lines(self, rollouts: _Rollouts) -> list[PageLine]:
        """Routes of rollouts, for administrators only, as in the endpoint."""

        async def show(request: Request) -> Response:
            return json_answer({"rollouts": rollouts.reports()})

        async def decide(request: Request) -> Response:
            body = await read_body(request)
            decision = read_json(body, _Decision, _DECISION_FORM, "action")
            await rollouts.decide(request.path_params["model"], decision.action)
            return json_answer({"rollouts": rollouts.reports()})

        return [
            PageLine(Route("/rollouts", show), Role.ADMIN),
            PageLine(Route("/rollouts/{model:path}", decide, methods=["POST"]), Role.ADMIN),
        ]

    def _view_lines(self) -> list[PageLine]:
        """Routes of views over all replicas. Rows of requests do not name their tenant, so they are
        for administrators.
        """
        lines = [
            PageLine(Route("/requests", self.requests), Role.ADMIN),
            PageLine(Route("/tenants", self.tenants)),
        ]
        if self.work is not None:
            lines.append(PageLine(Route("/work", self.list_work)))
            lines.append(PageLine(Route("/work/{id}", self.cancel_work, methods=["DELETE"])))
        return lines

    async def requests(self, request: Request) -> Response:
        """Requests of all replicas, see `search_requests`."""
        self.fleet.look_for_replicas()
        query, members = request.query_params, self.fleet.members.values()
        return json_answer(
            await search_requests(members, query.get("state", "all"), query.get("search", ""))
        )

    async def tenants(self, request: Request) -> Response:
        """Tenants of all replicas, see `tenants_of_all`."""
        self.fleet.look_for_replicas()
        identity = Identity.of(request.scope)
        return json_answer(await tenants_of_all(self.fleet.members.values(), identity))

    async def list_work(self, request: Request) -> Response:
        """Batches, jobs and files of the endpoint; to a user its own."""
        assert self.work is not None  # the route exists only with it
        listing = await self.work.listing(Identity.of(request.scope))
        return json_answer(listing | {"adapters": []})

    async def cancel_work(self, request: Request) -> Response:
        """Cancel a batch or job (DELETE), and list all work."""
        assert self.work is not None
        await self.work.cancel(request.path_params["id"], Identity.of(request.scope))
        return await self.list_work(request)

    def _replica_lines(self) -> list[PageLine]:
        """The page and its files hold no data, as `PageRoutes.page_lines` has it."""
        feed = Route(f"{_REPLICA}/feed", _ReplicaFeed(self.fleet), methods=["GET"])
        passed = proxy_route(
            f"{_REPLICA}/", lambda request: _member(self.fleet, request.scope).engine
        )
        return [
            PageLine(Route(_REPLICA, self.add_slash), Role.ANYBODY),
            PageLine(Route(f"{_REPLICA}/", self.replica_page), Role.ANYBODY),
            PageLine(Mount(f"{_REPLICA}/assets", self.files), Role.ANYBODY),
            PageLine(Route(f"{_REPLICA}/sign-in", self.sign_in, methods=["POST"]), Role.ANYBODY),
            PageLine(Route(f"{_REPLICA}/sign-out", self.sign_out, methods=["POST"]), Role.ANYBODY),
            PageLine(Route(f"{_REPLICA}/engines", self.list_replicas), Role.ADMIN),
            PageLine(feed, Role.ADMIN),
            PageLine(passed, Role.ADMIN),
        ]

    async def close(self) -> None:
        await self.fleet.close()

    async def add_slash(self, request: Request) -> Response:
        name = _member(self.fleet, request.scope).name
        return RedirectResponse(f"./{name}/")

    async def replica_page(self, request: Request) -> Response:
        """The page of one replica; users who may not see it are redirected to the fleet's page."""
        _member(self.fleet, request.scope)
        role = self.sessions.of_request(request.scope).role
        if role is Role.USER:
            return RedirectResponse("../../")
        return await self.page_file(request, "index.html")

    async def list_replicas(self, request: Request) -> Response:
        """All of them, for the switch on a replica's page: this one's base is its own path."""
        here = _member(self.fleet, request.scope)
        await self.fleet.glance()
        engines = [
            {
                "name": member.name,
                "url": member.engine.url,
                "state": member.state,
                "base": "" if member is here else f"../{member.name}/",
            }
            for member in self.fleet.members.values()
        ]
        return json_answer(self.engine_list(engines, standalone=True, fleet="../../"))


def _member(fleet: FleetView, scope: Scope) -> Member:
    """The replica of a request's path. Raises HttpError 404."""
    # This may be the first request of the page.
    fleet.look_for_replicas()
    member = fleet.members.get(scope["path_params"]["name"])
    if member is None:
        raise not_found()
    return member


class _ReplicaFeed:
    """The feed of the replica that the path names."""

    def __init__(self, fleet: FleetView):
        self.fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        feed = FeedEndpoint(_member(self.fleet, scope).relay)
        await feed(scope, receive, send)
