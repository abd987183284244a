"""Numbers and words in the query of a URL; what is wrong is named."""

from __future__ import annotations

import math
from collections.abc import Sequence

from starlette.requests import Request

from jitney.engine.errors import RequestError


def whole(request: Request, name: str, default: int, low: int = -(2**62), high: int = 2**62) -> int:
    """A whole number from the query. Raises RequestError."""
    text = request.query_params.get(name)
    if text is None:
        return default
    digits = text.removeprefix("-")
    if not (
        digits.isascii() and digits.isdigit() and len(digits) <= 18 and low <= int(text) <= high
    ):
        limits = f" from {low} to {high}" if -low < 2**62 or high < 2**62 else ""
        raise RequestError(f"{name} must be a whole number{limits}", param=name)
    return int(text)


def seconds(request: Request, name: str, default: float) -> float:
    """A time or a span in seconds from the query. Raises RequestError."""
    text = request.query_params.get(name)
    try:
        value = default if text is None else float(text)
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
