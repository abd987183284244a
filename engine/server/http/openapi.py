"""The OpenAPI document, made of the table of routes and of the models of bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, get_args, get_origin

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, JsonSchemaValue, models_json_schema

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.http.errors import (
    AnthropicErrorAnswer,
    ErrorAnswer,
    ErrorForm,
    OllamaErrorAnswer,
)
from jitney.engine.server.http.routing import HttpRoute, Role

_SCHEMAS = "#/components/schemas/{model}"
_KEY = "key"
#: In "{model:path}", the part after the name is Starlette's and is removed.
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
#: The body of errors in each form.
_ERROR_ANSWERS = {
    ErrorForm.OPENAI: ErrorAnswer,
    ErrorForm.ANTHROPIC: AnthropicErrorAnswer,
    ErrorForm.OLLAMA: OllamaErrorAnswer,
}
#: Status -> description. Statuses in `_GENERATING` belong only to routes that use the engine.
_ERRORS = {
    400: "the request is not valid; `param` names the field",
    401: "no key, or one that is not ours",
    403: "the key's role does not suffice, or the request comes from another site's page",
    404: "there is no such model, file, batch or job, or it belongs to another key",
    405: "the route does not take this method",
    408: "head or body did not arrive in time",
    409: "the Idempotency-Key of a job was used for another one, or a file that was to be read "
    "again is not sound",
    413: "the body is too large",
    415: "the body is not JSON in UTF-8, or not a form where one is wanted",
    429: "too many requests; Retry-After says when to come again",
    431: "the head is too large",
    500: "an error of ours; the log names it by the request's id",
    503: "loading, draining, or the engine is gone",
}
_GENERATING = {504: "the deadline passed, or could not be met"}


@cache
def document(routes: tuple[HttpRoute, ...]) -> bytes:
    """The document, as JSON. Made once for each table: it takes half a second."""
    paths: dict[str, JsonDict] = {}
    for route in routes:
        path = paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})
        path[route.method.lower()] = _operation(route)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Jitney",
                "version": version("jitney"),
                "description": "In-flight batching for large language models.",
            },
            "paths": paths,
            "components": {
                "schemas": _schemas(routes),
                "securitySchemes": {_KEY: {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _operation(route: HttpRoute) -> JsonDict:
    words = re.findall(r"\w+", _PARAMETER.sub(r"\1", route.path))
    operation: JsonDict = {
        "summary": route.summary,
        "operationId": "_".join([route.method.lower(), *words]),
        "responses": _responses(route),
        # A server without keys admits all clients.
        "security": [] if route.role is Role.ANYBODY else [{_KEY: []}, {}],
    }
    schema = {"type": "string", "minLength": 1}
    parameters: list[JsonDict] = [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name in _PARAMETER.findall(route.path)
    ]
    parameters += _query_parameters(route)
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        media_type = "multipart/form-data" if route.uploads else "application/json"
        content = {media_type: {"schema": _ref(route.body)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _query_parameters(route: HttpRoute) -> list[JsonDict]:
    if route.query is None:
        return []
    return [
        {"name": name, "in": "query", "schema": schema}
        for name, schema in route.query.model_json_schema()["properties"].items()
    ]


def _responses(route: HttpRoute) -> JsonDict:
    content = _json(_answer_schema(route.answer)) if route.answer else {route.media_type: {}}
    if route.event:
        content[route.stream_type] = {"schema": _answer_schema(route.event)}
    good = {"description": route.summary, "content": content}
    responses: JsonDict = {str(route.status): good}
    body = _json(_ref(_ERROR_ANSWERS[ErrorForm.of(route.path)]))
    for status, when in (_ERRORS | (_GENERATING if route.generates else {})).items():
        responses[str(status)] = {"description": when, "content": body}
    return responses


def _json(schema: JsonSchemaValue) -> JsonDict:
    return {"application/json": {"schema": schema}}


def _ref(model: type) -> JsonSchemaValue:
    return {"$ref": _SCHEMAS.format(model=model.__name__)}


def _answer_schema(answer: Any) -> JsonSchemaValue:
    """A struct by its name; a list of one, or one of several."""
    if get_origin(answer) is list:
        [item] = get_args(answer)
        return {"type": "array", "items": _ref(item)}
    refs = [_ref(kind) for kind in _structs(answer)]
    return refs[0] if len(refs) == 1 else {"anyOf": refs}


def _structs(answer: Any) -> tuple[Any, ...]:
    """The struct of an answer; that of a list, or those that it may be one of."""
    return get_args(answer) or (answer,)


def _schemas(routes: Sequence[HttpRoute]) -> dict[str, JsonSchemaValue]:
    """Every body and answer, and what it is made of, by name."""
    bodies = dict.fromkeys(route.body for route in routes if route.body is not None)
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (model, "validation") for model in bodies
    ]
    _, schema = models_json_schema(models, ref_template=_SCHEMAS)
    structs = [*_ERROR_ANSWERS.values()]
    for route in routes:
        for answer in (route.answer, route.event):
            structs += _structs(answer) if answer else ()
    template = _SCHEMAS.format(model="{name}")
    _, answers = msgspec.json.schema_components(structs, ref_template=template)
    for name, answer in answers.items():
        assert name not in schema["$defs"], f"a body and an answer are both called {name}"
        _require_what_is_sent(answer)
    return schema["$defs"] | answers


def _require_what_is_sent(schema: JsonSchemaValue) -> None:
    """Mark fields with defaults as required: responses contain them, but for those with UNSET."""
    required: list[str] = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        if field.pop("default", msgspec.UNSET) is not msgspec.UNSET:
            required.append(name)
