"""How a stream arrives: its first bytes, its tokens one by one, and signs of life between them."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from api_fakes import FakeClient, Script, call, make_app, opening, run, served
from server_settings import server_settings

from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import EngineRequest
from jitney.engine.server.chat.conversation.events import (
    AssistantEvent,
    AssistantMessage,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    joined,
)
from jitney.engine.server.chat.formats import Format
from jitney.engine.server.http import protocol
from jitney.engine.server.http.connections import Connections

PROMPT = {"prompt": "ab", "stream": True}
CHAT = {"messages": [{"role": "user", "content": "ab"}], "stream": True}
ROUTES = {"/v1/completions": PROMPT, "/v1/chat/completions": CHAT}


class WaitingClient(FakeClient):
    """It makes a token only when the one before has been written to the client: whoever holds one
    back waits for ever.
    """

    def __init__(self, text: str):
        super().__init__()
        self.text = text
        self.written = asyncio.Event()

    async def _outputs(
        self, request: EngineRequest, script: Script
    ) -> AsyncIterator[SequenceOutput]:
        tokens = list(self.text.encode())
        for number, token in enumerate(tokens):
            last = number == len(tokens) - 1
            self.written.clear()
            finish = "length" if last else None
            yield SequenceOutput(request_id=request.id, index=0, tokens=[token], finish=finish)
            if not last:
                await self.written.wait()


async def streamed(client: WaitingClient, path: str, body: dict[str, Any]) -> list[bytes]:
    """What is written, write by write."""
    app = make_app(client)
    writes: list[bytes] = []
    data = json.dumps(body).encode()
    messages = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError("the client stays")

    async def send(message: Any) -> None:
        if message.get("body"):
            writes.append(message["body"])
            client.written.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"x"), (b"content-type", b"application/json")],
    }
    await asyncio.wait_for(app(scope, receive, send), 30)
    return writes


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stop", [[], ["zzz", "\n\n"]])
async def test_every_token_is_written_before_the_next_one_exists(path: str, stop: list[str]):
    writes = await streamed(WaitingClient("steady"), path, ROUTES[path] | {"stop": stop})
    assert writes[-1].endswith(b"data: [DONE]\n\n")
    texts = [write for write in writes if any(b'"%c"' % char in write for char in b"steady")]
    assert len(texts) == len("steady"), "each in a write of its own"


async def test_the_last_token_comes_with_the_reason_of_the_end():
    first, second, done = await streamed(WaitingClient("ab"), "/v1/completions", PROMPT)
    assert b'"text":"a"' in first and b'"text":"b"' in second
    assert b'"finish_reason":"length"' in second and done == b"data: [DONE]\n\n"


@pytest.mark.parametrize("path", ROUTES)
def test_the_first_bytes_come_before_the_first_token(path: str):
    """A sign of life once it is clear that the engine does not refuse the request."""
    gate = threading.Event()
    app = make_app(FakeClient(Script("ab", gate=gate)), header_wait_s=0.02)
    reply = run(call(opening(gate, app), path, ROUTES[path]))
    assert reply.status == 200 and reply.chunks[0] == Format.keep_alive
    assert reply.chunks[1].startswith(b"data: {") and reply.body.endswith(b"data: [DONE]\n\n")


def test_signs_of_life_are_no_part_of_the_events():
    """A client that knows server-sent events sees the same with and without them."""
    with_signs = run(call(_slow_app(), "/v1/completions", PROMPT | {"request_id": "r"})).chunks
    fast = make_app(FakeClient(Script("ab")))
    without = run(call(fast, "/v1/completions", PROMPT | {"request_id": "r"})).chunks
    assert Format.keep_alive in with_signs and Format.keep_alive not in without
    assert _events(b"".join(with_signs)) == _events(b"".join(without))


def test_signs_of_life_do_not_mislead_who_strips_what_it_reads():
    """So `vllm bench serve` does, whose reader loses all that follows a lone comment."""
    chunks = run(call(_slow_app(), "/v1/completions", PROMPT)).chunks
    assert Format.keep_alive in chunks
    buffer = ""
    texts = []
    for chunk in chunks:
        buffer += chunk.strip().decode()
        *whole, buffer = buffer.split("\n\n")
        if buffer.startswith("data: {") and buffer.endswith("}"):
            whole.append(buffer)
            buffer = ""
        texts += [json.loads(event[6:])["choices"][0]["text"] for event in whole]
    assert "".join(texts) == "ab" and buffer == "data: [DONE]"


def _slow_app() -> Any:
    """Whose second token comes after a sign of life that follows the first."""
    gate = threading.Event()
    client = FakeClient(Script("ab", gate=gate, free=1))
    app = make_app(client, header_wait_s=0.01, comment_s=0.02)
    return opening(gate, app, lambda piece: piece == Format.keep_alive)


def _events(stream: bytes) -> list[Any]:
    frames = stream.removesuffix(b"\n\n").split(b"\n\n")
    events = [frame.removeprefix(b"data: ") for frame in frames if frame]
    assert events.pop() == b"[DONE]"
    return [json.loads(event) | {"created": 0} for event in events]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_events_are_the_same_whether_a_task_writes_them_or_one_pass_for_all(
    path: str, monkeypatch: pytest.MonkeyPatch
):
    """Over a socket, where streams are written without their tasks."""
    body: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": 40, "prompt": "ab"}
    if path != "/v1/completions":
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    written: list[bytes] = []
    write = protocol._BoundedProtocol.write_chunk

    def counted(self: protocol._BoundedProtocol, data: bytes) -> None:
        written.append(data)
        write(self, data)

    monkeypatch.setattr(protocol._BoundedProtocol, "write_chunk", counted)

    def answer() -> list[str]:
        limits = server_settings()
        app = make_app(FakeClient(Script("Hello, wörld, ünd more", delay_s=0.002)))
        with (
            served(app, limits, Connections(limits)) as (url, _),
            httpx.stream("POST", f"{url}{path}", json=body) as response,
        ):
            text = "".join(response.iter_text())
        return re.sub(r'"(id|created)":("[^"]*"|\d+)', "", text).split("\n\n")

    in_one_pass = answer()
    assert len(written) > 10
    monkeypatch.setattr(protocol._BoundedProtocol, "takes_chunk", False)
    assert answer() == in_one_pass


def test_events_that_wait_together_are_joined_and_say_the_same():
    events: list[AssistantEvent] = [
        ReasoningDelta("a"),
        ReasoningDelta("b"),
        ContentDelta("c"),
        ToolCallStart(0, "i", "f"),
        ToolCallArguments(0, "{"),
        ToolCallArguments(0, "}"),
        ToolCallStart(1, "j", "g"),
        ToolCallArguments(1, "x"),
        ContentDelta("d"),
        ContentDelta("e"),
    ]
    few = joined(events)
    assert len(few) == 7 and few[-1] == ContentDelta("de")
    assert AssistantMessage.of(few) == AssistantMessage.of(events)
