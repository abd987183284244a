"""Ends numbers in JSON: a schema allows digits for ever, and a small model may write them.

Where a number has more digits than any float64 or int64 needs, and may end, the mask loses tokens
that begin with a digit. No answer fits its schema less for it.
"""

from __future__ import annotations

import re

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from jitney.engine.core.scheduler.plan import mask_words

#: JavaScript writes numbers of up to 21 digits without an exponent, and small ones with up to 5
#: zeros before the 17 digits that tell float64 apart (ECMA-262, Number::toString). Exponents have
#: three digits at most.
_LONG = re.compile(rb"(?:[eE][+-]?[0-9]{3}|[0-9]{22})\Z")
#: Bytes of an answer's end that show it.
_MEMORY = 22


class NumberEnds:
    """What ends numbers, for one vocabulary."""

    def __init__(self, trie: LLTokenizer):
        self._trie = trie
        inside = _allowed("[0-9.eE+-]+", trie).view(np.uint8)
        #: Tokens of nothing but what numbers are made of.
        self._in_numbers = frozenset(
            np.flatnonzero(np.unpackbits(inside, bitorder="little")).tolist()
        )
        #: int32 [ceil(V / 32)] each: all tokens but those that begin with a digit, and those that
        #: begin as only a text goes on: with a quote, or a letter that no number has.
        self._no_digits = ~_allowed("[0-9](?s:.)*", trie)
        self._in_texts = _allowed('["A-DF-Za-df-z](?s:.)*', trie)

    def after(self, tail: bytes, tokens: list[int]) -> bytes:
        """The number that an answer ends with after these tokens, else empty."""
        for token in tokens:
            if token in self._in_numbers:
                tail = (tail + self._trie.decode_bytes([token]))[-_MEMORY:]
            else:
                tail = b""
        return tail

    def apply(self, tail: bytes, mask: np.ndarray) -> None:
        """Take the digits from a mask, int32 [words], if a long number may end behind `tail`."""
        if _LONG.search(tail) is None or (mask & self._in_texts).any():
            return
        ended = mask & self._no_digits
        if ended.any():
            mask[:] = ended


def _allowed(pattern: str, trie: LLTokenizer) -> np.ndarray:
    """The mask of the tokens that a text of a pattern may begin with."""
    mask = np.zeros((1, mask_words(trie.vocab_size)), np.int32)
    matcher = LLMatcher(trie, LLMatcher.grammar_from_regex(pattern), log_level=0)
    fill_next_token_bitmask(matcher, mask, 0)
    return mask[0]
