"""A model's own head drafts: what it drafts is what a naive pass over the whole text drafts, and it
changes no token.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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
    with_layer,
)
from flax import nnx
from oracle import naive_normed
from reference_logits import DATA, SCRIPT, weights_of, write_folder

from jitney.engine import LLM
from jitney.engine.common.errors import ConfigError, ModelError
from jitney.engine.core.models.registry import abstract_model, model_class
from jitney.engine.core.setup import Setup
from jitney.engine.core.weights.checkpoints.hf_config import read_hf_config
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.load import load_model

pytestmark = pytest.mark.usefixtures("programs_when_used", "compiled_in_a_hurry")

LAYERS, HIDDEN = 3, 64
HEAD = f"model.layers.{LAYERS}."
CASE = DATA["cases"]["deepseek_v3"]
QWEN = DATA["cases"]["qwen3_5"]


def weights() -> Tensors:
    """Tensors of a model whose next token mostly follows from the newest one, and of a head that
    mostly knows it: layers add little, and the head's joint matrix takes the embedding and some of
    the rest.
    """
    tensors = with_layer(weights_of(CASE), f"model.layers.{LAYERS - 1}.", HEAD, 0.07)
    tensors[f"{HEAD}enorm.weight"] = np.ones(HIDDEN, np.float32)
    tensors[f"{HEAD}hnorm.weight"] = SCRIPT.random_tensor("hnorm", (HIDDEN,))
    tensors[f"{HEAD}shared_head.norm.weight"] = tensors["model.norm.weight"] + 0.01
    tensors[f"{HEAD}eh_proj.weight"] = joint(HIDDEN, 0.02)
    # Copies, which are not read.
    tensors[f"{HEAD}embed_tokens.weight"] = tensors["model.embed_tokens.weight"] + 1
    tensors[f"{HEAD}shared_head.head.weight"] = tensors["lm_head.weight"] + 1
    return tensors


def qwen_weights() -> Tensors:
    """The same of Qwen3.5, whose norms are stored as w and applied as 1 + w."""
    tensors = with_layer(weights_of(QWEN), "model.layers.3.", "mtp.layers.0.", 0.015)
    size = QWEN["config"]["hidden_size"]
    tensors["mtp.pre_fc_norm_embedding.weight"] = np.zeros(size, np.float32)
    tensors["mtp.pre_fc_norm_hidden.weight"] = SCRIPT.random_tensor("hidden_norm", (size,))
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"] + 0.01
    tensors["mtp.fc.weight"] = joint(size, 0.012)
    return tensors


def joint(size: int, spread: float) -> np.ndarray:
    """Takes the embedding, and by chance some of all else."""
    rest = np.random.default_rng(1).normal(0, spread, (size, 2 * size))
    return (np.eye(size, 2 * size) + rest).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "own"
    return with_bytes(write_folder(folder, CASE["config"], weights()))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = QWEN["config"] | {"mtp_num_hidden_layers": 1}
    return write_folder(tmp_path_factory.mktemp("model") / "qwen", config, qwen_weights())


@cache
def engine(folder: str, **settings: Any) -> LLM:
    return LLM(folder, **SETTINGS | settings)


def drafting(folder: str, count: int = 3, **settings: Any) -> LLM:
    return engine(folder, speculative="mtp", speculative_tokens=count, **settings)


# The head, written out: one text, every row anew for each draft.


def rotated(x: np.ndarray) -> np.ndarray:
    """Pairs (2j, 2j + 1) of x [T, ..., D] turned by their rows' positions."""
    half = x.shape[-1] // 2
    frequencies = 500.0 ** (-np.arange(half) / half)
    turns = np.exp(1j * np.arange(len(x))[:, None] * frequencies)
    turns = turns.reshape(len(x), *[1] * (x.ndim - 2), half)
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * turns
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attention(own: Tensors, x: np.ndarray) -> np.ndarray:
    config, rows = CASE["config"], len(x)
    heads, plain, rank = config["num_attention_heads"], config["qk_nope_head_dim"], 48
    queries = rms(x @ own["q_a_proj"].T, own["q_a_layernorm"], 1e-6) @ own["q_b_proj"].T
    queries = queries.reshape(rows, heads, -1)
    latents, turning = np.split(x @ own["kv_a_proj_with_mqa"].T, [rank], axis=1)
    kept = rms(latents, own["kv_a_layernorm"], 1e-6) @ own["kv_b_proj"].T
    keys, values = np.split(kept.reshape(rows, heads, -1), [plain], axis=2)
    scores = np.einsum("thd,shd->hts", queries[..., :plain], keys)
    scores += np.einsum("thd,sd->hts", rotated(queries[..., plain:]), rotated(turning))
    mixed = np.einsum("hts,shd->thd", shares_of(scores / np.sqrt(queries.shape[-1])), values)
    return mixed.reshape(rows, -1) @ own["o_proj"].T


