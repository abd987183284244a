"""Measures the engine on a model with random weights: scheduler, core and runner, with all streams
always busy.

There are two runs: a closed loop of requests of many lengths, and one batch of equal requests, for
comparison with peers without a closed loop. Decoding is greedy, prompts share nothing, and requests
end only by length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from msgspec.structs import replace

from jitney.engine.common.trace import Arrival
from jitney.engine.core import Bucket, Buckets, RandomModel, StepWork
from jitney.engine.lab.bench.offline import OfflineBench, PromptedArrival
from jitney.engine.lab.device.rows import PartJob, Row, Task, Tasks
from jitney.engine.lab.device.steps import StepBench
from jitney.engine.lab.simulation.engine_run import EngineRun
from jitney.kernels.interface import KernelSet

#: Seconds of warm-up before anything counts.
_WARM_S = 2.0
#: Creates the engine at the first call.
_GetTraffic = Callable[[], tuple[OfflineBench, StepBench]]
#: Parts of a step's host side, as the ledger names them.
_HOST_PARTS = ("plan_s", "batch_s", "launch_s", "commit_s")


def closed_loop(job: PartJob, sets: Sequence[KernelSet], dtype: DTypeLike) -> Tasks:
    """The closed loop, and the batch that counts for the goal; weights in the run's dtype."""
    kernels, streams = sets[0], job.sizes.streams
    get = cache(partial(make_traffic, job, RandomModel(job.config, kernels, dtype)))
    loop = job.row("closed loop", f"{streams} streams, {jnp.dtype(dtype)}", kernels.label)
    yield Task(loop, partial(_loop_rows, job, get))
    batch = job.batch_row(streams, kernels.label, "peer")
    yield Task(batch, partial(_batch_rows, job, get, streams))


def crowds(job: PartJob, sets: Sequence[KernelSet], dtype: DTypeLike) -> Tasks:
    """The batch of equal requests with fewer and with more streams, on one engine."""
    kernels, sizes = sets[0], job.sizes
    model = RandomModel(job.config, kernels, dtype)
    get = cache(partial(make_traffic, job, model, seat_sizes=sizes.crowds))
    for streams in sizes.crowds:
        row = job.batch_row(streams, kernels.label)
        yield Task(row, partial(_batch_rows, job, get, streams))


def _loop_buckets(job: PartJob, seat_sizes: Sequence[int]) -> Buckets:
    """A few buckets: the requested decode steps, and two sizes with prompt rows."""
    seats, budget = max(seat_sizes), job.sizes.token_budget
    return Buckets.of(
        max_seats=seats,
        token_budget=budget,
        seat_sizes=tuple(seat_sizes),
        token_sizes=(max(2 * seats, budget // 4), budget),
    )


def make_traffic(
    job: PartJob, model: RandomModel, *, context: int = 0, seat_sizes: Sequence[int] = ()
) -> tuple[OfflineBench, StepBench]:
    """A core with only greedy programs compiled.

    context: of a request; 0: enough for batch and loop. seat_sizes: of decode steps, the largest is
    the number of seats; (): for the job's streams.
    """
    sizes = job.sizes
    seats = tuple(seat_sizes) or (max(1, sizes.streams // 4), sizes.streams)
    buckets = _loop_buckets(job, seats)
    context = (context or max(sum(sizes.loop), sum(sizes.batch))) + job.page_size
    bench = StepBench.of(job, model, buckets, context)
    return OfflineBench(bench.engine.new_core(), lambda text: []), bench


def random_requests(
    job: PartJob, count: int, prompt: tuple[int, int], output: tuple[int, int]
) -> list[PromptedArrival]:
    """Requests with uniform random lengths from the ranges, both ends included."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(*prompt, count, endpoint=True).tolist()
    outputs = rng.integers(*output, count, endpoint=True).tolist()
    requests = []
    for n_prompt, n_output in zip(prompts, outputs, strict=True):
        ids = rng.integers(0, job.config.vocab_size, n_prompt).tolist()
        requests.append(PromptedArrival(Arrival(0.0, n_prompt, n_output), ids))
    return requests


def _batch_rows(job: PartJob, get: _GetTraffic, streams: int, row: Row) -> Iterator[Row]:
    traffic, bench = get()
    n_prompt, n_output = job.sizes.batch
    requests = random_requests(job, streams, (n_prompt, n_prompt), (n_output, n_output))
    warm_s = 0.0
    if bench.engine.weight_bytes > 1 << 30:
        warm_s = _WARM_S
    traffic.warm_up(requests, warm_s)
    yield _run_row(job, bench, traffic.run(requests, concurrency=streams), row)


def _loop_rows(job: PartJob, get: _GetTraffic, row: Row) -> Iterator[Row]:
    """Rows of the closed loop, and of the host's time between its steps."""
    traffic, bench = get()
    sizes = job.sizes
    prompt, output = ((most // 4, most) for most in sizes.loop)
    requests = random_requests(job, sizes.requests, prompt, output)
    run = traffic.run(requests, concurrency=sizes.streams)
    yield _run_row(job, bench, run, row)
    yield _gap_row(run, replace(row, name="host gap", goal="gap"))


def _run_row(job: PartJob, bench: StepBench, run: EngineRun, row: Row) -> Row:
    """The row with output tokens a second, and the floor of all steps one after another."""
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
        floor_s, _ = job.measured.of(bench.engine.floor_bytes(done), operations)
        yield floor_s


def _gap_row(run: EngineRun, row: Row) -> Row:
    """The row with the device's mean idle time before a step, also as a share of the time between
    steps.
    """
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
