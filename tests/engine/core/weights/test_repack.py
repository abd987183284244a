"""Quantised checkpoints as they are: every bit layout against numpy written from the format's
description.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import llamas
import ml_dtypes
import numpy as np
import pytest
from gguf_files import close
from llamas import CONFIG, FLOATS, MATRICES, E, F, H, K, L, as_llama, assert_same, mlp_of, tensors
from safetensors.flax import save_file

from jitney.engine.common.errors import ModelError
from jitney.engine.core.models.llama import Llama
from jitney.engine.core.models.quantization import KV_TYPES, Packed, quantise, widened
from jitney.engine.core.weights import repack
from jitney.engine.core.weights.checkpoint import Checkpoint, open_checkpoint
from jitney.engine.core.weights.checkpoints.names import head_order
from jitney.engine.core.weights.checkpoints.quantization_config import Packing
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.describe import describe_weights
from jitney.engine.core.weights.gguf_tensors import GGUFTensors
from jitney.engine.core.weights.load import WeightStorage, load_model
from jitney.engine.core.weights.quantising import load_kv_scales

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

PACKED = WeightStorage("plain", frozenset({"int4", "int8", "fp8"}))
RANDOM = np.random.default_rng(7)


def words_of(
    nibbles: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))
) -> np.ndarray:
    """nibbles along `axis`, eight to an int32; order[i] is the one at bits 4i."""
    moved = np.moveaxis(nibbles.astype(np.uint32), axis, -1)
    eights = moved.reshape(*moved.shape[:-1], -1, 8)
    words = np.zeros(eights.shape[:-1], np.uint32)
    for i, source in enumerate(order):
        words |= eights[..., source] << np.uint32(4 * i)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def codes(size_out: int, size_in: int, group: int, least_zero: int = 0) -> tuple[np.ndarray, ...]:
    """Random (nibbles [I, O], zeros [G, O], float16 scales [G, O])."""
    groups = size_in // group
    return (
        RANDOM.integers(0, 16, (size_in, size_out)),
        RANDOM.integers(least_zero, 16 + least_zero, (groups, size_out)),
        RANDOM.uniform(0.01, 0.1, (groups, size_out)).astype(np.float16),
    )


def numbers(nibbles: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[I, O] as the formats define it, in float32."""
    group = len(nibbles) // len(scales)
    return ((nibbles - zeros.repeat(group, 0)) * scales.astype(np.float32).repeat(group, 0)).astype(
        np.float32
    )


