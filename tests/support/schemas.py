"""Random JSON schemas with the keywords that docs/structured_output.md names."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

_NAMES = st.sampled_from(["a", "b", "id", "name", "some words", 'quo"te', "é", "x/y", "0"])
_FORMATS = st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email"])
_PATTERNS = st.sampled_from(["^[a-z]{2,4}$", "^(ab|c)+$", "[0-9]", "^x*$"])


def _strings() -> SearchStrategy[dict[str, Any]]:
    lengths = st.tuples(st.integers(0, 4), st.integers(4, 9)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[1]}
    )
    formats = _FORMATS.map(lambda name: {"type": "string", "format": name})
    patterns = _PATTERNS.map(lambda pattern: {"type": "string", "pattern": pattern})
    return st.one_of(lengths, formats, patterns)


def _numbers() -> SearchStrategy[dict[str, Any]]:
    bounds = st.tuples(st.integers(-50, 50), st.integers(0, 900))
    integers = bounds.map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    )
    numbers = bounds.map(
        lambda pair: {"type": "number", "minimum": pair[0], "exclusiveMaximum": sum(pair) + 1}
    )
    multiples = st.integers(2, 9).map(lambda step: {"type": "integer", "multipleOf": step})
    return st.one_of(integers, numbers, multiples)


def _leaves() -> SearchStrategy[dict[str, Any]]:
    values = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text("ab é", max_size=4))
    enums = st.lists(values, min_size=1, max_size=4).map(lambda found: {"enum": found})
    constants = values.map(lambda value: {"const": value})
    kinds = st.sampled_from(["boolean", "null"]).map(lambda kind: {"type": kind})
    return st.one_of(_strings(), _numbers(), enums, constants, kinds)


def _arrays(inner: SearchStrategy[dict[str, Any]]) -> SearchStrategy[dict[str, Any]]:
    return st.tuples(inner, st.integers(0, 2), st.integers(2, 4)).map(
        lambda parts: {
            "type": "array",
            "items": parts[0],
            "minItems": parts[1],
            "maxItems": parts[2],
        }
    )


def _objects(inner: SearchStrategy[dict[str, Any]]) -> SearchStrategy[dict[str, Any]]:
    @st.composite
    def build(draw: st.DrawFn) -> dict[str, Any]:
        properties = draw(st.dictionaries(_NAMES, inner, min_size=1, max_size=4))
        required = [name for name in properties if draw(st.booleans())]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    return build()


def _inside(inner: SearchStrategy[dict[str, Any]]) -> SearchStrategy[dict[str, Any]]:
    choices = st.lists(inner, min_size=1, max_size=3).map(lambda found: {"anyOf": found})
    return st.one_of(_objects(inner), _objects(inner), _arrays(inner), choices)


#: All schemas; the outermost is an object, as clients send it.
SCHEMAS = _objects(st.recursive(_leaves(), _inside, max_leaves=6))
