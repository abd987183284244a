"""Reading of batch files: validation of lines, and their requests. Everything here blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import orjson

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.server.http.errors import echo
from jitney.engine.server.tasks.records import Fault, Line

#: Most faults that are reported per file.
MOST_FAULTS = 10
#: Most lines that are read at once.
_GROUP = 256
_MOST_ID_CHARS = 512
#: Most bytes of a line in addition to its body.
_ENVELOPE_BYTES = 4096


@dataclass(slots=True)
class _LineGroup:
    """A group of lines that were read together."""

    lines: list[Line] = field(default_factory=list[Line])
    #: Faults of invalid lines.
    faults: list[Fault] = field(default_factory=list[Fault])
    #: Whether the file has no further lines.
    done: bool = False


class LineReader:
    """Reads a file in groups of lines. most_bytes: of a request's body."""

    def __init__(self, path: Path, most_bytes: int):
        self._file: BinaryIO = path.open("rb")
        self._most_bytes = most_bytes + _ENVELOPE_BYTES
        self._number = 0
        self._start = 0

    def close(self) -> None:
        self._file.close()

    def next_group(self) -> _LineGroup:
        group = _LineGroup()
        for _ in range(_GROUP):
            raw = self._file.readline(self._most_bytes + 1)
            if not raw:
                group.done = True
                return group
            self._number += 1
            start, self._start = self._start, self._start + len(raw)
            if len(raw) > self._most_bytes:
                message = f"line {self._number} has more than {self._most_bytes} bytes"
                group.faults.append(Fault("invalid_json_line", message, self._number))
                group.done = True  # the start of the next line is unknown
                return group
            custom_id = _custom_id(raw, self._number) if raw.strip() else ""
            if isinstance(custom_id, Fault):
                group.faults.append(custom_id)
            elif custom_id:
                group.lines.append(Line(self._number, custom_id, start, len(raw)))
        return group


def _custom_id(raw: bytes, number: int) -> str | Fault:
    """The custom_id of a line, or the fault of the line."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        message = f"line {number} is not valid JSON: {error}"
        return Fault("invalid_json_line", message, number)
    if not isinstance(value, dict):
        return Fault("invalid_json_line", f"line {number} is not a JSON object", number)
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MOST_ID_CHARS:
        message = f"line {number} needs a custom_id, a text of 1 to {_MOST_ID_CHARS} characters"
        return Fault("missing_custom_id", message, number)
    return custom_id


@dataclass(frozen=True, slots=True)
class LineRequest:
    """The request of a line, or of a job."""

    #: Path of the route that answers it.
    url: str
    #: JSON of an object.
    body: bytes

    @classmethod
    def read(cls, raw: bytes, endpoint: str) -> LineRequest:
        """The request in a line. endpoint: the route it must name; "": any. Raises RequestError."""
        value: JsonDict = orjson.loads(raw)
        if value.get("method") != "POST":
            raise RequestError("method must be POST", param="method")
        url = value.get("url")
        if not isinstance(url, str):
            raise RequestError("url must be the path of a route", param="url")
        if endpoint and url != endpoint:
            raise RequestError(
                f"url {echo(url)} is not the batch's endpoint {endpoint}", param="url"
            )
        body = value.get("body")
        if not isinstance(body, dict):
            raise RequestError("body must be an object", param="body")
        if body.get("stream"):
            raise RequestError("a line of a batch has no stream", param="stream")
        return cls(url, orjson.dumps(body))

    @property
    def unstreamed_body(self) -> bytes:
        """The body with `stream` false, for routes that stream by default."""
        return orjson.dumps(orjson.loads(self.body) | {"stream": False})
