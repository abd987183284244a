"""The time of one step by bucket, rows and context, on the real runner: the table that a simulation
needs.

Steps are made up (no scheduler): every bucket at several contexts, alike and mixed, whole and
partly filled. They are run in shuffled order, each launched before the one before it is fetched, as
the engine does, and timed as the engine's records are: until the tokens are on the host, since the
launch or since the step before was done.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from jitney.engine.core import EngineCore
from jitney.engine.errors import ConfigError
from jitney.engine.scheduler.buckets import Bucket, Buckets
from jitney.engine.scheduler.plan import Chunk, Plan, StepWork, work_of
from jitney.engine.scheduler.sequence import Sequence as Seq
from jitney.engine.simulation.devices import Accelerator
from jitney.engine.simulation.roofline import Assumptions, ModelCost, Roofline
from jitney.engine.simulation.step_table import (
    HostTimes,
    Point,
    StepTable,
    host_times,
    kind_of,
    noise_factors,
)
from jitney.engine.types import EngineRequest, SamplingParams

if TYPE_CHECKING:
    from jitney.engine.checkpoints.model_config import ModelConfig
    from jitney.engine.executor.runner import Runner
    from jitney.engine.llm import LLM

#: Contexts of decode rows, where the engine's context and its pages allow them.
CONTEXTS = (64, 384, 1024)
#: Where a prompt chunk with a long past starts.
LATE = 768
GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
#: Bytes of the array whose copying tells the bandwidth, and the side of the square product that
#: tells the rate, on a CPU and on anything faster, where smaller ones would time the launch.
COPY_BYTES = {True: 1 << 28, False: 1 << 30}
PRODUCT_SIDE = {True: 2048, False: 8192}
IDEAL = Assumptions(bandwidth=1.0, flops=1.0, overhead_s=0.0, hop_s=0.0)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One made-up step. decode: contexts of its decode rows; prompts: (start, rows) of its prompt
    chunks.
    """

    bucket: Bucket
    decode: tuple[int, ...] = ()
    prompts: tuple[tuple[int, int], ...] = ()

    @property
    def positions(self) -> int:
        """KV positions that its sequences hold."""
        return (
            sum(self.decode)
            + len(self.decode)
            + sum(start + count for start, count in self.prompts)
        )


@dataclass(slots=True)
class Timing:
    """A case and its repeats, in seconds."""

    case: Case
    work: StepWork
    seconds: list[float]

    @property
    def median(self) -> float:
        return median(self.seconds)


def cases(buckets: Buckets, room: int, context: int) -> list[Case]:
    """What to measure: room is how many KV positions the pool holds, context the most of one
    sequence.
    """
    contexts = sorted({min(length, context - 1) for length in CONTEXTS})
    found = [case for bucket in buckets.decode for case in decode_cases(bucket, contexts, room)]
    found += [case for bucket in buckets.mixed for case in mixed_cases(bucket, contexts, context)]
    return list(dict.fromkeys(case for case in found if case.positions <= room))


