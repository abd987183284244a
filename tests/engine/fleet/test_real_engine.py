"""A fleet whose engines are real ones: a pipeline and an adapter, and one killed under load."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from adapter_files import write_adapter
from load_over_a_kill import SETTINGS, texts_over_a_kill
from server_settings import server_settings
from two_keys import Things, check_apart, thread_client

from jitney.engine.common.key_file import digest_key
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.fleet.build import open_fleet
from jitney.engine.fleet.config import FleetConfig
from jitney.engine.fleet.fleet import Fleet
from jitney.engine.fleet.ingress import create_ingress
from jitney.engine.fleet.launchers.local import LocalEngines
from jitney.engine.fleet.replicas import Replica

DOCUMENTS = ["cats sleep", "trams run all night", "the bread is baked at four"]
QUESTION = "when do trams run?"
FLEET = """
[models.m]
replicas = 1

[models.m.settings]
model = "tiny-random"
dtype = "float32"
max_seats = 4
token_budget = 64
seat_buckets = [4]
token_buckets = [64]
embedding_pooling = "mean"
adapters = ["fr={folder}"]

[models.p]
kind = "pipeline"

[[models.p.stages]]
kind = "embed"
name = "near"
model = "m"
query = "{{{{ question }}}}"
keep = 2

[[models.p.stages]]
kind = "rank"
name = "best"
model = "m"
candidates_of = "near"
prompt = "{{{{ candidate }}}} "
scored = "{{{{ question }}}}"
keep = 1

[[models.p.stages]]
kind = "generate"
name = "answer"
model = "m"
prompt = "{{{{ best.text }}}}: {{{{ question }}}}"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    adapter = write_adapter(tmp_path / "fr", ModelSource.resolve("tiny-random").config, 1)
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET.format(folder=adapter))
    return path


@asynccontextmanager
async def _running(
    file: Path, key: str = "", **settings: Any
) -> AsyncIterator[tuple[Fleet, LocalEngines, httpx.AsyncClient]]:
    """The fleet, its engines, which have started, and a client of its endpoint with this key.
    settings: of the endpoint.
    """
    config = FleetConfig.read(file)
    async with open_fleet(config) as (fleet, parts):
        engines = LocalEngines(config, parts, (), (key,) if key else ())
        ingress = create_ingress(fleet, server_settings(**settings))
        transport = httpx.ASGITransport(ingress)
        async with (
            ingress.router.lifespan_context(ingress),
            httpx.AsyncClient(
                transport=transport, base_url="http://localhost", headers=_bearing(key)
            ) as http,
        ):
            try:
                await engines.start()
                yield fleet, engines, http
            finally:
                await engines.close()


async def _told(
    http: httpx.AsyncClient, path: str, *, timeout: float = 60, **body: Any
) -> dict[str, Any]:
    answer = await http.post(path, json=body, timeout=timeout)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def _vectors(http: httpx.AsyncClient, texts: list[str]) -> np.ndarray:
    told = await _told(http, "/v1/embeddings", model="m", input=texts, encoding_format="float")
    return np.array([each["embedding"] for each in told["data"]])


async def _likelihood(http: httpx.AsyncClient, before: str) -> float:
    """Mean log-probability of the question's tokens behind a text."""
    text = before + QUESTION
    told = await _told(
        http, "/v1/completions", model="m", prompt=text, max_tokens=1, logprobs=0, echo=True
    )
    found = told["choices"][0]["logprobs"]
    own = [
        logprob
        for at, logprob in zip(found["text_offset"], found["token_logprobs"], strict=True)
        if len(before) <= at < len(text)
    ]
    return float(np.mean(own))


async def _complete(http: httpx.AsyncClient, model: str, prompt: str) -> str:
    told = await _told(
        http,
        "/v1/completions",
        model=model,
        prompt=prompt,
        max_tokens=12,
        temperature=0,
        ignore_eos=True,
    )
    assert told["usage"]["completion_tokens"] == 12
    return told["choices"][0]["text"]


@pytest.mark.usefixtures("hurried_processes")
def test_pipelines_adapters_batches_and_keys_on_an_engine(file: Path, tmp_path: Path):
    async def scene() -> None:
        users, admins = (digest_key("alpha"), digest_key("beta")), (digest_key("boss"),)
        keys = {"api_keys": users, "admin_keys": admins}
        async with _running(file, "boss", data_dir=tmp_path / "data", **keys) as (_, engines, http):
            [engine] = engines.processes("m")
            await _compare(http)
            await _run_batch(http, engine.replica)
            things = Things(thread_client(http, "alpha"))
            await asyncio.to_thread(things.make)
            assert await asyncio.to_thread(check_apart, things, thread_client(http, "beta")) > 40

    asyncio.run(asyncio.wait_for(scene(), 240))


