"""A draft model changes no token: answers with and without it, and how many drafts are right."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from drafting_heads import check_crowd
from fakes import watch
from oracle import prompt

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import Grammar
from jitney.engine.core.scheduler.page_demand import PageDemand
from jitney.engine.core.text import vocabularies
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.core.weights.checkpoints.sources import ModelSource

pytestmark = pytest.mark.usefixtures(
    "programs_when_used", "compiled_in_a_hurry", "kernels_unproved"
)

#: Steps of one size, so that drafts always pay.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_seats": 8,
    "token_budget": 64,
    "context": 192,
    "page_size": 8,
    "seat_buckets": [8],
    "token_buckets": [64],
}
DRAFTS: dict[str, Any] = {"speculative": "draft", "draft_model": "tiny-random"}
PROMPTS = [prompt(number, 10 + 9 * number) for number in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
#: One for each of the prompts.
MIXED = [
    SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.1, seed=3, max_tokens=60, ignore_eos=True, n=2),
    SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, frequency_penalty=0.01),
    SamplingParams(temperature=0.2, seed=5, top_k=4, max_tokens=40, min_tokens=20),
]


#: Under grammars, which a model that knows none of them seldom keeps to.
HELD = [
    SamplingParams(temperature=0, max_tokens=60, grammar=Grammar("regex", "([a-d]{2}-){20,40}")),
    SamplingParams(temperature=0.3, seed=3, max_tokens=60, grammar=Grammar("regex", "[^b]{50}")),
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=60, grammar=Grammar("regex", "[ -~]{58}"), n=2),
]


@cache
def engine(**settings: Any) -> LLM:
    return LLM("tiny-random", **SETTINGS, **settings)


def answers(llm: LLM, params: Any, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    outputs = [one for output in llm.generate(prompts, params) for one in output.outputs]
    llm.core.check()
    return outputs


def drafts_of(llm: LLM, params: Any, prompts: list[list[int]]) -> tuple[int, int]:
    """(right, wrong) drafts that these checked."""
    before = llm.core.ledger.totals
    answers(llm, params, prompts)
    after = llm.core.ledger.totals
    return after["accepted"] - before["accepted"], after["rejected"] - before["rejected"]


def test_drafts_are_checked_under_grammars():
    """And change no token; those that a grammar forbids are not checked."""
    llm = engine(**DRAFTS)
    plans = watch(llm.core)
    before = llm.core.ledger.totals
    found = answers(llm, HELD)
    expected = answers(engine(), HELD)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    after = llm.core.ledger.totals
    assert after["accepted"] - before["accepted"] > 60
    held = [chunk for plan in plans for chunk in plan.chunks if chunk.seq.matcher and chunk.draft]
    assert len(held) > 20


def test_a_model_that_drafts_for_itself_is_right_with_a_cold_and_a_warm_prefix():
    """Behind a prefix that was found in pages, too, and with the memory given back meanwhile."""
    llm = engine(**DRAFTS)
    plans = watch(llm.core)
    compiled = []
    for _ in range(2):
        right, wrong = drafts_of(llm, GREEDY, [PROMPTS[3]])
        assert right > 40 and wrong == 0
        compiled.append(llm.core.runner.compiles)
    assert compiled[1] == compiled[0]
    assert sum(plan.cached_tokens for plan in plans) > 0
    llm.core.sleep(lambda: None)
    llm.core.wake(lambda: None)
    right, wrong = drafts_of(llm, GREEDY, PROMPTS)
    assert right > 40 and wrong == 0


def test_answers_are_the_same_in_a_crowd_with_few_pages(monkeypatch: pytest.MonkeyPatch):
    """Drafts by the model in int4, some of which are wrong; sequences lose their pages."""
    expected = answers(engine(), MIXED)
    llm = engine(**DRAFTS, draft_weights="int4", pages=40)
    monkeypatch.setattr(PageDemand, "lasts", lambda *_: True)
    check_crowd(expected, answers(llm, MIXED), llm)


def test_another_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch):
    source = ModelSource.resolve("tiny-random")
    vocabularies.check_vocabulary(source, source)
    known = iter(({"a": 0, "b": 1}, {"a": 1, "b": 0}))
    monkeypatch.setattr(Tokenizer, "vocabulary", property(lambda self: next(known)))
    with pytest.raises(ConfigError, match="draft_model tiny-random has another vocabulary"):
        vocabularies.check_vocabulary(source, source)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speculative": "draft"}, "needs draft_model"),
        ({"draft_model": "tiny-random"}, "is for speculative draft and eagle3, not off"),
        (DRAFTS | {"draft_model": "tiny-random:qwen3_5"}, "cannot draft"),
        (DRAFTS | {"draft_model": str(Path("no-such-model"))}, "no-such-model"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str):
    with pytest.raises(Exception, match=words):
        LLM("tiny-random", **SETTINGS, **settings)
