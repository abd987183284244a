"""Reading untrusted JSON with bounds on its depth; writing long JSON in pieces."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import msgspec
import orjson
from starlette.responses import Response

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict, JsonValue
from jitney.engine.common.slices import Pieces
from jitney.engine.server.http.errors import HttpError, echo

_MAX_DEPTH = 64
#: orjson's error for a depth of more than a thousand levels.
_TOO_DEEP = "Recursion limit reached"
_CONTAINERS = frozenset({dict, list})
#: Values checked between two pauses of `TimeSlices`.
_LOOKS = 256
#: Placeholder for a LongJson in encoded text; no JSON text contains this byte.
_HOLE = b"\0"
#: Elements of a list that are written at once.
_GROUP = 16
#: The same for lists of plain numbers and strings that exist already.
_RUN = 2048


def read_object(body: bytes) -> Generator[None, None, JsonDict]:
    """The object in `body`; of equal keys the last counts. Work for `TimeSlices`. Raises HttpError
    400 invalid_json, or RequestError for numbers that are not finite.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if _TOO_DEEP in str(error):
            raise _too_deep() from None
        yield
        yield from _refuse_not_finite(body)
        raise HttpError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    yield
    if not isinstance(value, dict):
        raise HttpError(400, "the body must be a JSON object", code="invalid_json")
    yield from _check_depth(value)
    return value


def _too_deep() -> HttpError:
    return HttpError(
        400, f"the body is nested deeper than {_MAX_DEPTH} levels", code="invalid_json"
    )


def _check_depth(value: JsonValue) -> Generator[None, None, None]:
    """Raise HttpError for too many levels; iterates instead of recursing."""
    level: list[JsonValue] = [[value]]
    for _ in range(_MAX_DEPTH + 1):
        inner: list[JsonValue] = []
        for number, container in enumerate(level):
            values = _inside(container)
            if not _CONTAINERS.isdisjoint(map(type, values)):
                inner += [each for each in values if type(each) in _CONTAINERS]
            if number % _LOOKS == 0:
                yield
        if not inner:
            return
        level = inner
    raise _too_deep()


def _inside(container: JsonValue) -> list[JsonValue]:
    """The values of a list or of an object."""
    if isinstance(container, dict):
        return list(container.values())
    return container if isinstance(container, list) else []


def _refuse_not_finite(body: bytes) -> Generator[None, None, None]:
    """Raise RequestError with the path of the first NaN or Infinity, if nothing else is wrong."""
    try:
        value = json.loads(body.decode())
    except (ValueError, RecursionError):
        return
    yield from _check_depth(value)
    for place, (path, number) in enumerate(_numbers(value, "")):
        if not math.isfinite(number):
            field = re.split(r"[.\[]", path)[0]
            raise RequestError(f"{echo(path)} must be a finite number", param=field) from None
        if place % _LOOKS == 0:
            yield


def _numbers(value: JsonValue, path: str) -> Iterator[tuple[str, float]]:
    """All numbers, whole ones too, so that the caller can pause in between."""
    match value:
        case float() | int():
            yield path, value
        case dict():
            for key, item in value.items():
                yield from _numbers(item, f"{path}.{key}" if path else key)
        case list():
            for index, item in enumerate(value):
                yield from _numbers(item, f"{path}[{index}]")


class LongJson:
    """A list inside a value, whose JSON text comes in pieces; it is typed as the list."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: Callable[[], Iterator[bytes]]):
        self.pieces = pieces

    @classmethod
    def of[T](cls, make: Callable[[int], T], count: int) -> list[T]:
        """The list of make(0) to make(count - 1), made bit by bit if it is long."""
        if count <= _GROUP:
            return [make(place) for place in range(count)]
        return cls._joined(lambda: _groups(make, count))

    @classmethod
    def of_list[T](cls, values: list[T]) -> list[T]:
        """A LongJson of an existing list."""
        if len(values) <= _RUN:
            return values
        return cls._joined(lambda: _runs(values))

    @classmethod
    def of_each[T](cls, values: Iterable[T]) -> list[T]:
        """A list whose elements are made and written one by one, each in pieces; once."""
        return cls._joined(lambda: map(in_pieces, values))

    @classmethod
    def _joined(cls, runs: Callable[[], Iterable[Iterable[bytes]]]) -> Any:
        """runs: makes the texts of elements, without brackets."""
        return cls(lambda: _list_text(runs()))


def _list_text(runs: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    yield b"["
    for number, run in enumerate(runs):
        if number:
            yield b","
        yield from run
    yield b"]"


def _runs(values: list[Any]) -> Iterator[Iterable[bytes]]:
    for start in range(0, len(values), _RUN):
        yield [to_json(values[start : start + _RUN])[1:-1]]


def _groups(make: Callable[[int], object], count: int) -> Iterator[Iterable[bytes]]:
    for start in range(0, count, _GROUP):
        group = [make(place) for place in range(start, min(start + _GROUP, count))]
        yield [to_json(group)[1:-1]]


class _HoldsLongJson(Exception):
    """Raised for a value that contains a LongJson."""


def _written(item: object) -> msgspec.Raw:
    """Write texts that are JSON already, which msgspec itself cannot."""
    if isinstance(item, LongJson):
        raise _HoldsLongJson
    if isinstance(item, orjson.Fragment):
        return msgspec.Raw(orjson.dumps(item))
    raise TypeError(f"{type(item).__name__} cannot be written as JSON")


#: A value of JSON, or one made of structs, as JSON text; for a LongJson see `in_pieces`.
to_json = msgspec.json.Encoder(enc_hook=_written).encode


def in_pieces(value: object) -> Pieces:
    """The JSON text of `value`, written piece by piece where it is a LongJson."""
    try:
        text = to_json(value)
    except _HoldsLongJson:
        yield from _around_long(value)
    else:
        yield text


def in_runs(value: JsonDict) -> Pieces:
    """The JSON text of an object, with the lists in it written in runs."""
    yield from in_pieces(_with_long_lists(value))


def _with_long_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_long_lists(item) for name, item in value.items()}
    return LongJson.of_list(value) if isinstance(value, list) else value


def _around_long(value: object) -> Iterator[bytes]:
    long: list[LongJson] = []

    def leave_a_hole(item: object) -> msgspec.Raw:
        if not isinstance(item, LongJson):
            return _written(item)
        long.append(item)
        return msgspec.Raw(_HOLE)

    text = msgspec.json.encode(value, enc_hook=leave_a_hole)
    before, *parts = text.split(_HOLE)
    yield before
    for item, part in zip(long, parts, strict=True):
        yield from item.pieces()
        yield part


def json_answer(
    value: object, headers: dict[str, str] | None = None, *, status: int = 200
) -> Response:
    """A JSON answer."""
    return Response(to_json(value), status, headers=headers, media_type="application/json")
