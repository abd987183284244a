"""Calls that are written as Python, of which only literals are understood, and nothing is run."""

from __future__ import annotations

import ast
import json
import warnings
from contextlib import suppress

from jitney.engine.conversation.reading import CallReader, Ended, Malformed, Reading

#: Most characters of one call: Python's parser takes time and memory for all of them at once.
_MOST_CHARS = 1 << 14


class PythonCalls(CallReader):
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
            calls.append(_call(expression, names))
    if not calls:
        raise Malformed
    return calls


def _listed(expression: ast.expr) -> list[ast.expr]:
    if isinstance(expression, ast.List):
        return expression.elts
    return [expression]


def _call(expression: ast.expr, names: frozenset[str]) -> tuple[str, str]:
    if not isinstance(expression, ast.Call):
        raise Malformed
    name = ast.unparse(expression.func)
    if name == "print" and "print" not in names and len(expression.args) == 1:
        return _call(expression.args[0], names)
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
