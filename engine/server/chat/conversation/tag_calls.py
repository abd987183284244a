"""Calls whose arguments are elements between tags, such as Qwen3-Coder's."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.chat.conversation.call_text import CallText, TagText
from jitney.engine.server.chat.conversation.reading import (
    CallReader,
    Ended,
    Finding,
    Malformed,
    Reading,
)
from jitney.engine.server.chat.conversation.schema_types import (
    TEXT,
    json_of,
    properties_of,
    quoted,
    types_of,
)

_TAG = re.compile(r"<[^<]*|[^<\s][^<]*")


class TagCalls(CallReader):
    """Reads strings as they are written, and other values at their end; writes both as JSON, by the
    function's schema. A value ends at its closing tag if what may follow it does, so that it can
    hold such a tag; without one, at the next tag that begins a line and is in its place.
    """

    #: The call being read: index, schemas of its arguments by name, and names so far.
    _index = -1
    _schema: JsonDict
    _properties: JsonDict
    _keys: set[str]
    #: The value began on a line of its own.
    _has_own_lines = False

    def __init__(self, text: CallText, functions: Mapping[str, JsonDict | None]):
        """functions: the schemas of the arguments of those that may be called, by their names."""
        arguments = text.arguments
        assert isinstance(arguments, TagText)
        self._functions = functions
        #: Tags up to a name; models leave out the outer ones.
        self._heads = _tags(text.before_name)
        self._behind_name = _tags(text.before_arguments)
        #: Tags behind the arguments, the inner one first.
        self._closings = _tags(text.after)
        self._before_key = arguments.before_key.strip()
        self._behind_key = _tags(arguments.after_key)
        self._value_end = arguments.after_value.strip()
        self._may_have_lines = arguments.after_key.endswith("\n")
        around = (*_tags(text.first), *_tags(text.last))
        super().__init__(self._heads, self._closings, around)

    def read_calls(self) -> Reading:
        depth = self._heads.index(self.last_marker)
        for head in self._heads[depth + 1 :]:
            yield from self.expect_next(head)
        name = yield from self.read_name()
        if depth and name not in self._functions:
            raise Malformed  # without the outer tag, the text may only mention such calls
        yield from self._pass_tags(self._behind_name)
        self._begin(name)
        try:
            closing = yield from self._read_arguments()
        except Malformed:
            self._write("}")
            raise
        except Ended:
            self._write("" if self.is_cut else "}")
            raise
        self._write("}")
        yield from self._pass_closings(closing)

    def _begin(self, name: str) -> None:
        self._index = self.begin_call(name)
        self._schema = self._functions.get(name) or {}
        self._properties = properties_of(self._schema, self._schema)
        self._keys = set()
        self._write("{")

    def _write(self, text: str) -> None:
        self.add_arguments(self._index, text)

    def _pass_tags(self, tags: tuple[str, ...]) -> Reading:
        """Skip tags: the first one stands at this place, the others after blanks."""
        for number, tag in enumerate(tags):
            yield from self.expect_next(tag) if number else self.expect(tag)

    def _pass_closings(self, closing: str) -> Reading:
        """Skip the tags after the one that ended the arguments, if present."""
        for tag in self._closings[self._closings.index(closing) + 1 :] if closing else ():
            start = len(self._since_mark)
            try:
                yield from self.expect_next(tag)
            except Malformed:
                self._unread_from(start)
                return

    def _read_arguments(self) -> Finding[str]:
        """Returns the tag that ended them; empty if another call begins instead."""
        while True:
            yield from self.skip_blanks()
            tag = yield from self.any_of((self._before_key, *self._closings, *self._heads))
            if tag in self._closings:
                return tag
            if tag in self._heads:
                self.unread(tag)
                return ""
            yield from self._read_argument()

    def _read_argument(self) -> Reading:
        key = yield from self._read_key()
        yield from self._pass_tags(self._behind_key)
        comma = ", " if self._keys else ""
        self._keys.add(key)
        self._write(f"{comma}{quoted(key)}: ")
        self._has_own_lines = False
        if self._may_have_lines and (yield from self.peek()) == "\n":
            yield from self.next_char()
            self._has_own_lines = True
        others = self._schema.get("additionalProperties")
        types = types_of(self._properties.get(key, others), self._schema)
        yield from self._read_text() if types == TEXT else self._read_other(types)

    def _read_key(self) -> Finding[str]:
        key = ""
        end = self._behind_key[0][0]
        while (char := (yield from self.next_char())) != end:
            key += char
        self.unread(char)
        return self.checked_name(key.strip())

    def _read_text(self) -> Reading:
        self._write('"')
        try:
            while not (yield from self._ends_value()):
                self._write(quoted((yield from self.next_char()))[1:-1])
        except Ended:
            self._write("" if self.is_cut else '"')
            raise
        self._write('"')

    def _read_other(self, types: frozenset[str]) -> Reading:
        """Read a value of one of these types; a truncated one is reported as it is."""
        text = ""
        try:
            while not (yield from self._ends_value()):
                text += yield from self.next_char()
        except Ended:
            self._write(text.strip() if self.is_cut else json_of(text, types))
            raise
        self._write(json_of(text, types))

    def _ends_value(self) -> Finding[bool]:
        """Whether the value ends here; if so, its closing tag is consumed."""
        if (yield from self.peek()) not in "\n<":
            return False
        start = len(self._since_mark)
        try:
            yield from self._read_value_end()
        except Malformed:
            self._unread_from(start)
            return False
        return True

    def _read_value_end(self) -> Reading:
        """Read the end of a value. Raises Malformed if the value goes on."""
        begins_line = (yield from self.peek()) == "\n"
        if begins_line:
            yield from self.next_char()
        start = len(self._since_mark)
        tag = yield from self.any_of((self._value_end, self._before_key, *self._closings))
        if tag != self._value_end:
            yield from self._check_place(tag, begins_line=begins_line)
            self._unread_from(start)
            return
        if begins_line and not self._may_have_lines:
            raise Malformed  # the line's end belongs to the value
        start = len(self._since_mark)
        blanks = yield from self._read_follower((self._before_key, *self._closings, *self._heads))
        if self._has_own_lines and not begins_line and "\n" not in blanks:
            raise Malformed
        self._unread_from(start)

    def _check_place(self, tag: str, *, begins_line: bool) -> Reading:
        """Raise Malformed if a tag does not end a value whose own closing tag is missing."""
        if not begins_line:
            raise Malformed
        if tag == self._before_key:
            key = yield from self._read_key()
            if key in self._keys or key not in self._properties:
                raise Malformed
        else:
            yield from self._read_follower((*self._closings, *self._heads))

    def _read_follower(self, tags: tuple[str, ...]) -> Finding[str]:
        """Skip blanks, up to one of the tags or the turn's end; returns them. Raises Malformed."""
        start = len(self._since_mark)
        blanks = ""
        try:
            yield from self.skip_blanks()
            blanks = "".join(self._since_mark[start:])
            yield from self.any_of(tags)
        except Ended:
            blanks += "\n"
        return blanks

    def _unread_from(self, start: int) -> None:
        """Read the text from `start`, an index into `_since_mark`, again."""
        self.unread("".join(self._since_mark[start:]))


def _tags(text: str) -> tuple[str, ...]:
    return tuple([tag.strip() for tag in _TAG.findall(text)])
