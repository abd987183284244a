"""Sets additionalProperties false in objects that name their properties, so that a model does not
invent others; libraries write schemas without it.

An object stays open if other keywords concern its properties, or if another schema applies to the
same value (`allOf`, `anyOf` or `$ref` beside `properties`).
"""

from __future__ import annotations

from collections.abc import Iterator

from jitney.engine.common.requests import JsonDict, JsonValue
from jitney.engine.common.schema_tree import ANNOTATIONS, children, resolved

#: Keywords that do not concern the properties of an object.
_QUIET = ANNOTATIONS | {"type", "discriminator"}
#: Keywords beside `properties` that may allow or need other properties.
_OPENING = frozenset(
    {
        "$dynamicRef",
        "$ref",
        "additionalProperties",
        "allOf",
        "anyOf",
        "dependentSchemas",
        "if",
        "not",
        "oneOf",
        "patternProperties",
        "propertyNames",
        "unevaluatedProperties",
    }
)
#: Keywords whose schemas apply to the same value as the one that has them.
_UNIONS = ("anyOf", "oneOf")
_CONDITIONS = frozenset({"not", "if", "then", "else", "dependentSchemas"})
_IN_PLACE = _CONDITIONS | {*_UNIONS, "allOf"}
_DEFINITIONS = frozenset({"$defs", "definitions"})


def closed(schema: JsonDict) -> JsonDict:
    """A schema with its objects closed. Raises RecursionError if it is too deep."""
    result = _closed_value(schema, _closable(schema))
    assert isinstance(result, dict)
    return result


def _closable(root: JsonDict) -> set[int]:
    """The ids of the schemas that never apply together with others."""
    todo: list[tuple[JsonValue, bool]] = [(root, False)]
    alone: dict[int, bool] = {}
    while todo:
        schema, is_shared = todo.pop()
        if not isinstance(schema, dict):
            continue
        before = alone.get(id(schema))
        if before is False or (before and not is_shared):
            continue
        alone[id(schema)] = not is_shared
        todo += _applied(schema, is_shared, root)
    return {key for key, is_alone in alone.items() if is_alone}


def _applied(schema: JsonDict, is_shared: bool, root: JsonDict) -> Iterator[tuple[JsonValue, bool]]:
    """(subschema, whether it applies together with others) of each subschema that applies."""
    keywords = schema.keys() - _QUIET
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield resolved(root, reference), is_shared or keywords != {"$ref"}
    for steps, child in children(schema):
        keyword = steps[0]
        if keyword in _DEFINITIONS:
            continue
        together = keyword in _CONDITIONS
        if keyword in _IN_PLACE:
            together |= keywords != {keyword}
        if keyword == "allOf":
            together |= schema["allOf"] != [child]
        yield child, is_shared or together


def _closed_value(value: JsonValue, closable: set[int]) -> JsonValue:
    if isinstance(value, list):
        return [_closed_value(item, closable) for item in value]
    if not isinstance(value, dict):
        return value
    result = {key: _closed_value(each, closable) for key, each in value.items()}
    if id(value) in closable and _names_all(value):
        result["additionalProperties"] = False
    return result


def _names_all(schema: JsonDict) -> bool:
    """Whether only `properties` determines which properties an object has."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    least = schema.get("minProperties", 0)
    if not isinstance(least, int) or least > len(properties):
        return False
    names = {str(name) for name in required}
    return names <= properties.keys() and not _OPENING & schema.keys()
