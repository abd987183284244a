"""The core in its own process: messages, deaths, restarts, ends. The core is `process_core`, which
needs no model.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from core_runs import random_request
from fakes import solo
from outputs import Outputs, collect
from places import SUPPORT

from jitney.engine.common import messages
from jitney.engine.common.errors import EngineDead, RequestError
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.config.schema import Config, EngineSection, ServerSection, _ModelSection
from jitney.engine.core.process import _TICK_S
from jitney.engine.core.scheduler.sequence_factory import _sibling_seed
from jitney.engine.server.process import process_client, watchdog
from jitney.engine.server.process.faults import CoreEnd, RestartPolicy
from jitney.engine.server.process.link import CoreLink, _private_folder, _remove_left_folders
from jitney.engine.server.process.process_client import ProcessClient

# As in process_core.
RAISE, DIE, PAUSE, HANG_ONCE, RAISE_ONCE, DIE_ONCE, FAIL = 900, 901, 902, 903, 904, 905, 906


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch):
    """The core process finds `process_core` on its path."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
    )


def config(**server: object) -> Config:
    return Config(
        model=_ModelSection(id="tiny-random"),
        engine=EngineSection(platform="cpu", compilation_cache=False),
        server=ServerSection(**server),  # pyright: ignore[reportArgumentType]
    )


def request(
    id: str, first: int = 1, *, tokens: int = 3, n: int = 1, deadline: float | None = None
) -> EngineRequest:
    return EngineRequest(
        id=id,
        prompt=[first],
        sampling=SamplingParams(max_tokens=tokens, n=n),
        arrival=0.0,
        deadline=deadline,
    )


@pytest.mark.parametrize(
    ("drains", "crashed", "dismissed"),
    [(True, False, True), (False, False, False), (True, True, False)],
)
def test_a_host_that_is_gone_is_not_missed_once_nothing_is_left_to_do(
    drains: bool, crashed: bool, dismissed: bool
):
    client = ProcessClient(config())
    if drains:
        client.drain()
    end = CoreEnd("failed", "host 1 was told to end", ready=True, crashed=crashed)
    client._give_up(end)
    assert (client.state, client.dismissed) == ("dead", dismissed)
    assert client.failure == "host 1 was told to end"


async def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(
    builder: str = "build", module: str = "process_core", ready: bool = True, **server: object
) -> AsyncIterator[ProcessClient]:
    """A client of a core; ready: once that is."""
    client = ProcessClient(config(**server), builder=f"{module}:{builder}")
    await client.start()
    try:
        if ready:
            await client.wait_ready()
        yield client
    finally:
        await client.close()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def pid_of(client: ProcessClient) -> int:
    assert client._link is not None
    return client._link.process.pid


async def test_requests_come_back_token_by_token_and_records_with_them():
    async with running(ready=False) as client:
        assert (client.state, client.info) == ("loading", None)
        info = await client.wait_ready()
        assert (client.state, info.model.name) == ("ready", "fake")
        assert client.progress is not None and (
            client.progress.done,
            client.progress.detail,
        ) == (2, "tiny-random")
        outputs, pair = await asyncio.gather(
            collect(Outputs(client, request("a", 7))),
            collect(Outputs(client, request("b", 50, n=2))),
        )
        assert [output.tokens for output in outputs] == [[7], [8], [9]]
        assert [output.finish for output in outputs] == [None, None, "length"]
        assert sorted((o.index, o.tokens[0]) for o in pair) == [
            (i, t) for i in (0, 1) for t in (50, 51, 52)
        ]
        records = client.history.records.since(1)
        assert records["step"].tolist() == list(range(2, 2 + len(records)))
        assert client.counters.rows["decode"] == 9
        assert (await client.page_map()).page_states == b""
        assert client.history.finished["length"] == 3
        record = client.history.find("b", 1)
        assert record is not None and (record.state, record.n_output, record.finish) == (
            "finished",
            3,
            "length",
        )
        assert client.last_step_age() < 5


