"""Over TLS with a certificate made here, and behind a proxy: what the server speaks, whom it
believes and what the page's cookie says.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_fakes import ByteTokenizer, FakeClient, until

from jitney.dashboard import Dashboard
from jitney.engine.common.errors import ConfigError
from jitney.engine.config.layers import ResolvedConfig
from jitney.engine.config.schema import ServerSection
from jitney.engine.server.app import create_app
from jitney.engine.server.http.http_server import HttpServer
from jitney.engine.server.http.listen import check_tls

KEY = "a long administrator's key"
PROMPT = {"model": "m", "prompt": "Hi", "max_tokens": 3}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Files of a certificate for this machine, signed by itself, and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(
        [*command.split(), *names, "-keyout", str(key), "-out", str(cert)],
        check=True,
        capture_output=True,
    )
    key.chmod(0o600)
    return str(cert), str(key)


@contextlib.contextmanager
def serving(**flags: Any) -> Iterator[str]:
    """The HTTP side as `jitney serve` runs it; yields its URL."""
    config = ResolvedConfig.load(None, {"JITNEY_ADMIN_KEYS": KEY}, {"port": "0"} | flags).config
    http = HttpServer.of(config.server)
    http.settings = settings = replace(
        http.settings,
        public_prefixes=("/dashboard/",),
        public_paths=frozenset({"/", "/dashboard"}),
    )
    client: Any = FakeClient()
    routes = Dashboard(client, settings).mounted("/dashboard")
    app = create_app(client, ByteTokenizer(), settings, "m", routes)  # type: ignore[arg-type]
    server = http.serve_app(app)
    with http.listening():
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[http.bound])))
        thread.start()
        try:
            until(lambda: server.started)
            yield http.url
        finally:
            server.should_exit = True
            thread.join(120)
        assert not thread.is_alive()


def client_of(url: str, certificate: str = "", **options: Any) -> httpx.Client:
    verify = ssl.create_default_context(cafile=certificate) if certificate else True
    return httpx.Client(base_url=url, verify=verify, trust_env=False, timeout=60, **options)


def cookie_of(web: httpx.Client, **headers: str) -> set[str]:
    answer = web.post("/dashboard/sign-in", json={"key": KEY}, headers=headers)
    assert answer.status_code == 204
    return set(answer.headers["set-cookie"].split("; ")[1:])


def test_a_server_with_a_certificate_speaks_tls(certificate: tuple[str, str]):
    cert, key = certificate
    bearer = {"authorization": f"Bearer {KEY}"}
    with serving(ssl_certfile=cert, ssl_keyfile=key) as url, client_of(url, cert) as web:
        assert url.startswith("https://127.0.0.1:")
        answer = web.post("/v1/completions", json=PROMPT, headers=bearer)
        assert answer.status_code == 200 and answer.json()["choices"]
        with web.stream(
            "POST", "/v1/completions", json=PROMPT | {"stream": True}, headers=bearer
        ) as stream:
            assert list(stream.iter_lines())[-2] == "data: [DONE]"
        assert "Secure" in cookie_of(web)
        assert web.get("/dashboard/slots").status_code == 200, "and the cookie is sent back"
        same = {"origin": url, "content-type": "application/json"}
        assert web.post("/dashboard/lab", content=b"{}", headers=same).status_code != 403
        with pytest.raises(httpx.ConnectError), client_of(url) as stranger:
            stranger.get("/livez")
        with pytest.raises(httpx.HTTPError), client_of(url.replace("https", "http")) as plain:
            plain.get("/livez")


def test_bad_heads_are_answered_over_tls_too(certificate: tuple[str, str]):
    """TLS has no half-closed connections, which an answer before the close would use."""
    cert, key = certificate
    with serving(ssl_certfile=cert, ssl_keyfile=key) as url:
        port = int(url.rpartition(":")[2])
        context = ssl.create_default_context(cafile=cert)
        with (
            socket.create_connection(("127.0.0.1", port), 10) as bare,
            context.wrap_socket(bare, server_hostname="localhost") as wrapped,
        ):
            wrapped.sendall(b"NOT HTTP\r\n\r\n")
            got = b""
            while part := wrapped.recv(4096):
                got += part
        assert got.startswith(b"HTTP/1.1 400 ") and b'"error"' in got


@pytest.mark.parametrize(
    ("proxies", "proto", "secure"),
    [
        ("127.0.0.1", "https", True),
        ("127.0.0.0/8", "https", True),
        ("127.0.0.1", "http", False),
        ("10.0.0.1", "https", False),
        ("", "https", False),
    ],
)
def test_only_a_trusted_proxy_says_that_it_was_tls(proxies: str, proto: str, secure: bool):
    with serving(trusted_proxies=proxies) as url, client_of(url) as web:
        assert ("Secure" in cookie_of(web, **{"x-forwarded-proto": proto})) is secure


@pytest.mark.parametrize("proxies", ["127.0.0.1", ""])
def test_guesses_are_counted_by_the_address_that_a_trusted_proxy_names(proxies: str):
    def guess(web: httpx.Client, address: str) -> int:
        headers = {"authorization": "Bearer wrong", "x-forwarded-for": address}
        return web.get("/v1/models", headers=headers).status_code

    with serving(trusted_proxies=proxies) as url, client_of(url) as web:
        assert [guess(web, "192.0.2.1") for _ in range(11)] == [401] * 10 + [429]
        assert guess(web, "192.0.2.2") == (401 if proxies else 429)


def test_a_path_that_a_proxy_takes_away():
    """The proxy sends /v1/models for what the client called /jitney/v1/models."""
    with serving(root_path="/jitney") as url, client_of(url) as web:
        assert web.get("/livez").status_code == 200
        assert web.get("/v1/models").status_code == 401
        bearer = {"authorization": f"Bearer {KEY}"}
        assert web.get("/v1/models", headers=bearer).json()["data"][0]["id"] == "m"
        assert web.get("/metrics").status_code == 401
        assert web.get("/dashboard/slots").status_code == 401
        assert web.get("/dashboard/").status_code == 401 and "form" in web.get("/dashboard/").text
        assert web.get("/dashboard").headers["location"] == "dashboard/"
        assert web.get("/dashboard/assets/page.js").status_code == 200
        assert "Path=/jitney/dashboard" in cookie_of(web)
        assert web.post("/livez", json={}).status_code == 405
        counted = web.get("/metrics", headers=bearer).text
        assert 'route="/v1/models"' in counted


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"ssl_keyfile": "key.pem"}, "without ssl_certfile"),
        ({"root_path": "jitney/"}, "root-path"),
        ({"root_path": "/jitney/"}, "root-path"),
        ({"trusted_proxies": "proxy.example"}, "'proxy.example' is not an address"),
        ({"trusted_proxies": "*"}, "'*' is not an address"),
    ],
)
def test_wrong_flags_are_named(flags: dict[str, str], says: str):
    with pytest.raises(ConfigError) as error:
        ResolvedConfig.load(None, {}, flags)
    assert says in str(error.value)


def test_a_certificate_that_cannot_be_used_is_one_line(
    certificate: tuple[str, str], tmp_path: Path
):
    cert, key = certificate
    check_tls(ServerSection())
    check_tls(ServerSection(ssl_certfile=cert, ssl_keyfile=key))
    both = tmp_path / "both.pem"
    both.write_text(Path(key).read_text() + Path(cert).read_text())
    both.chmod(0o600)
    check_tls(ServerSection(ssl_certfile=str(both)))
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("nothing")
    garbage.chmod(0o600)
    open_key = tmp_path / "open.pem"
    open_key.write_text(Path(key).read_text())
    open_key.chmod(0o644)
    for files, says in (
        ((cert, str(garbage)), "cannot be used"),
        ((str(garbage), key), "cannot be used"),
        ((cert, str(tmp_path / "absent")), "cannot be read"),
        ((str(tmp_path / "absent"), key), "cannot be read"),
        ((cert, str(open_key)), "open to other users"),
    ):
        with pytest.raises(ConfigError, match=says) as error:
            check_tls(ServerSection(ssl_certfile=files[0], ssl_keyfile=files[1]))
        assert "\n" not in str(error.value)


def test_connections_without_a_handshake_give_way_and_are_ended(certificate: tuple[str, str]):
    cert, key = certificate
    flags = {"ssl_certfile": cert, "ssl_keyfile": key, "max_connections": "1"}
    flags |= {"read_timeout_s": "2"}
    with serving(**flags) as url, client_of(url, cert) as web:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        crowd = [socket.create_connection(address, 20) for _ in range(100)]
        assert web.get("/livez").status_code == 200
        assert [sock.recv(1) for sock in crowd] == [b""] * 100
        with pytest.raises(httpx.HTTPError), client_of(url.replace("https", "http")) as plain:
            plain.get("/livez")
        assert web.get("/livez").status_code == 200


def test_an_idle_connection_over_tls_gives_way_at_once(certificate: tuple[str, str]):
    """Though its client never says farewell."""
    cert, key = certificate
    flags = {"ssl_certfile": cert, "ssl_keyfile": key, "max_connections": "1"}
    bearer = {"authorization": f"Bearer {KEY}"}
    context = ssl.create_default_context(cafile=cert)
    with serving(**flags) as url, client_of(url, cert) as web:
        plain = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
        idle = context.wrap_socket(plain, server_hostname="localhost")
        idle.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = idle.recv(1 << 16)
        while not answer.endswith(b"}"):
            answer += idle.recv(1 << 16)
        assert web.post("/v1/completions", json=PROMPT, headers=bearer).status_code == 200
        assert idle.recv(1) == b"", "the server's farewell"
        with socket.socket(fileno=idle.detach()) as bare:
            bare.settimeout(10)
            assert bare.recv(1) == b"", "and the connection is closed"
