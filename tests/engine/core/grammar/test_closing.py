"""Objects that name their properties and say nothing of others have no others; where closing one
could exclude what the whole schema allows, it stays open.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from grammars import BYTES, accepts, written
from hypothesis import given, settings
from hypothesis import strategies as st
from schemas import SCHEMAS

from jitney.engine.core.grammar import grammar
from jitney.engine.core.grammar.closing import closed
from jitney.engine.core.grammar.compiling import new_matcher
from jitney.engine.core.grammar.terms import Terms

A = {"type": "object", "properties": {"a": {"type": "integer"}}}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}


def allows(schema: dict[str, Any], text: str) -> bool:
    matcher = new_matcher(grammar.schema_grammar(schema, Terms(closed=True)), BYTES)
    return accepts(matcher, text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (A, '{"x":1}'),
        ({"type": "array", "items": A}, '[{"x":1}]'),
        ({"type": "array", "prefixItems": [A]}, '[{"x":1}]'),
        ({"type": "object", "properties": {"o": A}}, '{"o":{"x":1}}'),
        ({"type": "object", "additionalProperties": A}, '{"o":{"x":1}}'),
        ({"anyOf": [A, {"type": "null"}], "title": "Maybe"}, '{"x":1}'),
        ({"oneOf": [B, {"type": "null"}]}, '{"b":1,"x":1}'),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}, "description": "d"}, '{"x":1}'),
        ({"allOf": [{"$ref": "#/definitions/A"}], "definitions": {"A": A}}, '{"x":1}'),
        ({"type": "object", "properties": {}}, '{"x":1}'),
        (A | {"minProperties": 1}, '{"a":1,"x":1}'),
    ],
)
def test_an_object_that_names_its_properties_has_no_others(schema: dict[str, Any], text: str):
    assert not allows(schema, text)
    jsonschema.validate(json.loads(text), schema)  # which the schema itself allows


DERIVED = {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object"}, '{"x":1}'),
        (A | {"additionalProperties": True}, '{"x":1}'),
        (A | {"additionalProperties": {"type": "integer"}}, '{"x":1}'),
        (A | {"patternProperties": {"^x": {}}}, '{"x":1}'),
        (A | {"required": ["x"]}, '{"x":1}'),
        (A | {"required": ["a"], "minProperties": 2}, '{"a":1,"x":1}'),
        (DERIVED, '{"a":1,"b":1}'),
        (A | {"anyOf": [B, {"required": ["c"]}]}, '{"a":1,"b":1}'),
        (A | {"$ref": "#/$defs/B", "$defs": {"B": B}}, '{"a":1,"b":1}'),
        (
            {"anyOf": [DERIVED["allOf"][0], DERIVED], "$defs": {"A": A}},
            '{"a":1,"b":1}',
        ),
        (
            {"allOf": [{"properties": {"o": A}}, {"properties": {"o": B}}]},
            '{"o":{"a":1,"b":1}}',
        ),
    ],
)
def test_an_object_stays_open_where_others_may_be_meant(schema: dict[str, Any], text: str):
    assert allows(schema, text)


def test_what_the_client_wrote_is_not_changed():
    schema = {"type": "object", "properties": {"o": dict(A)}}
    assert closed(schema)["properties"]["o"]["additionalProperties"] is False
    assert schema == {"type": "object", "properties": {"o": A}}


def _opened(schema: Any) -> Any:
    """A schema without a word on further properties, as libraries write it."""
    if isinstance(schema, list):
        return [_opened(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _opened(value) for key, value in schema.items() if key != "additionalProperties"}


@settings(max_examples=50, derandomize=True)
@given(SCHEMAS, st.integers(0, 2**32))
def test_closing_gives_back_what_was_left_unsaid(schema: dict[str, Any], seed: int):
    assert closed(_opened(schema)) == schema
    matcher = new_matcher(grammar.schema_grammar(_opened(schema), Terms(closed=True)), BYTES)
    jsonschema.validate(json.loads(written(matcher, random.Random(seed))), schema)
