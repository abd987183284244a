"""A fleet whose engines are real ones: a pipeline and an adapter, and one killed under load."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from adapter_files import write_adapter
from api_fakes import FakeClient, Script
from default_model_load import SETTINGS, texts_over_a_kill
from fleet_engines import FakeEngine, engines
from joint_processes import alone_in_a_hurry
from server_settings import server_settings

from jitney.engine.common.requests import SamplingParams
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
    file: Path, **settings: Any
) -> AsyncIterator[tuple[Fleet, LocalEngines, httpx.AsyncClient]]:
    """The fleet, its engines, which have started, and a client of its endpoint. settings: of
    that.
    """
    config = FleetConfig.read(file)
    async with open_fleet(config) as (fleet, parts):
        engines = LocalEngines(config, parts, (), ())
        ingress = create_ingress(fleet, server_settings(**settings))
        transport = httpx.ASGITransport(ingress)
        async with (
            ingress.router.lifespan_context(ingress),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
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
def test_a_pipeline_says_what_its_stages_say_one_by_one(file: Path):
    """And the adapter's name is answered by the adapter."""

    async def scene() -> None:
        async with _running(file) as (_, _, http):
            await _compare(http)

    asyncio.run(scene())


async def _compare(http: httpx.AsyncClient) -> None:
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


ENCODERS = """
[models.finder]
replicas = 1
settings = {{ model = "tiny-random:bert", {sizes} }}

[models.judge]
replicas = 1
settings = {{ model = "tiny-random:bert_reranker", {sizes} }}

[models.writer]
urls = ["{writer}"]

[models.p]
kind = "pipeline"

[[models.p.stages]]
kind = "embed"
name = "near"
model = "finder"
keep = 3
fields = {{ truncate_prompt_tokens = 32 }}

[[models.p.stages]]
kind = "rerank"
name = "best"
model = "judge"
documents_of = "near"
keep = 2

[[models.p.stages]]
kind = "generate"
name = "answer"
model = "writer"
prompt = "{{{{ best.texts | join(' ') }}}}: {{{{ question }}}}"
"""
_SIZES = 'dtype = "float32", max_seats = 4, token_budget = 64, token_buckets = [64]'


@pytest.mark.usefixtures("hurried_processes")
def test_encoders_find_and_rank_the_documents_of_a_pipeline(tmp_path: Path):
    """A document that is longer than the encoder's context stands among them."""
    documents = [*DOCUMENTS, "a tram is late " * 20]
    file = tmp_path / "fleet.toml"
    writer = FakeEngine(FakeClient(Script("so"), context_length=1024), {"model": "writer"})

    async def scene() -> None:
        async with _running(file) as (fleet, _, http):
            while not fleet.models["writer"].ready:
                await asyncio.sleep(0.01)
            texts = [QUESTION, *documents]
            cut: dict[str, Any] = {"truncate_prompt_tokens": 32, "encoding_format": "float"}
            told = await _told(http, "/v1/embeddings", model="finder", input=texts, **cut)
            vectors = np.array([each["embedding"] for each in told["data"]])
            near = [documents[at] for at in np.argsort(-(vectors[1:] @ vectors[0]))[:3]]
            pair: dict[str, Any] = {"model": "judge", "query": QUESTION}
            scores = [
                (await _told(http, "/v1/rerank", documents=[text], **pair))["results"][0]
                for text in near
            ]
            order = np.argsort([-each["relevance_score"] for each in scores])[:2]
            best = " ".join(near[at] for at in order)
            found = await _told(
                http, "/v1/completions", model="p", prompt=QUESTION, documents=documents
            )
            assert bytes(writer.client.requests[-1].prompt).decode() == f"{best}: {QUESTION}"
            stages = [each["stage"] for each in found["usage"]["stages"]]
            assert stages == ["near", "best", "answer"]

    with engines(writer):
        file.write_text(ENCODERS.format(sizes=_SIZES, writer=writer.url))
        asyncio.run(scene())


PLAIN = """
[models.m]
replicas = 1
[models.m.settings]
model = "tiny-random"
max_seats = 4
token_budget = 64
seat_buckets = [4]
token_buckets = [64]
"""
_LINE = (
    '{{"custom_id": "{}", "method": "POST", "url": "/v1/completions", "body": {{"model": "m", '
    '"prompt": "a", "max_tokens": 200, "ignore_eos": true}}}}\n'
)
_NONE_OPEN = 'jitney_requests_open{lane="background"} 0.0'


