"""The client that engines are asked with."""

from __future__ import annotations

import httpx
import pytest
from anyio._backends._asyncio import SocketStream
from api_fakes import make_app, run, served

from jitney.engine.common.ports import free_port
from jitney.engine.fleet.replicas import Replica, Watch
from jitney.engine.fleet.upstream import upstream_client


@pytest.fixture
def lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection loses its socket once it is made, as under uvloop."""

    def lost(stream: SocketStream) -> None:
        stream._transport.abort()

    monkeypatch.setattr(SocketStream, "_raw_socket", property(lost))


def test_an_engine_that_ends_before_it_has_the_request_cannot_be_reached(lost_at_once: None):
    async def ask(url: str) -> None:
        async with upstream_client() as client:
            await client.get(url)

    with served(make_app()) as (url, _), pytest.raises(httpx.ConnectError, match="lost at once"):
        run(ask(url))


def test_a_look_at_such_an_engine_finds_it_gone(lost_at_once: None):
    async def look(url: str) -> Replica:
        replica = Replica("r", url)
        async with upstream_client() as client:
            await Watch(client, poll_s=1.0, lost_after_s=10.0).look(replica)
        return replica

    with served(make_app()) as (url, _):
        assert run(look(url)).state == "gone"


async def test_a_request_that_comes_during_a_look_counts_once():
    """The engine has it among those that it runs, and we among those that are open."""
    replica = Replica("r", "http://engine")
    for _ in range(7):
        replica.begin()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/metrics":
            return httpx.Response(200, json={"data": []})
        replica.begin()
        return httpx.Response(200, text="jitney_seats 8\njitney_requests_running 8\n")

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        await Watch(client, poll_s=1.0, lost_after_s=10.0).look(replica)
    assert (replica.load, replica.seats) == (8, 8)
    replica.end()
    assert replica.load == 7


def test_an_engine_that_was_started_is_starting_until_it_answers_or_ends():
    async def look(replica: Replica) -> str:
        async with upstream_client() as client:
            await Watch(client, poll_s=1.0, lost_after_s=10.0).look(replica)
        return replica.state

    replica = Replica("a", f"http://127.0.0.1:{free_port()}")
    replica.became("starting", "its process was started")
    assert run(look(replica)) == "starting"
    replica.became("ready")
    assert run(look(replica)) == "gone"
    assert run(look(Replica("b", replica.url))) == "gone", "nobody started that one"
