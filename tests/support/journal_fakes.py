"""A core on a fake device and a journal that hears of it only through encoded reports."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from fakes import FakeClock, make_core, make_request

from jitney.engine import messages
from jitney.engine.telemetry.history import Journal
from jitney.engine.types import EngineInfo, SequenceOutput

INFO = EngineInfo(
    model="fake",
    context_length=64,
    vocab_size=40,
    seats=4,
    pages=32,
    page_size=4,
    token_budget=16,
    policy="continuous",
    order="fcfs",
    kernels="none",
    platform="none",
    device="none",
    dtype="float32",
    kv_dtype="float32",
    prefix_cache=True,
    version="0",
    max_waiting_requests=8,
)


class Watched:
    """A core and a journal that hears of it only through encoded reports."""

    def __init__(self, **core: Any):
        self.clock = FakeClock(0.001)
        self.core = make_core(clock=self.clock, **core)
        self.journal = Journal(clock=self.clock)
        self.journal.core_ready(
            msgspec.structs.replace(INFO, policy=core.get("policy", INFO.policy))
        )
        self.outputs: list[SequenceOutput] = []

    def run(self) -> None:
        """Step until there is no work."""
        while self.core.has_work:
            self.step()

    def add(self, id: str, prompt: list[int], **sampling) -> None:
        request = make_request(id, prompt, arrival=self.clock(), **sampling)
        self.journal.submit(request)
        self.core.add(request)

    def step(self) -> None:
        report = messages.decode_from_core(messages.encode(self.core.step()))
        assert isinstance(report, messages.StepReport)
        self.outputs += report.outputs
        self.journal.take(report)

    def agree(self) -> None:
        """What the journal says of the seats is what the scheduler knows."""
        roster = self.core.scheduler.roster
        seated = {seq.seat: seq for seq in (*roster.prefilling, *roster.decoding)}
        assert self.journal.held == set(roster.kept)
        for seat, trip in enumerate(self.journal.seats):
            if seat in self.journal.held:
                continue
            seq = seated.get(seat)
            assert (trip is None) == (seq is None), seat
            if trip is not None and seq is not None:
                assert (trip.request, trip.index, trip.seat) == (seq.request.id, seq.index, seat)
                assert (trip.n_output, trip.preemptions) == (seq.n_output, seq.preemptions)
                assert trip.state in ("prefill", "decode") and trip.n_computed <= seq.scheduled
        assert self.journal.n_waiting == roster.n_waiting


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
