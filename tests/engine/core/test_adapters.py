"""Low-rank adapters: each request is answered by a model whose matrices have its adapter's change
added to them, whoever else is in the step.

The oracle is the whole model with the change merged into its weights (`adapter_files.merged`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import merged, write_adapter
from cpu_library import packs_here
from oracle import naive_normed, oracle_logprobs, prompt
from safetensors.numpy import save_file

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.errors import ModelError, RequestError
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.models.registry import model_class
from jitney.engine.core.weights.adapters import load_adapters
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.load import load_model

pytestmark = pytest.mark.usefixtures("programs_when_used", "kernels_unproved")

NAMES = ("", "fr", "de")
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_seats": 8,
    "token_budget": 64,
    "context": 256,
    "seat_buckets": [8],
    "token_buckets": [64],
}
#: Longer than a step's rows, too.
PROMPTS = [prompt(number, 7 + 16 * number) for number in range(6)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters; one changes some matrices only."""
    home = tmp_path_factory.mktemp("adapters")
    config = ModelSource.resolve("tiny-random").config
    return {
        "fr": write_adapter(home / "fr", config, 1),
        "de": write_adapter(home / "de", config, 2, rank=6, modules=("q_proj", "down_proj")),
    }


@pytest.fixture(scope="module")
def named(folders: dict[str, Path]) -> tuple[str, ...]:
    """As the setting has them."""
    return tuple(f"{name}={folder}" for name, folder in folders.items())


def engine(named: tuple[str, ...], **settings: Any) -> LLM:
    return LLM("tiny-random", **(SETTINGS | settings), adapters=named)


@pytest.fixture(scope="module")
def llm(programs_when_used: None, kernels_unproved: None, named: tuple[str, ...]) -> LLM:
    return engine(named)


def answers(llm: LLM, prompts: list[list[int]], names: list[str]) -> list[Any]:
    """(tokens, log-probabilities) of each."""
    found = []
    for output in llm.generate(prompts, GREEDY, adapter=names):
        [completion] = output.outputs
        assert completion.logprobs is not None
        found.append((completion.token_ids, [entry.logprob for entry in completion.logprobs]))
    llm.core.check()
    return found


