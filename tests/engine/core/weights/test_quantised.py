"""Weights and KV in 8 and 4 bits: the rounding against numpy, and whole models against their plain
selves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from int4_weights import quantise_int4
from llamas import as_llama, mlp_of

from jitney.engine.common.errors import ConfigError
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.models.quantization import KV_TYPES, Packed, group_size, quantise, widened
from jitney.engine.core.models.registry import random_model
from jitney.engine.core.weights import quantising
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.describe import describe_weights
from jitney.engine.core.weights.load import WeightStorage, load_model
from jitney.engine.core.weights.quantising import choose_kv_dtype, load_kv_scales
from jitney.kernels import definitions
from jitney.kernels.experts import gate
from jitney.kernels.int4 import Int4, matmul_int4
from jitney.kernels.interface import KernelSet
from jitney.kernels.select import reference_of, select

pytestmark = pytest.mark.usefixtures("programs_when_used", "compiled_in_a_hurry")

REFERENCE = select("cpu", "reference")
RANDOM = np.random.default_rng(1)
WEIGHTS = RANDOM.standard_normal((256, 48)).astype(np.float32) * RANDOM.uniform(0.1, 3, 48).astype(
    np.float32
)
TOKENS = np.arange(40) * 11 % 512


# One matrix


def test_int8_is_the_nearest_of_255_levels_per_output():
    packed = quantise(WEIGHTS, scheme="int8", dtype=jnp.float32)
    scale = np.abs(WEIGHTS).max(0) / np.float32(127)
    np.testing.assert_allclose(packed.scale, scale, rtol=2e-7)
    np.testing.assert_array_equal(
        packed.kernel, np.rint(WEIGHTS / np.asarray(packed.scale)).astype(np.int8)
    )
    assert np.abs(np.asarray(packed.kernel)).max(0).min() == 127


def test_fp8_is_rounded_as_ml_dtypes_does():
    packed = quantise(WEIGHTS, scheme="fp8", dtype=jnp.float32)
    np.testing.assert_allclose(packed.scale, np.abs(WEIGHTS).max(0) / np.float32(448), rtol=2e-7)
    wanted = (WEIGHTS / np.asarray(packed.scale)).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(
        np.asarray(packed.kernel).astype(np.float32), wanted.astype(np.float32)
    )


@pytest.mark.parametrize("scheme", Packed.schemes)
def test_an_output_of_zeros_stays_zero(scheme: str):
    weights = WEIGHTS.copy()
    weights[:, 3] = 0
    wide = np.asarray(widened(quantise(weights, scheme=scheme, dtype=jnp.float32)))
    assert np.isfinite(wide).all() and not wide[:, 3].any()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_is_numpy_s_rounding_with_a_scale_in_half_precision(group: int):
    """`quantise_int4` differs by its float32 scale alone: by a code at most, where a number lies
    between two.
    """
    packed = quantise(WEIGHTS, scheme="int4", dtype=jnp.float32, group=group)
    wanted = quantise_int4(WEIGHTS, group, symmetric=False)
    assert packed.kernel.shape == (128, 48) and packed.scale.dtype == np.float16
    np.testing.assert_array_equal(packed.scale, wanted.scales.astype(np.float16))
    np.testing.assert_array_equal(packed.zeros, wanted.zeros)
    spanned = np.asarray(wanted.unpacked())
    step = np.asarray(wanted.scales).repeat(group, 0)
    assert (np.abs(widened(packed) - spanned) < 1.02 * step).all()
    assert (np.abs(widened(packed) - WEIGHTS) < 1.02 * step).all()
    assert (np.abs(widened(packed) - spanned) > 0.5 * step).mean() < 0.005


def test_int4_keeps_what_lies_on_its_levels():
    """Weights (n - 5) / 16 with all of n = 0..15 in each group: scale and zero point are found,
    nothing is rounded.
    """
    nibbles = np.stack([RANDOM.permutation(np.arange(32) % 16) for _ in range(8)], 1)
    packed = quantise((nibbles - 5) / np.float32(16), scheme="int4", dtype=jnp.float32)
    np.testing.assert_array_equal(widened(packed), (nibbles - 5) / 16)
    np.testing.assert_array_equal(packed.zeros, np.full((1, 8), 5))


def test_mxfp4_is_the_nearest_of_its_levels():
    """Of each block of 32 inputs the greatest lies where its exponent is 2, as the standard has
    it.
    """
    packed = quantise(jnp.asarray(WEIGHTS), scheme="mxfp4", dtype=jnp.float32)
    assert packed.scheme == "mxfp4" and packed.in_four_bits
    blocks = WEIGHTS.reshape(-1, 32, 48)
    step = 2.0 ** (np.floor(np.log2(np.abs(blocks).max(1, keepdims=True))) - 2)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = np.concatenate([levels, -levels])
    nearest = np.abs(blocks[..., None] / step[..., None] - levels).min(-1) * step
    found = definitions.mxfp4(np.asarray(packed.kernel), np.asarray(packed.scale))
    np.testing.assert_allclose(np.abs(found.reshape(blocks.shape) - blocks), nearest, atol=1e-6)
    np.testing.assert_array_equal(widened(packed), found)


def test_group_sizes():
    assert [group_size(size) for size in (4096, 576, 1536, 96, 14336)] == [128, 64, 128, 32, 128]
    with pytest.raises(ConfigError, match="inputs divide by 32; this model has one with 48"):
        group_size(48)


def with_lows(packed: Packed) -> Packed:
    """The same numbers by another spelling."""
    return packed._replace(
        zeros=None, lows=-packed.zeros.astype(jnp.float32) * packed.scale.astype(jnp.float32)
    )


@pytest.mark.parametrize("name", [*Packed.schemes, "lows"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_is_that_of_the_widened_matrix(name: str, dtype):
    packed = quantise(WEIGHTS, scheme="int4" if name == "lows" else name, dtype=dtype)
    packed = with_lows(packed) if name == "lows" else packed
    x = jnp.asarray(RANDOM.standard_normal((5, 256)), dtype)
    wanted = np.asarray(x, np.float64) @ np.asarray(widened(packed), np.float64)
    y = packed.product(x, REFERENCE)
    assert y.dtype == jnp.float32
    # bfloat16: int4 weights are written out in it, which rounds each to 2^-9 of itself.
    tolerance = 1e-5 if dtype == jnp.float32 or name in ("plain", "int8", "fp8") else 2**-9
    assert np.abs(y - wanted).max() < tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["int4", "lows"])
def test_int4_products_are_gated_at_once_where_the_set_does_and_nothing_is_added(name: str):
    packed = quantise(WEIGHTS, scheme="int4", dtype=jnp.float32)
    packed = with_lows(packed) if name == "lows" else packed
    calls = []

    def gated_int4(x: jax.Array, weights: Int4) -> jax.Array:
        calls.append(weights.shape)
        return gate(matmul_int4(x, weights), x.dtype)

    x = jnp.asarray(RANDOM.standard_normal((5, 256)) / 16, jnp.float32)
    kernels = replace(REFERENCE, gated_int4=gated_int4)
    gates, ups = np.split(np.asarray(x, np.float64) @ np.asarray(widened(packed)), 2, axis=1)
    wanted = gates / (1 + np.exp(-gates)) * ups
    found = packed.gated(x, "silu", kernels)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    assert calls == ([(256, 48)] if name == "int4" else [])
    packed.gated(x, "gelu_tanh", kernels)
    assert len(calls) <= 1


# Whole models


def logits(model: Model, kv: str = "auto", kernels: KernelSet = REFERENCE) -> np.ndarray:
    """Float32 [T, V] of one prompt, through pools of the KV type."""
    graph, state = nnx.split(model)
    config, pages = model.config, 3
    shape = (pages + 1, quantising._PAGE, 2 * config.n_kv_heads, config.head_dim)
    dtype = KV_TYPES.get(kv, model.dtype)

    @jax.jit
    def forward(state, tokens, meta):
        merged = nnx.merge(graph, state)
        hidden, _ = merged(tokens, [jnp.zeros(shape, dtype)] * config.n_layers, meta, kernels)
        return merged.logits(hidden, kernels)

    return np.asarray(
        forward(state, TOKENS.astype(np.int32), quantising._one_prompt(len(TOKENS), pages))
    )


@cache
def plain_logits(architecture: str) -> np.ndarray:
    return logits(random_model(tiny_config(architecture)))


def nearness(found: np.ndarray, plain: np.ndarray) -> float:
    """Root mean square error of logits over their spread."""
    return float(np.sqrt(((found - plain) ** 2).mean()) / plain.std())


#: Error of random weights by scheme, relative and root mean square: int8 rounds to 1/127 of about 3
#: spreads, uniformly (0.7 %); e4m3 to 3 bits after the point (2.6 %); 16 levels over 5 spreads (9
#: %). Logits of two layers and a head add up about nine such errors (their squares): the bounds are
#: five times one error, twice of what is found.
BOUNDS = {"int8": 0.035, "fp8": 0.13, "int4": 0.45}


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [*(("llama", scheme) for scheme in BOUNDS), ("olmo2", "int8"), ("cohere2", "int4")],
)
def test_logits_of_each_scheme_stay_near_the_plain_ones(architecture: str, scheme: str):
    error = nearness(
        logits(random_model(tiny_config(architecture), weights=scheme)), plain_logits(architecture)
    )
    assert BOUNDS[scheme] / 20 < error < BOUNDS[scheme]


@pytest.mark.parametrize(("kv", "bound"), [("int8", 0.03), ("fp8", 0.1)])
def test_logits_of_quantised_kv_stay_near_the_plain_ones(kv: str, bound: float):
    """Keys and values err as weights do (int8: with a step 1.1 times as wide as they need)."""
    model = random_model(tiny_config("qwen3"))
    quantising._calibrate(model, TOKENS.tolist(), KV_TYPES[kv])
    assert bound / 50 < nearness(logits(model, kv), plain_logits("qwen3")) < bound


def test_the_native_kernels_serve_quantised_models_too():
    """They leave such pools to the reference, also in decode; rows are rounded to int8 too, as
    their own reference does, laid out or not. That costs more than rounding the weights: a row
    has one step, and its numbers differ more in size than an output's weights.
    """
    model = as_llama(random_model(tiny_config(), weights="int8", kv="int8"))
    native = select("cpu", "native")
    rounded = logits(model, "int8", reference_of(native))
    np.testing.assert_allclose(logits(model, "int8", native), rounded, atol=2e-3)
    only_weights = logits(model, "int8")
    assert 1e-3 < nearness(rounded, only_weights) < 3 * BOUNDS["int8"]
    model.pack(native)
    assert mlp_of(model.layers[0]).down.kernel[...].ndim == 4
    np.testing.assert_allclose(logits(model, "int8", native), rounded, atol=2e-3)


def scales(model: Model) -> np.ndarray:
    """Factors of all layers, [L, 2K]."""
    return np.stack(
        [
            np.asarray(leaf[...])
            for path, leaf in nnx.to_flat_state(nnx.state(model))
            if path[-1] == "kv_scales"
        ]
    )


def test_factors_are_the_largest_magnitudes_of_a_plain_forward():
    """Layer 0's values are projections of the normed embedding: computed by hand."""
    model = as_llama(random_model(tiny_config()))
    quantising._calibrate(model, TOKENS.tolist(), KV_TYPES["int8"])
    x = model.layers[0].attention_norm(model.embed[...][TOKENS], REFERENCE)
    values = np.asarray(x @ model.layers[0].attention.qkv.kernel[...])[:, -2 * 16 :].reshape(
        -1, 2, 16
    )
    found = scales(model)[0]
    np.testing.assert_allclose(found[1::2], 1.1 / 127 * np.abs(values).max((0, 2)), rtol=1e-5)
    assert found.shape == (4,) and found.dtype == np.float32 and (found > 0).all()