@pytest.mark.usefixtures("hurried_processes")
def test_lines_of_batches_are_in_the_background_of_the_engine(tmp_path: Path):
    """Its seats say so, its metrics count them so, and nobody is said to have waited."""
    file = tmp_path / "fleet.toml"
    file.write_text(PLAIN)

    async def scene() -> None:
        async with _running(file, data_dir=tmp_path / "data") as (_, engines, http):
            [engine] = engines.processes("m")
            id = await _begin_batch(http, "".join(_LINE.format(number) for number in range(40)))
            async with _asking(engine.replica) as direct:
                while not any(each["background"] for each in (await direct.get("/slots")).json()):
                    await asyncio.sleep(0)
                assert _NONE_OPEN not in (await direct.get("/metrics")).text
                while (await http.get(f"/v1/batches/{id}")).json()["status"] != "completed":
                    await asyncio.sleep(0.05)
                figures = (await direct.get("/metrics")).text
            assert _NONE_OPEN in figures
            assert "jitney_generated_tokens_total 8000.0" in figures
            assert "jitney_ttft_seconds_count 0.0" in figures

    asyncio.run(asyncio.wait_for(scene(), 120))


async def _begin_batch(http: httpx.AsyncClient, lines: str) -> str:
    form = {"files": {"file": ("in.jsonl", lines)}, "data": {"purpose": "batch"}}
    file = (await http.post("/v1/files", **form)).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return (await http.post("/v1/batches", json=body)).json()["id"]


DEFAULT_MODEL = f"""
[fleet]
poll_s = 0.1
drain_s = 1
[models.m]
replicas = 2
router = "round-robin"
[models.m.settings]
{SETTINGS}
"""


@pytest.mark.usefixtures("hurried_processes", "smollm2")
def test_an_engine_of_the_default_model_killed_under_load_changes_no_text(tmp_path: Path):
    """Requests are under way at both; every text is that of one engine which has all to itself."""
    file = tmp_path / "fleet.toml"
    file.write_text(DEFAULT_MODEL)

    async def scene() -> None:
        async with _running(file) as (fleet, engines, http):
            first, second = engines.processes("m")
            assert first._process is not None
            pid = first._process.pid
            async with _asking(first.replica) as killed, _asking(second.replica) as left:
                expected, got = await texts_over_a_kill(
                    http, killed, left, lambda: os.kill(pid, signal.SIGKILL)
                )
            assert got == expected
            assert first.replica.lost >= 2 and second.replica.lost == 0
            resumed = fleet.metrics.attempts.labels("m", second.replica.name, "resumed")
            assert resumed._value.get() >= 1

    asyncio.run(scene())


TWO_HOSTS: dict[str, Any] = {
    "model": "tiny-random:qwen3",
    "platform": "cpu",
    "dtype": "float32",
    "max_seats": 4,
    "token_budget": 64,
    "context": 256,
    "pages": 32,
    "seat_buckets": [4],
    "token_buckets": [64],
}
PROMPT = np.random.default_rng(2).integers(0, 256, 27).tolist()
TOKENS = 220


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("hurried_processes")
def test_a_replica_over_two_hosts_goes_on_after_one_is_lost(tmp_path: Path):
    """Two processes of a device each; the text is that of one process."""
    text = TWO_HOSTS | {"tensor_parallel": 2, "n_hosts": 2}
    fields = "\n".join(f"{name} = {json.dumps(value)}" for name, value in text.items())
    file = tmp_path / "fleet.toml"
    file.write_text(f"[models.m]\nreplicas = 1\n[models.m.settings]\n{fields}\n")
    body = {"model": "m", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}

    async def scene() -> str:
        async with _running(file) as (_, engines, http):
            watching = asyncio.create_task(engines.watch())
            first, other = engines.processes("m")
            before = other._process
            assert first._process is not None and before is not None
            asked = asyncio.create_task(
                _told(http, "/v1/completions", **body, ignore_eos=True, timeout=500)
            )
            async with _asking(first.replica) as direct:
                while "jitney_requests_running 1.0" not in (await direct.get("/metrics")).text:
                    await asyncio.sleep(0.01)
                _kill_with_children(before.pid)
                told = await asked
                figures = (await direct.get("/metrics")).text
                assert re.search(r'jitney_engine_restarts_total\{.*"failed".*\} 1\.0', figures)
            assert other._process is not before
            watching.cancel()
            return told["choices"][0]["text"]

    found = asyncio.run(asyncio.wait_for(scene(), 540))
    alone = alone_in_a_hurry(TWO_HOSTS)
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    [expected] = alone.generate([PROMPT], sampling)
    assert found == expected.outputs[0].text


def _kill_with_children(pid: int) -> None:
    """A host's process and that of its devices, as when a machine is lost."""
    process = psutil.Process(pid)
    for each in [process, *process.children(recursive=True)]:
        each.kill()


def _asking(replica: Replica) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=replica.url, trust_env=False)
