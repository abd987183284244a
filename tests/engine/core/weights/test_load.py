"""Weights from folders and GGUF files: the same numbers by every way in, and one clear error for
every bad file.
"""

from __future__ import annotations

import json
import logging
import struct
from dataclasses import replace
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from gguf_files import close
from hypothesis import given, settings
from hypothesis import strategies as st
from llamas import (
    CONFIG,
    D,
    E,
    H,
    as_llama,
    assert_same,
    flat,
    load,
    tensors,
    write_folder,
    write_gguf,
)
from safetensors.numpy import save_file

from jitney.engine.common.errors import ModelError
from jitney.engine.core.models.quantization import widened
from jitney.engine.core.models.registry import model_class
from jitney.engine.core.models.rope import _inverse_frequencies
from jitney.engine.core.weights.checkpoints.families import FAMILIES, tiny_config
from jitney.engine.core.weights.checkpoints.gguf import GGUFFile
from jitney.engine.core.weights.checkpoints.gguf_config import config_of
from jitney.engine.core.weights.checkpoints.layer_configs import RopeConfig
from jitney.engine.core.weights.checkpoints.names import long_name
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.describe import describe_weights
from jitney.engine.core.weights.gguf_tensors import GGUFTensors
from jitney.engine.core.weights.load import WeightStorage, load_model

#: The last decoder of each class of models.
DECODERS = {
    model_class(name): name
    for name, family in FAMILIES.items()
    if tiny_config(family.name).encoder is None
}.values()


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Hugging Face folders


def test_shards_and_one_file_give_the_same_model(tmp_path: Path):
    state = tensors()
    one, three = (
        write_folder(tmp_path / "one", state),
        write_folder(tmp_path / "three", state, shards=3),
    )
    assert_same(load(one), load(three))


