"""Iterates over the outputs of a request to an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import EngineRequest
from jitney.engine.server.process.client import EngineClient


class Outputs:
    """Submits a request, and iterates over its outputs until all its sequences have ended."""

    def __init__(self, client: EngineClient, request: EngineRequest):
        self.request = request
        self._open = request.sampling.n
        self._outputs: asyncio.Queue[SequenceOutput] = asyncio.Queue()
        #: Number of received tokens, read by the iteration or not.
        self.n_tokens = 0
        client.submit(request, self._hear)

    def _hear(self, output: SequenceOutput) -> None:
        self.n_tokens += len(output.tokens)
        self._outputs.put_nowait(output)

    @property
    def waiting(self) -> int:
        """Number of received outputs that were not read yet."""
        return self._outputs.qsize()

    def __aiter__(self) -> AsyncIterator[SequenceOutput]:
        return self

    async def __anext__(self) -> SequenceOutput:
        if not self._open:
            raise StopAsyncIteration
        output = await self._outputs.get()
        self._open -= output.finish is not None
        return output


async def collect(outputs: Outputs) -> list[SequenceOutput]:
    return [output async for output in outputs]
