"""A fleet on Ray Serve: actors of one model behind one ingress, with scripted engines and with real
ones.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from api_fakes import until
from fleet_engines import CHAT, said
from load_over_a_kill import SETTINGS, texts_over_a_kill
from two_keys import Things, check_apart

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.key_file import digest_key
from jitney.engine.common.ports import free_port
from jitney.engine.fleet.config import FleetConfig
from jitney.engine.fleet.launchers.engine_process import ENGINE_MODULE
from jitney.engine.server.http.settings import ServerSettings

pytestmark = pytest.mark.skipif(
    os.environ.get("JITNEY_TEST_RAY") != "1", reason="a cluster of its own: make test-ray"
)
SUPPORT = Path(__file__).parents[2] / "support"
ANSWER = "Hello, wörld! " * 4
KEY = {"authorization": "Bearer boss"}
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


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Of this machine, for all tests of this file; it is told of chips that are not there."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        paths = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
        patch.setenv("PYTHONPATH", paths)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "0.5")
        patch.delenv("JITNEY_TEST_RAY")  # real engines would not know it
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")  # real engines start sooner
        ray.init(
            num_cpus=4,
            num_gpus=2,
            resources={"TPU": 2},
            include_dashboard=False,
            namespace="jitney",
            log_to_driver=False,
            object_store_memory=100 << 20,
        )
        yield
        ray.shutdown()


@contextmanager
def _served(
    folder: Path,
    text: str,
    module: str = "fake_fleet_engine",
    settings: ServerSettings | None = None,
    *,
    reloads: bool = False,
) -> Iterator[httpx.Client]:
    """A client of the ingress, for as long as the application is there. module: runs an engine.
    settings: of the ingress. reloads: it can read the fleet's file again.
    """
    from ray import serve

    from jitney.engine.fleet.launchers.ray_app import build_application

    file = folder / "fleet.toml"
    file.write_text(text)
    application = build_application(
        FleetConfig.read(file),
        settings or ServerSettings(),
        admins=("boss",),
        module=module,
        host="127.0.0.1",
        read=partial(FleetConfig.read, file) if reloads else None,
    )
    try:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application, name="jitney")
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False, headers=KEY
        ) as http:
            yield http
    finally:
        serve.shutdown()


def _ready(
    http: httpx.Client, model: str = "m", but: str = "", count: int = 2
) -> list[dict[str, str]]:
    """So many engines of a model, as the ingress knows them, once they are ready. but: the name of
    one that is not meant.
    """
    until = time.monotonic() + 100
    while time.monotonic() < until:
        known = http.get("/fleet/replicas").json()["models"][model]
        ready = [each for each in known if each["state"] == "ready" and each["name"] != but]
        if len(ready) == count:
            return ready
        time.sleep(0.2)
    raise AssertionError(f"{count} engines were never ready: {known}")


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


def _process(url: str) -> psutil.Process:
    """The engine's: a child of a child of Ray's."""
    port = str(urlsplit(url).port)
    for process in psutil.Process().children(recursive=True):
        words = process.cmdline()
        if "--port" in words and words[words.index("--port") + 1] == port:
            return process
    raise AssertionError(f"no engine listens to {port}")


def _kill(url: str) -> None:
    os.kill(_process(url).pid, signal.SIGKILL)


@pytest.mark.timeout(280)
@pytest.mark.usefixtures("cluster")
def test_an_engine_killed_under_load_loses_no_request_and_is_replaced(tmp_path: Path):
    """Plain answers and streams, half of them at the one that is killed."""
    with _served(tmp_path, _FLEET) as http:
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


@pytest.mark.timeout(280)
@pytest.mark.usefixtures("cluster", "smollm2")
def test_an_engine_of_the_default_model_killed_under_load_changes_no_text(tmp_path: Path):
    """Every text is that of one engine which has all requests to itself."""

    async def scene(fleet_url: str, first: str, second: str) -> None:
        async with _asking(fleet_url) as fleet, _asking(first) as killed, _asking(second) as left:
            expected, got = await texts_over_a_kill(
                fleet, killed, left, lambda: _kill(first), tokens=96
            )
        assert got == expected

    settings = SETTINGS.format(model="smollm2-135m", context=256)
    text = f"{_FLEET}[models.m.settings]\n{settings}".replace(", max_replicas = 3", "")
    with _served(tmp_path, text, ENGINE_MODULE) as http:
        first, second = _ready(http)
        asyncio.run(scene(str(http.base_url), first["url"], second["url"]))
        assert 'outcome="resumed"' in http.get("/metrics").text


def _asking(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, headers=KEY)


def _asking_as(key: str, http: httpx.Client) -> httpx.Client:
    """A client of the same endpoint with another key."""
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=http.base_url, timeout=60, trust_env=False, headers=headers)


@pytest.mark.timeout(280)
@pytest.mark.usefixtures("cluster")
def test_no_route_gives_one_key_what_belongs_to_another(tmp_path: Path):
    keys = ServerSettings(
        api_keys=(digest_key("alpha"), digest_key("beta")), admin_keys=(digest_key("boss"),)
    )
    with _served(tmp_path, _FLEET, settings=keys) as http:
        _ready(http)
        alpha, beta = (_asking_as(key, http) for key in ("alpha", "beta"))
        with alpha, beta:
            things = Things(alpha, has_store=False)
            things.make()
            assert check_apart(things, beta) > 40
            on = {"model": "m", "input": "x", "previous_response_id": things.ids["response_id"]}
            assert alpha.post("/v1/responses", json=on).status_code == 200


@pytest.mark.timeout(280)
@pytest.mark.usefixtures("cluster")
def test_keys_that_are_read_again_count_at_the_ingress_and_engines(ray: Any, tmp_path: Path):
    """By a request, and as SIGHUP has it; an engine that starts later has them, too."""
    from jitney.engine.fleet.launchers.ray_engines import Directory

    def write(name: str, *keys: str) -> None:
        (tmp_path / name).write_text("\n".join(keys))
        (tmp_path / name).chmod(0o600)

    def status(key: str, url: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).status_code

    def becomes(expected: int, *urls: str) -> None:
        """What "chief" is told: asked seldom, since wrong keys are soon refused unread."""
        limit = time.monotonic() + 30
        while {status("chief", url) for url in urls} != {expected}:
            assert time.monotonic() < limit
            time.sleep(1)

    write("users", "ann")
    write("admins", "boss")
    files = f'api_key_file = "{tmp_path}/users"\nadmin_key_file = "{tmp_path}/admins"\n'
    keys = ServerSettings(api_keys=(digest_key("ann"),), admin_keys=(digest_key("boss"),))
    text = _FLEET.replace("poll_s", files + "poll_s").replace(", max_replicas = 3", "")
    with _served(tmp_path, text, settings=keys, reloads=True) as http:
        ingress, (killed, left) = str(http.base_url), _ready(http)
        engine, other = killed["url"], left["url"]
        assert [status(key, ingress) for key in ("ann", "sue", "chief")] == [200, 401, 401]
        assert [status(key, engine) for key in ("boss", "ann", "chief")] == [200, 401, 401]

        write("users", "sue")
        write("admins", "boss", "chief")
        told = http.post("/admin/reload").json()
        assert (told["keys"]["added"], told["keys"]["removed"]) == (2, 1)
        assert told["needs_restart"] == []
        assert [status(key, ingress) for key in ("ann", "sue", "chief")] == [401, 200, 200]
        becomes(200, engine, other)

        _kill(engine)
        both = [each["url"] for each in _ready(http, but=killed["name"])]
        [new] = [url for url in both if url != other]
        assert status("chief", new) == 200

        write("admins", "boss")
        ray.get(Directory.of_cluster().ask_for_reload.remote())
        becomes(401, ingress, new, other)
        assert [status(key, url) for key, url in (("boss", new), ("sue", ingress))] == [200, 200]
        answer = http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 4})
        assert answer.status_code == 200


_CHIPS = """
[models.gpu]
replicas = 2
ray = { cpus = 0.1, gpus = 1 }
[models.tpu]
replicas = 2
ray = { cpus = 0.1, resources = { TPU = 1 } }
"""


@pytest.mark.timeout(280)
@pytest.mark.usefixtures("cluster")
def test_each_engine_sees_a_chip_of_its_own(ray: Any, tmp_path: Path):
    """Two engines on GPUs and two on TPU chips, of a node that has two of each."""
    variables = {"gpu": "CUDA_VISIBLE_DEVICES", "tpu": "TPU_VISIBLE_CHIPS"}
    with _served(tmp_path, _CHIPS) as http:
        for model, variable in variables.items():
            engines = _ready(http, model)
            seen = [_process(engine["url"]).environ().get(variable) for engine in engines]
            assert sorted(map(str, seen)) == ["0", "1"]
            assert not ray.available_resources().get(model.upper()), "all are given away"


_GROWING = """
[fleet]
poll_s = 0.1
drain_s = 60
[models.m]
replicas = 1
router = "round-robin"
ray = { cpus = 0.1, max_replicas = 2, target_wait_s = 0.5 }
"""
#: Serve would take half a minute to see a load, and ten minutes to believe that it is over.
_QUICKLY = {"look_back_period_s": 2, "upscale_delay_s": 1, "downscale_delay_s": 2}


@pytest.mark.timeout(280)
@pytest.mark.usefixtures("cluster")
def test_a_load_makes_an_engine_and_one_that_is_let_go_ends_its_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from jitney.engine.fleet.launchers import ray_app

    scaling = ray_app._scaling
    monkeypatch.setattr(ray_app, "_scaling", lambda section: scaling(section) | _QUICKLY)
    with _served(tmp_path, _GROWING) as http, ThreadPoolExecutor(24) as clients:
        _ready(http, count=1)
        grown = Event()

        def ask_again_and_again() -> None:
            while not grown.is_set():
                http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 80})

        asking = [clients.submit(ask_again_and_again) for _ in range(24)]
        try:
            both = _ready(http, count=2)
        finally:
            grown.set()
        for each in asking:
            each.result()
        processes = {engine["name"]: _process(engine["url"]) for engine in both}
        slowly = {"messages": [{"role": "user", "content": "slowly"}], "stream": True}
        body = CHAT | slowly | {"max_tokens": 80}
        streams = [clients.submit(http.post, "/v1/chat/completions", json=body) for _ in range(4)]
        [kept] = _ready(http, count=1)
        [gone] = processes.keys() - {kept["name"]}
        assert not any(stream.done() for stream in streams)
        assert processes[gone].is_running()
        answers = [stream.result() for stream in streams]
        assert {_text(answer) for answer in answers} == {ANSWER}
        by_whom = Counter(answer.headers["x-jitney-replica"] for answer in answers)
        assert by_whom == {gone: 2, kept["name"]: 2}
        assert 'outcome="resumed"' not in http.get("/metrics").text
        processes[gone].wait(60)
        assert processes[kept["name"]].is_running()


_CANDIDATE = """
[fleet]
poll_s = 0.1
drain_s = 60
[models.m]
replicas = 1
ray = { cpus = 0.1 }
[models.m.candidate]
replicas = 1
share = 0.5
ray = { cpus = 0.1 }
"""


class _Rollout:
    """A model's candidate behind an ingress, which an administrator decides about."""

    def __init__(self, http: httpx.Client):
        self._http = http

    def report(self) -> dict[str, Any]:
        return self._http.get("/fleet/rollouts/m").json()

    def engines(self, arm: str) -> list[str]:
        return self.report()["arms"][arm]["replicas"]

    def requests(self) -> dict[str, int]:
        """That are compared, by arm."""
        return {name: arm["requests"] for name, arm in self.report()["arms"].items()}

    def decide(self, action: str) -> None:
        answer = self._http.post("/fleet/rollouts/m", json={"action": action})
        answer.raise_for_status()

    def who_answers(self, user: str, **fields: Any) -> str:
        """The arm whose engine does."""
        body = CHAT | {"max_tokens": 4, "user": user} | fields
        answer = self._http.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        return _arm_of(answer)


