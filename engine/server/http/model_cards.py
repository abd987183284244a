"""The answers of /v1/models, in OpenAI's form or in Anthropic's, which the header anthropic-version
asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.errors import ErrorForm
from jitney.engine.server.http.jsonio import json_answer


def card_answer(request: Request, card: JsonDict) -> Response:
    """One model. card: in OpenAI's form."""
    return json_answer(_anthropic(card) if _is_anthropic(request) else card)


def cards_answer(request: Request, cards: Sequence[JsonDict]) -> Response:
    """All models, at least one, on one page. cards: in OpenAI's form."""
    if not _is_anthropic(request):
        return json_answer({"object": "list", "data": cards})
    models = [_anthropic(card) for card in cards]
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]}
    return json_answer({"data": models, "has_more": False} | ends)


def _is_anthropic(request: Request) -> bool:
    return Context.of(request).error_form is ErrorForm.ANTHROPIC


def _anthropic(card: JsonDict) -> JsonDict:
    """max_model_len is an addition: prompt and answer share the context."""
    created = datetime.fromtimestamp(card["created"], UTC).isoformat()
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": created.replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
        "max_model_len": card["max_model_len"],
    }
