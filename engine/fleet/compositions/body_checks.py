"""Checks of a request to a composed model: by its route, and by the model itself."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

from jitney.engine.common.errors import RequestError
from jitney.engine.fleet.request import ProxiedRequest
from jitney.engine.server import ChatBody, CompletionBody

#: Fields with token ids, which stand for different tokens in another model's tokenizer.
_TOKEN_FIELDS = ("logit_bias", "stop_token_ids", "allowed_token_ids")


def accepted(request: ProxiedRequest, own_names: Collection[str] = ()) -> ProxiedRequest:
    """The request with a validated body; its `timeout_ms` starts now. own_names: fields that the
    model reads in addition to the route's. Raises RequestError for a body that the route refuses.
    """
    own = {name: request.fields[name] for name in own_names if name in request.fields}
    fields = {name: value for name, value in request.fields.items() if name not in own}
    request = replace(request, path=request.route, fields=fields, body=b"", own_fields=own)
    parsed = parsed_body(request)
    deadline = None
    if parsed.timeout_ms is not None:
        deadline = time.monotonic() + parsed.timeout_ms / 1000
    return replace(request, deadline=deadline, parsed=parsed)


def parsed_body(request: ProxiedRequest) -> ChatBody | CompletionBody:
    """The body as the route's body class. Raises RequestError that names the invalid field."""
    if request.parsed is not None:
        return request.parsed
    kind = ChatBody if request.is_chat else CompletionBody
    body, _ = kind.parse(request.fields)
    return body


def refuse_token_ids(request: ProxiedRequest) -> None:
    """Raise RequestError for fields that contain token ids."""
    why = "models with tokenizers of their own answer, and a token's id means another to each"
    for name in _TOKEN_FIELDS:
        if request.fields.get(name):
            raise _refused(name, why)
    body = parsed_body(request)
    prompts = body.prompt if isinstance(body, CompletionBody) else ()
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise _refused("prompt", f"give a text: {why}")


def refuse_fields(request: ProxiedRequest, names: Collection[str], why: str) -> None:
    """Raise RequestError for each of these fields that the request sets."""
    body = parsed_body(request)
    for name in names:
        value = getattr(body, name, None)
        if value is not None and value is not False and value != "":
            raise _refused(name, why)


def refuse_many(request: ProxiedRequest, why: str) -> None:
    """Raise RequestError if the request asks for more than one answer."""
    body = parsed_body(request)
    if (body.n or 1) > 1:
        raise _refused("n", f"must be 1: {why}")
    if isinstance(body, CompletionBody):
        if (body.best_of or 1) > 1:
            raise _refused("best_of", f"must be 1: {why}")
        if len(body.prompt) > 1:
            raise _refused("prompt", f"must be one prompt: {why}")


def _refused(name: str, why: str) -> RequestError:
    return RequestError(
        f"{name} is not supported by this model ({why})",
        code="unsupported_parameter",
        param=name,
    )
