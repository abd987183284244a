"""Simulates fleets of an 8B model on a virtual clock: their figures, their cost, and the effect of
failures.

    python docs/benchmarks/scale.py [fleets] [routers] [choosing] [failures] [scaling]
        [--requests 20000]

Prints the tables of docs/scale.md as Markdown, all or the named ones. Step times are those of
`jitney plan`: estimates from published peaks, not measurements. --requests: the most of one
simulation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from jitney.engine.common.machine import cpu_name
from jitney.engine.common.reports.page import Table
from jitney.engine.common.trace import Arrival
from jitney.engine.core.measuring.engine_shape import EngineShape
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.fleet.routing import HashRing, LeastWait, RouterName, round_robin
from jitney.engine.lab.simulation.devices import DEVICES
from jitney.engine.lab.simulation.fleet import Failures, FleetPlan, FleetRun
from jitney.engine.lab.simulation.fleet_planner import (
    FleetAssumptions,
    FleetSizing,
    ReplicaKind,
    Targets,
)
from jitney.engine.lab.simulation.fleet_scaling import ScalingRule
from jitney.engine.lab.simulation.fleet_traffic import Day, LengthMeans
from jitney.engine.lab.simulation.roofline import SHAPES, ModelCost, Roofline
from jitney.engine.lab.simulation.workload import Conversations, Poisson, Uniform, parse_lengths

LLAMA = ModelCost(SHAPES["llama-3.1-8b"])
#: Prices of a chip an hour are only for comparison: list prices on demand change and differ by
#: customer.
KINDS = (
    ReplicaKind("h100", Roofline(LLAMA, DEVICES["h100"]), chip_hour=2.5),
    ReplicaKind("4xv5e", Roofline(LLAMA, DEVICES["v5e"], count=4), chip_hour=1.2),
)
H100 = KINDS[0]
PROMPT, OUTPUT = (
    "lognormal:mean=512,sigma=0.8,min=16,max=8000",
    "lognormal:mean=256,sigma=0.8,max=2000",
)
TARGETS = Targets(ttft_s=1.0, stream_tok_s=30.0)
#: A core fails once a week; a chip fails once in 50,000 hours.
FAILURES = Failures(core_mtbf_s=168 * 3600.0, machine_mtbf_s=50_000 * 3600.0)
HOW = FleetAssumptions(failures=FAILURES)
SIZES = (10, 40)
CHAT_SIZES = (2, 8)
ROUTERS: tuple[RouterName, ...] = ("round-robin", "least-wait", "prefix")
CHOICES = (10, 100, 1000, 10_000)
BUDGET = 2048


def day(*rates: float, hour_s: float = 3600.0) -> Day:
    lengths = parse_lengths(PROMPT, "--prompt"), parse_lengths(OUTPUT, "--output")
    return Day(rates, *lengths, hour_s=hour_s)


def engine_of(sizing: FleetSizing) -> EngineShape:
    """The engine of a sized replica."""
    limits = SchedulerLimits(sizing.seats, 16_384, prefill_share="auto", max_predicted_wait_s=60.0)
    buckets = Buckets.of(max_seats=sizing.seats, token_budget=BUDGET, on_device=True)
    return EngineShape(limits, buckets, sizing.pages)


def sized(kind: ReplicaKind) -> FleetSizing:
    return FleetSizing.of(kind, day(100.0), TARGETS, HOW)


def timed(traffic: Sequence[Arrival], plan: FleetPlan) -> tuple[FleetRun, float]:
    """A simulated run, and its CPU seconds on this machine."""
    began = time.process_time()
    run = plan.simulate(traffic)
    return run, time.process_time() - began


def fleets(requests: int) -> Iterator[list[str]]:
    """Fleets at the load that their replicas are sized for."""
    for kind in KINDS:
        sizing = sized(kind)
        for size in SIZES:
            for router in ("least-wait", "prefix"):
                yield fleet_row(kind, sizing, size, requests, router)


def fleet_row(
    kind: ReplicaKind, sizing: FleetSizing, size: int, count: int, router: RouterName
) -> list[str]:
    traffic = day(1.0).sample(size * sizing.load_req_s, count, 1)
    plan = FleetPlan(engine_of(sizing), kind.roofline, size, router, failures=FAILURES)
    run, took = timed(traffic, plan)
    figures = run.figures()
    hour = size * (kind.replica_hour or 0.0)
    tokens = size * sizing.load_req_s * LengthMeans.of(traffic).output
    return [
        f"{size:,} x {kind.name}",
        router,
        f"{size * sizing.load_req_s:,.0f}",
        f"{tokens:,.0f}",
        *latencies(run),
        f"{figures['refused_share']:.2%}",
        f"{hour:,.0f}",
        f"{hour / 3600 / tokens * 1e6:.3f}",
        f"{count:,} in {took:,.0f} s",
    ]


def latencies(run: FleetRun) -> list[str]:
    """First token p50 and p99, speed of the slowest hundredth of the streams."""
    figures = run.figures()
    first, rates = figures["ttft_s"], figures["stream_tok_s"]
    return [f"{1e3 * first['p50']:.0f}", f"{1e3 * first['p99']:,.0f}", f"{rates['p1']:.0f}"]


def routers(requests: int) -> Iterator[list[str]]:
    """Routers under a chat whose conversations share a system prompt; turns are some 10 s apart."""
    sizing = sized(H100)
    for size in CHAT_SIZES:
        traffic = chat(size, 0.35 * size * sizing.load_req_s, requests)
        first = 0.0
        for router in ROUTERS:
            plan = FleetPlan(engine_of(sizing), H100.roofline, size, router, prefix_cache=True)
            run, _ = timed(traffic, plan)
            first = first or run.hit_rate
            cells = f"{run.hit_rate:.1%}", f"{run.hit_rate / first:.2f}"
            yield [f"{size:,}", router, *cells, *latencies(run), f"{run.refused_share:.2%}"]


def chat(size: int, rate: float, requests: int) -> list[Arrival]:
    """Turns at a rate; the number of open conversations gives each pauses of ten seconds."""
    talks = Conversations(n_shared=256, turns=Uniform(2, 8), live=round(10 * rate) | 1)
    messages = parse_lengths("lognormal:mean=60,sigma=0.8,min=8,max=1000", "--prompt")
    answers = parse_lengths("lognormal:mean=150,sigma=0.8,max=1000", "--output")
    count = min(requests, 2000 * size)
    return talks.requests(count, messages, answers, Poisson(rate), 1)


def choosing() -> Iterator[list[str]]:
    """Microseconds in which the ingress chooses a replica."""
    for size in CHOICES:
        names = [f"replica-{number}" for number in range(size)]
        loads = {name: float(hash(name) % 7) for name in names}
        waits = LeastWait()
        for name, load in loads.items():
            waits.put(name, 0.0, load)
        ring, total = HashRing(names), sum(loads.values())
        turn = per_call(lambda names=names: next(round_robin(names, 7)))
        least = per_call(lambda waits=waits, loads=loads: choose_least(waits, loads))
        prefix = per_call(
            lambda ring=ring, loads=loads, total=total: next(
                ring.order(b"a conversation", loads, total=total)
            )
        )
        yield [f"{size:,}", *(f"{1e6 * seconds:,.0f}" for seconds in (turn, least, prefix))]


def choose_least(waits: LeastWait, loads: dict[str, float]) -> None:
    """Choose the replica with the least wait, and add one request to its load."""
    name = next(waits.order())
    loads[name] += 1
    waits.put(name, 0.0, loads[name])


def per_call(call) -> float:
    """Seconds per call, the fastest of five rounds."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(20):
            call()
        times.append((time.perf_counter() - began) / 20)
    return min(times)


