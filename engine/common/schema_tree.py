"""Walks JSON schemas: subschemas, JSON pointers and references."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from urllib.parse import unquote

from jitney.engine.common.requests import JsonDict, JsonValue

#: Keywords whose value is a schema, a list of schemas, or schemas by name.
ONE = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
LISTED = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
#: Keywords that do not restrict a value.
ANNOTATIONS = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "examples",
        "id",
        "readOnly",
        "title",
        "writeOnly",
    }
)


def children(schema: JsonValue) -> Iterator[tuple[list[str], JsonValue]]:
    """(steps of the pointer, subschema) of the direct subschemas."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in ONE and isinstance(value, dict):
            yield [keyword], value
        elif keyword in LISTED and isinstance(value, list):
            for number, child in enumerate(value):
                yield [keyword, str(number)], child
        elif keyword in NAMED and isinstance(value, dict):
            for name, child in value.items():
                yield [keyword, name], child


def pointer(steps: Iterable[str]) -> str:
    """A JSON pointer, such as "#/properties/a"."""
    return "/".join(["#", *map(escaped, steps)])


def escaped(name: str) -> str:
    """A name as a step of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def resolved(root: JsonDict, reference: str) -> JsonValue:
    """The target of a reference within the document; None if it is no pointer, or has no target."""
    if not re.match(r"#(/|$)", reference):
        return None
    value: JsonValue = root
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def is_anything(schema: JsonValue) -> bool:
    """Whether a schema allows every value and has no definitions."""
    silent = ANNOTATIONS - {"$defs", "definitions"}
    return schema is True or (isinstance(schema, dict) and not schema.keys() - silent)


def is_never(schema: JsonValue) -> bool:
    """Whether a schema obviously allows no value, such as zod's `{"not": {}}`."""
    return schema is False or (isinstance(schema, dict) and is_anything(schema.get("not")))
