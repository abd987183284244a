"""Requests to two engines of a model, one of which is killed with some of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import httpx
from fleet_engines import said

#: Of the engines, as lines of fleet.toml with a model and a context: small, so that one starts in
#: seconds; none refuses requests that would wait long on a busy machine.
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
#: Tokens said by an engine before it is killed: few of what its four requests ask for, so that it
#: is not done with them before a busy machine comes to kill it.
_BEFORE_THE_KILL = 32


def _asked(number: int, tokens: int) -> dict[str, Any]:
    """Streams and plain answers; greedy ones and, with a seed, random ones."""
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
    """What is answered to all requests, which are open at once."""
    asked = [_asked(number, tokens) for number in range(_REQUESTS)]
    answers = await asyncio.gather(
        *(http.post("/v1/chat/completions", json=body, timeout=120) for body in asked)
    )
    refused = [answer.text for answer in answers if answer.status_code != 200]
    assert not refused, refused
    return [
        said(answer.text) if body["stream"] else answer.json()["choices"][0]["message"]["content"]
        for body, answer in zip(asked, answers, strict=True)
    ]


async def _generated(engine: httpx.AsyncClient) -> float:
    """Tokens, since it started, also of requests that have not ended."""
    metrics = await engine.get("/metrics")
    found = re.search(r'^jitney_rows_total\{kind="decode"\} (\S+)$', metrics.text, re.MULTILINE)
    assert found is not None, metrics.text
    return float(found[1])


async def texts_over_a_kill(
    fleet: httpx.AsyncClient,
    killed: httpx.AsyncClient,
    left: httpx.AsyncClient,
    kill: Callable[[], object],
    tokens: int,
) -> tuple[list[str], list[str]]:
    """(what the engine that is left says, with all requests to itself, what the fleet says while
    the other one is killed). Four requests go to each, in turn; the one is killed when it has said
    `_BEFORE_THE_KILL`. tokens: of each answer.
    """
    expected = await _texts(left, tokens)
    assert len(set(expected)) == _REQUESTS
    before = await _generated(killed)
    asked = asyncio.create_task(_texts(fleet, tokens))
    async with asyncio.timeout(100):
        while await _generated(killed) < before + _BEFORE_THE_KILL:
            await asyncio.sleep(0.01)
    kill()
    return expected, await asked