def decode_cases(bucket: Bucket, contexts: Sequence[int], room: int) -> Iterator[Case]:
    """All seats alike at each context that fits, half of them, and one long among short ones."""
    fit = [length for length in contexts if length * bucket.seats < room] or [contexts[0]]
    for length in fit:
        yield Case(bucket, (length,) * bucket.seats)
    yield Case(bucket, (fit[-1],) * (bucket.seats // 2 + 1))
    yield Case(bucket, (contexts[-1], *(contexts[0],) * (bucket.seats - 1)))


def mixed_cases(bucket: Bucket, contexts: Sequence[int], context: int) -> Iterator[Case]:
    """Prompts alone (one, several, late in a long one, half a bucket), and beside decoding
    seats.
    """
    rows, seats = bucket.tokens, bucket.seats
    whole = min(rows, context - 1)
    yield Case(bucket, (), ((0, whole),))
    yield Case(bucket, (), ((0, max(1, whole // 2)),))
    if seats >= 4:
        yield Case(bucket, (), ((0, rows // 4),) * 4)
    late = max(0, min(LATE, context - 1 - whole))
    yield Case(bucket, (), ((late, whole),))
    if seats > 1:
        beside = min(seats - 1, rows - 1)
        for length in (contexts[0], contexts[-1]):
            yield Case(bucket, (length,) * beside, ((0, min(rows - beside, context - 1)),))


def plan_of(case: Case, number: int, page_size: int) -> Plan:
    """The case as a plan whose sequences have just boarded, each with pages of its own."""
    rows = [(length, 1, True) for length in case.decode] + [
        (start, count, False) for start, count in case.prompts
    ]
    chunks, page = [], 1
    for seat, (start, count, decode) in enumerate(rows):
        n_pages = -(-(start + count) // page_size)
        # A decode row's token is still on the device, as it is when the engine runs.
        tokens = [1] * (start if decode else start + count)
        request = EngineRequest(id=f"{number}-{seat}", prompt=tokens, sampling=GREEDY, arrival=0.0)
        seq = Seq(request, 0, 0, tokens, 1, seat=seat, pages=list(range(page, page + n_pages)))
        chunks.append(Chunk(seq, start, count, decode, True))
        page += n_pages
    return Plan(
        number, chunks, case.bucket, True, work_of(chunks), boarded=[chunk.seq for chunk in chunks]
    )


def time_cases(
    runner: Runner,
    wanted: Sequence[Case],
    page_size: int,
    repeats: int,
    seconds: float,
    progress: Progress = lambda done, total: None,
) -> list[Timing]:
    """Each case `repeats` times in shuffled rounds after one that does not count; at least one
    round counts, and no new one begins after `seconds`."""
    plans = [plan_of(case, number, page_size) for number, case in enumerate(wanted)]
    timings = [Timing(case, plan.work, []) for case, plan in zip(wanted, plans, strict=True)]
    order, rng, started = list(range(len(plans))), random.Random(0), time.perf_counter()
    for turn in range(repeats + 1):
        if turn > 1 and time.perf_counter() - started > seconds:
            break
        rng.shuffle(order)
        for at, spent in zip(order, run_in_turn(runner, [plans[at] for at in order]), strict=True):
            if turn:
                timings[at].seconds.append(spent)
        progress(turn + 1, repeats + 1)
    return timings


def run_in_turn(runner: Runner, plans: Sequence[Plan]) -> list[float]:
    """Device seconds of each plan, as `ledger.STEP_DTYPE` defines them."""
    clock, spent = time.perf_counter, []
    flying: tuple[Any, float] | None = None
    ready = -np.inf
    for plan in [*plans, None]:
        launched = None
        if plan is not None:
            ticket = runner.launch(runner.batch(plan))
            launched = ticket, clock()
        if flying is not None:
            runner.fetch(flying[0])
            now = clock()
            spent.append(now - max(flying[1], ready))
            ready = now
        flying = launched
    return spent


def copy_bandwidth() -> float:
    """Bytes/s that an addition over a large array reads and writes."""
    import jax
    import jax.numpy as jnp

    size = COPY_BYTES[jax.default_backend() == "cpu"]
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.block_until_ready(step(jnp.zeros(size // 4, jnp.float32)))
    best = np.inf
    for _ in range(8):
        started = time.perf_counter()
        x = jax.block_until_ready(step(x))
        best = min(best, time.perf_counter() - started)
    return 2 * size / best


def product_rate(dtype: str) -> float:
    """Operations/s of a large square matrix product."""
    import jax
    import jax.numpy as jnp

    side = PRODUCT_SIDE[jax.default_backend() == "cpu"]
    multiply = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32).astype(dtype))
    a = jnp.ones((side, side), dtype)
    jax.block_until_ready(multiply(a, a))
    best = np.inf
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(multiply(a, a))
        best = min(best, time.perf_counter() - started)
    return 2 * side**3 / best


def measured_floor(config: ModelConfig, dtype: str, bandwidth: float, rate: float) -> Roofline:
    """The least time that the measured bandwidth and rate allow."""
    number = "f32" if dtype == "float32" else "bf16"
    chip = Accelerator(
        "measured", 0.0, bandwidth, MappingProxyType({"bf16": rate, "f32": rate}), 1.0
    )
    return Roofline(ModelCost(config, number, number), chip, assumed=IDEAL)


def host_of(core: EngineCore, encode_seats: int) -> HostTimes:
    """What the host needs for a step, from a short run of the engine itself."""
    pool, limits = core.scheduler.pool, core.scheduler.limits
    longest = min(limits.context_length, pool.capacity * pool.page_size // max(1, encode_seats))
    n_prompt, n_output = max(1, min(32, longest // 2 - 1)), max(2, min(24, longest // 2))
    first = core.ledger.steps
    for number in range(2 * encode_seats):
        sampling = msgspec.structs.replace(GREEDY, max_tokens=n_output - number % 2)
        core.add(
            EngineRequest(
                id=f"host-{first}-{number}",
                prompt=[1] * n_prompt,
                sampling=sampling,
                arrival=core.clock(),
            )
        )
    core.run_until_idle()
    return host_times(core.ledger.since(first))


def measure(
    llm: LLM,
    config: ModelConfig,
    *,
    repeats: int,
    seconds: float,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """The whole report, ready for JSON; "table" is what `StepTable.load` reads. Raises ConfigError
    if the pool is too small for any step."""
    core, info = llm.core, llm.info
    runner, pool = core.runner, core.scheduler.pool
    wanted = cases(core.scheduler.buckets, pool.capacity * pool.page_size // 2, info.context_length)
    if not wanted:
        raise ConfigError("the KV pool is too small to time a step: give it more --pages")
    host = host_of(core, info.seats)
    timings = time_cases(runner, wanted, pool.page_size, repeats, seconds, progress)  # pyright: ignore[reportArgumentType]
    bandwidth, rate = copy_bandwidth(), product_rate(info.dtype)
    table = table_of(
        timings,
        host,
        f"bench step: {info.model} {info.dtype}, {info.kernels} kernels on {info.device}",
    )
    floor = measured_floor(config, info.dtype, bandwidth, rate)
    return {
        "model": info.model,
        "device": info.device,
        "platform": info.platform,
        "dtype": info.dtype,
        "kernels": info.kernels,
        "seats": info.seats,
        "token_budget": info.token_budget,
        "page_size": info.page_size,
        "copy_bytes_s": bandwidth,
        "product_flops_s": rate,
        "cases": [row_of(timing, table, floor) for timing in timings],
        "table": table.contents(),
    }


def table_of(timings: Sequence[Timing], host: HostTimes, source: str) -> StepTable:
    """Curves through the medians, and the scatter of the repeats around them."""
    noise = {}
    for kind in ("decode", "mixed"):
        ratios = [
            spent / t.median
            for t in timings
            if kind_of(t.case.bucket) == kind
            for spent in t.seconds
        ]
        if ratios:
            noise[kind] = noise_factors(np.array(ratios))
    return StepTable.from_points(
        [Point(t.case.bucket, t.work, t.median) for t in timings], host, source, noise
    )


def row_of(timing: Timing, table: StepTable, floor: Roofline) -> dict[str, Any]:
    """One case for the report."""
    case, work = timing.case, timing.work
    return {
        "bucket": str(case.bucket),
        "tokens": case.bucket.tokens,
        "seats": case.bucket.seats,
        **msgspec.structs.asdict(work),
        "repeats": len(timing.seconds),
        "median_s": timing.median,
        "least_s": min(timing.seconds),
        "most_s": max(timing.seconds),
        "fitted_s": table.seconds(case.bucket, work),
        "bytes_floor_s": floor.memory_seconds(case.bucket, work),
        "flops_floor_s": floor.compute_seconds(case.bucket, work),
    }
