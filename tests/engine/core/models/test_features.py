"""Features of the engine with the families that have state of their own kinds: few pages, prefixes
that are found, preemption, grammars and narrow weights at once, and what adapters may change.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import oracle_logprobs
from reference_logits import DATA, SCRIPT, weights_of, write_folder
from safetensors.numpy import save_file

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import Grammar
from jitney.engine.core.models.quantization import quantise
from jitney.engine.core.scheduler.page_demand import PageDemand
from jitney.engine.core.weights.adapters import load_adapters
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.load import WeightStorage, load_model

pytestmark = pytest.mark.usefixtures("programs_when_used", "kernels_unproved")

#: All products are the engine's own: XLA's have other last bits where the CPU multiplies no pairs
#: of bfloat16 (docs/decisions, 0033).
SMALL: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_seats": 4,
    "seat_buckets": [4],
    "token_budget": 16,
    "token_buckets": [16],
    "product_rows": 16,
    "page_size": 8,
    "pages": 18,
    "context": 136,
}
LETTERS = "[a-c]{30}"
#: A family of each kind of cache: latents, windows beside full pages, state. Each has another kind
#: of weights, or of keys and values, which all families multiply alike.
PAIRS = (
    ("deepseek_v3", {"weights": "int8"}),
    ("gemma4", {"kv_dtype": "int8"}),
    ("granitehybrid", {"weights": "fp8"}),
)
#: Ends of names of matrices that adapters may change, and the beginning of those that they may not.
MODULES = (
    *("_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz", ".w1", ".w2", ".w3", "_with_mqa"),
    *("shared_mlp.input_linear", "shared_mlp.output_linear"),
)
FIXED = "kv_b_proj"


def answers(llm: LLM, prompts: list[list[int]], numbers: list[int]) -> list[Any]:
    """Tokens, text and log-probabilities of these prompts' answers, every second one in letters."""
    given = [prompts[number] for number in numbers]
    plain: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 32, "logprobs": 1}
    params = [
        SamplingParams(**plain, grammar=Grammar("regex", LETTERS))
        if number % 2
        else SamplingParams(**plain, ignore_eos=True)
        for number in numbers
    ]
    outputs = [request.outputs[0] for request in llm.generate(given, params)]
    return [
        (one.token_ids, one.text, [own.logprob for own in one.logprobs or ()]) for one in outputs
    ]


