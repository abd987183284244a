"""Grammars and schemas without a finite sentence are refused, and no others."""

from __future__ import annotations

from random import Random

import pytest
from grammars import BYTES

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.core.grammar.compiling import checked
from jitney.engine.core.grammar.grammar import schema_grammar
from jitney.engine.core.grammar.terms import Terms
from jitney.engine.server.chat.grammar_fields import text_grammar

ITSELF: JsonDict = {"$ref": "#/$defs/node"}
REQUIRED: JsonDict = {"type": "object", "properties": {"next": ITSELF}, "required": ["next"]}


def of_nodes(node: JsonDict) -> JsonDict:
    return {"$defs": {"node": node}, "type": "object", "properties": {"a": ITSELF}}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('root ::= "a" root', "root"),
        ('root ::= "a" item\nitem ::= "b" item | "c" item', "item"),
        ('root ::= "x" (item | root)\nitem ::= "(" root ")"', "root"),
        ('start: "a" start', "start"),
        ('start: x+ // "x"\nx[capture]: /[a:]/ x | "y" x', "x"),
        ('start: x{2,3}\nx: %json {"type": "integer"} x', "x"),
    ],
)
def test_a_grammar_without_a_finite_sentence_is_refused_by_its_rule(text: str, rule: str):
    with pytest.raises(RequestError, match=rf"no finite sentence.* rule {rule} never ends$"):
        checked(text_grammar(text), BYTES)


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a" root | "b"',
        'root ::= ("a" root)*',
        'root ::= "a" root?',
        'root ::= "a" ("b" root){0,2}',
        'root ::= "a" | "b" item\nitem ::= "c" item',
        'start: [x] "."\nx: "a" x',
        'start: x\nx: "a: x" | /b: x/ x',
        'start: A\nA: "a"+',
    ],
)
def test_a_grammar_with_one_is_taken(text: str):
    checked(text_grammar(text), BYTES)


def test_of_made_up_grammars_those_are_refused_that_derive_nothing():
    """What a grammar of n rules derives at all it derives without a rule inside of itself."""
    chance, refused = Random(35), 0
    names = ["root", "b", "c", "d"]
    for _ in range(200):
        rules = {
            name: [
                [chance.choice(['"x"', *names]) for _ in range(chance.randint(1, 3))]
                for _ in range(chance.randint(1, 2))
            ]
            for name in names
        }
        rules["root"] = [['"r"', *parts] for parts in rules["root"]]

        def derives(name: str, above: frozenset[str]) -> bool:
            if name not in rules:  # noqa: B023
                return True
            inside = above | {name}
            return name not in above and any(
                all(derives(part, inside) for part in parts)
                for parts in rules[name]  # noqa: B023
            )

        text = "\n".join(
            f"{name} ::= {' | '.join(map(' '.join, found))}" for name, found in rules.items()
        )
        if derives("root", frozenset()):
            checked(text_grammar(text), BYTES)
        else:
            refused += 1
            with pytest.raises(RequestError, match=r"no finite sentence|matches no text"):
                checked(text_grammar(text), BYTES)
    assert 20 < refused < 180


@pytest.mark.parametrize(
    "node",
    [
        REQUIRED,
        {"type": "array", "items": ITSELF, "minItems": 1},
        {"anyOf": [REQUIRED, {"type": "array", "prefixItems": [ITSELF], "minItems": 1}]},
        {"allOf": [{"type": "object"}, REQUIRED]},
    ],
)
def test_a_schema_whose_values_have_another_one_inside_is_refused(node: JsonDict):
    schema = of_nodes(node) | {"required": ["a"]}
    with pytest.raises(RequestError, match="at #/\\$defs/node: no value is finite"):
        checked(schema_grammar(schema), BYTES)
    assert checked(schema_grammar(schema, Terms(strict=False)), BYTES).left_out == ["#"]
    assert not checked(schema_grammar(of_nodes(node)), BYTES).left_out, "nobody needs one"


@pytest.mark.parametrize(
    "node",
    [
        {"type": "object", "properties": {"next": ITSELF}},
        {"type": "array", "items": ITSELF},
        {"anyOf": [REQUIRED, {"type": "null"}]},
        {"type": ["object", "null"], "properties": {"next": ITSELF}, "required": ["next"]},
    ],
)
def test_a_schema_whose_values_may_end_is_taken(node: JsonDict):
    checked(schema_grammar(of_nodes(node) | {"required": ["a"]}), BYTES)
