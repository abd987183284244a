"""The seam for families of models: some through the engine against transformers, published sizes,
and a family that only this test knows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from reference_logits import DATA, SCRIPT, SMALL, weights_of, write_folder

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.errors import ModelError
from jitney.engine.core.models import registry
from jitney.engine.core.models.llama import Llama
from jitney.engine.core.models.registry import _MODELS, abstract_model, model_class
from jitney.engine.core.weights.checkpoints.families import FAMILIES, Family
from jitney.engine.core.weights.checkpoints.families.shared import read_decoder
from jitney.engine.core.weights.checkpoints.hf_config import read_hf_config
from jitney.engine.core.weights.checkpoints.layer_configs import RopeConfig

pytestmark = pytest.mark.usefixtures(
    "programs_when_used", "compiled_in_a_hurry", "kernels_unproved"
)

CASES = DATA["cases"]


@pytest.mark.usefixtures("one_program_a_model")
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *((name, "auto") for name, case in CASES.items() if "greedy" in case),
        ("gemma3", "reference"),
    ],
)
def test_a_family_writes_what_transformers_writes(name: str, kernels: str, tmp_path: Path):
    """Greedy tokens and their log-probabilities in float32: prompts in chunks of 16 rows, past
    windows of 8 over pages of 8, one by one and together.
    """
    case = CASES[name]
    settings = SMALL | {"context": case.get("context", 0)}
    llm = LLM(write_folder(tmp_path, case["config"], weights_of(case)), kernels=kernels, **settings)
    wanted = [tokens for tokens, _ in case["greedy"].values()]
    logprobs = [numbers for _, numbers in case["greedy"].values()]
    prompts = [SCRIPT.prompt(int(length)).tolist() for length in case["greedy"]]
    params = SamplingParams(temperature=0.0, max_tokens=len(wanted[0]), ignore_eos=True, logprobs=1)
    together = [output.outputs[0] for output in llm.generate(prompts, params)]
    alone = [llm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
    for outputs in (together, alone):
        assert [output.token_ids for output in outputs] == wanted
        found = [[own.logprob for own in output.logprobs or []] for output in outputs]
        np.testing.assert_allclose(found, logprobs, atol=1e-3)
    llm.core.check()


@pytest.mark.parametrize("family", ["olmo2", "granite", "cohere2"])
def test_sums_that_no_norm_reads_are_rounded_alike_in_every_bucket(family: str):
    """OLMo 2's products read the sums themselves, Granite's sums are multiplied, Cohere's norms
    are XLA's; so are products of int4, and XLA may fuse both.
    """
    settings: dict[str, Any] = SMALL | {
        "dtype": "bfloat16",
        "weights": "int4",
        "seat_buckets": [1, 4],
    }
    llm = LLM(f"tiny-random:{family}", **settings)
    prompts = [list(range(4, 4 + length)) for length in (3, 17, 40, 9)]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone
    assert len(set(map(tuple, alone))) == len(prompts)


def test_what_gemmas_settings_leave_out():
    """google/gemma-3-1b-it, which is published with so many weights."""
    settings = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
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
    config = read_hf_config(settings)
    assert config.windows[:6] == (512,) * 5 + (0,)
    assert config.window == 0  # some layer sees all, so pages behind the windows stay
    assert config.attention_scale == 1 / 16 and config.tie_embeddings
    assert (config.rope(0), config.rope(5)) == (RopeConfig(1e4), RopeConfig(1e6))
    leaves = jax.tree.leaves(nnx.state(abstract_model(config)))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert sum(leaf.size for leaf in leaves) == 999_885_952


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


def test_a_custom_family_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """One module and two lines: its config.json is read, its weights load, and it answers."""

    def read(values):
        _, config = read_decoder(values, max_position_embeddings=64)
        return replace(config, qk_norm=True)

    case = CASES["qwen3"]
    config = case["config"] | {"architectures": ["ShoutingForCausalLM"]}
    folder = write_folder(tmp_path, config, weights_of(case))
    with pytest.raises(ModelError, match=r"ShoutingForCausalLM.*known: LlamaForCausalLM"):
        LLM(folder, **SMALL)
    monkeypatch.setitem(FAMILIES, "ShoutingForCausalLM", Family("shouting", read))
    monkeypatch.setitem(registry._MODELS, "ShoutingForCausalLM", f"{__name__}:Shouting")
    llm = LLM(folder, **SMALL)
    prompt = SCRIPT.prompt()[: DATA["rows"][-1] + 1].tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    answer = llm.generate([prompt], params)[0].outputs[0].token_ids
    assert answer == [int(np.argmin(case["logits"][-1]))]