@pytest.mark.parametrize(("family", "formats"), PAIRS)
def test_answers_depend_on_nothing_but_the_request(
    family: str, formats: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Together in pages for about two sequences, then each alone, first without and then with its
    prefix in the cache. Beside so few pages recurrent layers have no checkpoints: what they find is
    in `test_recurrent`.
    """
    monkeypatch.setattr(PageDemand, "lasts", lambda *_: True)
    llm = LLM(f"tiny-random:{family}", **formats, **SMALL)
    assert all(getattr(llm.info.formats, name) == value for name, value in formats.items())
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, 250, length).tolist() for length in (33, 40, 17, 88, 52)]
    everyone = list(range(len(prompts)))
    together = answers(llm, prompts, everyone)
    assert llm.core.ledger.totals["preempted"] > 0
    before = llm.core.ledger.totals["cached_tokens"]
    alone = [answers(llm, prompts, [number])[0] for number in everyone for _ in range(2)]
    cached = llm.core.ledger.totals["cached_tokens"] - before
    assert (cached >= 80) == llm.info.sizes.prefix_cache
    assert alone[::2] == together and alone[1::2] == together
    assert len({tuple(tokens) for tokens, *_ in together[::2]}) == 3
    for _, text, _ in together[1::2]:
        assert re.fullmatch(LETTERS, text)
    llm.core.check()


def save_adapter(folder: Path, halves: dict[str, np.ndarray]) -> None:
    folder.mkdir()
    save_file(halves, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    "name",
    ["deepseek_v3", "gemma4_experts", "granite4_h", "lfm2_moe", "muse_glimmer", "nemotron_h"],
)
def test_files_are_rounded_as_the_matrices_that_are_made_of_them(name: str, tmp_path: Path):
    """Fused matrices, rows in another order, and experts side by side; no two matrices are rounded
    together.
    """
    case = DATA["cases"][name]
    source = ModelSource.resolve(write_folder(tmp_path / "files", case["config"], weights_of(case)))
    plain = load_model(source, source.config)
    narrow = load_model(source, source.config, storage=WeightStorage("int8"))
    pairs = list(zip(plain.linears(), narrow.linears(), strict=True))
    for one, other in pairs:
        wanted = quantise(one.packed.kernel, scheme="int8", dtype=jnp.float32)
        np.testing.assert_array_equal(other.packed.kernel, wanted.kernel)
        np.testing.assert_allclose(other.packed.scale, wanted.scale, rtol=1e-6)
    assert len(pairs) > 2 * source.config.n_layers


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("qwen3_5", 3 * 3 + 4 + 4 * 3),
        ("qwen3_next", 3 * 2 + 4),
        ("lfm2_moe", 3 * 2 + 4 + 2 * 3),
        ("nemotron_h", 4 * 2 + 4 + 2),
        ("glm4_moe_lite", 3 * 4 + 3),
        ("gemma4", 6 * (4 + 3) - 2 * 3),
        ("muse_glimmer", 5 * (5 + 3)),
    ],
)
def test_adapters_change_what_a_merged_checkpoint_has(family: str, count: int, tmp_path: Path):
    """Of recurrent layers, also fused ones, of gated attention, of what opens and closes attention
    to latents, and of a dense feed-forward.
    """
    case = DATA["cases"][family]
    tensors = weights_of(case)
    rng = np.random.default_rng(2)
    halves, merged = {}, dict(tensors)
    for name, matrix in tensors.items():
        module = name.removesuffix(".weight")
        if "expert" in module or module.endswith(FIXED):
            continue
        if module.endswith(MODULES):
            a = rng.normal(0, 0.1, (4, matrix.shape[1])).astype(np.float32)
            b = rng.normal(0, 0.1, (matrix.shape[0], 4)).astype(np.float32)
            halves[f"base_model.model.{module}.lora_A.weight"] = a
            halves[f"base_model.model.{module}.lora_B.weight"] = b
            merged[name] = matrix + 2 * b @ a
    assert len(halves) == 2 * count
    save_adapter(tmp_path / "adapter", halves)
    plain, changed = (
        ModelSource.resolve(write_folder(tmp_path / name, case["config"], weights))
        for name, weights in {"plain": tensors, "merged": merged}.items()
    )
    model = load_model(plain, plain.config)
    load_adapters(model, plain.config, {"one": str(tmp_path / "adapter")}, "float32")
    tokens = SCRIPT.prompt(20).tolist()
    wanted = oracle_logprobs(load_model(changed, changed.config), tokens)
    np.testing.assert_allclose(oracle_logprobs(model, tokens, adapter=1), wanted, atol=1e-3)
    assert np.abs(oracle_logprobs(model, tokens) - wanted).max() > 0.1


def test_adapters_of_what_is_multiplied_into_latents_are_refused_by_name(tmp_path: Path):
    case = DATA["cases"]["glm4_moe_lite"]
    module = f"model.layers.1.self_attn.{FIXED}"
    outputs, inputs = case["shapes"][f"{module}.weight"]
    halves = {"A": np.ones((4, inputs), np.float32), "B": np.ones((outputs, 4), np.float32)}
    named = {f"base_model.model.{module}.lora_{half}.weight": x for half, x in halves.items()}
    save_adapter(tmp_path / "adapter", named)
    plain = write_folder(tmp_path / "plain", case["config"], weights_of(case))
    with pytest.raises(ModelError, match=f"{FIXED}; only the linear layers"):
        LLM(plain, **SMALL, adapters=[f"one={tmp_path / 'adapter'}"])
