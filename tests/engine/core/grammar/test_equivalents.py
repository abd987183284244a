"""Keywords said in terms of others: the same values may be written, no more and no fewer. What is
right is decided by jsonschema.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from grammars import may_be_written
from jsonschema import Draft202012Validator

COLOURS = {"enum": ["red", "green", "blue"]}
ABC = {"type": "object", "properties": {name: {"type": "integer"} for name in "abc"}}
CLOSED = ABC | {"additionalProperties": False}


def _arrays(values: str, most: int) -> Iterator[Any]:
    for size in range(most + 1):
        yield from map(list, itertools.product(values.split(), repeat=size))


def _objects(names: str, value: Any) -> Iterator[Any]:
    for size in range(4):
        for chosen in itertools.combinations(names.split(), size):
            yield dict.fromkeys(chosen, value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": COLOURS, "uniqueItems": True},
        {"type": "array", "items": COLOURS, "uniqueItems": True, "minItems": 1, "maxItems": 2},
        {
            "type": "array",
            "items": {"$ref": "#/$defs/C"},
            "uniqueItems": True,
            "$defs": {"C": COLOURS},
        },
        {
            "type": "array",
            "items": {"anyOf": [{"const": "red"}, {"const": "green"}, {"const": "red"}]},
            "uniqueItems": True,
        },
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1},
        {"type": "array", "items": {"not": {}}},
        {"type": "array", "prefixItems": [COLOURS], "unevaluatedItems": {"const": "red"}},
    ],
)
def test_arrays(schema: dict[str, Any]):
    _check(schema, _arrays("red green blue cyan", 4))


def test_booleans_and_null_are_few_too():
    schema = {"type": ["array", "null"], "items": {"type": "boolean"}, "uniqueItems": True}
    _check(schema, [None, [], [True], [True, False], [False, True], [True, True], [0]])


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"type": "string"}},
        {"propertyNames": True, "additionalProperties": {"type": "integer"}},
        {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        {"propertyNames": {"enum": ["a", "b"]}, "required": ["a", "b"]},
        {"propertyNames": {"enum": ["b", "x"]}, "properties": {"a": {}, "b": {"type": "integer"}}},
        {"propertyNames": {"$ref": "#/$defs/N"}, "$defs": {"N": {"enum": ["a", "x"]}}},
        {"propertyNames": {"const": "c"}},
        {"propertyNames": {"pattern": "^[ab]"}, "additionalProperties": {"type": "integer"}},
        {"propertyNames": {"minLength": 2, "maxLength": 3}},
        {"propertyNames": False},
        {"propertyNames": {"maxLength": 1}, "unevaluatedProperties": {"type": "integer"}},
        {"properties": {"a": {}}, "unevaluatedProperties": False},
        {"additionalProperties": {"not": {}}, "properties": {"a": {}, "b": {"not": {}}}},
        CLOSED | {"minProperties": 2},
        CLOSED | {"maxProperties": 2},
        CLOSED | {"minProperties": 1, "maxProperties": 2, "required": ["c"]},
        CLOSED | {"minProperties": 2, "maxProperties": 2},
        CLOSED | {"minProperties": 3},
        CLOSED | {"minProperties": 1},
        {"not": {"not": {}}, "type": "object"},
    ],
)
def test_objects(schema: dict[str, Any]):
    _check({"type": "object"} | schema, [*_objects("a b c xy", 1), *_objects("a b c xy", "s")])


@pytest.mark.parametrize(
    "schema",
    [{"not": {}}, {"properties": {"a": {"not": {}}}, "required": ["a"]}],
)
def test_what_can_never_be_is_refused(schema: dict[str, Any]):
    from jitney.engine.common.errors import RequestError

    with pytest.raises(RequestError, match="Unsatisfiable"):
        may_be_written({"type": "object"} | schema)


def _check(schema: dict[str, Any], instances: Any) -> None:
    validator = Draft202012Validator(schema)
    listed = list(instances)
    texts = [json.dumps(instance) for instance in listed]
    found = may_be_written(schema, *texts)
    wrong = {
        text: is_right
        for text, instance, is_right in zip(texts, listed, found, strict=True)
        if is_right != validator.is_valid(instance)
    }
    assert not wrong
