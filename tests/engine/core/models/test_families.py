"""The seam for families of models: some through the engine against transformers, published sizes,
and a family that only this test knows.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import jax
import numpy as np
import pytest
from flax import nnx
from reference_logits import DATA, SCRIPT
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.errors import ModelError
from jitney.engine.core.models import registry
from jitney.engine.core.models.llama import Llama
from jitney.engine.core.models.registry import _MODELS, abstract_model, model_class
from jitney.engine.core.weights.checkpoints.families import FAMILIES, Family, _read_decoder
from jitney.engine.core.weights.checkpoints.hf_config import read_hf_config
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.load import load_model

pytestmark = pytest.mark.usefixtures("programs_when_used", "compiled_in_a_hurry")

CASES = DATA["cases"]
SMALL = {
    "dtype": "float32",
    "max_seats": 4,
    "seat_buckets": [1, 4],
    "token_budget": 16,
    "token_buckets": [16],
    "page_size": 8,
    "pages": 120,
    "context": 0,
}


def write_folder(folder: Path, case: dict) -> Path:
    """A model of a case of the reference logits; token i is the word t<i>."""
    spread = case.get("embed_spread", 1.0)
    tensors = {
        name: SCRIPT.random_tensor(name, tuple(shape), spread)
        for name, shape in case["shapes"].items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(case["config"]))
    words = {f"t{i}": i for i in range(case["config"]["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))
    return folder


#: Of these with the reference kernels, too.
REFERENCE = ("gemma3", "olmo2", "phi3", "cohere2")


@pytest.mark.parametrize(
    ("name", "kernels"),
    [*((name, "auto") for name in SCRIPT.GREEDY), *((name, "reference") for name in REFERENCE)],
)
def test_a_family_writes_what_transformers_writes(name: str, kernels: str, tmp_path: Path):
    """Greedy tokens and their log-probabilities in float32: prompts in chunks of 16 rows, past
    windows of 8 over pages of 8, one by one and together.
    """
    case = CASES[name]
    settings = SMALL | {"context": case.get("context", 0)}
    llm = LLM(str(write_folder(tmp_path, case)), kernels=kernels, **settings)
    wanted = [tokens for tokens, _ in case["greedy"].values()]
    logprobs = [numbers for _, numbers in case["greedy"].values()]
    prompts = [SCRIPT.prompt(int(length)).tolist() for length in case["greedy"]]
    params = SamplingParams(temperature=0.0, max_tokens=len(wanted[0]), ignore_eos=True, logprobs=1)
    together = [output.outputs[0] for output in llm.generate(prompts, params)]
    alone = [llm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
    for outputs in (together, alone):
        assert [output.token_ids for output in outputs] == wanted
        found = [[own.logprob for own in output.logprobs] for output in outputs]
        np.testing.assert_allclose(found, logprobs, atol=1e-3)
    llm.core.check()


@pytest.mark.parametrize("family", ["olmo2", "granite", "cohere2"])
def test_sums_that_no_norm_reads_are_rounded_alike_in_every_bucket(family: str):
    """OLMo 2's products read the sums themselves, Granite's sums are multiplied, Cohere's norms
    are XLA's; so are products of int4, and XLA may fuse both.
    """
    settings: dict[str, Any] = SMALL | {"dtype": "bfloat16", "weights": "int4"}
    llm = LLM(f"tiny-random:{family}", **settings)
    prompts = [list(range(4, 4 + length)) for length in (3, 17, 40, 9)]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone
    assert len(set(map(tuple, alone))) == len(prompts)


def write_gguf(path: Path, case: dict, **keys: float) -> Path:
    """The case's weights as llama.cpp's converter writes them: its names, norms plus 1."""
    config = case["config"]
    writer = gguf_files.open_writer(
        path,
        "gemma3",
        layers=config["num_hidden_layers"],
        size=config["hidden_size"],
        inner=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
    )
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    for key, value in keys.items():
        writer.add_float32(f"gemma3.{key.replace('__', '.')}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config["num_hidden_layers"])
    for name, shape in case["shapes"].items():
        tensor = SCRIPT.random_tensor(name, tuple(shape), case["embed_spread"])
        if "norm" in name:
            tensor = tensor + np.float32(1)
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None
        writer.add_tensor(gguf_name, tensor)
    gguf_files.close(writer)
    return path


def test_a_gguf_file_is_the_same_gemma(tmp_path: Path):
    """GGUF files leave the pattern of windows and the divisor of scores to the reader."""
    case = CASES["gemma3"]
    config = case["config"] | {"query_pre_attn_scalar": 32, "max_position_embeddings": 64}
    config |= {"sliding_window_pattern": 6, "eos_token_id": 2, "bos_token_id": None}
    config["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    del config["layer_types"]
    folder = ModelSource.resolve(str(write_folder(tmp_path, case | {"config": config})))
    path = write_gguf(tmp_path / "g.gguf", case, rope__freq_base_swa=100.0)
    file = ModelSource.resolve(str(path))
    eps = folder.config.rms_eps  # float32 in the file
    assert replace(file.config, rms_eps=eps) == folder.config
    assert file.config.windows == (8,) * 4
    one, other = (load_model(source, source.config) for source in (folder, file))
    for left, right in zip(*map(jax.tree.leaves, map(nnx.state, (one, other))), strict=True):
        np.testing.assert_array_equal(left, right)


GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
}
#: The published sizes, and how many weights they are published with.
PUBLISHED = {
    "270m": (
        {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18},
        268_098_176,
    ),
    "1b": (
        {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26},
        999_885_952,
    ),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_gemmas_have_their_number_of_weights(size: str):
    shape, wanted = PUBLISHED[size]
    config = read_hf_config(GEMMA3 | shape)
    leaves = jax.tree.leaves(nnx.state(abstract_model(config)))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert sum(leaf.size for leaf in leaves) == wanted
    assert config.windows[:6] == (512,) * 5 + (0,)
    assert config.window == 0  # some layer sees all, so pages behind the windows stay
    assert config.attention_scale == 1 / 16 and config.tie_embeddings
    assert [config.ropes[layer].theta for layer in (0, 5)] == [1e4, 1e6]


OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "vocab_size": 100352,
    "max_position_embeddings": 4096,
    "rope_theta": 500000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
#: As above: E, F, L, H, K.
PUBLISHED_OLMO2 = {
    "1b": ((2048, 8192, 16, 16, 16), 1_484_916_736),
    "7b": ((4096, 11008, 32, 32, 32), 7_298_617_344),
    "32b": ((5120, 27648, 64, 40, 8), 32_234_279_936),
}


@pytest.mark.parametrize("size", PUBLISHED_OLMO2)
def test_published_olmos_have_their_number_of_weights(size: str):
    (hidden, inner, layers, heads, kv_heads), wanted = PUBLISHED_OLMO2[size]
    shape = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    config = read_hf_config(OLMO2 | shape)
    leaves = jax.tree.leaves(nnx.state(abstract_model(config)))
    assert sum(leaf.size for leaf in leaves) == wanted
    assert config.wide_qk_norm and not config.qk_norm and not config.tie_embeddings


def test_every_family_has_a_model():
    assert set(FAMILIES) == set(_MODELS)
    for architecture in _MODELS:
        assert model_class(architecture).weight_map


def test_an_unknown_architecture_lists_the_known():
    with pytest.raises(ModelError, match=r"MambaForCausalLM.*LlamaForCausalLM, Mistral"):
        model_class("MambaForCausalLM")


class Shouting(Llama):
    """A Llama that multiplies its logits by its config's factor, and so turns them round."""

    def logits(self, hidden, kernels):
        return -super().logits(hidden, kernels)


def test_a_family_of_ones_own_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """One module and two lines: its config.json is read, its weights load, and it answers."""

    def read(values):
        _, config = _read_decoder(values, max_position_embeddings=64)
        return replace(config, qk_norm=True)

    case = CASES["qwen3"]
    case = case | {"config": case["config"] | {"architectures": ["ShoutingForCausalLM"]}}
    folder = write_folder(tmp_path, case)
    with pytest.raises(ModelError, match=r"ShoutingForCausalLM.*known: LlamaForCausalLM"):
        LLM(str(folder), **SMALL)
    monkeypatch.setitem(FAMILIES, "ShoutingForCausalLM", Family("shouting", read))
    monkeypatch.setitem(registry._MODELS, "ShoutingForCausalLM", f"{__name__}:Shouting")
    llm = LLM(str(folder), **SMALL)
    prompt = SCRIPT.prompt()[: DATA["rows"][-1] + 1].tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    answer = llm.generate([prompt], params)[0].outputs[0].token_ids
    assert answer == [int(np.argmin(case["logits"][-1]))]
