"""The JSON schemas in a grammar: a whole one, or those inside a grammar in Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

import orjson

from jitney.engine.common.requests import Grammar, JsonDict
from jitney.engine.core.grammar.enforcement import Enforced

#: A schema in Lark.
_SCHEMA = re.compile(r"%json\s*(?=\{)")
_DECODER = json.JSONDecoder()


class Embedded(NamedTuple):
    """A grammar with its schemas as something has made them."""

    grammar: Grammar
    #: Pointers to what its schemas say and it does not.
    left_out: list[str]


def with_schemas(grammar: Grammar, enforce: Callable[[JsonDict], Enforced]) -> Embedded:
    """A grammar with each of its schemas as `enforce` makes it."""
    left_out: list[str] = []

    def made(schema: JsonDict) -> JsonDict:
        enforced = enforce(schema)
        left_out.extend(enforced.left_out)
        return enforced.schema

    text = grammar.text
    if grammar.kind == "lark":
        text = _with_rules(text, made)
    elif grammar.kind == "json_schema":
        schema = orjson.loads(text)
        whole = schema if isinstance(schema, dict) else {"allOf": [schema]}  # llguidance's wish
        text = orjson.dumps(made(whole)).decode()
    return Embedded(Grammar(grammar.kind, text), left_out)


def schemas(grammar: Grammar) -> list[JsonDict]:
    """All JSON schemas of a grammar."""
    found: list[JsonDict] = []

    def note(schema: JsonDict) -> Enforced:
        found.append(schema)
        return Enforced(schema, [])

    with_schemas(grammar, note)
    return found


def writes_json(grammar: Grammar) -> bool:
    """Whether there is JSON in what a grammar allows, in the form that schemas give it."""
    if grammar.kind == "lark":
        return _SCHEMA.search(grammar.text) is not None
    return grammar.kind in ("json_object", "json_schema")


def _with_rules(text: str, made_of: Callable[[JsonDict], JsonDict]) -> str:
    """A grammar in Lark with schemas as `made_of` makes them; what is no JSON stays as it is."""
    made: list[str] = []
    at = 0
    for found in _SCHEMA.finditer(text):
        if found.start() < at or _is_quoted(text, found.start()):
            continue
        try:
            schema, end = _DECODER.raw_decode(text, found.end())
        except (ValueError, RecursionError):
            continue
        made += [text[at : found.end()], json.dumps(made_of(schema), ensure_ascii=False)]
        at = end
    return "".join([*made, text[at:]])


def _is_quoted(text: str, at: int) -> bool:
    """Whether a place stands in a literal, which ends in the line where it began."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return re.sub(r"\\.", "", line).count('"') % 2 == 1
