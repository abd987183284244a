"""Makes grammars of schemas, choices and texts from clients."""

from __future__ import annotations

import re
from collections.abc import Sequence

import orjson

from jitney.engine.common.requests import Grammar, JsonDict
from jitney.engine.core.grammar.refusals import bad_grammar
from jitney.engine.core.grammar.terms import Terms

#: Found in Lark but not in GBNF: a directive, or a rule named start.
_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:(?!:=))")


def schema_grammar(schema: JsonDict | bool, terms: Terms | None = None) -> Grammar:
    """A grammar of a JSON schema. Raises RequestError if it is no JSON, or has integers of more
    than 64 bits.

    terms: how to enforce it; None: the schema's own terms, else strictly.
    """
    if terms is not None and isinstance(schema, dict):
        schema = terms.with_schema(schema)
    try:
        return Grammar("json_schema", orjson.dumps(schema).decode())
    except TypeError as error:
        raise bad_grammar(f"the schema cannot be written as JSON: {error}") from None


def choice_grammar(texts: Sequence[str]) -> Grammar:
    """A grammar that matches one of these texts."""
    return Grammar("choice", orjson.dumps(list(texts)).decode())


def text_grammar(text: str) -> Grammar:
    """A grammar in Lark or in GBNF (llama.cpp's), guessed from its text."""
    if _LARK.search(text):
        return Grammar("lark", text)
    return Grammar("gbnf", text)
