"""Measures the time of a step by bucket, rows and context on the real runner: the table for a
simulation.

Steps are made up, without a scheduler: every bucket at several equal and mixed contexts, full and
partly filled. They run in shuffled order, each launched before the previous one is fetched, as in
the engine. Times are measured as in the engine's records: until the tokens are on the host, from
the launch or from the end of the previous step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import EngineRequest, JsonDict, SamplingParams
from jitney.engine.core import Bucket, Buckets, EngineCore, HostTimes, MadeUpStep, StepCase
from jitney.engine.lab.simulation.devices import Accelerator
from jitney.engine.lab.simulation.roofline import Assumptions, ModelCost, Roofline
from jitney.engine.lab.simulation.step_table import StepTable, host_times

if TYPE_CHECKING:
    from jitney.engine.common.step_cost import DeviceCeiling
    from jitney.engine.core import LLM, ModelConfig

#: Contexts of decode rows, if the engine's context length and pages allow them.
_CONTEXTS = (64, 384, 1024)
#: Start position of a prompt chunk with a long past.
_LATE = 768
_GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
_IDEAL = Assumptions(bandwidth=1.0, flops=1.0, overhead_s=0.0, hop_s=0.0)
#: Facts of the engine that the report contains.
_FACTS = (
    "model",
    "device",
    "platform",
    "dtype",
    "kernels",
    "seats",
    "token_budget",
    "page_size",
)
#: Called with the number of finished rounds and of all rounds.
_Watch = Callable[[int, int], None]


@dataclass(slots=True)
class _StepTiming:
    step: MadeUpStep
    #: Seconds of each repeat.
    seconds: list[float]

    @property
    def median(self) -> float:
        return median(self.seconds)


def _cases(buckets: Buckets, room: int, context: int) -> list[StepCase]:
    """The steps to measure. room: KV positions of the pool; context: most of one sequence."""
    contexts = sorted({min(length, context - 1) for length in _CONTEXTS})
    made: dict[StepCase, None] = {}  # in order, each once
    for bucket in buckets.decode:
        made |= dict.fromkeys(_decode_cases(bucket, contexts, room))
    for bucket in buckets.mixed:
        made |= dict.fromkeys(_mixed_cases(bucket, contexts, context))
    return [case for case in made if case.positions <= room]


def _decode_cases(bucket: Bucket, contexts: Sequence[int], room: int) -> Iterator[StepCase]:
    """Decode steps: all seats at each context that fits, half of the seats, and one long context
    among short ones.
    """
    seats = bucket.seats
    fit = [length for length in contexts if length * seats < room] or [contexts[0]]
    for length in fit:
        yield StepCase(bucket, (length,) * seats)
    yield StepCase(bucket, (fit[-1],) * (seats // 2 + 1))
    yield StepCase(bucket, (contexts[-1], *(contexts[0],) * (seats - 1)))


def _mixed_cases(bucket: Bucket, contexts: Sequence[int], context: int) -> Iterator[StepCase]:
    rows, seats = bucket.tokens, bucket.seats
    for chunks in _lone_prompts(bucket, context):
        yield StepCase(bucket, (), chunks)
    if seats > 1:
        beside = min(seats - 1, rows - 1)
        chunk = (0, min(rows - beside, context - 1))
        for length in (contexts[0], contexts[-1]):
            yield StepCase(bucket, (length,) * beside, (chunk,))


def _lone_prompts(bucket: Bucket, context: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """(start, rows) of prompts for a bucket: one that fills it, one that fills half of it, several,
    and one late in a long prompt.
    """
    whole = min(bucket.tokens, context - 1)
    yield ((0, whole),)
    yield ((0, max(1, whole // 2)),)
    if bucket.seats >= 4:
        yield ((0, bucket.tokens // 4),) * 4
    late = max(0, min(_LATE, context - 1 - whole))
    yield ((late, whole),)


def _time_cases(
    steps: Sequence[MadeUpStep],
    repeats: int,
    seconds: float,
    watch: _Watch = lambda done, total: None,
) -> list[_StepTiming]:
    """Time each step `repeats` times in shuffled rounds, after a round that does not count. At
    least one round counts, and no new one begins after `seconds`.
    """
    timings = [_StepTiming(step, []) for step in steps]
    order = list(timings)
    rng = random.Random(0)
    started = time.perf_counter()
    for turn in range(repeats + 1):
        if turn > 1 and time.perf_counter() - started > seconds:
            break
        rng.shuffle(order)
        spent = _run_in_turn([timing.step for timing in order])
        if turn:
            for timing, step_s in zip(order, spent, strict=True):
                timing.seconds.append(step_s)
        watch(turn + 1, repeats + 1)
    return timings


def _run_in_turn(steps: Sequence[MadeUpStep]) -> list[float]:
    """Device seconds of each step (see `records.STEP_DTYPE`); each is launched before the previous
    one is fetched.
    """

    def launch(step: MadeUpStep) -> tuple[Any, float]:
        """(the launched step to fetch, time of the launch)."""
        launched = step.launch(step.batch())
        return launched, time.perf_counter()

    spent = []
    ready = -np.inf
    launched, since = launch(steps[0])
    for step, following in zip_longest(steps, steps[1:]):
        current, launched_at = launched, since
        if following is not None:
            launched, since = launch(following)
        step.fetch(current)
        now = time.perf_counter()
        spent.append(now - max(launched_at, ready))
        ready = now
    return spent


def _measured_floor(config: ModelConfig, dtype: str, bandwidth: float, rate: float) -> Roofline:
    """A roofline with the measured bandwidth and rate, for the least time of a step."""
    number = "f32" if dtype == "float32" else "bf16"
    rates = MappingProxyType({"bf16": rate, "f32": rate})
    chip = Accelerator("measured", 0.0, bandwidth, rates, 1.0)
    return Roofline(ModelCost(config, number, number), chip, assumed=_IDEAL)


def _host_of(core: EngineCore, seats: int) -> HostTimes:
    """The host's times of a step, from a short run of the engine with all seats taken."""
    pool, limits = core.scheduler.pool, core.scheduler.limits
    longest = min(limits.context_length, pool.capacity * pool.page_size // max(1, seats))
    prompt = [1] * max(1, min(32, longest // 2 - 1))
    first = core.ledger.steps
    for number in range(2 * seats):
        n_output = max(2, min(24, longest // 2)) - number % 2
        name = f"host-{first}-{number}"
        sampling = msgspec.structs.replace(_GREEDY, max_tokens=n_output)
        core.add(EngineRequest(id=name, prompt=prompt, sampling=sampling, arrival=core.clock()))
    core.run_until_idle()
    return host_times(core.ledger.since(first))


def measure(
    llm: LLM,
    config: ModelConfig,
    *,
    repeats: int,
    seconds: float,
    watch: _Watch = lambda done, total: None,
) -> JsonDict:
    """The whole report as JSON; its "table" is for `StepTable.load`. Raises ConfigError if the pool
    is too small for any step."""
    from jitney.engine.core import measure_ceiling

    core, info = llm.core, llm.info
    pool = core.scheduler.pool
    room = pool.capacity * pool.page_size // 2
    cases = _cases(core.scheduler.buckets, room, info.model.context_length)
    if not cases:
        raise ConfigError("the KV pool is too small to time a step: give it more --pages")
    host = _host_of(core, info.sizes.seats)
    steps = [case.on(core, number) for number, case in enumerate(cases)]
    timings = _time_cases(steps, repeats, seconds, watch)
    kernels = f"{info.kernels.label} kernels on {info.device.name}"
    source = f"bench step: {info.model.name} {info.formats.dtype}, {kernels}"
    measured = [(timing.step.case.bucket, timing.step.work, timing.seconds) for timing in timings]
    table = StepTable.from_repeats(measured, host, source)
    runner: Any = core.runner
    ceiling = measure_ceiling(runner.programs.step.kernels, info.formats.dtype)
    return _report_of(info, config, timings, table, ceiling)


def _report_of(
    info: EngineInfo,
    config: ModelConfig,
    timings: Sequence[_StepTiming],
    table: StepTable,
    ceiling: DeviceCeiling,
) -> JsonDict:
    rate = ceiling.operations_s
    assert rate is not None  # `measure_ceiling` multiplies
    floor = _measured_floor(config, info.formats.dtype, ceiling.bytes_s, rate)
    shown = info.flat()
    return {
        **{name: shown[name] for name in _FACTS},
        "read_bytes_s": ceiling.bytes_s,
        "product_flops_s": rate,
        "cases": [_row_of(timing, table, floor) for timing in timings],
        "table": table.contents(),
    }


def _row_of(timing: _StepTiming, table: StepTable, floor: Roofline) -> JsonDict:
    case, work = timing.step.case, timing.step.work
    return {
        "bucket": str(case.bucket),
        "tokens": case.bucket.tokens,
        "seats": case.bucket.seats,
        **work._asdict(),
        "repeats": len(timing.seconds),
        "median_s": timing.median,
        "least_s": min(timing.seconds),
        "most_s": max(timing.seconds),
        "fitted_s": table.seconds(case.bucket, work),
        "bytes_floor_s": floor.memory_seconds(case.bucket, work),
        "flops_floor_s": floor.compute_seconds(case.bucket, work),
    }
