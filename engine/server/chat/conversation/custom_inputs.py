"""Extracts a custom tool's input text from the JSON arguments of a call, incrementally."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace

from jitney.engine.server.chat.conversation.events import (
    AssistantEvent,
    ToolCallArguments,
    ToolCallStart,
)
from jitney.engine.server.chat.conversation.tools import CUSTOM_INPUT

#: The beginning of the arguments, without blanks.
_HEAD = f'{{"{CUSTOM_INPUT}":"'
_HEAD_WITH_BLANKS = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ALONE = r"\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])"
_OTHER = r"\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
#: A complete escape; the first half of a surrogate pair needs the second one.
_ESCAPE = re.compile(rf"{_PAIR}|{_ALONE}|{_OTHER}|\\[^u]", re.DOTALL)
#: The part of a JSON string that can be decoded so far.
_DECODABLE = re.compile(rf'(?:[^"\\]+|{_ESCAPE.pattern})*', re.DOTALL)
#: An escape that was cut off.
_CUT = re.compile(r"\\(u[0-9a-fA-F]{0,4}(\\(u[0-9a-fA-F]{0,4})?)?)?")


class CustomInputs:
    """Replaces streamed arguments of custom tools by their `input`, or leaves unreadable ones."""

    def __init__(self, names: frozenset[str]):
        self._names = names
        #: The input of the open call; None if it calls a function.
        self._input: _Input | None = None
        self._index = 0

    def texts(self, events: Iterable[AssistantEvent], *, is_end: bool) -> list[AssistantEvent]:
        """The events, with the texts of custom tools. is_end: nothing follows."""
        made: list[AssistantEvent] = []
        for event in events:
            match event:
                case ToolCallStart():
                    made += self._closed()
                    is_custom = event.name in self._names
                    self._input = _Input() if is_custom else None
                    self._index = event.index
                    made.append(replace(event, is_custom=is_custom))
                case ToolCallArguments() if self._input is not None:
                    made += self._more(self._input.push(event.text))
                case _:
                    made.append(event)
        return made + (self._closed() if is_end else [])

    def _closed(self) -> list[AssistantEvent]:
        """The remaining text of the open call."""
        reader, self._input = self._input, None
        return [] if reader is None else self._more(reader.finish())

    def _more(self, text: str) -> list[AssistantEvent]:
        return [ToolCallArguments(self._index, text, is_custom=True)] if text else []


class _Input:
    """The `input` of one call."""

    def __init__(self) -> None:
        self._pending = ""
        self._is_begun = self._is_other = self._is_over = False

    def push(self, text: str) -> str:
        """Read more arguments. Returns the text that they add to the input."""
        self._pending += text
        if not self._is_begun and not self._is_other:
            self._begin()
        if self._is_other:
            return self._take_pending()
        return self._decoded() if self._is_begun and not self._is_over else ""

    def finish(self) -> str:
        """The text that remains when the arguments end."""
        is_cut = self._is_begun and _CUT.fullmatch(self._pending)
        return "" if is_cut or self._is_over else self._take_pending()

    def _begin(self) -> None:
        head = _HEAD_WITH_BLANKS.match(self._pending)
        if head is not None:
            self._is_begun = True
            self._pending = self._pending[head.end() :]
        else:
            self._is_other = not _HEAD.startswith("".join(self._pending.split()))

    def _decoded(self) -> str:
        whole = _DECODABLE.match(self._pending)
        assert whole is not None  # it may be empty
        self._pending = self._pending[whole.end() :]
        self._is_over = self._pending.startswith('"')
        text = _ESCAPE.sub(_unescaped, whole[0])
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _take_pending(self) -> str:
        text, self._pending = self._pending, ""
        return text


def _unescaped(escape: re.Match[str]) -> str:
    """The characters of an escape; one that JSON does not know stands for itself."""
    try:
        return json.loads(f'"{escape[0]}"')
    except ValueError:
        return escape[0]
