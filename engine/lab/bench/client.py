"""One streaming request to an OpenAI-compatible endpoint, timed chunk by chunk."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import httpx
import orjson

from jitney.engine.common.errors import ConfigError, JitneyError
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.sse import events
from jitney.engine.common.trace import Arrival

_CONNECT_S = 10.0
#: Most characters that are stored of an error's text.
_DETAIL = 200
#: `finish` of an answer that contains an error.
_ERROR = "error_in_stream"
_JSON = {"content-type": "application/json"}
#: Fields of every request.
_BODY: JsonDict = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class RemoteEndpoint:
    """The endpoint that receives the requests."""

    #: Base URL with or without /v1.
    url: str
    model: str
    api_key: str = field(default="", repr=False)
    #: Use the chat route instead of text completions.
    chat: bool = False
    #: Send the field of that name, which is not in OpenAI's API; an endpoint may refuse it.
    ignore_eos: bool = True
    #: Timeout of a whole request, seconds.
    timeout_s: float = 600.0

    @property
    def base(self) -> str:
        """The endpoint's root, without /v1."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def generation(self) -> str:
        if self.chat:
            return f"{self.base}/v1/chat/completions"
        return f"{self.base}/v1/completions"

    @property
    def headers(self) -> dict[str, str]:
        if not self.api_key:
            return {}
        return {"authorization": f"Bearer {self.api_key}"}

    def body(self, text: str, max_tokens: int, user: str = "") -> JsonDict:
        """A greedy streaming request, for exactly max_tokens tokens if the endpoint allows it."""
        body = _BODY | {"model": self.model, "max_tokens": max_tokens, **self._prompt(text)}
        if self.ignore_eos:
            # An endpoint with such fields may have its own default penalty.
            body |= {"repetition_penalty": 1.0, "ignore_eos": True}
        if user:
            body["user"] = user
        return body

    def _prompt(self, text: str) -> JsonDict:
        if self.chat:
            return {"messages": [{"role": "user", "content": text}]}
        return {"prompt": text}


@dataclass(slots=True)
class Answer:
    """A response. Times are time.monotonic()."""

    sent: float
    finished: float = 0.0
    #: The endpoint's reason, or a kind of error: http_<status>, connect, timeout, broken_stream,
    #: error_in_stream.
    finish: str = ""
    #: Tokens by the endpoint's own count, 0 if it does not count; n_cached: prompt tokens found in
    #: a cache.
    n_prompt: int = 0
    n_output: int = 0
    n_cached: int = 0
    #: Time of each chunk with text.
    chunks: list[float] = field(default_factory=list)
    #: Text of an error.
    detail: str = ""

    @property
    def served(self) -> bool:
        """Whether it ended without an error."""
        return self.finish in ("stop", "length")

    @property
    def n_tokens(self) -> int:
        """Tokens of a served response, or its chunks if the endpoint sends no count; else 0."""
        return (self.n_output or len(self.chunks)) if self.served else 0

    def fail(self, kind: str, detail: str) -> None:
        self.finish = kind
        self.detail = detail


class EndpointClient:
    """HTTP client for one endpoint, used in `async with`, with any number of connections."""

    def __init__(self, endpoint: RemoteEndpoint):
        #: The endpoint; `find_model` sets its model.
        self.endpoint = endpoint
        self._http = httpx.AsyncClient(
            headers=endpoint.headers,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def ask(self, body: JsonDict) -> Answer:
        """Send one request and read its stream to the end. Raises nothing but cancellation."""
        answer = Answer(sent=time.monotonic())
        try:
            async with asyncio.timeout(self.endpoint.timeout_s):
                await self._exchange(body, answer)
        except (TimeoutError, httpx.TimeoutException) as error:
            answer.fail("timeout", type(error).__name__)
        except httpx.ConnectError as error:
            answer.fail("connect", str(error))
        except (httpx.HTTPError, orjson.JSONDecodeError, KeyError, TypeError, IndexError) as error:
            answer.fail("broken_stream", f"{type(error).__name__}: {error}")
        answer.finished = time.monotonic()
        return answer

    async def send(self, arrival: Arrival, text: str) -> Answer:
        """`ask` for an arrival with this prompt."""
        return await self.ask(self.endpoint.body(text, arrival.n_output, arrival.tenant))

    async def _exchange(self, body: JsonDict, answer: Answer) -> None:
        url, content = self.endpoint.generation, orjson.dumps(body)
        async with self._http.stream("POST", url, content=content, headers=_JSON) as response:
            if response.status_code == 200:
                await _read(answer, events(response.aiter_bytes()))
            else:
                await _read_refusal(answer, response)

    async def read_page(self, path: str) -> httpx.Response | None:
        """GET a page; None if there is no such page."""
        with contextlib.suppress(httpx.HTTPError):
            response = await self._http.get(f"{self.endpoint.base}{path}")
            if response.status_code == 200:
                return response
        return None

    async def find_model(self) -> None:
        """Use the first model that the endpoint lists, unless one is set. Raises ConfigError if
        the endpoint does not answer or lists no model.
        """
        if not self.endpoint.model:
            self.endpoint = replace(self.endpoint, model=await self._first_model())

    async def _first_model(self) -> str:
        try:
            response = await self._http.get(f"{self.endpoint.base}/v1/models")
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            reason = str(error) or type(error).__name__
            raise ConfigError(
                f"--url {self.endpoint.url}: no model list at /v1/models ({reason}); is a server "
                "running there? name the model with --model if it has no list"
            ) from None

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Prompt tokens of texts by the endpoint's count. Raises JitneyError if it sends none."""
        return [await self._count(text) for text in texts]

    async def _count(self, text: str) -> int:
        answer = await self.ask(self.endpoint.body(text, 1))
        if not answer.served:
            hint = ""
            if "ignore_eos" in answer.detail:
                hint = "; --no-ignore-eos leaves that field out"
            reason = f"{answer.finish} {answer.detail}"
            raise JitneyError(f"the endpoint refuses a trial request: {reason}{hint}")
        if not answer.n_prompt:
            raise JitneyError(_UNCOUNTED)
        return answer.n_prompt


_UNCOUNTED = (
    "the endpoint streams no usage (stream_options.include_usage), so that prompts cannot "
    "be made as long as wanted"
)


async def _read_refusal(answer: Answer, response: httpx.Response) -> None:
    detail = (await response.aread())[:_DETAIL]
    answer.fail(f"http_{response.status_code}", detail.decode(errors="replace"))


async def _read(answer: Answer, stream: AsyncIterator[bytes]) -> None:
    async for data in stream:
        if data == b"[DONE]":
            break
        _take(answer, orjson.loads(data))
        if answer.finish == _ERROR:
            return
    if not answer.finish:
        answer.fail("broken_stream", "it ended without a finish_reason")


def _take(answer: Answer, chunk: JsonDict) -> None:
    if "error" in chunk:
        answer.fail(_ERROR, str(chunk["error"])[:_DETAIL])
        return
    for choice in chunk["choices"]:
        # Of a chat, else of a completion.
        new = choice["delta"].get("content") if choice.get("delta") else choice.get("text")
        if new:
            answer.chunks.append(time.monotonic())
        answer.finish = choice.get("finish_reason") or answer.finish
    usage = chunk.get("usage")
    if usage:
        answer.n_prompt = usage["prompt_tokens"]
        answer.n_output = usage["completion_tokens"]
        answer.n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
