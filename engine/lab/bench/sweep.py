"""Measures throughput and latency over concurrency, rate or load, of an engine in this process or
at an endpoint, and finds the point beyond which more load gains little.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.common.trace import Arrival
from jitney.engine.core import LLM
from jitney.engine.lab.bench.load import LoadResult, Watch
from jitney.engine.lab.bench.offline import OfflineBench
from jitney.engine.lab.bench.online import EngineAbout, OnlineBench
from jitney.engine.lab.figures import figure_of
from jitney.engine.lab.simulation.engine_run import EngineRun
from jitney.engine.lab.simulation.planner import knee

#: The figures of a run that the curve shows.
_POINT = (
    *("output_tok_s", "req_s", "goodput_req_s", "seat_fill"),
    *(f"{name}_{quantile}_s" for name in ("ttft", "itl", "e2e") for quantile in ("p50", "p99")),
)
#: Facts in the report about an engine in this process.
_FACTS = ("version", "device", "platform", "kernels", "dtype", "policy")


class EngineTarget:
    """An engine in this process. warm_up: arrivals that are served before anything is timed."""

    def __init__(self, llm: LLM, warm_up: Sequence[Arrival], seed: int):
        self._llm, self._seed = llm, seed
        self._bench = OfflineBench(llm.core, llm.tokenizer.encode)
        self._bench.warm_up(self._bench.requests(warm_up, seed))

    def capacity(self, arrivals: Sequence[Arrival], watch: Watch) -> float:
        """Requests a second that it serves with a queue of these that is never empty."""
        rate, _ = self._bench.capacity(arrivals, seed=self._seed, watch=watch)
        return rate

    def measure(self, arrivals: Sequence[Arrival], concurrency: int, watch: Watch) -> EngineRun:
        """Serve the arrivals. concurrency: open requests of a closed loop; 0: an open loop."""
        requests = self._bench.requests(arrivals, self._seed)
        return self._bench.run(requests, concurrency=concurrency, watch=watch)

    def describe(self) -> dict[str, str]:
        info = self._llm.info.flat()
        return {name: info[name] for name in _FACTS}


class EndpointTarget:
    """A server. streams: open requests while its capacity is measured, 0: by its seats."""

    def __init__(self, bench: OnlineBench, streams: int):
        self._bench, self._streams = bench, streams
        self._about = EngineAbout()

    def capacity(self, arrivals: Sequence[Arrival], watch: Watch) -> float:
        return asyncio.run(self._bench.capacity(arrivals, self._streams, watch))

    def measure(self, arrivals: Sequence[Arrival], concurrency: int, watch: Watch) -> LoadResult:
        measured = self._bench.measure(
            arrivals, concurrency=concurrency, closed=concurrency > 0, watch=watch
        )
        run = asyncio.run(measured)
        self._about = run.about
        return run.load

    def describe(self) -> dict[str, str]:
        return self._about._asdict()


#: A target of traffic.
Target = EngineTarget | EndpointTarget


def sweep(
    target: Target,
    axis: str,
    values: Sequence[float],
    arrivals_at: Callable[[float], list[Arrival]],
    figures_of: Callable[[LoadResult | EngineRun], JsonDict],
    watch: Callable[[str, int, int], None],
) -> tuple[float | None, list[JsonDict]]:
    """(requests a second at load 1, the points in the order of `values`).

    axis: concurrency, rate, or load; loads are shares of the capacity, which is measured first.
    arrivals_at: returns the requests for a concurrency or a rate.
    """
    capacity = None
    if axis == "load":
        capacity = target.capacity(arrivals_at(values[0]), partial(watch, "capacity"))
    points = []
    for value in values:
        arrivals = arrivals_at(value * (capacity or 1.0))
        concurrency = int(value) if axis == "concurrency" else 0
        run = target.measure(arrivals, concurrency, partial(watch, f"{axis} {value:g}"))
        figures = figures_of(run)
        if isinstance(run, LoadResult):
            figures["client"] = run.sender.as_json()
        rate = {} if capacity is None else {"rate": value * capacity}
        points.append(
            {
                axis: value,
                **{name: figure_of(figures, name) for name in _POINT},
                "figures": figures,
                **rate,
            }
        )
    return capacity, points


def knee_of(axis: str, points: Sequence[JsonObject]) -> int | None:
    """The knee of a sweep: where throughput flattens, or where p99 end-to-end time steepens."""
    convex = axis != "concurrency"
    figure = "e2e_p99_s" if convex else "output_tok_s"
    values = [point[figure] for point in points]
    if None in values:
        return None
    return knee([point[axis] for point in points], values, convex=convex)
