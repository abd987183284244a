"""`jitney serve` and `jitney bench sizes`: measure once, keep it, and serve with it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jitney.engine.cli import main, serve
from jitney.engine.common.errors import JitneyError
from jitney.engine.common.messages import Progress
from jitney.engine.config.layers import ResolvedConfig
from jitney.engine.config.schema import Config
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.lab import server_sizes as sizes_of_server
from jitney.engine.lab.bench import sizes, timing_behind
from jitney.engine.lab.bench.sizes import SizeTimes, Timed
from jitney.engine.lab.server_sizes import ServerSizes
from jitney.engine.lab.tuned_sizes import _FROM_MEASURED
from jitney.engine.server.equipment import Equipment
from jitney.engine.server.http.http_server import HttpServer
from jitney.engine.server.http.reloader import FreshSettings

#: A machine on which 16 seats and 128 rows are the most, and one thread is enough.
TIMES = SizeTimes(
    threads=1,
    decode=(Timed(8, 0.1), Timed(16, 0.15), Timed(32, 0.25)),
    prompts=(Timed(32, 0.2), Timed(128, 0.4), Timed(512, 1.2)),
)
CHOSEN = {"max_seats": 16, "token_budget": 128, "token_buckets": (32, 128)}
USUAL = {"max_seats": 32, "token_budget": 512, "token_buckets": ()}
MODEL = ("tiny-random", "--platform", "cpu")


class Shown:
    """A display that keeps what it is told."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def progress(self, progress: Progress) -> None:
        self.stages.append(progress.stage)

    def close(self) -> None:
        pass


class Measuring:
    """Stands in for the processes that time steps."""

    def __init__(self) -> None:
        self.asked: list[Config] = []
        self.fails = False
        #: Shares of the processors that other programs use at the next looks; none later.
        self.other_work: list[float] = []

    def share(self) -> float:
        """Stands in for `OtherWork.share`."""
        return self.other_work.pop(0) if self.other_work else 0.0

    async def __call__(self, config: Config, known: object = (), **watching: Any) -> SizeTimes:
        self.asked.append(config)
        if self.fails:
            raise JitneyError("steps cannot be timed: no memory")
        return TIMES


class Client:
    """Stands in for a ready engine."""

    info = SimpleNamespace(model=SimpleNamespace(weight_bytes=1))


class Servers:
    """Stands in for `_Server`, and keeps what each was to serve with; it times steps while it
    serves.
    """

    def __init__(self) -> None:
        self.served: list[ResolvedConfig] = []

    def __call__(self, resolved, http, display, reread, *, times_steps: bool) -> Servers:
        self.resolved, self.times_steps = resolved, times_steps
        return self

    async def serve(self) -> int:
        self.served.append(self.resolved)
        if self.times_steps:
            await ServerSizes(self.resolved).time_behind(cast(Any, Client()))
        return 0


@pytest.fixture(autouse=True)
def measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measuring:
    stand_in = Measuring()
    monkeypatch.setattr(sizes, "time_apart", stand_in)
    monkeypatch.setattr(timing_behind, "time_apart", stand_in)
    monkeypatch.setattr(sizes_of_server, "_FIRST_REST_S", 0.0)
    monkeypatch.setattr(sizes, "_LOOK_S", 0.0)
    monkeypatch.setattr(sizes.OtherWork, "share", lambda self: stand_in.share())
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("JITNEY_CACHE", str(folder))
    monkeypatch.delenv("JITNEY_MEASURED_SIZES", raising=False)
    return stand_in


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    stand_in = Servers()
    monkeypatch.setattr(serve, "_Server", stand_in)
    monkeypatch.setattr(serve, "make_display", lambda level: Shown())
    yield stand_in


def started(servers: Servers, *flags: str) -> ResolvedConfig:
    """What `jitney serve` with these flags serves with."""
    assert main(["serve", *MODEL, "--port", "0", *flags]) == 0
    return servers.served[-1]


def sizes_of(resolved: ResolvedConfig) -> dict[str, Any]:
    return {name: getattr(resolved.config.engine, name) for name in CHOSEN}


def test_the_first_start_measures_and_the_next_goes_by_it(
    servers: Servers, measuring: Measuring, capsys: pytest.CaptureFixture[str]
):
    assert sizes_of(started(servers)) == USUAL
    assert len(measuring.asked) == 1

    with_times = started(servers)
    assert sizes_of(with_times) == CHOSEN
    assert with_times.origins["token_budget"] == _FROM_MEASURED
    assert len(measuring.asked) == 1
    said = capsys.readouterr().err
    assert "--max-seats 16 --token-budget 128 --token-buckets 32,128" in said


@pytest.mark.parametrize(
    "flags", [["--no-measured-sizes"], ["--max-seats", "32"], ["--token-budget", "512"]]
)
def test_whoever_says_something_about_sizes_gets_that(
    flags: list[str], servers: Servers, measuring: Measuring
):
    started(servers)
    assert sizes_of(started(servers)) == CHOSEN
    assert sizes_of(started(servers, *flags)) == USUAL
    assert len(measuring.asked) == 1