async def test_nothing_is_taken_before_ready_or_while_draining():
    async with running(ready=False) as client:
        with pytest.raises(RequestError) as early:
            Outputs(client, request("a"))
        assert early.value.info.code == "loading"
        await client.wait_ready()
        stream = Outputs(client, request("b", PAUSE, tokens=5))
        client.drain()
        with pytest.raises(RequestError) as late:
            Outputs(client, request("c"))
        assert late.value.info.code == "draining"
        assert (await collect(stream))[-1].finish == "length"
    assert client.state == "dead"
    with pytest.raises(RequestError) as over:
        Outputs(client, request("d"))
    assert over.value.info.code == "engine_dead"


async def tick_while_idle(client: ProcessClient) -> None:
    heard = time.monotonic() - client.last_step_age()
    # Two ticks later, however late they come on a busy machine.
    await wait_for(lambda: time.monotonic() - client.last_step_age() > heard + 1.5 * _TICK_S)


async def abort_one_sequence_and_no_neighbour(client: ProcessClient) -> None:
    stream = Outputs(client, request("a", PAUSE, tokens=40, n=2))
    other = Outputs(client, request("ab", PAUSE, tokens=5))
    client.abort("a", 1)
    ends = {output.index: output.finish for output in await collect(stream) if output.finish}
    assert ends == {0: "length", 1: "abort"}
    assert (await collect(other))[-1].finish == "length"


async def free_the_seat_of_a_listener_that_leaves(client: ProcessClient) -> None:
    stream = Outputs(client, request("a", PAUSE, tokens=1000))
    await anext(stream)
    assert [seat.request_id for seat in (await client.seat_map()).seats] == ["a"]
    client.forget("a")
    heard = stream.waiting
    await asyncio.sleep(0.2)
    assert (await client.seat_map()).seats == []
    assert stream.waiting == heard


async def refuse_a_request_that_failed_for_a_while(client: ProcessClient) -> None:
    (end,) = await collect(Outputs(client, request("a", FAIL)))
    assert end.error is not None and end.error.code == "request_failed"
    with pytest.raises(RequestError, match="not tried again") as again:
        Outputs(client, request("b", FAIL))
    assert again.value.info.code == "request_quarantined"
    other = Outputs(client, request("c", FAIL, tokens=4))  # another request, to the engine
    assert (await collect(other))[-1].finish == "error"
    assert (await collect(Outputs(client, request("d", 5))))[-1].finish == "length"
    assert client.counters.engine_restarts == 0


async def outlive_signals_to_the_whole_group(client: ProcessClient) -> None:
    stream = Outputs(client, request("signals", PAUSE, tokens=20))
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid_of(client), number)
    assert (await collect(stream))[-1].finish == "length"


async def reset_the_prefix_cache_while_requests_run(client: ProcessClient) -> None:
    stream = Outputs(client, request("prefix", PAUSE, tokens=5))
    await client.reset_prefix_cache()
    assert len(await collect(stream)) == 5


async def test_a_core_serves_one_scene_after_another():
    async with running() as client:
        for scene in (
            tick_while_idle,
            abort_one_sequence_and_no_neighbour,
            free_the_seat_of_a_listener_that_leaves,
            refuse_a_request_that_failed_for_a_while,
            outlive_signals_to_the_whole_group,
            reset_the_prefix_cache_while_requests_run,
        ):
            await scene(client)
        assert client.counters.engine_restarts == 0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch):
    """Restarts without long pauses."""
    monkeypatch.setattr(RestartPolicy, "backoff_s", (0.02, 0.1))


