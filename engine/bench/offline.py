"""Runs in this process: one set of compiled programs, and for each run a scheduler, page pool and
core of its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jitney.engine.bench.load import Watch
from jitney.engine.bench.text import arrival_ids
from jitney.engine.core import EngineCore, Runner
from jitney.engine.errors import ConfigError
from jitney.engine.records import STEP_DTYPE, Ledger
from jitney.engine.scheduler.admission import SchedulerLimits
from jitney.engine.scheduler.kv_pages import PagePool
from jitney.engine.scheduler.plan import Plan, StepResult
from jitney.engine.scheduler.scheduler import Scheduler
from jitney.engine.simulation.accuracy import MeasuredRun, RunNote
from jitney.engine.simulation.run_log import LOOK_AGAIN_S, Conductor, Ride
from jitney.engine.simulation.simulator import EngineShape
from jitney.engine.simulation.workload import Arrival
from jitney.engine.telemetry.cost import Riders
from jitney.engine.telemetry.summary import RequestTimes, Slo, seated, summarise
from jitney.engine.types import EngineRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class PromptedArrival:
    """An arrival and the prompt ids it brings."""

    arrival: Arrival
    prompt: list[int]


@dataclass(slots=True)
class OfflineRun:
    """One run. times: in order of the requests, seconds of time.monotonic(); tokens: output ids of
    each request.

    records: [steps] STEP_DTYPE. rides: who sat where and when, first_token None if it came in
    another ride. started: the zero of the arrivals' times. seconds: from the first arrival to the
    last end. shape: the engine that ran. concurrency: requests that a closed loop kept open, 0:
    they came at their times.
    """

    times: list[RequestTimes]
    tokens: list[list[int]]
    records: np.ndarray
    rides: list[Ride]
    riders: Riders
    started: float
    seconds: float
    shape: EngineShape
    concurrency: int = 0

    @property
    def limits(self) -> SchedulerLimits:
        """What the scheduler was held to."""
        return self.shape.limits

    @property
    def as_measured(self) -> MeasuredRun:
        """The run as the simulator compares it with a prediction."""
        return MeasuredRun(
            self.times, self.records, self.rides, RunNote(self.shape, self.concurrency)
        )

    def figures(
        self, slo: Slo | None = None, price_per_hour: float | None = None
    ) -> dict[str, Any]:
        """As `engine.telemetry.summary.summarise`."""
        return summarise(
            self.times,
            records=self.records,
            seats=self.limits.max_seats,
            seconds=self.seconds,
            seated_s=seated(self.rides),
            slo=slo,
            price_per_hour=price_per_hour,
        )


class Watched:
    """A runner that lets the books be kept: every plan passes through `batch`."""

    def __init__(self, runner: Runner, book: Conductor, riders: Riders, clock: Callable[[], float]):
        self._runner, self._book, self._riders, self._clock = runner, book, riders, clock
        self.launched = 0

    @property
    def compiles(self) -> int:
        return self._runner.compiles

    def batch(self, plan: Plan) -> Any:
        self._book.planned(plan, self._clock())
        self._riders.note(plan)
        return self._runner.batch(plan)

    def launch(self, batch: Any) -> Any:
        self.launched += 1
        return self._runner.launch(batch)

    def fetch(self, ticket: Any) -> StepResult:
        return self._runner.fetch(ticket)


class OfflineBench:
    """Measures traffic on an engine of this process, given its core and how its text becomes ids.

    The engine must be idle. Every run starts with empty pages; what differs between runs is said to
    `run`. sleep: passes so many seconds of the clock.
    """

    def __init__(
        self,
        core: EngineCore,
        encode: Callable[[str], list[int]],
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._core, self._encode, self._sleep = core, encode, sleep
        self.clock = core.clock
        self.limits = core.scheduler.limits
        pool = core.scheduler.pool
        self.shape = EngineShape(self.limits, core.scheduler.buckets, pool.n_pages, pool.page_size)

    def requests(self, arrivals: Sequence[Arrival], seed: int = 0) -> list[PromptedArrival]:
        """The arrivals with prompts of exactly their lengths. ConfigError if one does not fit the
        engine.
        """
        pool = self._core.scheduler.pool
        most = min(self.limits.context_length, pool.capacity * pool.page_size + 1)
        for number, arrival in enumerate(arrivals):
            if arrival.n_prompt + arrival.n_output > most:
                raise ConfigError(
                    f"request {number} has {arrival.n_prompt} prompt and {arrival.n_output} output "
                    f"tokens, a sequence here {most} at most: lower the lengths or give more pages"
                )
        return [
            PromptedArrival(arrival, arrival_ids(self._encode, arrival, number, seed))
            for number, arrival in enumerate(arrivals)
        ]

    def warm_up(self, requests: Sequence[PromptedArrival], seconds: float = 2.0) -> None:
        """Run some of the requests for about so long, for caches and clock frequencies; nothing of
        it is kept.
        """
        until = self.clock() + seconds
        while self.clock() < until:
            short = [
                replace(r, arrival=Arrival(0.0, r.arrival.n_prompt, min(8, r.arrival.n_output)))
                for r in requests[: self.limits.max_seats]
            ]
            self.run(short)

    def run(
        self,
        requests: Sequence[PromptedArrival],
        *,
        concurrency: int = 0,
        watch: Watch = lambda done, total: None,
        **limits: Any,
    ) -> OfflineRun:
        """Serve the requests (ascending in time) and take everything down.

        concurrency: a closed loop, in which a request comes when fewer than so many are open; 0: by
        their times. limits: fields of SchedulerLimits that differ from the engine's. Raises
        ConfigError for impossible limits.
        """
        book, riders = Conductor(keep_tokens=True), Riders()
        runner = Watched(self._core.runner, book, riders, self.clock)
        core = self._fresh(runner, requests, limits)
        tokens: list[list[int]] = [[] for _ in requests]
        gc.collect()
        started = self.clock()
        records = self._drive(core, runner, book, requests, tokens, started, concurrency, watch)
        seconds = max(times.finished for times in book.times) - min(
            times.arrival for times in book.times
        )
        core.check()
        return OfflineRun(
            book.times,
            tokens,
            np.frombuffer(b"".join(records), STEP_DTYPE),
            [Ride(*ride) for ride in book.rides],
            riders,
            started,
            seconds,
            replace(self.shape, limits=core.scheduler.limits),
            concurrency,
        )

    def _fresh(
        self, runner: Watched, requests: Sequence[PromptedArrival], limits: dict[str, Any]
    ) -> EngineCore:
        """A core as the engine's own, with other limits; nobody is refused for the length of the
        queue.
        """
        own, old = self._core.scheduler, self._core.scheduler.pool
        open_door = {
            "max_waiting_requests": len(requests) + 1,
            "max_predicted_wait_s": 0.0,
            "max_waiting_tokens": sum(len(r.prompt) for r in requests) + 1,
        }
        scheduler = Scheduler(
            replace(own.limits, **open_door, **limits),
            own.buckets,
            PagePool(old.n_pages, old.page_size, retain=old.retain),
            self.clock,
        )
        return EngineCore(scheduler, runner, Ledger(capacity=1), self.clock)

    def _drive(
        self,
        core: EngineCore,
        runner: Watched,
        book: Conductor,
        requests: Sequence[PromptedArrival],
        tokens: list[list[int]],
        started: float,
        concurrency: int,
        watch: Watch,
    ) -> list[bytes]:
        """The loop of the core's process: take in who has come, step, hand out; returns the step
        records.
        """
        clock, records, coming, total = self.clock, [], 0, len(requests)
        while coming < total or core.has_work:
            while coming < total and self._comes(
                requests[coming], book.n_open, concurrency, started
            ):
                at = clock() if concurrency else started + requests[coming].arrival.at
                core.add(
                    _engine_request(
                        book.enter(coming, requests[coming].arrival, at), requests[coming], at
                    )
                )
                coming += 1
            core.scheduler.more_to_come = not concurrency and coming < total
            if not core.has_work:
                self._sleep(max(0.0, started + requests[coming].arrival.at - clock()))
                continue
            launched = runner.launched
            report = core.step()
            for output in report.outputs:
                tokens[int(output.request_id)] += output.tokens
            if report.outputs:
                book.took(report.outputs, clock())
                watch(coming - book.n_open, total)
            if report.record:
                records.append(report.record)
            elif launched == runner.launched and not report.outputs:
                self._sleep(LOOK_AGAIN_S)
        return records

    def _comes(
        self, request: PromptedArrival, n_open: int, concurrency: int, started: float
    ) -> bool:
        return n_open < concurrency if concurrency else started + request.arrival.at <= self.clock()


def _engine_request(name: str, request: PromptedArrival, at: float) -> EngineRequest:
    """A greedy request that ends by length alone."""
    arrival = request.arrival
    sampling = SamplingParams(
        temperature=0.0, seed=0, max_tokens=max(1, arrival.n_output), ignore_eos=True
    )
    return EngineRequest(
        id=name,
        prompt=request.prompt,
        sampling=sampling,
        arrival=at,
        tenant=arrival.tenant,
        priority=arrival.priority,
    )
