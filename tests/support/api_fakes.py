"""A scripted engine and a byte-level tokenizer for tests of the HTTP side; helpers to drive an ASGI
app by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import numpy as np
import uvicorn
from engine_infos import engine_info
from server_settings import server_settings

from jitney.engine.common.engine_info import EngineInfo, EngineState, Seat
from jitney.engine.common.errors import ErrorInfo, RequestError
from jitney.engine.common.history import History
from jitney.engine.common.messages import Progress, SeatMap
from jitney.engine.common.outputs import FinishReason, PromptLogprobs, SequenceOutput, TokenLogprobs
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.text.fill_in import FillIn
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.server.app import create_app
from jitney.engine.server.chat.conversation.template_abilities import ChatAbilities
from jitney.engine.server.http.access import ApiKeys
from jitney.engine.server.http.connections import Connections
from jitney.engine.server.http.protocol import http_protocol
from jitney.engine.server.http.settings import ServerSettings
from jitney.engine.server.process.client import OutputListener
from jitney.engine.server.process.counters import EngineCounters

#: Most seconds to wait for a condition; only a failing test takes as long.
PATIENCE_S = 120.0
EOS, BOS = 256, 257
VOCAB = 260


class ByteTokenizer:
    """One token per byte; ids 256 and 257 are special. The chat template is one line per
    message.
    """

    special_ids = frozenset({EOS, BOS})
    added_tokens: dict[str, int] = {}  # noqa: RUF012
    special_tokens: dict[str, str] = {"eos_token": "<eos>"}  # noqa: RUF012
    special_names = ("<eos>", "<bos>")
    eos_ids = (EOS,)
    vocab_size = VOCAB
    longest_token: int | None = 1
    has_chat_template = True
    #: Source text of the template, for code that reads it.
    chat_template = ""
    bos_id = None

    @property
    def tools_template(self) -> str:
        return self.chat_template

    fill_in: FillIn | None = None

    def first_tokens(self, text: str, most: int) -> list[int]:
        return Tokenizer.first_tokens(cast(Any, self), text, most)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else {EOS: b"<eos>", BOS: b"<bos>"}.get(id, b"")

    def decode(self, ids, *, skip_special_tokens: bool = True) -> str:
        text_ids = [id for id in ids if not (skip_special_tokens and id in self.special_ids)]
        return b"".join(map(self.token_bytes, text_ids)).decode(errors="replace")

    def apply_chat_template(
        self,
        messages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools=None,
        **variables,
    ) -> str:
        lines = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        if continue_final_message:
            return lines[:-1]
        return lines + ("assistant: " if add_generation_prompt else "")

    def id_to_token(self, id: int) -> str | None:
        return self.token_bytes(id).decode(errors="replace")


async def _byte_abilities() -> ChatAbilities:
    tokenizer = ByteTokenizer()

    async def render(messages: list[Any], variables: dict[str, Any]) -> str:
        return tokenizer.apply_chat_template(messages, **variables)

    return await ChatAbilities.of(render)


_BYTE_ABILITIES = asyncio.run(_byte_abilities())


@dataclass
class Script:
    """The behaviour of the fake engine for a request: it generates `text`, one token per output."""

    text: str = "Hello, wörld!"
    #: Tokens to generate instead of `text`, without the final one.
    tokens: list[int] | None = None
    #: Seconds before each output, and before the first.
    delay_s: float = 0.0
    first_delay_s: float = 0.0
    #: Error that is sent instead of any output.
    error: ErrorInfo | None = None
    #: Number of tokens after which the engine dies.
    fail_after: int | None = None
    #: Whether the engine sends nothing at all.
    hang: bool = False
    #: Where there is one, the engine waits after `free` outputs until the test has set it.
    gate: threading.Event | None = None
    free: int = 0
    #: Tokens per output.
    chunk: int = 1
    #: Whether each sequence's text ends with its index.
    numbered: bool = False
    cached_tokens: int = 0


class FakeClient:
    """A scripted `EngineClient`. Records `requests`, `aborts` (id, index, reason) and `open`."""

    def __init__(self, script: Script | None = None, **info: Any):
        self.state: EngineState = "ready"
        self.progress: Progress | None = None
        self.counters = EngineCounters()
        self.history = History()
        self.script = script or Script()
        self.scripts: list[Script] = []  # one per future request; then `script` again
        self.requests: list[EngineRequest] = []
        self.aborts: list[tuple[str, int | None, FinishReason]] = []
        self.open: set[str] = set()
        #: Request id -> task that sends its outputs to the listener.
        self._speakers: dict[str, asyncio.Task[None]] = {}
        #: For each call of `sleep`, whether it aborts open requests.
        self.slept: list[bool] = []
        self.resets = 0
        self.age = 0.0
        defaults: dict[str, Any] = dict(
            context_length=256,
            vocab_size=VOCAB,
            seats=8,
            pages=64,
            page_size=16,
            token_budget=64,
            kernels="reference",
            platform="cpu",
            device="cpu",
            max_waiting_requests=256,
            max_predicted_wait_s=60.0,
            embedding_pooling="mean",
            embedding_size=2,
        )
        self.info: EngineInfo | None = engine_info(**(defaults | info))
        self.history.core_ready(self.info)

    def submit(self, request: EngineRequest, listener: OutputListener) -> None:
        if self.state != "ready":
            raise RequestError(
                "not now", code="engine_dead" if self.state == "dead" else self.state
            )
        self.requests.append(request)
        self.open.add(request.id)
        script = self.scripts.pop(0) if self.scripts else self.script
        self._speakers[request.id] = asyncio.create_task(self._speak(request, script, listener))

    def forget(self, request_id: str) -> None:
        self._speakers.pop(request_id).cancel()

    async def _speak(
        self, request: EngineRequest, script: Script, listener: OutputListener
    ) -> None:
        async for output in self._outputs(request, script):
            listener(output)

    async def _outputs(
        self, request: EngineRequest, script: Script
    ) -> AsyncIterator[SequenceOutput]:
        try:
            await asyncio.sleep(script.first_delay_s)
            if script.hang:
                await asyncio.sleep(3600)
            if script.error is not None:
                await self._passes(script.gate)
                for index in range(request.sampling.n):
                    yield self._end(request, index, script.error)
                return
            if request.pooling is not None:
                yield self._vector(request)
                return
            async for output in self._outputs_of(request, script):
                yield output
        finally:
            self.open.discard(request.id)

    @staticmethod
    async def _passes(gate: threading.Event | None) -> None:
        while gate is not None and not gate.is_set():
            await asyncio.sleep(0.005)

    def _vector(self, request: EngineRequest) -> SequenceOutput:
        """A vector of two numbers, which depends on the prompt's length."""
        vector = np.array([1, len(request.prompt)], np.float32)
        return SequenceOutput(
            request.id, 0, finish="stop", embedding=vector.tobytes(), queued_s=0.0
        )

    async def _outputs_of(
        self, request: EngineRequest, script: Script
    ) -> AsyncIterator[SequenceOutput]:
        n = request.sampling.n
        tokens = {index: self._tokens(request, script, index) for index in range(n)}
        position = 0
        while tokens:
            if script.fail_after is not None and position >= script.fail_after:
                for index in tokens:
                    yield self._end(request, index, ErrorInfo("engine_dead", "the engine stopped"))
                return
            if position == script.free * script.chunk:
                await self._passes(script.gate)
            for index in list(tokens):
                await asyncio.sleep(script.delay_s)
                if (request.id, index, "stop") in self.aborts:
                    del tokens[index]
                    yield SequenceOutput(request_id=request.id, index=index, finish="stop")
                    continue
                new = tokens[index][position : position + script.chunk]
                last = position + len(new) >= len(tokens[index])
                yield self._output(request, script, index, position, new, last)
                if last:
                    del tokens[index]
            position += script.chunk

    def _tokens(self, request: EngineRequest, script: Script, index: int) -> list[int]:
        tokens = list((script.text + (str(index) if script.numbered else "")).encode())
        if script.tokens is not None:
            tokens = list(script.tokens)
        tokens += [] if request.sampling.ignore_eos else [EOS]
        return tokens[: request.sampling.max_tokens]

    def _output(
        self,
        request: EngineRequest,
        script: Script,
        index: int,
        position: int,
        new: list[int],
        last: bool,
    ) -> SequenceOutput:
        sampling, first = request.sampling, position == 0
        ended = bool(last and new and new[-1] == EOS)
        prompt_logprobs = None
        if first and sampling.prompt_logprobs is not None:
            scores = [score(token, sampling.prompt_logprobs) for token in request.prompt[1:]]
            prompt_logprobs = PromptLogprobs.of([None, *scores])
        return SequenceOutput(
            request_id=request.id,
            index=index,
            tokens=new,
            prompt_logprobs=prompt_logprobs,
            logprobs=None
            if sampling.logprobs is None
            else [score(token, sampling.logprobs) for token in new],
            finish=("stop" if ended else "length") if last else None,
            stop_token=EOS if ended else None,
            cached_tokens=script.cached_tokens if first else 0,
            queued_s=0.01 if first else None,
        )

    def _end(self, request: EngineRequest, index: int, error: ErrorInfo) -> SequenceOutput:
        return SequenceOutput(request_id=request.id, index=index, finish="error", error=error)

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = "abort"
    ) -> None:
        self.aborts.append((request_id, index, reason))

    async def seat_map(self) -> SeatMap:
        busy = Seat(
            seat=0,
            state="decode",
            request_id="r",
            n_prompt=5,
            n_computed=7,
            n_output=3,
            max_tokens=9,
            pages=1,
        )
        return SeatMap(0, [busy, Seat(seat=1, state="free")], b"")

    async def page_map(self) -> SeatMap:
        return await self.seat_map()

    async def sleep(self, *, abort: bool = False) -> int:
        if self.state == "sleeping":
            return 0
        self.state = "sleeping"
        self.slept.append(abort)
        return 4096

    async def wake(self) -> None:
        self.state = "ready"

    async def reset_prefix_cache(self) -> None:
        self.resets += 1

    def last_step_age(self) -> float:
        return self.age


