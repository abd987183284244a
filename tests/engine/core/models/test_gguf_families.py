"""Families in GGUF files: the model of the folder that the file was made from."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from flax import nnx
from gguf_files import rounded
from gguf_models import converted, write_file
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_logits import DATA, SCRIPT, SMALL, weights_of, write_folder

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.errors import ModelError
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.models.quantization import widened
from jitney.engine.core.weights.checkpoints.gguf_config import _read_gguf_config
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.gguf_tensors import GGUFTensors
from jitney.engine.core.weights.load import WeightStorage, load_model

pytestmark = pytest.mark.usefixtures("programs_when_used", "compiled_in_a_hurry")

CASES = DATA["cases"]
Q8_0 = gguf.GGMLQuantizationType.Q8_0
#: Case of the reference logits -> what files cannot say, or llama.cpp's converter does not ask.
FAMILIES: dict[str, dict[str, Any]] = {
    "ministral3": {},
    "phi3": {},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False},
    "olmo3": {},
    "granite": {"attention_multiplier": 0.25},
    "glm4": {},
    "seed_oss": {},
    "exaone4": {"layer_types": ["sliding_attention"] * 3},
    "cohere2": {},
    # GGUF files leave the pattern of windows and the divisor of scores to the reader.
    "gemma3": {
        "layer_types": None,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 32,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gpt_oss_mxfp4": {},
    "qwen3_moe": {},
    "mixtral": {"sliding_window": None},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "qwen3_next": {"norm_topk_prob": True},
    "lfm2": {},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "granite4": {},
    "granite4_h": {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
    "nemotron_h": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "glm4_moe_lite": {},
    "mistral4": {
        "rope_parameters": CASES["mistral4"]["config"]["rope_parameters"]
        | {"llama_4_scaling_beta": 0.1}
    },
    "gemma4": {},
    "gemma4_experts": {},
    "gemma4_unified": {},
}
#: Experts in MXFP4 as they are stored.
KEPT = WeightStorage("plain", frozenset({"mxfp4"}))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gguf_file_is_the_same_model(name: str, tmp_path: Path):
    config = config_of(name)
    folder = ModelSource.resolve(write_folder(tmp_path, config, weights_of(CASES[name])))
    file = ModelSource.resolve(str(write_file(tmp_path / "g.gguf", *of_case(name))))
    found = replace(file.config, architecture=folder.config.architecture)
    # A layer that predicts several tokens is read of folders alone.
    assert rounded(found) == rounded(replace(folder.config, n_prediction_layers=0))
    assert_same(*(load_model(source, source.config, storage=KEPT) for source in (folder, file)))


def assert_same(one: Model, other: Model) -> None:
    states = [nnx.to_flat_state(nnx.state(model)) for model in (one, other)]
    for (path, left), (_, right) in zip(*states, strict=True):
        exact = "log_decay" not in path  # stored as its exponential
        rtol, atol = (0, 0) if exact else (1e-6, 1e-6)
        np.testing.assert_allclose(left[...], right[...], rtol, atol, err_msg=str(path))


def config_of(name: str) -> dict[str, Any]:
    return CASES[name]["config"] | {"eos_token_id": 2, "bos_token_id": None} | FAMILIES[name]


def of_case(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Key-values and tensors of a case's file."""
    return converted(config_of(name), weights_of(CASES[name]))


def loaded(path: Path, storage: WeightStorage = KEPT) -> Model:
    source = ModelSource.resolve(str(path))
    return load_model(source, source.config, storage=storage)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "nemotron_h", "glm4_moe_lite"])
def test_a_layer_that_predicts_several_tokens_is_not_read(name: str, tmp_path: Path):
    keys, tensors = of_case(name)
    arch = keys["general.architecture"]
    layers = keys[f"{arch}.block_count"]
    more = {f"{arch}.block_count": layers + 1, f"{arch}.nextn_predict_layers": 1}
    behind = {
        end: np.ones((1, 1), np.float32)
        for end in ("nextn.eh_proj.weight", "attn_q.weight", "ffn_gate_inp.weight")
    }
    behind = {f"blk.{layers}.{end}": tensor for end, tensor in behind.items()}
    plain = loaded(write_file(tmp_path / "plain.gguf", keys, tensors))
    assert_same(plain, loaded(write_file(tmp_path / "more.gguf", keys | more, tensors | behind)))