@pytest.mark.parametrize("how", ["kill -9", "exception", "dies in a step"])
async def test_a_dead_core_ends_every_request_if_told_to_and_is_replaced(how: str):
    async with running(on_core_death="fail") as client:
        old = pid_of(client)
        streams = [Outputs(client, request(str(i), PAUSE, tokens=1000, n=2)) for i in range(3)]
        await anext(streams[0])
        if how == "kill -9":
            os.kill(old, signal.SIGKILL)
        else:
            Outputs(client, request("x", RAISE if how == "exception" else DIE))
        for stream in streams:
            ends = [output for output in await collect(stream) if output.finish is not None]
            assert [output.index for output in ends] == [0, 1]
            for output in ends:
                assert output.finish == "error" and output.error is not None
                assert output.error.code == "engine_dead"
                assert "asked to fail" not in output.error.message
        await client.until("restarting")
        with pytest.raises(RequestError, match="started again") as early:
            Outputs(client, request("early"))
        assert early.value.info.code == "restarting"
        assert client.counters.resumed == 0
        steps_before = client.history.records.since(-1)["step"].tolist()
        await client.until("ready")
        assert pid_of(client) != old and gone(old)
        assert client.counters.engine_restarts == 1
        assert (await collect(Outputs(client, request("again", 5))))[-1].tokens == [7]
        steps = client.history.records.since(-1)["step"].tolist()
        assert steps[: len(steps_before)] == steps_before and steps == sorted(set(steps))


