"""Benchmark runs in this process: they share compiled programs; each has a scheduler and pages."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.history import RequestRecords
from jitney.engine.common.records import Ledger
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.requests import EngineRequest, JsonDict
from jitney.engine.common.trace import Arrival
from jitney.engine.core import EngineCore, EngineShape
from jitney.engine.lab.bench.cost import Bill
from jitney.engine.lab.bench.load import Watch, ignore_progress
from jitney.engine.lab.bench.text import arrival_ids
from jitney.engine.lab.simulation.drive import Offer, drive
from jitney.engine.lab.simulation.engine_run import EngineRun

#: Requests per seat in the measurement of the capacity.
_CAPACITY_ROUNDS = 4
#: Limits with which a scheduler refuses no request, except for the limit of waiting requests.
_NO_REFUSALS = {"max_predicted_wait_s": 0.0, "max_waiting_tokens": 2**31 - 1}

#: Called with the run's name (a policy, or "capacity"), ended requests, and all requests.
type NamedWatch = Callable[[str, int, int], None]
#: Runs by the policy's name.
type PolicyRuns = Mapping[str, EngineRun]


@dataclass(frozen=True, slots=True)
class PromptedArrival:
    """An arrival and its prompt ids."""

    arrival: Arrival
    prompt: list[int]

    def shortened(self) -> PromptedArrival:
        """A copy that arrives at 0 and has few output tokens."""
        n_output = min(8, self.arrival.n_output)
        return PromptedArrival(Arrival(0.0, self.arrival.n_prompt, n_output), self.prompt)


def outputs_of(run: EngineRun) -> list[list[int]]:
    """Output ids of each request of a run of `OfflineBench`."""
    return [(request.tokens or [])[request.n_prompt :] for request in run.requests]


def bill_of(run: EngineRun) -> Bill:
    """The device time of a run by kind of row."""
    free = run.shape.buckets.padding_is_free
    return Bill.of_steps(run.records, run.seconds, padding_is_free=free)


@dataclass(frozen=True, slots=True)
class _RealClock:
    read: Callable[[], float]
    sleep: Callable[[float], None]

    def __call__(self) -> float:
        return self.read()

    def wait_until(self, t: float) -> None:
        self.sleep(max(0.0, t - self.read()))


class OfflineBench:
    """Measures traffic on an engine in this process, by its core and its tokenizer.

    The engine must be idle. Every run starts with empty pages. encode: text -> ids; sleep: waits
    for a number of seconds of the clock.
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
        pages = core.scheduler.sequences.pages
        state = pages.state
        self.shape = EngineShape(
            self.limits,
            core.scheduler.buckets,
            pages.pool.n_pages,
            pages.pool.page_size,
            plans_late=core.plans_late,
            window=pages.window,
            windows={window: pool.n_pages for window, pool in pages.windows.items()},
            checkpoints=None if state is None else state.spare,
            checkpoint_pages=0 if state is None else state.every,
        )

    def requests(self, arrivals: Sequence[Arrival], seed: int = 0) -> list[PromptedArrival]:
        """The arrivals with prompts of their lengths. Raises ConfigError if one does not fit."""
        pool = self._core.scheduler.pool
        most = min(self.limits.context_length, pool.capacity * pool.page_size + 1)
        requests = []
        for number, arrival in enumerate(arrivals):
            if arrival.n_prompt + arrival.n_output > most:
                raise ConfigError(
                    f"request {number} has {arrival.n_prompt} prompt and {arrival.n_output} output "
                    f"tokens, a sequence here {most} at most: lower the lengths or give more pages"
                )
            prompt = arrival_ids(self._encode, arrival, number, seed)
            requests.append(PromptedArrival(arrival, prompt))
        return requests

    def warm_up(self, requests: Sequence[PromptedArrival], seconds: float = 2.0) -> None:
        """Run some requests for about `seconds`, to warm up caches and clock frequencies."""
        short = [request.shortened() for request in requests[: self.limits.max_seats]]
        until = self.clock() + seconds
        while self.clock() < until:
            self.run(short)

    def run(
        self,
        requests: Sequence[PromptedArrival],
        *,
        concurrency: int = 0,
        watch: Watch = ignore_progress,
        **limits: Any,
    ) -> EngineRun:
        """Serve the requests (ascending in time). The result has their tokens and token times.

        concurrency: open requests of a closed loop, in which a request comes when fewer are open;
        0: open loop. limits: fields of SchedulerLimits that differ from the engine's. Raises
        ConfigError for impossible limits.
        """
        core = self._new_core(len(requests), limits)
        records = RequestRecords(keep_tokens=True, keep_times=True)
        ended = itertools.count(1)
        records.listeners.append(lambda record: watch(next(ended), len(requests)))
        gc.collect()
        started = self.clock()
        times = [started + request.arrival.at for request in requests]
        offer = Offer(times, partial(_request_at, requests), concurrency)
        log = drive(core, _RealClock(self.clock, self._sleep), offer, records)
        core.check()
        shape = replace(self.shape, limits=core.scheduler.limits)
        return EngineRun(list(records.oldest()), log.records, shape, started, concurrency)

    def run_policies(
        self,
        requests: Sequence[PromptedArrival],
        policies: Sequence[str],
        *,
        concurrency: int = 0,
        watch: NamedWatch = lambda policy, done, total: None,
        **limits: Any,
    ) -> dict[str, EngineRun]:
        """Serve the same requests once under each policy, in order. limits: see `run`."""
        return {
            policy: self.run(
                requests,
                concurrency=concurrency,
                policy=policy,
                watch=partial(watch, policy),
                **limits,
            )
            for policy in policies
        }

    def capacity(
        self, arrivals: Sequence[Arrival], *, seed: int = 0, watch: Watch = ignore_progress
    ) -> tuple[float, EngineRun]:
        """(requests a second that continuous batching serves with a queue that is never empty, the
        measured run).

        Measured with four requests per seat, which are repeated if there are fewer, in a closed
        loop with twice as many open requests as seats. seed: see `requests`.
        """
        seats = self.limits.max_seats
        coming = _again_and_again(arrivals, _CAPACITY_ROUNDS * seats)
        requests = self.requests(coming, seed)
        run = self.run(requests, concurrency=2 * seats, policy="continuous", watch=watch)
        mean = sum(arrival.n_output for arrival in arrivals) / len(arrivals)
        return _tokens_while_full(run.requests, seats) / mean, run

    def _new_core(self, requests: int, limits: JsonDict) -> EngineCore:
        """A core like the engine's own, with other limits and a queue that holds all requests."""
        own = self._core.scheduler
        changed = replace(own.limits, max_waiting_requests=requests + 1, **_NO_REFUSALS, **limits)
        scheduler = own.renewed(changed, self.clock)
        late = self._core.plans_late
        return EngineCore(
            scheduler, self._core.runner, Ledger(capacity=1), self.clock, plans_late=late
        )


def _request_at(requests: Sequence[PromptedArrival], number: int, at: float) -> EngineRequest:
    request = requests[number]
    return request.arrival.request(str(number), request.prompt, at)


def _again_and_again(arrivals: Sequence[Arrival], count: int) -> list[Arrival]:
    """`count` arrivals by repeating them; a repeated conversation counts as a new one."""
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


def _tokens_while_full(requests: Sequence[RequestRecord], seats: int) -> float:
    """Output tokens a second while requests wait for every free seat: from the time at which as
    many requests have boarded as there are seats, to the last boarding.

    Tokens are counted instead of ends, since few long answers end in so short a time.
    """
    boarded = sorted(request.boarded for request in requests if request.boarded is not None)
    start, end = boarded[seats - 1], boarded[-1]
    tokens = sum(start < time <= end for request in requests for time in request.token_times or ())
    return tokens / (end - start)