def test_gates_and_ups_of_experts_may_be_one_tensor(tmp_path: Path):
    keys, tensors = of_case("qwen3_5_moe")
    joined = {
        name.replace("ffn_gate_exps", "ffn_gate_up_exps"): np.concatenate(
            [tensor, tensors[name.replace("gate", "up")]], axis=1
        )
        for name, tensor in tensors.items()
        if "ffn_gate_exps" in name
    }
    rest = {name: tensor for name, tensor in tensors.items() if "gate_exps" not in name}
    rest = {name: tensor for name, tensor in rest.items() if "up_exps" not in name}
    plain = loaded(write_file(tmp_path / "plain.gguf", keys, tensors))
    assert_same(plain, loaded(write_file(tmp_path / "one.gguf", keys, rest | joined)))


def test_latents_of_older_files_have_one_matrix_of_keys_and_values(tmp_path: Path):
    """Their keys are those of the heads that latents stand for."""
    keys, tensors = of_case("deepseek_v2")
    older = dict(keys) | {"deepseek2.attention.head_count_kv": 4}
    for key in ("key_length", "value_length"):
        older[f"deepseek2.attention.{key}"] = older.pop(f"deepseek2.attention.{key}_mla")
    rest = {name: own for name, own in tensors.items() if "_k_b." not in name}
    for name, k_b in tensors.items():
        if "_k_b." in name:
            v_b = rest.pop(name.replace("_k_b.", "_v_b."))
            whole = np.concatenate([k_b.swapaxes(1, 2), v_b], axis=1)
            rest[name.replace("_k_b.", "_kv_b.")] = whole.reshape(-1, whole.shape[2])
    plain = loaded(write_file(tmp_path / "plain.gguf", keys, tensors))
    assert_same(plain, loaded(write_file(tmp_path / "older.gguf", older, rest)))


def test_experts_stay_in_4_bits(tmp_path: Path):
    """Each expert's blocks where they lie in the tensor of all, and other types as floats."""
    keys, tensors = of_case("gpt_oss")
    kinds = {
        "ffn_gate_exps.weight": "Q4_0",
        "ffn_up_exps.weight": "Q4_0",
        "ffn_down_exps.weight": "Q8_0",
    }
    path = write_file(tmp_path / "g.gguf", keys, tensors, kinds)
    storage = WeightStorage("plain", frozenset({"int4", "mxfp4"}))
    packed, plain = loaded(path, storage), loaded(path)
    for one, other in zip(packed.linears(), plain.linears(), strict=True):
        np.testing.assert_array_equal(widened(one.packed), other.packed.kernel)
    schemes = Counter(one.packed.scheme for one in packed.linears())
    assert schemes["int4"] == 3  # one a layer
    found = GGUFTensors(path).sliced("blk.1.ffn_down_exps.3.weight")[...]
    wanted = gguf.quants.dequantize(
        gguf.quants.quantize(tensors["blk.1.ffn_down_exps.weight"][3], Q8_0), Q8_0
    )
    np.testing.assert_array_equal(found, wanted)
    first = GGUFTensors(path).sliced("blk.1.ffn_down_exps.3.weight")[slice(3, 9), slice(31, 34)]
    np.testing.assert_array_equal(first, wanted[3:9, 31:34])


