"""Routes for orchestrators and Prometheus. The same for an engine and for a fleet."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from jitney.engine.server.http.answers import Status
from jitney.engine.server.http.jsonio import json_answer
from jitney.engine.server.http.routing import HttpRoute, Role
from jitney.engine.server.http.server_context import ServerContext


async def _livez(server: object, request: Request) -> Response:
    """Succeeds as long as the process answers, whatever the state of its engines."""
    return json_answer(Status("ok"))


async def _readyz(server: ServerContext, request: Request) -> Response:
    reason = server.unready() or server.stalled()
    if reason is not None:
        raise reason
    return json_answer(Status("ready"))


async def _startupz(server: ServerContext, request: Request) -> Response:
    reason = server.unstarted()
    if reason is not None:
        raise reason
    return json_answer(Status("started"))


async def _show_metrics(server: ServerContext, request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    return Response(server.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})


PROBE_ROUTES = (
    HttpRoute.probe("/livez", _livez, "this process answers", Status),
    HttpRoute.probe("/readyz", _readyz, "new requests would be served", Status),
    HttpRoute.probe("/health", _readyz, "the same as /readyz", Status),
    HttpRoute.probe("/ping", _readyz, "the same, as SageMaker asks for it", Status),
    HttpRoute.probe("/startupz", _startupz, "all models have been ready once", Status),
    HttpRoute(
        "GET /metrics",
        _show_metrics,
        "Prometheus metrics",
        role=Role.ADMIN,
        is_probe=True,
    ),
)
