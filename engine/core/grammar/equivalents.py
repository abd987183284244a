"""Rewrites keywords that llguidance does not support as schemas that allow the same values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from math import comb, perm

from jitney.engine.common.requests import JsonDict, JsonValue
from jitney.engine.common.schema_tree import ANNOTATIONS, is_anything, is_never, resolved

#: Most alternatives for one keyword.
_MOST_ALTERNATIVES = 100
#: Most references followed to find the values of an enumeration.
_MOST_REFERENCES = 8
#: Keywords that apply further schemas to the same value.
_IN_PLACE = frozenset(
    {"$dynamicRef", "$ref", "allOf", "anyOf", "dependentSchemas", "if", "not", "oneOf"}
)
#: Keywords that list values; `_values` reads schemas with one of them.
_ENUMERATIONS = frozenset({"$ref", "anyOf", "const", "enum", "oneOf"})
_LENGTHS = frozenset({"minLength", "maxLength"})
_SIZES = frozenset({"minItems", "maxItems"})
#: Python types of JSON types; for numbers see `_has_type`.
_TYPES: dict[str, type] = {
    "array": list,
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "string": str,
}


def with_known_keywords(schema: JsonDict, root: JsonDict) -> JsonDict:
    """An equivalent schema with supported keywords, where possible. root: for references."""
    if "not" in schema and is_never(schema["not"]):
        schema = _without(schema, "not")
    if "unevaluatedProperties" in schema:
        schema = _evaluated(schema, "unevaluatedProperties", "additionalProperties")
    if "unevaluatedItems" in schema and not isinstance(schema.get("items"), list):
        schema = _evaluated(schema, "unevaluatedItems", "items")
    if "propertyNames" in schema:
        schema = _with_named_properties(schema, root)
    if "uniqueItems" in schema:
        schema = _with_distinct_items(schema, root)
    if "minProperties" in schema or "maxProperties" in schema:
        schema = _with_counted_properties(schema)
    return schema


def _without(schema: JsonDict, *keywords: str) -> JsonDict:
    return {key: value for key, value in schema.items() if key not in keywords}


def _with_named_properties(schema: JsonDict, root: JsonDict) -> JsonDict:
    """Replace `propertyNames` by `properties` if it lists names, by `patternProperties` if it is a
    pattern.
    """
    names = schema["propertyNames"]
    if is_anything(names) or _allows_texts(names):
        return _without(schema, "propertyNames")
    properties = schema.get("properties", {})
    if "patternProperties" in schema or not isinstance(properties, dict):
        return schema
    others = schema.get("additionalProperties", True)
    rest = _without(schema, "propertyNames", "properties", "additionalProperties")
    listed = [] if is_never(names) else _values(names, root)
    if listed is not None:
        listed = [name for name in listed if isinstance(name, str)]
        order = [name for name in properties if name in listed] + listed
        rest["properties"] = {name: properties.get(name, others) for name in order}
        return rest | {"additionalProperties": False}
    pattern = _name_pattern(names)
    if pattern is None or properties:
        return schema
    return rest | {"patternProperties": {pattern: others}, "additionalProperties": False}


def _allows_texts(schema: JsonValue) -> bool:
    """Whether a schema allows every text; formats are annotations."""
    if not isinstance(schema, dict) or schema.keys() - ANNOTATIONS - {"type", "format"}:
        return False
    types = schema.get("type", "string")
    return types == "string" or (isinstance(types, list) and "string" in types)


def _name_pattern(names: JsonValue) -> str | None:
    """A pattern equivalent to a schema of names; None if there is none."""
    if not isinstance(names, dict):
        return None
    keywords = names.keys() - ANNOTATIONS - {"type", "format"}
    pattern = names.get("pattern")
    if keywords == {"pattern"} and isinstance(pattern, str):
        return pattern
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if keywords <= _LENGTHS and isinstance(least, int) and isinstance(most, int | str):
        return rf"^[\s\S]{{{least},{most}}}$"
    return None


def _evaluated(schema: JsonDict, keyword: str, simpler: str) -> JsonDict:
    """Replace `unevaluated...` by `additionalProperties` or `items`, if no other schema applies."""
    if _IN_PLACE & schema.keys() or "contains" in schema:
        return schema
    return {simpler: schema[keyword]} | _without(schema, keyword)


def _with_distinct_items(schema: JsonDict, root: JsonDict) -> JsonDict:
    """Replace `uniqueItems` of an enumeration by a list of all arrays, if they are few."""
    most = schema.get("maxItems")
    if schema["uniqueItems"] is False or (isinstance(most, int) and most < 2):
        return _without(schema, "uniqueItems")
    others = schema.keys() - ANNOTATIONS - _SIZES - {"type", "items", "uniqueItems"}
    values = None if others else _values(schema.get("items"), root)
    types = schema.get("type")
    if values is None or types not in ("array", ["array", "null"]):
        return schema
    arrays = _arrays(values, schema.get("minItems", 0), schema.get("maxItems", len(values)))
    if arrays is None:
        return schema
    null: list[JsonValue] = [] if types == "array" else [None]
    rest = _without(schema, "uniqueItems", "items", *_SIZES)
    return rest | {"enum": [*arrays, *null]}


def _arrays(values: list[JsonValue], least: JsonValue, most: JsonValue) -> list[JsonValue] | None:
    """All arrays of `least` to `most` distinct values, in every order; None if too many."""
    if not isinstance(least, int) or not isinstance(most, int):
        return None
    sizes = range(least, min(most, len(values)) + 1)
    if len(values) > _MOST_ALTERNATIVES or least < 0:
        return None
    if sum([perm(len(values), size) for size in sizes]) > _MOST_ALTERNATIVES:
        return None
    return [list(items) for size in sizes for items in permutations(values, size)]


def _with_counted_properties(schema: JsonDict) -> JsonDict:
    """Replace bounds on the number of properties by alternatives, if they are few. llguidance
    supports at least or at most one property besides the required ones.
    """
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return schema
    least, most = schema.get("minProperties", 0), schema.get("maxProperties", len(properties))
    if not isinstance(least, int) or not isinstance(most, int):
        return schema
    if least <= len({str(name) for name in required}):
        schema, least = _without(schema, "minProperties"), len(required)
    if schema.get("additionalProperties") is not False or "patternProperties" in schema:
        return schema
    if most >= len(properties):
        schema, most = _without(schema, "maxProperties"), len(properties)
    optional = [name for name in properties if name not in required]
    must, may = least - len(required), min(most - len(required), len(optional))
    if not {"minProperties", "maxProperties"} & schema.keys() or must > may or may < 1:
        return schema
    if must <= 1 and may in (1, len(optional)):
        return schema  # llguidance supports it
    if comb(len(optional), may) * comb(may, must) > _MOST_ALTERNATIVES:
        return schema
    alternatives = {"anyOf": list(_alternatives(optional, must, may))}
    others = schema.get("allOf", [])
    if not isinstance(others, list):
        return schema
    rest = _without(schema, "minProperties", "maxProperties", "allOf")
    return rest | {"allOf": [*others, alternatives]}


def _alternatives(optional: Sequence[str], must: int, may: int) -> Iterator[JsonValue]:
    """Schemas of objects with `must` to `may` of the optional properties."""
    for allowed in combinations(optional, may):
        absent: JsonDict = {name: False for name in optional if name not in allowed}
        for needed in combinations(allowed, must):
            yield {"type": "object", "properties": absent, "required": list(needed)}


def _values(schema: JsonValue, root: JsonDict) -> list[JsonValue] | None:
    """All distinct values that a schema allows; None if it is not a plain enumeration."""
    target = _followed(schema, root)
    if target is None:
        return None
    union = target.get("anyOf", target.get("oneOf"))
    if not isinstance(union, list) or len(union) > _MOST_ALTERNATIVES:
        return None if "anyOf" in target or "oneOf" in target else _listed(target)
    values: list[JsonValue] = []
    for option in union:
        leaf = _followed(option, root)
        listed = None if leaf is None else _listed(leaf)
        if listed is None:
            return None
        values += listed
    return _distinct([value for value in values if _has_type(value, target.get("type"))])


def _followed(schema: JsonValue, root: JsonDict) -> JsonDict | None:
    """An enumerating schema with its references followed; None if it has other keywords."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, dict):
            return None
        keywords = schema.keys() - ANNOTATIONS
        if len(keywords & _ENUMERATIONS) > 1 or keywords - _ENUMERATIONS - {"type"}:
            return None
        if keywords != {"$ref"}:
            return schema
        schema = resolved(root, str(schema["$ref"]))
    return None


def _listed(schema: JsonDict) -> list[JsonValue] | None:
    types, listed = schema.get("type"), schema.get("enum")
    if "const" in schema:
        listed = [schema["const"]]
    elif types in ("boolean", "null") and listed is None:
        listed = [True, False] if types == "boolean" else [None]
    if not isinstance(listed, list) or {"$ref", "anyOf", "oneOf"} & schema.keys():
        return None
    return _distinct([value for value in listed if _has_type(value, types)])


def _has_type(value: JsonValue, types: JsonValue) -> bool:
    if isinstance(types, list):
        return any([_has_type(value, name) for name in types])
    if types is None or not isinstance(types, str):
        return types is None
    if types in ("number", "integer"):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return types == "number" or float(value).is_integer()
    return isinstance(value, _TYPES.get(types, ()))


def _distinct(values: list[JsonValue]) -> list[JsonValue]:
    """The values without repeats; 1 and 1.0 are equal."""
    distinct: dict[str, JsonValue] = {}
    for value in values:
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        distinct.setdefault(json.dumps(number, sort_keys=True), value)
    return list(distinct.values())
