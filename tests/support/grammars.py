"""A tokenizer of 40 tokens for the fake device; and texts that a grammar allows, generated or
checked byte by byte.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

from fakes import EOS, VOCAB, make_core
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jitney.engine.common.requests import Grammar
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.grammar import grammar
from jitney.engine.core.grammar.compiling import new_matcher

#: The character of each token id; token 0 ends a text.
CHARACTERS = 'abcdefghijklmnopqrstu0123456789{}[]":,-'
END = "<end>"
#: Texts that this tokenizer can write.
CODE = Grammar("regex", "[a-f]{3}-[0-9]{2,6}")
WORDS = Grammar("choice", '["no","nod","hello"]')


@cache
def tokenizer_json() -> str:
    """The tokenizer's JSON in the format of the `tokenizers` library."""
    assert (0, 1 + len(CHARACTERS)) == (EOS, VOCAB)
    vocabulary = {END: 0} | {character: id for id, character in enumerate(CHARACTERS, 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return tokenizer.to_str()


def core_with_grammars(**sizes: Any) -> EngineCore:
    """A core on the fake device with this tokenizer. sizes: see `make_core`."""
    core = make_core(**sizes)
    core.learn(tokenizer_json())
    return core


def text_of(tokens: list[int]) -> str:
    """The text of output tokens, without the one that ends it."""
    return "".join(CHARACTERS[token - 1] for token in tokens if token != EOS)


#: A tokenizer of single bytes.
BYTES = LLTokenizer("byte")
#: Bytes outside strings that bring an answer closer to its end, later ones more so.
_ENDING = b',"]}'
#: More allowed next bytes than this occur only inside a string.
_MANY = 40
#: Length in bytes after which `written` ends an answer.
_LONG = 150


def may_be_written(schema: Any, *texts: str) -> list[bool]:
    """Whether the schema allows each text as a complete answer."""
    matcher = new_matcher(grammar.schema_grammar(schema), BYTES)
    return [accepts(matcher, text) for text in texts]


def accepts(matcher: LLMatcher, text: str) -> bool:
    """Whether a grammar allows a text as a complete answer."""
    place = matcher.deep_copy()
    data = list(text.encode())
    return place.try_consume_tokens(data) == len(data) and place.is_accepting()


def written(matcher: LLMatcher, random: Random) -> str:
    """A random text that a grammar allows, chosen byte by byte, short enough for tests."""
    place = matcher.deep_copy()
    data = bytearray()
    while not place.is_stopped():
        mask = place.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> (byte % 8) & 1]
        if not allowed or (place.is_accepting() and random.random() < 0.3):
            break
        byte = _chosen(allowed, random, is_long=len(data) > _LONG)
        assert place.consume_token(byte) and len(data) < 20 * _LONG, bytes(data[-80:])
        data.append(byte)
    return data.decode()


def _chosen(allowed: list[int], random: Random, *, is_long: bool) -> int:
    endings = b'"' if len(allowed) > _MANY else _ENDING
    ending = sorted(set(allowed) & set(endings), key=endings.index)
    if ending and is_long:
        return ending[-1]
    if ending and random.random() < 0.3:
        return random.choice(ending)
    common = [byte for byte in allowed if byte in b"ab"]
    if common and random.random() < 0.3:
        return random.choice(common)  # patterns that search for a word need these
    plain = [byte for byte in allowed if 32 < byte < 127]
    return random.choice(plain or allowed)