def test_settings_that_a_step_depends_on_are_measured_apart(servers: Servers, measuring: Measuring):
    started(servers)
    started(servers, "--dtype", "float32")
    started(servers, "--order", "fair")
    assert [config.model.dtype for config in measuring.asked] == ["auto", "float32"]


def test_a_machine_that_cannot_be_measured_serves_with_the_usual_sizes(
    servers: Servers, measuring: Measuring, caplog: pytest.LogCaptureFixture
):
    measuring.fails = True
    started(servers)
    assert "sizes stay the usual ones: steps cannot be timed: no memory" in caplog.text
    measuring.fails = False
    assert sizes_of(started(servers)) == USUAL
    assert sizes_of(started(servers)) == CHOSEN


def test_a_machine_that_does_other_work_is_measured_once_it_does_not(
    servers: Servers, measuring: Measuring, caplog: pytest.LogCaptureFixture
):
    measuring.other_work = [0.4, 0.3]
    with caplog.at_level(logging.INFO, "jitney"):
        started(servers)
    assert "other programs use 40% of the processors" in caplog.text
    assert len(measuring.asked) == 1 and not measuring.other_work
    assert sizes_of(started(servers)) == CHOSEN


def test_a_machine_without_memory_for_a_second_engine_is_not_measured(
    servers: Servers,
    measuring: Measuring,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(sizes_of_server, "available_host_bytes", lambda: 2)
    started(servers)
    assert "no memory is left" in caplog.text
    assert not measuring.asked


def test_print_config_has_what_is_kept_and_measures_nothing(
    servers: Servers, measuring: Measuring, capsys: pytest.CaptureFixture[str]
):
    assert main(["serve", *MODEL, "--print-config"]) == 0
    assert "max_seats = 32" in capsys.readouterr().out
    assert not measuring.asked
    started(servers)
    assert main(["serve", *MODEL, "--print-config"]) == 0
    assert "max_seats = 16" in capsys.readouterr().out


def _never_reread(take_adapters: object) -> FreshSettings:
    raise AssertionError("nobody asked")


async def test_the_engine_is_ready_before_steps_are_timed(monkeypatch: pytest.MonkeyPatch):
    resolved = ResolvedConfig.load(flags={"model": "tiny-random", "platform": "cpu"})
    order = []

    async def find_model(self: Equipment) -> ModelSource:
        return ModelSource.resolve("tiny-random")

    async def equip(self: Equipment, service: Any, source: Any) -> tuple[None, None]:
        order.append("ready")
        return None, None

    monkeypatch.setattr(Equipment, "find_model", find_model)
    monkeypatch.setattr(Equipment, "equip", equip)
    monkeypatch.setattr(serve, "_greeting", lambda *about: ["serving"])
    timed, dead = asyncio.Event(), asyncio.Event()

    async def time_behind(self: ServerSizes, client: Any) -> None:
        order.append(self.resolved.config)
        timed.set()
        try:
            await dead.wait()
        except asyncio.CancelledError:
            order.append("ended")
            raise

    async def until(*states: str) -> str:
        await timed.wait()
        return "dead"

    monkeypatch.setattr(ServerSizes, "time_behind", time_behind)
    http = HttpServer.of(resolved.config.server)
    with http.listening():
        server = serve._Server(resolved, http, Shown(), _never_reread, times_steps=True)
        server.client.dismissed = True
        monkeypatch.setattr(server.client, "until", until)
        await server._work()
    await asyncio.sleep(0)
    assert order == ["ready", resolved.config, "ended"]


def test_bench_sizes_shows_and_keeps_only_if_asked(
    servers: Servers,
    measuring: Measuring,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    assert main(["bench", "sizes", *MODEL]) == 0
    shown = capsys.readouterr().out
    assert "--max-seats 16" in shown and "1200.00" in shown
    assert not (tmp_path / "cache" / "sizes").exists()

    file = tmp_path / "report.json"
    assert main(["bench", "sizes", *MODEL, "--keep", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["values"]["max_seats"] == 16
    assert report["times"][0]["decode"][2] == [32, 0.25]
    assert sizes_of(started(servers)) == CHOSEN
    assert len(measuring.asked) == 2  # the two of bench sizes


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--platform", "tpu"], "tpu"),
        (["--platform", "cpu", "--tensor-parallel", "2"], "one process"),
    ],
)
def test_bench_sizes_refuses_what_it_cannot_measure(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", "sizes", "tiny-random", *flags]) == 2
    said = capsys.readouterr().err
    assert reason in said and said.count("\n") == 1


def test_bench_sizes_refuses_sizes_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("JITNEY_MAX_SEATS", "8")
    assert main(["bench", "sizes", *MODEL]) == 2
    assert "JITNEY_MAX_SEATS" in capsys.readouterr().err
