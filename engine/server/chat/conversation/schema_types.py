"""The types that a JSON schema admits, for forms that write texts and other values differently."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain

from jitney.engine.common.requests import JsonDict, JsonValue
from jitney.engine.common.schema_tree import resolved

#: Counts down the subschemas that may still be visited.
type Steps = Iterator[int]

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
TEXT = frozenset({"string"})
#: Most subschemas visited per query; recursive schemas have no end.
_MOST_STEPS = 256
#: Types of values that are written as one word.
_WORD_TYPES = frozenset({"string", "number", "integer", "boolean", "null"})
#: Longest text that is read as Python: its parser takes time and memory for all of it at once.
_MOST_PYTHON = 1 << 14
#: Words of Python that models write for those of JSON, as templates show them in earlier calls.
_WORDS = {"True": "true", "False": "false", "None": "null"}


def new_steps() -> Steps:
    """A new budget of subschemas for one query."""
    return iter(range(_MOST_STEPS))


def listed_values(schema: JsonValue) -> list[JsonValue] | None:
    """The values that a schema lists; None: it does not list them."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def all_values(
    schema: JsonValue, root: JsonDict, steps: Steps | None = None
) -> list[JsonValue] | None:
    """The values that fit a schema if it enumerates them, also in alternatives; else None."""
    steps = steps or new_steps()
    if not isinstance(schema, dict) or next(steps, None) is None:
        return None
    values = listed_values(schema)
    if values is not None:
        return values
    if schema.get("type") == "null":
        return [None]
    if "$ref" in schema:
        return all_values(resolved(root, str(schema["$ref"])), root, steps)
    for keyword in ("anyOf", "oneOf"):
        options = schema.get(keyword)
        if isinstance(options, list):
            lists = [all_values(option, root, steps) for option in options]
            finite = [each for each in lists if each is not None]
            return [*chain(*finite)] if len(finite) == len(lists) else None
    return None


def properties_of(schema: JsonValue, root: JsonDict, steps: Steps | None = None) -> JsonDict:
    """The schemas of an object's declared properties, also in allOf and references."""
    steps = steps or new_steps()
    if not isinstance(schema, dict) or next(steps, None) is None:
        return {}
    parts = [resolved(root, str(schema["$ref"]))] if "$ref" in schema else []
    parts += [*_list(schema.get("allOf")), *_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]
    properties: JsonDict = {}
    for part in parts:
        properties |= properties_of(part, root, steps)
    own = schema.get("properties")
    return properties | own if isinstance(own, dict) else properties


def types_of(schema: JsonValue, root: JsonDict, steps: Steps | None = None) -> frozenset[str]:
    """The JSON types of the values that fit a schema; all types if it does not restrict them."""
    steps = steps or new_steps()
    if not isinstance(schema, dict) or next(steps, None) is None:
        return ALL_TYPES
    values = listed_values(schema)
    if values is not None:
        return frozenset().union(*map(_types_of_value, values))
    types = _named_types(schema.get("type"))
    if "$ref" in schema:
        types &= types_of(resolved(root, str(schema["$ref"])), root, steps)
    for keyword in ("anyOf", "oneOf"):
        options = schema.get(keyword)
        if isinstance(options, list):
            option_types = [types_of(option, root, steps) for option in options]
            types &= frozenset().union(*option_types)
    for part in _list(schema.get("allOf")):
        types &= types_of(part, root, steps)
    return types


def _named_types(names: JsonValue) -> frozenset[str]:
    types = frozenset([names] if isinstance(names, str) else map(str, _list(names)))
    if "number" in types:
        types |= {"integer"}
    return types & ALL_TYPES or ALL_TYPES


def _list(value: JsonValue) -> Iterable[JsonValue]:
    return value if isinstance(value, list) else ()


def _types_of_value(value: JsonValue) -> frozenset[str]:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case str():
            return TEXT
        case dict():
            return frozenset({"object"})
        case list():
            return frozenset({"array"})
        case _:
            is_whole = isinstance(value, int) or value.is_integer()
            return frozenset({"number", "integer"} if is_whole else {"number"})


def quoted(text: str) -> str:
    """A string as JSON writes it."""
    return json.dumps(text, ensure_ascii=False)


def json_of(text: str, types: frozenset[str]) -> str:
    """JSON of a value without quotes whose schema admits these types; other text is a string."""
    if types == TEXT:
        return quoted(text)
    word = text.strip()
    for written in (word, _WORDS.get(word), _python_as_json(word)):
        if written is not None and _is_json(written, types):
            return written
    return quoted(text)


def word_json(word: str) -> str:
    """A word as JSON: a number, true, false or null as it stands, else a string."""
    return json_of(word, _WORD_TYPES)


def _is_json(text: str, types: frozenset[str]) -> bool:
    """Whether a text is JSON of one of these types; any JSON fits if strings are not admitted."""
    try:
        value = json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError):
        return False
    unquoted = frozenset[str]() if types == ALL_TYPES else TEXT
    return "string" not in types or bool(_types_of_value(value) & types - unquoted)


def _python_as_json(text: str) -> str | None:
    """The JSON of a list or a dict that is written as Python does it; None: it is neither."""
    if text[:1] not in ("{", "[") or len(text) > _MOST_PYTHON:
        return None
    errors = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)
    with suppress(*errors), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    return None


def _not_json(word: str) -> None:
    raise json.JSONDecodeError("no JSON", word, 0)