def bare(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of the base model, by the names that it has when it is saved by itself."""
    return {
        name.removeprefix("model."): value for name, value in state.items() if "lm_head" not in name
    }


@pytest.mark.parametrize("architecture", DECODERS)
def test_a_base_model_saved_by_itself_is_the_same_model(tmp_path: Path, architecture: str):
    """Qwen3-Embedding, and others of `AutoModel`, lack the prefix of all names."""
    config = replace(tiny_config(FAMILIES[architecture].name), tie_embeddings=True)
    random = np.random.default_rng(5)
    weights = model_class(architecture).weight_map(config, "hf")
    state = {
        name: random.standard_normal(piece.shape).astype(np.float32)
        for name, piece in weights.pieces.items()
    }
    loaded = [
        flat(as_llama(load_model(ModelSource("hf", str(folder), "", config), config)))
        for folder in (
            write_folder(tmp_path / "long", state),
            write_folder(tmp_path / "bare", bare(state), shards=3),
        )
    ]
    assert loaded[0].keys() == loaded[1].keys()
    for path, leaf in loaded[0].items():
        np.testing.assert_array_equal(loaded[1][path], leaf, err_msg=str(path))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_base_model_without_a_head_says_so(
    tmp_path: Path, shards: int, caplog: pytest.LogCaptureFixture
):
    """Qwen3-Embedding-8B has an untied head by its configuration, and none in its files."""
    config = CONFIG | {"architectures": ["LlamaModel"]}
    with caplog.at_level(logging.WARNING):
        model = load(write_folder(tmp_path / "bare", bare(tensors()), config, shards))
    assert model.lm_head is None and "no output head" in caplog.text
    caplog.clear()
    whole = load(
        write_folder(
            tmp_path / "whole",
            bare(tensors()) | {"lm_head.weight": tensors()["lm_head.weight"]},
            config,
            shards,
        )
    )
    assert_same(whole, load(write_folder(tmp_path / "long", tensors())))
    assert not caplog.text


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.up_proj",
        "layers.0.mlp.up_proj",
        "language_model.model.layers.0.mlp.up_proj",
        "model.language_model.layers.0.mlp.up_proj",
        "language_model.layers.0.mlp.up_proj",
    ],
)
def test_tensors_and_modules_of_adapters_have_one_name_whatever_they_were_saved_in(name: str):
    assert long_name(name) == "model.layers.0.mlp.up_proj"


def test_a_damaged_model_is_none_without_a_head(tmp_path: Path):
    assert "1 missing: lm_head.weight" in refusal(write_folder(tmp_path, tensors(lm_head=False)))


def test_a_tensor_under_both_names_is_refused(tmp_path: Path):
    state = tensors() | {"norm.weight": np.ones(E, np.float32)}
    assert "model.norm.weight is stored twice" in refusal(write_folder(tmp_path, state))


def test_stored_dtypes_are_read_and_cast(tmp_path: Path):
    state = tensors()
    wide = load(write_folder(tmp_path / "f32", state), jnp.bfloat16)
    narrow = write_folder(
        tmp_path / "bf16", {name: value.astype(ml_dtypes.bfloat16) for name, value in state.items()}
    )
    assert_same(wide, load(narrow, jnp.bfloat16))
    half = write_folder(
        tmp_path / "f16", {name: value.astype(np.float16) for name, value in state.items()}
    )
    assert_same(load(half), load(write_folder(tmp_path / "f32", state)), rtol=1e-3, atol=1e-3)


def test_progress_counts_the_bytes_of_the_file(tmp_path: Path):
    state = tensors()
    source = ModelSource.resolve(str(write_folder(tmp_path, state)))
    seen = []
    load_model(source, source.config, jnp.float32, lambda *news: seen.append(news))
    total = sum(tensor.nbytes for tensor in state.values())
    assert {(stage, all_bytes) for stage, _, all_bytes, _ in seen} == {("weights", total)}
    done = [done for _, done, _, _ in seen]
    assert len(done) == 16 and (done[0], done[-1]) == (0, total)
    assert done == sorted(set(done))


def test_a_tied_model_may_carry_its_head(tmp_path: Path):
    tied = CONFIG | {"tie_word_embeddings": True}
    state = tensors() | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(D // 2, np.float32)
    }
    assert load(write_folder(tmp_path, state, tied)).lm_head is None


def test_all_faults_in_one_error(tmp_path: Path):
    state = tensors()
    del state["model.layers.0.mlp.up_proj.weight"], state["model.norm.weight"]
    state["model.layers.1.self_attn.q_proj.weight"] = np.zeros((H * D, E + 1), np.float32)
    state["model.layers.1.self_attn.q_proj.bias"] = np.zeros(H * D, np.float32)
    message = refusal(write_folder(tmp_path, state))
    assert "2 missing: model.norm.weight, model.layers.0.mlp.up_proj.weight" in message
    assert "1 unexpected: model.layers.1.self_attn.q_proj.bias" in message
    assert (
        "1 misshapen: model.layers.1.self_attn.q_proj.weight [64, 65] instead of [64, 64]"
        in message
    )


def test_a_long_list_of_faults_is_counted(tmp_path: Path):
    message = refusal(write_folder(tmp_path, {"model.norm.weight": np.ones(E, np.float32)}))
    assert (
        "20 missing" in message and message.count("model.layers") == 8 and "and 10 more" in message
    )


def shard_index(folder: Path, shard: str) -> Path:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": shard}})
    )
    return folder


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "a\x00b"]
)
def test_shards_outside_the_folder_are_refused(tmp_path: Path, shard: str):
    save_file(tensors(), tmp_path / "secret.safetensors")
    assert "unsafe file name" in refusal(
        shard_index(write_folder(tmp_path / "model", tensors()), shard)
    )


def test_a_missing_shard_is_named(tmp_path: Path):
    folder = shard_index(write_folder(tmp_path, tensors()), "model-00001-of-00002.safetensors")
    assert refusal(folder) == "the model folder lacks model-00001-of-00002.safetensors"


def test_links_out_of_the_folder_are_refused(tmp_path: Path):
    folder = write_folder(tmp_path / "model", tensors())
    (folder / "model.safetensors").rename(tmp_path / "weights")
    (folder / "model.safetensors").symlink_to(tmp_path / "weights")
    message = refusal(folder)
    assert "model.safetensors is a link that leads out of the model folder" in message
    assert str(tmp_path / "weights") in message and "put the file itself there" in message
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/etc/passwd")
    assert "leads out of the model folder" in refusal(folder)


def test_a_link_to_nothing_is_named(tmp_path: Path):
    folder = write_folder(tmp_path, tensors())
    (folder / "generation_config.json").symlink_to("../blobs/gone")
    assert refusal(folder) == (
        "generation_config.json of the model folder is a link to '../blobs/gone', where no file is"
    )


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A snapshot in a cache of the hub; the weights lie where several repositories share them."""
    cache = tmp_path / "hub"
    repository = cache / "models--a--b"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "abc"
    shared = cache / "blobs" / "5e" / f"5e{'0' * 62}"
    for folder in (blobs, snapshot, shared.parent):
        folder.mkdir(parents=True)
    plain = write_folder(tmp_path / "plain", tensors())
    (plain / "config.json").rename(blobs / "c0")
    (plain / "model.safetensors").rename(shared)
    (blobs / "e7").symlink_to(Path("../../blobs/5e") / shared.name)
    (snapshot / "config.json").symlink_to("../../blobs/c0")
    (snapshot / "model.safetensors").symlink_to("../../blobs/e7")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("{}")
    (cache / "token").write_text("{}")
    return snapshot


def test_links_of_the_hub_cache_are_fine(tmp_path: Path, snapshot: Path):
    wanted = load(snapshot)
    (tmp_path / "link").symlink_to(snapshot)
    below, elsewhere = snapshot / "checkpoint-7", tmp_path / "elsewhere"
    for folder in (below, elsewhere):
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            (folder / name).symlink_to((snapshot / name).resolve())
    through = tmp_path / "through"
    through.mkdir()
    for name in ("config.json", "model.safetensors"):
        (through / name).symlink_to(snapshot / name)
    for folder in (tmp_path / "link", below, elsewhere, through):
        assert_same(load(folder), wanted)


def test_links_below_the_folder_are_fine(tmp_path: Path):
    folder = write_folder(tmp_path / "model", tensors())
    (folder / "..data").mkdir()
    (folder / "config.json").rename(folder / "..data" / "config.json")
    (folder / "config.json").symlink_to("..data/config.json")
    assert flat(load(folder))


@pytest.mark.parametrize("target", ["../../refs/main", "../../../token", "../../blobs/evil"])
def test_other_files_of_the_hub_cache_are_refused(tmp_path: Path, snapshot: Path, target: str):
    """Only what is named by its content; a name in `blobs` that leads elsewhere is none."""
    (tmp_path / "secret.json").write_text("{}")
    (snapshot.parents[1] / "blobs" / "evil").symlink_to(tmp_path / "secret.json")
    (snapshot / "generation_config.json").symlink_to(target)
    assert "generation_config.json is a link that leads out" in refusal(snapshot)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 2**32) + b"{" * 100,
        struct.pack("<Q", 8) + b"not json",
        struct.pack("<Q", 66)
        + b'{"model.norm.weight":{"dtype":"F32","shape":[64],"data_offsets":[0,256]}}'[:66],
    ],
)
def test_damaged_safetensors_are_refused(tmp_path: Path, data: bytes):
    folder = write_folder(tmp_path, tensors())
    (folder / "model.safetensors").write_bytes(data)
    assert refusal(folder).startswith("model.safetensors: not a sound safetensors file")


