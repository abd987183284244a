"""Reads and replaces the JSON schemas of a grammar: a whole one, or those inside Lark."""

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
    """A grammar with replaced schemas."""

    grammar: Grammar
    #: JSON pointers to keywords that are not enforced.
    left_out: list[str]


def with_schemas(grammar: Grammar, enforce: Callable[[JsonDict], Enforced]) -> Embedded:
    """Replace each schema of a grammar by `enforce`'s result."""
    left_out: list[str] = []

    def replace(schema: JsonDict) -> JsonDict:
        enforced = enforce(schema)
        left_out.extend(enforced.left_out)
        return enforced.schema

    text = grammar.text
    if grammar.kind == "lark":
        text = _replace_in_lark(text, replace)
    elif grammar.kind == "json_schema":
        schema = orjson.loads(text)
        # llguidance requires an object.
        whole = schema if isinstance(schema, dict) else {"allOf": [schema]}
        text = orjson.dumps(replace(whole)).decode()
    return Embedded(Grammar(grammar.kind, text), left_out)


def schemas(grammar: Grammar) -> list[JsonDict]:
    """All JSON schemas of a grammar."""
    schemas: list[JsonDict] = []

    def note(schema: JsonDict) -> Enforced:
        schemas.append(schema)
        return Enforced(schema, [])

    with_schemas(grammar, note)
    return schemas


def writes_json(grammar: Grammar) -> bool:
    """Whether a grammar allows JSON by a schema."""
    if grammar.kind == "lark":
        return _SCHEMA.search(grammar.text) is not None
    return grammar.kind in ("json_object", "json_schema")


def _replace_in_lark(text: str, replace: Callable[[JsonDict], JsonDict]) -> str:
    """Replace the schemas of a Lark grammar; invalid JSON is unchanged."""
    parts: list[str] = []
    at = 0
    for rule in _SCHEMA.finditer(text):
        if rule.start() < at or _is_quoted(text, rule.start()):
            continue
        try:
            schema, end = _DECODER.raw_decode(text, rule.end())
        except (ValueError, RecursionError):
            continue
        parts += [text[at : rule.end()], json.dumps(replace(schema), ensure_ascii=False)]
        at = end
    return "".join([*parts, text[at:]])


def _is_quoted(text: str, at: int) -> bool:
    """Whether a position is inside a literal, which ends on its line."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return re.sub(r"\\.", "", line).count('"') % 2 == 1
