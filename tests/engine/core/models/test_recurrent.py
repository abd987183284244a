"""Models with recurrent layers through the engine: whatever shares a step, cuts a prompt or takes
a seat away, the answers are the same, to the bit.
"""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from lowered_steps import lower_step

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.requests import Grammar
from jitney.engine.core.executor.program import StateSizes
from jitney.engine.core.executor.seat_tokens import Drafting, PromptLookup
from jitney.engine.core.grammar import matchers
from jitney.engine.core.models.registry import abstract_model
from jitney.engine.core.scheduler.buckets import Bucket
from jitney.engine.core.scheduler.page_demand import PageDemand
from jitney.engine.core.scheduler.scheduler import Scheduler
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.kernels.select import select

pytestmark = pytest.mark.usefixtures("programs_when_used", "kernels_unproved")

SMALL: dict[str, Any] = {
    "max_seats": 4,
    "seat_buckets": [1, 4],
    "token_budget": 16,
    "token_buckets": [16],
    "page_size": 8,
    "pages": 120,
    "context": 256,
}
LENGTHS = (1, 3, 17, 40, 97, 33, 64, 52)
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 24, "ignore_eos": True}


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(4, 250, length).tolist() for length in LENGTHS]


def answers(llm: LLM, some: list[list[int]], **more: Any) -> list[Any]:
    """Tokens and log-probabilities of each sequence."""
    settings: dict[str, Any] = SAMPLED | {"logprobs": 1} | more
    params = SamplingParams(**settings)
    outputs = [one for request in llm.generate(some, params) for one in request.outputs]
    return [(one.token_ids, [entry.logprob for entry in one.logprobs or ()]) for one in outputs]


def engine(family: str, **more: Any) -> LLM:
    settings: dict[str, Any] = SMALL | {"dtype": "bfloat16"} | more
    return LLM(f"tiny-random:{family}", **settings)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "lfm2"])
def test_alone_in_a_crowd_and_after_preemption_answers_are_the_same(
    family: str, monkeypatch: pytest.MonkeyPatch
):
    """Pages for about two sequences, that board whether or not the pool should last; prompts of up
    to seven chunks. Layers of Mamba are in `test_features`.
    """
    monkeypatch.setattr(PageDemand, "lasts", lambda *_: True)
    llm = engine(family, pages=20)
    together = answers(llm, prompts())
    totals = llm.core.ledger.totals
    assert totals["preempted"] > 0 and totals["recomputed"] > 0
    llm.core.check()
    large = engine(family, token_budget=200, token_buckets=[200])
    alone = [answers(large, [prompt])[0] for prompt in prompts()]
    assert together == alone
    assert len({tuple(tokens) for tokens, _ in alone}) == len(LENGTHS)


def conversations(llm: LLM) -> tuple[list[Any], list[int]]:
    """Three conversations of two turns that begin alike, and then the first turn of a fourth for
    two siblings: the answers, and the prompt tokens that each turn found.
    """
    rng = np.random.default_rng(1)
    head = rng.integers(4, 250, 50).tolist()
    told, found, before = [], [], llm.core.ledger.totals["cached_tokens"]
    for n in (1, 1, 1, 2):
        text = head + rng.integers(4, 250, 45).tolist()
        for _ in range(3 - n):
            told += (turn := answers(llm, [text], n=n))
            llm.core.check()
            found.append(llm.core.ledger.totals["cached_tokens"] - before - sum(found))
            text = text + turn[0][0] + rng.integers(4, 250, 21).tolist()
    return told, found


def test_conversations_that_go_on_from_checkpoints_have_the_same_answers():
    """In pages of 8: the end of a prompt of 95 tokens is behind page 11, what all have in common
    is 48 tokens long, and the second one that has it leaves a checkpoint there. The state of
    decoded rows is kept where answers are shared.
    """
    cold, none = conversations(engine("qwen3_5", prefix_cache=False))
    warm, found = conversations(engine("qwen3_5"))
    assert warm == cold
    assert not any(none) and found == [0, 88, 0, 88, 48, 88, 48 + 88]
    llm = engine("qwen3_5", share_outputs="on", token_budget=200, token_buckets=[200])
    ((tokens, _),) = answers(llm, [prompts()[4]], max_tokens=60)
    longer = llm.generate([prompts()[4] + list(tokens)], SamplingParams(**SAMPLED))
    assert longer[0].cached_tokens == 152
    assert llm.info.sizes.prefix_cache and llm.info.sizes.checkpoints > 0


@pytest.mark.usefixtures("hurried")
def test_drafts_change_no_token(monkeypatch: pytest.MonkeyPatch):
    """Alone and in a crowd, greedy, of two siblings, and under a grammar; from checkpoints. With
    few tokens a random model repeats itself. `test_delta_net` has drafts of every kernel.
    """
    monkeypatch.setattr(PageDemand, "lasts", lambda *_: True)
    few = {token: 100.0 for token in (3, 9, 11, 40)}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logit_bias": few},
        {"temperature": 0.3, "logit_bias": few, "n": 2},
        {"temperature": 0.3, "grammar": Grammar("regex", "([ab]{2,3} ){9,20}")},
    ]
    found, totals = [], {}
    for speculative in ("off", "ngram"):
        llm = engine("qwen3_5", dtype="float32", speculative=speculative)
        told = answers(llm, prompts()[3:4], max_tokens=50, **kinds[0])
        for more in kinds:
            told += answers(llm, prompts()[3:], max_tokens=30, **more)
        llm.core.check()
        found.append([tokens for tokens, _ in told])
        totals = llm.core.ledger.totals
    assert found[0] == found[1]
    assert min(totals["cached_tokens"], totals["rejected"]) > 0 and totals["accepted"] > 50


def test_rows_that_are_computed_again_for_a_late_mask_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    """Sequences sit out until their masks are there, and then have their last row once more."""
    wanted = Grammar("json_schema", '{"type":"array","items":{"enum":["a","b",10]},"maxItems":6}')
    rows = []
    sit_out = Scheduler.sit_out
    monkeypatch.setattr(Scheduler, "sit_out", lambda *args: (rows.append(1), sit_out(*args)))
    found, llm = [], engine("qwen3_5")
    for patience in (60.0, 0.0):
        monkeypatch.setattr(matchers, "_STEP_S", patience)
        found.append((answers(llm, prompts(), grammar=wanted), len(rows)))
    (patiently, none), (hastily, some) = found
    assert patiently == hastily and none == 0 and some > len(LENGTHS)


@pytest.mark.parametrize(
    ("family", "kernels", "rows", "drafts"),
    [
        ("qwen3_5", "native", 4, 3),
        ("qwen3_5", "reference", 64, 0),
        ("nemotron_h", "native", 64, 0),
        ("nemotron_h", "native", 4, 3),
    ],
)
def test_what_seats_keep_is_written_where_it_lies(
    family: str, kernels: str, rows: int, drafts: int
):
    config = tiny_config(family)
    sizes = StateSizes(
        seats=6,
        n_pages=16,
        page_size=16,
        context_length=256,
        kv_dtype=jnp.dtype("float32"),
        drafting=Drafting(PromptLookup(), drafts) if drafts else None,
    )
    model = abstract_model(config)
    step = lower_step(model, Bucket(rows, 4), True, select("cpu", kernels), sizes, None)
    text = step.compile().as_text()
    assert config.recurrent is not None and text is not None
    for shape in filter(None, config.recurrent.state_shapes(6 * (1 + drafts))[:2]):
        written = ",".join(map(str, shape))
        assert f"f32[{written}]" in text
        assert not re.findall(rf"= f32\[{written}\]\S* copy\(", text)
