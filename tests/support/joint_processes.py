"""Engines of several processes that compute together, and an engine of the same model in this
process to compare with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import jax
import numpy as np
import pytest
from outputs import Outputs

from jitney.engine import LLM
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.ports import free_port
from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.config.layers import ResolvedConfig
from jitney.engine.server.process.process_client import ProcessClient

#: Settings of a tiny model on a CPU: few sizes, since every process compiles them.
TINY: dict[str, Any] = {
    "platform": "cpu",
    "dtype": "float32",
    "max_seats": 4,
    "token_budget": 64,
    "context": 256,
    "pages": 32,
    "max_logprobs": 1,
    "seat_buckets": (4,),
    "token_buckets": (64,),
}
#: Most seconds for a test with four processes, each of which starts in 10 s on a free core.
LIMIT_S = 540.0


def drawn_prompts(count: int, longer: int) -> list[list[int]]:
    """Random prompts: the first has 5 tokens, and each has `longer` more than the one before."""
    return [
        np.random.default_rng(i).integers(0, 256, 5 + longer * i).tolist() for i in range(count)
    ]


def request(
    name: str, prompt: list[int], sampling: SamplingParams, adapter: int = 0
) -> EngineRequest:
    return EngineRequest(id=name, prompt=prompt, sampling=sampling, arrival=0.0, adapter=adapter)


async def outputs_of(stream: Outputs) -> list[SequenceOutput]:
    """All outputs of an answer; asserts that it did not end with an error."""
    outputs = [output async for output in stream]
    assert not any(output.error for output in outputs), outputs
    return outputs


async def tokens_of(stream: Outputs) -> list[int]:
    return [token for output in await outputs_of(stream) for token in output.tokens]


@asynccontextmanager
async def two_processes(
    settings: Mapping[str, Any],
) -> AsyncIterator[list[ProcessClient]]:
    """The supervisors of both processes, like `jitney serve` on each of two hosts; host 0 first."""
    both = {**settings, "n_hosts": 2, "coordinator": f"127.0.0.1:{free_port()}"}
    configs = [ResolvedConfig.load(flags=both | {"host_id": number}).config for number in range(2)]
    clients = [ProcessClient(config) for config in configs]
    try:
        for client in clients:
            await client.start()
        yield clients
    finally:
        for client in clients:
            await client.close()


@contextmanager
def compiled_in_a_hurry(xla_flags: str = "") -> Iterator[None]:
    """Processes that start now compile without optimisation, or load programs from the user's
    cache.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
        patch.setenv("XLA_FLAGS", xla_flags)
        yield


def run_logged(story: Coroutine[Any, Any, None], seconds: float, log: list[str]) -> None:
    """Run `story` within `seconds`; append the supervisors' log messages to `log`."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log.append(record.getMessage())

    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await story

    handler = Keep()
    logging.getLogger("jitney.process").addHandler(handler)
    try:
        asyncio.run(limited())
    finally:
        logging.getLogger("jitney.process").removeHandler(handler)


def alone_in_a_hurry(settings: Mapping[str, Any]) -> LLM:
    """An engine in this process, also compiled without optimisation."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        return LLM(**settings, compilation_cache=False)
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
