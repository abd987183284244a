"""The seam for families of models, with a family that only this test knows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reference_logits import DATA, SCRIPT
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from jitney.engine import LLM, SamplingParams
from jitney.engine.checkpoints.families import FAMILIES, Family, read_decoder
from jitney.engine.errors import ModelError
from jitney.engine.models import registry
from jitney.engine.models.llama import Llama
from jitney.engine.models.registry import MODELS, model_class

CASES = DATA["cases"]
SMALL = {
    "dtype": "float32",
    "max_seats": 4,
    "seat_buckets": [1, 4],
    "token_budget": 16,
    "token_buckets": [16],
    "page_size": 8,
    "pages": 120,
    "context": 128,
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


def test_every_family_has_a_model():
    assert set(FAMILIES) == set(MODELS)
    for architecture in MODELS:
        assert model_class(architecture).weight_map


def test_an_unknown_architecture_lists_the_known():
    with pytest.raises(ModelError, match="MambaForCausalLM.*LlamaForCausalLM, Mistral"):
        model_class("MambaForCausalLM")


class Shouting(Llama):
    """A Llama that multiplies its logits by its config's factor, and so turns them round."""

    def logits(self, hidden, kernels):
        return -super().logits(hidden, kernels)


def test_a_family_of_ones_own_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """One module and two lines: its config.json is read, its weights load, and it answers."""

    def read(values):
        _, config = read_decoder(values, max_position_embeddings=64)
        return replace(config, qk_norm=True)

    case = CASES["qwen3"]
    case = case | {"config": case["config"] | {"architectures": ["ShoutingForCausalLM"]}}
    folder = write_folder(tmp_path, case)
    with pytest.raises(ModelError, match="ShoutingForCausalLM.*known: LlamaForCausalLM"):
        LLM(str(folder), **SMALL)
    monkeypatch.setitem(FAMILIES, "ShoutingForCausalLM", Family("shouting", read))
    monkeypatch.setitem(registry.MODELS, "ShoutingForCausalLM", f"{__name__}:Shouting")
    llm = LLM(str(folder), **SMALL)
    prompt = SCRIPT.prompt()[: DATA["rows"][-1] + 1].tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    answer = llm.generate([prompt], params)[0].outputs[0].token_ids
    assert answer == [int(np.argmin(case["logits"][-1]))]
