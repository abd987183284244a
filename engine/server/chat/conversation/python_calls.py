"""Calls in Python syntax. Arguments must be literals; nothing is executed."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection
from contextlib import suppress
from keyword import iskeyword

from jitney.engine.server.chat.conversation.reading import CallReader, Ended, Malformed, Reading

#: Most characters of one call: Python's parser takes time and memory for all of them at once.
_MOST_CHARS = 1 << 14
_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None}


class PythonCalls(CallReader):
    """Python code between two markers. Arguments are reported when the code ends."""

    def __init__(self, start: str, end: str, names: Collection[str]):
        self._end = end
        self._names = names
        #: Whether strings may hold the end.
        self._may_be_quoted = not end.startswith("<")
        super().__init__((start,))

    def read_calls(self) -> Reading:
        code = quote = ""
        try:
            while (quote and self._may_be_quoted) or not code.endswith(self._end):
                char = yield from self.next_char()
                quote = _open_quote(code, quote, char)
                code += char
                if len(code) > _MOST_CHARS:
                    raise Malformed
        except Ended:
            with suppress(Malformed):
                self._call(code)  # the turn is over, and the code may be complete
            raise
        self._call(code.removesuffix(self._end))

    def _call(self, code: str) -> None:
        """Report the calls in a piece of code. Raises Malformed if it has none."""
        for name, arguments in _python_calls(code, self._names):
            self.add_arguments(self.begin_call(name), arguments)


def _open_quote(code: str, quote: str, char: str) -> str:
    """The quote that is open after `char`, or "". quote: the one open before it."""
    if not quote:
        return char if char in "'\"" else ""
    backslashes = len(code) - len(code.rstrip("\\"))
    is_end = char == "\n" or (char == quote and backslashes % 2 == 0)
    return "" if is_end else quote


def _python_calls(code: str, names: Collection[str]) -> list[tuple[str, str]]:
    """(name, JSON arguments) of each call in a line or list of calls with keyword arguments,
    perhaps in `print(...)`. Raises Malformed for others, and for names not in `names`.
    """
    if len(code) > _MOST_CHARS:
        raise Malformed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes
            parsed = _parsed(_with_aliases(code.strip(), names))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Malformed from None
    calls: list[tuple[str, str]] = []
    for statement in parsed.body:
        if not isinstance(statement, ast.Expr):
            raise Malformed
        value = statement.value
        listed = value.elts if isinstance(value, ast.List) else [value]
        calls += [_call(expression, names) for expression in listed]
    if not calls:
        raise Malformed
    return calls


def _parsed(code: str) -> ast.Module:
    """Parse Python code with line breaks in strings and words of JSON, as models write it."""
    try:
        parsed = ast.parse(code)
    except SyntaxError:
        parsed = ast.parse(_STRING.sub(lambda match: match[0].replace("\n", r"\n"), code))
    return _PythonWords().visit(parsed)


class _PythonWords(ast.NodeTransformer):
    """Replaces JSON's true, false and null by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def _call(expression: ast.expr, names: Collection[str]) -> tuple[str, str]:
    if not isinstance(expression, ast.Call):
        raise Malformed
    name = _without_aliases(ast.unparse(expression.func), names)
    if name == "print" and "print" not in names and len(expression.args) == 1:
        return _call(expression.args[0], names)
    if expression.args or name not in names:
        raise Malformed
    arguments: dict[str, object] = {}
    try:
        for word in expression.keywords:
            value = ast.literal_eval(word.value)
            arguments |= value if word.arg is None else {word.arg: value}
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return name, _without_aliases(text, names)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        raise Malformed from None


def _aliases(names: Collection[str]) -> dict[str, str]:
    """Function names that are no Python identifiers -> aliases."""
    return {
        name: f"function_{number}_without_a_name"
        for number, name in enumerate(names)
        if not all(part.isidentifier() and not iskeyword(part) for part in name.split("."))
    }


def _with_aliases(code: str, names: Collection[str]) -> str:
    """Python code in which all functions have names of Python's."""
    for name, alias in _aliases(names).items():
        code = re.sub(rf"(?<![\w.-]){re.escape(name)}(?=\()", alias, code)
    return code


def _without_aliases(text: str, names: Collection[str]) -> str:
    for name, alias in _aliases(names).items():
        text = text.replace(alias, name)
    return text
