"""The table of HTTP routes, and handlers without a module. A new route is a handler and a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Literal

from pydantic import BaseModel, field_validator
from starlette.requests import Request
from starlette.responses import Response

from jitney.engine.common.engine_info import EngineInfo, KernelProof, Seat
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.config import ConfigReport
from jitney.engine.server.chat.anthropic.routes import MESSAGE_ROUTES
from jitney.engine.server.chat.llamacpp.routes import TEXT_ROUTES
from jitney.engine.server.chat.ollama.routes import OLLAMA_LISTS, OLLAMA_ROUTES
from jitney.engine.server.chat.openai.embeddings import EMBEDDING_ROUTES
from jitney.engine.server.chat.openai.routes import OPENAI_ROUTES
from jitney.engine.server.chat.ranking.routes import RANKING_ROUTES
from jitney.engine.server.chat.responses.routes import RESPONSE_ROUTES
from jitney.engine.server.chat.schema import ModelBody
from jitney.engine.server.http.answers import (
    Asleep,
    Sleeping,
    Slot,
    Status,
    Version,
)
from jitney.engine.server.http.front import FRONT_ROUTES
from jitney.engine.server.http.jsonio import json_answer
from jitney.engine.server.http.model_cards import MODEL_ROUTES
from jitney.engine.server.http.probes import PROBE_ROUTES
from jitney.engine.server.http.queries import read_query
from jitney.engine.server.http.reload import RELOAD_ROUTES
from jitney.engine.server.http.routing import Handler, HttpRoute, Role
from jitney.engine.server.http.server_context import ServerContext
from jitney.engine.server.http.service import Service
from jitney.engine.server.tasks.routes import TASK_ROUTES

#: Fields of `EngineInfo.flat` that `/version` shows, and the kernels that were taken out.
_SHOWN = (
    "config_digest",
    "platform",
    "device",
    "tensor_parallel",
    "expert_parallel",
    "data_parallel",
    "kernels",
    "kernels_out",
    "dtype",
    "weights",
    "kv_dtype",
    "pages",
    "window_pages",
    "checkpoints",
    "sampling_defaults",
    "embedding_pooling",
    "adapters",
    "weight_bytes",
    "step_bytes",
    "code_bytes",
)


class _SleepQuery(BaseModel):
    """POST /sleep?level=1&mode=wait. Level 1 keeps the weights in the host's memory; there is no
    other. mode: what becomes of open requests: they are waited for, or ended.
    """

    level: Literal[1] = 1
    mode: Literal["wait", "abort"] = "wait"

    @field_validator("level", mode="before")
    @classmethod
    def _number(cls, value: str | int) -> str | int:
        return int(value) if isinstance(value, str) and value.isdigit() else value


async def _show_version(server: ServerContext, request: Request) -> Response:
    """The version, and once the engine is ready, its device, number formats and pages."""
    shown = {"version": version("jitney")}
    if server.engine_info is not None:
        shown |= _shown(server.engine_info)
    return json_answer(shown)


async def _show_config(service: Service, request: Request) -> Response:
    return json_answer(service.config_report())


def _shown(info: EngineInfo) -> JsonDict:
    proofs = [_proof(proof) for proof in info.kernels.proofs]
    flat = info.flat() | {"kernels_out": info.kernels.out}
    return {name: flat[name] for name in _SHOWN} | {"kernel_proofs": proofs}


def _proof(proof: KernelProof) -> JsonDict:
    """error: null where the kernel could not run."""
    return {
        "kernel": proof.kernel,
        "ok": proof.ok,
        "error": proof.error,
        "limit": proof.limit,
        "reason": proof.reason,
    }


async def _reset_prefix_cache(service: Service, request: Request) -> Response:
    """Drop the pages of the prefix cache."""
    service.ready()
    await service.client.reset_prefix_cache()
    return json_answer(Status("reset"))


async def _sleep(service: Service, request: Request) -> Response:
    """Give the device's memory back, see `_SleepQuery`; asleep already is no error."""
    query = read_query(request, _SleepQuery)
    if service.client.state != "sleeping":
        service.ready()
    freed = await service.client.sleep(abort=query.mode == "abort")
    return json_answer(Asleep(freed))


