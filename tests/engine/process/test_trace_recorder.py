"""The recorder: one line per ended sequence, with what a simulation needs and nothing that tells
who or what.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_fakes import ByteTokenizer, FakeClient, Script
from fakes import FakeClock

from jitney.engine.api import ServerSettings, create_app
from jitney.engine.errors import ConfigError, ErrorInfo
from jitney.engine.process.trace_recorder import RecordedStream, Recorder, recording
from jitney.engine.scheduler.admission import SchedulerLimits
from jitney.engine.scheduler.buckets import make_buckets
from jitney.engine.simulation.simulator import EngineShape, simulate
from jitney.engine.simulation.step_table import StepTable
from jitney.engine.simulation.workload import TraceLine, read_trace, read_trace_lines
from jitney.engine.types import EngineRequest, SamplingParams, SequenceOutput

NUMBERS = itertools.count()


def request(
    n_prompt: int = 5, arrival: float = 0.0, *, n: int = 1, tenant: str = "", priority: int = 0
) -> EngineRequest:
    return EngineRequest(
        id=f"secret-{next(NUMBERS)}",
        prompt=[77] * n_prompt,
        sampling=SamplingParams(n=n),
        arrival=arrival,
        tenant=tenant,
        priority=priority,
    )


def output(of: EngineRequest, index: int = 0, tokens: int = 0, **more: Any) -> SequenceOutput:
    return SequenceOutput(request_id=of.id, index=index, tokens=[7] * tokens, **more)


async def play(
    of: EngineRequest,
    recorder: Recorder,
    clock: FakeClock,
    said: list[tuple[float, SequenceOutput]],
) -> None:
    """Let the outputs come at their times and be listened to."""

    async def source():
        for at, one in said:
            clock.now = at
            yield one

    async for _ in RecordedStream(source(), of, recorder):
        pass


def test_lines_carry_times_and_lengths(tmp_path: Path):
    clock = FakeClock()
    clock.now = 100.0
    recorder = Recorder(tmp_path / "t.jsonl", clock)
    first, second = (
        request(5, 101.0, tenant="digest-b", priority=2),
        request(9, 100.5, tenant="digest-a"),
    )
    asyncio.run(
        play(
            first,
            recorder,
            clock,
            [
                (102.0, output(first, tokens=1, queued_s=0.25)),
                (103.5, output(first, tokens=3, finish="length")),
            ],
        )
    )
    asyncio.run(
        play(
            second,
            recorder,
            clock,
            [(104.0, output(second, tokens=2, queued_s=3.0, cached_tokens=8, finish="stop"))],
        )
    )
    recorder.close()
    assert read_trace_lines(tmp_path / "t.jsonl") == [
        TraceLine(
            at=0.5,
            n_prompt=9,
            n_output=2,
            tenant="tenant-2",
            queue_s=3.0,
            ttft_s=3.5,
            e2e_s=3.5,
            finish="stop",
            n_cached=8,
        ),
        TraceLine(
            at=1.0,
            n_prompt=5,
            n_output=4,
            tenant="tenant-1",
            priority=2,
            queue_s=0.25,
            ttft_s=1.0,
            e2e_s=2.5,
            finish="length",
        ),
    ]
    assert [arrival.n_cached for arrival in read_trace(tmp_path / "t.jsonl")] == [8, 0]
    text = (tmp_path / "t.jsonl").read_text()
    assert "secret" not in text and "digest" not in text and "77" not in text


def test_each_sequence_has_a_line_and_a_refusal_has_one(tmp_path: Path):
    clock = FakeClock()
    recorder = Recorder(tmp_path / "t.jsonl", clock)
    two, refused = request(3, n=2), request(4)
    asyncio.run(
        play(
            two,
            recorder,
            clock,
            [
                (1.0, output(two, 0, 1)),
                (1.0, output(two, 1, 1)),
                (2.0, output(two, 1, 1, finish="stop")),
                (3.0, output(two, 1, 5)),
                (4.0, output(two, 0, 2, finish="length")),
            ],
        )
    )
    asyncio.run(
        play(
            refused,
            recorder,
            clock,
            [(5.0, output(refused, finish="error", error=ErrorInfo("queue_full", "full")))],
        )
    )
    recorder.close()
    lines = sorted(read_trace_lines(tmp_path / "t.jsonl"), key=lambda line: line.e2e_s or 0)
    assert [(line.n_output, line.finish, line.ttft_s, line.e2e_s) for line in lines] == [
        (2, "stop", 1.0, 2.0),
        (3, "length", 1.0, 4.0),
        (0, "error", None, 5.0),
    ]


def serve_some(
    tmp_path: Path, script: Script, bodies: list[dict[str, Any]]
) -> tuple[FakeClient, list[TraceLine]]:
    """Send completions through the HTTP endpoint in front of a recorded fake engine."""
    client, recorder = FakeClient(script), Recorder(tmp_path / "t.jsonl")

    async def send() -> None:
        app = create_app(recording(client, recorder), ByteTokenizer(), ServerSettings(), "m")  # type: ignore[arg-type]
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://t"
        ) as http:
            await asyncio.gather(
                *(http.post("/v1/completions", json={"model": "m", **body}) for body in bodies)
            )

    asyncio.run(send())
    recorder.close()
    return client, read_trace_lines(tmp_path / "t.jsonl")


def test_through_the_endpoint_into_the_simulator(tmp_path: Path):
    bodies = [{"prompt": "x" * (3 + i), "max_tokens": 4} for i in range(5)]
    client, lines = serve_some(tmp_path, Script(text="long enough", delay_s=0.002), bodies)
    assert sorted((line.n_prompt, line.n_output, line.finish) for line in lines) == [
        (len(r.prompt), 4, "length") for r in sorted(client.requests, key=lambda r: len(r.prompt))
    ]
    for line in lines:
        assert line.queue_s == 0.01 and line.ttft_s is not None and line.e2e_s is not None
        assert 0 < line.ttft_s <= line.e2e_s < 5 and 0 <= line.at < 5
    limits = SchedulerLimits(max_seats=4, context_length=64)
    engine = EngineShape(limits, make_buckets(max_seats=4, token_budget=16), 40)
    run = simulate(read_trace(tmp_path / "t.jsonl"), engine, StepTable.constant(0.01))
    assert [t.finish for t in run.requests] == ["length"] * 5


def test_a_stop_string_is_a_stop(tmp_path: Path):
    """The text half finds it, asks the core to end the sequence and listens no more."""
    client, lines = serve_some(
        tmp_path,
        Script(text="one two three four", delay_s=0.001),
        [{"prompt": "x", "max_tokens": 18, "stop": "three"}],
    )
    assert client.aborts and [line.finish for line in lines] == ["stop"]
    assert 8 <= lines[0].n_output <= 14


def test_who_leaves_is_an_abort(tmp_path: Path):
    recorder, client = (
        Recorder(tmp_path / "t.jsonl"),
        FakeClient(Script(text="abcdefgh", delay_s=0.001)),
    )

    async def leave() -> None:
        outputs: Any = recording(client, recorder).submit(request(4, recorder.clock()))  # type: ignore[arg-type]
        await outputs.__anext__()
        await outputs.aclose()

        async def listen(stream: Any) -> None:
            async for _ in stream:
                pass

        client.script = Script(hang=True)
        task = asyncio.create_task(
            listen(recording(client, recorder).submit(request(6, recorder.clock())))
        )  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    recorder.close()
    assert [
        (line.n_prompt, line.n_output, line.finish)
        for line in read_trace_lines(tmp_path / "t.jsonl")
    ] == [(4, 1, "abort"), (6, 0, "abort")]
    assert not client.open  # the inner stream was closed too


def test_the_rest_of_the_client_shines_through(tmp_path: Path):
    client, recorder = FakeClient(), Recorder(tmp_path / "t.jsonl")
    seen = recording(client, recorder)  # type: ignore[arg-type]
    client.state = "draining"
    assert (
        seen.state == "draining" and seen.info is client.info and seen.counters is client.counters
    )
    seen.abort("r", 1, "stop")
    assert client.aborts == [("r", 1, "stop")]
    recorder.close()


def test_a_file_that_cannot_be_or_is_full_is_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be written"):
        Recorder(tmp_path / "absent" / "t.jsonl")
    (tmp_path / "t.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="holds something already"):
        Recorder(tmp_path / "t.jsonl")
    assert (tmp_path / "t.jsonl").read_text() == "{}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_is_one_warning(caplog: pytest.LogCaptureFixture):
    recorder = Recorder("/dev/full")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            recorder.ended(request(), 1, "stop", None, None)
        recorder.close()
        recorder.ended(request(), 1, "stop", None, None)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text
