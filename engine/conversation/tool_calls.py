"""Readers of calls, one for each form in which models write them. What differs between the families
of a form is data (`engine.conversation.formats`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jitney.engine.conversation.json_calls import JsonReader, literal, quoted
from jitney.engine.conversation.python_calls import MOST_CHARS, python_calls
from jitney.engine.conversation.reading import (
    Ended,
    Malformed,
    NewId,
    Reading,
    TextReader,
    new_call_id,
)

#: Most characters of a name that stands without quotes.
_MOST_NAME = 256


class CallReader(TextReader):
    """Content with calls between markers. What turns out to be no call is content."""

    def __init__(
        self,
        starts: Sequence[str],
        ends: Sequence[str] = (),
        around: Sequence[str] = (),
        new_id: NewId = new_call_id,
    ):
        """starts, ends: markers before and after a call. around: others, which are read over."""
        self._starts = tuple(starts)
        self._ends = tuple(ends)
        self._around = tuple(around)
        super().__init__(new_id)

    def read(self) -> Reading[None]:
        passed = self._around
        while True:
            marker = yield from self.until(self._starts + passed)
            passed = self._around
            if marker in self._starts:
                is_cut_short = yield from self.attempt()
                if is_cut_short:  # its end is still to come
                    passed += self._ends

    def attempt(self) -> Reading[bool]:
        """Read calls behind a marker. True: the last one had begun, and ended badly."""
        n_before = self._n_calls
        try:
            yield from self.read_calls()
            self.mark()
            return False
        except Malformed:
            self.give_back()
            return self._n_calls > n_before

    def read_calls(self) -> Reading[None]:
        """What follows a marker. Raises Malformed."""
        raise NotImplementedError


class TaggedCalls(CallReader, JsonReader):
    """A JSON object between two tags."""

    def __init__(self, start: str, end: str):
        self._end = end
        super().__init__((start,), (end,))

    def read_calls(self) -> Reading[None]:
        yield from self.skip_blanks()
        yield from self.read_call()
        yield from self.skip_blanks()
        yield from self.expect(self._end)


class BareCalls(CallReader, JsonReader):
    """Llama: JSON objects that are the whole turn, separated by semicolons, with or without a tag
    before them. Without one only tools that were given can be called.
    """

    def __init__(self, tag: str, names: frozenset[str]):
        self._given = names
        super().__init__((tag,))

    def read(self) -> Reading[None]:
        yield from self.skip_blanks()
        first = yield from self.next_char()
        self.unread(first)
        if first == "{":
            self.names = self._given
            yield from self.attempt()
            self.names = None
        else:
            self.unread("".join(self._since_mark))
        yield from super().read()

    def read_calls(self) -> Reading[None]:
        yield from self.skip_blanks()
        yield from self.read_call()
        while True:
            yield from self.skip_blanks()
            yield from self.expect(";")
            yield from self.skip_blanks()
            yield from self.read_call()


@dataclass(frozen=True, slots=True)
class NameMarkers:
    """How a call is written whose name is no part of the JSON."""

    #: Before each call.
    start: str
    #: Between the start and the name.
    before_name: str = ""
    #: Between the name and the arguments: the first one that fits.
    after_name: tuple[str, ...] = ()
    #: Between the arguments and the end.
    before_end: str = ""
    #: After each call.
    end: str = ""
    #: Around all calls of a turn.
    around: tuple[str, ...] = ()


class NamedCalls(CallReader, JsonReader):
    """DeepSeek: a name, then the arguments as JSON, with markers around them."""

    def __init__(self, markers: NameMarkers):
        self._markers = markers
        super().__init__((markers.start,), (markers.end,), markers.around)

    def read_calls(self) -> Reading[None]:
        markers = self._markers
        yield from self.expect(markers.before_name)
        name = yield from self.read_name()
        yield from self.skip_blanks()
        yield from self.any_of(markers.after_name)
        yield from self.skip_blanks()
        yield from self.read_named(name)
        for part in (markers.before_end, markers.end):
            yield from self.skip_blanks()
            yield from self.expect(part)

    def read_named(self, name: str) -> Reading[None]:
        """The arguments of a call."""
        yield from self.expect("{")
        self.unread("{")
        yield from self.read_arguments(self.begin_call(name))

    def read_name(self) -> Reading[str]:
        """A name without quotes."""
        name = ""
        while True:
            char = yield from self.next_char()
            if char.isspace() or char in '{[<"':
                self.unread(char)
                break
            name += char
        if not 0 < len(name) <= _MOST_NAME:
            raise Malformed
        return name


class MistralCalls(NamedCalls):
    """Both of Mistral's forms: a list of JSON objects, and (since v11) names with arguments."""

    _ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"

    def __init__(self, start: str, new_id: NewId):
        self._markers = NameMarkers(start)
        CallReader.__init__(self, (start,), new_id=new_id)

    def read_calls(self) -> Reading[None]:
        yield from self.skip_blanks()
        first = yield from self.next_char()
        if first == "[":
            yield from self._read_list()
            return
        self.unread(first)
        if first == "{":
            yield from self.read_call()
            return
        name = yield from self.read_name()
        yield from self.skip_blanks()
        behind = yield from self.any_of((self._ARGS, self._CALL_ID, "{"))
        if behind == "{":
            self.unread(behind)
        if behind == self._CALL_ID:
            yield from self._pass_id()
        yield from self.skip_blanks()
        yield from self.read_named(name)

    def _pass_id(self) -> Reading[None]:
        """The model's own name of the call; ours are known to be new."""
        yield from self.read_name()
        yield from self.expect(self._ARGS)

    def _read_list(self) -> Reading[None]:
        behind = ","
        while behind == ",":
            yield from self.skip_blanks()
            yield from self.read_call()
            yield from self.skip_blanks()
            behind = yield from self.any_of(",]")


