"""litellm, as a library and as a proxy in front of a Jitney server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import httpx
import litellm
import openai
from checks import Checks, expect, free_port, stop
from pydantic import BaseModel

checks = Checks(__doc__)
TO: dict[str, Any] = {
    "model": f"openai/{checks.model}",
    "api_base": checks.base_url,
    "api_key": checks.key,
}
HELLO = [{"role": "user", "content": "Say hello."}]
LAMP = {
    "type": "function",
    "function": {
        "name": "set_lamp",
        "parameters": {
            "type": "object",
            "properties": {"lamp": {"enum": ["kitchen", "hall"]}, "on": {"type": "boolean"}},
            "required": ["lamp", "on"],
            "additionalProperties": False,
        },
    },
}
#: Seconds that the proxy gets to be ready; it imports for long.
_START_S = 120
_PROXY_KEY = "sk-of-the-proxy"


class Mood(BaseModel):
    feeling: Literal["happy", "sad", "angry"]
    strength: Literal[1, 2, 3]


@checks.add
def completion() -> None:
    answer: Any = litellm.completion(**TO, messages=HELLO, max_tokens=16)
    expect(answer.choices[0].message.content, answer)
    expect(answer.usage.completion_tokens > 0, answer.usage)


@checks.add
def stream() -> None:
    chunks: Any = litellm.completion(
        **TO,
        messages=HELLO,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces = list(chunks)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    expect(text and len(pieces) > 2, pieces)


@checks.add
async def async_completion() -> None:
    answer: Any = await litellm.acompletion(**TO, messages=HELLO, max_tokens=8)
    expect(answer.choices[0].message.content, answer)


@checks.add
def text_completion() -> None:
    to = TO | {"model": f"text-completion-openai/{checks.model}"}
    answer: Any = litellm.text_completion(**to, prompt="Once upon a time", max_tokens=8)
    expect(answer.choices[0].text, answer)


@checks.add
def errors() -> None:
    try:
        litellm.completion(**TO, messages=HELLO, temperature=9)
    except litellm.BadRequestError:
        return
    raise AssertionError("temperature 9 was accepted")


@checks.add
def response_format() -> None:
    answer: Any = litellm.completion(**TO, messages=HELLO, response_format=Mood)
    Mood.model_validate_json(answer.choices[0].message.content)


@checks.add
def tools() -> None:
    answer: Any = litellm.completion(**TO, messages=HELLO, tools=[LAMP], tool_choice="required")
    [call, *_] = answer.choices[0].message.tool_calls
    expect(json.loads(call.function.arguments)["lamp"] in ("kitchen", "hall"), call)


@checks.add
def responses() -> None:
    answer: Any = litellm.responses(**TO, input="Say hello.", max_output_tokens=16)
    expect(answer.output_text, answer)


@checks.add
def proxy() -> str:
    with _proxy() as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=_PROXY_KEY, max_retries=0)
        sent: Any = {"model": "ours", "messages": HELLO, "max_tokens": 16}
        answer = client.chat.completions.create(**sent)
        expect(answer.choices[0].message.content, answer)
        pieces = list(client.chat.completions.create(**sent, stream=True))
        expect(len(pieces) > 2, pieces)
        longer = sent | {"max_tokens": 200}
        call = client.chat.completions.create(**longer, tools=[LAMP], tool_choice="required")
        expect(call.choices[0].message.tool_calls, call)
        spoken = {"model": "ours", "max_tokens": 16, "messages": HELLO}
        response = httpx.post(
            f"{url}/v1/messages", json=spoken, headers={"x-api-key": _PROXY_KEY}, timeout=60
        )
        expect(response.status_code == 200 and response.json()["content"], response.text)
        expect([card.id for card in client.models.list()] == ["ours"], "models")
        _probe(url)
    return "chat, stream, tools, messages, models, probes"


@checks.add
def context_window_fallbacks() -> None:
    """A prompt that is too long goes to the model with the larger context: the proxy knows the
    server's error by its words.
    """
    larger = {"model": "openai/larger", "api_key": "none", "mock_response": "from the larger one"}
    rules = {"context_window_fallbacks": [{"ours": ["larger"]}], "num_retries": 0}
    with _proxy({"larger": larger}, rules) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=_PROXY_KEY, max_retries=0)
        long: Any = [{"role": "user", "content": "word " * 200_000}]
        answer = client.chat.completions.create(model="ours", messages=long, max_tokens=16)
        expect(answer.choices[0].message.content == "from the larger one", answer)


def _probe(url: str) -> None:
    """The proxy's probes; /health asks the server for an answer."""
    headers = {"authorization": f"Bearer {_PROXY_KEY}"}
    for path in ("/health/liveliness", "/health/readiness"):
        probe = httpx.get(f"{url}{path}", timeout=60)
        expect(probe.status_code == 200, f"{path}: {probe.text}")
    whole = httpx.get(f"{url}/health", headers=headers, timeout=60).json()
    counts = whole["healthy_count"], whole["unhealthy_count"]
    expect(counts == (1, 0), whole)


@contextmanager
def _proxy(
    others: dict[str, dict[str, str]] | None = None, rules: dict[str, Any] | None = None
) -> Iterator[str]:
    """The address of a proxy that knows the server's model as "ours". others: more models, by
    name. rules: its `litellm_settings`.
    """
    models = {"ours": TO} | (others or {})
    listed = [{"model_name": name, "litellm_params": to} for name, to in models.items()]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        config.write_text(json.dumps({"model_list": listed, "litellm_settings": rules or {}}))
        port = free_port()
        program = str(Path(sys.executable).parent / "litellm")
        with Path(folder, "log").open("w+b") as log:
            process = subprocess.Popen(
                [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)],
                stdout=log,
                stderr=log,
                cwd=folder,
                env=os.environ | {"LITELLM_MASTER_KEY": _PROXY_KEY},
            )
            try:
                url = f"http://127.0.0.1:{port}"
                _wait_ready(process, url, Path(folder, "log"))
                yield url
            finally:
                stop(process)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health/liveliness", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"the proxy did not start: {log.read_text()[-250:]}")


checks.run()
