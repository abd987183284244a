"""The three ways to batch on the same requests: who wins, by how much, and whether the answers are
the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from jitney.engine.bench.offline import OfflineBench, OfflineRun, PolicyRuns, PromptedArrival
from jitney.engine.simulation.workload import Arrival
from jitney.engine.telemetry.request_record import RequestRecord
from jitney.engine.types import JsonDict, JsonObject

POLICIES = ("static", "dynamic", "continuous")
#: What others report for in-flight batching over each of these, as (least, most) times the
#: throughput; over dynamic batching at high concurrency.
PUBLISHED = {"static": (1.6, 3.4), "dynamic": (3.0, 5.0)}
#: Requests that the capacity is measured with, for each seat.
_CAPACITY_ROUNDS = 4
#: Called with what runs (a policy, or "capacity"), and how many of how many requests have ended.
NamedWatch = Callable[[str, int, int], None]


class _Difference(NamedTuple):
    """A request that did not get the same tokens under two policies."""

    request: int
    #: The one compared with, and the other.
    policies: tuple[str, str]
    #: Output position at which they part.
    at: int


def run_policies(
    bench: OfflineBench,
    requests: Sequence[PromptedArrival],
    policies: Sequence[str] = POLICIES,
    *,
    concurrency: int = 0,
    watch: NamedWatch = lambda policy, done, total: None,
    **limits: Any,
) -> dict[str, OfflineRun]:
    """Serve the same requests once under each policy, in that order. limits: as in
    `OfflineBench.run`, for all of them.
    """
    runs = {}
    for policy in policies:
        runs[policy] = bench.run(
            requests,
            concurrency=concurrency,
            policy=policy,
            watch=partial(watch, policy),
            **limits,
        )
    return runs


def differences(runs: PolicyRuns) -> list[_Difference]:
    """Requests that did not get the same tokens under every policy; the first policy is the one
    compared with.
    """
    (first, reference), *others = runs.items()
    differences = []
    for policy, run in others:
        for number, at in _partings(reference, run):
            differences.append(_Difference(number, (first, policy), at))
    return differences


def _partings(reference: OfflineRun, run: OfflineRun) -> Iterator[tuple[int, int]]:
    """(request, output position at which it parts) of those with other tokens in the two runs."""
    for number, (ours, theirs) in enumerate(zip(reference.tokens, run.tokens, strict=True)):
        if ours != theirs:
            yield number, _parting(ours, theirs)


def _parting(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The first position at which two different outputs differ, or at which the shorter one
    ends.
    """
    for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return position
    return min(len(ours), len(theirs))


def ratios(figures: Mapping[str, JsonObject], best: str = "continuous") -> dict[str, JsonDict]:
    """What `best` gains over each other policy: times its throughput, and how many times shorter
    its waits are.
    """
    if best not in figures:
        return {}
    others = {name: theirs for name, theirs in figures.items() if name != best}
    return {name: _gains_over(name, figures[best], theirs) for name, theirs in others.items()}


def _gains_over(name: str, ours: JsonObject, theirs: JsonObject) -> JsonDict:
    gains = _gains(ours, theirs)
    return gains | {"published_output_tok_s": PUBLISHED.get(name)}


def _gains(ours: JsonObject, theirs: JsonObject) -> JsonDict:
    gains: JsonDict = {}
    for rate in ("output_tok_s", "req_s"):
        gains[rate] = _ratio(ours[rate], theirs[rate])
    for wait, quantile in itertools.product(("ttft_s", "e2e_s"), ("p50", "p99")):
        shorter = _percentile(ours, wait, quantile)
        longer = _percentile(theirs, wait, quantile)
        gains[f"{wait}_{quantile}"] = _ratio(longer, shorter)
    return gains


def _percentile(figures: JsonObject, name: str, quantile: str) -> float | None:
    """One percentile of a distribution among the figures; None if it is not known."""
    distribution = figures.get(name) or {}
    return distribution.get(quantile)


def _ratio(above: float | None, below: float | None) -> float | None:
    if above is None or not below:
        return None
    return above / below


def capacity(
    bench: OfflineBench,
    arrivals: Sequence[Arrival],
    seats: int,
    *,
    seed: int = 0,
    watch: NamedWatch = lambda policy, done, total: None,
) -> tuple[float, OfflineRun]:
    """(requests a second that continuous batching serves when there is always a next one, the run
    that showed it).

    Measured on four requests for each seat, the first again after the last, as a closed loop with
    twice as many open as seats. seed: as in `OfflineBench.requests`.
    """
    coming = _again_and_again(arrivals, _CAPACITY_ROUNDS * seats)
    run = bench.run(
        bench.requests(coming, seed),
        concurrency=2 * seats,
        policy="continuous",
        watch=partial(watch, "capacity"),
    )
    mean = sum(arrival.n_output for arrival in arrivals) / len(arrivals)
    return _tokens_while_full(run, seats) / mean, run


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