#: Failures to simulate, by name.
WRONG = {
    "nothing": Failures(),
    "a core dies once a week each, a chip is lost every 50,000 h": FAILURES,
    "every core dies once in 2 minutes": Failures(core_mtbf_s=120.0),
    "a tenth of the machines is lost at once": Failures(outage_at=15.0, outage_share=0.1),
    "the same, noticed after 5 s": Failures(outage_at=15.0, outage_share=0.1, notice_s=5.0),
    "three of ten": Failures(outage_at=15.0, outage_share=0.3, notice_s=5.0),
}


def failures(requests: int) -> Iterator[list[str]]:
    """10 replicas at the load that they are sized for, under each failure."""
    sizing = sized(H100)
    traffic = day(1.0).sample(10 * sizing.load_req_s, requests, 1)
    for name, wrong in WRONG.items():
        plan = FleetPlan(engine_of(sizing), H100.roofline, 10, failures=wrong)
        run, _ = timed(traffic, plan)
        yield [
            name,
            str(run.core_failures),
            str(run.machine_failures),
            f"{run.continued:,}",
            f"{run.repeated:,}",
            *latencies(run)[:2],
            f"{max(run.first_tokens()):.1f}",
            f"{run.refused_share:.2%}",
        ]


#: Rules to compare: name, rule, seconds that a start takes.
RULES = (
    ("6 replicas, fixed", None, 0.0),
    ("2 replicas, fixed", None, 0.0),
    ("wait above 1 s, or three quarters of the seats", ScalingRule(least=2), 10.0),
    ("the same", ScalingRule(least=2), 60.0),
    ("wait above 1 s alone", ScalingRule(least=2, fill=1.0), 10.0),
)


