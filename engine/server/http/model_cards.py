"""The answers of /v1/models, in OpenAI's form or in Anthropic's, which the header anthropic-version
asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from jitney.engine.server.http.answers import Maybe, ResponseModel
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.errors import ErrorForm
from jitney.engine.server.http.jsonio import json_answer


class ModelCard(ResponseModel, kw_only=True):
    """The served model under one of its names, or with an adapter. root: what answers call it.
    parent: of an adapter, the model that it changes. max_model_len: tokens of a sequence, prompt
    included.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jitney"
    root: str
    parent: Maybe[str | None] = UNSET
    max_model_len: int | None


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
        """The same model."""
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


def card_answer(request: Request, card: ModelCard) -> Response:
    """One model."""
    return json_answer(AnthropicModel.of(card) if _is_anthropic(request) else card)


def cards_answer(request: Request, cards: Sequence[ModelCard]) -> Response:
    """All models, at least one, on one page."""
    if not _is_anthropic(request):
        return json_answer(ModelList(data=list(cards)))
    models = [AnthropicModel.of(card) for card in cards]
    return json_answer(AnthropicModelList(models, models[0].id, models[-1].id))


def _is_anthropic(request: Request) -> bool:
    return Context.of(request).error_form is ErrorForm.ANTHROPIC
