"""From token ids to text, piece by piece: never half a character, never part of a stop string.

Works on bytes: a token's bytes go through an incremental UTF-8 decoder, so a character that spans
tokens appears when its last byte does, and the work per token does not grow with the length of the
text.
"""

from __future__ import annotations

import codecs
from collections.abc import Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from jitney.engine.types import SamplingParams

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenBytes(Protocol):
    """What this module needs of a tokenizer."""

    @property
    def special_ids(self) -> Set[int]: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...


@dataclass(slots=True)
class TextDelta:
    """What one push made certain.

    text: characters that are now final. tokens: how many of the pushed tokens count as output
    (fewer than pushed when a stop string was completed by an earlier one). offsets: for each of
    those, the character position in the whole text at which it begins. stop: the stop string that
    ended the sequence, if one did.
    """

    text: str
    tokens: int
    offsets: list[int] = field(default_factory=list)
    stop: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop is not None


class TextStream:
    """The text of one sequence.

    A stop string counts when its last character appears; of several that end together the longest
    wins. So the cut does not depend on how the text is split into tokens or the tokens into pushes.
    Text of the first `min_tokens` tokens is not searched. prompt_ids: the tokens before; only a
    character left unfinished at their end matters.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        params: SamplingParams,
        prompt_ids: list[int] | tuple[int, ...] = (),
    ):
        self._token_bytes = tokenizer.token_bytes
        self._skip = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._finders = [_StopFinder(stop) for stop in params.stop]
        self._utf8 = _Utf8Decoder(errors="replace")
        self._held = ""
        self._decoded = 0  # characters decoded so far, held ones included
        self._tokens = 0
        for token in prompt_ids[-4:]:  # a character has at most 4 bytes, a token at least one
            self._utf8.decode(self._bytes(token))

    def push(
        self, token_ids: list[int], final: bool = False, stop_token: int | None = None
    ) -> TextDelta:
        """Add tokens; `final` flushes what is held.

        stop_token: the end token the core reported, which is the last of `token_ids`; like a stop
        string it is no part of the text unless `include_stop_str_in_output`.
        """
        delta = TextDelta("", 0)
        pieces: list[str] = []
        silent = (
            len(token_ids) - 1
            if stop_token is not None and not self._include_stop
            else len(token_ids)
        )
        for position, token in enumerate(token_ids):
            delta.offsets.append(self._decoded)
            delta.tokens += 1
            self._tokens += 1
            if position < silent:
                pieces.append(self._settle(self._utf8.decode(self._bytes(token)), delta))
            if delta.stop is not None:
                break
        if final and delta.stop is None:
            pieces.append(self._settle(self._utf8.decode(b"", True), delta))
            if delta.stop is None:
                pieces.append(self._held)
                self._held = ""
        delta.text = "".join(pieces)
        return delta

    def _bytes(self, token: int) -> bytes:
        return b"" if token in self._skip else self._token_bytes(token)

    def _settle(self, piece: str, delta: TextDelta) -> str:
        """Take decoded characters; return those that can no longer become part of a stop string."""
        start = self._decoded
        self._decoded += len(piece)
        if not self._finders or self._tokens <= self._min_tokens:
            return piece
        text = self._held + piece
        for position, char in enumerate(piece, start=1):
            found = [finder for finder in self._finders if finder.feed(char)]
            if found:
                delta.stop = max((finder.stop for finder in found), key=len)
                end = len(self._held) + position
                self._decoded = start + position
                self._held = ""
                return text[: end if self._include_stop else end - len(delta.stop)]
        hold = 0 if self._include_stop else max(finder.matched for finder in self._finders)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


class _StopFinder:
    """Knuth-Morris-Pratt search for one string, one character at a time."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str):
        self.stop = stop
        self.matched = 0  # length of the longest prefix of `stop` that the text now ends with
        self._fallback = _fallbacks(stop)

    def feed(self, char: str) -> bool:
        """True when `char` completes the string; the finder is spent then."""
        while self.matched and self.stop[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.stop[self.matched] == char
        return self.matched == len(self.stop)


@lru_cache(maxsize=256)
def _fallbacks(text: str) -> tuple[int, ...]:
    """For each prefix of `text`, the length of its longest proper prefix that is also its
    suffix.
    """
    table = [0] * len(text)
    matched = 0
    for position in range(1, len(text)):
        while matched and text[matched] != text[position]:
            matched = table[matched - 1]
        matched += text[matched] == text[position]
        table[position] = matched
    return tuple(table)