def _arm_of(answer: httpx.Response) -> str:
    """Of the engine that answered."""
    is_candidate = answer.headers["x-jitney-replica"].startswith("m.candidate-")
    return "candidate" if is_candidate else "stable"


@pytest.mark.timeout(280)
@pytest.mark.usefixtures("cluster")
def test_a_candidate_gets_its_keys_and_what_is_decided_by_hand(tmp_path: Path):
    """Rolled back, its engine ends the stream that it has, and then itself; begun anew, it starts
    again.
    """
    with _served(tmp_path, _CANDIDATE) as http, ThreadPoolExecutor(1) as clients:
        rollout = _Rollout(http)
        first = {engine["name"]: engine for engine in _ready(http)}
        [name] = rollout.engines("candidate")
        users = [f"user-{number}" for number in range(16)]
        arms = {user: rollout.who_answers(user) for user in users}
        assert set(arms.values()) == {"stable", "candidate"}
        assert {user: rollout.who_answers(user) for user in users} == arms
        twice = {arm: 2 * count for arm, count in Counter(arms.values()).items()}
        until(lambda: rollout.requests() == twice, 30)  # the last is counted a moment later

        rollout.decide("promote")
        assert {rollout.who_answers(user) for user in users} == {"candidate"}

        process = _process(first[name]["url"])
        slowly = {"messages": [{"role": "user", "content": "slowly"}], "stream": True}
        body = CHAT | slowly | {"max_tokens": 80}
        stream = clients.submit(http.post, "/v1/chat/completions", json=body)
        _until_open(http, name)
        rollout.decide("roll_back")
        assert {rollout.who_answers(user) for user in users} == {"stable"}
        answer = stream.result()
        assert (_arm_of(answer), _text(answer)) == ("candidate", ANSWER)
        process.wait(60)
        assert rollout.engines("candidate") == []

        rollout.decide("restart")
        [its_user, *_] = [user for user in users if arms[user] == "candidate"]
        assert rollout.who_answers(its_user) == "stable", "the engine starts"
        assert rollout.requests()["candidate"] == 0
        _ready(http)
        assert {user: rollout.who_answers(user) for user in users} == arms
        assert rollout.engines("candidate") == [name], "the actor is the same"


