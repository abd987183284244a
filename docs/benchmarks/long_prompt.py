"""Measures long prompts beside running streams, and beside short prompts that arrive later.

    python docs/benchmarks/long_prompt.py streams [--model smollm2-135m] [--streams 16]
        [--prompt 4000] [--prefill-share auto] [--json FILE]
    python docs/benchmarks/long_prompt.py short [--model smollm2-135m] [--longs 12] [--prompt 2300]
        [--json FILE]
    python docs/benchmarks/long_prompt.py simulated [--json FILE]
    python docs/benchmarks/long_prompt.py frontier [--json FILE]

streams: all streams generate alone first; then a request with a long prompt and one output token
arrives. Prints the median and p99 of the time between two tokens of a stream in both phases, the
ratio of the p99s, and the time that the prompt took.

short: long prompts arrive together, then one more long prompt and four of 20 tokens. Prints the
first-token times of the short prompts beside their time alone, and the predicted and real wait of
the last long one; with prompts in the order of arrival, and with short ones passing.

simulated: the same two orders on the virtual clock, for loads of long, mixed and short prompts at
0.8 of the engine's capacity, with the steps of a CPU and of an H100 (by its published peaks).

frontier: 150 long prompts at once and 1.8 short ones of 20 tokens a second on the virtual clock,
for each share of its speed that a step may lose to be brief. Prints the first-token time of the
short prompts divided by their time alone, and the end of the last long prompt divided by its end
without short ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.history import RequestRecords
from jitney.engine.common.machine import cpu_name
from jitney.engine.common.requests import EngineRequest
from jitney.engine.common.trace import Arrival
from jitney.engine.core.measuring.engine_shape import EngineShape
from jitney.engine.core.measuring.virtual import StepTimes, VirtualDevice
from jitney.engine.core.scheduler import prefill_budget
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.passing import Passing
from jitney.engine.core.scheduler.scheduler import Scheduler
from jitney.engine.lab.simulation.devices import DEVICES
from jitney.engine.lab.simulation.drive import Offer, drive
from jitney.engine.lab.simulation.roofline import SHAPES, ModelCost, Roofline
from jitney.engine.lab.simulation.simulator import simulate
from jitney.engine.lab.simulation.step_table import Curve, StepTable

#: Tokens of a short prompt, and seconds below which a wait says nothing about a prediction.
SHORT, NO_WAIT_S = 20, 0.3


class Watch:
    """Steps an engine and keeps the gaps between the tokens of each sequence, in seconds."""

    def __init__(self, llm: LLM):
        self.core = llm.core
        self.last: dict[str, float] = {}
        self.gaps: list[float] = []
        self.ended: set[str] = set()

    def add(self, name: str, prompt: list[int], tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self.core.add(
            EngineRequest(id=name, prompt=prompt, sampling=params, arrival=time.monotonic())
        )

    def step(self) -> None:
        """Plan the next step as late as a server does."""
        while slack := self.core.late_plan_slack_s:
            time.sleep(slack)
        for output in self.core.step().outputs:
            now = time.perf_counter()
            if output.request_id in self.last:
                self.gaps.append(now - self.last[output.request_id])
            self.last[output.request_id] = now
            if output.finish is not None:
                self.ended.add(output.request_id)

    def phase(self, going_on: object) -> np.ndarray:
        """Gaps in milliseconds that end while `going_on()` is true."""
        assert callable(going_on)
        self.gaps = []
        while going_on():
            self.step()
        return 1e3 * np.array(self.gaps)


def measure(llm: LLM, streams: int, prompt: int, alone_steps: int) -> dict[str, float]:
    """Figures of one run: in milliseconds, prompt_s in seconds."""
    rng = np.random.default_rng(0)
    watch = Watch(llm)
    for stream in range(streams):
        watch.add(f"stream-{stream}", rng.integers(100, 40000, 64).tolist(), 2000)
    watch.phase(lambda: len(watch.last) < streams)
    for _ in range(20):
        watch.step()
    count = iter(range(alone_steps))
    alone = watch.phase(lambda: next(count, None) is not None)
    started = time.perf_counter()
    watch.add("long", rng.integers(100, 40000, prompt).tolist(), 1)
    beside = watch.phase(lambda: "long" not in watch.ended)
    prompt_s = time.perf_counter() - started
    for stream in range(streams):
        llm.core.abort(f"stream-{stream}")
    llm.core.run_until_idle()
    (p50, p99), (q50, q99) = np.percentile(alone, [50, 99]), np.percentile(beside, [50, 99])
    return {
        "alone_p50_ms": p50,
        "alone_p99_ms": p99,
        "beside_p50_ms": q50,
        "beside_p99_ms": q99,
        "p99_ratio": q99 / p99,
        "prompt_s": prompt_s,
    }


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Inside the block no prompt passes another one, and no step is brief so that one can."""
    with (
        mock.patch.object(Passing, "longest", lambda self, rows_first: 0),
        mock.patch.object(Passing, "longest_between", lambda self, rows_first: 0),
        mock.patch.object(Passing, "expects", lambda self, rows, now: False),
    ):
        yield


