"""`jitney diagnose` over HTTP: one engine, a fleet, and who may not ask."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from api_fakes import FakeClient, Script, make_app, served, until
from fleet_engines import FakeEngine, engines, fleet_of, toml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jitney.engine.cli import diagnose as command
from jitney.engine.cli import main
from jitney.engine.common.key_file import digest_key
from jitney.engine.common.ports import free_port
from jitney.engine.common.records import STEP_DTYPE


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "_EVERY_S", 0.05)
    monkeypatch.delenv("JITNEY_ENGINE_KEY", raising=False)


def out_of_pages() -> ASGIApp:
    """An engine that does a step before each request: all its pages are held, and a sequence is put
    back.
    """
    client = FakeClient(Script("abc"), seats=4, pages=10)
    record = np.zeros(1, STEP_DTYPE)
    for name, value in dict(
        bucket_tokens=4, decode=4, device_s=0.01, seats=4, seats_busy=2, pages_used=10, preempted=1
    ).items():
        record[name] = value
    server = make_app(client)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        client.counters.observe_step(record[0])
        await server(scope, receive, send)

    return app


def test_what_a_server_shows_is_answered_complaint_by_complaint(capsys):
    with served(out_of_pages()) as (url, _):
        assert main(["diagnose", url, "--seconds", "0.3"]) == 0
        shown = capsys.readouterr().out
        assert main(["diagnose", url.removeprefix("http://"), "--seconds", "0.3", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["findings"]["memory"]["name"] == "preemption"
    assert report["findings"]["latency"]["name"] == "pages run out"
    assert report["figures"]["page_share"] == 1 and report["figures"]["bandwidth"] is None
    assert report["findings"]["memory"]["cause"] in shown and "100% of the pages" in shown


def test_a_key_is_needed_where_there_are_keys(capsys, monkeypatch: pytest.MonkeyPatch):
    app = make_app(FakeClient(Script("abc")), admin_keys=(digest_key("secret"),))
    with served(app) as (url, _):
        assert main(["diagnose", url, "--seconds", "0.1"]) == 1
        assert "JITNEY_ENGINE_KEY" in capsys.readouterr().err
        monkeypatch.setenv("JITNEY_ENGINE_KEY", "secret")
        assert main(["diagnose", url, "--seconds", "0.1"]) == 0


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["http://127.0.0.1:1"], 1, "does not answer"),
        (["http://127.0.0.1:port"], 2, "not a URL"),
        (["--seconds", "0"], 2, "--seconds"),
    ],
)
def test_mistakes_are_told_in_one_line(words: list[str], status: int, said: str, capsys):
    assert main(["diagnose", *words]) == status
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize("text", ["<html>hello</html>", "up 1\n", "jitney_seats many\n"])
def test_what_is_no_server_of_ours_is_told_so(text: str, capsys):
    async def metrics(request: Request) -> Response:
        return Response(text)

    with served(Starlette(routes=[Route("/metrics", metrics)])) as (url, _):
        assert main(["diagnose", url, "--seconds", "0.1"]) == 1
    error = capsys.readouterr().err
    assert "is this a Jitney server?" in error and error.count("\n") == 1


def test_each_engine_of_a_fleet_is_watched_and_told_apart(tmp_path: Path, capsys):
    with (
        engines(FakeEngine(), FakeEngine()) as fakes,
        fleet_of(tmp_path, toml([fake.url for fake in fakes])) as fleet,
    ):
        fleet.wait_ready(*(fake.name for fake in fakes))
        assert main(["diagnose", fleet.url, "--seconds", "0.1", "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert [report["engine"].split(", ")[1] for report in reports] == [one.name for one in fakes]
    for report in reports:
        assert report["note"].startswith("in the fleet: ready") and report["figures"]["up"] == 1


def test_the_reason_of_a_fleet_is_shown_and_not_obeyed(capsys):
    async def metrics(request: Request) -> Response:
        return Response('jitney_fleet_replicas{model="m"} 1\n')

    async def replicas(request: Request) -> Response:
        one = {"name": "a\x9b31m", "state": "gone", "reason": "\x1b[2J\x07", "load": 0}
        return JSONResponse({"models": {"m": [one]}})

    routes = [Route("/metrics", metrics), Route("/fleet/replicas", replicas)]
    with served(Starlette(routes=routes)) as (url, _):
        assert main(["diagnose", url, "--seconds", "0.1"]) == 0
    printed = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\x9b"} & set(printed)
    assert "a\\x9b31m" in printed and "gone (\\x1b[2J\\x07)" in printed


def test_an_engine_of_a_fleet_that_takes_no_requests_is_told_of_and_not_watched(
    tmp_path: Path, capsys
):
    nowhere = f"http://127.0.0.1:{free_port()}"
    with (
        engines(FakeEngine()) as (fake,),
        fleet_of(tmp_path, toml([fake.url, nowhere])) as fleet,
    ):
        fleet.wait_ready(fake.name)
        until(lambda: fleet.replicas()[nowhere.removeprefix("http://")].state == "gone")
        assert main(["diagnose", fleet.url, "--seconds", "0.1", "--json"]) == 0
        reports = json.loads(capsys.readouterr().out)
        assert main(["diagnose", fleet.url, "--seconds", "0.1"]) == 0
    watched, silent = reports
    assert watched["figures"]["up"] == 1
    assert silent["note"].startswith("in the fleet: gone") and "figures" not in silent
    assert silent["note"] in capsys.readouterr().out
