"""What a web page of another site can make its visitor's browser do here: nothing."""

from __future__ import annotations

from typing import Any

import pytest
from api_fakes import ByteTokenizer, FakeClient, call, run

from jitney.dashboard import Dashboard
from jitney.engine.common.errors import ConfigError
from jitney.engine.config.layers import ResolvedConfig
from jitney.engine.server.app import create_app
from jitney.engine.server.http.http_server import HttpServer

PROMPT = {"model": "m", "prompt": "Hi", "max_tokens": 2}
#: What a browser says of a page's request, by where the page is.
SAME = {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}
OTHER = {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}
OTHER_PORT = {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}
OLD_OTHER = {"origin": "http://evil.example"}
SANDBOX = {"origin": "null"}
OLD_SAME = {"origin": "http://localhost:8000"}
ADDRESS_BAR = {"sec-fetch-site": "none"}


def app_of(**flags: Any):
    """The whole HTTP side as `jitney serve` makes it from these flags."""
    config = ResolvedConfig.load(None, {}, flags).config
    settings = HttpServer.of(config.server).settings
    client = FakeClient()
    routes = Dashboard(client, settings).mounted("/dashboard")  # type: ignore[arg-type]
    return create_app(client, ByteTokenizer(), settings, "m", routes)  # type: ignore[arg-type]


def ask(app, path: str, method: str = "POST", body: Any = PROMPT, **headers: str):
    head = {"host": "localhost:8000"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    sent = body if method == "POST" else b""
    return run(call(app, path, sent, method=method, headers=head, leave_on_chunk=2))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("rebound.example", 421),
        ("localhost.evil.example", 421),
        ("10.0.0.1", 421),
        ("mine.example:8000", 421),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/livez", "/dashboard/", "/dashboard/slots"])
def test_a_server_of_this_machine_answers_to_its_own_names_only(host: str, status: int, path: str):
    reply = ask(app_of(), path, "GET", host=host)
    assert reply.status == status
    if status != 200:
        assert reply.error["code"] == "host_not_allowed"
        assert "allowed_hosts" in reply.error["message"]


def test_more_names_are_a_setting():
    app = app_of(allowed_hosts="mine.example,[fe80::1]")
    for host in ("mine.example:8000", "[FE80::1]", "localhost"):
        assert ask(app, "/v1/models", "GET", host=host).status == 200
    assert ask(app, "/v1/models", "GET", host="other.example").status == 421


def test_a_server_that_others_reach_answers_to_any_name_unless_some_are_listed():
    assert (
        ask(app_of(host="0.0.0.0", insecure=True), "/livez", "GET", host="any.example").status
        == 200
    )
    app = app_of(host="0.0.0.0", insecure=True, allowed_hosts="mine.example")
    assert ask(app, "/livez", "GET", host="any.example").status == 421
    assert ask(app, "/livez", "GET", host="mine.example").status == 200


@pytest.mark.parametrize("headers", [{}, SAME, OLD_SAME, ADDRESS_BAR])
def test_programs_and_the_servers_own_pages_go_through(headers: dict[str, str]):
    assert ask(app_of(), "/v1/completions", **headers).status == 200
    assert ask(app_of(), "/dashboard/engines", "GET", **headers).status == 200


@pytest.mark.parametrize("headers", [OTHER, OTHER_PORT, OLD_OTHER, SANDBOX])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/dashboard/sign-in"),
        ("POST", "/dashboard/lab"),
        ("DELETE", "/dashboard/lab"),
        ("GET", "/dashboard/feed"),
        ("GET", "/dashboard/report"),
        ("GET", "/dashboard/slots"),
    ],
)
def test_pages_of_other_sites_are_refused(method: str, path: str, headers: dict[str, str]):
    reply = ask(app_of(), path, method, **headers)
    assert (reply.status, reply.error["code"]) == (403, "cross_site")
    assert reply.error["type"] == "permission_error"
    assert "cors_origins" in reply.error["message"]
    assert "access-control-allow-origin" not in reply.headers


