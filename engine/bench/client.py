"""One streaming request to an OpenAI-compatible endpoint, timed piece by piece; every failure has a
kind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from jitney.engine.errors import ConfigError, JitneyError

#: Fields that are no part of OpenAI's API and that an endpoint may refuse.
EXTRA_FIELDS = ("ignore_eos",)
CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. url: with or without /v1. chat: the chat route instead of text
    completions. extras: fields beside OpenAI's that are sent (`ignore_eos`). timeout_s: of a whole
    request."""

    url: str
    model: str
    api_key: str = field(default="", repr=False)
    chat: bool = False
    extras: tuple[str, ...] = EXTRA_FIELDS
    timeout_s: float = 600.0

    @property
    def base(self) -> str:
        """The endpoint's root, without /v1."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def generation(self) -> str:
        return f"{self.base}/v1/{'chat/completions' if self.chat else 'completions'}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, text: str, max_tokens: int, user: str = "") -> dict[str, Any]:
        """A greedy streaming request for exactly max_tokens tokens, as far as the endpoint lets one
        say so.
        """
        said: dict[str, Any] = {"prompt": text}
        if self.chat:
            said = {"messages": [{"role": "user", "content": text}]}
        said |= {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | dict.fromkeys(self.extras, True)
        if (
            self.extras
        ):  # an endpoint that knows such fields may also have a penalty of its own as a default
            said["repetition_penalty"] = 1.0
        if user:
            said["user"] = user
        return said


@dataclass(slots=True)
class Answer:
    """What came back; times of time.monotonic(). pieces: when text came. finish: the endpoint's
    reason, or a kind of error: http_<status>, connect, timeout, broken_stream, error_in_stream.
    n_prompt, n_output, n_cached (prompt tokens found in a cache): by the endpoint's own count, 0 if
    it does not tell."""

    sent: float
    finished: float = 0.0
    finish: str = ""
    n_prompt: int = 0
    n_output: int = 0
    n_cached: int = 0
    pieces: list[float] = field(default_factory=list)
    detail: str = ""


async def ask(client: httpx.AsyncClient, target: Target, body: dict[str, Any]) -> Answer:
    """Send one request and read its stream to the end. Raises nothing but cancellation."""
    answer = Answer(sent=time.monotonic())
    try:
        async with (
            asyncio.timeout(target.timeout_s),
            client.stream(
                "POST",
                target.generation,
                content=orjson.dumps(body),
                headers={"content-type": "application/json"},
            ) as response,
        ):
            if response.status_code != 200:
                detail = (await response.aread())[:200].decode(errors="replace")
                answer.finish, answer.detail = f"http_{response.status_code}", detail
            else:
                await _read(answer, events(response.aiter_bytes()))
    except (TimeoutError, httpx.TimeoutException) as error:
        answer.finish, answer.detail = "timeout", type(error).__name__
    except httpx.ConnectError as error:
        answer.finish, answer.detail = "connect", str(error)
    except (httpx.HTTPError, orjson.JSONDecodeError, KeyError, TypeError, IndexError) as error:
        answer.finish, answer.detail = "broken_stream", f"{type(error).__name__}: {error}"
    answer.finished = time.monotonic()
    return answer


async def _read(answer: Answer, stream: AsyncIterator[bytes]) -> None:
    async for data in stream:
        if data == b"[DONE]":
            break
        chunk = orjson.loads(data)
        if "error" in chunk:
            answer.finish, answer.detail = "error_in_stream", str(chunk["error"])[:200]
            return
        _take(answer, chunk)
    if not answer.finish:
        answer.finish, answer.detail = "broken_stream", "it ended without a finish_reason"


def _take(answer: Answer, chunk: dict[str, Any]) -> None:
    """Note one chunk: text, the end, the counts."""
    for choice in chunk["choices"]:
        delta = choice.get("delta")
        if choice.get("text") if delta is None else delta.get("content"):
            answer.pieces.append(time.monotonic())
        answer.finish = choice.get("finish_reason") or answer.finish
    if chunk.get("usage"):
        answer.n_prompt = chunk["usage"]["prompt_tokens"]
        answer.n_output = chunk["usage"]["completion_tokens"]
        answer.n_cached = (chunk["usage"].get("prompt_tokens_details") or {}).get(
            "cached_tokens"
        ) or 0


async def events(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, one by one; comments and other fields are skipped, lines of
    one event joined.
    """
    rest, lines = b"", []
    async for part in stream:
        *whole, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n")
        for line in whole:
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif not line and lines:
                yield b"\n".join(lines)
                lines.clear()


def open_client(target: Target) -> httpx.AsyncClient:
    """A client that never makes a request wait for a free connection."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(
        headers=target.headers, limits=limits, timeout=httpx.Timeout(None, connect=CONNECT_S)
    )


async def first_model(client: httpx.AsyncClient, target: Target) -> str:
    """The first model that the endpoint lists. ConfigError if there is no such endpoint, or it
    lists none.
    """
    try:
        response = await client.get(f"{target.base}/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--url {target.url}: no model list at /v1/models ({said(error)}); is a server running "
            "there? name the model with --model if it has no list"
        ) from None


async def probe(client: httpx.AsyncClient, target: Target, texts: Sequence[str]) -> list[int]:
    """Prompt tokens of some texts, by the endpoint's own count. JitneyError if it does not answer
    or count.
    """
    counts = []
    for text in texts:
        answer = await ask(client, target, target.body(text, 1))
        if answer.finish not in ("stop", "length"):
            hint = (
                "; --no-ignore-eos leaves that field out" if "ignore_eos" in answer.detail else ""
            )
            raise JitneyError(
                f"the endpoint refuses a trial request: {answer.finish} {answer.detail}{hint}"
            )
        if not answer.n_prompt:
            raise JitneyError(
                "the endpoint streams no usage (stream_options.include_usage), so that prompts "
                "cannot be "
                "made as long as wanted"
            )
        counts.append(answer.n_prompt)
    return counts


def said(error: Exception) -> str:
    return str(error) or type(error).__name__
