"""Uploads: multipart/form-data, parsed and written to disk incrementally."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from jitney.engine.common.errors import RequestError
from jitney.engine.server.http.errors import HttpError

#: Bytes that are written at once.
_BLOCK = 1 << 18
#: Most fields in addition to the file, and bytes of each.
_MOST_FIELDS, _MOST_FIELD_BYTES = 16, 1024
_MOST_NAME_CHARS = 255
# The parser logs every invalid form, which the client gets as an error anyway.
logging.getLogger("python_multipart").setLevel(logging.ERROR)
_NOT_PRINTED = re.compile(r"[\x00-\x1f\x7f]")
#: Events of the parser, each with a method of `Upload`.
_EVENTS = (
    "on_part_begin",
    "on_header_field",
    "on_header_value",
    "on_header_end",
    "on_headers_finished",
    "on_part_data",
    "on_part_end",
    "on_end",
)


class Upload:
    """A form with a file, parsed incrementally. Raises RequestError, HttpError 413."""

    def __init__(self, request: Request, limit: int):
        self._request = request
        self._limit = limit
        _, options = parse_options_header(request.headers.get("content-type", ""))
        boundary = options.get(b"boundary", b"")
        if not boundary:
            raise RequestError("the Content-Type of a form must name its boundary")
        callbacks = {event: getattr(self, f"_{event}") for event in _EVENTS}
        self._parser = MultipartParser(boundary, callbacks)  # pyright: ignore[reportArgumentType]
        #: The client's name for the file, without folders; never used as a path.
        self.name = ""
        #: Bytes of the file received so far.
        self.size = 0
        #: The other fields of the form.
        self.fields: dict[str, str] = {}
        #: Bytes of the file that were parsed and not yet returned.
        self._pending = bytearray()
        self._has_ended = False
        # State of the current part.
        self._headers: dict[bytes, bytes] = {}
        self._header, self._value = bytearray(), bytearray()
        self._field = ""
        self._text = bytearray()

    async def blocks(self) -> AsyncIterator[bytes]:
        """The bytes of the file."""
        async for chunk in self._request.stream():
            try:
                self._parser.write(chunk)
            except FormParserError as error:
                raise RequestError(f"the form is not multipart/form-data: {error}") from None
            if len(self._pending) >= _BLOCK:
                yield self._take()
        if not self._has_ended:
            raise RequestError("the form ends before its closing boundary")
        if not self.name:
            raise RequestError("the form has no file", param="file")
        if not self.size:
            raise RequestError("the file is empty", param="file")
        yield self._take()

    def _take(self) -> bytes:
        block, self._pending = bytes(self._pending), bytearray()
        return block

    def _on_part_begin(self) -> None:
        self._headers = {}

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header, self._value = bytearray(), bytearray()

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._field = options.get(b"name", b"").decode(errors="replace")
        self._text = bytearray()
        if self._field != "file":
            if len(self.fields) >= _MOST_FIELDS:
                raise RequestError(f"a form may have at most {_MOST_FIELDS} fields beside its file")
            return
        if self.name:
            raise RequestError("the form has two files", param="file")
        self.name = _plain_name(options.get(b"filename", b"").decode(errors="replace"))
        if not self.name:
            raise RequestError("the file needs a filename", param="file")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field == "file":
            self._pending += data[start:end]
            self.size += end - start
            if self.size > self._limit:
                message = f"the file may have at most {self._limit} bytes (file_limit)"
                raise HttpError(413, message, param="file", close=True)
            return
        self._text += data[start:end]
        if len(self._text) > _MOST_FIELD_BYTES:
            raise RequestError(
                f"a field may have at most {_MOST_FIELD_BYTES} bytes", param=self._field
            )

    def _on_part_end(self) -> None:
        if self._field != "file":
            self.fields[self._field] = self._text.decode(errors="replace")

    def _on_end(self) -> None:
        self._has_ended = True


def _plain_name(name: str) -> str:
    """The part after the last slash or backslash, printable characters only."""
    last = re.split(r"[/\\]", name)[-1]
    return _NOT_PRINTED.sub("", last)[-_MOST_NAME_CHARS:].strip()