def test_a_cut_safetensors_file_is_refused(tmp_path: Path):
    path = write_folder(tmp_path, tensors()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "not a sound safetensors file" in refusal(tmp_path)


def test_eight_bit_tensors_are_refused(tmp_path: Path):
    state: dict = tensors() | {"model.norm.weight": np.ones(E, np.int8)}
    assert "model.norm.weight has type I8" in refusal(write_folder(tmp_path, state))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", "[" * 100_000, "config.json is not JSON"),
        ("config.json", "[1]", "config.json must hold a JSON object"),
        ("generation_config.json", '{"eos_token_id": 9999}', "outside the vocabulary"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}', "weight_map"),
    ],
)
def test_unsound_json_is_refused(tmp_path: Path, name: str, text: str, words: str):
    folder = write_folder(tmp_path, tensors())
    (folder / name).write_text(text)
    assert words in refusal(folder)


def test_a_folder_without_weights(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert "neither model.safetensors nor" in refusal(tmp_path)


# GGUF files


@pytest.mark.parametrize(("arch", "biases"), [("llama", False), ("llama", True), ("qwen2", True)])
def test_gguf_equals_the_folder_it_was_made_from(tmp_path: Path, arch: str, biases: bool):
    state = tensors(biases)
    folder = write_folder(
        tmp_path / "hf",
        state,
        CONFIG | {"architectures": ["Qwen2ForCausalLM" if biases else "LlamaForCausalLM"]},
    )
    assert_same(load(write_gguf(tmp_path / "m.gguf", state, arch=arch)), load(folder))


def test_a_gguf_without_output_is_tied(tmp_path: Path):
    state = tensors(lm_head=False)
    model = load(write_gguf(tmp_path / "m.gguf", state))
    assert model.config.tie_embeddings and model.lm_head is None


@pytest.mark.parametrize("length", [3, 3 << 20])
def test_a_long_array_of_numbers_stays_packed(tmp_path: Path, length: int):
    path = tmp_path / "long.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_key_value(
        "general.bytes",
        np.arange(length, dtype=np.uint8).tolist(),
        gguf.GGUFValueType.ARRAY,
        gguf.GGUFValueType.UINT8,
    )
    writer.add_uint32("general.behind", 7)
    close(writer)
    metadata = GGUFFile(path).metadata
    values = metadata["general.bytes"]
    assert isinstance(values, list if length == 3 else np.ndarray)
    assert np.array_equal(values, np.arange(length, dtype=np.uint8))
    assert metadata["general.behind"] == 7


