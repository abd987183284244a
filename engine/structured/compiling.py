"""From a grammar to llguidance's form of it, and what is wrong with one that has none.

All of it is bounded by llguidance's own limits; how long it may take is for the caller to see to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.gbnf_to_lark import gbnf_to_lark

from jitney.engine.errors import RequestError
from jitney.engine.structured.schema_errors import place_of_error
from jitney.engine.types import Grammar

#: Most characters of llguidance's own account of an error that are repeated.
_MOST_REASON = 200
#: Between two tokens of JSON. Without a bound a model can write blanks for ever; this much indents
#: eight levels by four.
_WHITESPACE = r"[ \t\n\r]{0,33}"
#: How JSON is written, whatever a schema's own "x-guidance" says.
_JSON_OPTIONS: Any = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
}
#: llguidance's defaults but for these. An error is not to show the parser's state, and a matcher
#: not to keep more than some 40 MB of a lexer's states (2 kB each).
_LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
_ANY_OBJECT = '{"type":"object"}'
#: How llguidance begins the account of a limit that was met.
_LIMIT_WORDS = ("too many", "too large", "too big", "limit", "fuel", "toocomplex", "too complex")


def token_trie(tokenizer: str, vocab_size: int, end_ids: Iterable[int]) -> LLTokenizer:
    """The tokens by their bytes. Takes half a second, and the interpreter, for 50,000 tokens.

    tokenizer: as the `tokenizers` library writes it (JSON). vocab_size: of the model, which may
    have more tokens than the tokenizer. end_ids: tokens that end a text; a model without one must
    not be let end by a token. Raises ValueError for a tokenizer that llguidance cannot read.
    """
    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(end_ids) or [0])


def in_lark(grammar: Grammar) -> Grammar:
    """The grammar, in Lark if it was in GBNF. Raises RequestError."""
    if grammar.kind != "gbnf":
        return grammar
    try:
        return Grammar("lark", gbnf_to_lark(grammar.text))
    except RecursionError:
        raise _bad_grammar("too complex: its rules are too deep") from None
    except Exception as error:  # its own is no subclass of anything
        raise _bad_grammar(str(error) or type(error).__name__) from None


def new_matcher(grammar: Grammar, trie: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of a text. Raises RequestError for a grammar that has none."""
    matcher = LLMatcher(trie, _source(in_lark(grammar)), log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise _refused(grammar, matcher.get_error())
    return matcher


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
        return _bad_grammar(reason)
    place = place_of_error(orjson.loads(grammar.text), schema_error)
    return _bad_grammar(f"at {place}: {reason}")


def schema_error(schema: Any) -> str:
    """What is wrong with a JSON schema; "" if nothing is."""
    source = _json_source(orjson.dumps(schema).decode())
    is_error, messages = LLMatcher.validate_grammar_with_warnings(source, None, limits=_LIMITS)
    return messages[0] if is_error else ""


def _bad_grammar(reason: str) -> RequestError:
    line = " ".join(reason.split())
    code = "invalid_value"
    if any([words in line.lower() for words in _LIMIT_WORDS]):
        code = "grammar_too_complex"
    if len(line) > _MOST_REASON:
        line = line[:_MOST_REASON] + "..."
    return RequestError(f"the grammar cannot be used: {line}", code=code)
