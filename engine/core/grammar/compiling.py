"""Compiles grammars with llguidance, within its limits; callers limit the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.gbnf_to_lark import gbnf_to_lark
from msgspec.structs import replace

from jitney.engine.common.requests import Grammar, JsonDict, JsonValue
from jitney.engine.core.grammar.embedding import Embedded, schemas, with_schemas, writes_json
from jitney.engine.core.grammar.enforcement import Enforced, Enforcer, bare, by_rules
from jitney.engine.core.grammar.finite import endless_rule
from jitney.engine.core.grammar.refusals import bad_grammar
from jitney.engine.core.grammar.terms import Terms

#: Between two tokens of JSON: a blank, or a line end and an indentation of up to eight levels of
#: four. Unbounded, a model could write blanks forever.
_WHITESPACE = r"[ \t]?(\r?\n( {0,32}|\t{0,8}))?"
#: Without \uXXXX: a property's name with such an escape would not match the schema's.
_ESCAPES = 'nrbtf\\"'
#: Options of JSON that a schema's "x-guidance" cannot change.
_JSON_OPTIONS: Any = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": _ESCAPES,
}
#: A matcher keeps at most about 40 MB of lexer states (2 kB each), and errors do not show the
#: parser's state.
_LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
_ANY_OBJECT = '{"type":"object"}'


def _in_lark(grammar: Grammar) -> Grammar:
    """Translate GBNF to Lark; other grammars are unchanged. Raises RequestError."""
    if grammar.kind != "gbnf":
        return grammar
    try:
        return Grammar("lark", gbnf_to_lark(grammar.text))
    except RecursionError:
        raise bad_grammar("too complex: its rules are too deep") from None
    except Exception as error:  # the library's errors have no common base
        raise bad_grammar(str(error) or type(error).__name__) from None


def new_matcher(grammar: Grammar, trie: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of a text. Raises RequestError if the grammar cannot be used."""
    return _Compiler(trie).compiled(grammar)[1]


def checked(grammar: Grammar, trie: LLTokenizer) -> Embedded:
    """The grammar with schemas prepared for `new_matcher`. Raises RequestError if it cannot be
    used, or matches no finite text.
    """
    prepared, matcher = _Compiler(trie).compiled(grammar)
    first_mask(matcher)
    rule = endless_rule(prepared.grammar.text) if prepared.grammar.kind == "lark" else ""
    if rule:
        name = "root" if (grammar.kind, rule) == ("gbnf", "start") else rule
        raise bad_grammar(f"it has no finite sentence: the rule {name} never ends")
    return prepared


def first_mask(matcher: LLMatcher) -> np.ndarray:
    """The mask of first tokens, int32 [at least ceil(V / 32)], cached for copies of the matcher.
    Raises RequestError if there are none or computing them exceeds a limit.
    """
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise bad_grammar(matcher.get_error())
    return np.frombuffer(mask, np.int32)


@dataclass(frozen=True, slots=True)
class _Compiler:
    trie: LLTokenizer

    def compiled(self, grammar: Grammar) -> tuple[Embedded, LLMatcher]:
        """(the grammar as compiled, its matcher). Raises RequestError if it cannot be used."""
        grammar = _in_lark(grammar)
        if grammar.ready or not writes_json(grammar) or grammar.kind == "json_object":
            matcher = self._matcher(grammar)
            if matcher.is_error():
                raise bad_grammar(matcher.get_error())
            return Embedded(grammar, []), matcher
        error = ""
        for enforce in (by_rules, *_ever_weaker(Enforcer(self._schema_error), grammar)):
            text, left_out = with_schemas(grammar, enforce)
            if grammar.kind == "lark":
                text = with_schemas(text, _in_our_style).grammar
            ready = replace(text, ready=True)
            matcher = self._matcher(ready)
            error = matcher.get_error()
            if not error:
                return Embedded(ready, left_out), matcher
        if any([Terms.split(schema)[0].name for schema in schemas(grammar)]):  # the text is ours
            error = "the schemas of all tools together are too complex"
        raise bad_grammar(error)

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        return LLMatcher(self.trie, _source(grammar), log_level=0, limits=_LIMITS)

    def _schema_error(self, schema: JsonValue) -> str:
        """llguidance's error for a JSON schema, or ""."""
        grammar = Grammar("json_schema", orjson.dumps(schema).decode())
        try:
            return self._matcher(grammar).get_error()
        except BaseException as error:  # a Rust panic, or out of memory
            return f"too complex: {type(error).__name__}"


def _ever_weaker(enforcer: Enforcer, grammar: Grammar) -> Iterator[Callable[[JsonDict], Enforced]]:
    """Ever weaker ways to enforce schemas: first all that llguidance supports of each, then without
    the larger half of the non-strict ones, then without all non-strict ones.
    """
    enforced = {_text(schema): enforcer.enforced(schema) for schema in schemas(grammar)}

    def enforce_below(size: int) -> Callable[[JsonDict], Enforced]:
        def enforce(schema: JsonDict) -> Enforced:
            text = _text(schema)
            is_kept = len(text) < size or Terms.split(schema)[0].strict
            return enforced[text] if is_kept else bare(schema)

        return enforce

    sizes = sorted([len(text) for text in enforced])
    for size in (sizes[-1] + 1, sizes[len(sizes) // 2], 0):
        yield enforce_below(size)


def _text(schema: JsonDict) -> bytes:
    return orjson.dumps(schema)


def _in_our_style(schema: JsonDict) -> Enforced:
    """A schema inside a Lark grammar with our "x-guidance" where the client sets none."""
    style = schema.get("x-guidance", {})
    if not isinstance(style, dict):
        return Enforced(schema, [])  # llguidance refuses it
    ours: JsonDict = {"json_allowed_escapes": _ESCAPES}
    if style.get("whitespace_flexible") is not False:
        ours["whitespace_pattern"] = style.get("whitespace_pattern", _WHITESPACE)
    return Enforced(schema | {"x-guidance": style | ours}, [])


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
