"""An upload: multipart/form-data, written to disk as it comes."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from jitney.engine.common.errors import RequestError
from jitney.engine.server.http.errors import HttpError
from jitney.engine.server.tasks.batches.keeper import StoreKeeper

#: Bytes that are written at once.
_BLOCK = 1 << 18
#: Fields beside the file, and bytes of each.
_MOST_FIELDS, _MOST_FIELD_BYTES = 16, 1024
_MOST_NAME_CHARS = 255
# It tells of every bad form, which the client is told too.
logging.getLogger("python_multipart").setLevel(logging.ERROR)
_NOT_PRINTED = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(slots=True)
class Upload:
    """What an upload brought, beside its bytes."""

    #: What the client calls the file, without folders; never a path of ours.
    name: str = ""
    size: int = 0
    #: The other fields of the form.
    fields: dict[str, str] = field(default_factory=dict[str, str])

    @classmethod
    async def receive(cls, request: Request, keeper: StoreKeeper, path: Path, limit: int) -> Upload:
        """Write the form's `file` to a path, which is removed again if anything goes wrong. Raises
        RequestError, HttpError 413 for a file of more than `limit` bytes, and StoreUnavailable.
        """
        file = await keeper.on_disk(path.open, "wb")
        try:
            form = _Form(_boundary(request), limit)
            async for block in _blocks(form, request):
                await keeper.on_disk(file.write, block)
            await keeper.on_disk(StoreKeeper.settle, file)
            return form.whole()
        except BaseException:
            with suppress(OSError):  # what is left in its buffer has no room either
                file.close()
            path.unlink(missing_ok=True)
            raise


async def _blocks(form: _Form, request: Request) -> AsyncIterator[bytes]:
    async for chunk in request.stream():
        form.feed(chunk)
        if len(form.pending) >= _BLOCK:
            yield form.take()
    form.end()
    yield form.take()


def _boundary(request: Request) -> bytes:
    _, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise RequestError("the Content-Type of a form must name its boundary")
    return boundary


class _Form:
    """Takes a form apart as its bytes come."""

    def __init__(self, boundary: bytes, limit: int):
        #: Bytes that the file may have.
        self._limit = limit
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )
        #: Bytes of the file that were not taken yet.
        self.pending = bytearray()
        self._upload = Upload()
        self._has_file = False
        self._has_end = False
        # Of the part that is being read.
        self._headers: dict[bytes, bytes] = {}
        self._header, self._value = bytearray(), bytearray()
        self._name = ""
        self._text = bytearray()

    def feed(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise RequestError(f"the form is not multipart/form-data: {error}") from None

    def end(self) -> None:
        """Nothing more comes."""
        if not self._has_end:
            raise RequestError("the form ends before its closing boundary")

    def take(self) -> bytes:
        block, self.pending = bytes(self.pending), bytearray()
        self._upload.size += len(block)
        return block

    def whole(self) -> Upload:
        """All of it, once it has ended and every block was taken."""
        if not self._has_file:
            raise RequestError("the form has no file", param="file")
        if not self._upload.size:
            raise RequestError("the file is empty", param="file")
        return self._upload

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
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._text = bytearray()
        if self._name == "file":
            self._begin_file(options.get(b"filename"))
        elif len(self._upload.fields) >= _MOST_FIELDS:
            raise RequestError(f"a form may have at most {_MOST_FIELDS} fields beside its file")

    def _begin_file(self, name: bytes | None) -> None:
        if self._has_file:
            raise RequestError("the form has two files", param="file")
        self._has_file = True
        self._upload.name = _plain_name((name or b"").decode(errors="replace"))
        if not self._upload.name:
            raise RequestError("the file needs a filename", param="file")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self.pending += data[start:end]
            self._check_size()
            return
        self._text += data[start:end]
        if len(self._text) > _MOST_FIELD_BYTES:
            raise RequestError(
                f"a field may have at most {_MOST_FIELD_BYTES} bytes", param=self._name
            )

    def _check_size(self) -> None:
        if self._upload.size + len(self.pending) > self._limit:
            raise HttpError(
                413,
                f"the file may have at most {self._limit} bytes (file_limit)",
                param="file",
                close=True,
            )

    def _on_part_end(self) -> None:
        if self._name != "file":
            self._upload.fields[self._name] = self._text.decode(errors="replace")

    def _on_end(self) -> None:
        self._has_end = True


def _plain_name(name: str) -> str:
    """What comes behind the last slash of either kind, printable."""
    last = re.split(r"[/\\]", name)[-1]
    return _NOT_PRINTED.sub("", last)[-_MOST_NAME_CHARS:].strip()