def read_back(path: Path, raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Write one tensor of encoded rows, and decode it from the file."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", raw, raw_dtype=kind)
    close(writer)
    return GGUFTensors(path).sliced("x")[...]


@pytest.mark.parametrize(
    "kind",
    ["F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"],
)
def test_tensors_are_decoded_in_parts_as_in_one_go(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "jitney.engine.core.weights.checkpoints.gguf._DECODE_ELEMENTS", 3 * 512
    )  # three rows at a time
    type = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[type]
    # Bytes below 60 keep every scale finite.
    raw = np.random.default_rng(5).integers(0, 60, (10, 512 // block * size), dtype=np.uint8)
    found = read_back(tmp_path / "k.gguf", raw, type)
    expected = gguf.quants.dequantize(raw, type)
    assert found.shape == (10, 512) and np.isfinite(found).all() and found.std() > 0
    np.testing.assert_array_equal(found, expected)
    part = GGUFTensors(tmp_path / "k.gguf").sliced("x")[slice(2, 9), slice(130, 261)]
    np.testing.assert_array_equal(part, expected[2:9, 130:261])


def test_rope_divisors_of_llama3_files(tmp_path: Path):
    """`rope_freqs.weight` holds what the llama3 rule divides each frequency by."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    folder = write_folder(tmp_path / "hf", tensors(), CONFIG | {"rope_scaling": scaling})
    config = ModelSource.resolve(str(folder)).config
    wanted, _ = _inverse_frequencies(config.ropes[0] or RopeConfig(), config)
    plain = 10000.0 ** -(np.arange(D // 2) / (D // 2))
    divisors = (plain / np.asarray(wanted)).astype(np.float32)
    assert divisors.min() == pytest.approx(1) and divisors.max() == pytest.approx(8)
    path = write_gguf(tmp_path / "m.gguf", tensors(), extra={"rope_freqs.weight": divisors})
    config = ModelSource.resolve(str(path)).config
    np.testing.assert_allclose(
        _inverse_frequencies(config.ropes[0] or RopeConfig(), config)[0], wanted, rtol=1e-5
    )
    assert_same(load(path), load(folder))


@pytest.fixture(scope="module")
def sound_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", tensors()).read_bytes()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GG",
        b"GGUF",
        b"GGML" + bytes(100),
        b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + b"key",
    ],
)
def test_files_that_are_not_gguf(tmp_path: Path, data: bytes):
    (tmp_path / "m.gguf").write_bytes(data)
    assert refusal(tmp_path / "m.gguf").startswith("m.gguf: ")


def test_gguf_files_cut_anywhere_are_refused(tmp_path: Path, sound_gguf: bytes):
    for size in (10, 30, 200, 700, 1500, len(sound_gguf) // 2, len(sound_gguf) - 1):
        (tmp_path / "m.gguf").write_bytes(sound_gguf[:size])
        assert refusal(tmp_path / "m.gguf")


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_gguf_headers_with_changed_bytes_are_read_or_refused(
    sound_gguf: bytes, data, tmp_path_factory
):
    damaged = bytearray(sound_gguf)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, 2200))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        config = config_of(GGUFFile(path))
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert config.n_layers >= 1


def test_gguf_faults_name_the_tensors(tmp_path: Path):
    state = tensors()
    del state["model.layers.1.mlp.down_proj.weight"]
    message = refusal(write_gguf(tmp_path / "m.gguf", state))
    assert "1 missing: blk.1.ffn_down.weight" in message


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("weights", ["plain", "int8", "int4"])
def test_dummy_weights_have_the_shapes_of_the_models_own(tmp_path: Path, weights: str):
    """And no file of weights is opened: this one is no such file."""
    folder = write_folder(tmp_path / "m", tensors())
    storage = WeightStorage(weights)
    source = ModelSource.resolve(str(folder))
    own = load_model(source, source.config, jnp.bfloat16, storage=storage)
    (folder / "model.safetensors").write_bytes(b"damaged")
    source = ModelSource.resolve(str(folder), weights=False)
    random = load_model(source, source.config, jnp.bfloat16, storage=storage)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), nnx.state(random)) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), nnx.state(own)
    )
    assert describe_weights(random, source) == f"random, {describe_weights(own)}"
    numbers = np.asarray(widened(next(iter(random.linears())).packed), np.float32)
    assert np.isfinite(numbers).all() and numbers.std() > 0


def test_tiny_random_needs_no_files():
    source = ModelSource.resolve("tiny-random:qwen3")
    assert source == ModelSource("tiny", "", "tiny-random:qwen3", source.config)
    model = load_model(source, source.config, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}