async def _wake_up(service: Service, request: Request) -> Response:
    """Serve again; awake already is no error."""
    if service.client.state != "sleeping":
        service.ready()
    await service.client.wake()
    return json_answer(Status("awake"))


async def _is_sleeping(service: Service, request: Request) -> Response:
    """Whether the engine gave its memory back."""
    return json_answer(Sleeping(service.client.state == "sleeping"))


async def _list_slots(service: Service, request: Request) -> Response:
    """The seats as a JSON list with llama.cpp's names where they exist; never any text."""
    info = service.info
    report = await service.client.seat_map()
    return json_answer([_slot(seat, info) for seat in report.seats])


def _slot(seat: Seat, info: EngineInfo) -> Slot:
    return Slot(
        id=seat.seat,
        is_processing=seat.state != "free",
        state=seat.state,
        n_ctx=info.model.context_length,
        request_id=seat.request_id,
        background=seat.background,
        index=seat.index,
        n_prompt_tokens=seat.n_prompt,
        n_prompt_tokens_processed=min(seat.n_computed, seat.n_prompt),
        n_decoded=seat.n_output,
        n_remain=max(0, seat.max_tokens - seat.n_output),
        n_pages=seat.pages,
    )


#: Routes that an engine and a fleet's endpoint have alike.
_SHARED_ROUTES = (
    *OLLAMA_LISTS,
    *TASK_ROUTES,
    *MODEL_ROUTES,
    *PROBE_ROUTES,
    *FRONT_ROUTES,
    *RELOAD_ROUTES,
    HttpRoute(
        "GET /version",
        _show_version,
        "version, device, kernels, number formats, pages, and bytes of weights, largest step and "
        "programs",
        answer=Version,
    ),
)
ROUTES = (
    *OPENAI_ROUTES,
    *RESPONSE_ROUTES,
    *MESSAGE_ROUTES,
    *EMBEDDING_ROUTES,
    *RANKING_ROUTES,
    *TEXT_ROUTES,
    *OLLAMA_ROUTES,
    *_SHARED_ROUTES,
    HttpRoute(
        "GET /config",
        _show_config,
        "every setting, and where its value came from",
        role=Role.ADMIN,
        answer=ConfigReport,
    ),
    HttpRoute(
        "POST /reset_prefix_cache",
        _reset_prefix_cache,
        "let no later prompt find what was computed for an earlier one",
        role=Role.ADMIN,
        answer=Status,
    ),
    HttpRoute(
        "POST /sleep",
        _sleep,
        "free the device's memory until /wake_up",
        role=Role.ADMIN,
        query=_SleepQuery,
        answer=Asleep,
    ),
    HttpRoute(
        "POST /wake_up",
        _wake_up,
        "take the device's memory again, and serve",
        role=Role.ADMIN,
        answer=Status,
    ),
    HttpRoute(
        "GET /is_sleeping",
        _is_sleeping,
        "whether the engine is asleep",
        role=Role.ADMIN,
        answer=Sleeping,
    ),
    HttpRoute(
        "GET /slots",
        _list_slots,
        "the seats, as llama.cpp lists its slots",
        role=Role.ADMIN,
        answer=list[Slot],
    ),
)


def front_routes(handlers: Mapping[str, Handler]) -> tuple[HttpRoute, ...]:
    """The routes of an endpoint before engines: those that it has like an engine, and the engine's
    own ones that it forwards. handlers: by path.
    """
    forwarded = [
        replace(route, handler=handlers[route.path]) for route in ROUTES if route.path in handlers
    ]
    return (*forwarded, *_SHARED_ROUTES)


def unknown_fields(path: str, body: JsonObject) -> list[str]:
    """Check a body as the engine's route does. -> Names of its fields that change nothing. Raises
    RequestError naming the first field at fault.
    """
    [kind] = [route.body for route in ROUTES if route.path == path]
    assert kind is not None and issubclass(kind, ModelBody)
    return kind.parse(body)[1]
