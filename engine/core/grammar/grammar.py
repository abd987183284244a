"""Makes grammars of JSON schemas."""

from __future__ import annotations

import orjson

from jitney.engine.common.requests import Grammar, JsonDict
from jitney.engine.core.grammar.refusals import bad_grammar
from jitney.engine.core.grammar.terms import Terms


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