class PythonCalls(CallReader):
    """Gemma 3: Python in a fenced block. The arguments of a call come when the block ends."""

    _FENCE = "```"

    def __init__(self, start: str, names: frozenset[str]):
        self._names = names
        super().__init__((start,))

    def read_calls(self) -> Reading[None]:
        code: list[str] = []
        try:
            while code[-3:] != list(self._FENCE):
                code.append((yield from self.next_char()))
                if len(code) > MOST_CHARS:
                    raise Malformed
        except Ended:
            self._called("".join(code))  # the turn is over, and what there is may be whole
            raise
        if not self._called("".join(code[:-3])):
            raise Malformed

    def _called(self, code: str) -> bool:
        """Say the calls of some code; False if it is none."""
        try:
            calls = python_calls(code, self._names)
        except Malformed:
            return False
        for name, arguments in calls:
            self.add_arguments(self.begin_call(name), arguments)
        return True


class BraceCalls(NamedCalls):
    """FunctionGemma and Gemma 4: `call:name{key:value}` between two tags, strings between marks of
    their own. The arguments are written as JSON here.
    """

    def __init__(self, start: str, quote: str, end: str):
        self._quote = quote
        super().__init__(NameMarkers(start, before_name="call:", end=end))

    def read_calls(self) -> Reading[None]:
        yield from self.skip_blanks()
        yield from self.expect(self._markers.before_name)
        name = yield from self.read_name()
        yield from self.expect("{")
        index = self.begin_call(name)
        yield from self._read_pairs(index)
        yield from self.skip_blanks()
        yield from self.expect(self._markers.end)

    def _read_pairs(self, index: int) -> Reading[None]:
        """Behind an opening brace."""
        self.add_arguments(index, "{")
        char = yield from self._next_filled()
        while char != "}":
            self.unread(char)
            yield from self._read_key(index)
            yield from self._read_value(index)
            char = yield from self._separator(index, "}")
        self.add_arguments(index, "}")

    def _read_list(self, index: int) -> Reading[None]:
        """Behind an opening bracket."""
        self.add_arguments(index, "[")
        char = yield from self._next_filled()
        while char != "]":
            self.unread(char)
            yield from self._read_value(index)
            char = yield from self._separator(index, "]")
        self.add_arguments(index, "]")

    def _separator(self, index: int, end: str) -> Reading[str]:
        """What follows a value: the end, or the beginning of the next one."""
        char = yield from self._next_filled()
        if char == end:
            return char
        if char != ",":
            self.unread(char)
            raise Malformed
        self.add_arguments(index, ", ")
        return (yield from self._next_filled())

    def _next_filled(self) -> Reading[str]:
        yield from self.skip_blanks()
        return (yield from self.next_char())

    def _read_key(self, index: int) -> Reading[None]:
        char = yield from self.next_char()
        self.unread(char)
        if char == self._quote[0]:
            yield from self._read_text(index)
            yield from self.expect(":")
            self.add_arguments(index, ": ")
            return
        key = ""
        while (char := (yield from self.next_char())) != ":":
            key += char
            if char in "{}[]," or len(key) > _MOST_NAME:
                raise Malformed
        self.add_arguments(index, quoted(key.strip()) + ": ")

    def _read_value(self, index: int) -> Reading[None]:
        char = yield from self._next_filled()
        if char == "{":
            yield from self._read_pairs(index)
        elif char == "[":
            yield from self._read_list(index)
        elif char == self._quote[0]:
            self.unread(char)
            yield from self._read_text(index)
        else:
            self.unread(char)
            yield from self._read_word(index)

    def _read_text(self, index: int) -> Reading[None]:
        """A string between marks."""
        yield from self.expect(self._quote)
        self.add_arguments(index, '"')
        held = ""
        while held != self._quote:
            held += yield from self.next_char()
            while not self._quote.startswith(held):
                self.add_arguments(index, quoted(held[0])[1:-1])
                held = held[1:]
                self.mark(held)
        self.add_arguments(index, '"')

    def _read_word(self, index: int) -> Reading[None]:
        """A number, true, false or null; anything else is a string without marks."""
        word = ""
        while (char := (yield from self.next_char())) not in ",}]":
            word += char
        self.unread(char)
        self.add_arguments(index, literal(word.strip()))
