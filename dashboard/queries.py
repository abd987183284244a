"""Numbers and words in the query of a URL; what is wrong is named."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from jitney.engine.errors import RequestError

#: Beyond every limit.
_ANY = 2**62
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Query:
    """What a request asks for. All raise RequestError."""

    request: Request

    def whole(self, name: str, default: int, low: int = -_ANY, high: int = _ANY) -> int:
        """A whole number."""
        text = self.request.query_params.get(name)
        if text is None:
            return default
        value = _number(text)
        if value is None or not low <= value <= high:
            limits = f" from {low} to {high}" if low > -_ANY or high < _ANY else ""
            raise _must_be(name, f"a whole number{limits}")
        return value

    def seconds(self, name: str, default: float) -> float:
        """A time or a span in seconds."""
        with contextlib.suppress(ValueError):
            value = float(self.request.query_params.get(name, default))
            if math.isfinite(value):
                return value
        raise _must_be(name, "a number of seconds")

    def word(self, name: str, choices: Sequence[str]) -> str:
        """One of `choices`, the first by default."""
        value = self.request.query_params.get(name, choices[0])
        if value not in choices:
            raise _must_be(name, f"one of: {', '.join(choices)}")
        return value


def _number(text: str) -> int | None:
    digits = text.removeprefix("-")
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS
    return int(text) if is_number else None


def _must_be(name: str, what: str) -> RequestError:
    return RequestError(f"{name} must be {what}", param=name)