def test_a_model_may_be_split_into_files(tmp_path: Path):
    keys, tensors = of_case("qwen3_moe")
    plain = loaded(write_file(tmp_path / "plain.gguf", keys, tensors))
    count = -(-len(tensors) // 20)
    write_file(tmp_path / "g.gguf", keys, tensors, tensors_a_file=20)
    first, second = (tmp_path / f"g-{number:05}-of-{count:05}.gguf" for number in (1, 2))
    assert_same(plain, loaded(first))
    source = ModelSource.resolve(str(first))
    assert source.name == "g"
    before = source.identity()
    with pytest.raises(ModelError, match=r"give the first one, -00001-of-"):
        loaded(second)
    second.write_bytes(second.read_bytes()[:-4] + b"\0\0\0\1")
    assert source.identity() != before
    first.rename(tmp_path / "alone.gguf")
    with pytest.raises(ModelError, match=rf"split into {count} files"):
        loaded(tmp_path / "alone.gguf")


@pytest.mark.parametrize("name", ["gpt_oss_mxfp4", "qwen3_5_moe"])
def test_a_gguf_file_writes_what_transformers_writes(name: str, tmp_path: Path):
    """Greedy tokens in float32, of files that say all that there is to know of the case."""
    keys, tensors = of_case(name)
    size = len(tensors["token_embd.weight"])
    keys |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{number}" for number in range(size)],
        "tokenizer.ggml.token_type": [1] * size,
    }
    path = write_file(tmp_path / "g.gguf", keys, tensors)
    case = CASES[name]
    llm = LLM(str(path), **SMALL | {"context": case.get("context", 0)})
    wanted = [tokens for tokens, _ in case["greedy"].values()]
    params = SamplingParams(temperature=0.0, max_tokens=len(wanted[0]), ignore_eos=True)
    prompts = [SCRIPT.prompt(int(length)).tolist() for length in case["greedy"]]
    outputs = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == wanted


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from([*FAMILIES]), data=st.data())
def test_any_value_is_read_or_refused(name: str, data: st.DataObject):
    keys, shapes = of_shapes(name)
    key = data.draw(st.sampled_from([*keys]))
    numbers = st.integers() | st.integers(0, 64) | st.floats() | st.booleans()
    value = data.draw(numbers | st.none() | st.text(max_size=3) | st.lists(numbers, max_size=4))
    try:
        _read_gguf_config(keys | {key: value}, shapes)
    except ModelError as error:
        assert "\n" not in str(error) and len(str(error)) < 400


@cache
def of_shapes(name: str) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    keys, tensors = of_case(name)
    return keys, {name: tensor.shape for name, tensor in tensors.items()}


def test_columns_in_another_order_stay_in_4_bits(tmp_path: Path):
    """Of the closing matrices of delta nets, whose value heads are whole groups of a scale."""
    keys, tensors = of_case("qwen3_5")
    path = write_file(tmp_path / "g.gguf", keys, tensors, {"ssm_out.weight": "Q4_0"})
    packed, plain = loaded(path, WeightStorage("plain", frozenset({"int4"}))), loaded(path)
    for one, other in zip(packed.linears(), plain.linears(), strict=True):
        np.testing.assert_array_equal(widened(one.packed), other.packed.kernel)
    assert Counter(one.packed.scheme for one in packed.linears())["int4"] == 3  # one a delta net


def test_tensors_of_experts_that_do_not_fit_are_named(tmp_path: Path):
    keys, tensors = of_case("qwen3_moe")
    name = "blk.1.ffn_up_exps.weight"
    with pytest.raises(ModelError, match=r"blk.1.ffn_up_exps.weight \[6, 40\] holds no weight of"):
        loaded(write_file(tmp_path / "a.gguf", keys, tensors | {name: tensors[name][..., 0]}))
    with pytest.raises(ModelError, match=r"missing: blk.1.ffn_up_exps.5.weight"):
        loaded(write_file(tmp_path / "b.gguf", keys, tensors | {name: tensors[name][:5]}))
    keys, tensors = of_case("deepseek_v3")
    del tensors["blk.2.attn_v_b.weight"]
    with pytest.raises(ModelError, match=r"attn_k_b.weight .* has no attn_v_b.weight beside it"):
        loaded(write_file(tmp_path / "c.gguf", keys, tensors))
