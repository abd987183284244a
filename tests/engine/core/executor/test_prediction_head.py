"""A model's own head drafts: what it drafts is what a naive pass over the whole text drafts, and it
changes no token.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from oracle import naive_normed
from reference_logits import DATA, SCRIPT, weights_of, write_folder

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.errors import ConfigError, ModelError
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.build import _Setup
from jitney.engine.core.models.registry import abstract_model, model_class
from jitney.engine.core.scheduler.page_demand import PageDemand
from jitney.engine.core.scheduler.plan import REJECTED, Plan, StepResult
from jitney.engine.core.weights.checkpoints.hf_config import read_hf_config
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.load import load_model

pytestmark = pytest.mark.usefixtures("programs_when_used", "compiled_in_a_hurry")

Tensors = dict[str, np.ndarray]

LAYERS, HIDDEN, VOCAB = 3, 64, 96
HEAD = f"model.layers.{LAYERS}."
CASE = DATA["cases"]["deepseek_v3"]
QWEN = DATA["cases"]["qwen3_5"]
#: Steps of one size, so that drafts always pay; prompts are cut into chunks.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_seats": 4,
    "token_budget": 32,
    "context": 192,
    "page_size": 8,
    "seat_buckets": [4],
    "token_buckets": [32],
}
PROMPTS = [
    np.random.default_rng(number).integers(4, VOCAB, length).tolist()
    for number, length in enumerate((5, 40, 71, 23, 34))
]
GREEDY = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
#: One for each of the prompts.
MIXED = [
    SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.1, seed=3, max_tokens=60, ignore_eos=True, n=2),
    SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, frequency_penalty=0.01),
    SamplingParams(temperature=0.2, seed=5, top_k=4, max_tokens=40, min_tokens=20),
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
]


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


def with_layer(tensors: Tensors, like: str, name: str, added: float) -> Tensors:
    """With one layer more; layers add `added` times as much."""
    for own in [own for own in tensors if own.startswith(like)]:
        new = name + own.removeprefix(like)
        tensors[new] = SCRIPT.random_tensor(new, tensors[own].shape)
    closing = "o_proj.weight", "down_proj.weight", "out_proj.weight"
    return {
        own: added * tensor if own.endswith(closing) else tensor for own, tensor in tensors.items()
    }


def joint(size: int, spread: float) -> np.ndarray:
    """Takes the embedding, and by chance some of all else."""
    rest = np.random.default_rng(1).normal(0, spread, (size, 2 * size))
    return (np.eye(size, 2 * size) + rest).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_folder(tmp_path_factory.mktemp("model") / "own", CASE["config"], weights())


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


def rms(x: np.ndarray, weight: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


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


def shares_of(scores: np.ndarray) -> np.ndarray:
    """Softmax over the keys up to each row's own, scores [H, T, T]."""
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


