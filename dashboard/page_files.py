"""The files of a page, in few responses: the document has its styles and first figures embedded,
and its script is a bundle of all imported modules.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Scope

_STATIC = Path(str(files("jitney.dashboard"))) / "static"
_PLOTLY = "plotly.min.js"
_PLOTLY_FILE = Path(str(files("plotly"))) / "package_data" / _PLOTLY
#: Smaller files are sent uncompressed.
_GZIP_FROM = 1024
_LEVEL = 5
#: `zlib` writes gzip's format.
_GZIP_BITS = 31
#: Suffix of a bundle (a module with all its imports), in place of ".js".
_BUNDLE = ".bundle.js"
#: A document's references to its styles and its script, and the place for its data.
_STYLE = re.compile(r'<link rel="stylesheet" href="assets/([^"]+)">\n?')
_SCRIPT = re.compile(r'<script type="module" src="assets/([^"]+)\.js">')
_END = "</body>"
#: Statements of a module. Scripts keep to these forms.
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([^"]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:const|class|function\*?) ([\w$]+))", re.MULTILINE)
#: Makes the JSON that is embedded in a document.
type FirstData = Callable[[], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class _Compressed:
    """A compressed file."""

    changed_ns: int
    body: bytes
    headers: dict[str, str]
    media_type: str | None


class PageFiles(StaticFiles):
    """Static files, compressed at their first use and cached. Browsers revalidate them each
    time.
    """

    def __init__(self) -> None:
        super().__init__(directory=_STATIC)
        #: Files by path. They are sent without a thread: beside a hundred streams, each file would
        #: wait 50 ms for one.
        self._compressed: dict[str, _Compressed] = {}
        #: Path of a bundle -> its modules.
        self._modules: dict[str, list[str]] = {}

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        if path == _PLOTLY:
            return str(_PLOTLY_FILE), _PLOTLY_FILE.stat()
        return super().lookup_path(path)

    async def get_response(self, path: str, scope: Scope) -> Response:
        if path.endswith(_BUNDLE):
            entry = path.removesuffix(_BUNDLE) + ".js"
            if self.lookup_path(entry)[1] is not None:
                return self._bundle(path, entry, scope)
        reads_gzip = accepts_gzip(scope)
        stored = self._compressed.get(path)
        if stored is not None and reads_gzip:
            _, file_status = self.lookup_path(path)
            if file_status is not None and file_status.st_mtime_ns == stored.changed_ns:
                return self._send(stored, scope)
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "no-cache"
        response.headers["vary"] = "accept-encoding"
        is_large = int(response.headers.get("content-length", 0)) >= _GZIP_FROM
        if not isinstance(response, FileResponse) or not is_large or not reads_gzip:
            return response
        stored = self._compressed[path] = await run_in_threadpool(_compress, response)
        return self._send(stored, scope)

    def _bundle(self, path: str, entry: str, scope: Scope) -> Response:
        """The script of a module and of all that it imports."""
        stored = self._compressed.get(path)
        if stored is None or stored.changed_ns != _newest(self._modules[path]):
            modules = self._modules[path] = _in_order(entry)
            changed, text = _newest(modules), _script(modules)
            headers = {
                "etag": f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"',
                "cache-control": "no-cache",
                "vary": "accept-encoding",
                "content-encoding": "gzip",
            }
            body = gzip.compress(text.encode(), _LEVEL, mtime=0)
            stored = self._compressed[path] = _Compressed(changed, body, headers, "text/javascript")
        if accepts_gzip(scope):
            return self._send(stored, scope)
        headers = stored.headers | {"content-encoding": "identity"}
        return Response(gzip.decompress(stored.body), 200, headers, stored.media_type)

    def _send(self, file: _Compressed, scope: Scope) -> Response:
        if self.is_not_modified(Headers(file.headers), Headers(scope=scope)):
            return NotModifiedResponse(Headers(file.headers))
        return Response(file.body, 200, file.headers, file.media_type)

    def page(self, name: str, scope: Scope, first: FirstData | None = None) -> Response:
        """A page. first: makes its first data, while the browser requests the script."""
        parts = _document(name, first)
        headers = {"cache-control": "no-store", "vary": "accept-encoding"}
        if accepts_gzip(scope):
            headers["content-encoding"] = "gzip"
            parts = zipped(parts)
        return StreamingResponse(parts, 200, headers, "text/html")

    def sign_in_page(self) -> Response:
        return FileResponse(_STATIC / "sign-in.html", 401, {"cache-control": "no-cache"})


def accepts_gzip(scope: Scope) -> bool:
    """Whether the client of a request reads gzip's format."""
    return "gzip" in Headers(scope=scope).get("accept-encoding", "")


