"""The recorder: one line per ended sequence, with what a simulation needs and nothing that tells
who or what.
"""

from __future__ import annotations

import itertools
import logging
import resource
from pathlib import Path
from typing import Any

import pytest
from api_fakes import until
from fakes import FakeClock
from history_fakes import INFO, Watched
from step_tables import constant_table

from jitney.engine.common.errors import ConfigError, ErrorInfo
from jitney.engine.common.history import History
from jitney.engine.common.messages import SequenceEvent, StepReport
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.common.trace import Arrival, TraceLine
from jitney.engine.core.measuring.engine_shape import EngineShape
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.lab.simulation.simulator import simulate
from jitney.engine.server.process.trace_recorder import Recorder

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


def play(
    of: EngineRequest,
    recorder: Recorder,
    clock: FakeClock,
    said: list[tuple[float, SequenceOutput]],
    queue_s: float | None = None,
) -> None:
    """Let the outputs come at their times, after so long in the queue."""
    history = History(clock=clock)
    history.core_ready(INFO)
    history.listeners.append(recorder.ended)
    history.submit(of)
    if queue_s is not None:
        seated = SequenceEvent("seated", of.id, 0, 0, 0, of.arrival + queue_s, 0, 0)
        history.take(StepReport([], events=[seated]))
    for at, one in said:
        clock.now = at
        history.take(StepReport([one]))


def test_lines_carry_times_and_lengths(tmp_path: Path):
    clock = FakeClock()
    clock.now = 100.0
    recorder = Recorder(tmp_path / "t.jsonl", clock, lambda: INFO)
    first = request(5, 101.0, tenant="digest-b", priority=2)
    second = request(9, 100.5, tenant="digest-a")
    said = [
        (102.0, output(first, tokens=1)),
        (103.5, output(first, tokens=3, finish="length")),
    ]
    play(first, recorder, clock, said, queue_s=0.25)
    said = [(104.0, output(second, tokens=2, cached_tokens=8, finish="stop"))]
    play(second, recorder, clock, said, queue_s=3.0)
    recorder.close()
    assert TraceLine.read_all(tmp_path / "t.jsonl") == [
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
            model=INFO.model.name,
            device=INFO.device.name,
        ),
    ]
    assert [arrival.n_cached for arrival in Arrival.read_all(tmp_path / "t.jsonl")] == [8, 0]
    text = (tmp_path / "t.jsonl").read_text()
    assert "secret" not in text and "digest" not in text and "77" not in text


def test_each_sequence_has_a_line_and_a_refusal_has_one(tmp_path: Path):
    clock = FakeClock()
    recorder = Recorder(tmp_path / "t.jsonl", clock)
    two, refused = request(3, n=2), request(4)
    said = [
        (1.0, output(two, 0, 1)),
        (1.0, output(two, 1, 1)),
        (2.0, output(two, 1, 1, finish="stop")),
        (3.0, output(two, 1, 5)),
        (4.0, output(two, 0, 2, finish="length")),
    ]
    play(two, recorder, clock, said)
    full = ErrorInfo("queue_full", "full")
    play(refused, recorder, clock, [(5.0, output(refused, finish="error", error=full))])
    recorder.close()
    lines = sorted(TraceLine.read_all(tmp_path / "t.jsonl"), key=lambda line: line.e2e_s or 0)
    assert [(line.n_output, line.finish, line.ttft_s, line.e2e_s) for line in lines] == [
        (2, "stop", 1.0, 2.0),
        (3, "length", 1.0, 4.0),
        (0, "error", None, 5.0),
    ]


class RecordedCore(Watched):
    """A core on a fake device whose history a recorder listens to."""

    def __init__(self, path: Path):
        super().__init__()
        self.recorder = Recorder(path, self.clock)
        self.path = path
        self.history.listeners.append(self.recorder.ended)

    def lines(self) -> list[TraceLine]:
        """What was written once the work is done."""
        self.run()
        self.recorder.close()
        return TraceLine.read_all(self.path)


def test_from_the_core_into_the_simulator(tmp_path: Path):
    core = RecordedCore(tmp_path / "t.jsonl")
    for number in range(5):
        core.add(f"r{number}", [1] * (3 + number), max_tokens=4, ignore_eos=True)
    lines = core.lines()
    assert sorted((line.n_prompt, line.n_output, line.finish) for line in lines) == [
        (3 + number, 4, "length") for number in range(5)
    ]
    for line in lines:
        assert line.queue_s is not None and line.ttft_s is not None and line.e2e_s is not None
        assert 0 < line.queue_s < line.ttft_s <= line.e2e_s and line.at >= 0
    limits = SchedulerLimits(max_seats=4, context_length=64)
    engine = EngineShape(limits, Buckets.of(max_seats=4, token_budget=16), 40)
    run = simulate(Arrival.read_all(tmp_path / "t.jsonl"), engine, constant_table(0.01))
    assert [t.finish for t in run.requests] == ["length"] * 5


def test_a_stop_string_is_a_stop(tmp_path: Path):
    """The text half finds it, and asks the core to end the sequence."""
    core = RecordedCore(tmp_path / "t.jsonl")
    core.add("r", [1, 2], max_tokens=18, ignore_eos=True)
    for _ in range(9):
        core.step()
    core.core.abort("r", 0, "stop")
    (line,) = core.lines()
    assert line.finish == "stop" and 8 <= line.n_output <= 14


def test_who_leaves_is_an_abort(tmp_path: Path):
    core = RecordedCore(tmp_path / "t.jsonl")
    core.add("some", [1] * 4, max_tokens=18, ignore_eos=True)
    core.step()
    core.step()
    core.core.abort("some", None, "abort")
    core.add("none", [1] * 6, max_tokens=18, ignore_eos=True)
    core.core.abort("none", None, "abort")
    said = [(line.n_prompt, line.n_output, line.finish) for line in core.lines()]
    assert said == [(4, 1, "abort"), (6, 0, "abort")]


def test_a_dead_core_ends_every_request(tmp_path: Path):
    core = RecordedCore(tmp_path / "t.jsonl")
    core.add("r", [1, 2], max_tokens=18, ignore_eos=True)
    core.step()
    core.step()
    core.history.core_lost()
    core.recorder.close()
    (line,) = TraceLine.read_all(core.path)
    assert (line.n_output, line.finish) == (1, "error")


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
            recorder.ended(RequestRecord(number=0, n_prompt=5, arrival=0.0, finish="stop"))
        recorder.close()
        recorder.ended(RequestRecord(number=0, n_prompt=5, arrival=0.0, finish="stop"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text


def test_a_disk_that_fills_up_leaves_whole_lines_alone(tmp_path: Path):
    """The file may grow to 1,000 bytes, which is somewhere in a line."""
    path = tmp_path / "trace.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    recorder = Recorder(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        for _ in range(3):
            recorder.ended(RequestRecord(number=0, n_prompt=5, arrival=0.0, finish="stop"))
        until(lambda: path.stat().st_size > 0)
        for _ in range(50):
            recorder.ended(RequestRecord(number=0, n_prompt=5, arrival=0.0, finish="stop"))
        recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes().endswith(b"}\n")
    assert 3 <= len(TraceLine.read_all(path)) < 53
