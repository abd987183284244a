"""The event loop comes round while large bodies are read and large answers are written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from api_fakes import FakeClient, Reply, Script, call, run
from loop_lag import lag_of_loop
from server_settings import server_settings

from jitney.engine.common.errors import RequestError
from jitney.engine.common.slices import Pieces, TimeSlices
from jitney.engine.core.text.fast_tokenizers import _tiny_fast
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.server.app import create_app

#: Seconds of computing. All at once it took half a second to four; a slow machine that does other
#: things beside needs 0.13 for what a fast one does in 0.05.
_LONGEST = 0.25
_SCORED: dict[str, Any] = {
    "model": "m",
    "prompt": [[1 + (place + prompt) % 255 for place in range(2000)] for prompt in range(4)],
    "echo": True,
    "logprobs": 20,
    "max_tokens": 1,
}
_PART = {"type": "text", "text": "a"}
_MANY = {"model": "m", "prompt": [1, 2], "logprobs": 20, "n": 16, "max_tokens": 1000}


def make_app(script: Script | None = None):
    client = FakeClient(script, context_length=4096, pages=1024, vocab_size=512)
    return create_app(client, Tokenizer(_tiny_fast()), server_settings(body_limit=1 << 23), "m")


async def ask(app, path: str, body: dict[str, Any]) -> tuple[Reply, float]:
    """The answer, and the longest time for which the loop computed."""
    data = json.dumps(body).encode()
    await call(app, path, {"model": "m", "prompt": "a"})
    async with lag_of_loop() as lag:
        reply = await call(app, path, data)
    return reply, lag.longest


@pytest.mark.parametrize("stream", [False, True])
def test_scores_of_long_prompts(stream):
    reply, longest = run(ask(make_app(), "/v1/completions", _SCORED | {"stream": stream}))
    assert reply.status == 200 and len(reply.body) > 1_500_000
    assert longest < _LONGEST


def test_a_large_answer_is_one_json_text_and_comes_in_blocks():
    reply, _ = run(ask(make_app(), "/v1/completions", _SCORED))
    assert "content-length" not in reply.headers
    assert max(map(len, reply.chunks)) < 1 << 17
    for choice in reply.json()["choices"]:
        logprobs = choice["logprobs"]
        assert {len(column) for column in logprobs.values()} == {2001}
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1999] == -_SCORED["prompt"][choice["index"]][1999] / 1000
        assert all(len(top) >= 20 for top in logprobs["top_logprobs"][1:])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_many_scored_choices(path):
    body: dict[str, Any] = dict(_MANY)
    if path != "/v1/completions":
        del body["prompt"]
        messages = [{"role": "user", "content": "a"}]
        body |= {"messages": messages, "logprobs": True, "top_logprobs": 20}
    app = make_app(Script("x" * 1000, chunk=100))
    reply, longest = run(ask(app, path, body))
    assert reply.status == 200
    columns = [choice["logprobs"] for choice in reply.json()["choices"]]
    assert [len(column.get("content") or column["tokens"]) for column in columns] == [1000] * 16
    assert longest < _LONGEST


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("ids", {"prompt": [[place % 9 for place in range(4000)] for _ in range(128)]}, 200),
        ("parts", {"messages": [{"role": "user", "content": [_PART] * 60}] * 700}, 400),
        ("messages", {"messages": [{"role": "user", "content": "a" * 4}] * 4000}, 400),
        ("brackets", {"prompt": "a", "more": [[]] * 400_000}, 200),
        ("not finite", {"prompt": "a", "more": [1] * 500_000 + [float("inf")]}, 400),
    ],
)
def test_large_bodies(name, body, status):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reply, longest = run(ask(make_app(), path, {"model": "m", "max_tokens": 1} | body))
    assert reply.status == status, reply.body[:300]
    assert longest < _LONGEST


def test_short_work_does_not_wait_for_long_work():
    async def both() -> list[str]:
        slices = TimeSlices()
        ended: list[str] = []

        def work(steps: int):
            for _ in range(steps):
                sum(range(5_000))
                yield

        async def do(name: str, steps: int) -> None:
            await slices.result(work(steps))
            ended.append(name)

        long = [asyncio.create_task(do("long", 500)) for _ in range(3)]
        await asyncio.sleep(0.01)
        await do("short", 1)
        await asyncio.gather(*long)
        return ended

    assert run(both())[0] == "short"


async def _written(pieces: Callable[[int], Pieces]) -> tuple[int, list[int]]:
    """Turns of the loop until 100 writers have written what `pieces` gives for their number; and
    the numbers, as they were written.
    """
    slices, written = TimeSlices(), list[bytes]()

    async def write(number: int) -> None:
        written.extend([block async for block in slices.blocks(pieces(number))])

    tasks = [asyncio.create_task(write(number)) for number in range(100)]
    n_turns = 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        n_turns += 1
    return n_turns, [int(number) for number in written]


def test_what_all_streams_write_after_a_step_is_written_in_few_turns(monkeypatch):
    """A turn of the loop for each of them cost more than the writing."""
    monkeypatch.setattr("jitney.engine.common.slices._SLICE_S", 30.0)

    def pieces(number: int) -> Pieces:
        yield b"%d" % number

    n_turns, written = run(_written(pieces))
    assert n_turns < 10
    assert written == list(range(100))


def test_those_who_wait_for_a_slice_share_the_next_ones(monkeypatch):
    """What 100 streams write takes five slices' time, and not a turn for each that came too late
    for the first.
    """
    now_s = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now_s)
    monkeypatch.setattr("jitney.engine.common.slices.time", clock)

    def pieces(number: int) -> Pieces:
        nonlocal now_s
        now_s += 0.0001
        yield b"%d" % number

    n_turns, written = run(_written(pieces))
    assert n_turns < 30
    assert sorted(written) == list(range(100))


async def test_work_beyond_the_limit_is_refused_and_what_ends_makes_room():
    def pieces():
        yield b"a"
        yield b"b"

    def fails():
        yield
        raise ValueError

    slices = TimeSlices(most=1)
    blocks = slices.blocks(pieces())
    assert await anext(blocks) == b"ab"
    with pytest.raises(RequestError, match="already"):
        await slices.result(fails())
    await blocks.aclose()
    with pytest.raises(ValueError):
        await slices.result(fails())
    assert [block async for block in slices.blocks(pieces())] == [b"ab"]


async def test_whoever_leaves_while_waiting_gives_the_turn_to_the_next():
    def work():
        for _ in range(300):
            sum(range(5_000))
            yield

    slices = TimeSlices()
    tasks = [asyncio.create_task(slices.result(work())) for _ in range(6)]
    await asyncio.sleep(0.004)
    for task in tasks[::2]:
        task.cancel()
    done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert [type(each) for each in done[1::2]] == [type(None)] * 3