def named(base: str, parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{base}.{name}": value for name, value in parts.items()}


def gptq(
    base: str, size_out: int, size_in: int, group: int = 32, offset: int = 1
) -> tuple[dict, np.ndarray]:
    nibbles, zeros, scales = codes(size_out, size_in, group, least_zero=offset)
    state = {
        "qweight": words_of(nibbles, 0),
        "qzeros": words_of(zeros - offset, 1),
        "scales": scales,
        "g_idx": (np.arange(size_in) // group).astype(np.int32),
    }
    return named(base, state), numbers(nibbles, zeros, scales).T


def awq(base: str, size_out: int, size_in: int, group: int = 32) -> tuple[dict, np.ndarray]:
    nibbles, zeros, scales = codes(size_out, size_in, group)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    state = {
        "qweight": words_of(nibbles, 1, order),
        "qzeros": words_of(zeros, 1, order),
        "scales": scales,
    }
    return named(base, state), numbers(nibbles, zeros, scales).T


def pack_quantised(
    base: str, size_out: int, size_in: int, group: int = 32, symmetric: bool = False
) -> tuple[dict, np.ndarray]:
    """compressed-tensors: signed numbers plus 8, along the inputs; zero points likewise, along the
    outputs.
    """
    nibbles, zeros, scales = codes(size_out, size_in, group)
    zeros = np.full_like(zeros, 8) if symmetric else zeros
    state = {
        "weight_packed": words_of(nibbles.T, 1),
        "weight_scale": scales.T.astype(ml_dtypes.bfloat16),
        "weight_shape": np.array([size_out, size_in], np.int32),
    }
    if not symmetric:
        state["weight_zero_point"] = words_of(zeros.T, 0)
    scales = state["weight_scale"].T.astype(np.float32)
    return named(base, state), numbers(nibbles, zeros, scales).T


def fp8(
    base: str, size_out: int, size_in: int, shape: tuple[int, ...] = ()
) -> tuple[dict, np.ndarray]:
    weights = RANDOM.standard_normal((size_out, size_in)).astype(ml_dtypes.float8_e4m3fn)
    scale = RANDOM.uniform(0.5, 2, (size_out, 1) if shape == (-1, 1) else shape).astype(np.float32)
    return {f"{base}.weight": weights, f"{base}.weight_scale": scale}, weights.astype(
        np.float32
    ) * scale


def fp8_static(base: str, size_out: int, size_in: int) -> tuple[dict, np.ndarray]:
    """As Ministral 3 is published: one scale, under the name of scales of blocks, and another for
    rows, which are rounded by their own here.
    """
    state, floats = fp8(base, size_out, size_in)
    state[f"{base}.weight_scale_inv"] = state.pop(f"{base}.weight_scale")
    return state | {f"{base}.activation_scale": np.float32(0.1).reshape(())}, floats


def int8(base: str, size_out: int, size_in: int) -> tuple[dict, np.ndarray]:
    weights = RANDOM.integers(-127, 128, (size_out, size_in)).astype(np.int8)
    scale = RANDOM.uniform(0.01, 0.02, (size_out, 1)).astype(ml_dtypes.bfloat16)
    return (
        {f"{base}.weight": weights, f"{base}.weight_scale": scale},
        weights.astype(np.float32) * scale.astype(np.float32),
    )


COMPRESSED = {"quant_method": "compressed-tensors"}
#: Name -> (quantization_config, function that makes one matrix, scheme it is packed in).
FORMATS: dict[str, tuple[dict, Any, str]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
        gptq,
        "int4",
    ),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        lambda *args: gptq(*args, offset=0),
        "int4",
    ),
    "gptq whole columns": (
        {"quant_method": "gptq", "bits": 4, "group_size": -1},
        lambda base, outs, ins: gptq(base, outs, ins, group=ins),
        "int4",
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "GEMM", "zero_point": True}, awq, "int4"),
    "pack": (
        COMPRESSED
        | {"format": "pack-quantized", "config_groups": {"a": {"weights": {"num_bits": 4}}}},
        pack_quantised,
        "int4",
    ),
    "pack symmetric": (
        COMPRESSED | {"format": "pack-quantized"},
        lambda *args: pack_quantised(*args, symmetric=True),
        "int4",
    ),
    "fp8 tensor": ({"quant_method": "fp8"}, fp8, "fp8"),
    "fp8 static": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        fp8_static,
        "fp8",
    ),
    "fp8 outputs": (
        COMPRESSED | {"format": "float-quantized"},
        lambda *args: fp8(*args, shape=(-1, 1)),
        "fp8",
    ),
    "int8": (COMPRESSED | {"format": "int-quantized"}, int8, "int8"),
}


def write_quantised(
    folder: Path, config: dict, make: Any, change: Any = None
) -> dict[str, np.ndarray]:
    """A quantised checkpoint; returns the floats it stands for, by unquantised name."""
    floats = tensors()
    state: dict[str, Any] = dict(floats)
    for name in floats:
        base = name.removesuffix(".weight")
        size = MATRICES.get(base.partition(".layers.")[2].partition(".")[2])
        if size is not None:
            parts, floats[name] = make(base, *size)
            del state[name]
            state |= parts
    if change:
        change(state)
    llamas.write_folder(folder, state, CONFIG | {"quantization_config": config})
    return floats


def load(path: Path, storage: WeightStorage = PACKED) -> Llama:
    return llamas.load(path, storage=storage)


def opened(path: Path) -> Checkpoint:
    source = ModelSource.resolve(str(path))
    return open_checkpoint(source, Llama.weight_map(source.config, "hf"))


def qkv(floats: dict[str, np.ndarray], layer: int) -> np.ndarray:
    return np.concatenate(
        [floats[f"model.layers.{layer}.self_attn.{name}_proj.weight"] for name in "qkv"]
    ).T