#: Context managers that set how prompts are ordered, by name.
ORDERS = {"in order": in_order, "short ones pass": contextlib.nullcontext}


def predicted(scheduler: Scheduler, request: EngineRequest) -> float:
    """Predicted seconds until a request that arrives now boards."""
    leader = scheduler.factory.leader(request, scheduler._arrivals + 1)
    return scheduler._admission.predicted_wait.wait(leader)


def short_beside_long(llm: LLM, longs: int, prompt: int) -> dict[str, float]:
    """Seconds of one run on this machine."""
    rng, watch = np.random.default_rng(0), Watch(llm)
    core = llm.core
    first: dict[str, float] = {}

    def add(name: str, length: int) -> float:
        watch.add(name, rng.integers(100, 40000, length).tolist(), 16)
        return time.perf_counter()

    def until(*names: str) -> None:
        while not all(name in first for name in names):
            watch.step()
            for name, at in watch.last.items():
                first.setdefault(name, at)

    alone = add("alone", SHORT)
    until("alone")
    core.run_until_idle()
    for number in range(longs):
        add(f"long-{number}", prompt)
    until("long-0")
    tokens = rng.integers(100, 40000, prompt).tolist()
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    last = EngineRequest(id="last", prompt=tokens, sampling=params, arrival=time.monotonic())
    predicted_s, arrived = predicted(core.scheduler, last), time.perf_counter()
    core.add(last)
    shorts = {f"short-{number}": add(f"short-{number}", SHORT) for number in range(4)}
    boarded = core.scheduler.sequences.requests.open_of("last")[0]
    while boarded.boarded_at is None:
        watch.step()
        for name, at in watch.last.items():
            first.setdefault(name, at)
    waited = time.perf_counter() - arrived
    until("last", *shorts)
    core.run_until_idle()
    return {
        "short_alone_s": first["alone"] - alone,
        "short_first_token_s": max(first[name] - at for name, at in shorts.items()),
        "last_long_first_token_s": first["last"] - arrived,
        "predicted_wait_s": predicted_s,
        "wait_s": waited,
    }


#: Step times of a CPU in milliseconds: decode-only steps by their rows; steps with prompts take
#: 21 ms and 0.32 ms a row, and 20 ns for each query-key pair.
DECODE_MS = {1: 10, 4: 16, 8: 20, 16: 24, 32: 38}


def cpu() -> tuple[EngineShape, StepTimes]:
    """A CPU with 32 seats and 512 rows."""
    table = StepTable(
        [Curve(rows, rows, ms / 1000) for rows, ms in DECODE_MS.items()]
        + [Curve(rows, 32, 0.021, per_prompt=3.2e-4, per_pair=2e-8) for rows in (64, 128, 256, 512)]
    )
    buckets = Buckets.of(max_seats=32, token_budget=512)
    buckets = replace(buckets, padding_is_free=True, most_segments=Buckets.cpu_segments)
    return EngineShape(limits(32, 8192), buckets, 4097, plans_late=True), table


def h100() -> tuple[EngineShape, StepTimes]:
    """An 8B model in bfloat16 on an H100, with 256 seats and 2,048 rows."""
    buckets = Buckets.of(max_seats=256, token_budget=2048, on_device=True)
    shape = EngineShape(limits(256, 32768), buckets, 6062, 64)
    return shape, Roofline(ModelCost(SHAPES["llama-3.1-8b"]), DEVICES["h100"])


