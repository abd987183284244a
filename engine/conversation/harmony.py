"""The harmony format of gpt-oss: a turn is made of messages, each with a channel.

Read as text. OpenAI's own library for it wants a vocabulary that it downloads when first used, and
the markers are tokens of the served model anyway.
"""

from __future__ import annotations

import re

from jitney.engine.conversation.reading import Malformed, Reading, TextReader

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN = "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)
#: The channel of thoughts, and how calls of a client's functions are addressed.
THOUGHTS = "analysis"
FUNCTIONS = "functions."

_ENDS = (END, RETURN, CALL)
#: What a header may begin with; a message whose end is missing ends there.
_HEADS = (START, CHANNEL)
#: Before a header too, if a call's address comes before its channel.
_ADDRESSED = " to="
_RECIPIENT = re.compile(r"to=([^\s<]+)")
#: Longer headers are none.
_MOST_HEADER = 512


class HarmonyReader(TextReader):
    """Thoughts are what is on the analysis channel, calls what is addressed to somebody; all else,
    also text without a header, is content.
    """

    #: Of the call that is being read; -1: none is.
    _call = -1

    def read(self) -> Reading[None]:
        head = yield from self._first_head()
        while True:
            header = ""
            if head in (*_HEADS, _ADDRESSED):
                header = yield from self._read_header(head)
            if head in _ENDS:
                head = yield from self.until(_HEADS)
            else:
                head = yield from self._read_body(header)

    def say(self, text: str) -> None:
        if self._call >= 0:
            self.add_arguments(self._call, text)
        else:
            super().say(text)

    def _first_head(self) -> Reading[str]:
        """What the turn begins with; empty where that is no header."""
        self.mark()
        try:
            return (yield from self.any_of((*_HEADS, _ADDRESSED)))
        except Malformed:
            self.give_back()
            return ""

    def _read_header(self, head: str) -> Reading[str]:
        """All of it, up to the message; empty if it is none."""
        header = head
        while not header.endswith(MESSAGE):
            header += yield from self.next_char()
            if len(header) > _MOST_HEADER:
                self.give_back()
                return ""
        self.mark()
        return header

    def _read_body(self, header: str) -> Reading[str]:
        """A message; returns the marker behind it."""
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            self._call = self.begin_call(recipient[1].removeprefix(FUNCTIONS))
        self.is_thinking = recipient is None and THOUGHTS in header
        is_call = recipient is not None
        marker = yield from self.until((*_ENDS, *_HEADS), drop_blanks=is_call)
        self.is_thinking = False
        self._call = -1
        return marker