@pytest.mark.parametrize("name", FORMATS)
def test_folders_stay_as_they_are_number_for_number(tmp_path: Path, name: str):
    config, make, scheme = FORMATS[name]
    floats = write_quantised(tmp_path, config, make)
    packed, plain = load(tmp_path), load(tmp_path, FLOATS)
    for layer in range(L):
        blocks = packed.layers[layer], plain.layers[layer]
        wanted = {
            "qkv": qkv(floats, layer),
            "down": floats[f"model.layers.{layer}.mlp.down_proj.weight"].T,
        }
        for block in blocks:
            for part, linear in (("qkv", block.attention.qkv), ("down", mlp_of(block).down)):
                np.testing.assert_array_equal(
                    widened(linear.packed), wanted[part], err_msg=f"{layer} {part}"
                )
        assert (
            blocks[0].attention.qkv.packed.scheme == scheme
            and blocks[1].attention.qkv.packed.scheme == "plain"
        )
    assert (
        describe_weights(packed) == f"{scheme} x {4 * L}, float32 x 1"
        and describe_weights(plain) == "float32"
    )


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *((name, ((4, 28), (32, 96))) for name in FORMATS),
        *((name, ((0, 64), (64, 128))) for name in ("gptq", "awq", "pack")),
        ("gptq whole columns", ((0, 64), (0, 128))),
    ],
)
def test_a_part_is_laid_out_as_in_the_whole(
    tmp_path: Path, name: str, part: tuple[tuple[int, int], tuple[int, int]]
):
    """Also one that begins within a word, and of no more than its surroundings is read."""
    config, make, scheme = FORMATS[name]
    floats = write_quantised(tmp_path, config, make)
    matrix = opened(tmp_path).matrix("model.layers.1.mlp.down_proj.weight")
    assert matrix is not None and matrix.shape == (64, 128)
    outputs, inputs = (slice(*ends) for ends in part)
    whole = floats["model.layers.1.mlp.down_proj.weight"][outputs, inputs]
    np.testing.assert_array_equal(matrix.floats(outputs, inputs), whole)
    if matrix.group == 128 and inputs != slice(0, 128):
        return  # its one group cannot be parted
    read, first = matrix.read(outputs, inputs)
    found = matrix.part(whole.shape)((tuple(map(jnp.asarray, read)), jnp.asarray(first)), None)
    np.testing.assert_array_equal(widened(found), whole.T)
    assert found.scheme == scheme
    around = (whole.shape[0] + 16) / 64 * (whole.shape[1] + 64) / 128
    stored = sum(np.prod(field.stored.shape) * field.dtype.itemsize for field in matrix.fields)
    assert sum(array.nbytes for array in read) <= around * stored + 4


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_of_outputs_from_several_places_is_laid_out_in_their_order(
    tmp_path: Path, name: str
):
    config, make, _ = FORMATS[name]
    floats = write_quantised(tmp_path, config, make)
    matrix = opened(tmp_path).matrix("model.layers.1.mlp.down_proj.weight")
    assert matrix is not None
    # Four heads of 4 and 12 rows: rows 0 to 3 of each, then the others.
    order = [
        16 * head + row for rows in (range(4), range(4, 16)) for head in range(4) for row in rows
    ]
    matrix = replace(matrix, order=tuple(order))
    whole = floats["model.layers.1.mlp.down_proj.weight"][order]
    for outputs in (slice(8, 16), slice(16, 40)):
        read, first = matrix.read(matrix.span(outputs), slice(0, 128))
        work = matrix.part((outputs.stop - outputs.start, 128), outputs.start)
        found = work((tuple(map(jnp.asarray, read)), jnp.asarray(first)), None)
        np.testing.assert_array_equal(widened(found), whole[outputs].T)


def test_floats_have_no_matrix(tmp_path: Path):
    config, make, _ = FORMATS["fp8 tensor"]
    write_quantised(tmp_path, config, make)
    folder = opened(tmp_path)
    assert folder.matrix("model.norm.weight") is None
    assert folder.matrix("lm_head.weight") is None


def test_a_folder_may_be_kept_in_another_scheme(tmp_path: Path):
    config, make, _ = FORMATS["gptq"]
    floats = write_quantised(tmp_path, config, make)
    model = load(tmp_path, WeightStorage("int8", frozenset({"int8"})))
    found, wanted = (
        model.layers[0].attention.qkv.packed,
        quantise(qkv(floats, 0), scheme="int8", dtype=jnp.float32),
    )
    np.testing.assert_array_equal(found.kernel, wanted.kernel)
    assert describe_weights(model) == "int8"


