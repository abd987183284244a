"""The device side of a step: which executables there are, that none is compiled twice, programs
from shapes alone.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowered_steps import lower_step
from programs import await_use

from jitney.engine.common.records import Ledger
from jitney.engine.common.requests import EngineRequest, Range, SamplingParams, Uploaded
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.executor import inputs, program, program_memory
from jitney.engine.core.executor.compilations import compilations
from jitney.engine.core.executor.program import StateSizes
from jitney.engine.core.executor.runner import Runner
from jitney.engine.core.executor.sampling import Sampler, SamplingRows, SeatState
from jitney.engine.core.executor.step_programs import StepPrograms
from jitney.engine.core.measuring.made_up_steps import StepCase
from jitney.engine.core.models.registry import abstract_model, random_model
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.page_tables import PageTables
from jitney.engine.core.scheduler.scheduler import Scheduler
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.kernels.select import select

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

KERNELS = select("cpu", "reference")
BUCKETS = Buckets.of(max_seats=4, token_budget=32, seat_sizes=(4,), token_sizes=(32,))
SIZES = StateSizes(
    seats=4, n_pages=16, page_size=16, context_length=64, kv_dtype=jnp.dtype("float32")
)
DECODE, MIXED = Bucket(4, 4), Bucket(32, 4)


def make_runner(*, greedy_only_mixed: bool = False) -> Runner:
    model = random_model(tiny_config())
    programs = StepPrograms(model, BUCKETS, KERNELS, SIZES, greedy_only_mixed=greedy_only_mixed)
    return Runner(programs, end_ids=())


@pytest.fixture(scope="module")
def runner() -> Runner:
    """One with an executable of every kind, sized first as on a device."""
    made = make_runner(greedy_only_mixed=True)
    assert made.programs.largest_temp_bytes() > 0
    first = dict(made.programs.executables)
    assert set(first) == {(MIXED, False), (DECODE, False)}
    made.compile()
    for kind, step in first.items():
        assert made.programs.executables[kind] is step, "a largest step was compiled twice"
    return made


def test_a_runner_that_is_let_go_leaves_nothing():
    """Neither its pools nor its weights: jax keeps whatever listens to it."""
    made = make_runner()
    made.compile()
    pool = weakref.ref(made.state.kv[0])
    weights = weakref.ref(made.leaves[0])
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert [gone(), pool(), weights()] == [None, None, None]


def test_every_kind_has_one_executable(runner: Runner):
    assert set(runner.programs.executables) == {
        (DECODE, True),
        (DECODE, False),
        (MIXED, True),
        (MIXED, False),
    }
    assert runner.compiles == 0


def test_the_memory_of_all_steps_is_told_and_the_pool_has_counted_the_largest(runner: Runner):
    memory = runner.programs.memory()
    assert [step.name for step in memory.steps] == [
        f"{bucket}{'' if greedy_only else ' sampling'}"
        for bucket, greedy_only in runner.programs.executables
    ]
    assert 0 < memory.largest.temporaries <= runner.programs.largest_temp_bytes()
    vocab = runner.programs.config.vocab_size
    sampled = next(step for step in memory.steps if step.name == f"{MIXED} sampling")
    assert sampled.outputs >= 4 * MIXED.seats * vocab  # its logits are left for masks
    assert len(list(memory.table())) == 1 + len(memory.steps)


def test_the_memory_of_a_program_is_analysed_once(runner: Runner, monkeypatch: pytest.MonkeyPatch):
    asked: list[jax.stages.Compiled] = []
    analyse = jax.stages.Compiled.memory_analysis

    def counted(self: jax.stages.Compiled) -> Any:
        asked.append(self)
        return analyse(self)

    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", counted)
    program_memory._analyses.clear()
    assert runner.programs.memory() == runner.programs.memory()
    assert len(asked) == len(set(asked)) == len(runner.programs.executables)


def test_the_compilation_of_every_bucket_is_timed(runner: Runner):
    buckets = runner.programs.bucket_compilations()
    assert {one.bucket for one in buckets} == {str(DECODE), str(MIXED)}
    assert 0 < max(one.seconds for one in buckets) <= runner.programs.compile_seconds


@pytest.mark.parametrize("from_cache", [False, True])
def test_programs_of_the_cache_folder_are_told_apart(from_cache: bool):
    compiled = jax.jit(lambda x: 3 * x).lower(np.float32(1)).compile()  # perhaps read from a cache

    def take() -> jax.stages.Compiled:
        if from_cache:
            jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        return compiled

    program = compilations.timed(take)
    assert compilations.of_bucket("any", [program]).from_cache == from_cache


def test_mixed_steps_are_plain_only_where_that_is_asked_for(runner: Runner):
    assert runner.programs.runs_greedy_only(MIXED, True) and not runner.programs.runs_greedy_only(
        MIXED, False
    )
    other = make_runner()
    assert not other.programs.runs_greedy_only(MIXED, True) and other.programs.runs_greedy_only(
        DECODE, True
    )


def test_a_mixed_step_answers_alike_with_and_without_the_sampler(runner: Runner):
    plan = StepCase(MIXED, prompts=((0, 9), (0, 17))).plan(0, SIZES.page_size)
    found = []
    for plain in (True, False):
        runner.programs.greedy_only_mixed = plain
        found.append(runner.fetch(runner.launch(runner.batch(plan))).tokens)
    runner.programs.greedy_only_mixed = True
    assert found[0] == found[1] and len(found[0]) == 2


def test_the_state_is_empty_until_it_is_allocated():
    made = make_runner()
    assert all(isinstance(pool, jax.ShapeDtypeStruct) for pool in made.state.kv)


def test_the_state_of_a_ready_runner(runner: Runner):
    assert [pool.shape for pool in runner.state.kv] == [(16, 16, 4, 16)] * 2
    assert (
        runner.state.seats.counts.shape == (4, 512)
        and np.asarray(runner.state.seats.bias_ids == 512).all()
    )


def test_bytes_of_a_devices_pages():
    """One page of 2 layers, 16 positions, keys and values, heads of one device, 16 numbers a
    head, 4 bytes.
    """
    assert SIZES.page_bytes(tiny_config(), KERNELS) == (2 * 16 * 2 * 2 * 16 * 4,)
    assert SIZES.page_bytes(tiny_config().local(2), KERNELS) == (2 * 16 * 2 * 1 * 16 * 4,)
    wide = replace(KERNELS, pool_shape=lambda n, page, *_: (n, page, 8, 128))
    assert SIZES.page_bytes(tiny_config(), wide) == (2 * 16 * 8 * 128 * 4,)
    assert SIZES.shapes(tiny_config(), wide, None).kv[0].shape == (16, 16, 8, 128)


@pytest.mark.parametrize(("bucket", "plain"), [(DECODE, True), (MIXED, False)], ids=str)
def test_a_program_from_shapes_alone_is_the_engines_own(
    runner: Runner, bucket: Bucket, plain: bool
):
    lowered = lower_step(abstract_model(tiny_config()), bucket, plain, KERNELS, SIZES)
    assert lowered.as_text() == runner.programs.lower(bucket, plain).as_text()


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(("bucket", "plain"), [(DECODE, True), (MIXED, True)], ids=str)
def test_the_last_feed_forward_is_for_the_rows_that_choose(
    bucket: Bucket, plain: bool, layers: int
):
    rows = []

    def gated(x: jax.Array, w: jax.Array) -> jax.Array:
        rows.append(x.shape[0])
        return KERNELS.gated(x, w)

    config = replace(tiny_config(), n_layers=layers, windows=(0,) * layers)
    lower_step(abstract_model(config), bucket, plain, replace(KERNELS, gated=gated), SIZES)
    # Layers of one make are traced once.
    before_the_last = [bucket.tokens] if layers > 1 else []
    assert rows == [*before_the_last, bucket.seats]


class FavouringParams(SamplingParams, frozen=True, kw_only=True):
    """Sampling parameters with one that nobody else has."""

    #: The token that is likelier than all others.
    favourite: Annotated[int, Range(0, 511), Uploaded("int32")] = 0


class FavouringSampler(Sampler):
    """The sampler with that parameter's line."""

    def sample(self, logits: jax.Array, rows: SamplingRows, state: SeatState, *rest: Any) -> Any:
        favoured = jnp.arange(logits.shape[-1]) == rows.params["favourite"][:, None]
        return super().sample(jnp.where(favoured, 1e9, logits), rows, state, *rest)


