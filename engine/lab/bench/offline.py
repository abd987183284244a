"""Runs in this process: one set of compiled programs, and for each run a scheduler, page pool and
core of its own.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.history import RequestRecords
from jitney.engine.common.records import Ledger
from jitney.engine.common.request_record import RequestRecord, SeatStay, stays_of
from jitney.engine.common.requests import EngineRequest, JsonDict
from jitney.engine.common.summary import summarise
from jitney.engine.common.trace import Arrival
from jitney.engine.core import (
    Bill,
    EngineCore,
    MaskedRow,
    PagePool,
    Plan,
    RowOwners,
    Scheduler,
    SchedulerLimits,
    StepResult,
    StepRunner,
)
from jitney.engine.lab.bench.load import Watch
from jitney.engine.lab.bench.text import arrival_ids
from jitney.engine.lab.simulation.accuracy import MeasuredRun, RunNote
from jitney.engine.lab.simulation.drive import Offer, StepLog, drive
from jitney.engine.lab.simulation.engine_shape import EngineShape
from jitney.engine.lab.simulation.simulator import span

#: Requests that the capacity is measured with, for each seat.
_CAPACITY_ROUNDS = 4
#: Limits with which a scheduler refuses nobody, but for those of how many may wait.
_NO_REFUSALS = {"max_predicted_wait_s": 0.0, "max_waiting_tokens": 2**31 - 1}


@dataclass(frozen=True, slots=True)
class PromptedArrival:
    """An arrival and the prompt ids it brings."""

    arrival: Arrival
    prompt: list[int]


@dataclass(slots=True)
class OfflineRun:
    """One run."""

    #: In order of the arrivals, with their stays; seconds of time.monotonic().
    requests: list[RequestRecord]
    #: Output ids of each request.
    tokens: list[list[int]]
    #: STEP_DTYPE [steps].
    records: np.ndarray
    #: Whose rows each step computed.
    owners: RowOwners
    #: The zero of the arrivals' times.
    started: float
    #: From the first arrival to the last end.
    seconds: float
    #: The engine that ran.
    shape: EngineShape
    #: Requests that a closed loop kept open, 0: they came at their times.
    concurrency: int = 0

    @property
    def stays(self) -> list[SeatStay]:
        """Who sat where, by the beginning of each stay."""
        return stays_of(self.requests)

    @property
    def limits(self) -> SchedulerLimits:
        """What the scheduler was held to."""
        return self.shape.limits

    @property
    def costs(self) -> Bill:
        """What its device time was spent on."""
        free = self.shape.buckets.padding_is_free
        return Bill.of_steps(self.records, self.seconds, padding_is_free=free)

    @property
    def request_shares(self) -> Bill:
        """What each request took of it."""
        free = self.shape.buckets.padding_is_free
        shares, _ = self.owners.bill(self.records, padding_is_free=free)
        return shares

    @property
    def as_measured(self) -> MeasuredRun:
        """The run as the simulator compares it with a prediction."""
        return MeasuredRun(self.requests, self.records, RunNote(self.shape, self.concurrency))

    def figures(self, **options: Any) -> JsonDict:
        """As `summary.summarise`; options: its slo and price_per_hour."""
        return summarise(
            self.requests,
            records=self.records,
            seats=self.limits.max_seats,
            seconds=self.seconds,
            **options,
        )


#: Runs by the policy's name.
type PolicyRuns = Mapping[str, OfflineRun]


#: Called with what runs (a policy, or "capacity"), and how many of how many requests have ended.
type NamedWatch = Callable[[str, int, int], None]


class _NotingRunner:
    """A runner that notes whose rows each step computes."""

    def __init__(self, runner: StepRunner, owners: RowOwners):
        self._runner = runner
        self._owners = owners

    @property
    def compiles(self) -> int:
        return self._runner.compiles

    def batch(self, plan: Plan) -> Any:
        self._owners.note(plan)
        return self._runner.batch(plan)

    def launch(self, batch: Any) -> Any:
        return self._runner.launch(batch)

    def choose(self, launched: Any, rows: list[MaskedRow], masks: Any) -> None:
        self._runner.choose(launched, rows, masks)

    def fetch(self, launched: Any) -> StepResult:
        return self._runner.fetch(launched)

    def restore(self, error: Exception) -> None:
        """A run with a step that failed measures nothing."""
        raise error

    def sleep(self, alive: Callable[[], None]) -> int:
        return self._runner.sleep(alive)

    def wake(self, alive: Callable[[], None]) -> None:
        self._runner.wake(alive)


@dataclass(frozen=True, slots=True)
class _RealClock:
    """A clock that is read, and waited on by sleeping."""

    read: Callable[[], float]
    sleep: Callable[[float], None]

    def __call__(self) -> float:
        return self.read()

    def wait_until(self, t: float) -> None:
        self.sleep(max(0.0, t - self.read()))


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
        self.shape = EngineShape(
            self.limits,
            core.scheduler.buckets,
            pool.n_pages,
            pool.page_size,
            plans_late=core.plans_late,
        )

    def requests(self, arrivals: Sequence[Arrival], seed: int = 0) -> list[PromptedArrival]:
        """The arrivals with prompts of exactly their lengths. ConfigError if one does not fit the
        engine.
        """
        return [self._prompted(arrival, n, seed) for n, arrival in enumerate(arrivals)]

    @property
    def _most_tokens(self) -> int:
        """Of a sequence."""
        pool = self._core.scheduler.pool
        return min(self.limits.context_length, pool.capacity * pool.page_size + 1)

    def _prompted(self, arrival: Arrival, number: int, seed: int) -> PromptedArrival:
        _check_length(number, arrival, self._most_tokens)
        return PromptedArrival(arrival, arrival_ids(self._encode, arrival, number, seed))

    def warm_up(self, requests: Sequence[PromptedArrival], seconds: float = 2.0) -> None:
        """Run some of the requests for about so long, for caches and clock frequencies; nothing of
        it is kept.
        """
        short = list(map(_shortened, requests[: self.limits.max_seats]))
        until = self.clock() + seconds
        while self.clock() < until:
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
        owners = RowOwners()
        core = self._fresh(_NotingRunner(self._core.runner, owners), len(requests), limits)
        records = _watched_records(watch, len(requests))
        gc.collect()
        started = self.clock()
        offer = _offer_of(requests, started, concurrency)
        log = drive(core, _RealClock(self.clock, self._sleep), offer, records)
        core.check()
        shape = replace(self.shape, limits=core.scheduler.limits)
        return _run_of(list(records.oldest()), log, owners, started, shape, concurrency)

    def run_policies(
        self,
        requests: Sequence[PromptedArrival],
        policies: Sequence[str],
        *,
        concurrency: int = 0,
        watch: NamedWatch = lambda policy, done, total: None,
        **limits: Any,
    ) -> dict[str, OfflineRun]:
        """Serve the same requests once under each policy, in that order. limits: as in `run`, for
        all of them.
        """
        runs = {}
        for policy in policies:
            runs[policy] = self.run(
                requests,
                concurrency=concurrency,
                policy=policy,
                watch=partial(watch, policy),
                **limits,
            )
        return runs

    def capacity(
        self,
        arrivals: Sequence[Arrival],
        seats: int,
        *,
        seed: int = 0,
        watch: NamedWatch = lambda policy, done, total: None,
    ) -> tuple[float, OfflineRun]:
        """(requests a second that continuous batching serves when there is always a next one, the
        run that showed it).

        Measured on four requests for each seat, the first again after the last, as a closed loop
        with twice as many open as seats. seed: as in `requests`.
        """
        coming = _again_and_again(arrivals, _CAPACITY_ROUNDS * seats)
        run = self.run(
            self.requests(coming, seed),
            concurrency=2 * seats,
            policy="continuous",
            watch=partial(watch, "capacity"),
        )
        mean = sum(arrival.n_output for arrival in arrivals) / len(arrivals)
        return _tokens_while_full(run, seats) / mean, run

    def _fresh(self, runner: StepRunner, requests: int, limits: JsonDict) -> EngineCore:
        """A core as the engine's own, with other limits; nobody is refused for the length of the
        queue.
        """
        own = self._core.scheduler
        open_door = {"max_waiting_requests": requests + 1, **_NO_REFUSALS}
        changed = replace(own.limits, **open_door, **limits)
        scheduler = Scheduler(changed, own.buckets, _empty_like(own.pool), self.clock)
        late = self._core.plans_late
        return EngineCore(scheduler, runner, Ledger(capacity=1), self.clock, plans_late=late)


def _run_of(
    served: list[RequestRecord],
    log: StepLog,
    owners: RowOwners,
    started: float,
    shape: EngineShape,
    concurrency: int,
) -> OfflineRun:
    tokens = list(map(_output_of, served))
    seconds = span(served)
    return OfflineRun(
        requests=served,
        tokens=tokens,
        records=log.records,
        owners=owners,
        started=started,
        seconds=seconds,
        shape=shape,
        concurrency=concurrency,
    )


def _watched_records(watch: Watch, total: int) -> RequestRecords:
    """With tokens and their times; `watch` is told of every end."""
    records = RequestRecords(keep_tokens=True, keep_times=True)
    ended = itertools.count(1)
    records.listeners.append(lambda record: watch(next(ended), total))
    return records


def _empty_like(pool: PagePool) -> PagePool:
    return PagePool(
        pool.n_pages, pool.page_size, retain=pool.retain, share_outputs=pool.share_outputs
    )


def _check_length(number: int, arrival: Arrival, most: int) -> None:
    n_prompt, n_output = arrival.n_prompt, arrival.n_output
    if n_prompt + n_output > most:
        raise ConfigError(
            f"request {number} has {n_prompt} prompt and {n_output} output "
            f"tokens, a sequence here {most} at most: lower the lengths or give more pages"
        )


def _shortened(request: PromptedArrival) -> PromptedArrival:
    """The same prompt at once, with a few output tokens."""
    arrival = request.arrival
    return PromptedArrival(Arrival(0.0, arrival.n_prompt, min(8, arrival.n_output)), request.prompt)


def _offer_of(requests: Sequence[PromptedArrival], started: float, concurrency: int) -> Offer:
    times = [started + request.arrival.at for request in requests]
    return Offer(times, partial(_request_at, requests), concurrency)


def _request_at(requests: Sequence[PromptedArrival], number: int, at: float) -> EngineRequest:
    request = requests[number]
    return request.arrival.request(str(number), request.prompt, at)


def _output_of(request: RequestRecord) -> list[int]:
    return (request.tokens or [])[request.n_prompt :]


def _again_and_again(arrivals: Sequence[Arrival], count: int) -> list[Arrival]:
    """So many of them. A conversation that comes again is another one: its prompts are not in the
    prefix cache yet.
    """
    talks = max(arrival.conversation for arrival in arrivals)
    coming = []
    for number in range(count):
        again, first = divmod(number, len(arrivals))
        arrival = arrivals[first]
        if arrival.conversation:
            other = arrival.conversation + again * talks
            arrival = msgspec.structs.replace(arrival, conversation=other)
        coming.append(arrival)
    return coming


def _tokens_while_full(run: OfflineRun, seats: int) -> float:
    """Output tokens a second from when as many have boarded as there are seats to when the last
    one boards: until then somebody waits for every seat that comes free.

    Tokens, not ends: of long answers few end in so short a time.
    """
    boarded = sorted(request.boarded for request in run.requests if request.boarded is not None)
    start, end = boarded[seats - 1], boarded[-1]
    tokens = sum(_tokens_between(request, start, end) for request in run.requests)
    return tokens / (end - start)


def _tokens_between(request: RequestRecord, start: float, end: float) -> int:
    return sum(start < time <= end for time in request.token_times or ())
