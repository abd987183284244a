"""The core's loop while a step runs: whoever comes is taken in before the next one is planned."""

from __future__ import annotations

import threading

import msgspec
import pytest
import zmq
from process_core import Core

from jitney.engine.common import messages
from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.core import process as main

_WAIT_S = 30.0
_ONE_TOKEN = SamplingParams(max_tokens=1)


class _PatientCore(Core):
    """Has company for so long as only one request is here."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = threading.Event()
        self.company: list[int] = []

    @property
    def late_plan_slack_s(self) -> float:
        if len(self.rows) != 1 or self.steps:
            return 0.0
        self.looked.set()
        return _WAIT_S

    @property
    def pause_s(self) -> float:
        return self.late_plan_slack_s

    def step(self) -> messages.StepReport:
        self.company.append(len(self.rows))
        return super().step()


@pytest.fixture
def ends():
    """(the core's inbox, its outbox, what the others have of them)."""
    context = zmq.Context()
    sockets = []
    for name in ("to", "from"):
        for kind, join in ((zmq.PULL, "bind"), (zmq.PUSH, "connect")):
            socket = context.socket(kind)
            getattr(socket, join)(f"inproc://{name}")
            sockets.append(socket)
    yield sockets
    context.destroy(linger=0)


@pytest.fixture
def served(ends, monkeypatch):
    """(a core that is served until the test is over, where it is told, where it tells)."""
    monkeypatch.setattr(main, "_freeze", lambda: None)
    inbox, to_core, from_core, outbox = ends
    core = _PatientCore()

    def send(message: messages.FromCore) -> None:
        outbox.send(messages.encode(message))

    loop = threading.Thread(target=main._serve, args=(core, inbox, send), daemon=True)
    loop.start()
    yield core, to_core, from_core
    to_core.send(messages.encode(messages.Shutdown()))
    loop.join(_WAIT_S)
    assert not loop.is_alive()


def test_whoever_comes_while_there_is_time_is_in_the_same_plan(served):
    core, to_core, from_core = served
    for name in ("first", "second"):
        request = EngineRequest(id=name, prompt=[1, 2], sampling=_ONE_TOKEN, arrival=0.0)
        to_core.send(messages.encode(messages.Add(request)))
        assert core.looked.wait(_WAIT_S)
    ended = set()
    while len(ended) < 2:
        assert from_core.poll(1000 * _WAIT_S), "both are answered"
        report = msgspec.msgpack.decode(from_core.recv(), type=messages.FromCore)
        if isinstance(report, messages.StepReport):
            ended |= {output.request_id for output in report.outputs if output.finish}
    assert core.company[0] == 2


def test_whoever_leaves_while_a_step_runs_is_heard_of_before_the_next(served):
    core, to_core, from_core = served
    request = EngineRequest(id="first", prompt=[1, 2], sampling=_ONE_TOKEN, arrival=0.0)
    to_core.send(messages.encode(messages.Add(request)))
    assert core.looked.wait(_WAIT_S)
    to_core.send(messages.encode(messages.Abort("first")))
    report = None
    while not isinstance(report, messages.StepReport):
        assert from_core.poll(1000 * _WAIT_S), "the end is told"
        report = msgspec.msgpack.decode(from_core.recv(), type=messages.FromCore)
    assert [(output.request_id, output.finish) for output in report.outputs] == [("first", "abort")]
    assert core.steps == 0