def test_fp8_with_scales_of_blocks_becomes_floats(tmp_path: Path):
    """weight_scale_inv [ceil(O / 32), ceil(I / 32)]: the last block of an axis may be cut short."""

    def make(base: str, size_out: int, size_in: int) -> tuple[dict, np.ndarray]:
        weights = RANDOM.standard_normal((size_out, size_in)).astype(ml_dtypes.float8_e4m3fn)
        scale = RANDOM.uniform(0.5, 2, (-(-size_out // 32), -(-size_in // 32))).astype(np.float32)
        wide = scale.repeat(32, 0).repeat(32, 1)[:size_out, :size_in]
        return (
            {f"{base}.weight": weights, f"{base}.weight_scale_inv": scale},
            weights.astype(np.float32) * wide,
        )

    floats = write_quantised(tmp_path, {"quant_method": "fp8", "weight_block_size": [32, 32]}, make)
    model = load(tmp_path)
    np.testing.assert_array_equal(model.layers[1].attention.qkv.packed.kernel, qkv(floats, 1))
    assert describe_weights(model) == "float32"
    folder = opened(tmp_path)
    name = "model.layers.1.self_attn.q_proj.weight"
    part = folder.sliced(name)[slice(3, 40), slice(31, 34)]
    np.testing.assert_array_equal(part, folder.sliced(name)[...][3:40, 31:34])


@pytest.mark.parametrize(
    "names",
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
)
def test_scales_of_fp8_keys_and_values_come_from_the_checkpoint(
    tmp_path: Path, names: tuple[str, str]
):
    """A scale is the factor of an fp8 pool; int8 covers the same range, 448 scales, with 127
    steps.
    """

    def add(state: dict[str, np.ndarray]) -> None:
        for layer in range(L):
            state |= {
                f"model.layers.{layer}.{name}": np.array([0.01 * (layer + 1) * (i + 1)], np.float32)
                for i, name in enumerate(names)
            }

    write_quantised(tmp_path, FORMATS["fp8 tensor"][0], fp8, add)
    source = ModelSource.resolve(str(tmp_path))
    for kv, limit in (("fp8", 448), ("int8", 127)):
        model = load(tmp_path)
        load_kv_scales(model, source, KV_TYPES[kv])
        found = [block.attention.kv_scales[...] for block in model.layers]  # pyright: ignore[reportOptionalSubscript]
        np.testing.assert_allclose(
            found, np.array([[0.01, 0.02] * K, [0.02, 0.04] * K]) * 448 / limit, rtol=1e-6
        )


def test_biases_of_zeros_that_the_model_does_not_have_are_passed_over(tmp_path: Path):
    def add(state: dict[str, np.ndarray]) -> None:
        state["model.layers.0.self_attn.o_proj.bias"] = np.zeros(E, np.float16)

    config, make, _ = FORMATS["gptq"]
    write_quantised(tmp_path, config, make, add)
    assert load(tmp_path).layers[0].attention.o.bias is None


def bias(state: dict[str, np.ndarray]) -> None:
    state["model.layers.0.self_attn.o_proj.bias"] = np.eye(1, E, 5, dtype=np.float16)[0]


def shuffle(state: dict[str, np.ndarray]) -> None:
    state["model.layers.1.mlp.down_proj.g_idx"] = state["model.layers.1.mlp.down_proj.g_idx"][
        ::-1
    ].copy()


def lose(state: dict[str, np.ndarray]) -> None:
    del state["model.layers.0.self_attn.q_proj.scales"]


def shrink(state: dict[str, np.ndarray]) -> None:
    state["model.layers.0.self_attn.q_proj.qzeros"] = state[
        "model.layers.0.self_attn.q_proj.qzeros"
    ][:, 1:]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shuffle, "model.layers.1.mlp.down_proj.g_idx reorders inputs"),
        (lose, "q_proj lacks"),
        (shrink, "do not fit"),
        (bias, "1 unexpected: model.layers.0.self_attn.o_proj.bias"),
    ],
)
def test_unsound_parts_are_named(tmp_path: Path, change: Any, words: str):
    config, make, _ = FORMATS["gptq"]
    write_quantised(tmp_path, config, make, change)
    with pytest.raises(ModelError, match=words) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FORMATS)
