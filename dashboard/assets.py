"""The page's files, from this installation alone: our own, and plotly.js out of the plotly
package.
"""

from __future__ import annotations

import gzip
import os
from functools import cache
from importlib.resources import files
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

_STATIC = Path(str(files("jitney.dashboard"))) / "static"
_PLOTLY = "plotly.min.js"
_PLOTLY_FILE = Path(str(files("plotly"))) / "package_data" / _PLOTLY
#: Smaller files travel as they are.
_GZIP_FROM = 1024


class PageFiles(StaticFiles):
    """Files by name; compressed at their first use and kept. A browser asks each time whether it
    has the newest version.
    """

    def __init__(self) -> None:
        super().__init__(directory=_STATIC)

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        if path == _PLOTLY:
            return str(_PLOTLY_FILE), _PLOTLY_FILE.stat()
        return super().lookup_path(path)

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "no-cache"
        response.headers["vary"] = "accept-encoding"
        accepted = Headers(scope=scope).get("accept-encoding", "")
        is_large = int(response.headers.get("content-length", 0)) >= _GZIP_FROM
        if not isinstance(response, FileResponse) or not is_large or "gzip" not in accepted:
            return response
        etag = response.headers["etag"]
        body = await run_in_threadpool(_compressed, str(response.path), etag)
        headers = {
            "etag": etag,
            "cache-control": "no-cache",
            "vary": "accept-encoding",
            "content-encoding": "gzip",
        }
        return Response(body, 200, headers, response.media_type)

    def sign_in_page(self) -> Response:
        """The form, for whom may not look."""
        return FileResponse(_STATIC / "sign-in.html", 401, {"cache-control": "no-cache"})


@cache
def _compressed(path: str, etag: str) -> bytes:
    """Blocking: plotly.js takes about 0.2 s. etag: another version of the file, another answer."""
    return gzip.compress(Path(path).read_bytes(), 5, mtime=0)
