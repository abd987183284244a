"""`jitney fleet serve` as a program reads its files again: its clients' keys, and the key that it
asks engines with.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapter_files import write_adapter
from api_fakes import FakeClient, Script, http_client, until
from fleet_engines import CHAT, FakeEngine, engines

from jitney.engine.common.key_file import digest_key
from jitney.engine.common.ports import free_port
from jitney.engine.core.weights.checkpoints.sources import ModelSource

PROGRAM = "import sys; from jitney.engine.cli import main; sys.exit(main())"


@dataclass
class Program:
    """A fleet in a process of its own."""

    folder: Path
    url: str
    process: subprocess.Popen[str]

    def keys(self, name: str, *keys: str) -> None:
        write(self.folder / name, *keys)

    def http(self, key: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"}
        client = http_client(self.url)
        client.headers.update(headers)
        return client

    def status(self, key: str, path: str = "/v1/models") -> int:
        with self.http(key) as web:
            return web.get(path).status_code

    def reload(self) -> dict[str, Any]:
        with self.http("boss") as web:
            answer = web.post("/admin/reload")
        assert answer.status_code == 200, answer.text
        return answer.json()


def write(file: Path, *keys: str) -> None:
    file.write_text("\n".join(keys) + "\n")
    file.chmod(0o600)


@contextlib.contextmanager
def fleet_over(folder: Path, model: str, ready_s: float = 60) -> Iterator[Program]:
    """A fleet with keys of its own, which asks engines of `urls` with `engine.key`. model: lines of
    [models.m].
    """
    for name, key in (("users", "ann"), ("admins", "boss"), ("engine.key", "fleet-1")):
        write(folder / name, key)
    port = free_port()
    (folder / "fleet.toml").write_text(
        f'[fleet]\nport = {port}\npoll_s = 0.05\ndata_dir = "data"\n'
        'engine_key_file = "engine.key"\n'
        f'api_key_file = "{folder}/users"\nadmin_key_file = "{folder}/admins"\n'
        f"[models.m]\n{model}\n"
    )
    command = [sys.executable, "-P", "-c", PROGRAM, "fleet", "serve", str(folder / "fleet.toml")]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JITNEY_")}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environ
    )
    program = Program(folder, f"http://127.0.0.1:{port}", process)
    try:
        until(lambda: is_ready(program), ready_s)
        yield program
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)


def is_ready(program: Program) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return program.status("ann", "/readyz") == 200
    time.sleep(0.1)
    return False


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    """Accepts both keys of the fleet. Its answers take ten seconds."""
    keys = tuple(map(digest_key, ("fleet-1", "fleet-2")))
    script = Script("x" * 200, delay_s=0.05)
    fake = FakeEngine(FakeClient(script, adapters=("fr",)), {"admin_keys": keys})
    with engines(fake):
        yield fake


@pytest.fixture(scope="module")
def program(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    with fleet_over(tmp_path_factory.mktemp("fleet"), f'urls = ["{engine.url}"]') as program:
        yield program


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"max_tokens": 200}),
        ("/v1/messages", CHAT | {"max_tokens": 200}),
        ("/v1/responses", {"model": "m", "input": "Where to?"}),
        ("/api/chat", {"model": "m", "messages": CHAT["messages"]}),
    ],
)
def test_a_removed_keys_stream_ends_with_an_error(
    program: Program, engine: FakeEngine, path: str, body: dict[str, Any]
):
    program.keys("users", "ann", "eve")
    program.reload()
    with (
        program.http("eve") as web,
        web.stream("POST", path, json=body | {"stream": True}) as answer,
    ):
        parts = answer.iter_text()
        text = next(parts)
        program.keys("users", "ann")
        keys = program.reload()["keys"]
        assert (keys["removed"], keys["requests_ended"]) == (1, 1)
        text += "".join(parts)
    assert "this API key was removed while it was in use" in text
    assert (program.status("eve"), program.status("ann")) == (401, 200)
    until(lambda: not engine.client.open)


def test_engines_are_asked_with_the_new_key(program: Program, engine: FakeEngine):
    assert program.reload()["engine_key"] == "unchanged"
    program.keys("engine.key", "fleet-2")
    assert program.reload()["engine_key"] == "replaced"
    body = {"model": "m", "prompt": "Hi", "max_tokens": 1}
    with program.http("ann") as web:
        assert web.post("/v1/completions", json=body).status_code == 200
    assert engine.heads[-1]["authorization"] == "Bearer fleet-2"


def test_a_file_that_is_not_sound_changes_nothing(program: Program):
    program.keys("users", "ann", "eve")
    (program.folder / "engine.key").unlink()
    with program.http("boss") as web:
        answer = web.post("/admin/reload")
    assert answer.status_code == 409
    assert "engine_key_file" in answer.json()["error"]["message"]
    assert (program.status("eve"), program.status("ann")) == (401, 200)
    program.keys("engine.key", "fleet-2")
    program.reload()
    assert program.status("eve") == 200


def test_other_settings_are_named(program: Program):
    file = program.folder / "fleet.toml"
    before = file.read_text()
    file.write_text(before.replace("[models.m]", "drain_s = 1.5\n[models.m]\nattempts = 2"))
    with program.http("boss") as web:
        assert web.post("/admin/reload").status_code == 409, "attempts is no setting of a model"
    file.write_text(before.replace("[models.m]", "drain_s = 1.5\n[models.other]"))
    assert program.reload()["needs_restart"] == ["drain_s", "models"]
    file.write_text(before)


def complete(program: Program, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": "Hi", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with program.http("ann") as web:
        return web.post("/v1/completions", json=body | fields)


def test_adapters_of_engines_elsewhere_can_be_named_while_it_serves(program: Program):
    file = program.folder / "fleet.toml"
    before = file.read_text()
    assert complete(program, "fr", max_tokens=1).status_code == 404
    file.write_text(before + 'adapters = ["fr"]\n')
    told = program.reload()
    assert (told["adapters"]["added"], told["needs_restart"]) == (["fr"], [])
    assert complete(program, "fr", max_tokens=1).status_code == 200
    file.write_text(before)
    assert program.reload()["adapters"]["removed"] == ["fr"]
    assert complete(program, "fr", max_tokens=1).status_code == 404


MODEL = """
replicas = 1