def fed_forward(own: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    gate = x @ own[f"{name}.gate_proj"].T
    return (gate / (1 + np.exp(-gate)) * (x @ own[f"{name}.up_proj"].T)) @ own[
        f"{name}.down_proj"
    ].T


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


class Watch:
    """The drafts of each step that an engine runs, as the device has them when it is launched."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch):
        self.runner: Any = llm.core.runner
        self.plans: list[tuple[Plan, list[int], np.ndarray]] = []
        self.results: dict[int, StepResult] = {}
        launch, fetch = self.runner.launch, self.runner.fetch

        def launching(batch: Any) -> Any:
            launched = launch(batch)
            seats = [chunk.seq.seat for chunk in batch.plan.chunks]
            drafts = np.asarray(self.runner.state.seat_tokens.drafts)
            self.plans.append((batch.plan, seats, drafts))
            return launched

        def fetching(launched: Any) -> StepResult:
            result = self.results[launched.plan.number] = fetch(launched)
            return result

        monkeypatch.setattr(self.runner, "launch", launching)
        monkeypatch.setattr(self.runner, "fetch", fetching)

    def found(self) -> list[tuple[list[int], list[int]]]:
        """(text, drafts behind it) of every step of each sequence that decoded."""
        lengths: dict[Any, int] = {}
        found: list[tuple[list[int], list[int]]] = []
        for plan, seats, drafts in self.plans:
            result = self.results[plan.number]
            row = 0
            for number, chunk in enumerate(plan.chunks):
                seq = chunk.seq
                if chunk.decode and not chunk.draft:
                    widths = [own.draft for own in plan.chunks if own.seq is seq]
                    text = seq.tokens[: lengths[seq]]
                    if len(text) < len(seq.tokens):
                        found.append((text, drafts[seats[number]][: max(widths) + 1].tolist()))
                if chunk.sample:
                    before = lengths.get(seq, seq.n_prompt)
                    lengths[seq] = before + (result.tokens[row] != REJECTED)
                    row += 1
        return found


@pytest.mark.parametrize(("count", "in_parts"), [(1, False), (3, True)])
def test_drafts_are_those_of_a_naive_head(
    folder: str, count: int, in_parts: bool, monkeypatch: pytest.MonkeyPatch
):
    """In a crowd, of prompts in chunks, behind drafts that were wrong, and behind a prefix that was
    found in pages. in_parts: as a CPU runs steps; else as a GPU does.
    """
    monkeypatch.setattr(_Setup, "runs_in_parts", in_parts)
    check_drafts(folder, drafting(folder, count), weights(), count, monkeypatch)


def test_drafts_beside_recurrent_layers_are_those_of_a_naive_head(
    qwen: str, monkeypatch: pytest.MonkeyPatch
):
    llm = drafting(qwen, 3)
    check_drafts(qwen, llm, qwen_weights(), 3, monkeypatch)
    found = answers(llm, MIXED)
    expected = answers(engine(qwen), MIXED)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def check_drafts(
    folder: str, llm: LLM, tensors: Tensors, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare drafts of some forty steps; `count` of a sequence at most."""
    watch = Watch(llm, monkeypatch)
    for prompts in (PROMPTS, [PROMPTS[2]]):
        llm.generate(prompts, GREEDY)
    llm.core.check()
    totals = llm.core.ledger.totals
    assert totals["accepted"] > 20 and totals["rejected"] > 5 and totals["cached_tokens"] > 0
    source = ModelSource.resolve(folder)
    model = load_model(source, source.config)
    found = [(text, [*takewhile(is_draft, drafts)]) for text, drafts in watch.found()]
    assert max(len(drafts) for _, drafts in found) == count
    for text, drafts in found[:: len(found) // 40]:
        assert drafts and drafts == naive_drafts(tensors, model, text, len(drafts))


def is_draft(token: int) -> bool:
    return token >= 0


def answers(llm: LLM, params: Any, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    outputs = [one for output in llm.generate(prompts, params) for one in output.outputs]
    llm.core.check()
    return outputs


def test_answers_are_the_same_in_a_crowd_with_few_pages(
    folder: str, monkeypatch: pytest.MonkeyPatch
):
    """Sequences lose their pages, and each prompt comes again alone, behind pages that are found;
    the memory is given back meanwhile.
    """
    expected = answers(engine(folder), MIXED)
    llm = drafting(folder, pages=30)
    monkeypatch.setattr(PageDemand, "lasts", lambda *_: True)
    found = answers(llm, MIXED)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    scores, own = (
        [entry.logprob for entry in outputs[0].logprobs] for outputs in (expected, found)
    )
    np.testing.assert_allclose(own, scores, atol=1e-4)
    totals = llm.core.ledger.totals
    assert totals["accepted"] > 10 and totals["rejected"] > 0 and totals["preempted"] > 0
    compiled = llm.core.runner.compiles
    llm.core.sleep(lambda: None)
    llm.core.wake(lambda: None)
    for prompt in (PROMPTS[0], PROMPTS[0]):
        (alone,) = answers(llm, MIXED[0], [prompt])
        assert alone.token_ids == expected[0].token_ids
    assert llm.core.runner.compiles == compiled


def test_what_an_aborted_request_and_a_failed_step_leave_is_not_read(folder: str):
    llm = drafting(folder)
    (expected,) = answers(engine(folder), MIXED[0], [PROMPTS[2]])
    llm.core.add(EngineRequest(id="left", prompt=PROMPTS[1], sampling=GREEDY, arrival=0.0))
    for _ in range(12):
        llm.core.step()
    llm.core.abort("left")
    (found,) = answers(llm, MIXED[0], [PROMPTS[2]])
    assert found.token_ids == expected.token_ids
    llm.core.runner.restore(RuntimeError("as if a step had failed"))
    llm.core.reset_prefix_cache()
    (found,) = answers(llm, MIXED[0], [PROMPTS[2]])
    assert found.token_ids == expected.token_ids


def test_its_pages_are_counted(folder: str):
    """A page has rows of one layer more."""
    page_bytes = (LAYERS + 1) * SETTINGS["page_size"] * HIDDEN * 4
    memory = 50.5 * page_bytes / (1 << 30)
    runner: Any = LLM(folder, **SETTINGS, speculative="mtp", memory_gib=memory).core.runner
    assert runner.group_pages == (50,)
    pages, states = runner.state.draft_kv
    assert pages.shape == runner.state.kv[-1].shape
    assert states.shape == (SETTINGS["max_seats"], HIDDEN)
    with pytest.raises(ConfigError, match=r"memory_gib .*: less than a page for each of 4 seats"):
        LLM(folder, **SETTINGS, speculative="mtp", memory_gib=memory / 11)


@pytest.mark.parametrize(
    ("family", "part"), [("glm4_moe_lite", "model.layers.3."), ("qwen3_5_moe", "mtp.")]
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
        ({"tensor_parallel": 2}, "tensor_parallel 2"),
        ({"draft_model": "tiny-random"}, "is for speculative draft, not mtp"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        LLM("tiny-random:deepseek_v3", **SETTINGS, speculative="mtp", **settings)
