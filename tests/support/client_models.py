"""Checks responses against the types of the client libraries that read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter


def parsed(kind: Any, data: Any) -> Any:
    """`data` parsed as the client's type; asserts that no field is unknown and none is missing."""
    value = _adapter(kind).validate_python(data)
    for model in _models(value):
        assert not model.__pydantic_extra__, (type(model).__name__, model.__pydantic_extra__)
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _models(value: Any) -> Iterator[BaseModel]:
    if isinstance(value, BaseModel):
        yield value
        for name in type(value).model_fields:
            yield from _models(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from _models(item)


def typed_events(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream; asserts that each event has the name of its type. Skips comments."""
    events: list[dict[str, Any]] = []
    frames = body.decode().split("\n\n")
    assert frames.pop() == ""
    for frame in frames:
        if frame.startswith(":"):
            continue
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