[models.m.settings]
model = "tiny-random"
dtype = "float32"
max_seats = 4
token_budget = 64
seat_buckets = [4]
token_buckets = [64]
adapter_room = 4
adapters = {adapters}
"""


@pytest.mark.usefixtures("hurried_processes")
def test_engines_that_it_started_take_other_adapters(tmp_path: Path):
    config = ModelSource.resolve("tiny-random").config
    folders = {name: write_adapter(tmp_path / name, config, len(name)) for name in ("fr", "deu")}
    file = tmp_path / "fleet.toml"

    def listed(*names: str) -> str:
        return json.dumps([f"{name}={folders[name]}" for name in names])

    with fleet_over(tmp_path, MODEL.format(adapters=listed("fr")), 300) as program:
        before = file.read_text()
        base, french = (complete(program, name).json() for name in ("m", "fr"))
        assert complete(program, "deu").status_code == 404
        file.write_text(before.replace(listed("fr"), listed("fr", "deu")))
        told = program.reload()
        assert (told["adapters"]["added"], told["needs_restart"]) == (["deu"], [])
        german = [complete(program, "deu").json()["choices"][0]["text"] for _ in range(2)]
        texts = [answer["choices"][0]["text"] for answer in (base, french)]
        assert len(set(german)) == 1 and german[0] not in texts
        assert complete(program, "fr").json()["choices"][0]["text"] == texts[1]

        (folders["fr"] / "adapter_config.json").write_text("{}")
        with program.http("boss") as web:
            refused = web.post("/admin/reload")
        assert refused.status_code == 409
        assert "m-0: nothing was changed: adapter fr: " in refused.json()["error"]["message"]
        assert complete(program, "fr").json()["choices"][0]["text"] == texts[1]

        file.write_text(before.replace(listed("fr"), listed("deu")))
        assert program.reload()["adapters"]["removed"] == ["fr"]
        assert complete(program, "fr").status_code == 404
        assert complete(program, "deu").json()["choices"][0]["text"] == german[0]


def test_a_signal_does_the_same(program: Program):
    program.keys("users", "ann", "sue")
    program.process.send_signal(signal.SIGHUP)
    until(lambda: program.status("sue") == 200)
