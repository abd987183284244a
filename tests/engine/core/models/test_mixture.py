"""Mixtures of experts: who goes where, and what comes of it, against a loop over rows."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from oracle import prompt
from safetensors.numpy import save_file

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.errors import ConfigError, ModelError
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.executor.program import StateSizes
from jitney.engine.core.executor.proving import served_by
from jitney.engine.core.models.layers import Linear, RowFacts
from jitney.engine.core.models.mixture import Experts
from jitney.engine.core.models.quantization import Packed, quantise, widened
from jitney.engine.core.models.registry import abstract_model, random_model
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.layer_configs import ExpertsConfig
from jitney.engine.lab.simulation.roofline import SHAPES, ModelCost
from jitney.kernels import experts, w8a8
from jitney.kernels.interface import Fp8Products, KernelSet
from jitney.kernels.pallas_tpu import experts as pallas_experts
from jitney.kernels.proof_shapes import MixtureShape
from jitney.kernels.routing import Routes, route
from jitney.kernels.select import reference, select

pytestmark = pytest.mark.usefixtures("programs_when_used")


def chosen_of(scores: np.ndarray, config: ExpertsConfig) -> list[dict[int, float]]:
    """What each row gives to each expert it goes through, in float64."""
    found = []
    for row in scores.astype(np.float64):
        shares = np.exp(row - row.max())
        shares /= shares.sum()
        best = np.argsort(-shares, kind="stable")[: config.n_chosen]
        if config.renormalised:
            shares /= shares[best].sum()
        found.append({int(expert): float(shares[expert]) for expert in best})
    return found


def read(routes: Routes, n_padded: int) -> list[dict[int, float]]:
    """The same, out of the blocks."""
    found: list[dict[int, float]] = [{} for _ in range(n_padded)]
    blocks = routes.blocks
    rows = np.asarray(blocks.rows).reshape(-1, blocks.size)
    weights = np.asarray(routes.weights).reshape(-1, blocks.size)
    for block in range(int(blocks.count)):
        expert = int(blocks.experts[block])
        real = rows[block] < n_padded
        assert real.any() and (np.diff(rows[block][real]) > 0).all()
        assert real[: real.sum()].all()
        for row, weight in zip(rows[block][real], weights[block][real], strict=True):
            assert expert not in found[row]
            found[row][expert] = float(weight)
    assert (rows[int(blocks.count) :] == n_padded).all()
    return found


def rows_read(routes: Routes, n_padded: int) -> list[list[int]]:
    """For each row, the experts at its places, greatest share first."""
    blocks = routes.blocks
    places, owners = np.asarray(routes.places).T, np.asarray(blocks.experts)
    most = len(blocks.rows)
    for row, place in np.ndenumerate(places):
        assert place == most or blocks.rows[place] == row[0]
    return [[int(owners[p // blocks.size]) for p in own if p < most] for own in places]


@pytest.mark.usefixtures("hurried")
@given(
    seed=st.integers(0, 2**32 - 1),
    n_padded=st.sampled_from([1, 200]),
    config=st.sampled_from(
        [
            ExpertsConfig(1, 1, renormalised=True),
            ExpertsConfig(4, 2, renormalised=True),
            ExpertsConfig(5, 5, renormalised=False),
            ExpertsConfig(33, 3, renormalised=False),
        ]
    ),
    real=st.floats(0, 1),
    skew=st.sampled_from([0.1, 8.0]),
)
def test_every_real_row_goes_through_its_experts_and_no_other_row_does(
    seed: int, n_padded: int, config: ExpertsConfig, real: float, skew: float
):
    check_routes(seed, n_padded, config, round(real * n_padded), skew)


def test_steps_of_many_rows_are_routed_by_a_running_sum():
    check_routes(1, 1100, ExpertsConfig(33, 3, renormalised=True), 1090, 1.0)


def check_routes(seed: int, n_padded: int, config: ExpertsConfig, n_rows: int, skew: float) -> None:
    drawn = np.random.default_rng(seed)
    # Some experts are everybody's, others nobody's.
    scores = drawn.standard_normal((n_padded, config.n_experts))
    scores = (scores + skew * drawn.standard_normal(config.n_experts)).astype(np.float32)
    routed = jax.jit(route, static_argnums=1)(scores, config, jnp.int32(n_rows))
    found, wanted = read(routed, n_padded), chosen_of(scores, config)
    assert not any(found[n_rows:])
    at_places = rows_read(routed, n_padded)
    assert not any(at_places[n_rows:])
    assert [set(own) for own in at_places] == [own.keys() for own in found]
    assert (np.diff(np.asarray(routed.shares)[:, :n_rows], axis=0) <= 0).all()
    assert (np.asarray(routed.blocks.experts)[int(routed.blocks.count) :] == config.n_experts).all()
    for own, expected in zip(found[:n_rows], wanted[:n_rows], strict=True):
        assert own.keys() == expected.keys()
        np.testing.assert_allclose(
            [own[expert] for expert in expected], list(expected.values()), rtol=1e-4, atol=1e-6
        )


def real(n_rows: int) -> RowFacts:
    """So many rows are real, those behind them pad the step."""
    return RowFacts(jnp.int32(n_rows))


def naive(layer: Experts, x: np.ndarray, n_experts: int) -> np.ndarray:
    """Row by row and expert by expert, in float64, with the weights as they are stored."""

    def matrices(packed: Packed) -> list[np.ndarray]:
        return np.split(np.asarray(widened(packed), np.float64), n_experts, axis=1)

    def biases(linear: Linear) -> Any:
        return [0.0] * n_experts if linear.bias is None else np.split(linear.bias[...], n_experts)

    opening, closing = matrices(layer.gate_up.packed), matrices(layer.down.packed)
    added, added_behind = biases(layer.gate_up), biases(layer.down)
    scores = x.astype(np.float64) @ np.asarray(layer.router[...], np.float64)
    if layer.router_bias is not None:
        scores += np.asarray(layer.router_bias[...])
    found = np.zeros(x.shape)
    for row, shares in enumerate(chosen_of(scores, layer.experts)):
        for expert, share in shares.items():
            gate, up = np.split(x[row].astype(np.float64) @ opening[expert] + added[expert], 2)
            slope = 1.0
            if layer.gate_up.activation == "clamped_silu":
                gate, up, slope = np.minimum(gate, 7), np.clip(up, -7, 7) + 1, 1.702
            inner = gate / (1 + np.exp(-slope * gate)) * up
            found[row] += share * (inner @ closing[expert] + added_behind[expert])
    return found


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("family", "scheme", "packed"),
    [
        *(("gpt_oss", scheme, False) for scheme in ("plain", "mxfp4")),
        *(("mixtral", scheme, True) for scheme in (*Packed.schemes, "mxfp4")),
    ],
)
def test_a_layer_is_the_sum_of_its_rows_experts(family: str, scheme: str, packed: bool):
    layer, x = layer_of(family, scheme)
    expected = naive(layer, np.asarray(x), layer.experts.n_experts)
    kernels = reference()
    if packed:
        layer.pack(kernels)
    found = np.asarray(layer(x, kernels, real(37)))
    np.testing.assert_allclose(found[:37], expected[:37], rtol=0, atol=2e-4)
    assert np.abs(expected[:37]).max() > 1
    assert not found[37:].any()


@pytest.mark.parametrize("scheme", Packed.schemes)
def test_the_machines_own_kernels_give_the_same_layer_in_bfloat16(scheme: str):
    """Weights laid out in panels and multiplied where they lie, where this CPU has such."""
    layer, x = layer_of("mixtral", scheme, "bfloat16")
    expected = naive(layer, np.asarray(x, np.float32), layer.experts.n_experts)
    kernels = select("cpu", "auto")
    layer.pack(kernels)
    found = np.asarray(layer(x, kernels, real(40)), np.float64)
    # The rows of products in int8 are rounded to 8 bits as well.
    bound = 0.04 if scheme == "int8" else 0.02
    assert np.abs(found - expected).max() < bound * np.abs(expected).max()
    for row in (0, 17, 39):
        one = layer(x[row : row + 1], kernels, real(1))
        np.testing.assert_array_equal(np.asarray(one[0], np.float64), found[row])


AT_ONCE = {
    "plain jax.numpy": experts.experts,
    "Pallas, interpreted": partial(pallas_experts.experts, interpret=True),
}


def compare(layer: Experts, x: jax.Array, kernels: KernelSet, *, packed: bool = True) -> None:
    """The layer's output with the kernels is that of the reference, and 0 for padding."""
    expected = np.asarray(layer(x, reference(), real(37)))
    if packed:
        layer.pack(kernels)
    found = np.asarray(layer(x, kernels, real(37)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert not found[37:].any()


@pytest.mark.parametrize(("scheme", "packed"), [("plain", True), ("fp8", False)])
@pytest.mark.parametrize("name", AT_ONCE)
def test_all_blocks_at_once_give_what_one_after_the_other_gives(
    name: str, scheme: str, packed: bool
):
    calls = []

    def counted(*args: Any) -> jax.Array:
        calls.append(args)
        return AT_ONCE[name](*args)

    kernels = replace(reference(), experts=counted)
    compare(*layer_of("qwen3_moe", scheme), kernels, packed=packed)
    assert len(calls) == 1


@pytest.mark.usefixtures("hurried")
def test_scales_padded_to_whole_vectors_multiply_as_they_did():
    layer, x = layer_of("mixtral", "mxfp4")
    compare(layer, x, replace(reference(), experts=AT_ONCE["Pallas, interpreted"], scale_rows=32))
    for linear in (layer.gate_up, layer.down):
        assert linear.scale is not None and linear.scale.shape[1] == 32


def test_numbers_of_unused_places_reach_no_row():
    """A kernel leaves them as the memory was."""
    layer, x = layer_of("mixtral", "plain")

    def leaving(given: Any, *args: Any) -> jax.Array:
        blocks = args[2]
        answers = experts.experts(given, *args)
        return jnp.where((blocks.rows < len(given))[:, None], answers, jnp.nan)

    for n_rows in (0, 1, 37, 40):
        found = layer(x, replace(reference(), experts=leaving), real(n_rows))
        expected = layer(x, reference(), real(n_rows))
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=1e-4)


def test_a_row_alone_has_the_bits_it_has_in_a_crowd_all_at_once():
    layer, x = layer_of("qwen3_moe", "plain", "bfloat16")
    kernels = replace(reference(), experts=AT_ONCE["Pallas, interpreted"])
    layer.pack(kernels)
    found = np.asarray(layer(x, kernels, real(40)), np.float32)
    for row in (0, 17, 39):
        one = layer(x[row : row + 1], kernels, real(1))
        np.testing.assert_array_equal(np.asarray(one[0], np.float32), found[row])


def test_experts_in_four_bits_are_multiplied_one_after_the_other():
    def never(*args: Any) -> jax.Array:
        raise AssertionError("int4 is not for this kernel")

    compare(*layer_of("mixtral", "int4"), replace(reference(), experts=never))


def test_experts_that_no_kernel_of_fp8_is_for_are_laid_out_for_all_at_once():
    """A set that multiplies rows in fp8 turns its matrices; those of experts stay [X, I, O]."""
    products = Fp8Products(w8a8.pack_fp8, w8a8.matmul_fp8)
    kernels = replace(reference(), fp8=products, experts=experts.experts)
    compare(*layer_of("mixtral", "fp8"), kernels)


def test_experts_of_which_half_is_in_four_bits_are_laid_out_for_one_after_the_other():
    layer, x = layer_of("mixtral", "fp8")
    wide = widened(layer.down.packed)
    layer.down.set_matrix(quantise(wide, scheme="int4", dtype=jnp.float32))
    products = Fp8Products(w8a8.pack_fp8, w8a8.matmul_fp8)
    without = replace(reference(), fp8=products)
    given = nnx.clone(layer)
    given.pack(without)
    expected = np.asarray(given(x, without, real(40)))
    kernels = replace(without, experts=experts.experts)
    layer.pack(kernels)
    np.testing.assert_array_equal(np.asarray(layer(x, kernels, real(40))), expected)


def layer_of(family: str, scheme: str, dtype: str = "float32") -> tuple[Experts, jax.Array]:
    """A layer with weights in the scheme, and 40 rows."""
    config = tiny_config(family)
    layer = Experts(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(3))
    for linear in (layer.gate_up, layer.down):
        linear.set_matrix(quantise(linear.kernel[...], scheme=scheme, dtype=jnp.dtype(dtype)))
    return layer, jax.random.normal(jax.random.key(1), (40, config.hidden_size), dtype)


SETTINGS: dict[str, Any] = {
    "page_size": 16,
    "max_seats": 8,
    "context": 256,
    "seat_buckets": [8],
    "token_budget": 64,
    "token_buckets": [64],
    "measured_sizes": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def engine(model: str, **settings: Any) -> LLM:
    return LLM(model, **SETTINGS | settings)


def test_experts_are_proven_in_the_rows_of_their_blocks():
    """One of the step's own counts of rows is no other's: a kernel may have ways of its own for
    few and for many.
    """
    config = tiny_config("mixtral")
    buckets = Buckets.of(max_seats=2, token_budget=300, seat_sizes=(1, 2), token_sizes=(300,))
    sizes = StateSizes(
        seats=2, n_pages=16, page_size=16, context_length=64, kv_dtype=jnp.dtype("float32")
    )
    served = served_by(random_model(config), config, sizes, buckets, jnp.float32)
    assert set(served.steps.blocks) == {16, 128}
    assert served.mixtures == (MixtureShape(128, ("plain", "plain"), "silu"),)
    assert {1, 2, 16, 128} <= set(served.steps.product_rows)


def test_an_adapter_of_experts_is_refused_by_name(tmp_path: Path):
    name = "base_model.model.model.layers.0.block_sparse_moe.experts.0.w1"
    save_file(
        {
            f"{name}.lora_A.weight": np.zeros((4, 64), np.float32),
            f"{name}.lora_B.weight": np.zeros((128, 4), np.float32),
        },
        tmp_path / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["w1"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises((ModelError, ConfigError), match=r"experts\.0\.w1"):
        engine("tiny-random:mixtral", adapters=(f"own={tmp_path}",))


@pytest.mark.usefixtures("hurried")
def test_the_canary_judges_a_mixture_in_float32_alone():
    """In bfloat16 rounding sends some tokens through other experts: log-probabilities of random
    models move by up to 4.
    """
    with pytest.raises(ConfigError, match=r"canary_every cannot judge a mixture .* in bfloat16"):
        engine("tiny-random:mixtral", dtype="bfloat16", canary_every=1)
    llm = engine("tiny-random:mixtral", dtype="float32", canary_every=1)
    for number in range(4):
        tokens = prompt(20 + number, 30)
        asked = EngineRequest(id=f"r{number}", prompt=tokens, sampling=GREEDY, arrival=0.0)
        llm.core.add(asked)
    found = []
    while llm.core.has_work:
        found += llm.core.step().canary
    assert len(found) == 4
    assert all(finding.right and finding.apart < 1e-3 for finding in found)


#: What they are published with: all weights, and those that a token meets, or 0.
@pytest.mark.parametrize(
    ("name", "all_weights", "met"),
    [
        ("deepseek-v2-lite", 15.71e9, 0),  # 31.41 GB in bfloat16
        ("glm-4.7-flash", 29.94e9, 0),
        ("mistral-small-4", 118.97e9, 0),
        ("qwen3-30b-a3b", 30.53e9, 3.35e9),
        ("mixtral-8x7b", 46.70e9, 12.9e9),
        ("nemotron-3-nano-30b-a3b", 31.58e9, 3.58e9),
        ("granite-4.0-h-small", 32.2e9, 9.21e9),
        ("lfm2-8b-a1b", 8.34e9, 1.69e9),
    ],
)
def test_published_mixtures_have_their_number_of_weights(name: str, all_weights: float, met: float):
    config = SHAPES[name]
    leaves = jax.tree.leaves(nnx.state(abstract_model(config)))
    cost = ModelCost(config)
    assert sum(leaf.size for leaf in leaves) == pytest.approx(all_weights, rel=1e-3)
    assert cost.parameters == pytest.approx(all_weights, rel=1e-3)
    if met:
        assert cost.step.row_weights + 2 * cost.table_weights == pytest.approx(met, rel=5e-3)


def test_few_rows_read_few_experts():
    cost = ModelCost(SHAPES["qwen3-30b-a3b"])
    step, shared = cost.step, cost.step.shared_weights
    assert shared + step._read_experts(1) == pytest.approx(step.row_weights)
    assert shared + step._read_experts(8) < 0.5 * cost.layer_weights
    assert shared + step._read_experts(512) == pytest.approx(cost.layer_weights, rel=1e-6)
