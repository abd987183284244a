"""Measures the scheduler's own work on the host, without any device: milliseconds to plan and to
commit a step.

    python docs/benchmarks/scheduler.py [--seats 64,128,256,512] [--steps 200] [--json FILE]

Every seat decodes, one prompt of 16 tokens boards in each step while an old sequence ends, and as
many requests wait as there are seats: the busiest steps that exist. Static and dynamic batches
board once and then decode. Medians over the steps, after a garbage collection; the collector is off
during the steps, as in a running engine.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.page_tables import PageTables
from jitney.engine.core.scheduler.plan import StepResult
from jitney.engine.core.scheduler.policies import _ORDERS, POLICIES
from jitney.engine.core.scheduler.scheduler import Scheduler

PAGE, PROMPT = 16, 16


def scheduler_for(seats: int, policy: str, order: str) -> Scheduler:
    """A scheduler whose pool never runs out."""
    limits = SchedulerLimits(
        seats,
        4096,
        max_waiting_requests=10**6,
        max_waiting_tokens=10**9,
        policy=policy,
        order=order,
        prefill_share=0.25,
    )
    buckets = Buckets.of(max_seats=seats, token_budget=4 * seats)
    return Scheduler(
        limits, buckets, PageTables(PagePool(seats * 40 + 1, PAGE, retain=False)), clock=lambda: 0.0
    )


def requests(seats: int) -> Iterator[EngineRequest]:
    """Endless requests of eight tenants; output lengths let one sequence end in every step."""
    for number in itertools.count():
        yield EngineRequest(
            id=str(number),
            prompt=[number % 1000 + 1] * PROMPT,
            arrival=0.0,
            user=str(number % 8),
            priority=number % 5,
            sampling=SamplingParams(temperature=0.0, max_tokens=seats),
        )


def measure(seats: int, policy: str, order: str, steps: int) -> tuple[float, float]:
    """(plan, commit and observe) in milliseconds: medians over steps with every seat taken."""
    scheduler, coming = scheduler_for(seats, policy, order), requests(seats)
    plans, commits = [], []
    gc.collect()
    gc.disable()
    while len(plans) < steps:
        while scheduler.n_waiting < seats:
            scheduler.add(next(coming))
        started = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        assert plan is not None
        result = StepResult([7] * plan.logit_rows)
        before = time.perf_counter()
        scheduler.commit(plan, result, 0.0)
        scheduler.observe(plan, 0.01)
        committed = time.perf_counter()
        if plan.n_decode >= seats - 1:
            plans.append(planned - started)
            commits.append(committed - before)
    gc.enable()
    return 1000 * median(plans), 1000 * median(commits)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--seats", default="64,128,256,512", help="numbers of seats, separated by commas"
    )
    parser.add_argument("--steps", type=int, default=200, help="steps measured of each")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    sizes = [int(word) for word in args.seats.split(",")]
    kinds = [("continuous", order) for order in _ORDERS] + [
        (policy, "fcfs") for policy in POLICIES
    ][1:]
    figures = {
        f"{policy} {order}": {seats: measure(seats, policy, order, args.steps) for seats in sizes}
        for policy, order in kinds
    }
    table = Table("seats", *map(str, sizes), title="plan + commit, ms")
    for kind, row in figures.items():
        table.add_row(kind, *(f"{plan:.3f} + {commit:.3f}" for plan, commit in row.values()))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
