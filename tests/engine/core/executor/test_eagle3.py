"""An EAGLE-3 head drafts: what it drafts is what a naive pass over the whole text drafts, and it
changes no token.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafting_heads import (
    MIXED,
    SETTINGS,
    Tensors,
    answers,
    check_drafts,
    check_few_pages,
    check_rules,
    check_several_devices,
    check_what_is_left,
    fed_forward,
    rms,
    shares_of,
    with_bytes,
)
from reference_logits import DATA, SCRIPT, weights_of, write_folder
from safetensors.numpy import save_file

from jitney.engine import LLM
from jitney.engine.common.errors import ConfigError, ModelError
from jitney.engine.core.setup import Setup
from jitney.engine.core.weights.checkpoints.eagle3 import read_eagle3
from jitney.engine.core.weights.checkpoints.hf_config import read_hf_config
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.load import load_model

pytestmark = pytest.mark.usefixtures(
    "programs_when_used", "compiled_in_a_hurry", "kernels_unproved"
)

LAYERS, SIZE, DRAFTED = 6, 48, 80
CONFIG: dict[str, Any] = DATA["cases"]["qwen3"]["config"] | {
    "num_hidden_layers": LAYERS,
    "layer_types": ["full_attention"] * LAYERS,
    "max_position_embeddings": 256,
}
#: As the published heads have it: a short context, and a class of their own.
HEAD_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFTED,
    "head_dim": 24,
    "hidden_size": SIZE,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "vocab_size": CONFIG["vocab_size"],
}
#: The tokens that it drafts.
TOKENS = np.sort(np.random.default_rng(4).permutation(CONFIG["vocab_size"])[:DRAFTED])


@cache
def target_weights() -> Tensors:
    """Tensors of a model whose next token mostly follows from the newest one: layers add little,
    and the output head has the embeddings of other tokens, and noise.
    """
    tensors = weights_of(DATA["cases"]["qwen3"])
    table, rng = tensors["model.embed_tokens.weight"], np.random.default_rng(3)
    noise = rng.normal(0, 1.5, table.shape).astype(np.float32)
    tensors["lm_head.weight"] = table[rng.permutation(len(table))] + noise
    layers = [name for name in tensors if name.startswith("model.layers.0.")]
    for number in range(1, LAYERS):
        for name in layers:
            new = name.replace(".0.", f".{number}.")
            tensors[new] = SCRIPT.random_tensor(new, tensors[name].shape)
    closing = "o_proj.weight", "down_proj.weight"
    return {
        name: 0.02 * tensor if name.endswith(closing) else tensor
        for name, tensor in tensors.items()
    }


@cache
def head_weights() -> Tensors:
    """Tensors of a head that mostly knows the next token: rows attend to themselves, by which the
    embedding takes the place of the state; the rest is drawn.
    """
    rng = np.random.default_rng(2)

    def drawn(rows: int, columns: int, spread: float) -> np.ndarray:
        return rng.normal(0, spread, (rows, columns)).astype(np.float32)

    half = SIZE // 2
    first, second = np.split(np.eye(SIZE, 2 * SIZE, dtype=np.float32), 2)
    queries = 2.5 * np.concatenate([first, first, second, second])
    keys = 2.5 * np.concatenate([first, second])
    values = np.eye(SIZE, 2 * SIZE) - np.eye(SIZE, 2 * SIZE, SIZE)
    closing = np.zeros((SIZE, 2 * SIZE), np.float32)
    for head in range(4):
        rows = slice(head // 2 * half, (head // 2 + 1) * half)
        closing[rows, head * half : (head + 1) * half] = 0.5 * np.eye(half)
    target = target_weights()
    return {
        "d2t": TOKENS - np.arange(DRAFTED),
        "t2d": np.isin(np.arange(CONFIG["vocab_size"]), TOKENS),
        "fc.weight": drawn(SIZE, 3 * SIZE, 0.083),
        "lm_head.weight": target["lm_head.weight"][TOKENS],
        "midlayer.hidden_norm.weight": 1 + drawn(1, SIZE, 0.1)[0],
        "midlayer.input_layernorm.weight": 1 + drawn(1, SIZE, 0.1)[0],
        "midlayer.mlp.down_proj.weight": drawn(SIZE, 64, 0.02),
        "midlayer.mlp.gate_proj.weight": drawn(64, SIZE, 0.2),
        "midlayer.mlp.up_proj.weight": drawn(64, SIZE, 0.2),
        "midlayer.post_attention_layernorm.weight": 1 + drawn(1, SIZE, 0.1)[0],
        "midlayer.self_attn.k_proj.weight": keys + drawn(SIZE, 2 * SIZE, 0.02),
        "midlayer.self_attn.o_proj.weight": closing + drawn(SIZE, 2 * SIZE, 0.02),
        "midlayer.self_attn.q_proj.weight": queries + drawn(2 * SIZE, 2 * SIZE, 0.02),
        "midlayer.self_attn.v_proj.weight": (values + drawn(SIZE, 2 * SIZE, 0.02)).astype(
            np.float32
        ),
        "norm.weight": target["model.norm.weight"] + 0.01,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "own"
    return with_bytes(write_folder(folder, CONFIG, target_weights()))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_head(tmp_path_factory.mktemp("head"), HEAD_CONFIG, head_weights())


def write_head(folder: Path, config: dict[str, Any], tensors: Tensors) -> str:
    """No tokenizer, as published."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@cache