def limits(seats: int, context: int) -> SchedulerLimits:
    no_cap = 10**9
    return SchedulerLimits(
        seats,
        context,
        max_waiting_requests=no_cap,
        max_waiting_tokens=no_cap,
        prefill_share="auto",
    )


#: By machine: engine and steps; tokens of a long prompt; prompt rows computed in a second.
MACHINES = {"CPU": (cpu, 3000, 2300), "H100": (h100, 16000, 25000)}
#: Share of the requests with long prompts, by load.
LOADS = {"long": 0.9, "mixed": 0.3, "short": 0.1}


def load(long_share: float, long: int, rows_s: float) -> list[Arrival]:
    """200 requests at 0.8 of `rows_s` prompt rows a second; long prompts of half to one and a half
    times `long` tokens, others of 20 to 99.
    """
    rng = np.random.default_rng(1)
    mean = long_share * long + (1 - long_share) * 60
    at = np.cumsum(rng.exponential(mean / (0.8 * rows_s), 200))
    arrivals = []
    for seconds in at.tolist():
        is_long = rng.random() < long_share
        low, high = (long // 2, long * 3 // 2) if is_long else (SHORT, 100)
        n_prompt, n_output = rng.integers(low, high), rng.integers(8, 64)
        arrivals.append(Arrival(seconds, int(n_prompt), int(n_output)))
    return arrivals


def simulated(arrivals: list[Arrival], shape: EngineShape, table: StepTimes) -> dict[str, Any]:
    """Seconds to the first token of short and of long prompts, to the end of the long ones, and the
    mean predicted and real waits before boarding of the requests that wait.
    """
    device = VirtualDevice(table)
    core = device.new_core(shape)
    predicted_s: list[float] = []

    def request_at(number: int, at: float) -> EngineRequest:
        arrival = arrivals[number]
        request = arrival.request(str(number), [0] * arrival.n_prompt, at)
        predicted_s.append(predicted(core.scheduler, request))
        return request

    records = RequestRecords()
    offer = Offer([arrival.at for arrival in arrivals], request_at)
    drive(core, device.clock, offer, records, device.reported)
    requests = list(records.oldest())
    first = np.array([(r.first_token or r.end) - r.arrival for r in requests])
    waits = np.array([r.queue_s or 0.0 for r in requests])
    ends = np.array([r.end - r.arrival for r in requests])
    short = np.array([arrival.n_prompt < 100 for arrival in arrivals])
    waiting = waits > NO_WAIT_S
    return {
        "short_first_token_p50_s": float(np.median(first[short])),
        "short_first_token_max_s": float(first[short].max()),
        "long_first_token_mean_s": float(first[~short].mean()),
        "long_end_mean_s": float(ends[~short].mean()),
        "long_end_max_s": float(ends[~short].max()),
        "predicted_wait_mean_s": float(np.array(predicted_s)[waiting].mean())
        if waiting.any()
        else 0.0,
        "wait_mean_s": float(waits[waiting].mean()) if waiting.any() else 0.0,
        "seconds": max(r.end for r in requests),
    }


def all_simulated() -> dict[str, Any]:
    """Results by machine, load and order."""
    figures: dict[str, Any] = {}
    for machine, (make, long, rows_s) in MACHINES.items():
        shape, table = make()
        for name, share in {"alone": 0.0, **LOADS}.items():
            arrivals = load(share, long, rows_s)
            if name == "alone":
                arrivals = [Arrival(0.0, SHORT, 2), Arrival(60.0, long, 2)]
            for order, within in ORDERS.items():
                with within():
                    figures[f"{machine}, {name}, {order}"] = simulated(arrivals, shape, table)
    return figures


def zen5() -> tuple[EngineShape, StepTimes]:
    """The CPU of `cpu` with the steps of SmolLM2-135M on two cores of a Zen 5: 8.4 ms and 0.31 ms a
    row for those with prompts.
    """
    decode_ms = {1: 8, 4: 9, 8: 10.5, 16: 13, 32: 17}
    table = StepTable(
        [Curve(rows, rows, ms / 1000) for rows, ms in decode_ms.items()]
        + [
            Curve(rows, 32, 0.0084, per_prompt=3.12e-4, per_pair=1e-8)
            for rows in (64, 128, 256, 512)
        ]
    )
    shape, _ = cpu()
    return replace(shape, pages=16_385), table


#: Shares of speed that steps may lose, and short prompts a second.
LOSSES, SHORTS_S = (0.0, 0.02, 0.06, 0.08, 0.12, 0.3), 1.8


def simulated_runs(
    shape: EngineShape, table: StepTimes, arrivals: list[Arrival]
) -> list[tuple[Arrival, float, float]]:
    """(arrival, first token, end) of each request, in virtual seconds."""
    requests = simulate(sorted(arrivals, key=lambda each: each.at), shape, table).requests
    by_time = sorted(requests, key=lambda each: each.number)
    arrivals = sorted(arrivals, key=lambda each: each.at)
    return [
        (one, record.first_token or record.end, record.end)
        for one, record in zip(arrivals, by_time, strict=True)
    ]


def frontier() -> dict[str, dict[str, float]]:
    """Results by machine and share of speed lost."""
    figures: dict[str, dict[str, float]] = {}
    for machine, make, long in (("CPU", zen5, 2300), ("H100", h100, 16000)):
        shape, table = make()
        before = [Arrival(0.0, 40, 100)] * 40 + [Arrival(10.0 + n, long, 8) for n in range(3)]
        before.append(Arrival(29.0, SHORT, 8))
        longs = [Arrival(30.0, long, 16)] * 150
        at = 32.0 + np.cumsum(np.random.default_rng(0).exponential(1 / SHORTS_S, 1000))
        for loss in LOSSES:
            prefill_budget._BRIEF_LOSS = loss
            without = simulated_runs(shape, table, before + longs)
            end = max(end for _, _, end in without)
            alone = next(first - one.at for one, first, _ in without if one.at == 29.0)
            shorts = [Arrival(each, SHORT, 8) for each in at.tolist() if each < 0.9 * end]
            beside = simulated_runs(shape, table, before + longs + shorts)
            waits = [first - one.at for one, first, _ in beside if one.at > 30.0]
            last = max(end for one, _, end in beside if one.at == 30.0)
            figures[f"{machine}, {loss:.0%}"] = {
                "alone_ms": 1e3 * alone,
                "short_p50_ms": 1e3 * float(np.median(waits)),
                "short_p95_ms": 1e3 * float(np.percentile(waits, 95)),
                "long_end": (last - 30.0) / (end - 30.0),
            }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("streams", "short", "simulated", "frontier"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--longs", type=int, default=12)
    parser.add_argument("--prompt", type=int, help="4000 tokens for streams, 2300 for short")
    parser.add_argument("--prefill-share", default="auto")
    parser.add_argument("--alone-steps", type=int, default=150)
    parser.add_argument(
        "--runs",
        type=int,
        default=2,
        help="the first one also teaches the scheduler the step times",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runs = run(args)
    for name, figures in runs.items():
        print(name + ":", " ".join(f"{key}={value:.3g}" for key, value in figures.items()))
    if args.json:
        arguments = {name: value for name, value in vars(args).items() if name != "json"}
        contents = {
            "machine": cpu_name(),
            "arguments": arguments,
            "load": os.getloadavg(),
            "runs": runs,
        }
        args.json.write_text(json.dumps(contents, indent=1) + "\n")


def run(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The figures of one part of the benchmark, by run."""
    if args.part == "simulated":
        return all_simulated()
    if args.part == "frontier":
        return frontier()
    # No longest wait: on a busy machine the last long prompt would be refused.
    llm = LLM(
        args.model, prefix_cache=False, prefill_share=args.prefill_share, max_predicted_wait_s=0
    )
    if args.part == "streams":
        one = partial(measure, llm, args.streams, args.prompt or 4000, args.alone_steps)
        return {str(number): one() for number in range(args.runs)}
    figures: dict[str, dict[str, float]] = {}
    for number in range(args.runs):
        for order, within in ORDERS.items():
            with within():
                figures[f"{number}, {order}"] = short_beside_long(
                    llm, args.longs, args.prompt or 2300
                )
    return figures


if __name__ == "__main__":
    main()
