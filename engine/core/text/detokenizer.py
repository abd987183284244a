"""Decodes token ids to text incrementally: whole characters, and no part of a stop string.

An incremental UTF-8 decoder keeps the work per token independent of the text's length.
"""

from __future__ import annotations

import codecs
from collections.abc import Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import msgspec

from jitney.engine.common.requests import SamplingParams

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenBytes(Protocol):
    """The part of a tokenizer that this module uses."""

    @property
    def special_ids(self) -> Set[int]: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...


class TextDelta(msgspec.Struct):
    """The result of one `push`."""

    #: Text that is now final.
    text: str
    #: Number of pushed tokens that count as output; tokens after a completed stop string do not.
    tokens: int
    #: Start of each of these tokens in the whole text, in characters.
    offsets: list[int] = []
    #: The stop string that ended the sequence, if any.
    stop: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop is not None


class TextStream:
    """The text of one sequence.

    A stop string ends the text at its last character; if several end there, the longest counts.
    The first `min_tokens` tokens are not searched. prompt_ids: the tokens before, which may end
    within a character. seen_ids: special tokens that are kept in the text.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        params: SamplingParams,
        prompt_ids: list[int] | tuple[int, ...] = (),
        seen_ids: Set[int] = frozenset(),
    ):
        self._token_bytes = tokenizer.token_bytes
        self._skip: Set[int] = frozenset()
        if params.skip_special_tokens:
            self._skip = tokenizer.special_ids - seen_ids
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        #: By first character, since most characters begin no stop string.
        self._finders: dict[str, list[_StopFinder]] = {}
        for stop in params.stop:
            self._finders.setdefault(stop[0], []).append(_StopFinder(stop))
        #: Finders with a partial match at the end of the text.
        self._begun: list[_StopFinder] = []
        self._utf8 = _Utf8Decoder(errors="replace")
        self._pending = ""
        self._decoded = 0  # characters decoded so far, held ones included
        self._tokens = 0
        for token in prompt_ids[-4:]:  # a character has at most 4 bytes, a token at least one
            self._utf8.decode(self._bytes(token))

    def push(
        self, token_ids: list[int], final: bool = False, stop_token: int | None = None
    ) -> TextDelta:
        """Add tokens; `final` flushes held text.

        stop_token: the end token that the core reported, the last of `token_ids`; it is part of the
        text only with `include_stop_str_in_output`.
        """
        if len(token_ids) == 1 and not (final or self._finders or stop_token is not None):
            return self._push_one(token_ids[0])
        delta = TextDelta("", 0)
        pieces: list[str] = []
        shown = len(token_ids)
        if stop_token is not None and not self._include_stop:
            shown -= 1
        for position, token in enumerate(token_ids):
            delta.offsets.append(self._decoded)
            delta.tokens += 1
            self._tokens += 1
            if position < shown:
                pieces.append(self._settle(self._utf8.decode(self._bytes(token)), delta))
            if delta.stop is not None:
                break
        if final and delta.stop is None:
            pieces.append(self._flush(delta))
        delta.text = "".join(pieces)
        return delta

    def _push_one(self, token: int) -> TextDelta:
        """The same of a token in the middle, without stop strings: nearly all come so."""
        text = self._utf8.decode(self._bytes(token))
        delta = TextDelta(text, 1, [self._decoded])
        self._decoded += len(text)
        self._tokens += 1
        return delta

    def _flush(self, delta: TextDelta) -> str:
        """The rest of the text at its end: an unfinished character and held text."""
        text = self._settle(self._utf8.decode(b"", True), delta)
        if delta.stop is None:
            text += self._pending
            self._pending = ""
        return text

    def _bytes(self, token: int) -> bytes:
        if token in self._skip:
            return b""
        return self._token_bytes(token)

    def _settle(self, piece: str, delta: TextDelta) -> str:
        """Add decoded characters; returns text that cannot become part of a stop string."""
        if not self._finders or self._tokens <= self._min_tokens:
            self._decoded += len(piece)
            return piece
        text = self._pending + piece
        end = len(self._pending)
        for char in piece:
            end += 1
            self._decoded += 1
            delta.stop = self._completed_by(char)
            if delta.stop is not None:
                return self._stopped(text[:end], delta.stop)
        n_pending = 0
        if not self._include_stop:
            n_pending = max([finder.matched for finder in self._begun], default=0)
        self._pending = text[len(text) - n_pending :]
        return text[: len(text) - n_pending]

    def _stopped(self, text: str, stop: str) -> str:
        """The shown part of a text that ends with a stop string."""
        self._pending = ""
        if self._include_stop:
            return text
        return text.removesuffix(stop)

    def _completed_by(self, char: str) -> str | None:
        """The longest stop string that this character completes."""
        idle = [finder for finder in self._finders.get(char, ()) if not finder.matched]
        active = self._begun + idle
        completed = [finder.stop for finder in active if finder.feed(char)]
        self._begun = [finder for finder in active if finder.matched]
        return max(completed, key=len, default=None)


@dataclass(eq=False, slots=True)
class _StopFinder:
    """Knuth-Morris-Pratt search for one string, one character at a time."""

    stop: str
    #: Length of the longest prefix of `stop` that the text now ends with.
    matched: int = 0
    _fallback: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._fallback = _fallbacks(self.stop)

    def feed(self, char: str) -> bool:
        """Add a character; True if it completes the string and ends the search."""
        while self.matched and self.stop[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.stop[self.matched] == char
        return self.matched == len(self.stop)


@lru_cache(maxsize=256)
def _fallbacks(text: str) -> tuple[int, ...]:
    """For each prefix of `text`, the length of its longest proper prefix that is also a suffix."""
    table = [0] * len(text)
    matched = 0
    for position in range(1, len(text)):
        while matched and text[matched] != text[position]:
            matched = table[matched - 1]
        matched += text[matched] == text[position]
        table[position] = matched
    return tuple(table)
