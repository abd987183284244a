"""Grammars from what clients write."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson

from jitney.engine.types import Grammar

#: What a grammar in Lark has and one in GBNF has not: its directives, or a rule named start.
_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:(?!:=))")

#: Any object of JSON.
ANY_OBJECT = Grammar("json_object")


def json_schema(schema: dict[str, Any] | bool) -> Grammar:
    """Whatever a JSON schema allows."""
    return Grammar("json_schema", orjson.dumps(schema).decode())


def choice(texts: Sequence[str]) -> Grammar:
    """One of these texts."""
    return Grammar("choice", orjson.dumps(list(texts)).decode())


def grammar(text: str) -> Grammar:
    """A grammar in Lark or in GBNF (llama.cpp's), whichever it looks like."""
    if _LARK.search(text):
        return Grammar("lark", text)
    return Grammar("gbnf", text)
