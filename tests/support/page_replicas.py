"""Many scripted engines behind one server, for tests and measurements of a fleet's dashboard."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from engine_infos import engine_info
from starlette.applications import Starlette
from starlette.routing import Mount

from jitney.dashboard import Dashboard
from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.common.errors import RequestError
from jitney.engine.common.history import History
from jitney.engine.common.messages import SeatMap, SequenceEvent, StepReport
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import EngineRequest, JsonDict, SamplingParams
from jitney.engine.fleet.rollout.comparison import ARMS, Comparison, RequestOutcome
from jitney.engine.fleet.rollout.rollout import KeyPlace, PromotionRule, Rollout
from jitney.engine.lab.policy_lab import Lab
from jitney.engine.server.http.errors import HttpError
from jitney.engine.server.http.settings import ServerSettings
from jitney.engine.server.process.counters import EngineCounters


class FakeReplica:
    """An engine whose sequences take and leave seats at random, when a test calls `move`."""

    def __init__(self, seats: int = 8, seed: int = 0, pages: int = 400, model: str = "scripted"):
        self.info: EngineInfo | None = _info(seats, pages, model)
        self.history = History()
        self.history.core_ready(self.info)
        self.counters = EngineCounters()
        self.state = "ready"
        self.progress: Any = None
        self.age = 0.0
        self._rng = random.Random(seed)
        self._n = 0

    def last_step_age(self) -> float:
        return self.age

    async def page_map(self) -> SeatMap:
        return SeatMap(0, [], bytes(101))

    def take_seat(self, seat: int, n_prompt: int, n_output: int, max_tokens: int) -> None:
        """Seat a sequence with `n_output` tokens written; at 0 it is still in prefill."""
        now, self._n = time.monotonic(), self._n + 1
        name = f"r{self._n}"
        sampling = SamplingParams(max_tokens=max_tokens)
        request = EngineRequest(id=name, prompt=[1] * n_prompt, sampling=sampling, arrival=now)
        self.history.submit(request)
        event = SequenceEvent("seated", name, 0, seat, 0, now, 0, 0)
        self.history.take(StepReport([], events=[event]))
        self.write(seat, n_output)

    def write(self, seat: int, n_tokens: int) -> None:
        """Add output tokens to the seat's sequence, which leaves after its last token."""
        record = self.history.seats[seat]
        assert record is not None
        if not n_tokens:
            return
        ends = record.n_output + n_tokens >= record.max_tokens
        output = SequenceOutput(
            request_id=record.request_id,
            index=record.index,
            tokens=[1] * n_tokens,
            finish="length" if ends else None,
        )
        self.history.take(StepReport([output]))
        self.counters.rows["decode"] += n_tokens

    def move(self, tokens: int = 4) -> None:
        """Advance time: all sequences write tokens, and new ones may take free seats."""
        for seat, record in enumerate(self.history.seats):
            if record is not None:
                self.write(seat, tokens)
            elif self._rng.random() < 0.7:
                self.take_seat(seat, 40, 0, self._rng.randint(20, 200))
                self.counters.rows["prefill"] += 40
        self.counters.waiting = max(0, self.counters.waiting + self._rng.randint(-2, 2))
        self.counters.predicted_wait = 0.3 * self.counters.waiting


def _info(seats: int, pages: int, model: str) -> EngineInfo:
    words = dict.fromkeys(("order", "kernels", "platform", "device", "dtype", "kv_dtype"), "fake")
    numbers = {"context_length": 2048, "vocab_size": 1000, "token_budget": 64, "page_size": 16}
    return engine_info(
        model=model, seats=seats, pages=pages, max_waiting_requests=256, **words, **numbers
    )


def engines_app(clients: Mapping[str, Any], settings: ServerSettings | None = None) -> Starlette:
    """An app with every engine under its own path: /NAME/dashboard."""
    pages = [
        Mount(
            f"/{name}/dashboard",
            Dashboard(client, settings or ServerSettings(), lab=Lab(client, None)).to_mount(),
        )
        for name, client in clients.items()
    ]
    return Starlette(routes=pages)


def urls_of(clients: Mapping[str, Any], base: str) -> dict[str, str]:
    return {name: f"{base}/{name}" for name in clients}


class FakeRollouts:
    """Rollouts whose requests a test makes up. decided: (model, action) of each decision."""

    def __init__(self, **rollouts: Rollout):
        self.rollouts = rollouts
        self.decided: list[tuple[str, str]] = []

    def reports(self) -> list[JsonDict]:
        return [self._report(rollout) for rollout in self.rollouts.values()]

    def _report(self, rollout: Rollout) -> JsonDict:
        report = rollout.report()
        for arm in report["arms"]:
            report["arms"][arm]["replicas"] = [f"{arm}-0"]
        return report

    async def decide(self, model: str, action: str) -> None:
        if model not in self.rollouts:
            raise HttpError(404, f"no candidate of a model {model}", code="not_found")
        if action not in ("promote", "roll_back", "restart"):
            raise RequestError("must be promote, roll_back or restart", param="action")
        self.decided.append((model, action))
        self.rollouts[model].decide(action)


def rollout_of(
    model: str, candidate: str, slower: float, requests: int, clock: Callable[[], float] = time.time
) -> Rollout:
    """A rollout with `requests` requests per arm; the candidate's take `slower` times as long."""
    rollout, rng = Rollout(model, candidate, PromotionRule(), clock), random.Random(0)
    for number in range(requests):
        for arm, times in zip(ARMS, (1.0, slower), strict=True):
            seconds = times * rng.uniform(0.9, 1.1)
            place = KeyPlace(arm, number % Comparison.clusters)
            rollout.observe(place, RequestOutcome(True, 100, 2 * seconds, 0.2 * seconds))
    return rollout