def score(token: int, top: int) -> TokenLogprobs:
    """Log-probabilities that a test can predict: -token/1000 for the chosen token; the top tokens
    have ids 65, 66, ...
    """
    return TokenLogprobs(
        -token / 1000, [65 + i for i in range(top)], [-0.5 - i for i in range(top)]
    )


def make_app(
    client: FakeClient | None = None,
    model: str = "m",
    tokenizer: ByteTokenizer | None = None,
    keys: ApiKeys | None = None,
    **settings: Any,
):
    app = create_app(
        client or FakeClient(),  # type: ignore[arg-type]
        tokenizer or ByteTokenizer(),  # type: ignore[arg-type]
        server_settings(**settings),
        model,
        keys=keys,
    )
    if tokenizer is None:
        app.state.service.turns._abilities = _BYTE_ABILITIES  # else the first chat takes longer
    return app


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json()["error"]


async def call(
    app,
    path: str,
    body: bytes | Any = b"",
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    raw_headers: list[tuple[bytes, bytes]] | None = None,
    messages: list[dict[str, Any]] | None = None,
    leave_after: float | None = None,
    leave_on_chunk: int | None = None,
    query: str = "",
) -> Reply:
    """One raw ASGI call. messages: ASGI messages that the app receives instead of one body; then
    the client disconnects as `leave_after` or `leave_on_chunk` says.
    """
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    all_headers = {"host": "localhost", "content-type": "application/json"} | (headers or {})
    head = (
        [(name.encode(), value.encode()) for name, value in all_headers.items()]
        if raw_headers is None
        else raw_headers
    )
    queue = list(
        messages
        if messages is not None
        else [{"type": "http.request", "body": data, "more_body": False}]
    )
    reply, disconnected = Reply(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        if queue:
            return queue.pop(0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(disconnected.wait(), leave_after)
        return {"type": "http.disconnect"}

    async def send(message) -> None:
        if message["type"] == "http.response.start":
            assert not reply.status
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            assert len(reply.headers) == len(message["headers"])
        else:
            assert not reply.complete
            reply.chunks.append(message["body"])
            reply.complete = not message.get("more_body", False)
            if leave_on_chunk is not None and len(reply.chunks) >= leave_on_chunk:
                disconnected.set()

    scope = {
        "type": "http",
        "asgi": {"spec_version": "2.3"},
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": head,
        "http_version": "1.1",
        "scheme": "http",
    }
    await asyncio.wait_for(app(scope, receive, send), PATIENCE_S)
    return reply


def run(coroutine):
    return asyncio.run(coroutine)


def opening(gate: threading.Event, app: Any, shows: Callable[[bytes], bool] = bool) -> Any:
    """The app; it sets `gate` once it has sent a piece of an answer that shows something."""

    async def sending(scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            await send(message)
            if shows(message.get("body", b"")):
                gate.set()

        await app(scope, receive, sent)

    return sending


@contextlib.contextmanager
def served(
    app,
    settings: ServerSettings | None = None,
    connections: Connections | None = None,
    sockets: list[socket.socket] | None = None,
    keep_alive_s: int = 60,
) -> Iterator[tuple[str, int]]:
    """A real server in a thread; yields its base URL and port."""
    settings = settings or ServerSettings()
    if connections is None:
        connections = Connections(settings)
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_config=None,
        access_log=False,
        server_header=False,
        http=http_protocol(settings, connections),
        timeout_keep_alive=keep_alive_s,
        loop="asyncio",  # what `jitney serve` runs on
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
    thread.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", port
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def until(condition, seconds: float = PATIENCE_S) -> None:
    """Wait for a condition that another thread makes true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def http_client(url: str) -> httpx.Client:
    # verify=False: loading the CA certificates, which http:// does not use, takes 20 ms.
    return httpx.Client(base_url=url, timeout=60, trust_env=False, verify=False)