def test_a_base_model_saved_by_itself_is_the_same_when_quantised(tmp_path: Path, name: str):
    config, make, _ = FORMATS[name]
    bare = tmp_path / "bare"
    bare.mkdir()

    def also_bare(state: dict[str, Any]) -> None:
        short = {name.removeprefix("model."): jnp.asarray(x) for name, x in state.items()}
        save_file(short, bare / "model.safetensors")

    write_quantised(tmp_path, config, make, also_bare)
    (bare / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    assert_same(load(bare), load(tmp_path))


@pytest.mark.parametrize(
    ("key", "method"),
    [
        ("quantization_config", {"quant_method": "compressed_tensors"}),
        ("compression_config", COMPRESSED),
        ("compression_config", {}),
    ],
)
def test_compressed_tensors_by_its_older_names(tmp_path: Path, key: str, method: dict):
    """Files of 2024, and of tools that spell the method with an underscore, are the same model."""
    config, make, _ = FORMATS["int8"]
    write_quantised(tmp_path, config, make)
    wanted = load(tmp_path)
    older = {name: value for name, value in config.items() if name != "quant_method"} | method
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIG | {"quantization_config": None, key: older})
    )
    assert_same(load(tmp_path), wanted)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq", "bits": 8}, "bits 8; only 4"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "GPTQ format 'marlin'",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv"),
        ({"quant_method": "awq"}, "bits None"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "the method 'bitsandbytes'; known: gptq, awq",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt e5m2"),
        ({"bits": 4}, "the method 'None'"),
        ([], "not a table"),
        (COMPRESSED | {"format": "marlin-24"}, "'marlin-24'"),
        (
            COMPRESSED
            | {"format": "pack-quantized", "config_groups": {"a": {"weights": {"num_bits": 8}}}},
            "num_bits 8",
        ),
        (
            COMPRESSED
            | {
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 4, "actorder": "group"}}},
            },
            "actorder",
        ),
    ],
)
def test_formats_that_are_not_read_are_named(config: Any, words: str):
    with pytest.raises(ModelError, match=words) as caught:
        Packing.read(config)
    assert str(caught.value).startswith("config.json: quantization_config ") and "\n" not in str(
        caught.value
    )


# GGUF


