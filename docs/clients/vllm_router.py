"""vllm-router, in front of a Jitney server."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
from checks import Checks, expect, free_port, stop

checks = Checks(__doc__)
HELLO = [{"role": "user", "content": "Say hello."}]
SENT: Any = {"model": checks.model, "messages": HELLO, "max_tokens": 16}
#: Seconds that the router gets to be ready.
_START_S = 60


@checks.add
def models() -> None:
    listed = [card.id for card in _client().models.list()]
    expect(checks.model in listed, listed)


@checks.add
def chat() -> None:
    answer = _client().chat.completions.create(**SENT)
    expect(answer.choices[0].message.content, answer)


@checks.add
def stream() -> None:
    pieces = list(_client().chat.completions.create(**SENT, stream=True))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    expect(text and len(pieces) > 2, pieces)


@checks.add
def completion() -> None:
    answer = _client().completions.create(
        model=checks.model, prompt="Once upon a time", max_tokens=8
    )
    expect(answer.choices[0].text, answer)


@checks.add
def probes() -> str:
    paths = ("/health", "/liveness", "/readiness")
    answers = {path: httpx.get(f"{url}{path}", timeout=10).status_code for path in paths}
    expect(set(answers.values()) == {200}, answers)
    return " ".join(paths)


def _client() -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=checks.key, max_retries=0)


@contextmanager
def _router() -> Iterator[str]:
    """The address of a router whose only worker is the server."""
    program = str(Path(sys.executable).parent / "vllm-router")
    port, metrics_port = free_port(), free_port()
    command = [program, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    command += ["--policy", "round_robin", "--worker-urls", checks.url]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            address = f"http://127.0.0.1:{port}"
            if not _is_ready(process, address):
                log.seek(0)
                raise RuntimeError(f"the router did not start: {log.read()[-600:]}")
            yield address
        finally:
            stop(process)


def _is_ready(process: subprocess.Popen[bytes], address: str) -> bool:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{address}/readiness", timeout=5).status_code == 200:
                return True
        time.sleep(0.5)
    return False


with _router() as url:
    checks.run()