def engine(model: str, **settings: Any) -> LLM:
    return LLM(model, **SETTINGS | settings)


def drafting(model: str, head: str, count: int = 3, **settings: Any) -> LLM:
    return engine(
        model, speculative="eagle3", draft_model=head, speculative_tokens=count, **settings
    )


# Model and head, written out: one text, every row anew for each draft.


def named(tensors: Tensors, prefix: str) -> Tensors:
    return {
        name.removeprefix(prefix).removeprefix("self_attn.").removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def turned(x: np.ndarray, theta: float) -> np.ndarray:
    """Pairs (j, j + D / 2) of x [T, H, D] turned by their rows' positions."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    turns = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turns.real, turns.imag], axis=-1)


def attention(own: Tensors, x: np.ndarray, dim: int, theta: float) -> np.ndarray:
    queries, keys, values = (
        (x @ own[f"{name}_proj"].T).reshape(len(x), -1, dim) for name in ("q", "k", "v")
    )
    if "q_norm" in own:
        queries, keys = rms(queries, own["q_norm"]), rms(keys, own["k_norm"])
    each = queries.shape[1] // keys.shape[1]
    keys, values = (np.repeat(rows, each, axis=1) for rows in (turned(keys, theta), values))
    scores = np.einsum("thd,shd->hts", turned(queries, theta), keys) / np.sqrt(dim)
    mixed = np.einsum("hts,shd->thd", shares_of(scores), values)
    return mixed.reshape(len(x), -1) @ own["o_proj"].T


def noted(text: list[int]) -> np.ndarray:
    """What goes into the layers that the head reads, side by side, [T, 3 E]."""
    tensors = target_weights()
    x = tensors["model.embed_tokens.weight"][text].astype(np.float64)
    found = []
    for number in range(LAYERS):
        found.append(x)
        own = named(tensors, f"model.layers.{number}.")
        x = x + attention(own, rms(x, own["input_layernorm"]), 32, 10000.0)
        x = x + fed_forward(own, "mlp", rms(x, own["post_attention_layernorm"]))
    return np.concatenate([found[2], found[LAYERS // 2], found[LAYERS - 3]], axis=1)


def naive_drafts(text: list[int], count: int) -> list[int]:
    """What the head drafts behind a text."""
    tensors = head_weights()
    own = named(tensors, "midlayer.")
    states, tokens = noted(text[:-1]) @ tensors["fc.weight"].T, text[1:]
    drafts = list[int]()
    for _ in range(count):
        embedded = target_weights()["model.embed_tokens.weight"][tokens].astype(np.float64)
        parts = [rms(embedded, own["input_layernorm"]), rms(states, own["hidden_norm"])]
        x = states + attention(own, np.concatenate(parts, axis=1), 24, 500.0)
        x = x + fed_forward(own, "mlp", rms(x, own["post_attention_layernorm"]))
        logits = rms(x[-1], tensors["norm.weight"]) @ tensors["lm_head.weight"].T
        drafts.append(int(TOKENS[np.argmax(logits)]))
        states = np.concatenate([states, x[-1:]])
        tokens = [*tokens, drafts[-1]]
    return drafts


@pytest.mark.parametrize(("count", "in_parts"), [(1, False), (3, True)])
def test_drafts_are_those_of_a_naive_head(
    model: str, head: str, count: int, in_parts: bool, monkeypatch: pytest.MonkeyPatch
):
    """In a crowd, of prompts in chunks, behind drafts that were wrong, and behind a prefix that was
    found in pages. in_parts: as a CPU runs steps; else as a GPU does.
    """
    monkeypatch.setattr(Setup, "runs_in_parts", in_parts)
    check_drafts(drafting(model, head, count), naive_drafts, count, monkeypatch)


def test_answers_are_the_same_in_a_crowd_with_few_pages(
    model: str, head: str, monkeypatch: pytest.MonkeyPatch
):
    expected = answers(engine(model), MIXED)
    check_few_pages(expected, drafting(model, head, pages=30), monkeypatch)


def test_what_an_aborted_request_and_a_failed_step_leave_is_not_read(model: str, head: str):
    check_what_is_left(engine(model), drafting(model, head))


def test_drafts_are_checked_under_rules(model: str, head: str):
    check_rules(engine(model), drafting(model, head))


def test_several_devices_draft_as_well(model: str, head: str, tmp_path: Path):
    check_several_devices(engine(model), model, "eagle3", head, tmp_path)


def test_the_form_of_speculators_is_read(tmp_path: Path):
    """A table for the layer, its tensors named as a model's, and an embedding of its own."""
    outer = ("architectures", "draft_vocab_size")
    layer = {key: value for key, value in HEAD_CONFIG.items() if key not in outer}
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFTED,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "norm_before_residual": True,
        "transformer_layer_config": layer,
    }
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor for name, tensor in head_weights().items()
    }
    embedding = target_weights()["model.embed_tokens.weight"] + 1
    folder = write_head(tmp_path, config, tensors | {"embed_tokens.weight": embedding})
    source = ModelSource("hf", folder, "head", read_eagle3(tmp_path, read_hf_config(CONFIG)))
    own = source.config.eagle3
    assert own is not None and own.adds_to_normed and own.layers == (1, 2, 4)
    loaded: Any = load_model(source, source.config)
    np.testing.assert_array_equal(loaded.embed[...], embedding)
    np.testing.assert_array_equal(loaded.joint.kernel[...], tensors["fc.weight"].T)
    queries = tensors["layers.0.self_attn.q_proj.weight"].T
    np.testing.assert_array_equal(loaded.layers[0].attention.qkv.kernel[:, : 2 * SIZE], queries)
    np.testing.assert_array_equal(loaded.token_ids(np.array([-1, 0, 79])), [-1, *TOKENS[[0, 79]]])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_hidden_layers": 2}, "an EAGLE-3 head has one layer, found 2"),
        ({"vocab_size": 97}, "head of a model with vocab_size 97, not 96"),
        ({"target_hidden_size": 64}, "head of a model with hidden_size 64, not 48"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3]}, "the numbers of three layers"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}, "layers 2, 3, 6, and the model has 6"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    ],
)
def test_heads_that_cannot_draft(tmp_path: Path, changed: dict[str, Any], words: str):
    (tmp_path / "config.json").write_text(json.dumps(HEAD_CONFIG | changed))
    with pytest.raises((ModelError, ConfigError), match=words):
        read_eagle3(tmp_path, read_hf_config(CONFIG))


def test_layers_are_counted_as_their_files_count_them(tmp_path: Path):
    """vLLM by what goes in, SGLang by what comes out."""
    key, model = "eagle_aux_hidden_state_layer_ids", read_hf_config(CONFIG)
    for values in ({key: [2, 3, 4]}, {"eagle_config": {key: [1, 2, 3]}}):
        (tmp_path / "config.json").write_text(json.dumps(HEAD_CONFIG | values))
        own = read_eagle3(tmp_path, model).eagle3
        assert own is not None and own.layers == (2, 3, 4)


def test_a_head_needs_its_folder():
    with pytest.raises(ConfigError, match="speculative eagle3 needs draft_model, an EAGLE-3 head"):
        LLM("tiny-random", **SETTINGS, speculative="eagle3")
