"""What an answer shows of itself while it passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from jitney.engine.fleet.candidate import _AnswerWatch, _CostMeter
from jitney.engine.fleet.comparison import RequestOutcome
from jitney.engine.fleet.forwarding import ProxiedAnswer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watched(
    *parts: bytes, status: int = 200, stream: bool = True, leave_after: int | None = None
) -> RequestOutcome | None:
    """Of an answer with a part a second."""
    clock = Clock()
    watch = _AnswerWatch(clock)

    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            clock.now += 1
            yield part

    async def read() -> None:
        kind = b"text/event-stream; charset=utf-8" if stream else b"application/json"
        answer = await watch.of(ProxiedAnswer(status, [(b"content-type", kind)], body()))
        got = []
        async for part in answer.body:
            got.append(part)
            if leave_after is not None and len(got) == leave_after:
                return
        assert got == list(parts)

    asyncio.run(read())
    return watch.outcome(0.5)


ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}\n\n'
PIECE = b'data: {"choices":[{"delta":{"content":"a b"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":12}}\n\n'
DONE = b"data: [DONE]\n\n"


def test_a_stream_has_its_first_token_where_text_first_comes():
    assert watched(ROLE, PIECE, PIECE, DONE) == RequestOutcome(True, 2, 4.0, 2.0, 0.5)


def test_a_usage_is_believed_also_cut_in_two():
    assert watched(ROLE, PIECE, USAGE, DONE) == RequestOutcome(True, 12, 4.0, 2.0, 0.5)
    assert watched(PIECE, USAGE[:40], USAGE[40:]) == RequestOutcome(True, 12, 3.0, 1.0, 0.5)


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        (b'data: {"choices":[{"text":"hi","index":0}]}\n\n', 1),
        (b'event: content_block_delta\ndata: {"delta":{"type":"t","text":"hi"}}\n\n', 1),
        (b'data: {"type":"response.output_text.delta","delta":"hi"}\n\n', 1),
        (b'data: {"usage":{"output_tokens":7}}\n\n', 7),
        (b'{"message":{"role":"assistant","content":"hi"},"done":false}\n', 1),
        (b'{"response":"hi","done":false}\n', 1),
        (b'{"response":"","prompt_eval_count":3,"prompt_eval_duration":9,"eval_count":7}\n', 7),
        (b": keep-alive\n\n", 0),
    ],
)
def test_every_form_of_the_api(part: bytes, tokens: int):
    outcome = watched(part)
    assert outcome is not None and outcome.tokens == tokens


def test_a_plain_answer_shows_no_first_token():
    body = b'{"choices":[{"text":"abc"}],"usage":{"prompt_tokens":1,"completion_tokens":9}}'
    assert watched(body, stream=False) == RequestOutcome(True, 9, 1.0, None, 0.5)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_the_engine_could_not_do_failed(status: int):
    outcome = watched(b"{}", status=status, stream=False)
    assert outcome is not None and not outcome.ok


def test_a_client_that_asks_for_more_than_its_due_says_nothing_of_the_engine():
    body = b'{"error":{"message":"x","code":"rate_limit"}}'
    assert watched(body, status=429, stream=False) is None


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
    watch = _AnswerWatch(Clock())
    assert watch.outcome(0.0) is None
    watch.refused(503)
    assert watch.outcome(0.0) == RequestOutcome(ok=False)


def test_engines_cost_is_shared_by_those_who_are_there():
    """Alone for 2 s, two for 4 s, nobody for 10 s, alone for 1 s, at 3 a second."""
    meter = _CostMeter()
    first = meter.begin(0.0, 3.0)
    second = meter.begin(2.0, 3.0)
    assert meter.end(6.0, 3.0, first) == pytest.approx(6 + 6)
    assert meter.end(6.0, 3.0, second) == pytest.approx(6)
    third = meter.begin(16.0, 3.0)
    assert meter.end(17.0, 3.0, third) == pytest.approx(3)
    assert meter.open == 0
