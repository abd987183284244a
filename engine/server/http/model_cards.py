"""The routes of /v1/models, in OpenAI's form or (anthropic-version) Anthropic's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.http.answers import Maybe, ResponseModel
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.errors import ErrorForm, HttpError
from jitney.engine.server.http.jsonio import json_answer
from jitney.engine.server.http.routing import HttpRoute
from jitney.engine.server.http.server_context import ServerContext


class ModelCard(ResponseModel, kw_only=True):
    """A model under one of its names, or with an adapter. root: what answers call it. parent: of an
    adapter, the model that it changes. max_model_len: tokens of a sequence, prompt included.
    Of a fleet's model, kind: what stands behind it; made_of: its parts, where it has some.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jitney"
    root: str
    parent: Maybe[str | None] = UNSET
    max_model_len: int | None
    kind: Maybe[str] = UNSET
    made_of: Maybe[JsonDict] = UNSET


class ModelList(ResponseModel, kw_only=True):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class AnthropicModel(ResponseModel, kw_only=True):
    """A model as Anthropic's API shows it, to requests with the header anthropic-version.
    created_at: RFC 3339. max_input_tokens, max_tokens, max_model_len: tokens of a sequence, since
    prompt and answer share the context; null until the engine is ready.
    """

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    max_tokens: int | None
    max_model_len: int | None

    @classmethod
    def of(cls, card: ModelCard) -> AnthropicModel:
        created = datetime.fromtimestamp(card.created, UTC).isoformat()
        return cls(
            id=card.id,
            display_name=card.id,
            created_at=created.replace("+00:00", "Z"),
            max_input_tokens=card.max_model_len,
            max_tokens=card.max_model_len,
            max_model_len=card.max_model_len,
        )


class AnthropicModelList(ResponseModel):
    """GET /v1/models with the header anthropic-version: one page with all models."""

    data: list[AnthropicModel]
    first_id: str
    last_id: str
    has_more: Literal[False] = False


async def _list_models(server: ServerContext, request: Request) -> Response:
    """All on one page."""
    cards = [server.card(name) for name in server.listed_names]
    if not _is_anthropic(request):
        return json_answer(ModelList(data=cards))
    models = [AnthropicModel.of(card) for card in cards]
    return json_answer(AnthropicModelList(models, models[0].id, models[-1].id))


async def _show_model(server: ServerContext, request: Request) -> Response:
    """404 for a name that is not listed."""
    name = request.path_params["model"]
    if name not in server.listed_names:
        raise HttpError.no_model(name)
    card = server.card(name)
    return json_answer(AnthropicModel.of(card) if _is_anthropic(request) else card)


def _is_anthropic(request: Request) -> bool:
    return Context.of(request).error_form is ErrorForm.ANTHROPIC


MODEL_ROUTES = (
    HttpRoute(
        "GET /v1/models",
        _list_models,
        "the models, as a list",
        answer=ModelList | AnthropicModelList,
    ),
    HttpRoute(
        "GET /v1/models/{model:path}",
        _show_model,
        "one model",
        answer=ModelCard | AnthropicModel,
    ),
)
