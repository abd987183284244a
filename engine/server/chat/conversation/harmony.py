"""The harmony format of gpt-oss: a turn is made of messages, each with a channel. Read as text:
OpenAI's library for it downloads a vocabulary when first used.
"""

from __future__ import annotations

import re
from enum import StrEnum

from jitney.engine.server.chat.conversation.reading import Finding, Malformed, Reading, TextReader


class Mark(StrEnum):
    """The markers between a turn's parts."""

    START = "<|start|>"
    CHANNEL = "<|channel|>"
    MESSAGE = "<|message|>"
    CONSTRAIN = "<|constrain|>"
    END = "<|end|>"
    RETURN = "<|return|>"
    CALL = "<|call|>"


_ENDS = (Mark.END, Mark.RETURN, Mark.CALL)
#: Texts that may begin a header; they also end a message that has no end marker.
_HEADS = (Mark.START, Mark.CHANNEL)
#: The last one also precedes headers in which the recipient comes before the channel.
_OPENINGS = (*_HEADS, " to=")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
#: Most characters of a header; longer texts are content.
_MOST_HEADER = 512


class HarmonyReader(TextReader):
    """Reads harmony: the analysis channel is thoughts, messages with a recipient are calls."""

    #: The channel of thoughts, and the recipient prefix of calls.
    THOUGHTS, FUNCTIONS = "analysis", "functions."

    #: Position of the call that is being read; -1: none is.
    _call = -1

    def read(self) -> Reading:
        head = yield from self._first_head()
        while True:
            if head in _ENDS:
                head = yield from self.until(_HEADS)
            else:
                head = yield from self._read_message(head)

    def say(self, text: str) -> None:
        if self._call >= 0:
            self.add_arguments(self._call, text)
        else:
            super().say(text)

    def _first_head(self) -> Finding[str]:
        """The header at the beginning of the turn; empty: there is none."""
        self.mark()
        try:
            return (yield from self.any_of(_OPENINGS))
        except Malformed:
            self.give_back()
            return ""

    def _read_header(self, header: str) -> Finding[str]:
        """The complete header, up to the message; empty if it turns out to be no header."""
        while header and not header.endswith(Mark.MESSAGE):
            header += yield from self.next_char()
            if len(header) > _MOST_HEADER:
                self.give_back()
                return ""
        self.mark()
        return header

    def _begin(self, header: str) -> None:
        """A message with this header begins."""
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            self._call = self.begin_call(recipient[1].removeprefix(self.FUNCTIONS))
        self.is_thinking = recipient is None and self.THOUGHTS in header

    def _read_message(self, head: str) -> Finding[str]:
        """Read a message; returns the marker that ends it."""
        self._begin((yield from self._read_header(head)))
        marker = yield from self.until((*_ENDS, *_HEADS), drop_blanks=self._call >= 0)
        self.is_thinking = False
        self._call = -1
        return marker