def test_a_mixed_crowd_gets_what_merged_weights_give(llm: LLM, folders: dict[str, Path]):
    source = ModelSource.resolve("tiny-random")
    base: Any = load_model(source, source.config)
    models = {"": base} | {name: merged(base, folder) for name, folder in folders.items()}
    asked = [(one, name) for one in PROMPTS for name in NAMES]
    got = answers(llm, [one for one, _ in asked], [name for _, name in asked])
    for (one, name), (tokens, logprobs) in zip(asked, got, strict=True):
        expected = oracle_logprobs(models[name], one + tokens)
        rows = expected[len(one) - 1 : -1]
        assert tokens == rows.argmax(1).tolist()
        own = rows[np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(logprobs, own, atol=1e-4)
    assert len({tuple(tokens) for tokens, _ in got}) == len(asked)


@pytest.mark.parametrize("family", ["llama", "phi3", "glm4"])
def test_adapters_change_matrices_as_the_checkpoint_has_them(family: str, tmp_path: Path):
    """Fused, and with heads in another order: as if the checkpoint's own matrices were changed."""
    config = tiny_config(family)
    weights = model_class(config.architecture).weight_map(config, "hf")
    draw = np.random.default_rng(3)
    state = {
        name: draw.standard_normal(piece.shape, np.float32)
        for name, piece in weights.pieces.items()
    }
    halves: dict[str, np.ndarray] = {}
    changed = dict(state)
    for target in weights.targets:
        if target.path[0] != "layers" or target.path[-1] != "kernel":
            continue
        for piece in target.pieces:
            a = draw.standard_normal((4, piece.shape[1]), np.float32)
            b = draw.standard_normal((piece.shape[0], 4), np.float32)
            prefix = f"base_model.model.{piece.name.removesuffix('.weight')}"
            halves |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
            changed[piece.name] = (state[piece.name] + 2 * b @ a).astype(np.float32)
    for name, tensors in {"base": state, "merged": changed}.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text("{}")
    folder = write_adapter(tmp_path / "own", config, 1)
    save_file(halves, folder / "adapter_model.safetensors")
    base, merged_whole = (
        load_model(ModelSource("hf", str(tmp_path / name), "", config), config)
        for name in ("base", "merged")
    )
    load_adapters(base, config, {"own": str(folder)}, "float32")
    for linear, expected in zip(base.linears(), merged_whole.linears(), strict=True):
        kernel = np.asarray(linear.kernel[...])
        if linear.adapters is not None:
            kernel = kernel + linear.adapters.a[...] @ linear.adapters.b[...]
        np.testing.assert_allclose(kernel, expected.kernel[...], atol=1e-4)


@pytest.mark.skipif(not packs_here(), reason="this CPU's weights are not packed in pairs")
def test_in_bfloat16_a_crowd_changes_nothing(named: tuple[str, ...]):
    """But the last bit of a log-probability, which is XLA's: see `test_engine`."""
    llm = engine(named, dtype="bfloat16", prefix_cache=False)
    names = [NAMES[number % 3] for number in range(len(PROMPTS))]
    together = answers(llm, PROMPTS, names)
    for number, (one, name) in enumerate(zip(PROMPTS, names, strict=True)):
        [(tokens, logprobs)] = answers(llm, [one], [name])
        assert tokens == together[number][0]
        np.testing.assert_allclose(logprobs, together[number][1], rtol=0, atol=2e-6)


def test_vectors_are_those_of_merged_weights(named: tuple[str, ...], folders: dict[str, Path]):
    llm = engine(named, embedding_pooling="mean")
    source = ModelSource.resolve("tiny-random")
    base: Any = load_model(source, source.config)
    models = {"": base} | {name: merged(base, folder) for name, folder in folders.items()}
    params = SamplingParams(max_tokens=1)
    for number, name in enumerate(NAMES):
        llm.core.add(
            EngineRequest(
                id=name,
                prompt=PROMPTS[number + 1],
                sampling=params,
                arrival=0.0,
                pooling="mean",
                adapter=number,
            )
        )
    ended = {output.request_id: output for output in llm.core.run_until_idle()}
    for number, name in enumerate(NAMES):
        vector = np.frombuffer(ended[name].embedding or b"", np.float32)
        states = naive_normed(models[name], PROMPTS[number + 1]).astype(np.float64).mean(0)
        np.testing.assert_allclose(vector, states / np.linalg.norm(states), atol=2e-5)


def test_pages_are_shared_among_requests_of_one_adapter_only(llm: LLM):
    talk = prompt(99, 100)
    cached = [llm.generate([talk], GREEDY, adapter=name)[0].cached_tokens for name in NAMES * 2]
    assert cached[:3] == [0, 0, 0]
    assert all(count >= 80 for count in cached[3:])


@pytest.mark.usefixtures("rash")
def test_a_preempted_sequence_comes_back_with_its_adapter(llm: LLM, named: tuple[str, ...]):
    prompts = [prompt(number, 40 + 7 * number) for number in range(8)]
    names = [NAMES[number % 3] for number in range(8)]
    tight = engine(named, pages=20, prefix_cache=False, prefill_share=1.0)
    expected = [tokens for tokens, _ in answers(llm, prompts, names)]
    assert [tokens for tokens, _ in answers(tight, prompts, names)] == expected
    assert tight.core.ledger.totals["preempted"] > 0


def test_an_unknown_adapter_is_refused_with_the_names_of_those_loaded(llm: LLM):
    with pytest.raises(RequestError, match=r"no adapter 'es'.*fr, de"):
        llm.generate([PROMPTS[0]], GREEDY, adapter="es")
    with pytest.raises(RequestError, match="1 prompts but 2 adapters"):
        llm.generate([PROMPTS[0]], GREEDY, adapter=["fr", "de"])


def test_an_adapter_of_another_model_is_refused_by_name(tmp_path: Path):
    source = ModelSource.resolve("tiny-random")
    wide = replace(source.config, hidden_size=2 * source.config.hidden_size)
    folder = write_adapter(tmp_path / "wide", wide, 1)
    with pytest.raises(ModelError, match=r"^adapter wide: model\.layers\.0\.self_attn\.q_proj has"):
        engine((f"wide={folder}",))
    deep = replace(source.config, n_layers=source.config.n_layers + 1)
    folder = write_adapter(tmp_path / "deep", deep, 1)
    with pytest.raises(ModelError, match=r"^adapter deep changes model\.layers\.\d+\.mlp"):
        engine((f"deep={folder}",))


@pytest.mark.usefixtures("hurried")
def test_drafts_change_no_answer(named: tuple[str, ...]):
    """Texts of a few tokens, which repeat themselves, of three models in one step."""
    few = {token: 100.0 for token in (3, 9, 11, 40)}
    params = SamplingParams(temperature=0.3, seed=7, logit_bias=few, max_tokens=80, ignore_eos=True)
    found = []
    for speculative in ("off", "ngram"):
        # Steps of one size, so that drafts always pay.
        llm = engine(named, seat_buckets=[8], speculative=speculative)
        outputs = llm.generate(PROMPTS[:3], params, adapter=list(NAMES))
        found.append([output.outputs[0].token_ids for output in outputs])
        llm.core.check()
        assert (llm.core.ledger.totals["accepted"] > 20) == (speculative == "ngram")
    plain, drafted = found
    assert drafted == plain
