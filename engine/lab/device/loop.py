"""The engine itself on a model with random weights: scheduler, core and runner, in a closed loop of
requests of many lengths. Greedy, nothing shared between prompts, requests end by length alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from msgspec.structs import replace

from jitney.engine.common.records import Ledger
from jitney.engine.common.trace import Arrival
from jitney.engine.core import (
    Bucket,
    Buckets,
    EngineCore,
    PagePool,
    Scheduler,
    SchedulerLimits,
    StateTables,
    StepWork,
)
from jitney.engine.lab.bench.offline import OfflineBench, PromptedArrival
from jitney.engine.lab.device.rows import PartJob, Row, Task, Tasks
from jitney.engine.lab.device.steps import RandomModel, StepBench
from jitney.engine.lab.simulation.engine_run import EngineRun
from jitney.kernels.interface import KernelSet

#: Parts of a step's host side, as the ledger names them.
_HOST_PARTS = ("plan_s", "batch_s", "launch_s", "commit_s")


def _closed_loop(job: PartJob, sets: Sequence[KernelSet], dtype: DTypeLike) -> Tasks:
    kernels = sets[0]
    model = RandomModel(job.config, kernels, dtype)
    case = f"{job.sizes.streams} streams, {jnp.dtype(dtype)}"
    yield Task(job.row("closed loop", case, kernels.label), partial(_loop_rows, job, model))


def make_traffic(job: PartJob, model: RandomModel, context: int) -> tuple[OfflineBench, StepBench]:
    """A core with a seat for each of the job's streams, whose greedy programs are all that is
    compiled. context: most tokens of a request.
    """
    streams, budget = job.sizes.streams, job.sizes.token_budget
    # Few programs: two sizes of decode steps, and two with prompt rows.
    buckets = Buckets.of(
        max_seats=streams,
        token_budget=budget,
        seat_sizes=(max(1, streams // 4), streams),
        token_sizes=(max(2 * streams, budget // 4), budget),
    )
    context += job.page_size
    bench = StepBench.of(job, model, buckets, context)
    bench.compile(buckets.all())
    bench.runner.warm_up()
    pool = PagePool(bench.positions // job.page_size + 1, job.page_size, retain=False)
    limits = SchedulerLimits(max_seats=buckets.seats, context_length=context)
    state = None
    if job.config.recurrent is not None:
        state = StateTables.without_checkpoints(buckets.seats, job.page_size)
        pool.shares = False
    scheduler = Scheduler(limits, buckets, pool, vocab_size=job.config.vocab_size, state=state)
    return OfflineBench(EngineCore(scheduler, bench.runner, Ledger()), lambda text: []), bench


def random_requests(
    job: PartJob, count: int, prompt: tuple[int, int], output: tuple[int, int]
) -> list[PromptedArrival]:
    """Requests whose lengths are drawn evenly from the ranges, both ends included."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(*prompt, count, endpoint=True).tolist()
    outputs = rng.integers(*output, count, endpoint=True).tolist()
    requests = []
    for n_prompt, n_output in zip(prompts, outputs, strict=True):
        ids = rng.integers(0, job.config.vocab_size, n_prompt).tolist()
        requests.append(PromptedArrival(Arrival(0.0, n_prompt, n_output), ids))
    return requests


def _loop_rows(job: PartJob, model: RandomModel, row: Row) -> Iterator[Row]:
    """A request comes when one leaves; and what the host cost between its steps."""
    sizes = job.sizes
    traffic, bench = make_traffic(job, model, sum(sizes.loop))
    prompt, output = ((most // 4, most) for most in sizes.loop)
    requests = random_requests(job, sizes.requests, prompt, output)
    run = traffic.run(requests, concurrency=sizes.streams)
    yield _run_row(job, bench, run, row)
    yield _gap_row(run, replace(row, name="host gap", goal="gap"))


def _run_row(job: PartJob, bench: StepBench, run: EngineRun, row: Row) -> Row:
    """Output tokens a second, and the floor of all its steps one after another."""
    tokens = sum(request.n_output for request in run.requests)
    return replace(
        row.timed([run.seconds]),
        floor_s=sum(_floors_of(job, bench, run.records)),
        bound="steps",
        figures={
            "tokens_s": tokens / run.seconds,
            "requests_s": len(run.requests) / run.seconds,
            "steps": float(len(run.records)),
        },
    )


def _floors_of(job: PartJob, bench: StepBench, records: np.ndarray) -> Iterator[float]:
    names = ["bucket_tokens", "bucket_seats", "decode", "prefill", "keys", "longest", "pairs"]
    for tokens, seats, *work in records[names].tolist():
        done = StepWork(*work)
        operations = bench.operations(Bucket(tokens, seats), done)
        floor_s, _ = job.measured.of(bench.floor_bytes(done), operations)
        yield floor_s


def _gap_row(run: EngineRun, row: Row) -> Row:
    """Mean idle seconds of the device before a step, and their share of the time."""
    records = run.records[1:]
    gap, device = records["gap_s"].astype(float), records["device_s"].astype(float)
    figures = {"share": float(gap.sum() / (gap + device).sum())}
    for name in _HOST_PARTS:
        figures[name] = float(np.median(records[name]))
    return replace(
        row,
        seconds=float(gap.mean()),
        least=float(gap.min()),
        most=float(gap.max()),
        repeats=len(records),
        figures=figures,
    )


#: Part -> what yields its tasks.
TASKS = {
    "loop": _closed_loop,
}