def test_a_link_from_another_site_leads_to_the_page():
    arrival = OTHER | {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert ask(app_of(), "/dashboard/", "GET", **arrival).status == 200
    assert ask(app_of(), "/dashboard/lab", "POST", **arrival).status == 403, "a form is no link"


def test_an_origin_that_is_allowed_may_ask_and_read():
    app = app_of(cors_origins="http://evil.example,http://localhost:3000")
    for headers in (OTHER, OTHER_PORT, OLD_OTHER):
        reply = ask(app, "/v1/completions", **headers)
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] == headers["origin"]
        assert "x-request-id" in reply.headers["access-control-expose-headers"].lower()
    refused = ask(app, "/v1/completions", body={"model": 5}, **OTHER)
    assert refused.status == 400 and "access-control-allow-origin" in refused.headers
    stranger = ask(app, "/v1/completions", origin="http://other.example")
    assert stranger.status == 403 and "access-control-allow-origin" not in stranger.headers


@pytest.mark.parametrize(
    ("allowed", "origin", "may"),
    [
        ("app://obsidian.md", "app://obsidian.md", True),
        ("tauri://localhost", "tauri://localhost", True),
        ("chrome-extension://abcdefgh", "chrome-extension://abcdefgh", True),
        ("chrome-extension://abcdefgh", "chrome-extension://other", False),
        ("chrome-extension://*", "chrome-extension://other", True),
        ("chrome-extension://*", "moz-extension://other", False),
        ("vscode-webview://*", "vscode-webview://1b2c-3d", True),
        ("null", "null", True),
        ("app://obsidian.md", "null", False),
        ("https://*.example.org", "https://a.example.org", True),
        ("https://*.example.org", "https://example.org", False),
        ("https://*.example.org", "https://a.b.example.org", False),
        ("https://*.example.org", "https://a.example.org.evil", False),
        ("https://*.example.org", "https://a-example.org", False),
        ("https://*.example.org", "https://axexample.org", False),
        ("https://*.example.org:81,null", "https://a.example.org:81", True),
        ("https://*.example.org", "http://a.example.org", False),
    ],
)
def test_origins_of_programs_and_of_several_sites(allowed: str, origin: str, may: bool):
    app = app_of(cors_origins=allowed)
    question = {"access-control-request-method": "POST"}
    for method, extra in (("POST", {}), ("OPTIONS", question)):
        reply = ask(app, "/v1/completions", method, origin=origin, **extra)
        assert (reply.status == 200) is may
        assert (reply.headers.get("access-control-allow-origin") == origin) is may


@pytest.mark.parametrize(
    ("origins", "allowed"), [("http://evil.example", True), ("*", True), ("", False)]
)
def test_a_browser_that_asks_beforehand(origins: str, allowed: bool):
    question = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    reply = ask(app_of(cors_origins=origins), "/v1/completions", "OPTIONS", **OTHER, **question)
    assert (reply.status == 200) is allowed
    assert ("access-control-allow-origin" in reply.headers) is allowed
    assert "access-control-allow-credentials" not in reply.headers


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"allowed_hosts": "http://x"}, "allowed-hosts: 'http://x' is not a host name"),
        ({"allowed_hosts": "x:80"}, "without scheme and port"),
        ({"cors_origins": "evil.example"}, "cors-origins: 'evil.example' is not an origin"),
        ({"cors_origins": "https://evil.example/"}, "is not an origin"),
        ({"cors_origins": "https://Evil.example"}, "lower case"),
        ({"cors_origins": "https://a.*.example"}, "is not an origin"),
        ({"cors_origins": "https://*"}, "is not an origin"),
        ({"cors_origins": "https://*a.example"}, "is not an origin"),
        ({"cors_origins": "*://a.example"}, "is not an origin"),
        ({"cors_origins": "file://"}, "is not an origin"),
        ({"cors_origins": "app://a/b"}, "is not an origin"),
    ],
)
def test_wrong_names_are_refused_at_start(flags: dict[str, str], says: str):
    with pytest.raises(ConfigError) as error:
        ResolvedConfig.load(None, {}, flags)
    assert says in str(error.value)
