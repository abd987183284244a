"""What an answer shows of itself while it passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from jitney.engine.fleet.forwarding import ProxiedAnswer
from jitney.engine.fleet.replicas import Replica
from jitney.engine.fleet.request import ProxiedRequest
from jitney.engine.fleet.rollout.candidate import _AnswerWatch, _Pace
from jitney.engine.fleet.rollout.comparison import RequestOutcome


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def watched(
    *parts: bytes,
    status: int = 200,
    stream: bool = True,
    leave_after: int | None = None,
    route: str = CHAT,
    kind: str = "",
) -> RequestOutcome | None:
    """Of the only request at an engine that costs 1,800 an hour, with a part a second."""
    clock = Clock()
    asked = ProxiedRequest("POST", route, [], fields={"stream": stream})
    replica = Replica("a", clock=clock)
    watch = _AnswerWatch(asked, clock, _Pace(), 1800.0)
    lines = "application/x-ndjson" if route.startswith("/api") else "text/event-stream"
    kind = kind or (lines if stream else "application/json")

    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            clock.now += 1
            yield part

    async def read() -> None:
        size = str(len(parts[0])).encode() if parts else b"0"
        headers = [(b"content-type", f"{kind}; charset=utf-8".encode()), (b"content-length", size)]
        answer = await watch.of(ProxiedAnswer(status, headers, body(), replica.begin()))
        got = []
        async for part in answer.body:
            got.append(part)
            if leave_after is not None and len(got) == leave_after:
                return
        assert got == list(parts)

    asyncio.run(read())
    return watch.end()


ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}\n\n'
PIECE = b'data: {"choices":[{"delta":{"content":"a b"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":12}}\n\n'
DONE = b"data: [DONE]\n\n"


def test_a_stream_has_its_first_token_where_text_first_comes():
    assert watched(ROLE, PIECE, PIECE, DONE) == RequestOutcome(True, 2, 4.0, 2.0, 2.0)


def test_a_usage_is_believed_also_cut_in_two():
    assert watched(ROLE, PIECE, USAGE, DONE) == RequestOutcome(True, 12, 4.0, 2.0, 2.0)
    cut = watched(PIECE, USAGE[:40], USAGE[40:] + DONE)
    assert cut == RequestOutcome(True, 12, 3.0, 1.0, 1.5)


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


@pytest.mark.parametrize(
    ("route", "part", "end", "tokens"),
    [
        (TEXT, b'data: {"choices":[{"text":"hi","index":0}]}\n\n', DONE, 1),
        (
            MESSAGES,
            b'event: e\ndata: {"type":"e","delta":{"type":"t","text":"hi"}}\n\n',
            b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
            1,
        ),
        (
            RESPONSES,
            b'data: {"type":"response.output_text.delta","delta":"hi"}\n\n',
            b'data: {"type":"response.completed","usage":{"output_tokens":7}}\n\n',
            7,
        ),
        (
            "/api/chat",
            b'{"message":{"role":"assistant","content":"hi"},"done":false}\n',
            b'{"message":{},"done":true}\n',
            1,
        ),
        (
            "/api/generate",
            b'{"response":"hi","done":false}\n',
            b'{"response":"","done":true,"prompt_eval_count":3,"eval_count":7}\n',
            7,
        ),
    ],
)
def test_every_form_of_the_api(route: str, part: bytes, end: bytes, tokens: int):
    outcome = watched(b": keep-alive\n\n", part, end, route=route)
    assert outcome is not None and outcome.ok and outcome.tokens == tokens
    assert outcome.first_token_s == 2.0
    cut = watched(part, route=route)
    assert cut is not None and not cut.ok, "it has no end"


@pytest.mark.parametrize(
    ("body", "stream", "kind"),
    [
        (b"<html>Welcome</html>", False, "text/html"),
        (b"<html>Welcome</html>", True, "text/html"),
        (b"<html>Welcome</html>", False, ""),
        (b'{"choices":[{"message":{}}]}', True, "application/json"),
        (b'{"choices":[]}', False, ""),
        (b'{"choices":[{"text":"of another route"}]}', False, ""),
        (b'{"choices":[{"message":{"content":"cut', False, ""),
        (b"{}", False, ""),
        (b"[]", False, ""),
        (b"", False, ""),
        (b"data: <html>\n\ndata: [DONE]\n\n", True, ""),
        (b'data: {"status":"ok"}\n\ndata: [DONE]\n\n', True, ""),
        (b"data: [DONE]\n\n", True, ""),
        (b": keep-alive\n\n", True, ""),
        (b"<html>Welcome</html>\n\n", True, ""),
        (b"", True, ""),
    ],
)
def test_what_is_no_answer_of_the_api_failed(body: bytes, stream: bool, kind: str):
    outcome = watched(*([body] if body else []), stream=stream, kind=kind)
    assert outcome is not None and not outcome.ok


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_the_engine_could_not_do_failed(status: int):
    outcome = watched(b"{}", status=status, stream=False)
    assert outcome is not None and not outcome.ok


def test_a_client_that_asks_for_more_than_its_due_says_nothing_of_the_engine():
    body = b'{"error":{"message":"x","code":"rate_limit"}}'
    assert watched(body, status=429, stream=False) is None
    full = watched(body.replace(b"rate_limit", b"queue_full"), status=429, stream=False)
    assert full is not None and not full.ok


def test_a_stream_that_breaks_off_failed():
    errors = (
        b'data: {"error":{"message":"x"}}\n\n',
        b"event: error\ndata: {}\n\n",
        b'{"error":"x"}\n',
        b'{"response":"a"}\n{"error":"x"}\n',
    )
    for end in errors:
        outcome = watched(ROLE, PIECE, end, DONE)
        assert outcome is not None and not outcome.ok


def test_what_the_client_did_says_nothing_of_the_engine():
    assert watched(b"{}", status=400, stream=False) is None
    assert watched(ROLE, PIECE, PIECE, leave_after=2) is None
    watch = _AnswerWatch(ProxiedRequest("POST", TEXT, []), Clock(), _Pace(), 1.0)
    assert watch.end() is None
    watch.refused(503)
    assert watch.end() == RequestOutcome(ok=False)


def test_an_engine_is_shared_by_those_who_are_there():
    """Alone for 2 s, two for 4 s, nobody for 10 s, alone for 1 s; then with a line of a batch."""
    clock = Clock()
    replica = Replica("a", clock=clock)
    first = replica.begin()
    clock.now += 2
    second = replica.begin()
    clock.now += 4
    assert (first.seconds, second.seconds) == (2 + 2, 2)
    assert (first.load, second.load) == (6 / 4, 2)
    replica.end()
    replica.end()
    clock.now += 10
    third = replica.begin()
    clock.now += 1
    assert (third.seconds, third.load) == (1, 1)
    replica.begin(background=True)
    fourth = replica.begin()
    clock.now += 3
    assert (fourth.seconds, fourth.load) == (1, 3)


def test_requests_of_others_share_an_engine_too():
    """As the engine said when it was looked at: three more, one of them in the background."""
    clock = Clock()
    replica = Replica("a", clock=clock, running=3.0, background=1.0)
    replica.became("ready")
    share = replica.begin()
    clock.now += 8
    assert (share.seconds, share.load) == (2, 4)