@pytest.mark.timeout(280)
@pytest.mark.usefixtures("cluster")
def test_a_candidate_that_cannot_start_keeps_nothing_from_being_served(tmp_path: Path):
    with _served(tmp_path, _CANDIDATE + 'settings = { revision = "broken" }\n') as http:
        _ready(http, count=1)
        rollout = _Rollout(http)
        assert {rollout.who_answers(f"user-{number}") for number in range(8)} == {"stable"}
        assert rollout.requests()["candidate"] == 0  # it never began


_HOSTS = """
[fleet]
poll_s = 0.1
drain_s = 1
[models.m]
replicas = 1
settings = { n_hosts = 2, tensor_parallel = 2 }
ray = { cpus = 0.1 }
[models.shared]
replicas = 1
settings = { n_hosts = 2, data_parallel = 2 }
ray = { cpus = 0.1 }
"""


def _host_process(coordinator: str, host_id: int) -> psutil.Process:
    """A host of the replica whose first one is found there."""
    for process in psutil.Process().children(recursive=True):
        words = process.cmdline()
        wanted = ["--coordinator", coordinator, "--host-id", str(host_id)]
        if "--coordinator" in words and words[words.index("--coordinator") :][:4] == wanted:
            return process
    raise AssertionError(f"no host {host_id} at {coordinator}")


