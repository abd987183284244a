"""How much of its device an engine uses, against sums made by hand and the weights of a real
model.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import msgspec
import numpy as np
import pytest
from engine_infos import engine_info
from flax import nnx

from jitney.engine.common.device_use import WINDOW_S, DeviceUse
from jitney.engine.common.records import STEP_DTYPE, RecordRing
from jitney.engine.common.step_cost import DeviceCeiling, StepCost, StepRows
from jitney.engine.core.models.llama import Llama
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.describe import describe_step

#: Two layers, 100 numbers of attention and 60 of one feed-forward in all, a head of 40.
COST = StepCost(
    n_layers=2,
    shared_weights=100,
    expert_weights=60,
    n_experts=1,
    n_chosen=1,
    weight_bytes=2.0,
    head_weights=40,
    head_bytes=80.0,
    attention_width=8,
    kv_bytes=16.0,
)
CEILING = DeviceCeiling(bytes_s=1e6, operations_s=1e5)


def info(cost: StepCost | None = COST, ceiling: DeviceCeiling | None = CEILING, **fields):
    return msgspec.structs.replace(engine_info(**fields), step_cost=cost, ceiling=ceiling)


def ring(*steps: dict[str, float]) -> RecordRing:
    records = RecordRing(64)
    for number, fields in enumerate(steps):
        record = np.zeros(1, STEP_DTYPE)
        for name, value in (fields | {"step": number, "started": 100.0 + number}).items():
            record[name] = value
        records.add(record.tobytes())
    return records


DECODE = dict(
    bucket_tokens=4, bucket_seats=4, decode=3, padding=1, seats_busy=3, keys=50, device_s=0.01
)
MIXED = dict(
    bucket_tokens=8,
    bucket_seats=2,
    prefill=7,
    decode=1,
    seats_busy=2,
    keys=5,
    pairs=128,
    device_s=0.03,
)


def test_bytes_and_operations_are_those_of_the_programs():
    use = DeviceUse.of(info(), ring(DECODE, MIXED), 102.0)
    weights = (100 + 60) * 2 + 80
    moved = weights + (50 + 4) * 16 + weights + (5 + 128 / 128 + 8) * 16
    decode = 2 * 160 * 4 + 2 * 40 * 4 + 4 * 8 * 50
    # The last layer's feed-forward, 30 numbers, is computed for the two rows with logits alone.
    mixed = 2 * (160 * 8 - 30 * 6) + 2 * 40 * 2 + 4 * 8 * (5 + 128)
    assert use.bytes_s == pytest.approx(moved / 0.04)
    assert use.operations_s == pytest.approx((decode + mixed) / 0.04)
    assert use.bandwidth == pytest.approx(moved / 0.04 / 1e6)
    assert use.operations == pytest.approx((decode + mixed) / 0.04 / 1e5)
    assert use.busy == pytest.approx(0.04 / WINDOW_S, rel=1e-6)


def test_padding_counts_where_it_is_computed():
    paid = DeviceUse.of(info(), ring(DECODE), 101.0).operations_s
    free = DeviceUse.of(info(padding_is_free=True), ring(DECODE), 101.0).operations_s
    assert paid and free and paid - free == pytest.approx((2 * 160 + 2 * 40) / 0.01, rel=1e-6)


def test_a_mixture_reads_the_experts_that_its_rows_choose():
    cost = msgspec.structs.replace(COST, n_experts=8, n_chosen=2)
    one, many = (cost.read_bytes(rows, StepRows())[0] for rows in (1, 4096))
    assert one == pytest.approx((100 + 2 * 60) * 2 + 80)
    assert many == pytest.approx((100 + 8 * 60) * 2 + 80)
    layers, _ = cost.operations(10, 10, StepRows())
    assert layers == 2 * (100 + 2 * 60) * 10


def test_windows_bound_what_rows_see_and_a_state_is_read_and_written():
    cost = msgspec.structs.replace(COST, windows={0: 0.5, 4: 0.5}, state_bytes=1000.0)
    work = StepRows(decode=3, prompt=2, keys=50, pairs=20)
    weights, kv = cost.read_bytes(5, work)
    assert weights == (100 + 60) * 2 + 80 + 2 * (3 + 1) * 1000
    keys, pairs = (50 + 3 * 4) / 2, (20 + 2 * 4) / 2
    assert kv == (keys + pairs / 128 + 5) * 16
    assert cost.operations(5, 5, work)[1] == 2 * 40 * 5 + 4 * 8 * (keys + pairs)


@pytest.mark.parametrize(
    ("engine", "steps"),
    [
        (info(ceiling=None), (DECODE,)),
        (info(cost=None), (DECODE,)),
        (info(), ()),
        (None, (DECODE,)),
    ],
)
def test_what_is_not_known_is_not_told(engine, steps):
    use = DeviceUse.of(engine, ring(*steps), 101.0)
    assert use.bandwidth is None and use.operations is None


def test_a_rate_alone_where_its_most_is_not_known():
    use = DeviceUse.of(info(ceiling=DeviceCeiling(bytes_s=1e6)), ring(DECODE), 101.0)
    assert use.bandwidth and use.operations is None and use.operations_s


def test_only_the_last_seconds_count():
    use = DeviceUse.of(info(), ring(DECODE, MIXED), 100.5 + WINDOW_S)
    assert use.bytes_s == pytest.approx(((160 * 2 + 80) + 14 * 16) / 0.03, rel=1e-6)
    assert DeviceUse.of(info(), ring(DECODE, MIXED), 110 + WINDOW_S).busy == 0


def test_a_step_takes_at_least_what_bandwidth_and_arithmetic_allow():
    steps = ring(DECODE, MIXED).since(-1)
    expected = []
    for step in (DECODE, MIXED):
        use = DeviceUse.of(info(), ring(step), 101.0)
        expected.append(max(use.bandwidth or 0, use.operations or 0) * step["device_s"])
    least = DeviceUse.least_seconds(info(), steps)
    assert least is not None and least.tolist() == pytest.approx(expected)
    assert DeviceUse.least_seconds(info(ceiling=None), steps) is None


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_all_weights_of_a_model_but_the_embedding_and_the_norms(tied: bool):
    config = replace(tiny_config(), tie_embeddings=tied)
    model = Llama(config, dtype=np.float32, rngs=nnx.Rngs(0))
    leaves = jax.tree.leaves_with_path(nnx.state(model))
    matrices = sum(leaf.nbytes for path, leaf in leaves if leaf.ndim == 2)
    if not tied:
        matrices -= config.vocab_size * config.hidden_size * 4  # rows of the embedding alone
    cost = describe_step(model, config, kv_bytes=0.0)
    weights, _ = cost.read_bytes(1, StepRows())
    assert weights == pytest.approx(matrices)
