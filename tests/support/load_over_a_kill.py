"""Requests to two engines of a model, one of which is killed while it serves some of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import httpx
from fleet_engines import said

#: Lines of fleet.toml with a model and a context for the engines: small, so that an engine starts
#: in seconds; no engine refuses requests that would wait long on a busy machine.
SETTINGS = """
model = "{model}"
context = {context}
log_level = "warning"
max_seats = 4
max_predicted_wait_s = 0
token_budget = 64
seat_buckets = [4]
token_buckets = [64]
"""
_REQUESTS = 8
#: Tokens that an engine generates before it is killed: only some of those of its four requests, so
#: that it is not done before a busy machine kills it.
_BEFORE_THE_KILL = 32


def _asked(number: int, tokens: int) -> dict[str, Any]:
    """Request bodies: streamed and plain; greedy and, with a seed, random."""
    return {
        "model": "m",
        "messages": [{"role": "user", "content": f"Count from {number} upwards."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": number % 4 < 2,
        "temperature": number % 3 / 2,
        "seed": number,
    }


async def _texts(http: httpx.AsyncClient, tokens: int) -> list[str]:
    """The texts of all answers; all requests are open at the same time."""
    bodies = [_asked(number, tokens) for number in range(_REQUESTS)]
    answers = await asyncio.gather(
        *(http.post("/v1/chat/completions", json=body, timeout=120) for body in bodies)
    )
    refused = [answer.text for answer in answers if answer.status_code != 200]
    assert not refused, refused
    return [
        said(answer.text) if body["stream"] else answer.json()["choices"][0]["message"]["content"]
        for body, answer in zip(bodies, answers, strict=True)
    ]


async def _generated(engine: httpx.AsyncClient) -> float:
    """Tokens that the engine has generated since it started, including open requests."""
    metrics = await engine.get("/metrics")
    match = re.search(r'^jitney_rows_total\{kind="decode"\} (\S+)$', metrics.text, re.MULTILINE)
    assert match is not None, metrics.text
    return float(match[1])


async def texts_over_a_kill(
    fleet: httpx.AsyncClient,
    killed: httpx.AsyncClient,
    left: httpx.AsyncClient,
    kill: Callable[[], object],
    tokens: int,
) -> tuple[list[str], list[str]]:
    """(texts of the surviving engine, which serves all requests alone; texts of the fleet while the
    other engine is killed). Four requests go to each engine, in turn; `killed` is killed after
    `_BEFORE_THE_KILL` tokens. tokens: of each answer.
    """
    expected = await _texts(left, tokens)
    assert len(set(expected)) == _REQUESTS
    before = await _generated(killed)
    fleet_texts = asyncio.create_task(_texts(fleet, tokens))
    async with asyncio.timeout(100):
        while await _generated(killed) < before + _BEFORE_THE_KILL:
            await asyncio.sleep(0.01)
    kill()
    return expected, await fleet_texts
