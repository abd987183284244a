"""Encoders: the numbers that transformers computes, through the engine, one by one and together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from encoder_folders import REFERENCE, SCRIPT, write_encoder
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.errors import ConfigError, ModelError, RequestError
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import EngineRequest, Pooling
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.models.bert import _attend, _Blocks
from jitney.engine.core.models.registry import random_model
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.kernels.interface import AttentionMeta
from jitney.kernels.select import select

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_seats": 4,
    "token_budget": 64,
    "token_buckets": [16, 64],
}
#: (architecture, what becomes of its texts).
KINDS: list[tuple[str, Pooling]] = [
    ("BertModel", "cls"),
    ("BertForSequenceClassification", "classify"),
    ("XLMRobertaModel", "mean"),
    ("XLMRobertaForSequenceClassification", "classify"),
]


def prompts(architecture: str) -> list[list[int]]:
    return [ids for ids, _ in SCRIPT.prompts(architecture)]


def wanted(name: str, prompt: list[int], pooling: Pooling | None, **fields: Any) -> EngineRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    return EngineRequest(
        id=name, prompt=prompt, sampling=sampling, arrival=0.0, pooling=pooling, **fields
    )


def run(core: EngineCore, requests: list[EngineRequest]) -> dict[str, SequenceOutput]:
    for request in requests:
        core.add(request)
    ended = {each.request_id: each for each in core.run_until_idle() if each.finish is not None}
    core.check()
    return ended


def numbers(output: SequenceOutput) -> np.ndarray:
    assert output.error is None and output.finish == "stop" and not output.tokens
    assert output.embedding is not None
    return np.frombuffer(output.embedding, np.float32)


def of_length_one(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def transformers_say(architecture: str, pooling: Pooling) -> list[np.ndarray]:
    outputs = [np.array(each[pooling]) for each in REFERENCE[architecture]["outputs"]]
    return outputs if pooling == "classify" else list(map(of_length_one, outputs))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Pooling], LLM]:
    """An engine of each kind."""

    @cache
    def start(architecture: str, pooling: Pooling) -> LLM:
        own = None if pooling == "classify" else pooling
        folder = tmp_path_factory.mktemp("encoders") / "model"
        return LLM(str(write_encoder(folder, architecture, pooling=own)), **SMALL)

    return start


@pytest.mark.parametrize(("architecture", "pooling"), KINDS)
def test_numbers_are_transformers_numbers(
    architecture: str, pooling: Pooling, encoder: Callable[[str, Pooling], LLM]
):
    """By every kernel set of this machine: all texts in one crowd, and each alone."""
    llm = encoder(architecture, pooling)
    assert llm.info.model.pooling == pooling and llm.info.model.encoder
    texts = prompts(architecture)
    requests = [wanted(str(number), text, pooling) for number, text in enumerate(texts)]
    compiled = llm.core.runner.compiles
    crowd = run(llm.core, requests)
    for number, right in enumerate(transformers_say(architecture, pooling)):
        alone = numbers(run(llm.core, [requests[number]])[str(number)])
        assert alone.shape == right.shape and alone.dtype == np.float32
        np.testing.assert_allclose(alone, right, atol=2e-5)
        np.testing.assert_allclose(numbers(crowd[str(number)]), alone, atol=5e-6)
    assert llm.core.runner.compiles == compiled, "nothing compiles while it serves"


@cache
def tiny() -> LLM:
    return LLM("tiny-random:bert", **SMALL)


def test_each_text_is_computed_in_one_step_and_holds_no_page():
    core = tiny().core
    lengths = [40, 30, 20, 5, 64, 1, 63, 2]
    for number, length in enumerate(lengths):
        core.add(wanted(str(number), list(range(length)), "cls"))
    computed: dict[str, list[int]] = {}
    while core.has_work:
        report = core.step()
        for chunk in report.chunks:
            computed.setdefault(chunk.request_id, []).append(chunk.count)
        seats = core.seat_map()
        assert all(seat.pages == 0 for seat in seats.seats) and not any(seats.page_states)
    assert computed == {str(number): [length] for number, length in enumerate(lengths)}
    core.check()


def test_background_texts_are_computed_whole_too():
    core = tiny().core
    requests = [wanted(str(n), list(range(n)), "cls", background=True) for n in (64, 3, 50)]
    ended = run(core, requests)
    assert {output.finish for output in ended.values()} == {"stop"}


def test_a_step_that_fails_costs_no_other_text():
    """Out of memory with all of them, and whenever one of them is in it: that one ends."""
    core = tiny().core
    requests = [wanted(str(n), list(range(n)), "cls") for n in (30, 20, 10)]
    alone = {request.id: numbers(run(core, [request])[request.id]) for request in requests}
    launch = core.runner.launch

    def failing(batch):
        if any(chunk.seq.n_prompt == 20 for chunk in batch.plan.chunks):
            raise MemoryError
        return launch(batch)

    core.runner.launch = failing  # type: ignore[attr-defined]
    try:
        ended = run(core, requests)
    finally:
        core.runner.launch = launch  # type: ignore[attr-defined]
    assert ended["20"].error is not None and ended["20"].error.code == "request_failed"
    for name in ("30", "10"):
        np.testing.assert_allclose(numbers(ended[name]), alone[name], atol=5e-6)


def test_a_row_that_is_not_finite_ends_its_text_alone():
    model = random_model(tiny_config("bert"))
    broken = model.embed[...].at[7].set(jnp.nan)  # type: ignore[attr-defined]
    model.embed = nnx.Param(broken)  # type: ignore[attr-defined]
    meta = meta_of([3, 40, 20], 64)
    tokens = jnp.arange(64) % 5 + 8
    hidden, _ = model(tokens.at[10].set(7), [], meta, select("cpu", "reference"))
    assert hidden.broken_sequences(meta.cu_q).tolist() == [False, True, False]
    whole, _ = model(tokens, [], meta, select("cpu", "reference"))
    np.testing.assert_array_equal(hidden.states[43:63], whole.states[43:63])


def meta_of(lengths: list[int], rows: int) -> AttentionMeta:
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in lengths])
    positions = np.pad(positions, (0, rows - len(positions))).astype(np.int32)
    none = jnp.zeros(0, jnp.int32)
    counts = jnp.array([0, len(lengths), ends[-1]], jnp.int32)
    return AttentionMeta(none, jnp.array(ends), none, none, jnp.array(positions), counts)


@settings(max_examples=12)
@given(st.lists(st.integers(0, 150), min_size=6, max_size=6), st.integers(1, 3))
def test_attention_is_of_each_text_to_all_of_itself(lengths: list[int], group: int):
    """Any lengths, absent texts among them; rows that pad the step stay finite. All steps have the
    same number of rows, so that few programs are compiled.
    """
    rows, seed = 960, sum(lengths)
    drawn = np.random.default_rng(seed).standard_normal((3, rows, 2, 8)).astype(np.float32)
    meta = meta_of(lengths, rows)
    owners = np.searchsorted(np.cumsum(lengths), np.arange(rows), side="right")
    texts = jnp.array(np.minimum(owners, len(lengths) - 1), jnp.int32)
    blocks = _Blocks.of(meta.cu_q, texts, group)
    q, k, v = drawn
    got = np.asarray(_attend(jnp.array(q), jnp.array(k), jnp.array(v), blocks, group))
    assert np.isfinite(got).all()
    begin = 0
    for length in lengths:
        own = slice(begin, begin + length)
        scores = np.einsum("ihd,jhd->hij", q[own], k[own]) / math.sqrt(8)
        weights = np.exp(scores)
        weights /= weights.sum(-1, keepdims=True)
        right = np.einsum("hij,jhd->ihd", weights, v[own])
        np.testing.assert_allclose(got[own], right, atol=1e-5)
        begin += length


def test_what_it_cannot_do_is_said():
    llm = tiny()
    with pytest.raises(RequestError, match=r"writes no text.*vectors of texts"):
        llm.generate([[1, 2]])
    limits = llm.core.scheduler.factory.request_limits
    with pytest.raises(RequestError, match="maximum context length is 64 tokens") as caught:
        limits.check(wanted("own", [1] * 65, "cls"))
    assert caught.value.info.code == "context_length_exceeded"
    with pytest.raises(RequestError, match="makes no vectors by last"):
        limits.check(wanted("own", [1], "last"))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("weights", "int8"),
        ("kv_dtype", "int8"),
        ("canary_every", 2),
        ("policy", "static"),
        ("embedding_pooling", "last"),
        ("tensor_parallel", 2),
    ],
)
def test_settings_of_decoders_are_refused_by_name(setting: str, value: Any):
    settings = dict[str, Any](SMALL)
    settings[setting] = value
    with pytest.raises(ConfigError, match=setting):
        LLM("tiny-random:bert", **settings)


def test_a_context_beyond_a_step_is_refused():
    with pytest.raises(ConfigError, match="context 100 is more than token_budget 64"):
        LLM("tiny-random:bert", context=100, **SMALL)


def test_unused_tensors_are_allowed(tmp_path: Path):
    """Files of older libraries store positions as int64."""
    extra = {"embeddings.position_ids": np.arange(64)[None]}
    folder = write_encoder(tmp_path / "model", "BertModel", pooling="cls", extra=extra)
    llm = LLM(str(folder), **SMALL)
    output = run(llm.core, [wanted("own", prompts("BertModel")[0], "cls")])["own"]
    np.testing.assert_allclose(numbers(output), transformers_say("BertModel", "cls")[0], atol=2e-5)
    extra = {"surplus": np.zeros(3, np.float32)}
    with pytest.raises(ModelError, match="1 unexpected: surplus"):
        LLM(str(write_encoder(tmp_path / "other", "BertModel", extra=extra)), **SMALL)


def test_in_bfloat16_alone_and_in_a_crowd_agree():
    """Chunks of keys begin with each text, so no rounding depends on who is beside it."""
    settings = dict[str, Any](SMALL)
    settings["dtype"] = "bfloat16"
    llm = LLM("tiny-random:xlm_roberta_reranker", **settings)
    requests = [
        wanted(str(n), [(7 * at + n) % 500 for at in range(n)], "classify") for n in (9, 33, 20)
    ]
    crowd = run(llm.core, requests)
    for request in requests:
        alone = numbers(run(llm.core, [request])[request.id])
        np.testing.assert_allclose(numbers(crowd[request.id]), alone, atol=2e-2)


def test_sleep_and_wake_leave_it_as_it_was():
    core = tiny().core
    request = wanted("own", list(range(20)), "cls")
    before = numbers(run(core, [request])["own"])
    core.sleep(lambda: None)
    core.wake(lambda: None)
    np.testing.assert_array_equal(numbers(run(core, [request])["own"]), before)


def test_a_reranker_reads_with_what_its_head_is_made_of():
    config = tiny_config("bert_reranker")
    assert random_model(config).head is not None  # type: ignore[attr-defined]
    plain = replace(config, encoder=tiny_config("bert").encoder)
    assert random_model(plain).head is None  # type: ignore[attr-defined]
