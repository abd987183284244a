"""Reading a JSON body that may be hostile: depth first, then parse, then a reason that names the
field. And writing JSON that is too long to be written at once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import orjson

from jitney.engine.api.errors import HttpError, echo
from jitney.engine.errors import RequestError

_MAX_DEPTH = 64
#: A string, closed or not: a scan that must find the closing quote would take quadratic time on a
#: body of quotes.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
#: Stands where a LongJson belongs; no JSON text contains this byte.
_HOLE = b"\0"
#: Elements of a list that are written at once.
_GROUP = 16
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; of equal keys the last one counts.

    Raises HttpError 400 invalid_json, or RequestError for a number that is not finite.
    """
    if _depth(body) > _MAX_DEPTH:
        raise HttpError(
            400, f"the body is nested deeper than {_MAX_DEPTH} levels", code="invalid_json"
        )
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        path = _not_finite(body)
        if path is not None:
            field = re.split(r"[.\[]", path)[0]
            raise RequestError(f"{echo(path)} must be a finite number", param=field) from None
        raise HttpError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise HttpError(400, "the body must be a JSON object", code="invalid_json")
    return value


def _depth(body: bytes) -> int:
    """How deeply the brackets outside strings nest; no recursion, linear time."""
    if body.count(b"[") + body.count(b"{") < 2:
        return 1
    brackets = _STRING.sub(b"", body).translate(None, _NOT_BRACKETS)
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0)


def _not_finite(body: bytes) -> str | None:
    """The path of the first NaN, Infinity or 1e999, if that is all that is wrong (the fast parser
    does not say).
    """
    try:
        value = json.loads(body.decode())
    except ValueError:
        return None
    for path, number in _numbers(value, ""):
        if not math.isfinite(number):
            return path
    return None


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    match value:
        case float():
            yield path, value
        case dict():
            for key, item in value.items():
                yield from _numbers(item, f"{path}.{key}" if path else key)
        case list():
            for index, item in enumerate(value):
                yield from _numbers(item, f"{path}[{index}]")


@dataclass(frozen=True, slots=True)
class LongJson:
    """A value, somewhere inside another one, whose JSON text comes in pieces."""

    pieces: Iterator[bytes]


def in_pieces(value: Any) -> Generator[bytes, None, None]:
    """The JSON text of `value`, written piece by piece where it is a LongJson."""
    long: list[LongJson] = []

    def leave_a_hole(item: object) -> orjson.Fragment:
        if not isinstance(item, LongJson):
            raise TypeError(f"{type(item).__name__} is no JSON")
        long.append(item)
        return orjson.Fragment(_HOLE)

    text = orjson.dumps(value, leave_a_hole, orjson.OPT_PASSTHROUGH_DATACLASS)
    if not long:
        yield text
        return
    before, *parts = text.split(_HOLE)
    yield before
    for item, part in zip(long, parts, strict=True):
        yield from item.pieces
        yield part


def json_list(make: Callable[[int], Any], count: int) -> list[Any] | LongJson:
    """The list of make(0) to make(count - 1), made bit by bit if it is long."""
    if count <= _GROUP:
        return [make(place) for place in range(count)]
    return LongJson(_groups(make, count))


def _groups(make: Callable[[int], Any], count: int) -> Iterator[bytes]:
    mark = b"["
    for start in range(0, count, _GROUP):
        group = [make(place) for place in range(start, min(start + _GROUP, count))]
        yield mark + orjson.dumps(group)[1:-1]
        mark = b","
    yield b"]"
