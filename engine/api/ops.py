"""Routes about the server itself: models, probes, version, metrics, seats."""

from __future__ import annotations

from importlib.metadata import version
from typing import Literal

import orjson
from msgspec import to_builtins
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, field_validator
from starlette.requests import Request
from starlette.responses import Response

from jitney.engine.api.errors import HttpError, no_model
from jitney.engine.api.queries import read_query
from jitney.engine.api.service import Service
from jitney.engine.config.digest import ConfigReport
from jitney.engine.types import EngineInfo, JsonDict, KernelProof, Seat

#: What `/version` shows of `EngineInfo.flat`, and the kernels that were taken out.
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
    "sampling_defaults",
    "embedding_pooling",
    "adapters",
)


class SleepQuery(BaseModel):
    """POST /sleep?level=1&mode=wait. Level 1 keeps the weights in the host's memory; there is no
    other. mode: what becomes of open requests: they are waited for, or ended.
    """

    level: Literal[1] = 1
    mode: Literal["wait", "abort"] = "wait"

    @field_validator("level", mode="before")
    @classmethod
    def _number(cls, value: str | int) -> str | int:
        return int(value) if isinstance(value, str) and value.isdigit() else value


async def list_models(service: Service, request: Request) -> Response:
    """The cards of the model, under each of its names, and of its adapters."""
    models = [_model(service, name) for name in (*service.model_names, *service.adapters)]
    return _json({"object": "list", "data": models})


async def show_model(service: Service, request: Request) -> Response:
    """One card; 404 for a name that is none of the model's or of its adapters."""
    name = request.path_params["model"]
    if name not in (*service.model_names, *service.adapters):
        raise no_model(name)
    return _json(_model(service, name))


def _model(service: Service, name: str) -> JsonDict:
    """A model's card; that of an adapter names the model that it changes, as vLLM's does."""
    info = service.client.info
    card = {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "jitney",
        "root": service.model_name,
        "max_model_len": info.model.context_length if info else None,
    }
    if service.adapter_number(name):
        return card | {"root": name, "parent": service.model_name}
    return card


async def livez(service: Service, request: Request) -> Response:
    """The process answers, whatever its engine does."""
    return _json({"status": "ok"})


async def readyz(service: Service, request: Request) -> Response:
    """The engine is up, shows signs of life, and we are not draining."""
    reason = service.unready() or service.stalled()
    if reason is not None:
        raise reason
    return _json({"status": "ready"})


async def startupz(service: Service, request: Request) -> Response:
    """The engine has been ready once; until then 503."""
    reason = service.unready()
    if service.client.info is None and reason is not None:
        raise reason
    return _json({"status": "started"})


async def show_version(service: Service, request: Request) -> Response:
    """The version, and once the engine is ready, what it runs on and in which number formats."""
    shown = {"version": version("jitney")}
    if service.client.info is not None:
        shown |= _shown(service.client.info)
    return _json(shown)


async def show_config(service: Service, request: Request) -> Response:
    """Every setting with its value and its origin; secrets are counted."""
    if service.layered is None:
        raise HttpError(404, "the settings of this server are not known", code="not_found")
    info = service.client.info
    digest = "" if info is None else info.config_digest
    report = ConfigReport.of(service.layered, version=version("jitney"), config_digest=digest)
    return _json(to_builtins(report))


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


async def show_openapi(service: Service, request: Request) -> Response:
    """The description of all routes, made once at start."""
    return Response(service.openapi, media_type="application/json")


async def show_metrics(service: Service, request: Request) -> Response:
    """What Prometheus reads."""
    return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """Forget the pages that are kept for prompts to come."""
    service.ready()
    await service.client.reset_prefix_cache()
    return _json({"status": "reset"})


async def sleep(service: Service, request: Request) -> Response:
    """Give the device's memory back, see `SleepQuery`; asleep already is no error."""
    query = read_query(request, SleepQuery)
    if service.client.state != "sleeping":
        service.ready()
    freed = await service.client.sleep(abort=query.mode == "abort")
    return _json({"status": "asleep", "freed_bytes": freed})


async def wake_up(service: Service, request: Request) -> Response:
    """Serve again; awake already is no error."""
    if service.client.state != "sleeping":
        service.ready()
    await service.client.wake()
    return _json({"status": "awake"})


async def is_sleeping(service: Service, request: Request) -> Response:
    """Whether the engine gave its memory back."""
    return _json({"is_sleeping": service.client.state == "sleeping"})


async def list_slots(service: Service, request: Request) -> Response:
    """The seats as a JSON list with llama.cpp's names where they exist; never any text."""
    info = service.info
    report = await service.client.seat_map()
    return _json([_seat(seat, info) for seat in report.seats])


def _seat(seat: Seat, info: EngineInfo) -> JsonDict:
    return {
        "id": seat.seat,
        "is_processing": seat.state != "free",
        "state": seat.state,
        "n_ctx": info.model.context_length,
        "request_id": seat.request_id,
        "background": seat.background,
        "index": seat.index,
        "n_prompt_tokens": seat.n_prompt,
        "n_prompt_tokens_processed": min(seat.n_computed, seat.n_prompt),
        "n_decoded": seat.n_output,
        "n_remain": max(0, seat.max_tokens - seat.n_output),
        "n_pages": seat.pages,
    }


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