def scaling() -> Iterator[list[str]]:
    """Traffic that grows threefold in 100 seconds, stays for 50, and falls again."""
    sizing = FleetSizing.of(
        H100, day(100.0), TARGETS, replace(HOW, most_seats=4, most_requests=2000)
    )
    up, down = np.linspace(2, 6, 11).tolist(), np.linspace(6, 2, 6).tolist()
    shares = [2.0] * 4 + up + [6.0] * 5 + down + [2.0] * 6
    rates = [0.9 * share * sizing.load_req_s for share in shares]
    traffic = day(*rates, hour_s=10.0).whole(1)
    for name, rule, start_s in RULES:
        replicas = 6 if name.startswith("6") else 2
        plan = FleetPlan(engine_of(sizing), H100.roofline, replicas, scaling=rule, start_s=start_s)
        run, _ = timed(traffic, plan)
        yield [
            name,
            f"{start_s:.0f}" if rule else "",
            str(run.figures()["most_ready"] or replicas),
            f"{run.replica_s / 3600:.2f}",
            f"{run.cost_per_million(H100.replica_hour or 0.0):.3f}",
            *latencies(run),
            f"{run.refused_share:.2%}",
        ]


_FIRST = ["first token p50, ms", "p99, ms", "tok/s of the slowest 1 %"]
HEADS = {
    "fleets": [
        "fleet",
        "router",
        "req/s",
        "output tok/s",
        *_FIRST,
        "refused",
        "price/h",
        "cost/M output tokens",
        "simulated, CPU time",
    ],
    "routers": [
        "replicas",
        "router",
        "prompt tokens found",
        "times",
        *_FIRST,
        "refused",
    ],
    "choosing": ["replicas", "round-robin, us", "least-wait, us", "prefix, us"],
    "failures": [
        "what goes wrong",
        "cores",
        "machines",
        "requests that went on in a new core",
        "begun again elsewhere",
        "first token p50, ms",
        "p99, ms",
        "longest, s",
        "refused",
    ],
    "scaling": [
        "rule",
        "start, s",
        "most replicas",
        "replica-hours",
        "cost/M",
        *_FIRST,
        "refused",
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tables", nargs="*", choices=[*HEADS, []], help="which [all]")
    parser.add_argument("--requests", type=int, default=20_000)
    args = parser.parse_args()
    make = {
        "fleets": lambda: fleets(args.requests),
        "routers": lambda: routers(args.requests),
        "choosing": choosing,
        "failures": lambda: failures(args.requests),
        "scaling": scaling,
    }
    for name in args.tables or HEADS:
        began = time.process_time()
        table = Table(HEADS[name], list(make[name]()))
        print(f"\n{name}, {cpu_name()}, {time.process_time() - began:.0f} s of it:\n", flush=True)
        print("\n".join(table.markdown_lines()), flush=True)


if __name__ == "__main__":
    main()
