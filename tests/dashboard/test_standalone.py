"""The page of engines elsewhere: it shows what they show, asks nothing else of them, and keeps its
key to itself.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from api_fakes import ByteTokenizer, FakeClient, call, run, served, until
from page_fakes import browser, viewers_of
from server_settings import server_settings
from starlette.routing import Mount

from jitney.dashboard import Dashboard, sse
from jitney.dashboard.remote import RemoteEngine, Unreachable
from jitney.dashboard.replica import ReplicaView
from jitney.dashboard.standalone import Standalone
from jitney.engine.cli import main
from jitney.engine.common.key_file import digest_key
from jitney.engine.config.schema import EngineSection
from jitney.engine.lab.policy_lab import Lab
from jitney.engine.server.app import create_app
from jitney.engine.server.http.settings import ServerSettings

KEY = "the engines' key"


def engine_app(client: FakeClient, *keys: str):
    settings = ServerSettings(
        admin_keys=tuple(map(digest_key, keys)), public_prefixes=("/dashboard/",)
    )
    routes = Dashboard(client, settings, lab=Lab(client, EngineSection)).mounted("/dashboard")  # type: ignore[arg-type]
    return create_app(client, ByteTokenizer(), settings, "m", routes)  # type: ignore[arg-type]


def standalone(url: str, key: str = "", **settings: Any):
    keys = (digest_key(key),) if key else ()
    return Standalone(
        RemoteEngine(url, key), server_settings(admin_keys=keys, **settings)
    ).by_itself()


def ask(app, *paths: str, method: str = "GET", **headers: str) -> list[Any]:
    async def session() -> list[Any]:
        async with browser(app) as web:
            return [await web.request(method, path, headers=headers) for path in paths]

    return run(session())


def test_an_engine_is_listed_whether_it_answers_or_not(client):
    with served(engine_app(client)) as (url, _):
        answers = [ask(standalone(where), "/engines")[0] for where in (url, "http://127.0.0.1:1")]
        there, gone = [answer.json() for answer in answers]
        assert there["standalone"] is True and there["fleet"] == ""
        assert there["engines"] == [
            {"name": "scripted", "url": url, "state": "ready", "base": "engines/0/"}
        ]
        assert [(one["name"], one["state"]) for one in gone["engines"]] == [("", "unreachable")]


def test_answers_are_the_engines_own(client):
    with served(engine_app(client)) as (url, _):
        app = standalone(url)
        page, slots, frames, requests, detail, trace, missing, wrong = ask(
            app,
            "/",
            "/engines/0/slots",
            "/engines/0/frames?from=1",
            "/engines/0/requests?limit=1",
            "/engines/0/request/req-b?index=1",
            "/engines/0/trace",
            "/engines/0/request/nobody",
            "/engines/0/requests?limit=x",
        )
    assert "<title>Jitney</title>" in page.text
    assert slots.json()["seats"]["request"][0] == "req-a" and frames.json()["columns"]["step"] == [
        2
    ]
    assert len(requests.json()["requests"]) == 1 and detail.json()["state"] == "prefill"
    assert "attachment" in trace.headers["content-disposition"] and trace.json()["traceEvents"]
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "limit"
    assert all(
        "default-src 'none'" in answer.headers["content-security-policy"]
        for answer in (page, slots, missing)
    )


def test_nothing_else_is_passed_on(client):
    paths = (
        "/engines/1/slots",
        "/engines/0/sign-in",
        "/engines/0/",
        "/engines/0/request/../../v1/models",
        "/engines/0/request/%2e%2e/%2e%2e/v1/models",
        "/engines/0/assets/page.js",
        "/v1/models",
        "/engines/x/slots",
    )
    with served(engine_app(client)) as (url, _):
        statuses = [answer.status_code for answer in ask(standalone(url), *paths)]
    assert statuses == [404] * len(paths)


def test_a_lab_elsewhere(client):
    async def session(app) -> None:
        assert (await call(app, "/engines/0/lab", method="GET")).json()["state"] == "idle"
        refused = await call(app, "/engines/0/lab", {"minutes": 99})
        assert refused.status == 400 and refused.error["param"] == "minutes"
        plain = await call(app, "/engines/0/lab", b"{}", headers={"content-type": "text/plain"})
        assert plain.status == 415 and (await call(app, "/engines/0/slots", {})).status == 404

    with served(engine_app(client)) as (url, _):
        run(session(standalone(url)))


def test_many_viewers_are_one_to_the_engine(client):
    engine = engine_app(client)
    (feed,) = [mount.app.state.feed for mount in engine.routes if isinstance(mount, Mount)]  # type: ignore[attr-defined]

    async def watch(app, number: int) -> ReplicaView:
        reply = await call(app, "/engines/0/feed", method="GET", leave_on_chunk=number)
        replica = ReplicaView()
        for event in b"".join(reply.chunks).split(b"\n\n")[:-1]:
            replica.apply(*sse.decode(event))
        return replica

    async def session(app) -> list[ReplicaView]:
        first = asyncio.create_task(watch(app, 8))
        await asyncio.sleep(0.3)
        others = await asyncio.gather(*(watch(app, 2) for _ in range(5)))
        seen.append(viewers_of(feed))
        return [await first, *others]

    seen: list[int] = []
    with served(engine) as (url, _):
        replicas = run(asyncio.wait_for(session(standalone(url)), 120))
        until(lambda: viewers_of(feed) == 0)
    assert seen == [1]
    assert all(
        replica.seats is not None and replica.seats[0].request == "req-a" for replica in replicas
    )


def test_an_engine_that_is_gone_ends_the_feed_with_a_word():
    reply = run(call(standalone("http://127.0.0.1:1"), "/engines/0/feed", method="GET"))
    events = [sse.decode(chunk) for chunk in reply.chunks if chunk]
    assert reply.status == 200 and [name for name, _ in events] == ["bye"]
    assert "does not answer" in events[0][1]["reason"] and events[0][1]["retry_ms"] > 0
    slots = run(call(standalone("http://127.0.0.1:1"), "/engines/0/slots", method="GET"))
    assert slots.status == 502 and slots.error["code"] == "engine_unreachable"


def test_an_event_without_an_end_is_not_kept():
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 1 << 30:
            sent += 1 << 20
            yield b"x" * (1 << 20)

    engine = RemoteEngine(
        "http://engine.example",
        transport=httpx.MockTransport(lambda request: httpx.Response(200, content=endless())),
    )

    async def read() -> None:
        async for _ in engine.feed():
            pass

    with pytest.raises(Unreachable, match="an event of its feed has more than 8388608 bytes"):
        run(read())
    assert sent < 10 << 20


def test_the_key_opens_the_engine_and_this_page_alike(client):
    async def session(app) -> None:
        async with browser(app) as web:
            assert (await web.get("/engines")).status_code == 401
            assert (await web.get("/engines/0/slots")).status_code == 401
            assert (await web.post("/sign-in", json={"key": "wrong"})).status_code == 401
            assert (await web.post("/sign-in", json={"key": KEY})).status_code == 204
            assert (await web.get("/engines/0/slots")).json()["seats"]["request"][0] == "req-a"
            listing = json.dumps((await web.get("/engines")).json())
            assert KEY not in listing and digest_key(KEY) not in listing

    with served(engine_app(client, KEY)) as (url, _):
        run(session(standalone(url, key=KEY)))
        (other,) = ask(standalone(url), "/engines/0/slots")
        assert other.status_code == 502 and "wants an API key" in other.json()["error"]["message"]


def test_only_named_hosts_are_answered(client):
    app = standalone("http://127.0.0.1:1", allowed_hosts=("here",))
    assert run(call(app, "/", method="GET", headers={"host": "here:8080"})).status == 200
    stranger = run(call(app, "/", method="GET", headers={"host": "elsewhere"}))
    assert stranger.status == 421 and "allowed_hosts" in stranger.error["message"]


@pytest.mark.parametrize(
    "number, words, feed",
    [
        (signal.SIGINT, ["--engine", "{url}"], "engines/0/feed"),
        (signal.SIGTERM, ["a={url}", "b=http://127.0.0.1:1"], "feed"),
    ],
)
def test_the_program_serves_and_leaves_when_told(client, number, words, feed):
    """With a viewer on board: an endless answer must not keep the program."""
    with served(engine_app(client)) as (url, _):
        code = "from jitney.engine.cli import main; raise SystemExit(main())"
        engines = [word.format(url=url) for word in words]
        program = subprocess.Popen(
            [sys.executable, "-P", "-c", code, "dashboard", *engines, "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert program.stdout is not None
            where = program.stdout.readline().rpartition(": ")[2].strip()
            with httpx.stream("GET", where + feed, timeout=30, trust_env=False) as answer:
                assert next(answer.iter_bytes()).startswith(b"event: hello")
                program.send_signal(number)
                assert program.wait(15) == 0
        finally:
            program.kill()


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--engine", "http://key@host"], "a key comes from"),
        (["--engine", "a:1", "--engine", "a:1"], "twice"),
        (["one=a:1", "two=a:80/dashboard", "two=b:1"], "two engines are called two"),
        (["one=a:1", "http://a:1"], "twice"),
        (["a/b=http://a"], "is not the URL"),
        (["é=http://a"], "cannot name a replica"),
        (["a:1", "b:1", "--price-per-hour", "-1"], "--price-per-hour must be at least 0"),
        (["--host", "0.0.0.0"], "no API key"),
        (["--port", "x"], "whole number"),
    ],
)
def test_wrong_flags_are_named(flags, says, capsys):
    assert main(["dashboard", *flags]) == 2
    assert says in capsys.readouterr().err


SCRIPT = b"fetch('/engines').then(steal)"


def hostile(status: int = 200, **headers: str) -> RemoteEngine:
    """An engine that answers everything with a script, and these headers."""

    async def answer(request: httpx.Request) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.Response(status, content=SCRIPT, headers=named)

    return RemoteEngine("http://engine", "", httpx.MockTransport(answer))


def asked_of(engine: RemoteEngine, path: str) -> httpx.Response:
    (answer,) = ask(Standalone(engine, ServerSettings()).by_itself(), f"/engines/0/{path}")
    return answer


@pytest.mark.parametrize("path", ["slots", "requests", "timeline", "request/x", "trace", "report"])
@pytest.mark.parametrize(
    "kind",
    ["text/javascript", "text/html", "image/svg+xml", "application/xml", "text/css", ""],
)
def test_an_engine_cannot_choose_what_its_answer_is(path: str, kind: str):
    answer = asked_of(hostile(content_type=kind) if kind else hostile(), path)
    if (path, kind) == ("report", "text/html"):
        assert answer.status_code == 200
        assert answer.headers["content-disposition"].startswith("attachment;")
        assert "sandbox" in answer.headers["content-security-policy"]
    else:
        assert answer.status_code == 502 and answer.json()["error"]["code"] == "engine_unexpected"
        assert SCRIPT not in answer.content
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_an_engines_headers_stay_behind():
    answer = asked_of(
        hostile(
            content_type="application/json; charset=utf-7",
            content_disposition="inline",
            content_security_policy="script-src *",
            set_cookie="jitney_session=fixed",
            clear_site_data='"*"',
            access_control_allow_origin="*",
            retry_after="5, evil",
            location="http://evil.example",
            service_worker_allowed="/",
            x_content_type_options="",
        ),
        "slots",
    )
    assert answer.status_code == 200 and answer.content == SCRIPT
    assert answer.headers["content-type"] == "application/json; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 's")
    assert answer.headers["x-content-type-options"] == "nosniff"
    for name in (
        "set-cookie",
        "clear-site-data",
        "access-control-allow-origin",
        "retry-after",
        "location",
        "service-worker-allowed",
        "content-disposition",
    ):
        assert name not in answer.headers


@pytest.mark.parametrize("status", [301, 302, 101])
def test_an_engine_cannot_send_anybody_elsewhere(status: int):
    engine = hostile(status, content_type="application/json", location="http://evil.example")
    assert asked_of(engine, "slots").status_code == 502


def test_an_errors_form_is_looked_at_too():
    assert asked_of(hostile(503, content_type="text/html"), "report").status_code == 502
    busy = asked_of(hostile(503, content_type="application/json", retry_after="7"), "report")
    assert busy.status_code == 503 and busy.headers["retry-after"] == "7"
    assert "content-disposition" not in busy.headers