def _compress(response: FileResponse) -> _Compressed:
    """Blocking: plotly.js takes about 0.2 s."""
    path = Path(response.path)
    headers = {name: response.headers[name] for name in ("etag", "cache-control", "vary")}
    headers["content-encoding"] = "gzip"
    changed = path.stat().st_mtime_ns
    body = gzip.compress(path.read_bytes(), _LEVEL, mtime=0)
    return _Compressed(changed, body, headers, response.media_type)


async def zipped(parts: AsyncGenerator[bytes], level: int = _LEVEL) -> AsyncGenerator[bytes]:
    """The parts in gzip's format, each flushed so that it can be decoded at once."""
    compressor = zlib.compressobj(level, wbits=_GZIP_BITS)
    async with aclosing(parts):
        async for part in parts:
            yield compressor.compress(part) + compressor.flush(zlib.Z_SYNC_FLUSH)
    yield compressor.flush()


async def _document(name: str, first: FirstData | None) -> AsyncGenerator[bytes]:
    """A page with embedded styles, a bundled script, and its first data at the end."""

    def style(match: re.Match[str]) -> str:
        return f"<style>\n{(_STATIC / match[1]).read_text()}</style>\n"

    text = _STYLE.sub(style, (_STATIC / name).read_text())
    text = _SCRIPT.sub(rf'<script type="module" src="assets/\1{_BUNDLE}">', text)
    body, end, rest = text.partition(_END)
    yield body.encode()
    if first is not None:
        # "<" is escaped, so that no markup begins within the element.
        data = (await first()).replace(b"<", b"\\u003c")
        yield b'<script id="first" type="application/json">' + data + b"</script>\n"
    yield (end + rest).encode()


def _newest(modules: list[str]) -> int:
    """Time of the newest change of the modules, ns."""
    return max((_STATIC / name).stat().st_mtime_ns for name in modules)


def _in_order(entry: str) -> list[str]:
    """A module and all its imports, in order of dependency."""
    ordered: dict[str, None] = {}

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"modules import each other: {' -> '.join((*above, name))}")
        if name in ordered:
            return
        for match in _IMPORT.finditer((_STATIC / name).read_text()):
            visit(match[2], (*above, name))
        ordered[name] = None

    visit(entry, ())
    return list(ordered)


def _script(modules: list[str]) -> str:
    """A bundle of modules: each except the last becomes a function, called at once, that returns
    the module's exports.
    """
    *libraries, entry = modules
    return "".join([*map(_as_function, libraries), *_statements(entry)])


def _as_function(name: str) -> str:
    exported = _EXPORT.findall((_STATIC / name).read_text())
    code = "".join(_statements(name))
    return f"const {_variable(name)} = (() => {{\n{code}return {{{', '.join(exported)}}};\n}})();\n"


def _statements(name: str) -> Iterator[str]:
    """A module's code, with imports replaced by the variables of modules."""

    def take(match: re.Match[str]) -> str:
        return f"const {{{match[1].replace(' as ', ': ')}}} = {_variable(match[2])};"

    yield _EXPORT.sub("", _IMPORT.sub(take, (_STATIC / name).read_text()))


def _variable(module: str) -> str:
    return f"${module.removesuffix('.js').replace('-', '_')}"
