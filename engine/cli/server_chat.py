"""The answers of a running server to a chat, over OpenAI's chat completions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Self

import httpx

from jitney.engine.cli.asking import ask
from jitney.engine.common.errors import ConfigError, RequestError, did_you_mean

#: Connect timeout, seconds; read timeout of a stream, which sends keep-alives, seconds.
_CONNECT_S, _SILENCE_S = 5.0, 60.0
_REFUSALS = {404: "there are no models; is this a server with OpenAI's API?"}
_DONE = "[DONE]"


class ServerChat:
    """Chats with one model of a server. fields: fields of each request except its messages."""

    def __init__(self, url: str, key: str, fields: Mapping[str, Any]):
        self._url = url.rstrip("/") + "/v1/chat/completions"
        self._fields = {**fields, "stream": True}
        self._http = httpx.Client(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(_SILENCE_S, connect=_CONNECT_S),
            trust_env=False,
        )

    @classmethod
    def of(cls, url: str, key: str, adapter: str, fields: Mapping[str, Any]) -> Self:
        """The server's first model, or one of its adapters. Raises ConfigError and `Refused`."""
        url = url if "://" in url else f"http://{url}"
        listing = ask(url, "/v1/models", key, _REFUSALS)
        try:
            names = [card["id"] for card in json.loads(listing)["data"]]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{url} is no server with OpenAI's API") from None
        if adapter and adapter not in names:
            hint = did_you_mean(adapter, names)
            raise ConfigError(f"--adapter {adapter}: the server has {', '.join(names)}{hint}")
        if not names:
            raise ConfigError(f"{url} serves no model now; ask again when it is ready")
        return cls(url, key, {**fields, "model": adapter or names[0]})

    def answer(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        """The answer in pieces; closing the generator frees the seat. Raises RequestError."""
        body = {**self._fields, "messages": messages}
        try:
            with self._http.stream("POST", self._url, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise RequestError(_message_of(response.text, response.status_code))
                yield from _pieces(response.iter_lines())
        except httpx.HTTPError as error:
            raise RequestError(
                f"the server does not answer: {str(error) or type(error).__name__}"
            ) from None


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """The text in a stream of server-sent events. Raises RequestError for an error in it."""
    for line in lines:
        data = line.removeprefix("data: ")
        if data == line:
            continue  # an empty line, a comment, or the name of an event
        if data == _DONE:
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise RequestError(_message_of(data, 500))
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta", {})
            yield delta.get("reasoning_content") or delta.get("content") or ""


def _message_of(body: str, status: int) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return f"the server answers {status}"