def test_a_made_up_sampling_parameter_reaches_the_sampler(monkeypatch: pytest.MonkeyPatch):
    """Its declaration and its line are all that a parameter takes: range, upload and the name
    inside jit follow.
    """
    monkeypatch.setattr(inputs, "SAMPLING", inputs._SamplingUpload(FavouringParams))
    monkeypatch.setattr(program, "Sampler", FavouringSampler)
    monkeypatch.setattr(StepPrograms, "_compile_all", await_use)
    runner = make_runner()
    runner.compile()
    scheduler = Scheduler(
        SchedulerLimits(4, SIZES.context_length),
        BUCKETS,
        PageTables(PagePool(16, 16)),
        vocab_size=512,
    )
    core = EngineCore(scheduler, runner, Ledger())
    for favourite in (7, 300, 512):
        params = FavouringParams(favourite=favourite, max_tokens=3)
        core.add(EngineRequest(id=str(favourite), prompt=[1, 2], sampling=params, arrival=0.0))
    tokens: dict[str, list[int]] = {}
    for output in core.run_until_idle():
        tokens.setdefault(output.request_id, []).extend(output.tokens)
        if output.request_id == "512":
            assert output.error is not None and output.error.param == "favourite"
    assert tokens == {"7": [7] * 3, "300": [300] * 3, "512": []}