@pytest.mark.timeout(280)
@pytest.mark.usefixtures("cluster")
def test_a_replica_over_hosts_has_a_bundle_for_each_and_ends_with_one(ray: Any, tmp_path: Path):
    """Host 1 serves nothing but with engines that share experts; its loss ends host 0."""
    with _served(tmp_path, _HOSTS) as http:
        [first] = _ready(http, count=1)
        both = [engine["name"] for engine in _ready(http, "shared")]
        assert sorted(both) == sorted({min(both), f"{min(both)}.1"})
        groups = [
            each for each in ray.util.placement_group_table().values() if each["state"] == "CREATED"
        ]
        assert [len(each["bundles"]) for each in groups] == [2, 2]
        process = _process(first["url"])
        words = process.cmdline()
        coordinator = words[words.index("--coordinator") + 1]
        assert words[words.index("--host-id") + 1] == "0"
        _host_process(coordinator, 1).kill()
        [second] = _ready(http, count=1, but=first["name"])
        process.wait(60)
        answer = http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 4})
        assert answer.headers["x-jitney-replica"] == second["name"]


_SAME_MODEL = """
[models.{name}]
replicas = 1
ray = {{ cpus = 0.1 }}
[models.{name}.settings]
model = "tiny-random:qwen3"
platform = "cpu"
dtype = "float32"
max_seats = 4
token_budget = 64
context = 256
pages = 32
seat_buckets = [4]
token_buckets = [64]
{hosts}
"""


@pytest.mark.timeout(280)
@pytest.mark.usefixtures("cluster")
def test_an_engine_over_two_hosts_says_what_one_alone_does(tmp_path: Path):
    text = _SAME_MODEL.format(name="alone", hosts="")
    text += _SAME_MODEL.format(name="two", hosts="n_hosts = 2\ntensor_parallel = 2")
    with _served(tmp_path, text, ENGINE_MODULE) as http:
        texts = []
        for name in ("alone", "two"):
            _ready(http, name, count=1)
            body = {"model": name, "prompt": [5, 80, 200, 7], "max_tokens": 24, "temperature": 0}
            answer = http.post("/v1/completions", json=body | {"ignore_eos": True}).json()
            assert answer["usage"]["completion_tokens"] == 24
            texts.append(answer["choices"][0]["text"])
        assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            _HOSTS.replace("cpus = 0.1", "cpus = 0"),
            r"\[models.m\] ray: hosts are placed by .* give cpus",
        ),
        *(
            (
                _CANDIDATE.replace(f"[{table}]", f'[{table}]\ndevices = ["0"]'),
                rf"\[{table}\] devices: Ray gives",
            )
            for table in ("models.m", "models.m.candidate")
        ),
        (_FLEET.replace("[fleet]", "[fleet]\nport = 0"), r"\[fleet\] port: .* give a number"),
    ],
)
def test_what_ray_cannot_do_is_refused(tmp_path: Path, text: str, reason: str):
    from jitney.engine.fleet.launchers.ray_app import build_application

    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        build_application(FleetConfig.read(file), ServerSettings())
