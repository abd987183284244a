"""Models of which some layers have a window: pages of their own change no answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import watch
from oracle import oracle_logprobs, prompt

from jitney.engine import LLM, SamplingParams
from jitney.engine.core.executor.memory import PoolShares, PoolSizes
from jitney.engine.core.scheduler.page_demand import PageDemand
from jitney.engine.core.weights.checkpoints import families
from jitney.engine.core.weights.checkpoints.layer_configs import RopeConfig
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.load import load_model

pytestmark = pytest.mark.usefixtures(
    "programs_when_used", "compiled_in_a_hurry", "kernels_unproved"
)

PAGE = 8
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_seats": 4,
    "token_budget": 64,
    "context": 512,
    "page_size": PAGE,
    "pages": 400,
    "seat_buckets": [4],
    "token_buckets": [64],
}
PROMPTS = [prompt(number, length) for number, length in enumerate((5, 70, 130, 300, 40))]
PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=3)


@pytest.fixture(autouse=True)
def three_kinds_of_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`tiny-random:gemma3` with layers that see 24, all and 9 positions."""
    name = "Gemma3ForCausalLM"
    family = families.FAMILIES[name]
    layers: dict[str, Any] = {
        "n_layers": 4,
        "windows": (24, 0, 9, 24),
        "ropes": (RopeConfig(100.0), RopeConfig(), RopeConfig(100.0), RopeConfig(100.0)),
    }
    tiny = family.tiny | layers
    monkeypatch.setitem(families.FAMILIES, name, replace(family, tiny=tiny))
    yield


def new_llm(monkeypatch: pytest.MonkeyPatch, *, groups: bool = True, **settings: Any) -> LLM:
    """groups: False: all layers share the pages of the first group."""
    with monkeypatch.context() as patch:
        if not groups:
            patch.setattr(PoolShares, "counted", lambda self, pages: PoolSizes((pages,)))
        return LLM("tiny-random:gemma3", **(SETTINGS | settings))


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams = PARAMS) -> list[Any]:
    """Token ids and log-probabilities of each, to the last bit."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    llm.core.check()
    return [(output.token_ids, output.logprobs) for output in outputs]


def test_answers_are_those_of_one_table_for_all_layers(monkeypatch: pytest.MonkeyPatch):
    """Prompts of many windows in chunks, cold and warm; and those of the dense forward."""
    own, shared = new_llm(monkeypatch), new_llm(monkeypatch, groups=False)
    assert own.info.sizes.window_pages.keys() == {24, 9}
    assert not shared.info.sizes.window_pages
    plans = watch(own.core)
    cold = answers(own, PROMPTS)
    assert cold == answers(shared, PROMPTS)
    assert max(plan.work.prompt for plan in plans) > 24
    plans.clear()
    warm = answers(own, PROMPTS)
    assert [ids for ids, _ in warm] == [ids for ids, _ in cold]
    assert warm == answers(shared, PROMPTS)
    assert sum(plan.cached_tokens for plan in plans) == sum(
        (len(tokens) - 1) // PAGE * PAGE for tokens in PROMPTS
    )
    source = ModelSource.resolve("tiny-random:gemma3")
    model = load_model(source, source.config)
    for tokens, (ids, _) in zip(PROMPTS, cold, strict=True):
        logprobs = oracle_logprobs(model, tokens + ids)
        for at, token in enumerate(ids, start=len(tokens) - 1):
            first, second = np.sort(logprobs[at])[::-1][:2]
            assert token == logprobs[at].argmax() or first - second < 1e-4


def test_windows_evicted_before_the_pages_of_the_layers_that_see_all(
    monkeypatch: pytest.MonkeyPatch,
):
    llm = new_llm(monkeypatch, pages=400)
    plans = watch(llm.core)
    first = [prompt(99, 120)]
    cold = answers(llm, first)
    for number in range(15):
        answers(llm, [prompt(100 + number, 100)], SamplingParams(temperature=0, max_tokens=1))
    pool = llm.core.scheduler.pool
    assert pool.n_cached < pool.capacity, "none of the first group's pages was evicted"
    plans.clear()
    assert answers(llm, first) == cold
    assert sum(plan.cached_tokens for plan in plans) == 0


def test_preempted_sequences_and_siblings_answer_the_same(monkeypatch: pytest.MonkeyPatch):
    prompts = [prompt(number, 100) for number in range(4)]
    params = SamplingParams(temperature=0.8, max_tokens=150, ignore_eos=True, n=2, seed=7)
    roomy = new_llm(monkeypatch)
    expected = [output.outputs for output in roomy.generate(prompts, params)]
    tight = new_llm(monkeypatch, pages=72)
    assert tight.info.sizes.window_pages
    monkeypatch.setattr(PageDemand, "lasts", lambda *_: True)
    got = [output.outputs for output in tight.generate(prompts, params)]
    tight.core.check()
    assert tight.core.ledger.totals["preempted"] > 0
    for ours, theirs in zip(got, expected, strict=True):
        assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]


def test_drafts_change_no_answer(monkeypatch: pytest.MonkeyPatch):
    """Texts of a few tokens, which repeat themselves, longer than the windows."""
    prompts = [prompt(number, 20 + 15 * number) for number in range(3)]
    few = {token: 100.0 for token in (3, 9, 11, 40)}
    params = SamplingParams(
        temperature=0.3, seed=7, logit_bias=few, max_tokens=60, ignore_eos=True, logprobs=0
    )
    # Steps of one size, so that drafts always pay.
    sizes: dict[str, Any] = {"max_seats": 8, "seat_buckets": [8]}
    expected = answers(new_llm(monkeypatch, **sizes), prompts, params)
    drafting = new_llm(monkeypatch, **sizes, pages=80, speculative="ngram")
    monkeypatch.setattr(PageDemand, "lasts", lambda *_: True)
    plans = watch(drafting.core)
    got = answers(drafting, prompts, params)
    for (ids, scores), (own_ids, own_scores) in zip(expected, got, strict=True):
        assert own_ids == ids
        np.testing.assert_allclose(
            [entry.logprob for entry in own_scores], [entry.logprob for entry in scores], atol=1e-4
        )
    totals = drafting.core.ledger.totals
    assert totals["accepted"] > 20
    assert any(plan.dropped and any(chunk.draft for chunk in plan.chunks) for plan in plans)


@pytest.mark.usefixtures("one_program_a_model")
def test_narrow_keys_and_values(monkeypatch: pytest.MonkeyPatch):
    own = new_llm(monkeypatch, kv_dtype="int8")
    shared = new_llm(monkeypatch, groups=False, kv_dtype="int8")
    assert answers(own, PROMPTS) == answers(shared, PROMPTS)


def test_a_pool_that_lost_its_contents_is_filled_anew(monkeypatch: pytest.MonkeyPatch):
    llm = new_llm(monkeypatch)
    cold = answers(llm, PROMPTS)
    llm.core.runner.sleep(lambda: None)
    llm.core.runner.wake(lambda: None)
    llm.core.scheduler.sequences.start_all_over(0.0)
    assert answers(llm, PROMPTS) == cold
