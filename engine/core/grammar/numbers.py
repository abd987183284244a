"""Ends numbers in JSON: a schema allows any number of digits, and a small model may not stop.

After more digits than any float64 or int64 needs, if the number may end, tokens that begin with a
digit are removed from the mask. Answers still fit the schema.
"""

from __future__ import annotations

import re

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from jitney.engine.core.scheduler.plan import mask_words

#: JavaScript writes at most 21 digits without an exponent, small numbers with up to 5 zeros before
#: the 17 digits of a float64 (ECMA-262, Number::toString), and exponents of at most three digits.
_LONG = re.compile(rb"(?:[eE][+-]?[0-9]{3}|[0-9]{22})\Z")
#: Bytes of an answer's end that `_LONG` needs.
_MEMORY = 22


class NumberEnds:
    """Ends numbers, for one vocabulary."""

    def __init__(self, trie: LLTokenizer):
        self._trie = trie
        inside = _allowed("[0-9.eE+-]+", trie).view(np.uint8)
        #: Tokens that consist of characters of numbers.
        self._in_numbers = frozenset(
            np.flatnonzero(np.unpackbits(inside, bitorder="little")).tolist()
        )
        #: int32 [ceil(V / 32)] each: tokens that do not begin with a digit; tokens that can only
        #: continue a string: they begin with a quote, or a letter that no number has.
        self._no_digits = ~_allowed("[0-9](?s:.)*", trie)
        self._in_texts = _allowed('["A-DF-Za-df-z](?s:.)*', trie)

    def after(self, tail: bytes, tokens: list[int]) -> bytes:
        """The number at the end of an answer after these tokens, or b""."""
        for token in tokens:
            if token in self._in_numbers:
                tail = (tail + self._trie.decode_bytes([token]))[-_MEMORY:]
            else:
                tail = b""
        return tail

    def apply(self, tail: bytes, mask: np.ndarray) -> None:
        """Remove digits from a mask, int32 [words], if `tail` is a long number that may end."""
        if _LONG.search(tail) is None or (mask & self._in_texts).any():
            return
        ended = mask & self._no_digits
        if ended.any():
            mask[:] = ended


def _allowed(pattern: str, trie: LLTokenizer) -> np.ndarray:
    """The mask of tokens with which a match of the pattern may begin."""
    mask = np.zeros((1, mask_words(trie.vocab_size)), np.int32)
    matcher = LLMatcher(trie, LLMatcher.grammar_from_regex(pattern), log_level=0)
    fill_next_token_bitmask(matcher, mask, 0)
    return mask[0]
