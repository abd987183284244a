"""The engine itself on a model with random weights: scheduler, core and runner, with all streams
always busy.

Two runs: a closed loop of requests of many lengths, and one batch of equal requests, which a peer
that knows no closed loop can be given too. Greedy, nothing shared between prompts, requests end by
length alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jitney.engine.bench.device.rows import PartJob, Row, Task, Tasks
from jitney.engine.bench.device.steps import StepBench, compile_buckets, make_bench
from jitney.engine.bench.offline import OfflineBench, OfflineRun, PromptedArrival
from jitney.engine.core import EngineCore
from jitney.engine.records import Ledger
from jitney.engine.scheduler.buckets import Bucket, Buckets, make_buckets
from jitney.engine.scheduler.kv_pages import PagePool
from jitney.engine.scheduler.limits import SchedulerLimits
from jitney.engine.scheduler.plan import StepWork
from jitney.engine.scheduler.scheduler import Scheduler
from jitney.engine.simulation.workload import Arrival
from jitney.kernels.interface import KernelSet

#: Seconds of warm-up before anything counts.
_WARM_S = 2.0
#: Parts of a step's host side, as the ledger names them.
_HOST_PARTS = ("plan_s", "batch_s", "launch_s", "commit_s")


def closed_loop(job: PartJob, sets: Sequence[KernelSet], dtype: Any) -> Tasks:
    """The two runs; weights in the run's dtype."""
    sizes, kernels = job.sizes, sets[0]
    get = cache(partial(_make_traffic, job, kernels, dtype))
    kept = f"{sizes.streams} streams, {jnp.dtype(dtype)}"
    n_prompt, n_output = sizes.batch
    yield Task(
        "batch of equal requests",
        f"{kept}, {n_prompt} + {n_output} tokens",
        kernels.label,
        partial(_batch_rows, job, kernels.label, get, kept),
    )
    yield Task(
        "closed loop", kept, kernels.label, partial(_loop_rows, job, kernels.label, get, kept)
    )


def _loop_buckets(job: PartJob) -> Buckets:
    """Few programs: a large and a small decode step, and two sizes with prompt rows."""
    seats, budget = job.sizes.streams, job.sizes.token_budget
    return make_buckets(
        max_seats=seats,
        token_budget=budget,
        seat_sizes=(max(1, seats // 4), seats),
        token_sizes=(max(2 * seats, budget // 4), budget),
    )


def _make_traffic(job: PartJob, kernels: KernelSet, dtype: Any) -> tuple[OfflineBench, StepBench]:
    """A core with as many seats as streams; the greedy programs are all that is compiled."""
    buckets, sizes = _loop_buckets(job), job.sizes
    context = max(sum(sizes.loop), sum(sizes.batch)) + job.page_size
    bench = make_bench(job, kernels, dtype, "plain", buckets, context)
    compile_buckets(bench, buckets.all())
    bench.runner.warm_up()
    pool = PagePool(bench.positions // job.page_size + 1, job.page_size, retain=False)
    limits = SchedulerLimits(max_seats=sizes.streams, context_length=context)
    scheduler = Scheduler(limits, buckets, pool, eos_ids=(), vocab_size=job.config.vocab_size)
    return OfflineBench(EngineCore(scheduler, bench.runner, Ledger()), lambda text: []), bench


def _random_requests(
    job: PartJob, count: int, prompt: tuple[int, int], output: tuple[int, int]
) -> list[PromptedArrival]:
    """Requests whose lengths are drawn evenly from the ranges, both ends included."""
    rng = np.random.default_rng(0)
    lengths = zip(
        rng.integers(*prompt, count, endpoint=True).tolist(),
        rng.integers(*output, count, endpoint=True).tolist(),
        strict=True,
    )
    return [
        PromptedArrival(
            Arrival(0.0, n_prompt, n_output),
            rng.integers(0, job.config.vocab_size, n_prompt).tolist(),
        )
        for n_prompt, n_output in lengths
    ]


def _batch_rows(job: PartJob, by: str, get: Any, kept: str) -> Iterator[Row]:
    """All requests at once, as many as there are seats."""
    traffic, bench = get()
    (n_prompt, n_output), sizes = job.sizes.batch, job.sizes
    requests = _random_requests(job, sizes.streams, (n_prompt, n_prompt), (n_output, n_output))
    traffic.warm_up(requests, _WARM_S if bench.weight_bytes > 1 << 30 else 0.0)
    run = traffic.run(requests, concurrency=sizes.streams)
    yield _run_row(
        job,
        by,
        bench,
        run,
        "batch of equal requests",
        f"{kept}, {n_prompt} + {n_output} tokens",
        "peer",
    )


def _loop_rows(job: PartJob, by: str, get: Any, kept: str) -> Iterator[Row]:
    """A request comes when one leaves; and what the host cost between its steps."""
    traffic, bench = get()
    sizes = job.sizes
    most_prompt, most_output = sizes.loop
    requests = _random_requests(
        job, sizes.requests, (most_prompt // 4, most_prompt), (most_output // 4, most_output)
    )
    run = traffic.run(requests, concurrency=sizes.streams)
    yield _run_row(job, by, bench, run, "closed loop", kept, "")
    yield _gap_row(job, by, run, kept)


def _run_row(
    job: PartJob, by: str, bench: StepBench, run: OfflineRun, name: str, case: str, goal: str
) -> Row:
    """Output tokens a second, and the floor of all its steps one after another."""
    tokens = sum(len(output) for output in run.tokens)
    return Row(
        part=job.part,
        name=name,
        case=case,
        by=by,
        seconds=run.seconds,
        least=run.seconds,
        most=run.seconds,
        repeats=1,
        floor_s=sum(_floors_of(job, bench, run.records)),
        bound="steps",
        goal=goal,
        figures={
            "tokens_s": tokens / run.seconds,
            "requests_s": len(run.tokens) / run.seconds,
            "steps": float(len(run.records)),
        },
    )


def _floors_of(job: PartJob, bench: StepBench, records: np.ndarray) -> Iterator[float]:
    """The floor of each recorded step."""
    names = ("bucket_tokens", "bucket_seats", "decode", "prefill", "keys", "longest", "pairs")
    for tokens, seats, *work in zip(*(records[name].tolist() for name in names), strict=True):
        done = StepWork(*work)
        yield job.measured.of(
            bench.floor_bytes(done), bench.operations(Bucket(tokens, seats), done)
        )[0]


def _gap_row(job: PartJob, by: str, run: OfflineRun, kept: str) -> Row:
    """How long the device had nothing to do before a step, on average, and as a share of the time
    between steps.
    """
    records = run.records[1:]
    gap, device = records["gap_s"].astype(float), records["device_s"].astype(float)
    parts = {name: float(np.median(records[name])) for name in _HOST_PARTS}
    return Row(
        part=job.part,
        name="host gap",
        case=kept,
        by=by,
        seconds=float(gap.mean()),
        least=float(gap.min()),
        most=float(gap.max()),
        repeats=len(records),
        goal="gap",
        figures={"share": float(gap.sum() / (gap + device).sum()), **parts},
    )