def open_one(path: Path, raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> GGUFTensors:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", raw, raw_dtype=kind)
    close(writer)
    return GGUFTensors(path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_gguf_blocks_keep_their_numbers(tmp_path: Path, kind: str):
    """Against the gguf library's decoder. Random bytes, but factors of ordinary size."""
    type = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[type]
    raw = RANDOM.integers(0, 256, (10, 512 // block, size), dtype=np.uint8)
    factors = 1 if kind == "Q4_0" else 2
    steps = RANDOM.uniform(-0.1, 0.1, (10, 512 // block, factors)).astype(np.float16)
    raw[..., : 2 * factors] = steps.view(np.uint8)
    raw = raw.reshape(10, -1)
    matrix = open_one(tmp_path / "x.gguf", raw, type).matrix("x")
    assert matrix is not None
    packed = matrix.packed()
    assert packed.scheme == "int4" and packed.kernel.shape == (256, 10)
    assert packed.scale.dtype == (jnp.float32 if kind == "Q4_K" else jnp.float16)
    wanted = gguf.quants.dequantize(raw, type).T
    # (code - 8) * step + (low + 8 * step) rounds twice where the library rounds once, at eight
    # steps or so.
    np.testing.assert_allclose(
        widened(packed), wanted, rtol=0, atol=0 if kind == "Q4_0" else 4e-7 * np.abs(wanted).max()
    )


def write_gguf(path: Path, kinds: str) -> Path:
    """kinds: of queries, keys, values, output, gate, up and down."""
    return llamas.write_gguf(path, tensors(), dict(zip(MATRICES, kinds.split(), strict=True)))


def test_a_gguf_model_stays_in_4_bits_with_its_rows_in_order(tmp_path: Path):
    """Packed and decoded copies are the same numbers, query and key rows reordered alike; Q4_0
    beside Q4_1 is fused.
    """
    path = write_gguf(tmp_path / "m.gguf", "Q4_0 Q4_1 Q4_1 Q4_0 Q4_1 Q4_1 Q4_0")
    packed, plain = load(path), load(path, FLOATS)
    assert describe_weights(packed) == f"int4 x {4 * L}, float32 x 1"
    for one, other in zip(packed.linears(), plain.linears(), strict=True):
        np.testing.assert_allclose(widened(one.packed), widened(other.packed), rtol=0, atol=2e-6)
    assert (
        packed.layers[0].attention.qkv.lows is not None
        and packed.layers[0].attention.o.lows is None
    )


@pytest.mark.parametrize("name", ["gptq", "awq", "pack", "fp8 tensor"])
def test_heads_with_a_part_that_is_not_rotated_stay_as_stored_in_our_order(
    tmp_path: Path, name: str
):
    """Also where outputs share words. Queries and keys are reordered, values are not."""
    config, make, scheme = FORMATS[name]
    write_quantised(tmp_path, config, make)
    stored = load(tmp_path, FLOATS)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"partial_rotary_factor": 0.5}))
    packed, plain = load(tmp_path), load(tmp_path, FLOATS)
    assert packed.layers[0].attention.qkv.packed.scheme == scheme
    order = head_order(plain.config, 0, paired=False)
    for one, other, before in zip(packed.layers, plain.layers, stored.layers, strict=True):
        found = np.asarray(widened(one.attention.qkv.packed))
        floats = np.asarray(other.attention.qkv.kernel[...])
        np.testing.assert_allclose(found, floats, rtol=0, atol=2e-6)
        heads = floats.reshape(E, -1, len(order))
        expected = np.asarray(before.attention.qkv.kernel[...]).reshape(heads.shape)
        np.testing.assert_array_equal(heads[:, : H + K], expected[:, : H + K][..., order])
        np.testing.assert_array_equal(heads[:, H + K :], expected[:, H + K :])


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (jnp.float32, "float32, not rounded, from Q4_1"),
        (jnp.bfloat16, "bfloat16, rounded from Q4_1"),
    ],
)
def test_floats_made_of_4_bits_say_so(tmp_path: Path, dtype: Any, said: str):
    """In float32 they are the file's own numbers; in bfloat16 those rounded: two models, a little
    apart.
    """
    path = write_gguf(tmp_path / "m.gguf", "Q4_1 Q4_1 Q4_1 Q4_1 Q4_1 Q4_1 Q8_0")
    source = ModelSource.resolve(str(path))
    model = as_llama(load_model(source, source.config, dtype, storage=FLOATS))
    assert describe_weights(model, source) == said and describe_weights(model) == str(
        jnp.dtype(dtype)
    )
    stored = GGUFTensors(path).sliced("blk.1.ffn_gate.weight")[...].T
    np.testing.assert_array_equal(
        mlp_of(model.layers[1]).gate_up.packed.kernel[:, :F], stored.astype(dtype)
    )
    assert describe_weights(load(path), source).startswith("int4")


def test_floats_that_the_file_has_are_just_that(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", "F32 F32 F32 F32 F32 F32 F32")
    assert describe_weights(load(path, FLOATS), ModelSource.resolve(str(path))) == "float32"


def test_a_mixed_gguf_falls_back_matrix_by_matrix(tmp_path: Path):
    """A fused matrix with a piece in another format becomes floats as a whole; the others stay."""
    path = write_gguf(tmp_path / "m.gguf", "Q4_0 Q4_0 Q8_0 Q4_0 F32 F32 Q4_0")
    model = load(path)
    for block in model.layers:
        mlp = mlp_of(block)
        linears = block.attention.qkv, block.attention.o, mlp.gate_up, mlp.down
        assert [linear.packed.scheme for linear in linears] == ["plain", "int4", "plain", "int4"]
    plain = GGUFTensors(path).sliced("blk.1.ffn_gate.weight")[...]
    np.testing.assert_array_equal(mlp_of(model.layers[1]).gate_up.packed.kernel[:, :F], plain.T)


def test_matrices_side_by_side():
    """Of like groups they are joined; of unlike groups or types they are not."""
    weights = RANDOM.standard_normal((128, 16))
    a, b = (quantise(weights, scheme="int4", dtype=jnp.float32, group=group) for group in (32, 64))
    parts = repack.alike([a, a])
    assert parts is not None
    joined = repack.join(parts)
    assert joined.kernel.shape == (64, 32) and joined.scale.shape == (4, 32)
    np.testing.assert_array_equal(widened(joined)[:, 16:], widened(a))
    assert repack.alike([a, b]) is None
    assert repack.alike([a, Packed(jnp.zeros((128, 16)))]) is None
