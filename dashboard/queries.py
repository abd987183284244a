"""Numbers and words in the query of a URL; what is wrong is named."""

from __future__ import annotations

import math
from collections.abc import Sequence

from starlette.requests import Request

from jitney.engine.errors import RequestError

#: Beyond every limit.
_ANY = 2**62
_MOST_DIGITS = 18


def whole(request: Request, name: str, default: int, low: int = -_ANY, high: int = _ANY) -> int:
    """A whole number from the query. Raises RequestError."""
    text = request.query_params.get(name)
    if text is None:
        return default
    digits = text.removeprefix("-")
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS
    if not is_number or not low <= int(text) <= high:
        limits = ""
        if low > -_ANY or high < _ANY:
            limits = f" from {low} to {high}"
        raise RequestError(f"{name} must be a whole number{limits}", param=name)
    return int(text)


def seconds(request: Request, name: str, default: float) -> float:
    """A time or a span in seconds from the query. Raises RequestError."""
    try:
        value = float(request.query_params.get(name, default))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RequestError(f"{name} must be a number of seconds", param=name)
    return value


def word(request: Request, name: str, choices: Sequence[str]) -> str:
    """One of `choices`, the first by default. Raises RequestError."""
    value = request.query_params.get(name, choices[0])
    if value not in choices:
        raise RequestError(f"{name} must be one of: {', '.join(choices)}", param=name)
    return value