def mixture(own: Tensors, x: np.ndarray) -> np.ndarray:
    """One row after the other, x [T, E]."""
    config, sums = CASE["config"], fed_forward(own, "shared_experts", x)
    groups, each = config["n_group"], config["n_routed_experts"] // config["n_group"]
    for number, row in enumerate(x):
        shares = 1 / (1 + np.exp(-row @ own["gate"].T))
        wanted = shares + own["gate.e_score_correction_bias"]
        best = np.sort(wanted.reshape(groups, each), axis=1)[:, -2:].sum(axis=1)
        allowed = np.repeat(np.isin(np.arange(groups), np.argsort(best)[-2:]), each)
        chosen = np.argsort(np.where(allowed, wanted, -np.inf))[-config["num_experts_per_tok"] :]
        for expert in chosen:
            share = shares[expert] / shares[chosen].sum() * config["routed_scaling_factor"]
            sums[number] += share * fed_forward(own, f"experts.{expert}", row)
    return sums


def head_states(tensors: Tensors, states: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Hidden states of the head: of row j from the model's of j, and token j + 1."""
    own = {
        name.removeprefix(HEAD).removesuffix(".weight").removeprefix("self_attn."): tensor
        for name, tensor in tensors.items()
        if name.startswith(HEAD)
    }
    experts = {
        name.removeprefix("mlp."): tensor for name, tensor in own.items() if name.startswith("mlp.")
    }
    embedded = tensors["model.embed_tokens.weight"][tokens]
    read = [rms(embedded, own["enorm"]), rms(states, own["hnorm"])]
    x = np.concatenate(read, axis=1).astype(np.float64) @ own["eh_proj"].T
    x = x + attention(own, rms(x, own["input_layernorm"]))
    x = x + mixture(experts, rms(x, own["post_attention_layernorm"]))
    return rms(x, own["shared_head.norm"])


def gated_attention(own: Tensors, x: np.ndarray) -> np.ndarray:
    """Of Qwen3.5: each head's gate behind its query, and a quarter of a head rotated."""
    rows, dim = len(x), QWEN["config"]["head_dim"]
    queries, gates = np.split((x @ own["q_proj"].T).reshape(rows, -1, 2 * dim), 2, axis=2)
    queries = turned_quarter(rms(queries, 1 + own["q_norm"]))
    keys = turned_quarter(rms((x @ own["k_proj"].T).reshape(rows, -1, dim), 1 + own["k_norm"]))
    values = (x @ own["v_proj"].T).reshape(rows, -1, dim)
    each = queries.shape[1] // keys.shape[1]
    scores = np.einsum("thd,shd->hts", queries, np.repeat(keys, each, axis=1)) / np.sqrt(dim)
    mixed = np.einsum("hts,shd->thd", shares_of(scores), np.repeat(values, each, axis=1))
    return (mixed / (1 + np.exp(-gates))).reshape(rows, -1) @ own["o_proj"].T


def turned_quarter(x: np.ndarray) -> np.ndarray:
    """Pairs (j, j + R / 2) of the first R numbers of x [T, H, D] rotated."""
    count = x.shape[-1] // 4
    pairs = np.stack(np.split(x[..., :count], 2, axis=-1), axis=-1)
    return np.concatenate([rotated(pairs.reshape(*x.shape[:2], count)), x[..., count:]], axis=-1)


def qwen_states(tensors: Tensors, states: np.ndarray, tokens: list[int]) -> np.ndarray:
    """As `head_states`, of Qwen3.5."""
    layer = {
        name.removeprefix("mtp.layers.0.").removeprefix("self_attn.").removesuffix(".weight"): one
        for name, one in tensors.items()
    }
    embedded = tensors["model.embed_tokens.weight"][tokens]
    read = [
        rms(x, 1 + tensors[f"mtp.pre_fc_norm_{name}.weight"])
        for name, x in (("embedding", embedded), ("hidden", states))
    ]
    x = np.concatenate(read, axis=1).astype(np.float64) @ tensors["mtp.fc.weight"].T
    x = x + gated_attention(layer, rms(x, 1 + layer["input_layernorm"]))
    x = x + fed_forward(layer, "mlp", rms(x, 1 + layer["post_attention_layernorm"]))
    return rms(x, 1 + tensors["mtp.norm.weight"])


def naive_drafts(tensors: Tensors, model: Any, text: list[int], count: int) -> list[int]:
    """What the head drafts behind a text."""
    head = qwen_states if "mtp.fc.weight" in tensors else head_states
    states = naive_normed(model, text[:-1]).astype(np.float64)
    tokens, drafts = text[1:], list[int]()
    for _ in range(count):
        out = head(tensors, states, tokens)[-1]
        drafts.append(int(np.argmax(out @ tensors["lm_head.weight"].T)))
        states = np.concatenate([states, out[None]])
        tokens = [*tokens, drafts[-1]]
    return drafts


@pytest.mark.parametrize(("count", "in_parts"), [(1, False), (3, True)])
def test_drafts_are_those_of_a_naive_head(
    folder: str, count: int, in_parts: bool, monkeypatch: pytest.MonkeyPatch
):
    """In a crowd, of prompts in chunks, behind drafts that were wrong, and behind a prefix that was
    found in pages. in_parts: as a CPU runs steps; else as a GPU does.
    """
    monkeypatch.setattr(Setup, "runs_in_parts", in_parts)
    naive = naive_head(folder, weights())
    check_drafts(drafting(folder, count), naive, count, monkeypatch)


def test_drafts_beside_recurrent_layers_are_those_of_a_naive_head(
    qwen: str, monkeypatch: pytest.MonkeyPatch
):
    llm = drafting(qwen, 3)
    check_drafts(llm, naive_head(qwen, qwen_weights()), 3, monkeypatch)
    found = answers(llm, MIXED)
    expected = answers(engine(qwen), MIXED)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def naive_head(folder: str, tensors: Tensors) -> Callable[[list[int], int], list[int]]:
    source = ModelSource.resolve(folder)
    model = load_model(source, source.config)
    return lambda text, count: naive_drafts(tensors, model, text, count)


def test_answers_are_the_same_in_a_crowd_with_few_pages(
    folder: str, monkeypatch: pytest.MonkeyPatch
):
    expected = answers(engine(folder), MIXED)
    check_few_pages(expected, drafting(folder, pages=30), monkeypatch)


def test_what_an_aborted_request_and_a_failed_step_leave_is_not_read(folder: str):
    check_what_is_left(engine(folder), drafting(folder))


def test_drafts_are_checked_under_rules(folder: str):
    check_rules(engine(folder), drafting(folder))


def test_several_devices_draft_as_well(folder: str, tmp_path: Path):
    check_several_devices(engine(folder), folder, "mtp", "", tmp_path)


def test_its_pages_are_counted(folder: str):
    """A page has rows of one layer more."""
    page_bytes = (LAYERS + 1) * SETTINGS["page_size"] * HIDDEN * 4
    memory = 50.5 * page_bytes / (1 << 30)
    runner: Any = LLM(folder, **SETTINGS, speculative="mtp", memory_gib=memory).core.runner
    assert runner.programs.sizes.group_pages == (50,)
    pages, states = runner.state.draft_kv
    assert pages.shape == runner.state.kv[-1].shape
    assert states.shape == (SETTINGS["max_seats"], HIDDEN)
    with pytest.raises(ConfigError, match=r"memory_gib .*: less than a page for each of 4 seats"):
        LLM(folder, **SETTINGS, speculative="mtp", memory_gib=memory / 11)


@pytest.mark.parametrize(
    ("family", "part"),
    [("glm4_moe_lite", "model.layers.3."), ("qwen3_5_moe", "mtp."), ("qwen3_next", "mtp.")],
)
def test_every_weight_of_a_head_is_read_from_its_own_tensors(family: str, part: str):
    counts = {"mtp_num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    head = read_hf_config(DATA["cases"][family]["config"] | counts).prediction_head
    targets = model_class(head.architecture).weight_map(head, "hf").targets
    leaves: Any = nnx.to_flat_state(nnx.state(abstract_model(head)))
    assert {target.path for target in targets} == {path for path, _ in leaves}
    names = [piece.name for target in targets for piece in target.pieces]
    assert names and all(name.startswith(part) for name in names)


def test_a_head_that_the_files_lack_is_refused(tmp_path: Path):
    tensors = {name: one for name, one in weights().items() if "eh_proj" not in name}
    lacking = write_folder(tmp_path / "lacking", CASE["config"], tensors)
    with pytest.raises(ModelError, match=re.escape(f"1 missing: {HEAD}eh_proj.weight")):
        LLM(lacking, **SETTINGS, speculative="mtp")
    for model in ("tiny-random", "tiny-random:deepseek_v2"):
        with pytest.raises(
            ConfigError, match=r"speculative mtp: .*num_nextn_predict_layers or mtp_num"
        ):
            LLM(model, **SETTINGS, speculative="mtp")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"draft_model": "tiny-random"}, "is for speculative draft and eagle3, not mtp"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        LLM("tiny-random:deepseek_v3", **SETTINGS, speculative="mtp", **settings)
