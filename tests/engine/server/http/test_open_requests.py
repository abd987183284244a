"""A crowd beyond what can sit and wait is refused at the door, before anything of it is read."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from api_fakes import FakeClient, Script, call, make_app

from jitney.engine.common.errors import RequestError
from jitney.engine.server.http import service
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.open_requests import OpenRequests

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


async def test_a_request_too_many_is_refused_before_it_is_rendered(monkeypatch: pytest.MonkeyPatch):
    """All who came before hang in the chat template; the refusal does not wait for it."""
    monkeypatch.setattr(service, "_MOST_READ", 2)
    client = FakeClient(Script(hang=True), seats=1, max_waiting_requests=3)
    client.counters.predicted_wait = 7.5
    app = make_app(client)
    rendering = 0

    forever = asyncio.Event()

    async def render(*_: object, **__: object) -> str:
        nonlocal rendering
        rendering += 1
        await forever.wait()
        return ""

    monkeypatch.setattr(app.state.service.text, "render_chat", render)
    path = "/v1/chat/completions"
    waiting = [asyncio.create_task(call(app, path, CHAT)) for _ in range(6)]
    while rendering < 6:
        await asyncio.sleep(0)
    refused = await asyncio.wait_for(call(app, path, CHAT), 60)
    assert (refused.status, refused.error["code"]) == (429, "queue_full")
    assert refused.headers["retry-after"] == "8" and rendering == 6
    assert refused.headers["retry-after-ms"] == "7500"
    assert 'jitney_rejected_total{reason="queue_full"} 1.0' in (
        app.state.service.metrics.render().decode()
    )
    leaving = waiting.pop()
    leaving.cancel()  # its client leaves: the next one finds a place
    await asyncio.wait((leaving,))
    waiting.append(asyncio.create_task(call(app, path, CHAT)))
    while rendering < 7:
        await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize(
    ("predicted_wait", "waiting", "read"), [(0.0, 0, 6), (61.0, 1, 2), (0.0, 3, 2)]
)
def test_few_are_read_while_the_engine_takes_no_newcomers(
    predicted_wait: float, waiting: int, read: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(service, "_MOST_READ", 2)
    client = FakeClient(seats=1, max_waiting_requests=3, max_predicted_wait_s=60.0)
    client.counters.predicted_wait, client.counters.waiting = predicted_wait, waiting
    server = make_app(client).state.service
    with ExitStack() as reading:
        for _ in range(read):
            reading.enter_context(server.generating(Context("r")))
        with pytest.raises(RequestError, match="retry in"):
            reading.enter_context(server.generating(Context("r")))
        reading.enter_context(server.generating(Context("r", background=True)))


def test_those_that_are_not_read_are_told_to_return_one_behind_the_other(
    monkeypatch: pytest.MonkeyPatch,
):
    """Five wait for 10 s: one is served every 2 s. Once nothing waits, the next crowd is told
    anew.
    """
    monkeypatch.setattr(service, "_MOST_READ", 2)
    client = FakeClient(seats=1, max_waiting_requests=5, max_predicted_wait_s=60.0)
    client.counters.predicted_wait, client.counters.waiting = 10.0, 5
    server = make_app(client).state.service
    server.quotas.clock = lambda: 100.0

    def told() -> float:
        with pytest.raises(RequestError) as refused, server.generating(Context("r")):
            pass
        return refused.value.info.retry_after or 0.0

    with ExitStack() as reading:
        for _ in range(2):
            reading.enter_context(server.generating(Context("r")))
        assert [told() for _ in range(4)] == pytest.approx([10.0, 12.0, 14.0, 16.0])
        client.counters.predicted_wait = 0.0
        assert told() == pytest.approx(1.0)


def test_a_flood_of_one_tenant_keeps_no_other_out():
    requests = OpenRequests()
    with ExitStack() as flood:
        for _ in range(10):
            flood.enter_context(requests.one("flood"))
        assert requests.are_too_many("flood", 10) and not requests.are_too_many("flood", 11)
        for _ in range(5):
            assert not requests.are_too_many("modest", 10)
            flood.enter_context(requests.one("modest"))
        for _ in range(5):
            flood.enter_context(requests.one("flood"))
        assert requests.are_too_many("modest", 10), "twice as many are the most for all"
    assert not requests.are_too_many("flood", 1)
