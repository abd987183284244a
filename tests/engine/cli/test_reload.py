"""Keys and certificates of a running server are read again: who is let in, what ends, and that a
file that is not sound changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_fakes import PATIENCE_S, ByteTokenizer, FakeClient, Script, http_client, until

from jitney.dashboard import Dashboard
from jitney.engine.cli.serve import _reread
from jitney.engine.common.errors import ConfigError
from jitney.engine.config.arguments import Arguments
from jitney.engine.config.layers import ResolvedConfig
from jitney.engine.config.schema import Config, ServerSection
from jitney.engine.server.app import create_app
from jitney.engine.server.http.http_server import HttpServer
from jitney.engine.server.http.listen import AcceptedKeys
from jitney.engine.server.http.reload import AdapterNews
from jitney.engine.server.http.reloader import FreshSettings, Reloader

PROMPT = {"model": "m", "prompt": "Hi", "max_tokens": 200}
SLOW = Script("x" * 200, delay_s=0.05)


@dataclass
class Running:
    """A served engine whose keys lie in files. `users` and `admins` write them."""

    folder: Path
    engine: FakeClient = field(default_factory=FakeClient)
    settings: dict[str, str] = field(default_factory=dict)
    #: Settings that a reload reports.
    changed: list[str] = field(default_factory=list)
    #: Answers requests.
    host: Any = None
    url: str = ""

    def users(self, *keys: str) -> None:
        self._write("users", keys)

    def admins(self, *keys: str) -> None:
        self._write("admins", keys)

    def _write(self, name: str, keys: tuple[str, ...]) -> None:
        file = self.folder / name
        file.write_text("\n".join(keys) + "\n")
        file.chmod(0o600)

    @property
    def config(self) -> Config:
        files = {
            "api_key_file": str(self.folder / "users"),
            "admin_key_file": str(self.folder / "admins"),
        }
        given = {name: path for name, path in files.items() if Path(path).exists()}
        data = {"data_dir": str(self.folder / "data"), "port": "0"}
        return ResolvedConfig.load(None, {}, given | data | self.settings).config

    def http(self, key: str, **options: Any) -> httpx.Client:
        web = http_client(self.url, **options) if options else http_client(self.url)
        web.headers["authorization"] = f"Bearer {key}"
        return web

    def reload(self, key: str = "boss") -> httpx.Response:
        with self.http(key) as web:
            return web.post("/admin/reload")

    @contextlib.contextmanager
    def serving(self) -> Iterator[Running]:
        """As `jitney serve` puts it together."""
        config = self.config
        http = HttpServer.of(config.server)
        settings, keys = http.settings, http.accepted
        client: Any = self.engine
        pages = Dashboard(client, settings, keys=keys).mounted("/dashboard")
        own = settings.with_page("/dashboard")
        app = create_app(client, ByteTokenizer(), own, "m", pages, keys=keys)  # type: ignore[arg-type]
        server = http.serve_app(app)
        self.host = app.state.service
        http.reloads(self.host, lambda: FreshSettings(self.config.server, self.changed))
        with http.listening():
            answering = server.serve(sockets=[http.bound])
            thread = threading.Thread(target=lambda: asyncio.run(answering))
            thread.start()
            try:
                until(lambda: server.started)
                self.url = http.url
                yield self
            finally:
                server.should_exit = True
                thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    found = Running(tmp_path, FakeClient(SLOW))
    found.users("ann", "ben")
    found.admins("boss")
    with found.serving():
        yield found


def status(running: Running, key: str) -> int:
    with running.http(key) as web:
        return web.get("/v1/models").status_code


def test_an_added_key_is_accepted_and_a_removed_one_is_not(running: Running):
    assert [status(running, key) for key in ("ann", "ben", "eve")] == [200, 200, 401]
    running.users("ben", "eve")
    answer = running.reload()
    assert answer.status_code == 200
    keys = answer.json()["keys"]
    assert (keys["added"], keys["removed"], keys["changed"]) == (1, 1, 0)
    assert [status(running, key) for key in ("ann", "ben", "eve")] == [401, 200, 200]


def test_reading_again_what_has_not_changed_ends_nothing(running: Running):
    with (
        running.http("ann") as web,
        web.stream("POST", "/v1/completions", json=stream(max_tokens=20)) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        report = running.reload().json()
        assert report["keys"] | {"changed": 0} == dict.fromkeys(report["keys"], 0)
        assert (report["certificate"], report["engine_key"]) == ("none", "none")
        assert "[DONE]" in list(lines)[-2]


def stream(**fields: Any) -> dict[str, Any]:
    return PROMPT | {"stream": True} | fields


def test_a_removed_keys_requests_end_with_an_error(running: Running):
    plain: list[httpx.Response] = []

    def ask() -> None:
        with running.http("ann") as web:
            plain.append(web.post("/v1/completions", json=PROMPT))

    other = threading.Thread(target=ask)
    other.start()
    with running.http("ann") as web, web.stream("POST", "/v1/completions", json=stream()) as answer:
        lines = answer.iter_lines()
        next(lines)
        until(lambda: len(running.engine.open) == 2)
        running.users("ben")
        assert running.reload().json()["keys"]["requests_ended"] == 2
        rest = [line for line in lines if line.startswith("data: ")]
    other.join(PATIENCE_S)
    assert '"code":"key_removed"' in rest[-2] and rest[-1] == "data: [DONE]"
    assert plain[0].status_code == 401 and plain[0].json()["error"]["code"] == "key_removed"
    until(lambda: not running.engine.open)
    assert {id for id, _, _ in running.engine.aborts} == {one.id for one in running.engine.requests}


def test_a_removed_keys_idle_connections_close(running: Running):
    port = int(running.url.rpartition(":")[2])
    head = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %s\r\n\r\n"

    def ask(bare: socket.socket, key: bytes) -> bytes:
        bare.sendall(head % key)
        answer = b""
        while not answer.endswith(b"]}"):
            answer += bare.recv(1 << 16)
        return answer

    with contextlib.ExitStack() as stack:
        sockets = {
            key: stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            for key in (b"ann", b"ben")
        }
        for key, bare in sockets.items():
            assert ask(bare, key).startswith(b"HTTP/1.1 200")
        running.users("ben")
        running.reload()
        assert sockets[b"ann"].recv(1 << 16) == b""
        assert ask(sockets[b"ben"], b"ben").startswith(b"HTTP/1.1 200")


def test_a_removed_keys_jobs_and_batches_are_cancelled_and_its_files_stay(running: Running):
    line = (
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", '
        b'"body": {"model": "m", "prompt": "Hi", "max_tokens": 200}}'
    )
    job = {"endpoint": "/v1/completions", "body": PROMPT}
    with running.http("ann") as web:
        job_id = web.post("/v1/jobs", json=job).json()["id"]
        form = {"file": ("in.jsonl", line)}
        file_id = web.post("/v1/files", files=form, data={"purpose": "batch"}).json()["id"]
        batch = {
            "input_file_id": file_id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        batch_id = web.post("/v1/batches", json=batch).json()["id"]
    with running.http("ben") as web:
        other = web.post("/v1/jobs", json=job).json()["id"]
    until(lambda: len(running.engine.open) == 3)
    running.users("ben")
    keys = running.reload().json()["keys"]
    assert (keys["jobs_cancelled"], keys["batches_cancelled"]) == (1, 1)
    until(lambda: len(running.engine.open) == 1)
    running.users("ann", "ben")
    running.reload()
    with running.http("ann") as web:
        assert web.get(f"/v1/jobs/{job_id}").json()["status"] == "cancelled"
        until(lambda: web.get(f"/v1/batches/{batch_id}").json()["status"] == "cancelled")
        assert web.get(f"/v1/files/{file_id}/content").content == line
    with running.http("ben") as web:
        assert web.get(f"/v1/jobs/{other}").json()["status"] == "in_progress"


def test_a_removed_key_is_signed_out_of_the_page(running: Running):
    with http_client(running.url) as web:
        assert web.post("/dashboard/sign-in", json={"key": "ann"}).status_code == 204
        with web.stream("GET", "/dashboard/feed") as feed:
            parts = feed.iter_raw()
            next(parts)
            running.users("ben")
            running.reload()
            with contextlib.suppress(httpx.RemoteProtocolError):
                list(parts)  # it ends
        assert web.get("/dashboard/slots").status_code == 401


def test_an_administrators_key_that_is_a_users_now_sees_no_more_than_one(running: Running):
    with http_client(running.url) as web:
        web.post("/dashboard/sign-in", json={"key": "boss"})
        assert web.get("/dashboard/report").status_code == 200
        running.admins("root")
        running.users("ann", "ben", "boss")
        assert running.reload().json()["keys"]["changed"] == 1
        cookies = web.cookies
    with http_client(running.url) as web:  # the server has closed the connections of this key
        web.cookies = cookies
        assert web.get("/dashboard/report").status_code == 401
    assert status(running, "boss") == 200 and running.reload("boss").status_code == 403


def test_the_key_that_asks_may_remove_itself(running: Running):
    running.admins("root")
    assert running.reload("boss").json()["keys"]["removed"] == 1
    assert running.reload("boss").status_code == 401 and running.reload("root").status_code == 200


def test_only_administrators_may_ask_for_it(running: Running):
    assert running.reload("ann").status_code == 403


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda running: (running.folder / "users").chmod(0o644), ["users", "chmod 600"]),
        (lambda running: running.users("# nobody"), ["api_key_file", "holds no key"]),
        (
            lambda running: (running.folder / "users").write_bytes(b"\xff"),
            ["api_key_file", "users", "not text"],
        ),
        (
            lambda running: running.settings.update(admin_key_file="/nowhere/keys"),
            ["admin_key_file", "/nowhere/keys", "cannot be read"],
        ),
        (
            lambda running: [(running.folder / name).unlink() for name in ("users", "admins")],
            ["api_key_file", "no key is left"],
        ),
        (
            lambda running: running.settings.update(ssl_certfile="/nowhere/cert.pem"),
            ["/nowhere/cert.pem", "cannot be read"],
        ),
    ],
)
def test_a_file_that_is_not_sound_changes_nothing(running: Running, spoil: Any, words: list[str]):
    running.admins("boss", "root")
    spoil(running)
    answer = running.reload()
    assert answer.status_code == 409 and answer.json()["error"]["code"] == "reload_failed"
    assert all(word in answer.json()["error"]["message"] for word in words), answer.text
    assert [status(running, key) for key in ("ann", "root")] == [200, 401]


def test_a_server_without_keys_takes_none_while_it_runs(tmp_path: Path):
    running = Running(tmp_path)
    with running.serving():
        running.users("ann")
        answer = running.reload("any")
        assert answer.status_code == 409 and "api_key_file" in answer.json()["error"]["message"]
        assert status(running, "any") == 200


def test_limits_of_each_key_count_from_now_on(running: Running):
    with (
        running.http("ann") as web,
        web.stream("POST", "/v1/completions", json=stream(max_tokens=200)) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        running.settings.update(key_max_concurrent="1", key_jobs="1")
        assert running.reload().json()["settings"] == ["key_jobs", "key_max_concurrent"]
        assert web.post("/v1/completions", json=PROMPT).json()["error"]["code"] == "rate_limit"
        job = {"endpoint": "/v1/completions", "body": PROMPT}
        jobs = [web.post("/v1/jobs", json=job) for _ in range(2)]
        assert [answer.status_code for answer in jobs] == [202, 429]
        running.settings.clear()
        assert running.reload().json()["settings"] == ["key_jobs", "key_max_concurrent"]
        assert web.post("/v1/completions", json=PROMPT | {"max_tokens": 1}).status_code == 200
        assert running.reload().json()["settings"] == []


def test_a_keys_new_minute_holds_what_it_has_not_spent(running: Running):
    def ask(max_tokens: int) -> int:
        with running.http("ann") as web:
            body = PROMPT | {"max_tokens": max_tokens}
            return web.post("/v1/completions", json=body).status_code

    running.settings.update(key_tokens_per_minute="20")
    running.reload()
    assert [ask(8), ask(16)] == [200, 429]
    running.settings.update(key_tokens_per_minute="40")
    running.reload()
    assert [ask(16), ask(30)] == [200, 429]


def test_messages_are_signed_with_the_new_secret(running: Running):
    file = running.folder / "secret"

    def write(secret: str) -> None:
        file.write_text(secret)
        file.chmod(0o600)

    write("one")
    running.settings.update(webhook_secret_file=str(file))
    assert running.reload().json()["settings"] == ["webhook_secret_file"]
    write("two")
    assert running.reload().json()["settings"] == ["webhook_secret_file"]
    service = running.host
    assert service.settings.webhook_secret == "two"
    file.chmod(0o644)
    assert running.reload().status_code == 409
    assert service.settings.webhook_secret == "two"


def test_what_counts_at_the_next_start_only_is_named(running: Running):
    running.changed.append("max_seats")
    assert running.reload().json()["needs_restart"] == ["max_seats"]


def test_an_adapter_whose_files_changed_needs_a_restart_of_several_hosts(running: Running):
    async def changed() -> AdapterNews:
        return AdapterNews(needs_restart=["french"])

    reload = running.host.reload
    reload.read = lambda: FreshSettings(running.config.server, [], take_adapters=changed)
    answer = running.reload().json()
    assert (answer["needs_restart"], answer["adapters"]["needs_restart"]) == (
        ["adapters"],
        ["french"],
    )


async def never(config: Config) -> AdapterNews:
    raise AssertionError(config)


def test_the_configurations_file_is_read_again(tmp_path: Path):
    keys, file = tmp_path / "keys", tmp_path / "run.toml"
    keys.write_text("one\n")
    keys.chmod(0o600)
    file.write_text(f'[server]\nadmin_key_file = "{keys}"\n[engine]\nmax_seats = 4\n')
    args = Arguments(config=str(file), model_word=None, page_size=32)
    before = args.load_layers()
    file.write_text('[server]\nadmin_keys = ["two"]\ndrain_s = 1.5\n[engine]\nmax_seats = 8\n')
    fresh = _reread(args, before, never)
    assert AcceptedKeys.of(fresh.server) == AcceptedKeys(admins=("two",))
    assert sorted(fresh.needs_restart) == ["drain_s", "max_seats"]


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    try:
        subprocess.run(
            [*command.split(), *names, "-keyout", str(key), "-out", str(cert)],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    key.chmod(0o600)
    return cert, key


def shown_certificate(port: int) -> bytes:
    """What a handshake brings, DER."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), 10) as bare,
        context.wrap_socket(bare, server_hostname="localhost") as wrapped,
    ):
        return wrapped.getpeercert(binary_form=True) or b""


