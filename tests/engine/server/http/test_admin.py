"""An administrator's routes: sleep, waking, and forgetting prefixes."""

from __future__ import annotations

import pytest
from api_fakes import FakeClient, call, make_app, run

from jitney.engine.common.key_file import digest_key

ROUTES = {
    "/sleep": "POST",
    "/wake_up": "POST",
    "/is_sleeping": "GET",
    "/reset_prefix_cache": "POST",
}
HOST = [(b"host", b"localhost")]


def ask(app, path: str, query: str = ""):
    """As a shell sends it: no body, and no type of one."""

    async def with_query(scope, receive, send):
        await app(scope | {"query_string": query.encode()}, receive, send)

    return run(call(with_query, path, method=ROUTES[path], raw_headers=HOST))


def test_asleep_and_awake():
    client = FakeClient()
    app = make_app(client)
    assert ask(app, "/is_sleeping").json() == {"is_sleeping": False}
    assert ask(app, "/sleep", "level=1").json() == {"status": "asleep", "freed_bytes": 4096}
    assert ask(app, "/is_sleeping").json() == {"is_sleeping": True}
    assert ask(app, "/sleep").json()["freed_bytes"] == 0
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        reply = run(call(app, path, body))
        assert (reply.status, reply.error["code"]) == (503, "sleeping")
        assert "retry-after" not in reply.headers and "wake_up" in reply.error["message"]
    assert run(call(app, "/readyz", method="GET")).status == 503
    assert run(call(app, "/livez", method="GET")).status == 200
    assert ask(app, "/wake_up").json() == {"status": "awake"}
    assert run(call(app, "/v1/completions", {"prompt": "a"})).status == 200
    assert client.slept == [False]


def test_open_requests_may_be_ended():
    client = FakeClient()
    ask(make_app(client), "/sleep", "mode=abort")
    assert client.slept == [True]


def test_the_prefix_cache_is_reset():
    client = FakeClient()
    assert ask(make_app(client), "/reset_prefix_cache").json() == {"status": "reset"}
    assert client.resets == 1


@pytest.mark.parametrize(
    ("query", "param"),
    [("level=2", "level"), ("level=x", "level"), ("mode=keep", "mode"), ("level=-1", "level")],
)
def test_other_ways_to_sleep_are_refused(query, param):
    client = FakeClient()
    reply = ask(make_app(client), "/sleep", query)
    assert (reply.status, reply.error["param"]) == (400, param) and not client.slept


@pytest.mark.parametrize("path", ROUTES)
def test_they_are_an_administrators(path):
    app = make_app(api_keys=(digest_key("u"),), admin_keys=(digest_key("a"),))
    for key, status in ((b"u", 403), (b"a", 200), (b"x", 401)):
        headers = [*HOST, (b"authorization", b"Bearer " + key)]
        assert run(call(app, path, method=ROUTES[path], raw_headers=headers)).status == status


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/reset_prefix_cache"])
def test_they_wait_for_an_engine(path):
    client = FakeClient()
    client.state = "loading"
    assert ask(make_app(client), path).status == 503
