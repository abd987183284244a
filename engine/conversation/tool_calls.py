"""Readers of calls, one for each form in which models write them. What differs between the families
of a form is data (`engine.conversation.formats`).
"""

from __future__ import annotations

import ast
import json
import secrets
import warnings
from contextlib import suppress
from dataclasses import dataclass

from jitney.engine.conversation.json_calls import JsonReader
from jitney.engine.conversation.reading import (
    Ended,
    Finding,
    Malformed,
    Reading,
    TextReader,
)

#: What ends a name that stands without quotes, beside blanks.
_BEHIND_NAME = '{[<"'
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
#: Most characters of one call in Python, whose parser takes time and memory for all at once.
_MOST_CHARS = 1 << 14


type _Markers = tuple[str, ...]


class _CallReader(TextReader):
    """Content with calls between markers. What turns out to be no call is content."""

    def __init__(
        self,
        starts: _Markers,
        ends: _Markers = (),
        around: _Markers = (),
    ):
        """starts, ends: markers before and after a call. around: others, which are read over."""
        self._starts = starts
        self._ends = ends
        self._around = around
        super().__init__()

    def read(self) -> Reading:
        passed = self._around
        while True:
            marker = yield from self.until(self._starts + passed)
            passed = self._around
            if marker in self._starts:
                is_cut_short = yield from self.attempt()
                if is_cut_short:  # its end is still to come
                    passed += self._ends

    def attempt(self) -> Finding[bool]:
        """Read calls behind a marker. True: the last one had begun, and ended badly."""
        n_before = self._n_calls
        try:
            yield from self.read_calls()
            self.mark()
            return False
        except Malformed:
            self.give_back()
            return self._n_calls > n_before

    def read_calls(self) -> Reading:
        """What follows a marker. Raises Malformed."""
        raise NotImplementedError


class TaggedCalls(_CallReader, JsonReader):
    """A JSON object between two tags."""

    def __init__(self, start: str, end: str):
        self._end = end
        super().__init__((start,), (end,))

    def read_calls(self) -> Reading:
        yield from self.skip_blanks()
        yield from self.read_call()
        yield from self.expect_next(self._end)


class BareCalls(_CallReader, JsonReader):
    """Llama: JSON objects that are the whole turn, separated by semicolons, with or without a tag
    before them. Without one only tools that were given can be called.
    """

    def __init__(self, tag: str, names: frozenset[str]):
        self._given = names
        super().__init__((tag,))

    def read(self) -> Reading:
        if (yield from self.peek_filled()) == "{":
            self.names = self._given
            yield from self.attempt()
            self.names = None
        else:
            self.unread("".join(self._since_mark))
        yield from super().read()

    def read_calls(self) -> Reading:
        yield from self.skip_blanks()
        yield from self.read_call()
        while True:
            yield from self.expect_next(";")
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


class NamedCalls(_CallReader, JsonReader):
    """DeepSeek: a name, then the arguments as JSON, with markers around them."""

    def __init__(self, markers: NameMarkers):
        self._markers = markers
        super().__init__((markers.start,), (markers.end,), markers.around)

    def read_calls(self) -> Reading:
        yield from self.expect(self._markers.before_name)
        name = yield from self.read_name()
        yield from self.skip_blanks()
        yield from self.any_of(self._markers.after_name)
        yield from self.read_named(name)
        yield from self.expect_next(self._markers.before_end)
        yield from self.expect_next(self._markers.end)

    def read_named(self, name: str) -> Reading:
        """The arguments of a call."""
        yield from self.skip_blanks()
        yield from self.look_for("{")
        yield from self.read_arguments(self.begin_call(name))

    def read_name(self) -> Finding[str]:
        """A name without quotes."""
        name = ""
        while not _ends_name(char := (yield from self.next_char())):
            name += char
        self.unread(char)
        return self.checked_name(name)


def _ends_name(char: str) -> bool:
    return char in _BEHIND_NAME or char.isspace()


class MistralCalls(NamedCalls):
    """Both of Mistral's forms: a list of JSON objects, and (since v11) names with arguments."""

    _ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"

    def __init__(self, start: str):
        self._markers = NameMarkers(start)
        _CallReader.__init__(self, (start,))

    def new_id(self) -> str:
        """Nine letters and digits: Mistral's templates take no other."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))

    def read_calls(self) -> Reading:
        first = yield from self.peek_filled()
        if first == "[":
            yield from self._read_list()
        elif first == "{":
            yield from self.read_call()
        else:
            name = yield from self.read_name()
            yield from self._pass_markers()
            yield from self.read_named(name)

    def _pass_markers(self) -> Reading:
        """What stands between a name and its arguments, among it the model's own name of the call;
        ours are known to be new.
        """
        if (yield from self.peek_filled()) != "[":
            return
        if (yield from self.any_of((self._ARGS, self._CALL_ID))) == self._CALL_ID:
            yield from self.read_name()
            yield from self.expect(self._ARGS)

    def _read_list(self) -> Reading:
        behind = yield from self.next_char()
        while behind != "]":
            yield from self.skip_blanks()
            yield from self.read_call()
            yield from self.skip_blanks()
            behind = yield from self.any_of((",", "]"))


class PythonCalls(_CallReader):
    """Gemma 3: Python in a fenced block. The arguments of a call come when the block ends."""

    _FENCE = "```"

    def __init__(self, start: str, names: frozenset[str]):
        self._names = names
        super().__init__((start,))

    def read_calls(self) -> Reading:
        code = ""
        try:
            while not code.endswith(self._FENCE):
                code += yield from self.next_char()
                if len(code) > _MOST_CHARS:
                    raise Malformed
        except Ended:
            with suppress(Malformed):
                self._call(code)  # the turn is over, and what there is may be whole
            raise
        self._call(code.removesuffix(self._FENCE))

    def _call(self, code: str) -> None:
        """Say the calls of some code. Raises Malformed if it is none."""
        for name, arguments in _python_calls(code, self._names):
            self.add_arguments(self.begin_call(name), arguments)


def _python_calls(code: str, names: frozenset[str]) -> list[tuple[str, str]]:
    """(name, arguments as JSON text) of each call in a line or a list of calls with keyword
    arguments, with or without `print(...)` around it. Raises Malformed for anything else, and for
    functions whose name is not among `names`.
    """
    if len(code) > _MOST_CHARS:
        raise Malformed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes
            parsed = ast.parse(code.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Malformed from None
    calls: list[tuple[str, str]] = []
    for statement in parsed.body:
        if not isinstance(statement, ast.Expr):
            raise Malformed
        for expression in _listed(statement.value):
            calls.append(_python_call(expression, names))
    if not calls:
        raise Malformed
    return calls


def _listed(expression: ast.expr) -> list[ast.expr]:
    if isinstance(expression, ast.List):
        return expression.elts
    return [expression]


def _python_call(expression: ast.expr, names: frozenset[str]) -> tuple[str, str]:
    if not isinstance(expression, ast.Call):
        raise Malformed
    name = ast.unparse(expression.func)
    if name == "print" and "print" not in names and len(expression.args) == 1:
        return _python_call(expression.args[0], names)
    if expression.args or name not in names:
        raise Malformed
    arguments: dict[str, object] = {}
    try:
        for word in expression.keywords:
            if word.arg is None:
                raise Malformed
            arguments[word.arg] = ast.literal_eval(word.value)
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        raise Malformed from None
