"""The planner against sums done by hand, and against the simulator."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from jitney.engine.common.errors import ConfigError
from jitney.engine.core.measuring.engine_shape import EngineShape
from jitney.engine.core.measuring.virtual import HostTimes
from jitney.engine.core.scheduler.buckets import Bucket, Buckets
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.plan import StepWork
from jitney.engine.lab.simulation.devices import DEVICES
from jitney.engine.lab.simulation.planner import (
    Load,
    OperatingPoint,
    Sizing,
    _fit,
    _seat_wait,
)
from jitney.engine.lab.simulation.roofline import SHAPES, ModelCost, Roofline
from jitney.engine.lab.simulation.simulator import simulate
from jitney.engine.lab.simulation.workload import Closed, Fixed, Uniform, synthesise

LLAMA = Roofline(ModelCost(SHAPES["llama-3.1-8b"]), DEVICES["h100"])
DEMAND = Load(prompt=512, output=256)


def test_memory_by_hand():
    memory = _fit(LLAMA, DEMAND)
    room = 0.92 * 80e9 - 2 * (6_979_321_856 + 2 * 525_336_576)
    pages = int(room / (131072 * 16)) - 1
    assert (memory.kv_room_bytes, memory.pages, memory.positions) == (
        pytest.approx(room),
        pages,
        pages * 16,
    )
    assert (memory.seats_mean, memory.seats_full) == (
        pages // 40,
        pages // 48,
    )  # 640 and 768 tokens in pages of 16


def test_what_recurrent_layers_keep_takes_room_and_time_by_hand():
    """48 layers of 48 heads with 128 x 128 numbers, and 10240 channels of 4 inputs; 16 layers of 4
    KV heads of 256.
    """
    roofline = Roofline(ModelCost(SHAPES["qwen3.5-27b"]), DEVICES["h100"])
    assert 26e9 < roofline.cost.weight_bytes / 2 < 28e9
    seat = 48 * 4 * (48 * 128 * 128 + 4 * 10240 + 1)
    page = 16 * 16 * 2 * 4 * 256 * 2
    memory = _fit(roofline, DEMAND)
    # A quarter beside the seats' slots is for checkpoints.
    n_seats, left = memory.seats_mean, roofline.kv_room - memory.seats_mean * seat
    assert memory.checkpoints == int(left / 4 / seat)
    assert memory.pages == int((left - memory.checkpoints * seat) / page) - 1
    assert 40 * n_seats <= memory.pages < 40 * n_seats + (40 * page + seat) / page
    drafted = _fit(roofline, replace(DEMAND, acceptance=0.5, drafts=3))
    left = roofline.kv_room - 4 * drafted.seats_mean * seat
    assert drafted.pages == int((left - drafted.checkpoints * seat) / page) - 1
    work = StepWork(decode=8)
    still = replace(roofline, cost=ModelCost(replace(SHAPES["qwen3.5-27b"], recurrent=None)))
    bucket = Bucket(8, 8)
    apart = roofline.memory_seconds(bucket, work) * 0.8 * 3.35e12
    weights, kv = roofline.cost.read_bytes(8, work)
    assert apart == pytest.approx(weights + kv)
    assert weights - still.cost.read_bytes(8, work)[0] > 2 * 8 * seat
    assert still.slot_bytes == 0 < roofline.slot_bytes


def test_a_prediction_head_takes_room_and_time_by_hand():
    """GLM-4.7-Flash: a layer of 20 heads, 64 experts and the shared one, and a matrix before it."""
    with_head = Roofline.named("glm-4.7-flash", "h100", speculative="mtp")
    without = Roofline.named("glm-4.7-flash", "h100")
    size = 2048
    queries = size * 768 + 768 * 20 * (192 + 64)
    keys = size * (512 + 64) + 20 * 512 * (192 + 256)
    layer = queries + keys + 20 * 256 * size + 64 * size + 65 * 3 * size * 1536
    assert without.kv_room - with_head.kv_room == 2 * (layer + 2 * size * size)
    (more,) = with_head.page_bytes(16)
    (less,) = without.page_bytes(16)
    assert more - less == 16 * 2 * (512 + 64) and more == less * 48 / 47
    work = StepWork(decode=1, keys=640)
    read, without_head = (one.cost.read_bytes(1, work)[0] for one in (with_head, without))
    experts = 5 * 3 * size * 1536
    layer_read = queries + keys + 20 * 256 * size + 64 * size + experts
    head = 2 * (layer_read + 2 * size * size + 154_880 * size)
    assert read - without_head == pytest.approx(head, rel=1e-3)
    each = with_head.draft_seconds(work, 3) / 3
    kept = 641 * 2 * (512 + 64)  # read and written
    assert each == pytest.approx((head + kept) / (0.8 * 3.35e12), rel=1e-3)
    assert without.draft_seconds(work, 3) == with_head.draft_seconds(work, 0) == 0
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        Roofline.named("llama-3.1-8b", "h100", speculative="mtp")


def test_a_draft_model_and_an_eagle3_head_take_room_and_time_by_hand(tmp_path: Path):
    """A 1B model beside one of 8B; and the head that was published for it: attention over 8,192
    numbers, 32,000 tokens, and a matrix that reads three hidden states.
    """
    alone = Roofline.named("llama-3.1-8b", "h100")
    small = Roofline.named("llama-3.2-1b", "h100").cost
    drafted = Roofline.named(
        "llama-3.1-8b", "h100", speculative="draft", draft_model="llama-3.2-1b"
    )
    assert alone.kv_room - drafted.kv_room == pytest.approx(small.weight_bytes)
    assert drafted.cost.kv_bytes - alone.cost.kv_bytes == small.kv_bytes
    config = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    headed = Roofline.named("llama-3.1-8b", "h100", speculative="eagle3", draft_model=str(tmp_path))
    attention = 2 * 4096 * (32 + 2 * 8) * 128 + 4096 * 4096
    weights = attention + 3 * 4096 * 14336 + 3 * 4096 * 4096 + 32000 * 4096
    assert alone.kv_room - headed.kv_room == 2 * weights
    (more,), (less,) = headed.page_bytes(16), alone.page_bytes(16)
    assert more == less * 33 / 32
    load = replace(DEMAND, acceptance=0.8, drafts=3)
    speeds = [OperatingPoint.of(one, load, 1).output_tok_s for one in (alone, headed, drafted)]
    assert speeds == sorted(speeds, reverse=True)


def test_a_steady_step_by_hand():
    """64 decoding, 128 prompt rows beside them: memory bound."""
    point = OperatingPoint.of(LLAMA, DEMAND, 64)
    positions = 64 * 640 + 128 * 256 / 128 + 192
    step = (2 * (6_979_321_856 + 525_336_576) + positions * 131072) / (0.8 * 3.35e12) + 3e-4
    assert point.step_s == pytest.approx(step) and point.bound == "memory"
    assert point.output_tok_s == pytest.approx(64 / step) and point.req_s == pytest.approx(
        64 / step / 256
    )


def test_drafts_bring_tokens_where_their_rows_are_free():
    """One stream waits for memory: all drafts are worth it. A row's time is all that many wait for:
    none is.
    """
    load = replace(DEMAND, acceptance=0.8, drafts=3)
    point = OperatingPoint.of(LLAMA, load, 1)
    assert point.drafts == 3
    assert point.output_tok_s * point.step_s == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert point.itl_s == pytest.approx(point.step_s / 2.952)
    crowd = replace(load, prompt=1, output=500)
    assert OperatingPoint.of(LLAMA, replace(crowd, acceptance=0.05), 1024).drafts == 0


def test_the_token_budget_bounds_who_decodes():
    point = OperatingPoint.of(LLAMA, replace(DEMAND, token_budget=300), 200)
    assert point.decoding == pytest.approx(100)  # 100 decode rows and 200 prompt rows


def test_waiting_for_one_server_is_the_m_m_1_queue():
    # P(wait > t) = load * exp(-(1 - load) t / service)
    assert _seat_wait(1, 2.0, 0.8, 0.99) == pytest.approx(math.log(0.8 / 0.01) * 2.0 / 0.2)
    # Two servers at 0.8: Erlang C = 0.7111
    assert _seat_wait(2, 2.0, 0.8, 0.99) == pytest.approx(
        math.log(0.71111 / 0.01) * 2.0 / 0.4, rel=1e-4
    )
    assert _seat_wait(500, 2.0, 0.8, 0.99) == 0.0


def test_limits_choose_the_batch_size_and_replicas():
    demand = replace(DEMAND, itl_s=0.0085, ttft_s=1.0, rate=100.0, price_per_hour=2.0)
    sizing = Sizing.of(LLAMA, demand)
    chosen = sizing.chosen
    assert chosen is not None and sizing.within_slo == chosen
    assert chosen.step_s <= 0.0085 and chosen.ttft_s <= 1.0
    larger = [p for p in sizing.curve if p.seats > chosen.seats]
    assert all(p.step_s > 0.0085 or p.ttft_s > 1.0 for p in larger)
    assert sizing.load_req_s == pytest.approx(0.8 * chosen.req_s)
    assert sizing.replicas == math.ceil(100 / (0.8 * chosen.req_s))
    assert sizing.cost_per_million_loaded == pytest.approx((chosen.cost_per_million or 0) / 0.8)


def test_without_limits_the_knee_is_chosen_and_impossible_ones_choose_nothing():
    assert Sizing.of(LLAMA, DEMAND).chosen == Sizing.of(LLAMA, DEMAND).knee
    assert Sizing.of(LLAMA, DEMAND).replicas is None
    hopeless = Sizing.of(LLAMA, replace(DEMAND, itl_s=0.001, rate=5.0))
    assert (hopeless.chosen, hopeless.load_req_s, hopeless.replicas) == (None, None, None)


def test_what_does_not_fit_says_so():
    with pytest.raises(ConfigError, match="--count"):
        Sizing.of(Roofline(ModelCost(SHAPES["llama-3.1-70b"]), DEVICES["h100"]), DEMAND)
    assert (
        Sizing.of(
            Roofline(ModelCost(SHAPES["llama-3.1-70b"]), DEVICES["h100"], 4), DEMAND
        ).memory.seats_full
        > 0
    )
    with pytest.raises(ConfigError, match="context of 131072"):
        Sizing.of(LLAMA, Load(prompt=131_000, output=100))
    for count in (0, 3, 5):
        with pytest.raises(ConfigError, match="divide"):
            replace(LLAMA, count=count).check_split()
    replace(LLAMA, count=16).check_split()  # KV heads are replicated


@pytest.mark.parametrize(
    "wrong",
    [{"prompt": 0}, {"output": 0}, {"itl_s": 0.0}, {"rate": -1.0}, {"price_per_hour": -2.0}],
)
def test_impossible_demands_name_the_field(wrong: dict[str, float]):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        replace(DEMAND, **wrong)


def test_the_simulator_agrees_with_the_steady_state():
    """32 seats that are always busy, and a bucket for every size, because the sum by hand knows no
    padding.
    """
    demand = Load(prompt=128, output=64, token_budget=512)
    roofline = replace(LLAMA, host=HostTimes())
    arrivals = synthesise(1500, Fixed(128), Uniform(16, 112), Closed(), 0)
    limits = SchedulerLimits(max_seats=32, context_length=256, max_waiting_requests=1000)
    buckets = Buckets(
        tuple(Bucket(n, n) for n in range(1, 33)), tuple(Bucket(n, 32) for n in range(33, 513))
    )
    run = simulate(arrivals, EngineShape(limits, buckets, 32 * 20), roofline, concurrency=40)
    assert run.figures()["output_tok_s"] == pytest.approx(
        OperatingPoint.of(roofline, demand, 32).output_tok_s, rel=0.05
    )
