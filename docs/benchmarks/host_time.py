"""Host time of a step (plan + batch + commit, medians in ms) by kind of step, in a closed loop at
32 seats.

    python docs/benchmarks/host_time.py [--model smollm2-135m] [--repeats 8] [--idle]

Without a model nothing is computed: the device is a thread per core that streams 120 MB between the
host's parts, as weights do, so that the host comes back to cold caches. That takes seconds and
scatters less than the whole engine. --idle: the threads do nothing, which shows what the
instructions cost by themselves. With a model it is the engine.

These figures move with the machine: compare two versions in turn, not on two days.
"""

from __future__ import annotations

import argparse
import gc
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from closed_loop import HOST, closed_loop, requests
from rich.console import Console
from rich.table import Table

from jitney.engine import LLM
from jitney.engine.common.records import Ledger
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.executor.inputs import BatchBuilder
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.plan import Plan, StepResult
from jitney.engine.core.scheduler.scheduler import Scheduler

SEATS, PAGE, PAGES = 32, 16, 4000
#: Words that all threads together read, and write, between two of the host's parts.
WORDS = 15_000_000


class Streamer:
    """Threads that copy memory: `start` when the last round is done, `wait` for this one."""

    def __init__(self, idle: bool):
        count = os.cpu_count() or 1
        self.done, self.running = threading.Semaphore(0), 0
        self.go = [threading.Semaphore(0) for _ in range(count)]
        for go in self.go:
            threading.Thread(
                target=self.work, args=(go, 1 if idle else WORDS // count), daemon=True
            ).start()

    def work(self, go: threading.Semaphore, words: int) -> None:
        """One thread's life."""
        source, target = np.zeros(words), np.zeros(words)
        while True:
            go.acquire()
            np.copyto(target, source)
            self.done.release()

    def start(self) -> None:
        """Begin a round."""
        self.wait()
        for go in self.go:
            go.release()
        self.running = len(self.go)

    def wait(self) -> None:
        """Until the round is over."""
        while self.running:
            self.done.acquire()
            self.running -= 1


class StreamingRunner:
    """Packs plans as the engine does, computes nothing, and samples token 7 for everybody."""

    compiles = 0

    def __init__(self, idle: bool):
        self.builder = BatchBuilder(
            seats=SEATS, pages_per_seat=512, page_size=PAGE, pool_rows=PAGE * PAGES
        )
        self.device = Streamer(idle)

    def batch(self, plan: Plan) -> Any:
        """As on a CPU: mixed steps have the sampler, greedy decode steps have not."""
        self.builder.build(plan, plan.bucket.decode_only)
        return plan

    def launch(self, batch: Any) -> Any:
        """The device has work while the host goes on."""
        self.device.start()
        return batch

    def fetch(self, launched: Any) -> StepResult:
        """Wait for it; the next step's work begins at once."""
        self.device.start()
        return StepResult([7] * launched.logit_rows)


def streaming_core(idle: bool) -> EngineCore:
    """An engine core without a model."""
    limits = SchedulerLimits(SEATS, 8192, prefill_share=0.25)
    scheduler = Scheduler(
        limits, Buckets.of(max_seats=SEATS, token_budget=512), PagePool(PAGES, PAGE, retain=False)
    )
    return EngineCore(scheduler, StreamingRunner(idle), Ledger())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="run the engine itself with this model")
    parser.add_argument("--repeats", type=int, default=8, help="times 96 requests")
    parser.add_argument("--idle", action="store_true", help="without a model: do not stream memory")
    args = parser.parse_args()
    llm: Any = (
        LLM(args.model, prefix_cache=False, max_seats=SEATS)
        if args.model
        else SimpleNamespace(core=streaming_core(args.idle))
    )
    work = requests(96, 96, 64, spread=True)
    closed_loop(llm, work, SEATS)  # warm up
    gc.collect()
    gc.freeze()  # as a served core does
    first, started = llm.core.ledger.steps, time.perf_counter()
    for _ in range(args.repeats):
        closed_loop(llm, work, SEATS)
    seconds = time.perf_counter() - started
    records = llm.core.ledger.since(first)
    full = records["decode"] == SEATS
    kinds = {
        "all": records["step"] > 0,
        f"{SEATS} decoding rows": full & (records["mixed"] == 0),
        "fewer": ~full & (records["mixed"] == 0),
        "with prompts": records["mixed"] == 1,
    }
    table = Table(
        "steps",
        "number",
        *(part.removesuffix("_s") for part in HOST),
        "together",
        title=f"{args.repeats * sum(output for _, output in work) / seconds:.0f} output tok/s",
    )
    for name, chosen in kinds.items():
        parts = [1e3 * records[part][chosen] for part in HOST]
        table.add_row(
            name,
            str(int(chosen.sum())),
            *(f"{np.median(values):.3f}" for values in (*parts, sum(parts))),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