async def _compare(http: httpx.AsyncClient) -> None:
    """A pipeline says what its stages say one by one; an adapter's name is answered by it."""
    documents = await _vectors(http, DOCUMENTS)
    [query] = await _vectors(http, [QUESTION])
    lengths = np.linalg.norm(documents, axis=1) * np.linalg.norm(query)
    near = np.argsort(-(documents @ query) / lengths)[:2]
    likely = {number: await _likelihood(http, DOCUMENTS[number] + " ") for number in near}
    best = DOCUMENTS[max(likely, key=lambda number: likely[number])]
    expected = await _complete(http, "m", f"{best}: {QUESTION}")
    told = await _told(
        http,
        "/v1/completions",
        model="p",
        documents=DOCUMENTS,
        prompt=QUESTION,
        max_tokens=12,
        temperature=0,
        ignore_eos=True,
    )
    assert told["choices"][0]["text"] == expected
    assert [stage["stage"] for stage in told["usage"]["stages"]][-1] == "answer"
    assert await _complete(http, "fr", QUESTION) != await _complete(http, "m", QUESTION)


_LINE = (
    '{{"custom_id": "{}", "method": "POST", "url": "/v1/completions", "body": {{"model": "m", '
    '"prompt": "a", "max_tokens": 200, "ignore_eos": true}}}}\n'
)
_NONE_OPEN = 'jitney_requests_open{lane="background"} 0.0'
_GENERATED, _WAITED = "jitney_generated_tokens_total", "jitney_ttft_seconds_count"


async def _run_batch(http: httpx.AsyncClient, engine: Replica) -> None:
    """Its seats say so, its metrics count them so, and nobody is said to have waited."""
    async with _asking(engine) as direct:
        before = (await direct.get("/metrics")).text
        id = await _begin_batch(http, "".join(_LINE.format(number) for number in range(12)))
        while not any(each["background"] for each in (await direct.get("/slots")).json()):
            await asyncio.sleep(0)
        assert _NONE_OPEN not in (await direct.get("/metrics")).text
        while (await http.get(f"/v1/batches/{id}")).json()["status"] != "completed":
            await asyncio.sleep(0.05)
        after = (await direct.get("/metrics")).text
    assert _NONE_OPEN in after
    assert _figure(after, _GENERATED) == _figure(before, _GENERATED) + 12 * 200
    assert _figure(after, _WAITED) == _figure(before, _WAITED)


def _figure(metrics: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", metrics, re.MULTILINE)
    assert found is not None, metrics
    return float(found[1])


async def _begin_batch(http: httpx.AsyncClient, lines: str) -> str:
    form = {"files": {"file": ("in.jsonl", lines)}, "data": {"purpose": "batch"}}
    file = (await http.post("/v1/files", **form)).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return (await http.post("/v1/batches", json=body)).json()["id"]


KILLED = f"""
[fleet]
poll_s = 0.1
drain_s = 1
[models.m]
replicas = 2
router = "round-robin"
[models.m.settings]
{SETTINGS.format(model="tiny-random", context=640)}
dtype = "float32"
"""


@pytest.mark.usefixtures("hurried_processes")
def test_an_engine_killed_under_load_changes_no_text(tmp_path: Path):
    """Requests are under way at both; every text is that of one engine which has all to itself."""
    file = tmp_path / "fleet.toml"
    file.write_text(KILLED)

    async def scene() -> None:
        async with _running(file) as (fleet, engines, http):
            first, second = engines.processes("m")
            assert first._process is not None
            pid = first._process.pid
            async with _asking(first.replica) as killed, _asking(second.replica) as left:
                expected, got = await texts_over_a_kill(
                    http, killed, left, lambda: os.kill(pid, signal.SIGKILL), tokens=400
                )
            assert got == expected
            assert first.replica.lost >= 2 and second.replica.lost == 0
            resumed = fleet.metrics.attempts.labels("m", second.replica.name, "resumed")
            assert resumed._value.get() >= 1

    asyncio.run(scene())


def _asking(replica: Replica) -> httpx.AsyncClient:
    headers = _bearing(replica.key)
    return httpx.AsyncClient(base_url=replica.url, trust_env=False, verify=False, headers=headers)


def _bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}