def der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


def test_new_handshakes_have_the_new_certificate_and_open_connections_go_on(tmp_path: Path):
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def install(pair: tuple[Path, Path]) -> None:
        cert.write_bytes(pair[0].read_bytes())
        key.write_bytes(pair[1].read_bytes())
        key.chmod(0o600)

    install(first)
    running = Running(tmp_path, settings={"ssl_certfile": str(cert), "ssl_keyfile": str(key)})
    running.admins("boss")
    trust = ssl.create_default_context(cafile=str(first[0]))
    with (
        running.serving(),
        httpx.Client(base_url=running.url, verify=trust, trust_env=False) as web,
    ):
        web.headers["authorization"] = "Bearer boss"
        port = int(running.url.rpartition(":")[2])
        assert web.post("/admin/reload").json()["certificate"] == "unchanged"
        assert shown_certificate(port) == der(first[0])
        install((second[0], first[1]))  # a key of another certificate
        broken = web.post("/admin/reload")
        assert broken.status_code == 409 and str(cert) in broken.json()["error"]["message"]
        assert shown_certificate(port) == der(first[0])
        install(second)
        assert web.post("/admin/reload").json()["certificate"] == "replaced"
        assert shown_certificate(port) == der(second[0])
        assert web.get("/v1/models").status_code == 200, "over the connection of before"


