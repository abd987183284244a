"""What an engine that sleeps gives back, and that it wakes as it was."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from jitney.engine.core.executor.program import StateSizes
from jitney.engine.core.executor.runner import Runner
from jitney.engine.core.executor.step_programs import StepPrograms
from jitney.engine.core.measuring.made_up_steps import StepCase
from jitney.engine.core.models.registry import random_model
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.kernels.select import select

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

BUCKETS = Buckets.of(max_seats=4, token_budget=32, seat_sizes=(4,), token_sizes=(32,))
#: 16,384 pages of 8 KiB.
SIZES = StateSizes(
    seats=4, n_pages=1 << 14, page_size=16, context_length=64, kv_dtype=jnp.dtype("float32")
)
POOL_BYTES = 128 << 20
PLAN = StepCase(Bucket(32, 4), prompts=((0, 9), (0, 17))).plan(0, SIZES.page_size)


@pytest.fixture(scope="module")
def runner() -> Runner:
    kernels = select("cpu", "reference")
    made = Runner(StepPrograms(random_model(tiny_config()), BUCKETS, kernels, SIZES), end_ids=())
    made.compile()
    return made


def tokens_of(runner: Runner) -> list[int]:
    return runner.fetch(runner.launch(runner.batch(PLAN))).tokens


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def test_the_memory_of_the_pool_is_the_machines_again_until_it_wakes(runner: Runner):
    before = tokens_of(runner)
    pools = [pool for pool in runner.state.kv if isinstance(pool, jax.Array)]
    assert len(pools) == len(runner.state.kv)
    awake = resident()
    said: list[bool] = []
    freed = runner.sleep(lambda: said.append(True))
    assert POOL_BYTES <= freed < 1.1 * POOL_BYTES
    assert all(pool.is_deleted() for pool in pools)
    asleep = resident()
    assert awake - asleep > 0.9 * POOL_BYTES
    runner.wake(lambda: said.append(True))
    assert tokens_of(runner) == before
    assert resident() - asleep > 0.9 * POOL_BYTES
    assert runner.compiles == 0


def test_the_weights_of_a_device_with_memory_of_its_own_wait_on_the_host(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
):
    before = tokens_of(runner)
    weights = list(runner.leaves)
    values = [np.asarray(leaf).copy() for leaf in weights]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    said: list[bool] = []
    freed = runner.sleep(lambda: said.append(True))
    assert freed >= POOL_BYTES + sum(value.nbytes for value in values)
    assert all(leaf.is_deleted() for leaf in weights) and len(said) == len(weights)
    runner.wake(lambda: said.append(True))
    for leaf, value in zip(runner.leaves, values, strict=True):
        assert np.array_equal(np.asarray(leaf), value)
    assert tokens_of(runner) == before and runner.compiles == 0


def test_it_may_sleep_many_times(runner: Runner):
    before = tokens_of(runner)
    for _ in range(3):
        runner.sleep(lambda: None)
        runner.wake(lambda: None)
    assert tokens_of(runner) == before and runner.compiles == 0
