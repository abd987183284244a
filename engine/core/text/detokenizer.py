"""Decodes token ids to text incrementally: whole characters, and no part of a stop string.

An incremental UTF-8 decoder keeps the work per token independent of the text's length.
"""

from __future__ import annotations

import codecs
from collections.abc import Set
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
        self._stops = params.stop
        #: The end of the text that may become a stop string.
        self._begun = ""
        self._utf8 = _Utf8Decoder(errors="replace")
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
        if len(token_ids) == 1 and not (final or self._stops or stop_token is not None):
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
        if delta.stop is None and not self._include_stop:
            text += self._begun
        return text

    def _bytes(self, token: int) -> bytes:
        if token in self._skip:
            return b""
        return self._token_bytes(token)

    def _settle(self, piece: str, delta: TextDelta) -> str:
        """Add decoded characters; returns text that cannot become part of a stop string."""
        if not self._stops or self._tokens <= self._min_tokens:
            self._decoded += len(piece)
            return piece
        before = len(self._begun)
        text = self._begun + piece
        # Of the text, what was returned earlier.
        returned = before if self._include_stop else 0
        found = [(at + len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, delta.stop = min(found, key=lambda one: (one[0], -len(one[1])))
            self._decoded += end - before
            return text[returned : end if self._include_stop else end - len(delta.stop)]
        self._decoded += len(piece)
        self._begun = max([_beginning(stop, text) for stop in self._stops], key=len)
        return text[returned : len(text) - (0 if self._include_stop else len(self._begun))]


def _beginning(stop: str, text: str) -> str:
    """The longest end of a text that begins the string `stop`."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return text[at:] if at >= 0 else ""