def test_an_untied_head_is_quantised_and_an_embedding_is_not():
    model = as_llama(random_model(tiny_config(), dtype=jnp.bfloat16, weights="int8"))
    assert model.lm_head is not None and model.lm_head.packed.scheme == "int8"
    assert model.embed[...].dtype == jnp.bfloat16 and describe_weights(model) == "int8"


def test_tiny_random_is_quantised_as_it_is_loaded():
    source = ModelSource.resolve("tiny-random")
    found = load_model(source, source.config, jnp.float32, storage=WeightStorage("int8"))
    plain = load_model(source, source.config, jnp.float32)
    for one, other in zip(found.linears(), plain.linears(), strict=True):
        np.testing.assert_array_equal(
            one.packed.kernel,
            quantise(other.packed.kernel, scheme="int8", dtype=jnp.float32).kernel,
        )


def test_the_built_in_text_sets_factors():
    source = ModelSource.resolve("tiny-random")
    model = load_model(source, source.config, jnp.float32)
    load_kv_scales(model, source, KV_TYPES["fp8"])
    assert (
        scales(model).shape == (2, 4)
        and (scales(model) > 1 / 448).all()
        and (scales(model) < 20 / 448).all()
    )


# What a configuration means


@pytest.mark.parametrize(
    ("weights", "platform", "packs_int4", "storage"),
    [
        ("auto", "cpu", False, ("plain", {"mxfp4"})),
        ("auto", "tpu", False, ("plain", {"int8", "fp8", "mxfp4"})),
        ("auto", "gpu", True, ("plain", {"int8", "fp8", "int4", "mxfp4"})),
        ("plain", "gpu", True, ("plain", set())),
        ("int4", "cpu", False, ("int4", {"int4"})),
    ],
)
def test_auto_keeps_a_checkpoint_where_the_device_multiplies_it_so(
    weights: str, platform: str, packs_int4: bool, storage: tuple[str, set[str]]
):
    kernels = REFERENCE
    if packs_int4:
        kernels = replace(REFERENCE, matmul_int4=lambda x, weights, dtype=None: x)
    scheme, kept = storage
    wanted = WeightStorage(scheme, frozenset(kept))
    assert WeightStorage.choose(weights, platform, kernels) == wanted


def test_fp8_pools_need_hardware():
    def gpu(capability: str) -> SimpleNamespace:
        return SimpleNamespace(
            platform="gpu", device_kind="NVIDIA A100", compute_capability=capability
        )

    assert choose_kv_dtype("auto", jnp.bfloat16, gpu("8.0")) == jnp.bfloat16
    assert choose_kv_dtype("int8", jnp.bfloat16, gpu("8.0")) == jnp.int8
    assert choose_kv_dtype("fp8", jnp.bfloat16, gpu("8.9")) == jnp.float8_e4m3fn
    assert choose_kv_dtype("fp8", jnp.bfloat16, gpu("12.0")) == jnp.float8_e4m3fn
    assert choose_kv_dtype("fp8", jnp.float32, jax.devices("cpu")[0]) == jnp.float8_e4m3fn
    with pytest.raises(
        ConfigError,
        match=r"^kv_dtype fp8 needs compute capability 8.9; this NVIDIA A100 has 8.0: use",
    ):
        choose_kv_dtype("fp8", jnp.bfloat16, gpu("8.0"))
