"""Readers of calls, one per syntax; differences between families are data."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Container

from jitney.engine.server.chat.conversation.json_calls import JsonReader
from jitney.engine.server.chat.conversation.reading import CallReader, Finding, Malformed, Reading
from jitney.engine.server.chat.conversation.schema_types import quoted, word_json

_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


class JsonCalls(CallReader, JsonReader):
    """JSON objects or lists of them, between two tags; if there is no end tag, one object or
    list.
    """

    def __init__(self, start: str, end: str = ""):
        self._end = end
        super().__init__((start,), (end,) if end else ())

    def read_calls(self) -> Reading:
        yield from self.skip_blanks()
        yield from self.read_calls_as_json()
        while self._end and (yield from self.peek_filled()) == "{":
            yield from self.read_calls_as_json()
        if self._end:
            yield from self.expect_next(self._end)


class KeyedCalls(JsonCalls):
    """Apertus: a list of objects whose only key is the name, and its value the arguments."""

    def read_call(self) -> Reading:
        yield from self.expect("{")
        yield from self.skip_blanks()
        name = self.checked_name((yield from self.read_string()))
        yield from self.expect_next(":")
        yield from self.skip_blanks()
        yield from self.look_for("{")
        yield from self.read_arguments(self.begin_call(name))
        yield from self.expect_next("}")


class BareCalls(CallReader, JsonReader):
    """Llama: JSON objects that begin the turn or a line, or follow a call or a tag. Without the tag
    only functions that were given can be called.
    """

    #: Whether the next character begins a line.
    _begins_line = True

    def __init__(self, tag: str, names: Container[str]):
        self._tag = tag
        self._names_of_tools = names
        super().__init__((tag,))

    def say(self, text: str) -> None:
        if text:
            self._begins_line = text.rstrip(" \t").endswith("\n")
        super().say(text)

    def read(self) -> Reading:
        while True:
            marker = yield from self.until((self._tag, "{"))
            if marker == self._tag:
                yield from self.attempt()
            elif self._begins_line or "\n" in self._since_mark:
                self.unread(marker)
                self.names = self._names_of_tools
                yield from self.attempt()
                self.names = None
            else:
                self.say("".join(self._since_mark))
                self.mark()

    def read_calls(self) -> Reading:
        yield from self.skip_blanks()
        yield from self.read_call()
        while True:
            if (yield from self.peek_filled()) == ";":
                yield from self.next_char()
            yield from self.skip_blanks()
            yield from self.look_for("{")
            yield from self.read_call()


class NamedCalls(CallReader, JsonReader):
    """A name, then JSON arguments, with markers around; Kimi puts a number behind the name."""

    def __init__(
        self,
        start: str,
        end: str,
        *,
        before_name: str = "",
        behind_id: str = "",
        after_name: str = "",
        before_end: str = "",
        around: tuple[str, ...] = (),
    ):
        """start, end: around each call; around: around all of them. before_name: behind the start.
        behind_id: between the model's own id of the call and the name; empty: no id. after_name:
        before the arguments. before_end: behind them.
        """
        self._end = end
        self._before_name = before_name
        self._behind_id = behind_id
        self._after_name = after_name
        self._before_end = before_end
        super().__init__((start,), (end,), around)

    def read_calls(self) -> Reading:
        yield from self.expect(self._before_name)
        if self._behind_id:
            yield from self.read_name()
            yield from self.expect(self._behind_id)
        name, _, _ = (yield from self.read_name()).partition(":")
        yield from self.expect_next(self._after_name)
        yield from self.read_named(name)
        yield from self.expect_next(self._before_end)
        yield from self.expect_next(self._end)

    def read_named(self, name: str) -> Reading:
        """The arguments of a call."""
        yield from self.skip_blanks()
        yield from self.look_for("{")
        yield from self.read_arguments(self.begin_call(name))


class MistralCalls(NamedCalls):
    """Both of Mistral's forms: a list of JSON objects, and (since v11) names with arguments."""

    _ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"

    def __init__(self, start: str):
        CallReader.__init__(self, (start,))

    def new_id(self) -> str:
        """An id of nine letters and digits, the only form that Mistral's templates accept."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))

    def read_calls(self) -> Reading:
        if (yield from self.peek_filled()) in "[{":
            yield from self.read_calls_as_json()
        else:
            name = yield from self.read_name()
            yield from self._pass_markers()
            yield from self.read_named(name)

    def _pass_markers(self) -> Reading:
        """Skip text between name and arguments, such as the model's own id of the call."""
        if (yield from self.peek_filled()) != "[":
            return
        if (yield from self.any_of((self._ARGS, self._CALL_ID))) == self._CALL_ID:
            yield from self.read_name()
            yield from self.expect(self._ARGS)


#: Reads a pair, or a value.
type _Member = Callable[[], Reading]


class BraceCalls(NamedCalls):
    """FunctionGemma, Gemma 4: `call:name{key:value}` in tags, strings in marks; written as JSON."""

    #: Values of the call that is being read.
    _index = -1

    def __init__(self, start: str, quote: str, end: str):
        self._quote = quote
        super().__init__(start, end, before_name="call:")

    def read_calls(self) -> Reading:
        yield from self.expect_next(self._before_name)
        name = yield from self.read_name()
        yield from self.look_for("{")
        self._index = self.begin_call(name)
        yield from self._read_members("}", self._read_pair)
        yield from self.expect_next(self._end)

    def _write(self, text: str) -> None:
        self.add_arguments(self._index, text)

    def _read_members(self, end: str, read_member: _Member) -> Reading:
        """Read from an opening bracket to the closing one."""
        yield from self._copy_bracket()
        while (yield from self.peek_filled()) != end:
            yield from read_member()
            if (yield from self.peek_filled()) != end:
                yield from self.expect(",")
                self._write(", ")
        yield from self._copy_bracket()

    def _copy_bracket(self) -> Reading:
        self._write((yield from self.next_char()))

    def _read_pair(self) -> Reading:
        if (yield from self.peek()) == self._quote[0]:
            yield from self._read_text()
            yield from self.expect(":")
        else:
            self._write(quoted((yield from self._bare_key())))
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
        yield from self.expect(self._quote)
        self._write('"')
        pending = ""
        while pending != self._quote:
            pending += yield from self.next_char()
            pending = self._without_text(pending)
        self._write('"')

    def _without_text(self, pending: str) -> str:
        """Report text up to a possible beginning of a quote, which is returned."""
        while not self._quote.startswith(pending):
            self._write(quoted(pending[0])[1:-1])
            pending = pending[1:]
            self.mark(pending)
        return pending

    def _read_word(self) -> Reading:
        """A number, true, false or null; anything else is a string without marks."""
        word = ""
        while (char := (yield from self.next_char())) not in ",}]":
            word += char
        self.unread(char)
        self._write(word_json(word.strip()))
