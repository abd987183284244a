"""From a grammar to llguidance's form of it, and what is wrong with one that has none.

All of it is bounded by llguidance's own limits; how long it may take is for the caller to see to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.gbnf_to_lark import gbnf_to_lark

from jitney.engine.errors import RequestError
from jitney.engine.structured.refusals import bad_grammar
from jitney.engine.structured.schema_rules import children, kept_to
from jitney.engine.types import Grammar, JsonDict, JsonValue

#: Between two tokens of JSON. Without a bound a model can write blanks for ever; this much indents
#: eight levels by four.
_WHITESPACE = r"[ \t\n\r]{0,33}"
#: Not \uXXXX: the name of a property, escaped, would not be known for that of the schema.
_ESCAPES = 'nrbtf\\"'
#: How JSON is written, whatever a schema's own "x-guidance" says.
_JSON_OPTIONS: Any = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": _ESCAPES,
}
#: llguidance's defaults but for these. An error is not to show the parser's state, and a matcher
#: not to keep more than some 40 MB of a lexer's states (2 kB each).
_LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
_ANY_OBJECT = '{"type":"object"}'
#: Schemas inside of a grammar in Lark, as those of tools' arguments are.
_SCHEMA = re.compile(r"%json\s*(?=\{)")
_DECODER = json.JSONDecoder()
#: Schemas looked at in all, and characters of the answer.
_MOST_LOOKS = 200
_MOST_PLACE = 120


def in_lark(grammar: Grammar) -> Grammar:
    """The grammar, in Lark if it was in GBNF. Raises RequestError."""
    if grammar.kind != "gbnf":
        return grammar
    try:
        return Grammar("lark", gbnf_to_lark(grammar.text))
    except RecursionError:
        raise bad_grammar("too complex: its rules are too deep") from None
    except Exception as error:  # its own is no subclass of anything
        raise bad_grammar(str(error) or type(error).__name__) from None


def new_matcher(grammar: Grammar, trie: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of a text. Raises RequestError for a grammar that has none."""
    ready = _as_kept(in_lark(grammar))
    matcher = LLMatcher(trie, _source(ready), log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise _refused(ready, matcher.get_error())
    return matcher


def _as_kept(grammar: Grammar) -> Grammar:
    """A grammar with its schemas as llguidance keeps to them. Raises RequestError."""
    if grammar.kind == "lark":
        return Grammar("lark", _with_schemas(grammar.text, _embedded))
    if grammar.kind != "json_schema":
        return grammar
    schema = kept_to(orjson.loads(grammar.text))
    return Grammar("json_schema", orjson.dumps(schema).decode())


def _with_schemas(text: str, kept_to: Callable[[JsonDict], JsonDict]) -> str:
    """A grammar in Lark, with each of its schemas as `kept_to` makes it. What is no JSON is left
    for llguidance to refuse.
    """
    made: list[str] = []
    at = 0
    for found in _SCHEMA.finditer(text):
        if found.start() < at or _is_quoted(text, found.start()):
            continue
        try:
            schema, end = _DECODER.raw_decode(text, found.end())
        except (ValueError, RecursionError):
            continue
        made += [text[at : found.end()], json.dumps(kept_to(schema), ensure_ascii=False)]
        at = end
    return "".join([*made, text[at:]])


def _is_quoted(text: str, at: int) -> bool:
    """Whether a place stands in a literal, which ends in the line where it began."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return re.sub(r"\\.", "", line).count('"') % 2 == 1


def _embedded(schema: JsonDict) -> JsonDict:
    """A schema that stands in a grammar in Lark, where its own "x-guidance" says how it is
    written.
    """
    made = kept_to(schema)
    assert isinstance(made, dict)  # as the schema is
    style = made.get("x-guidance", {})
    if isinstance(style, dict):
        made["x-guidance"] = style | {"json_allowed_escapes": _ESCAPES}
    return made


def _source(grammar: Grammar) -> str:
    """llguidance's form of a grammar, valid or not."""
    match grammar.kind:
        case "json_object":
            return _json_source(_ANY_OBJECT)
        case "json_schema":
            return _json_source(grammar.text)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            return grammar_from("choice", grammar.text)
    return LLMatcher.grammar_from_lark(grammar.text)


def _json_source(schema: str) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)


def _refused(grammar: Grammar, reason: str) -> RequestError:
    if grammar.kind != "json_schema":
        return bad_grammar(reason)
    place = _place_of_error(orjson.loads(grammar.text), _schema_error)
    return bad_grammar(f"at {place}: {reason}")


def _schema_error(schema: JsonValue) -> str:
    """What is wrong with a JSON schema, an object or a boolean; "" if nothing is."""
    if isinstance(schema, bool):
        schema = {"allOf": [schema]}
    source = _json_source(orjson.dumps(schema).decode())
    is_error, messages = LLMatcher.validate_grammar_with_warnings(source, None, limits=_LIMITS)
    return messages[0] if is_error else ""


def _place_of_error(schema: JsonValue, error_of: Callable[[JsonValue], str]) -> str:
    """A pointer to the innermost schema that is wrong by itself in the same way, such as
    "#/properties/a". error_of: what is wrong with a schema, "" if nothing is.
    """
    search = _Search(error_of, wanted=error_of(schema), shared=_shared(schema))
    path = ["#"]
    inner = schema
    while (found := search.culprit_in(inner)) is not None:
        steps, inner = found
        path += steps
    return _shortened("/".join(path))


@dataclass(slots=True)
class _Search:
    #: What the compiler says of a schema; empty: nothing is wrong.
    error_of: Callable[[JsonValue], str]
    #: The error that is looked for.
    wanted: str
    #: What a part of the schema may refer to.
    shared: dict[str, JsonValue]
    #: Schemas that may still be tried.
    looks_left: int = _MOST_LOOKS

    def culprit_in(self, schema: JsonValue) -> tuple[list[str], JsonValue] | None:
        """The first schema directly inside one that is wrong by itself, and the steps to it."""
        for steps, child in children(schema):
            if not self.looks_left:
                return None
            self.looks_left -= 1
            alone = self.shared | child if isinstance(child, dict) else child
            if self.error_of(alone) == self.wanted:
                return steps, child
        return None


def _shared(schema: JsonValue) -> dict[str, JsonValue]:
    if not isinstance(schema, dict):
        return {}
    return {name: schema[name] for name in ("$defs", "definitions", "$schema") if name in schema}


def _shortened(place: str) -> str:
    if len(place) <= _MOST_PLACE:
        return place
    return place[: _MOST_PLACE - 3] + "..."
