"""Step tables: fits that find the curve they were made from, and rooflines worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jitney.engine.common.errors import ConfigError, ModelError
from jitney.engine.common.records import STEP_DTYPE
from jitney.engine.core.measuring.virtual import HostTimes
from jitney.engine.core.scheduler.buckets import Bucket
from jitney.engine.core.scheduler.plan import StepWork
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.lab.simulation.devices import DEVICES
from jitney.engine.lab.simulation.roofline import (
    SHAPES,
    Assumptions,
    ModelCost,
    Roofline,
    _find_shape,
)
from jitney.engine.lab.simulation.step_table import Curve, StepTable, _fit_kind, _Point

D8, D32, M64, M128 = Bucket(8, 8), Bucket(32, 32), Bucket(64, 32), Bucket(128, 32)
TRUE = {
    D8: Curve(8, 8, 0.010, 1e-6, 5e-6),
    D32: Curve(32, 32, 0.030, 1e-6, 5e-6),
    M64: Curve(64, 32, 0.050, 1e-6, 0.0, 1e-4, 2e-8),
    M128: Curve(128, 32, 0.090, 1e-6, 0.0, 1e-4, 2e-8),
}


def random_work(rng: np.random.Generator, bucket: Bucket) -> StepWork:
    decode = int(rng.integers(1, bucket.seats))
    prompt = 0 if bucket.decode_only else int(rng.integers(1, bucket.tokens - decode + 1))
    longest = int(rng.integers(50, 2000))
    return StepWork(
        decode,
        prompt,
        int(longest * decode * rng.uniform(0.3, 1)),
        longest,
        prompt * int(rng.integers(1, 1000)),
    )


def points(
    count: int, scatter: float = 0.0, seed: int = 0, buckets: tuple[Bucket, ...] = tuple(TRUE)
) -> list[_Point]:
    rng = np.random.default_rng(seed)
    found = []
    for bucket in buckets:
        for _ in range(count):
            work = random_work(rng, bucket)
            found.append(
                _Point(
                    bucket,
                    work,
                    TRUE[bucket].seconds(work) * float(rng.uniform(1 - scatter, 1 + scatter)),
                )
            )
    return found


def test_a_fit_finds_the_curve_behind_the_points():
    table = StepTable._from_points(points(40))
    for point in points(20, seed=1):
        assert table.seconds(point.bucket, point.work) == pytest.approx(point.seconds, rel=1e-6)
    assert {curve.points for curve in table.curves} == {40}
    assert table.errors["decode"].median < 1e-6 and abs(table.errors["mixed"].total) < 1e-6
    assert table.noise["decode"] == pytest.approx([1.0] * 80)


def test_scatter_averages_out_and_is_kept_as_noise():
    table = StepTable._from_points(points(400, scatter=0.3))
    for point in points(20, seed=1):
        assert table.seconds(point.bucket, point.work) == pytest.approx(point.seconds, rel=0.08)
    noise = table.noise["mixed"]
    assert np.mean(noise) == pytest.approx(1.0)
    assert noise == sorted(noise) and (noise[0], noise[-1]) == pytest.approx((0.7, 1.3), abs=0.05)
    assert abs(table.errors["decode"].total) < 0.01


def test_a_stalled_step_bends_no_curve_and_its_time_is_not_lost():
    made = points(100)
    made[150] = made[150]._replace(
        seconds=made[150].seconds * 200
    )  # a decode step of the larger bucket
    table = StepTable._from_points(made)
    stretch = sum(p.seconds for p in made[:200]) / sum(p.seconds for p in points(100)[:200])
    assert stretch > 1.5 and abs(table.errors["decode"].total) < 1e-9
    for point in points(20, seed=1):
        factor = stretch if point.bucket.decode_only else 1.0
        assert table.seconds(point.bucket, point.work) == pytest.approx(
            factor * point.seconds, rel=0.1
        )
    bent, fresh = StepTable(_fit_kind(made[:200])), points(20, seed=1, buckets=(D8, D32))
    assert max(bent.seconds(p.bucket, p.work) / p.seconds for p in fresh) > 1.5 * stretch


@pytest.mark.parametrize("free", [True, False])
def test_steps_tell_whether_padding_is_free(free: bool):
    """As steps of a CPU's kernels and of XLA's take: 1 ms a row that is somebody's, or a row of the
    bucket.
    """
    rng = np.random.default_rng(3)
    made = []
    for bucket in (D32, M64, M128):
        for _ in range(30):
            work = random_work(rng, bucket)
            rows = work.decode + work.prompt if free else bucket.tokens
            seconds = (0.010 + 0.001 * rows) * float(rng.uniform(0.95, 1.05))
            made.append(_Point(bucket, work, seconds))
    table = StepTable._from_points(made)
    assert table.padding_is_free == free
    assert StepTable(table.curves).padding_is_free == free
    assert not StepTable([Curve(8, 8, 0.010)]).padding_is_free, "no step had a prompt"


def test_unseen_buckets_lie_between_their_neighbours():
    table = StepTable(
        [
            Curve(8, 8, 0.010),
            Curve(32, 32, 0.034, per_key=1e-6),
            Curve(64, 32, 0.1),
            Curve(128, 32, 0.2),
        ]
    )
    assert table.seconds(Bucket(16, 16), StepWork()) == pytest.approx(0.010 + 0.024 / 3)
    assert table.seconds(Bucket(24, 24), StepWork(keys=1000)) == pytest.approx(0.026 + 0.001)
    assert table.seconds(Bucket(4, 4), StepWork()) == pytest.approx(0.010)
    assert table.seconds(Bucket(256, 32), StepWork()) == pytest.approx(
        0.4
    )  # as steep as between the last two
    assert table.seconds(Bucket(96, 32), StepWork()) == pytest.approx(0.15)


def records_of(many: list[_Point]) -> np.ndarray:
    records = np.zeros(len(many), STEP_DTYPE)
    for record, (bucket, work, seconds) in zip(records, many, strict=True):
        fields = {
            "bucket_tokens": bucket.tokens,
            "bucket_seats": bucket.seats,
            "mixed": not bucket.decode_only,
            "prefill": work.prompt,
            "decode": work.decode,
            "padding": bucket.tokens - work.prompt - work.decode,
            "keys": work.keys,
            "longest": work.longest,
            "pairs": work.pairs,
            "device_s": seconds,
            "seats_busy": work.decode,
            "plan_s": 1e-4 + 1e-6 * work.decode,
            "batch_s": 2e-4,
            "launch_s": 3e-4,
            "commit_s": 2e-6 * work.decode,
        }
        for name, value in fields.items():
            record[name] = value
    return records


def test_records_calibrate_device_and_host():
    made = [p for p in points(60) if p.work.decode + p.work.prompt <= p.bucket.tokens]
    records = records_of(made)
    records["compiled"][:5], records["device_s"][:5] = 1, 30.0  # a compile is no step time
    table = StepTable.from_records(records)
    for point in made[5:]:
        assert table.seconds(point.bucket, point.work) == pytest.approx(point.seconds, rel=1e-4)
    host = table.host
    assert (host.before, host.before_per_row) == pytest.approx((6e-4, 1e-6), rel=1e-3)
    assert (host.after, host.after_per_row) == pytest.approx((0, 2e-6), rel=1e-3, abs=1e-8)


def test_a_table_survives_its_file(tmp_path: Path):
    table = StepTable._from_points(
        points(40, scatter=0.2), HostTimes(1e-4, 2e-6, 3e-5, 4e-6), "here"
    )
    (file := tmp_path / "t.json").write_text(json.dumps({"model": "x", "table": table.contents()}))
    again = StepTable.load(file)
    assert (again.curves, again.host, again.noise, again.errors, again.source) == (
        table.curves,
        table.host,
        table.noise,
        table.errors,
        "here",
    )


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("nonsense", "not a step table"),
        ('{"table": {"curves": []}}', "at least"),
        ('{"table": {"curves": [{"tokens": "x"}]}}', "tokens"),
    ],
)
def test_a_file_that_is_no_table_is_one_line(tmp_path: Path, text: str, word: str):
    (file := tmp_path / "t.json").write_text(text)
    with pytest.raises(ConfigError, match=word):
        StepTable.load(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        StepTable.load(tmp_path / "absent")


def test_of_steps_that_were_repeated_the_table_goes_through_the_medians():
    repeats = [
        (Bucket(4, 4), StepWork(4, 0, 4 * length, length), [0.9 * t, t, 5 * t])
        for length in (10, 100, 1000)
        for t in [0.01 + 1e-5 * length]
    ]
    table = StepTable.from_repeats(repeats, HostTimes(), "here")
    for bucket, work, (_, median, _) in repeats:
        assert table.seconds(bucket, work) == pytest.approx(median, rel=1e-3)
    assert table.noise["decode"][-1] > 2 * table.noise["decode"][0] and "mixed" not in table.noise
    assert table.source == "here"


def test_parameters_are_the_published_ones():
    assert ModelCost(SHAPES["llama-3.1-8b"]).parameters == pytest.approx(8.03e9, rel=1e-3)
    assert ModelCost(SHAPES["llama-3.1-70b"]).parameters == pytest.approx(70.55e9, rel=1e-3)
    assert ModelCost(SHAPES["qwen3-8b"]).parameters == pytest.approx(8.19e9, rel=1e-3)
    assert ModelCost(SHAPES["llama-3.2-1b"]).parameters == pytest.approx(1.236e9, rel=1e-3)
    # 32 layers * 2 * 8 heads * 128 * 2 bytes
    assert ModelCost(SHAPES["llama-3.1-8b"]).kv_bytes == 131072
    assert ModelCost(SHAPES["llama-3.1-8b"], kv="fp8").kv_bytes == 65536


IDEAL = Assumptions(bandwidth=1, flops=1, overhead_s=0, hop_s=0)


def test_a_decode_step_on_one_chip_by_hand():
    """Weights: layers 6,979,321,856 + head 525,336,576 numbers of 2 bytes; KV of 100 * 1000 + 100
    positions.
    """
    roofline = Roofline(ModelCost(SHAPES["llama-3.1-8b"]), DEVICES["h100"], assumed=IDEAL)
    work = StepWork(decode=100, keys=100_000)
    weights = 2 * (6_979_321_856 + 525_336_576)
    assert roofline.seconds(Bucket(100, 100), work) == pytest.approx(
        (weights + 100_100 * 131072) / 3.35e12
    )
    flops = 100 * weights + 4 * 32 * 32 * 128 * 100_000
    assert roofline.compute_seconds(Bucket(100, 100), work) == pytest.approx(flops / 989.5e12)


def test_a_prompt_step_is_bound_by_arithmetic_and_efficiencies_divide():
    cost, bucket, work = (
        ModelCost(SHAPES["llama-3.1-8b"]),
        Bucket(4096, 8),
        StepWork(prompt=4096, pairs=4096 * 2048),
    )
    ideal = Roofline(cost, DEVICES["h100"], assumed=IDEAL).seconds(bucket, work)
    # The last layer's feed-forward is for the rows that logits are wanted of, as the head is.
    products = 6_979_321_856 * 4096 - 3 * 4096 * 14336 * (4096 - 8) + 525_336_576 * 8
    flops = 2 * products + 4 * 32 * 4096 * 4096 * 2048
    assert ideal == pytest.approx(flops / 989.5e12)
    real = Roofline(
        cost, DEVICES["h100"], assumed=Assumptions(flops=0.5, overhead_s=0.001)
    ).seconds(bucket, work)
    assert real == pytest.approx(2 * ideal + 0.001)


def test_formats_choose_bytes_and_units():
    h100, work = DEVICES["h100"], StepWork(prompt=8192)
    layers = {
        name: Roofline(
            ModelCost(SHAPES["llama-3.1-8b"], name), h100, assumed=IDEAL
        ).compute_seconds(Bucket(8192, 1), work)
        for name in ("bf16", "fp8", "int4")
    }
    assert layers["int4"] == layers["bf16"]  # weights are widened, activations stay bfloat16
    assert (
        layers["fp8"] < 0.6 * layers["bf16"]
    )  # both are fp8: the layers' products at twice the rate
    fp8 = ModelCost(SHAPES["llama-3.1-8b"], "fp8", "fp8")
    for name, count, bound in (("h100", 1, "memory"), ("v7x", 1, "bf16"), ("h100", 2, "memory")):
        roofline = Roofline(fp8, DEVICES[name], count)
        decode = StepWork(decode=256, keys=256 * 600)
        at_256 = roofline.compute_seconds(Bucket(256, 256), decode)
        if bound == "memory":
            assert at_256 < roofline.memory_seconds(Bucket(256, 256), decode)
        else:
            wide = replace(roofline, cost=replace(fp8, weights="bf16"))
            assert at_256 == wide.compute_seconds(Bucket(256, 256), decode)
    assert DEVICES["a100-80"].peak("fp8") == 312e12  # no such unit: bfloat16 does it
    assert ModelCost(SHAPES["llama-3.1-8b"], "int8").weight_bytes == 6_979_321_856 + 3 * 525_336_576
    assert ModelCost(
        SHAPES["llama-3.2-1b"], "int8"
    ).weight_bytes == (  # a tied head stays as the embedding is
        ModelCost(SHAPES["llama-3.2-1b"]).layer_weights + 2 * 128256 * 2048
    )
    assert ModelCost(tiny_config(), "int4").weight_bytes == pytest.approx(
        ModelCost(tiny_config()).layer_weights * (0.5 + 3 / 128) + (2 + 0.5 + 3 / 128) * 512 * 64
    )


def test_two_chips_share_weights_and_talk():
    cost, bucket, work = (
        ModelCost(SHAPES["llama-3.1-8b"]),
        Bucket(64, 64),
        StepWork(decode=64, keys=64_000),
    )
    one, two = (Roofline(cost, DEVICES["h100"], n, Assumptions(1, 1, 0, 1e-5)) for n in (1, 2))
    assert two.memory_seconds(bucket, work) == pytest.approx(one.memory_seconds(bucket, work) / 2)
    assert one.link_seconds(64) == 0
    exchanged = 2 * 32 * (1e-5 + 64 * 4096 * 2 / 450e9)
    assert two.link_seconds(64) == pytest.approx(exchanged)
    over_all_heads = ModelCost(replace(cost.config, wide_qk_norm=True))  # two numbers a row more
    waited = replace(two, cost=over_all_heads).link_seconds(64)
    assert waited == pytest.approx(exchanged + 32 * 1e-5)
    assert Roofline(cost, DEVICES["v5e"], 16).kv_split == 8  # no more KV heads than that


def test_shapes_come_from_names_files_and_models(tmp_path: Path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 4,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "intermediate_size": 128,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = _find_shape(str(tmp_path / "config.json"))
    assert (shape.n_layers, shape.hidden_size) == (2, 64) and _find_shape(str(tmp_path)) == shape
    assert _find_shape("tiny-random") == tiny_config()
    with pytest.raises(ModelError, match=r"tiny-random:bert is an encoder \(BertModel\)"):
        _find_shape("tiny-random:bert")
    with pytest.raises(ModelError, match="built-in shape: llama"):
        _find_shape("no-such-model")
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        _find_shape(str(tmp_path / "bad.json"))


@pytest.mark.parametrize(
    "wrong", [{"bandwidth": 0}, {"flops": 1.5}, {"memory": float("nan")}, {"overhead_s": -1}]
)
def test_impossible_assumptions_are_refused(wrong: dict[str, float]):
    with pytest.raises(ConfigError):
        Assumptions(**wrong)
    with pytest.raises(ConfigError, match="number format"):
        ModelCost(tiny_config(), "int3")
