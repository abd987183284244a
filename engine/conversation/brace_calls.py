"""Calls that are written in braces, as Gemma's are: their arguments become JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

from jitney.engine.conversation.reading import Finding, Malformed, Reading
from jitney.engine.conversation.tool_calls import NamedCalls, NameMarkers

#: Reads a pair, or a value.
type _Member = Callable[[], Reading]


class BraceCalls(NamedCalls):
    """FunctionGemma and Gemma 4: `call:name{key:value}` between two tags, strings between marks of
    their own. The arguments are written as JSON here.
    """

    #: Of the call that is being read.
    _index = -1

    def __init__(self, start: str, quote: str, end: str):
        self._quote = quote
        super().__init__(NameMarkers(start, before_name="call:", end=end))

    def read_calls(self) -> Reading:
        yield from self.expect_next(self._markers.before_name)
        name = yield from self.read_name()
        yield from self.look_for("{")
        self._index = self.begin_call(name)
        yield from self._read_members("}", self._read_pair)
        yield from self.expect_next(self._markers.end)

    def _write(self, text: str) -> None:
        """More of the arguments."""
        self.add_arguments(self._index, text)

    def _read_members(self, end: str, read_member: _Member) -> Reading:
        """From an opening bracket to the closing one."""
        yield from self._copy_bracket()
        while (yield from self.peek_filled()) != end:
            yield from read_member()
            yield from self._pass_comma(end)
        yield from self._copy_bracket()

    def _copy_bracket(self) -> Reading:
        self._write((yield from self.next_char()))

    def _pass_comma(self, end: str) -> Reading:
        """What follows a value, unless it is the end."""
        if (yield from self.peek_filled()) != end:
            yield from self.expect(",")
            self._write(", ")

    def _read_pair(self) -> Reading:
        if (yield from self.peek()) == self._quote[0]:
            yield from self._read_text()
            yield from self.expect(":")
        else:
            self._write(_quoted((yield from self._bare_key())))
        self._write(": ")
        yield from self._read_value()

    def _bare_key(self) -> Finding[str]:
        """A key without marks, up to its colon."""
        key = ""
        while (char := (yield from self.next_char())) != ":":
            key += char
            if char in "{}[]," or len(key) > self.most_name:
                raise Malformed
        return key.strip()

    def _read_value(self) -> Reading:
        first = yield from self.peek_filled()
        if first == "{":
            yield from self._read_members("}", self._read_pair)
        elif first == "[":
            yield from self._read_members("]", self._read_value)
        elif first == self._quote[0]:
            yield from self._read_text()
        else:
            yield from self._read_word()

    def _read_text(self) -> Reading:
        """A string between marks."""
        yield from self.expect(self._quote)
        self._write('"')
        held = ""
        while held != self._quote:
            held += yield from self.next_char()
            held = self._without_text(held)
        self._write('"')

    def _without_text(self, held: str) -> str:
        """What may be the beginning of a mark; the text before it is written."""
        while not self._quote.startswith(held):
            self._write(_quoted(held[0])[1:-1])
            held = held[1:]
            self.mark(held)
        return held

    def _read_word(self) -> Reading:
        """A number, true, false or null; anything else is a string without marks."""
        word = ""
        while (char := (yield from self.next_char())) not in ",}]":
            word += char
        self.unread(char)
        self._write(_literal(word.strip()))


def _quoted(text: str) -> str:
    """A string as JSON writes it."""
    return json.dumps(text, ensure_ascii=False)


def _literal(word: str) -> str:
    """A word as JSON: a number, true, false or null as it stands, else a string."""
    try:
        is_json = not isinstance(json.loads(word, parse_constant=_not_json), str)
    except (json.JSONDecodeError, RecursionError):
        is_json = False
    return word if is_json else _quoted(word)


def _not_json(word: str) -> None:
    raise json.JSONDecodeError("no JSON", word, 0)
