"""Calls in JSON, whose arguments are reported while they are generated. Arguments are not
validated: clients must do so anyway, and get exactly what the model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Container

from jitney.engine.server.chat.conversation.reading import Finding, Malformed, Reading, TextReader

#: Names that a call's object uses for its function, and for its arguments.
_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
#: Characters of JSON outside strings; any other character ends a value.
_OUTSIDE = frozenset('{}[]:,+-.0123456789truefalsnE" \t\r\n')
#: Those that end a number or a word.
_BEHIND = frozenset(",}] \t\r\n")


class JsonReader(TextReader):
    """Reads calls in JSON. Raises Malformed for other text, which `give_back` makes content."""

    #: Names that a call may have; None: any.
    names: Container[str] | None = None

    def read_call(self) -> Reading:
        """An object with a name and arguments, in either order; other keys are ignored."""
        call = _Call(self)
        yield from self.expect("{")
        yield from self._read_member(call)
        while (yield from self.any_of((",", "}"))) == ",":
            yield from self._read_member(call)
        call.end()

    def read_calls_as_json(self) -> Reading:
        """An object, or a list of objects."""
        if (yield from self.peek_filled()) != "[":
            yield from self.read_call()
            return
        behind = yield from self.next_char()
        while behind != "]":
            yield from self.skip_blanks()
            yield from self.read_call()
            yield from self.skip_blanks()
            behind = yield from self.any_of((",", "]"))

    def read_arguments(self, index: int) -> Reading:
        """An object: the arguments of a call that has begun."""
        call = _Call(self)
        call.index = index
        yield from self.look_for("{")
        yield from self._read_value(call)

    def _read_member(self, call: _Call) -> Reading:
        """A key and its value, with the blanks around them."""
        yield from self.skip_blanks()
        key = yield from self.read_string()
        yield from self.expect_next(":")
        yield from self._read_value_of(key, call)
        yield from self.skip_blanks()

    def _read_value_of(self, key: str, call: _Call) -> Reading:
        yield from self.skip_blanks()
        if key in _NAME_KEYS and call.name is None:
            call.take_name((yield from self.read_string()))
        elif key in _ARGUMENT_KEYS and not call.has_arguments:
            yield from self._read_call_arguments(call)
        else:
            yield from self._read_value(None)

    def _read_call_arguments(self, call: _Call) -> Reading:
        """An object; some models write it inside a string, or write null."""
        first = yield from self.peek()
        if first == '"':
            call.take_arguments(_object_text((yield from self.read_string())))
        elif first == "n":
            yield from self.expect("null")
            call.take_arguments("{}")
        else:
            yield from self.look_for("{")
            call.take_arguments("")
            yield from self._read_value(call)

    def _read_value(self, call: _Call | None) -> Reading:
        """Any value. call: whose arguments it is."""
        depth = 0
        is_begun = False
        while True:
            char = yield from self.next_char()
            is_end = char in _BEHIND and depth == 0
            if char not in _OUTSIDE or is_end:
                self.unread(char)
                if is_end and is_begun:
                    return
                raise Malformed
            is_begun = True
            _tell(call, char)
            if char == '"':
                yield from self._rest_of_string(call)
            depth += (char in "{[") - (char in "}]")
            if depth == 0 and char in '}]"':
                return

    def _rest_of_string(self, call: _Call | None) -> Finding[str]:
        """The raw text up to the closing quote."""
        text = ""
        while (char := (yield from self._told_char(call))) != '"':
            text += char
            if char == "\\":
                text += yield from self._told_char(call)
        return text

    def _told_char(self, call: _Call | None) -> Finding[str]:
        char = yield from self.next_char()
        _tell(call, char)
        return char

    def read_string(self) -> Finding[str]:
        """A string, decoded."""
        yield from self.expect('"')
        text = yield from self._rest_of_string(None)
        try:
            return json.loads(f'"{text}"', strict=False)
        except json.JSONDecodeError:
            raise Malformed from None


def _tell(call: _Call | None, text: str) -> None:
    if call is not None:
        call.add_arguments(text)


def _object_text(text: str) -> str:
    """The JSON text of an object that a model wrote as a string."""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise Malformed from None
    if not isinstance(value, dict):
        raise Malformed
    return text.strip()


class _Call:
    """The call that is being read."""

    def __init__(self, reader: JsonReader):
        self._reader = reader
        self.name: str | None = None
        #: Its index in the turn; -1 before its name is known.
        self.index = -1
        self.has_arguments = False
        #: Arguments that came before the name.
        self._early: list[str] = []

    def take_name(self, name: str) -> None:
        names = self._reader.names
        if names is not None and name not in names:
            raise Malformed
        self.name = self._reader.checked_name(name)
        if self.has_arguments:
            self._begin()

    def take_arguments(self, text: str) -> None:
        """The arguments begin with this text."""
        self.has_arguments = True
        self._early.append(text)
        if self.name is not None:
            self._begin()

    def add_arguments(self, text: str) -> None:
        if self.index >= 0:
            self._reader.add_arguments(self.index, text)
        else:
            self._early.append(text)

    def end(self) -> None:
        """End the call; without arguments it gets an empty object."""
        if self.name is None:
            raise Malformed
        if self.has_arguments:
            self._reader.mark()
            return
        if self._reader.names is not None:
            raise Malformed  # an object with only a name is ambiguous
        self.take_arguments("{}")

    def _begin(self) -> None:
        assert self.name is not None
        self.index = self._reader.begin_call(self.name)
        self._reader.add_arguments(self.index, "".join(self._early))