def test_a_server_neither_begins_nor_stops_to_speak_tls(tmp_path: Path):
    cert, key = make_certificate(tmp_path, "one")
    running = Running(tmp_path)
    running.admins("boss")
    with running.serving():
        running.settings = {"ssl_certfile": str(cert), "ssl_keyfile": str(key)}
        answer = running.reload()
        assert answer.status_code == 409 and "ssl_certfile" in answer.json()["error"]["message"]


def test_who_cannot_read_again_says_so():
    """Such as a fleet's endpoint on Ray."""
    section = ServerSection()
    settings = replace(HttpServer.of(section).settings, data_dir=None)
    app = create_app(FakeClient(), ByteTokenizer(), settings, "m")  # type: ignore[arg-type]

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as web:
            return await web.post("/admin/reload")

    assert asyncio.run(ask()).status_code == 404


@pytest.mark.parametrize("has_terminal", [True, False])
async def test_a_signal_reads_again_unless_the_terminal_is_gone(
    monkeypatch: pytest.MonkeyPatch, has_terminal: bool
):
    """The end of a terminal is told by the same signal."""
    terminal = iter([has_terminal, False])
    monkeypatch.setattr("jitney.engine.common.terminal._has_terminal", lambda: next(terminal))
    read, stopped = asyncio.Event(), asyncio.Event()

    def read_again() -> FreshSettings:
        loop.call_soon_threadsafe(read.set)
        raise ConfigError("no")

    loop = asyncio.get_running_loop()
    nothing: Any = None
    reloader = Reloader(ServerSection(), read_again, nothing, nothing, nothing, lambda: None)
    reloader.listen(lambda number: stopped.set())
    os.kill(os.getpid(), signal.SIGHUP)
    async with asyncio.timeout(120):
        await (stopped if has_terminal else read).wait()
    loop.remove_signal_handler(signal.SIGHUP)
    assert (read.is_set(), stopped.is_set()) == (not has_terminal, has_terminal)


def test_an_engine_of_a_fleet_reads_its_keys_again_when_it_is_told_them():
    program = """
import os, runpy, signal, jitney.engine.cli as cli

def main():
    tell = lambda *_: print(os.environ["JITNEY_ADMIN_KEYS"], flush=True)
    signal.signal(signal.SIGHUP, tell)
    tell()
    while True:
        signal.pause()

cli.main = main
runpy.run_module("jitney.engine.cli.fleet_engine", run_name="__main__")
"""
    environ = os.environ | {"JITNEY_ADMIN_KEYS": "before"}
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    ) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        assert engine.stdout.readline() == "before\n"
        engine.stdin.write('{"JITNEY_ADMIN_KEYS": "root,fleet"}\n')
        engine.stdin.flush()
        assert engine.stdout.readline() == "root,fleet\n"
        engine.stdin.close()
        assert engine.wait(PATIENCE_S) == -signal.SIGTERM