HOWS = ["kill -9", "stopped", "exception", "dies in a step", "hangs in a step"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", HOWS)
async def test_requests_go_on_in_the_next_core(how: str, caplog: pytest.LogCaptureFixture):
    """Those that had begun and those that had not, with each token once and no error."""
    cause = {"exception": "failed", "stopped": "hung", "hangs in a step": "hung"}.get(how, "died")

    async with running(step_timeout_s=2) as client:
        old = pid_of(client)
        streams = [Outputs(client, request(str(i), PAUSE, tokens=12, n=2)) for i in range(3)]
        first = await anext(streams[0])
        if how in ("kill -9", "stopped"):
            os.kill(old, signal.SIGKILL if how == "kill -9" else signal.SIGSTOP)
        else:
            bad = {"exception": RAISE_ONCE, "dies in a step": DIE_ONCE}.get(how, HANG_ONCE)
            streams.append(Outputs(client, request("x", bad, tokens=12, n=2)))
        await client.until("restarting")
        assert client.counters.gauge("seats_busy") == 0
        assert client.counters.waiting == 2 * len(streams)
        assert client.history.n_waiting == 2 * len(streams)
        outputs = await asyncio.gather(*map(collect, streams))
        outputs[0].insert(0, first)
        for stream, got in zip(streams, outputs, strict=True):
            start = stream.request.prompt[0]
            for index in (0, 1):
                tokens = [t for o in got if o.index == index for t in o.tokens]
                assert tokens == list(range(start, start + 12))
            assert [o.finish for o in got if o.finish] == ["length", "length"]
        assert gone(old) and client.state == "ready"
        assert client.counters.engine_restarts == client.counters.restart_causes[cause] == 1
        assert client.counters.resumed == len(streams)
        record = client.history.find("0", 0)
        assert record is not None and (record.n_output, record.finish) == (12, "length")
    (line,) = [r.getMessage() for r in caplog.records if "starting it again" in r.getMessage()]
    died = "killed by SIGKILL, signal 9" if how == "kill -9" else "exit status 3"
    words = {"died": died, "failed": "asked to fail", "hung": "nothing"}
    assert words[cause] in line and "go on in the new one, 0 have ended" in line


def check_like_alone(one: EngineRequest, index: int, got: list[SequenceOutput]) -> None:
    """A sequence of a fake device has every token once, in order, with its log-probability."""
    seed = _sibling_seed(one.sampling.seed or 0, index)
    want = solo(one, seed, 64 - len(one.prompt))
    assert [token for output in got for token in output.tokens] == want
    assert [output.finish in ("stop", "length") for output in got if output.finish] == [True]
    entries = [entry for output in got for entry in output.logprobs or ()]
    assert len(entries) == (0 if one.sampling.logprobs is None else len(want))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seed", range(2))
async def test_random_requests_live_through_random_deaths(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    """The engine's own scheduler behind the sockets, on a fake device, killed and stopped at any
    time: each request gets exactly the tokens of a run alone.
    """
    rng = random.Random(seed)
    monkeypatch.setattr(watchdog, "_FIRST_STEP_S", 2.0)

    async with running(module="fake_core", step_timeout_s=2, max_restarts=50) as client:
        requests, streams = [], []
        for number in range(14):
            one = random_request(rng, number, time.monotonic())
            if one.deadline is None and len(one.prompt) < 40:
                requests.append(one)
                streams.append(Outputs(client, one))
        outputs = asyncio.gather(*map(collect, streams))
        for how in (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP):
            await asyncio.sleep(rng.uniform(0.02, 0.25))
            if client._link is not None and client.state == "ready":
                os.kill(pid_of(client), how)
            await client.until("restarting")
            await client.until("ready")
        for one, got in zip(requests, await outputs, strict=True):
            for index in range(one.sampling.n):
                check_like_alone(one, index, [o for o in got if o.index == index])
        assert client.history.n_open == 0
        assert client.counters.engine_restarts == 3


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("bad", [DIE, RAISE])
async def test_a_request_that_ends_every_core_is_found_and_costs_nobody_else(bad: int):
    async with running() as client:
        before = [Outputs(client, request(f"a{i}", PAUSE, tokens=30)) for i in range(3)]
        poison = Outputs(client, request("poison", bad))
        after = [Outputs(client, request(f"b{i}", PAUSE, tokens=30)) for i in range(3)]
        outputs = await asyncio.gather(*map(collect, [*before, *after]))
        for got in outputs:
            tokens = [token for output in got for token in output.tokens]
            assert tokens == list(range(PAUSE, PAUSE + 30)) and got[-1].finish == "length"
        (end,) = await collect(poison)
        assert end.error is not None and end.error.code == "request_failed"
        assert client.counters.engine_restarts == 3
        with pytest.raises(RequestError, match="not tried again"):
            Outputs(client, request("again", bad))


@pytest.mark.usefixtures("quick")
async def test_what_is_aborted_while_no_core_is_there_ends_at_once():
    async with running() as client:
        kept = Outputs(client, request("kept", PAUSE, tokens=30, n=2))
        left = Outputs(client, request("left", PAUSE, tokens=1000))
        await anext(left)
        os.kill(pid_of(client), signal.SIGKILL)
        await client.until("restarting")
        client.abort("kept", 1, "stop")
        client.abort("left")
        assert (await collect(left))[-1].finish == "abort"
        ends = {o.index: o.finish for o in await collect(kept) if o.finish}
        assert ends == {0: "length", 1: "stop"}
        assert client.history.n_open == 0


@pytest.mark.usefixtures("quick")
async def test_a_core_that_dies_while_draining_is_replaced_for_those_who_are_open():
    async with running() as client:
        stream = Outputs(client, request("a", PAUSE, tokens=30))
        await anext(stream)
        client.drain()
        os.kill(pid_of(client), signal.SIGKILL)
        assert (await collect(stream))[-1].finish == "length"
        assert client.state == "draining"
        with pytest.raises(RequestError, match="shutting down"):
            Outputs(client, request("b"))


async def test_deadlines_end_requests_though_the_core_does_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_client, "_DEADLINE_GRACE_S", 0.1)

    async with running() as client:
        deadline = time.monotonic() + 2.0  # its first output comes long before
        stream = Outputs(client, request("a", PAUSE, tokens=1000, n=2, deadline=deadline))
        await anext(stream)
        os.kill(pid_of(client), signal.SIGSTOP)
        ends = [output for output in await collect(stream) if output.finish]
        assert [output.finish for output in ends] == ["deadline", "deadline"]
        assert ends[0].error is not None and ends[0].error.code == "deadline_exceeded"
        assert client.history.n_open == 0
        client.kill()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_core_that_cannot_be_started_again_is_tried_again(
    comes_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the temporary directory gone for a while, or for good."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))

    async with running() as client:
        stream = Outputs(client, request("a", PAUSE, tokens=20))
        await anext(stream)
        place.rename(tmp_path / "away")
        os.kill(pid_of(client), signal.SIGKILL)
        await wait_for(lambda: client.counters.restart_causes["not started"] >= 2)
        if comes_back:
            (tmp_path / "away").rename(place)
            assert (await collect(stream))[-1].finish == "length"
            assert client.state == "ready"
        else:
            assert (await collect(stream))[-1].finish == "error"
            with pytest.raises(EngineDead, match=r"cannot be started: No such file.*5 restarts"):
                await client.wait_ready()


def test_a_core_is_replaced_when_no_descriptor_is_left():
    """In a process of its own, which libzmq would end."""
    code = (
        "import asyncio, os, resource, signal, sys\n"
        "sys.path[:0] = sys.argv[1:]\n"
        "from outputs import Outputs, collect\n"
        "from test_process import PAUSE, ProcessClient, config, pid_of, request\n"
        "async def main():\n"
        "    client = ProcessClient(config(), builder='process_core:build')\n"
        "    await client.start()\n"
        "    await client.wait_ready()\n"
        "    stream = Outputs(client, request('a', PAUSE, tokens=30))\n"
        "    await anext(stream)\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
        "    held = []\n"
        "    try:\n"
        "        while True: held.append(os.open('/dev/null', 0))\n"
        "    except OSError: pass\n"
        "    os.kill(pid_of(client), signal.SIGKILL)\n"
        "    print((await collect(stream))[-1].finish, client.counters.engine_restarts)\n"
        "    await client.close()\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(SUPPORT), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "length"), done.stderr


def test_folders_of_killed_servers_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "jitney-core-left"
    left.mkdir()
    (left / "to").touch()
    (tmp_path / "jitney-core-mine").mkdir()
    (tmp_path / "jitney-core-mine" / "data").touch()
    (tmp_path / "jitney-core-link").symlink_to(tmp_path / "jitney-core-mine")
    with _private_folder() as used:
        _remove_left_folders()
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"jitney-core-mine", "jitney-core-link", Path(used).name}
    assert not Path(used).exists()


async def test_a_core_that_keeps_dying_is_given_up():
    async with running(max_restarts=1, ready=False) as client:
        for _ in range(2):
            await client.wait_ready()
            Outputs(client, request("x", DIE_ONCE))
            await client.until("restarting", "dead")
        assert client.state == "dead"
        with pytest.raises(EngineDead, match=r"died \(exit status 3.*after 1 restarts"):
            await client.wait_ready()
        assert client.counters.engine_restarts == 1


async def test_a_core_that_has_served_for_a_while_starts_the_count_anew(monkeypatch):
    """Whoever kills cores now and then (the kernel, for memory) does not end the server."""
    monkeypatch.setattr(RestartPolicy, "proven_s", 0.0)
    monkeypatch.setattr(RestartPolicy, "backoff_s", (0.01, 0.01))

    async with running(max_restarts=1, ready=False) as client:
        for _ in range(3):
            await client.wait_ready()
            stream = Outputs(client, request("x", PAUSE, tokens=20))
            client.kill()
            await client.until("restarting", "dead")
            assert client.state == "restarting"
            assert (await collect(stream))[-1].finish == "length"
        assert client.counters.engine_restarts == 3


def test_the_pause_before_a_restart_grows_while_the_same_thing_happens_soon():
    policy = RestartPolicy(max_restarts=50)
    killed = CoreEnd("died", "killed", ready=True)
    crashed = CoreEnd("died", "crashed", ready=True, crashed=True)
    failed = CoreEnd("failed", "out of memory", crashed=True)

    def pause(end: CoreEnd, lived_s: float = 0.0) -> float | None:
        policy.ready_at = time.monotonic() - lived_s
        return policy.delay(end)

    assert [pause(killed) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert [pause(crashed), pause(crashed)] == [0.5, 1], "something else"
    assert [pause(crashed, 20), pause(crashed, 20)] == [0.5, 0.5], "each had lived"
    assert pause(crashed) == 1
    assert [pause(failed, 100), pause(failed, 100)] == [0.5, 1], "a start is no life"


@pytest.mark.usefixtures("quick")
async def test_a_core_that_dies_in_the_first_start_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("JITNEY_TEST_BUILDS", str(tmp_path / "builds"))

    async with running("build_that_dies_twice") as client:
        assert client.state == "ready" and client.counters.engine_restarts == 2
        assert not client.history.incidents.outages, "nothing had served yet"
        assert (await collect(Outputs(client, request("a", 5))))[-1].tokens == [7]
    lines = [each.getMessage() for each in caplog.records if "starting it again" in each.message]
    assert "SIGKILL" in lines[0] and "exit status 3" in lines[1] and len(lines) == 2


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("builder", "settings", "reason", "restarts"),
    [
        ("build_that_dies_twice", {"max_restarts": 0}, "SIGKILL", 0),
        ("build_that_dies_twice", {"max_restarts": 1}, r"exit status 3.*after 1 restarts", 1),
        ("build_that_breaks", {}, "broken 2", 2),  # twice in the same words
        (
            "build_that_hangs",
            {"start_timeout_s": 5},
            "said nothing for 5 s after compile 1 of 2",
            0,
        ),
        ("build_never", {}, "^no such model$", 0),
    ],
)
async def test_a_first_start_that_cannot_succeed_is_given_up_with_its_reason(
    builder: str,
    settings: dict[str, Any],
    reason: str,
    restarts: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("JITNEY_TEST_BUILDS", str(tmp_path / "builds"))

    async with running(builder, **settings, ready=False) as client:
        with pytest.raises(EngineDead, match=reason):
            await client.wait_ready()
        assert client.counters.engine_restarts == restarts


async def test_a_first_start_that_makes_progress_may_take_its_time():
    async with running("build_step_by_step", start_timeout_s=5):
        pass


async def test_no_restart_means_none():
    async with running(restart=False) as client:
        (end,) = await collect(Outputs(client, request("x", DIE)))
        assert end.error is not None and end.error.code == "engine_dead"
        assert await client.until("dead", "restarting") == "dead"


async def test_closing_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async with running() as client:
        pid = pid_of(client)
        (folder,) = tmp_path.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        stream = Outputs(client, request("a", PAUSE, tokens=1000))
        await anext(stream)
    assert (await collect(stream))[-1].error is not None
    assert gone(pid)
    assert list(tmp_path.iterdir()) == []


async def test_closing_while_loading_ends_the_core():
    async with running("build_slowly", ready=False) as client:
        await wait_for(lambda: client._link is not None)
        pid = pid_of(client)
    assert gone(pid)


@pytest.mark.parametrize("builder", ["build", "build_slowly"])
def test_nothing_is_left_of_a_killed_parent(builder: str, tmp_path: Path):
    """Neither an orphan nor the folder with its sockets."""
    ready = "client.wait_ready()" if builder == "build" else "wait_for(lambda: client._link)"
    code = (
        "import asyncio, sys\n"
        "sys.path[:0] = sys.argv[1:]\n"
        "from test_process import ProcessClient, config, pid_of, wait_for\n"
        "async def main():\n"
        f"    client = ProcessClient(config(), builder='process_core:{builder}')\n"
        "    await client.start()\n"
        f"    await {ready}\n"
        "    print(pid_of(client), flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(SUPPORT), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid) and list(tmp_path.iterdir())
        parent.kill()
    deadline = time.monotonic() + 60
    while not gone(pid):
        assert time.monotonic() < deadline, "the core outlived its parent"
        time.sleep(0.02)
    assert not list(tmp_path.iterdir())


async def test_keys_do_not_reach_the_core(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JITNEY_API_KEYS", "sesame")

    async with running(api_keys=("sesame",)) as client:
        for name in ("environ", "cmdline"):
            assert b"sesame" not in Path(f"/proc/{pid_of(client)}/{name}").read_bytes()


def refused(client: ProcessClient) -> str:
    with pytest.raises(RequestError) as caught:
        Outputs(client, request("no", 7))
    return caught.value.info.code


async def sleep_and_wake(client: ProcessClient) -> None:
    assert await client.sleep() == 1000
    assert (client.state, refused(client)) == ("sleeping", "sleeping")
    assert await client.sleep() == 0, "it slept already"
    await client.wake()
    await client.wake()
    outputs = await collect(Outputs(client, request("a", 7)))
    assert [output.tokens for output in outputs] == [[7], [8], [9]]


async def sleep_behind_open_requests(client: ProcessClient) -> None:
    stream = Outputs(client, request("b", PAUSE, tokens=10))
    going = asyncio.create_task(client.sleep())
    await wait_for(lambda: client.state == "sleeping")
    assert refused(client) == "sleeping"
    outputs = await collect(stream)
    assert len(outputs) == 10 and outputs[-1].finish == "length"
    assert await going == 1000


async def end_open_requests_and_sleep(client: ProcessClient) -> None:
    stream = Outputs(client, request("c", PAUSE, tokens=100_000))
    assert await client.sleep(abort=True) == 1000
    assert (await collect(stream))[-1].finish == "abort"


async def end_requests_that_a_first_sleep_waits_for(client: ProcessClient) -> None:
    stream = Outputs(client, request("d", PAUSE, tokens=100_000))
    first = asyncio.create_task(client.sleep())
    await wait_for(lambda: client.state == "sleeping")
    second = asyncio.create_task(client.sleep(abort=True))
    assert (await collect(stream))[-1].finish == "abort"
    assert await first + await second == 1000, "it slept once"
    assert client.state == "sleeping"


async def give_up_a_second_sleep(client: ProcessClient) -> None:
    """The first one goes on."""
    stream = Outputs(client, request("e", PAUSE, tokens=20))
    first = asyncio.create_task(client.sleep())
    await wait_for(lambda: client.state == "sleeping")
    second = asyncio.create_task(client.sleep())
    await asyncio.sleep(0)
    second.cancel()
    await collect(stream)
    assert await first == 1000 and client.state == "sleeping"


async def wake_before_it_slept(client: ProcessClient) -> None:
    stream = Outputs(client, request("f", PAUSE, tokens=50))
    going = asyncio.create_task(client.sleep())
    await wait_for(lambda: client.state == "sleeping")
    await client.wake()
    assert client.state == "ready"
    await collect(stream)
    with pytest.raises(RequestError, match="woken before it slept"):
        await going
    assert client.state == "ready"


async def test_an_engine_sleeps_and_serves_again_once_woken():
    async with running() as client:
        for scene in (
            sleep_and_wake,
            sleep_behind_open_requests,
            end_open_requests_and_sleep,
            end_requests_that_a_first_sleep_waits_for,
            give_up_a_second_sleep,
            wake_before_it_slept,
        ):
            await scene(client)
            await client.wake()
            last = Outputs(client, request(f"after {scene.__name__}", 7))
            assert len(await collect(last)) == 3


@pytest.mark.parametrize(
    ("hosts", "who"), [([1], "host 1"), ([0, 2], "host 0, host 2"), ([], "another engine")]
)
def test_an_engine_that_others_keep_waiting_names_them(hosts: list[int], who: str):
    """Its own requests are no reason for that."""
    client = ProcessClient(config())
    link = CoreLink(None, None, None, ready=True)  # pyright: ignore[reportArgumentType]
    client._take(link, messages.WaitingFor(hosts))
    client._watchdog.waited(client._watchdog.limit)
    client._take(link, messages.WaitingFor(hosts))
    assert not client._watchdog.overdue
    client._watchdog.waited(2 * client._watchdog.limit)
    assert client._watchdog.overdue
    link.hung = True
    end = client._end_of(link)
    assert end.why.startswith(f"{who} took no part in a step for 30 s, and the engine process")
    assert (end.cause, end.crashed) == ("hung", False)


async def test_a_core_that_cannot_wake_is_replaced_by_one_that_is_awake(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("JITNEY_TEST_NO_WAKING", "1")

    async with running() as client:
        before = pid_of(client)
        await client.sleep()
        with pytest.raises(RequestError) as caught:
            await client.wake()
        assert caught.value.info.code == "engine_dead"
        await client.until("ready")
        assert pid_of(client) != before
        assert len(await collect(Outputs(client, request("a", 7)))) == 3
