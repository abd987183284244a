"""Schemas that llguidance would take for less than they say: what may be written under each, byte
by byte, and what is refused by name.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from grammars import BYTES, may_be_written

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import Grammar
from jitney.engine.core.grammar.compiling import new_matcher
from jitney.engine.core.grammar.enforcement import by_rules

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"


def refusal(schema: Any) -> str:
    with pytest.raises(RequestError) as caught:
        may_be_written(schema)
    return str(caught.value)


def test_schemas_in_a_grammar_are_kept_to_as_well():
    text = 'start: "say %json {}" %json {"properties": {"a": {"format": "date"}}} /%x/ TAIL\nTAIL: '
    matcher = new_matcher(Grammar("lark", text + '"."'), BYTES)
    for said, may_be in (
        ('{"a":"2024-02-29"}', True),
        ('{"a":"2023-02-29"}', False),
        (r'{"\u0061":"2023-02-29"}', False),
    ):
        place = matcher.deep_copy()
        data = list(f"say %json {{}}{said}%x.".encode())
        assert (place.try_consume_tokens(data) == len(data)) is may_be
    with pytest.raises(RequestError, match="at #: keywords that cannot be enforced"):
        new_matcher(Grammar("lark", 'start: %json {"contains": {}}'), BYTES)
    with pytest.raises(RequestError, match="at #: const"):
        new_matcher(Grammar("lark", 'start: %json {"const": 9007199254740993}'), BYTES)


def test_a_property_cannot_be_written_under_an_escaped_name():
    for schema in (
        {"properties": {"age": {"type": "integer"}}},
        {"properties": {"age": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        {"patternProperties": {"^a": {"type": "integer"}}},
    ):
        texts = ('{"age":"x"}', r'{"\u0061ge":"x"}', '{"age":1}', '{"name":"x"}')
        assert may_be_written(schema, *texts) == [False, False, True, True]
    assert may_be_written({"properties": {"ä": False}}, '{"ä":1}', r'{"\u00e4":1}') == [False] * 2


def test_texts_have_the_short_escapes_and_any_character():
    texts = (r'"a\n\t\"\\"', '"é🐲"', '"a\nb"')
    assert may_be_written({"type": "string"}, *texts) == [True, True, False]


def test_what_only_an_escape_can_write_is_refused():
    for schema in ({"const": "\0"}, {"enum": ["a\x7f", "b"]}, {"properties": {"\x07": True}}):
        assert "at #: control characters" in refusal(schema)
    assert may_be_written({"const": "a\tb"}, '"a\\tb"') == [True]


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        ("date", ["2024-02-29", "2000-02-29", "2023-04-30"], ["2023-02-29", "1900-02-29"]),
        ("date", ["1999-12-31", "0004-02-29"], ["2023-04-31", "2023-13-01", "0000-01-01"]),
        ("time", ["23:59:59Z", "00:00:00.5+05:30"], ["23:58:60Z", "24:00:00Z", "10:00:00"]),
        ("date-time", ["2024-02-29T01:02:03Z"], ["2023-02-29T01:02:03Z", "2024-02-29 01:02:03Z"]),
        ("date-time", ["1998-12-31t23:59:59z"], ["1998-12-31T22:59:60Z"]),
    ],
)
def test_dates_and_times_are_of_the_calendar(format: str, right: list[str], wrong: list[str]):
    texts = [json.dumps(text) for text in right + wrong]
    wanted = [True] * len(right) + [False] * len(wrong)
    assert may_be_written({"format": format}, *texts) == wanted
    assert may_be_written({"format": format, "pattern": "[0-9]"}, *texts) == wanted
    both = {"format": format, "pattern": "[0-9]", "allOf": [{"minLength": 2}]}
    assert may_be_written(both, *texts) == wanted
    assert may_be_written({"format": format, "type": ["string", "null"]}, "null") == [True]


def test_the_names_of_patterns_are_patterns_too():
    schema = {"patternProperties": {r"^\S$": {"type": "integer"}}, "additionalProperties": False}
    assert may_be_written(schema, '{"a":1}', '{"\ufeff":1}') == [True, False]


def test_a_keyword_is_not_passed_over_for_the_draft_that_is_named():
    assert "const is a keyword since draft 6" in refusal({"$schema": DRAFT_4, "const": 5})
    closed = {"properties": {"a": {"unevaluatedProperties": False}}}
    assert "at #/properties/a: unevaluatedProperties" in refusal(closed | {"$schema": DRAFT_7})
    assert "prefixItems" in refusal({"$schema": DRAFT_2019, "prefixItems": [{"type": "null"}]})
    assert may_be_written({"$schema": DRAFT_7, "const": 5}, "5", "6") == [True, False]
    # A property of that name is none.
    assert may_be_written({"$schema": DRAFT_4, "properties": {"const": True}}, "{}") == [True]


def test_numbers_that_a_float_does_not_keep_are_refused():
    for keyword in ("const", "multipleOf"):
        assert f"{keyword}: 9007199254740993" in refusal({keyword: 2**53 + 1})
    assert "cannot be written as JSON" in refusal({"maximum": 10**30})
    assert "enum: 9007199254740993" in refusal({"enum": [1, [2**53 + 1]]})
    assert may_be_written({"const": 2**53}, str(2**53), str(2**53 + 1)) == [True, False]


@pytest.mark.parametrize("unsigned", [True, False])
@pytest.mark.parametrize("bits", [53, 62, 63])
def test_bounds_that_a_float_does_not_keep_lie_further_in(bits: int, unsigned: bool):
    """A little is lost, and no answer is out of bounds: of int64 some thousand values."""
    low, high = (0 if unsigned else -(2**bits) + 1), 2**bits - 1
    near = 2 ** max(1, bits - 51)
    bounds = {"type": "integer", "minimum": low, "maximum": high}
    inside = [low + near, high - near, 0, 7]
    outside = [low - 1, high + 1, 10 * high, -10 * high]
    texts = [str(number) for number in inside + outside]
    assert may_be_written(bounds, *texts) == [True] * 4 + [False] * 4
    beyond = {"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
    assert may_be_written(beyond, *texts) == [True] * 4 + [False] * 4


def test_names_that_could_be_written_twice_are_not_counted():
    assert "at #/items: minProperties" in refusal({"items": {"minProperties": 2}})
    one_more = {"minProperties": 2, "required": ["a"], "properties": {"a": True}}
    assert may_be_written(one_more, '{"a":1}', '{"a":1,"b":2}') == [False, True]


def test_a_choice_of_definitions_that_exclude_each_other():
    """As pydantic writes a union with a discriminator."""
    kinds = {
        name: {"type": "object", "required": ["kind"], "properties": {"kind": {"const": name}}}
        for name in ("cat", "dog")
    }
    both = [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]
    schema = {"oneOf": both, "$defs": kinds}
    assert may_be_written(schema, '{"kind":"dog"}', '{"kind":"cow"}') == [True, False]
    same = {"$defs": {"cat": True, "dog": True}, "oneOf": both}
    assert "oneOf is only possible where" in refusal(same)


def test_definitions_that_refer_to_each_other_are_read_to_an_end():
    tree = {"required": ["kids"], "properties": {"kids": {"$ref": "#/$defs/kids"}}}
    kids = {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}
    tree = tree | {"type": "object"}
    schema = {"$ref": "#/$defs/tree", "$defs": {"tree": tree, "kids": kids}}
    kept: Any = by_rules(schema).schema
    assert "$ref" not in kept["$defs"]["kids"]["oneOf"][1]
    assert may_be_written(schema, '{"kids":{"kids":null}}', '{"kids":1}') == [True, False]


def test_choices_that_would_grow_without_end_are_refused():
    definitions: dict[str, Any] = {"d0": {"type": "null"}}
    for number in range(1, 20):
        definitions[f"d{number}"] = {"oneOf": [{"$ref": f"#/$defs/d{number - 1}"}] * 3}
    with pytest.raises(RequestError) as caught:
        by_rules({"$defs": definitions, "$ref": "#/$defs/d19"})
    assert caught.value.info.code == "grammar_too_complex"
    deep: Any = {}
    for _ in range(3000):
        deep = {"items": deep}
    with pytest.raises(RequestError) as caught:
        by_rules(deep)
    assert caught.value.info.code == "grammar_too_complex"


@pytest.mark.parametrize("others", [5, None, "x", {"type": "string"}])
def test_a_format_beside_a_pattern_and_what_is_no_list_is_refused(others: Any):
    schema = {"type": "string", "format": "date", "pattern": "2", "allOf": others}
    assert "allOf" in refusal(schema)


def test_boolean_schemas():
    assert may_be_written(True, "1", '{"a":[]}') == [True, True]
    assert "schema is false" in refusal(False)
    assert may_be_written({"uniqueItems": False, "type": "array"}, "[1,1]") == [True]


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "null"}},
        {"uniqueItems": True},
        {"propertyNames": {"pattern": "^a", "maxLength": 3}},
        {"if": {}, "then": {"minLength": 2}},
        {"contains": {}, "minContains": 2},
        {"dependentRequired": {"a": ["b"]}},
        {"unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}]},
        {"$schema": DRAFT_7, "dependencies": {"a": ["b"]}},
    ],
)
def test_what_cannot_be_enforced_is_named(schema: dict[str, Any]):
    keyword = next(key for key in schema if key != "$schema")
    told = refusal({"items": schema})
    assert "at #/items: " in told and "cannot be enforced" in told and keyword in told


def test_definitions_that_nothing_refers_to_are_not_looked_at():
    assert may_be_written({"$defs": {"a": {"not": {"type": "null"}}}}, "null") == [True]


def test_unknown_formats_are_free():
    assert may_be_written({"type": "string", "format": "regex"}, '"("') == [True]
