"""Grammars in a core process of its own, and in the one after it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest
from fakes import make_request
from grammars import text_of, tokenizer_json
from outputs import Outputs, collect

from jitney.engine.common.requests import Grammar
from jitney.engine.config.schema import Config, EngineSection, ServerSection, _ModelSection
from jitney.engine.server.process.process_client import ProcessClient

SUPPORT = Path(__file__).parents[3] / "support"
CODE = Grammar("regex", "[a-f]{20}-[0-9]{12}")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch):
    """The core process finds `fake_core` on its path."""
    paths = [str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def make_client() -> ProcessClient:
    config = Config(
        model=_ModelSection(id="tiny-random"),
        engine=EngineSection(platform="cpu", compilation_cache=False),
        server=ServerSection(),
    )
    return ProcessClient(config, builder="fake_core:build")


async def answers(client: ProcessClient, *, kill: bool) -> list[str]:
    """What ten requests are answered; kill: the core dies in the middle."""
    requests = [
        make_request(f"r{i}", [i + 1, 2, 3], seed=i, max_tokens=40, grammar=CODE) for i in range(10)
    ]
    streams = [Outputs(client, request) for request in requests]
    everything = asyncio.gather(*map(collect, streams))
    if kill:
        while not any(stream.n_tokens > 5 for stream in streams):
            await asyncio.sleep(0.001)
        assert client._link is not None
        os.kill(client._link.process.pid, signal.SIGKILL)
    texts: list[str] = []
    for outputs in await everything:
        assert outputs[-1].finish == "stop", outputs[-1]
        texts.append(text_of([token for output in outputs for token in output.tokens]))
    return texts


def test_answers_go_on_in_the_next_core_where_they_were():
    async def go() -> None:
        async with asyncio.timeout(60):
            client = make_client()
            client.learn(tokenizer_json())  # before there is a core
            await client.start()
            try:
                await client.wait_ready()
                whole = await answers(client, kill=False)
                assert all(re.fullmatch(CODE.text, text) for text in whole)
                assert client.counters.engine_restarts == 0
                assert await answers(client, kill=True) == whole
                assert client.counters.engine_restarts == 1
                assert client.counters.masks > 10 * 33 and client.counters.grammars_compiled == 2
                assert client.counters.grammars_kept == 1
            finally:
                await client.close()

    asyncio.run(go())


def test_a_core_that_runs_can_be_told_the_tokenizer():
    async def go() -> None:
        async with asyncio.timeout(60):
            client = make_client()
            await client.start()
            try:
                await client.wait_ready()
                request = make_request("a", [1], grammar=Grammar("choice", '["bed"]'))
                [refused] = await collect(Outputs(client, request))
                assert refused.error is not None
                assert refused.error.code == "unsupported_parameter"
                client.learn(tokenizer_json())
                outputs = await collect(Outputs(client, request))
                assert text_of([token for output in outputs for token in output.tokens]) == "bed"
            finally:
                await client.close()

    asyncio.run(go())
