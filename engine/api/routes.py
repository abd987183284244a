"""The table of HTTP routes. A new route is a handler and its line here."""

from __future__ import annotations

import logging

from jitney.engine.api import answers, endpoints, ops
from jitney.engine.api.anthropic_messages.routes import MESSAGE_ROUTES
from jitney.engine.api.batches.routes import BATCH_ROUTES
from jitney.engine.api.embeddings import EMBEDDING_ROUTES
from jitney.engine.api.jobs.routes import JOB_ROUTES
from jitney.engine.api.responses.routes import RESPONSE_ROUTES
from jitney.engine.api.routing import Handler, HttpRoute, Role
from jitney.engine.api.schema import ChatBody, CompletionBody
from jitney.engine.api.text_tools.infill import INFILL_ROUTES
from jitney.engine.api.text_tools.routes import TEXT_ROUTES

_GET = ("GET",)
_POST = ("POST",)


def probe(path: str, handler: Handler, summary: str) -> HttpRoute:
    """An orchestrator's probes carry no key, say nothing about requests, and come every second or
    so, which would bury the rest of the log.
    """
    return HttpRoute(
        path,
        _GET,
        handler,
        summary,
        role=Role.ANYBODY,
        answer=answers.Status,
        log_level=logging.DEBUG,
    )


ROUTES = (
    HttpRoute(
        "/v1/completions",
        _POST,
        endpoints.completions,
        "complete prompts",
        generates=True,
        body=CompletionBody,
        answer=answers.CompletionAnswer,
    ),
    HttpRoute(
        "/v1/chat/completions",
        _POST,
        endpoints.chat_completions,
        "answer a chat",
        generates=True,
        body=ChatBody,
        answer=answers.ChatAnswer,
    ),
    *RESPONSE_ROUTES,
    *MESSAGE_ROUTES,
    *EMBEDDING_ROUTES,
    *INFILL_ROUTES,
    *TEXT_ROUTES,
    *BATCH_ROUTES,
    *JOB_ROUTES,
    HttpRoute(
        "/v1/models",
        _GET,
        ops.list_models,
        "the served model, as a list",
        answer=answers.ModelList,
    ),
    HttpRoute(
        "/v1/models/{model:path}",
        _GET,
        ops.show_model,
        "the served model",
        answer=answers.ModelCard,
    ),
    probe("/livez", ops.livez, "this process answers"),
    probe("/readyz", ops.readyz, "new requests would be served"),
    probe("/health", ops.readyz, "the same as /readyz"),
    probe("/startupz", ops.startupz, "the engine has been ready once"),
    HttpRoute(
        "/version",
        _GET,
        ops.show_version,
        "version, device, kernels and number formats",
        answer=answers.Version,
    ),
    HttpRoute(
        "/config",
        _GET,
        ops.show_config,
        "every setting, and where its value came from",
        role=Role.ADMIN,
        answer=answers.Configuration,
    ),
    HttpRoute(
        "/openapi.json",
        _GET,
        ops.show_openapi,
        "these routes, as an OpenAPI document",
        answer=answers.Document,
    ),
    HttpRoute(
        "/reset_prefix_cache",
        _POST,
        ops.reset_prefix_cache,
        "let no later prompt find what was computed for an earlier one",
        role=Role.ADMIN,
        answer=answers.Status,
    ),
    HttpRoute(
        "/sleep",
        _POST,
        ops.sleep,
        "free the device's memory until /wake_up",
        role=Role.ADMIN,
        query=ops.SleepQuery,
        answer=answers.Asleep,
    ),
    HttpRoute(
        "/wake_up",
        _POST,
        ops.wake_up,
        "take the device's memory again, and serve",
        role=Role.ADMIN,
        answer=answers.Status,
    ),
    HttpRoute(
        "/is_sleeping",
        _GET,
        ops.is_sleeping,
        "whether the engine is asleep",
        role=Role.ADMIN,
        answer=answers.Sleeping,
    ),
    HttpRoute("/metrics", _GET, ops.show_metrics, "Prometheus metrics", role=Role.ADMIN),
    HttpRoute(
        "/slots",
        _GET,
        ops.list_slots,
        "the seats, as llama.cpp lists its slots",
        role=Role.ADMIN,
        answer=list[answers.Slot],
    ),
)
