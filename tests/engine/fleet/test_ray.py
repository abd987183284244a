"""A fleet on Ray Serve, with scripted engines: two actors of one model behind one ingress."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from fleet_engines import CHAT, said

from jitney.engine.api.settings import ServerSettings
from jitney.engine.errors import ConfigError
from jitney.engine.fleet.config import read_fleet
from jitney.engine.ports import free_port

pytestmark = pytest.mark.skipif(
    os.environ.get("JITNEY_TEST_RAY") != "1", reason="a cluster of its own: make test-ray"
)
SUPPORT = Path(__file__).parents[2] / "support"
ANSWER = "Hello, wörld! " * 4
_FLEET = """
[fleet]
poll_s = 0.1
drain_s = 1
[models.m]
replicas = 2
router = "round-robin"
ray = { cpus = 0.1, max_replicas = 3 }
"""


@pytest.fixture(autouse=True)
def ray() -> Any:
    """Imported where these tests run, and nowhere else: it takes a second."""
    return pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")


@pytest.fixture
def endpoint(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of the ingress; a cluster of this machine for as long."""
    from ray import serve

    from jitney.engine.fleet.ray_app import build_application

    paths = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", paths)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    file = tmp_path / "fleet.toml"
    file.write_text(_FLEET)
    application = build_application(
        read_fleet(file),
        ServerSettings(),
        admins=("boss",),
        module="fake_fleet_engine",
        host="127.0.0.1",
    )
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        namespace="jitney",
        log_to_driver=False,
        object_store_memory=100 << 20,
    )
    try:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application, name="jitney")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def _ready(http: httpx.Client, but: str = "") -> list[dict[str, str]]:
    """Both engines, as the ingress knows them. but: the name of one that is not meant."""
    until = time.monotonic() + 100
    while time.monotonic() < until:
        known = http.get("/fleet/replicas").json()["models"]["m"]
        ready = [each for each in known if each["state"] == "ready" and each["name"] != but]
        if len(ready) == 2:
            return ready
        time.sleep(0.2)
    raise AssertionError(f"two engines were never ready: {known}")


def _until_open(http: httpx.Client, name: str) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        known = http.get("/fleet/replicas").json()["models"]["m"]
        if any(each["name"] == name and each["open"] for each in known):
            return
    raise AssertionError(f"{name} was never asked")


def _text(answer: httpx.Response) -> str:
    if answer.headers["content-type"].startswith("text/event-stream"):
        return said(answer.text)
    return answer.json()["choices"][0]["message"]["content"]


def _kill(url: str) -> None:
    """The engine's process: a child of a child of Ray's."""
    port = urlsplit(url).port
    for process in psutil.Process().children(recursive=True):
        words = process.cmdline()
        if "fake_fleet_engine" in words and str(port) in words:
            os.kill(process.pid, signal.SIGKILL)
            return
    raise AssertionError(f"no engine listens to {port}")


@pytest.mark.timeout(280)
def test_an_engine_killed_under_load_loses_no_request_and_is_replaced(endpoint: str):
    """Plain answers and streams, half of them at the one that is killed."""
    key = {"authorization": "Bearer boss"}
    with httpx.Client(base_url=endpoint, timeout=60, trust_env=False, headers=key) as http:
        first, _ = _ready(http)
        assert urlsplit(first["url"]).hostname == "127.0.0.1"
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["m"]

        def ask(turn: int) -> httpx.Response:
            body = CHAT | {"max_tokens": 80, "stream": bool(turn % 2)}
            return http.post("/v1/chat/completions", json=body)

        with ThreadPoolExecutor(12) as clients:
            asked = [clients.submit(ask, turn) for turn in range(24)]
            _until_open(http, first["name"])
            _kill(first["url"])
            answers = [answer.result() for answer in asked]
        assert [answer.text for answer in answers if answer.status_code != 200] == []
        assert {_text(answer) for answer in answers} == {ANSWER}
        assert first["name"] not in {each["name"] for each in _ready(http, but=first["name"])}


def test_any_free_port_is_refused(tmp_path: Path):
    from jitney.engine.fleet.ray_app import build_application

    file = tmp_path / "fleet.toml"
    file.write_text(_FLEET.replace("[fleet]", "[fleet]\nport = 0"))
    with pytest.raises(ConfigError, match=r"\[fleet\] port: .* give a number"):
        build_application(read_fleet(file), ServerSettings())
