"""Engines that a fleet starts itself: processes that come, die under load, come back, and go."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fleet_engines import CHAT, said
from server_settings import server_settings
from two_keys import Things, check_apart, thread_client

from jitney.engine.common.errors import JitneyError
from jitney.engine.common.key_file import digest_key
from jitney.engine.fleet.build import open_fleet
from jitney.engine.fleet.config import FleetConfig
from jitney.engine.fleet.ingress import create_ingress
from jitney.engine.fleet.launchers import local
from jitney.engine.fleet.launchers.local import LocalEngines
from jitney.engine.fleet.sections import ReplicasSection
from jitney.engine.server.http.settings import ServerSettings

SUPPORT = Path(__file__).parents[2] / "support"
ANSWER = "Hello, wörld! " * 4


@pytest.fixture(autouse=True)
def _fake_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "ENGINE_MODULE", "fake_fleet_engine")
    paths = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", paths)


@asynccontextmanager
async def running(
    folder: Path,
    text: str,
    keys: tuple[str, ...] = (),
    settings: ServerSettings | None = None,
    start: bool = True,
) -> AsyncIterator[Any]:
    """(the engines, an HTTP client of the fleet's endpoint). settings: of the endpoint."""
    file = folder / "fleet.toml"
    file.write_text(f"[fleet]\npoll_s = 0.05\ndrain_s = 1\n{text}")
    config = FleetConfig.read(file)
    async with open_fleet(config) as (fleet, parts):
        engines = LocalEngines(config, parts, (), keys)
        ingress = create_ingress(fleet, settings or ServerSettings())
        transport = httpx.ASGITransport(ingress)
        try:
            key = {"authorization": f"Bearer {''.join(keys)}"}
            url = "http://localhost"
            async with (
                ingress.router.lifespan_context(ingress),
                httpx.AsyncClient(transport=transport, base_url=url, headers=key) as http,
            ):
                if start:
                    await engines.start()
                yield engines, http
        finally:
            await engines.close()


async def _until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_killed_engine_loses_no_request_and_is_started_again(tmp_path: Path):
    """Twelve streams and twelve plain answers; half of them were at the one that is killed."""

    text = '[models.m]\nreplicas = 2\nrouter = "round-robin"\n'
    async with running(tmp_path, text, ("boss",)) as (engines, http):
        watching = asyncio.create_task(engines.watch())
        first, second = engines.processes("m")
        bodies = [CHAT | {"max_tokens": 80, "stream": bool(turn % 2)} for turn in range(24)]
        asked = [
            asyncio.create_task(http.post("/v1/chat/completions", json=body, timeout=60))
            for body in bodies
        ]
        await _until(lambda: first.replica.open >= 8)
        await asyncio.sleep(0.1)  # some tokens into the streams
        process = first._process
        os.kill(process.pid, signal.SIGKILL)
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [200] * 24
        for body, answer in zip(bodies, answers, strict=True):
            whole = said(answer.text) if body["stream"] else answer.text
            assert ANSWER in whole
        assert first.replica.lost > 0 and second.replica.lost == 0
        await _until(lambda: first._process is not process and first.replica.state == "ready")
        watching.cancel()


async def test_one_that_cannot_start_says_so(tmp_path: Path):
    async with running(tmp_path, "[models.broken]\nreplicas = 1\n", start=False) as (engines, _):
        with pytest.raises(JitneyError, match="broken-0 ended with status 3 before it was"):
            await engines.start()


async def test_engines_tell_keys_apart_and_accept_those_that_the_fleet_has_now(tmp_path: Path):
    """They are asked with the fleet's key; those of its administrators open them too, and those of
    clients do not. An engine that is started later accepts the same.
    """
    users, admins = (digest_key("alpha"), digest_key("beta")), (digest_key("boss"),)
    keys = server_settings(api_keys=users, admin_keys=admins, data_dir=tmp_path / "data")

    text = "[models.m]\nreplicas = 1\n"
    async with running(tmp_path, text, ("boss",), keys) as (engines, http):
        things = Things(thread_client(http, "alpha"))
        await asyncio.to_thread(things.make)
        assert await asyncio.to_thread(check_apart, things, thread_client(http, "beta")) > 40
        [process] = engines.processes("m")
        async with httpx.AsyncClient(trust_env=False, verify=False) as direct:

            async def status(key: str) -> int:
                url = process.replica.url + "/metrics"
                answer = await direct.get(url, headers={"authorization": f"Bearer {key}"})
                return answer.status_code

            statuses = [await status(key) for key in ("alpha", "beta", "boss", "root")]
            assert statuses == [401, 401, 200, 401]
            engines.accept(("root",))
            async with asyncio.timeout(120):
                while await status("root") != 200:
                    await asyncio.sleep(0.01)
            assert (await status("boss"), await status(process.replica.key)) == (401, 200)
            watching = asyncio.create_task(engines.watch())
            before = process._process
            os.kill(before.pid, signal.SIGKILL)
            await _until(
                lambda: process._process is not before and process.replica.state == "ready"
            )
            assert (await status("boss"), await status("root")) == (401, 200)
            watching.cancel()


def _flags(process: Any) -> dict[str, str]:
    """What its process was told of hosts."""
    words = psutil.Process(process._process.pid).cmdline()
    names = ("--coordinator", "--n-hosts", "--host-id", "--device")
    return {name: words[words.index(name) + 1] for name in names if name in words}


async def test_a_replica_over_hosts_is_served_by_its_first(tmp_path: Path):
    """Each host is a process of its own, and is started again by itself."""

    text = (
        '[models.m]\nreplicas = 2\ndevices = ["0", "1", "2", "3"]\n'
        "settings = { n_hosts = 2, tensor_parallel = 2 }\n"
    )
    async with running(tmp_path, text, ("boss",)) as (engines, http):
        watching = asyncio.create_task(engines.watch())
        told = (await http.get("/fleet/replicas")).json()["models"]["m"]
        assert [replica["name"] for replica in told] == ["m-0", "m-1"]
        flags = [_flags(process) for process in engines.processes("m")]
        assert [each["--host-id"] for each in flags] == ["0", "1", "0", "1"]
        assert [each["--device"] for each in flags] == ["0", "1", "2", "3"]
        coordinators = [each["--coordinator"] for each in flags]
        assert coordinators[0] == coordinators[1] != coordinators[2] == coordinators[3]
        host = engines.processes("m")[1]
        before = host._process
        os.kill(before.pid, signal.SIGKILL)
        await _until(lambda: host._process is not before)
        assert _flags(host) == flags[1]
        watching.cancel()


async def test_engines_that_share_experts_serve_each(tmp_path: Path):
    text = "[models.m]\nreplicas = 1\nsettings = { n_hosts = 2, data_parallel = 2 }\n"
    async with running(tmp_path, text, ("boss",)) as (_, http):
        told = (await http.get("/fleet/replicas")).json()["models"]["m"]
        states = {replica["name"]: replica["state"] for replica in told}
        assert states == {"m-0": "ready", "m-0.1": "ready"}


async def test_a_host_that_cannot_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Though the first one waits for it."""
    given = FleetConfig.engine_arguments

    def breaking(*args: Any, place: Any = None, **rest: Any) -> list[str]:
        words = given(*args, place=place, **rest)
        return [*words, "broken"] if place.host_id else words

    monkeypatch.setattr(FleetConfig, "engine_arguments", breaking)
    monkeypatch.setattr(local.Watch, "begin", lambda watch, replicas: None)  # it is never ready

    text = "[models.m]\nreplicas = 1\nsettings = { n_hosts = 2, tensor_parallel = 2 }\n"
    async with running(tmp_path, text, start=False) as (engines, _):
        with pytest.raises(JitneyError, match=r"m-0\.1 ended with status 3 before it was ready"):
            await engines.start()


CANDIDATE = "[models.m]\nreplicas = 1\n[models.m.candidate]\nreplicas = 1\nshare = 0.5\n"


async def test_a_candidates_engines_are_started_beside_the_models(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "jitney.fleet")

    async with running(tmp_path, CANDIDATE, ("boss",)) as (_, http):
        assert "replica m-0 is starting" in caplog.text and "is gone" not in caplog.text
        names = set()
        for number in range(16):
            body = CHAT | {"max_tokens": 4, "user": f"user-{number}"}
            answer = await http.post("/v1/chat/completions", json=body, timeout=60)
            names.add(answer.headers["x-jitney-replica"])
        assert names == {"m-0", "m.candidate-0"}
        arms = (await http.get("/fleet/rollouts/m")).json()["arms"]
        assert arms["candidate"]["replicas"] == ["m.candidate-0"]
        assert sum(arm["requests"] for arm in arms.values()) == 16


async def test_a_candidate_that_cannot_start_keeps_nothing_from_being_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    text = CANDIDATE + 'settings = { revision = "broken" }\n'
    async with running(tmp_path, text, ("boss",)) as (_, http):
        body = CHAT | {"max_tokens": 4}
        for number in range(8):
            asked = body | {"user": f"user-{number}"}
            answer = await http.post("/v1/chat/completions", json=asked, timeout=60)
            assert answer.headers["x-jitney-replica"] == "m-0"
        report = (await http.get("/fleet/rollouts/m")).json()
        assert report["arms"]["candidate"]["requests"] == 0  # it never began
    assert "candidate: m.candidate-0 ended with status 3 before it was ready" in caplog.text
    assert "replica m.candidate-0 is gone: it ended with status 3" in caplog.text


def test_engines_get_their_settings_devices_and_ports(tmp_path: Path):
    text = (
        '[models.m]\nreplicas = 2\ndevices = ["0", "1"]\nconfig = "engine.toml"\n'
        "settings = { max_seats = 4, prefix_cache = false, token_buckets = [8, 16] }\n"
    )
    (tmp_path / "engine.toml").write_text("[engine]\ntoken_budget = 16\n")
    (tmp_path / "fleet.toml").write_text(text)
    config = FleetConfig.read(tmp_path / "fleet.toml")
    section = config.models["m"]
    assert isinstance(section, ReplicasSection)
    words = " ".join(config.engine_arguments("m", section, "m-1", 1, 9123))
    assert f"serve --config {tmp_path}/engine.toml --max-seats 4 --no-prefix-cache" in words
    assert "--token-buckets 8,16" in words and "--device 1" in words and "--port 9123" in words
    assert "/fleet/m-1 --host" in words  # the engine's own folder


@pytest.mark.parametrize(
    ("settings", "file", "environ", "wanted"),
    [
        ("measured_sizes = true", "", {}, True),
        ("measured_sizes = false", "", {}, False),
        ("", "measured_sizes = true", {}, None),
        ("", "", {"JITNEY_MEASURED_SIZES": "true"}, None),
        ("", "", {}, False),
    ],
)
def test_engines_of_a_fleet_measure_only_if_that_is_asked_for(
    settings: str,
    file: str,
    environ: dict[str, str],
    wanted: bool | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """None: the file or the environment says it, no flag does."""
    monkeypatch.delenv("JITNEY_MEASURED_SIZES", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "engine.toml").write_text(f"[engine]\n{file}\n")
    text = f'[models.m]\nreplicas = 1\nconfig = "engine.toml"\nsettings = {{ {settings} }}\n'
    (tmp_path / "fleet.toml").write_text(text)
    config = FleetConfig.read(tmp_path / "fleet.toml")
    section = config.models["m"]
    assert isinstance(section, ReplicasSection)
    words = config.engine_arguments("m", section, "m-1", 0, 9123)
    flags = [word for word in words if word.endswith("measured-sizes")]
    said = {None: [], True: ["--measured-sizes"], False: ["--no-measured-sizes"]}
    assert flags == said[wanted]
