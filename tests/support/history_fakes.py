"""A core on a fake device, and a history that receives only the core's encoded reports."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import numpy as np
from engine_infos import changed, engine_info
from fakes import FakeClock, make_core, make_request, tokens_of

from jitney.engine.common import messages
from jitney.engine.common.history import History
from jitney.engine.common.messages import SequenceEvent
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.records import STEP_DTYPE

INFO = engine_info()


class Watched:
    """A core, and a history that receives only the core's encoded reports."""

    def __init__(self, **core: Any):
        self.clock = FakeClock(0.001)
        self.core = make_core(clock=self.clock, **core)
        self.history = History(clock=self.clock)
        self.history.core_ready(changed(INFO, policy=core.get("policy", INFO.queue.policy)))
        self.outputs: list[SequenceOutput] = []

    def outputs_of(self, request_id: str, index: int) -> list[int]:
        """The output tokens of a sequence."""
        return tokens_of(self.outputs, request_id, index)

    def run(self) -> None:
        """Step until there is no work."""
        while self.core.has_work:
            self.step()

    def add(self, id: str, prompt: list[int], **sampling) -> None:
        request = make_request(id, prompt, arrival=self.clock(), **sampling)
        self.history.submit(request)
        self.core.add(request)

    def step(self) -> None:
        report = msgspec.msgpack.decode(messages.encode(self.core.step()), type=messages.FromCore)
        assert isinstance(report, messages.StepReport)
        self.outputs += report.outputs
        self.history.take(report)

    def agree(self) -> None:
        """Assert that the history and the scheduler agree about the seats."""
        seats = self.core.scheduler.sequences.seats
        seated = {seq.seat: seq for seq in seats.taken}
        assert self.history.held_seats == set(seats.kept)
        for seat, request in enumerate(self.history.seats):
            if seat in self.history.held_seats:
                continue
            seq = seated.get(seat)
            assert (request is None) == (seq is None), seat
            if request is not None and seq is not None:
                assert (request.request_id, request.index, request.seat) == (
                    seq.request.id,
                    seq.index,
                    seat,
                )
                assert (request.n_output, request.preemptions) == (seq.n_output, seq.preemptions)
                assert (
                    request.state in ("prefill", "decode") and request.n_computed <= seq.scheduled
                )
        assert self.history.n_waiting == self.core.scheduler.n_waiting


def random_run(seed: int, **core: Any) -> Watched:
    rng = random.Random(seed)
    watched = Watched(**core)
    for number in range(200):
        if rng.random() < 0.4:
            prompt = [rng.randrange(40) for _ in range(rng.randint(1, 20))]
            watched.add(
                f"r{number}",
                prompt,
                n=rng.choice((1, 1, 1, 3)),
                max_tokens=rng.randint(1, 20),
                ignore_eos=rng.random() < 0.5,
                seed=rng.randrange(99),
            )
        if rng.random() < 0.05:
            watched.core.abort(f"r{rng.randrange(number + 1)}")
        if watched.core.has_work:
            watched.step()
            watched.agree()
    watched.run()
    watched.agree()
    return watched


def long_history(n_requests: int, n_steps: int, seats: int) -> History:
    """A history of the last five minutes: short requests, one after another in every seat. A
    history keeps twice as long, so that slow tests still see all of them.
    """
    start = time.monotonic() - 300
    history = History()
    history.core_ready(changed(INFO, seats=seats))
    step_s = 300 / n_steps
    record = np.zeros(1, STEP_DTYPE)
    record["device_s"], record["seats"] = 0.9 * step_s, seats
    number = 0
    for step in range(n_steps):
        t = start + step * step_s
        outputs: list[SequenceOutput] = []
        events: list[SequenceEvent] = []
        while number < n_requests * (step + 1) // n_steps:
            request = make_request(f"request-{number:025d}", [1, 2, 3], arrival=t - 0.1)
            history.submit(request)
            events.append(SequenceEvent("seated", request.id, 0, number % seats, step, t, 0, 0))
            outputs.append(
                SequenceOutput(request_id=request.id, index=0, tokens=[5], finish="length")
            )
            number += 1
        record["step"], record["started"], record["decode"] = step, t, len(outputs)
        history.take(messages.StepReport([], events=events))
        history.take(messages.StepReport(outputs, record=record.tobytes()))
    return history
