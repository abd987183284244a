"""A replica of a simulated fleet: the engine's scheduler on a virtual device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from jitney.engine.common.errors import RequestError
from jitney.engine.common.history import RequestRecords
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.requests import EngineRequest
from jitney.engine.common.trace import Arrival
from jitney.engine.core import EngineCore, EngineShape, StepTimes, VirtualDevice
from jitney.engine.fleet import Replica
from jitney.engine.lab.simulation.drive import step_or_wait

SimulatedState = Literal["starting", "ready", "recovering", "draining"]


def fleet_request(number: int, arrival: Arrival) -> EngineRequest:
    """Request `number` of the traffic. Prompts of one conversation have the same prefix, and all
    conversations share their first `n_shared` tokens; other prompts have a unique prefix.
    """
    n_shared = arrival.n_shared if arrival.conversation else 0
    own = 2 * arrival.conversation if arrival.conversation else 2 * number + 1
    prompt = [0] * min(n_shared, arrival.n_prompt) + [1 + own] * (arrival.n_prompt - n_shared)
    return arrival.request(str(number), prompt, arrival.at)


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """A replica with its own clock. Call `advance` with the current time before any other method.

    clock: the clock of the ingress.
    """

    name: str
    state: SimulatedState
    clock: Callable[[], float]
    shape: EngineShape
    table: StepTimes
    #: Whether the engine has a prefix cache.
    prefix_cache: bool
    #: Last predicted wait of the engine for a new request, seconds.
    wait_s: float = 0.0
    #: The replica's state at the ingress.
    known: Replica = field(init=False)
    device: VirtualDevice = field(init=False)
    core: EngineCore = field(init=False)
    _records: RequestRecords = field(init=False)
    #: Requests without an end, by id.
    _open: dict[str, EngineRequest] = field(default_factory=dict[str, EngineRequest])
    _ended: list[RequestRecord] = field(default_factory=list[RequestRecord])

    def __post_init__(self) -> None:
        self.known = Replica(self.name, clock=self.clock, seats=self.shape.limits.max_seats)
        self.become(self.state)
        self._start_core(0.0)

    def become(self, state: SimulatedState) -> None:
        """Change the state. The ingress learns at once whether it takes requests."""
        self.state = state
        self.known.state = "ready" if state == "ready" else "unready"
        self.known.changed()

    def report(self) -> None:
        """Report to the ingress the values that a real engine has in /metrics."""
        self.known.running = float(self.n_open)
        self.known.wait_s = self.wait_s
        self.known.open_then = self.known.open
        self.known.changed()

    def _start_core(self, now: float) -> None:
        self.device = VirtualDevice(self.table)
        self.device.clock.now = now
        self.core = self.device.new_core(self.shape, retain=self.prefix_cache)
        self._records = RequestRecords(listeners=[self._end])
        self._open.clear()
        self.wait_s = 0.0

    def _end(self, record: RequestRecord) -> None:
        del self._open[record.request_id]
        self._ended.append(record)

    @property
    def n_open(self) -> int:
        """Number of requests without an end."""
        return len(self._open)

    def take_ended(self) -> list[RequestRecord]:
        """Records of requests that ended since the last call, which are reported to the ingress."""
        ended, self._ended = self._ended, []
        for record in ended:
            self.known.end(record.end - record.arrival)
        return ended

    def add(self, request: EngineRequest) -> bool:
        """Submit a request; returns False if the engine refuses it."""
        try:
            self.core.scheduler.add(request)
        except RequestError:
            return False
        self._records.submit(request)
        self._open[request.id] = request
        return True

    def advance(self, until: float) -> None:
        clock = self.device.clock
        while self.core.has_work and clock.now < until:
            report = step_or_wait(self.core, clock, until)
            if report is None:
                continue
            self.device.reported(report)
            self._records.apply(report, self.core.scheduler.steps, clock.now)
            if report.predicted_wait is not None:
                self.wait_s = report.predicted_wait
        if not self.core.has_work:
            clock.now = max(clock.now, until) if until < math.inf else clock.now
            self.wait_s = 0.0

    def lose_core(self, back_at: float) -> list[RequestRecord]:
        """Lose the core. Its requests continue in a new one that is ready at `back_at`.

        Returns their records so far.
        """
        records, requests = self._lose(back_at)
        for record, request in zip(records, requests, strict=True):
            done = len(request.resumed[0] or ()) if request.resumed else 0
            resumed: list[list[int] | None] = [[0] * (done + record.n_output)]
            self.add(msgspec.structs.replace(request, resumed=resumed))
        return records

    def lose_machine(self) -> tuple[list[RequestRecord], list[EngineRequest]]:
        """Lose the machine. Returns records so far, and requests to start on another replica."""
        records, requests = self._lose(self.device.clock.now)
        return records, [msgspec.structs.replace(request, resumed=None) for request in requests]

    def _lose(self, back_at: float) -> tuple[list[RequestRecord], list[EngineRequest]]:
        requests = list(self._open.values())
        records = [record for record in self._records.open()]
        self._start_core(back_at)
        return records, requests
