"""The page's files, from this installation alone: our own, and plotly.js out of the plotly
package.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from dataclasses import dataclass
from functools import partial
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
PLOTLY = "plotly.min.js"
#: Smaller files travel as they are.
GZIP_FROM = 1024


@dataclass(frozen=True, slots=True)
class Asset:
    """A file as it is sent. zipped: empty when that would not pay."""

    body: bytes
    zipped: bytes
    etag: str
    media_type: str


class Assets:
    """Files by name, read and compressed at their first use and kept."""

    def __init__(self) -> None:
        self._ours = {file.name: file for file in (files("jitney.dashboard") / "static").iterdir()}
        self._kept: dict[str, Asset] = {}
        self._reading = asyncio.Lock()

    async def respond(self, name: str, request: Request, status: int = 200) -> Response:
        """The file, or 304 when the browser has this very version. Raises HTTPException 404."""
        asset = await self._asset(name)
        zipped = bool(asset.zipped) and "gzip" in request.headers.get("accept-encoding", "")
        headers = {"etag": asset.etag, "cache-control": "no-cache", "vary": "accept-encoding"}
        if status == 200 and request.headers.get("if-none-match") == asset.etag:
            return Response(status_code=304, headers=headers)
        headers |= {"content-encoding": "gzip"} if zipped else {}
        return Response(asset.zipped if zipped else asset.body, status, headers, asset.media_type)

    async def _asset(self, name: str) -> Asset:
        if name != PLOTLY and (name not in self._ours or name.rpartition(".")[2] not in TYPES):
            raise HTTPException(404)
        async with self._reading:  # so that two pages do not compress the same megabytes at once
            if name not in self._kept:
                self._kept[name] = await asyncio.get_running_loop().run_in_executor(
                    None, partial(self._read, name)
                )
        return self._kept[name]

    def _read(self, name: str) -> Asset:
        """Blocking: plotly.js takes about 0.2 s to compress."""
        file = files("plotly") / "package_data" / PLOTLY if name == PLOTLY else self._ours[name]
        body = file.read_bytes()
        zipped = gzip.compress(body, 5, mtime=0) if len(body) >= GZIP_FROM else b""
        etag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
        return Asset(body, zipped, etag, TYPES[name.rpartition(".")[2]])
