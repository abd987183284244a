"""Where in a JSON schema an error lies: llguidance says what is wrong, and not where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jitney.engine.types import JsonValue

#: Keywords whose value is a schema, a list of schemas, or schemas by name.
_ONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
#: Schemas looked at in all, and characters of the answer.
_MOST_LOOKS = 200
_MOST_PLACE = 120


def place_of_error(schema: JsonValue, error_of: Callable[[JsonValue], str]) -> str:
    """A pointer to the innermost schema that is wrong by itself in the same way, such as
    "#/properties/a". error_of: what is wrong with a schema, "" if nothing is.
    """
    search = _Search(error_of, wanted=error_of(schema), shared=_shared(schema))
    path = ["#"]
    inner = schema
    while (found := search.culprit_in(inner)) is not None:
        steps, inner = found
        path += steps
    return _shortened("/".join(path))


@dataclass(slots=True)
class _Search:
    #: What the compiler says of a schema; empty: nothing is wrong.
    error_of: Callable[[JsonValue], str]
    #: The error that is looked for.
    wanted: str
    #: What a part of the schema may refer to.
    shared: dict[str, JsonValue]
    #: Schemas that may still be tried.
    looks_left: int = _MOST_LOOKS

    def culprit_in(self, schema: JsonValue) -> tuple[list[str], JsonValue] | None:
        """The first schema directly inside one that is wrong by itself, and the steps to it."""
        for steps, child in _children(schema):
            if not self.looks_left:
                return None
            self.looks_left -= 1
            alone = self.shared | child if isinstance(child, dict) else child
            if self.error_of(alone) == self.wanted:
                return steps, child
        return None


def _shared(schema: JsonValue) -> dict[str, JsonValue]:
    if not isinstance(schema, dict):
        return {}
    return {name: schema[name] for name in ("$defs", "definitions", "$schema") if name in schema}


def _children(schema: JsonValue) -> Iterator[tuple[list[str], JsonValue]]:
    """(steps down from here, schema) of the schemas directly inside one."""
    if not isinstance(schema, dict):
        return
    for name in _ONE:
        inner = schema.get(name)
        if isinstance(inner, dict):
            yield [name], inner
    for name in _LISTED:
        listed = schema.get(name)
        if isinstance(listed, list):
            for number, child in enumerate(listed):
                yield [name, str(number)], child
    for name in _NAMED:
        named = schema.get(name)
        if isinstance(named, dict):
            for key, child in named.items():
                yield [name, escaped(key)], child


def escaped(key: str) -> str:
    """As a step of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def _shortened(place: str) -> str:
    if len(place) <= _MOST_PLACE:
        return place
    return place[: _MOST_PLACE - 3] + "..."
