"""Answers of a real step under masks: a model of random weights says anything that it may, and all
of it must be what was asked for. What is right is decided without llguidance: jsonschema, re.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from fakes import watch
from hypothesis import HealthCheck, given, settings
from schemas import SCHEMAS

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import Grammar
from jitney.engine.core.grammar import grammar, matchers
from jitney.engine.server.chat.grammar_fields import choice_grammar, text_grammar

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

#: Seconds after which a mask is late for good.
LONG_S = 60.0
#: More blanks than an indentation of eight levels by four has, or a second line without anything.
MOST_BLANKS = re.compile(r"[ \t]{33}|\n[ \t]*\r?\n")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(
        "tiny-random",
        max_seats=8,
        token_budget=64,
        seat_buckets=(8,),
        token_buckets=(64,),
        pages=200,
        context=512,
        dtype="float32",
        compilation_cache=False,
    )
    yield made
    made.close()


def answers(llm: LLM, wanted: Grammar, prompt: str = "x", **sampling: Any) -> list[tuple[str, str]]:
    """(finish reason, text) of each sequence."""
    params = SamplingParams(**({"max_tokens": 150, "seed": 1, "grammar": wanted} | sampling))
    [output] = llm.generate(prompt, params)
    assert output.error is None
    return [(choice.finish_reason or "", choice.text) for choice in output.outputs]


@settings(
    max_examples=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(SCHEMAS)
def test_every_finished_answer_validates(llm: LLM, schema: dict[str, Any]):
    wanted = grammar.schema_grammar(schema)
    try:
        found = answers(llm, wanted, n=3, temperature=1.5)
    except RequestError as error:
        assert "at #" in str(error), error  # it says where, and refuses
        return
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for finish, text in found:
        assert not MOST_BLANKS.search(text)
        if finish == "stop":
            validator.validate(json.loads(text))


@pytest.mark.parametrize(
    "pattern",
    [r"[a-c]{4}", r"(yes|no|maybe), [A-Z][a-z]{2,8}\.", r"[0-9]{3}(-[0-9]{2}){2}", r"é?x+y"],
)
def test_answers_match_their_regular_expression(llm: LLM, pattern: str):
    found = answers(llm, Grammar("regex", pattern), n=6)
    assert any(finish == "stop" for finish, _ in found)
    for finish, text in found:
        assert finish == "length" or re.fullmatch(pattern, text), text


def test_answers_are_one_of_the_choices(llm: LLM):
    choices = ["red", "reddish", "green and blue", '"quoted"', "new\nline"]
    texts = {text for _, text in answers(llm, choice_grammar(choices), n=16)}
    assert texts <= set(choices) and len(texts) > 1


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a" ("b" | "c")+ "."',
        'start: "a" ("b" | "c")+ "."',
        'start: "a" TAIL "."\nTAIL: /[bc]+/',
    ],
)
def test_answers_follow_a_grammar(llm: LLM, text: str):
    for finish, answer in answers(llm, text_grammar(text), n=4, max_tokens=60):
        assert finish == "length" or re.fullmatch(r"a[bc]+\.", answer), answer


def test_rows_that_sit_out_are_computed_again(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """No step waits for masks: who has none gets the same token in a later step."""
    wanted = Grammar("regex", "[a-f]{12}")
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "grammar": wanted, "frequency_penalty": 0.5},
        {"seed": 3, "grammar": wanted, "logprobs": 2},
        {"temperature": 0.0, "ignore_eos": True},
    ]
    params = [SamplingParams(max_tokens=14, **kind) for kind in kinds]

    def generated() -> list[Any]:
        completions = [answer.outputs[0] for answer in llm.generate(["a", "b", "c"], params)]
        return [(completion.token_ids, completion.logprobs) for completion in completions]

    monkeypatch.setattr(matchers, "_STEP_S", LONG_S)
    expected = generated()
    monkeypatch.setattr(matchers, "_STEP_S", 0.0)
    plans = watch(llm.core)
    assert generated() == expected
    assert sum([chunk.sits_out for plan in plans for chunk in plan.chunks]) > 4


def test_any_object(llm: LLM):
    for finish, text in answers(llm, Grammar("json_object"), n=8, max_tokens=200):
        if finish == "stop":
            assert isinstance(json.loads(text), dict)


def test_greedy_penalised_and_scored_rows_keep_to_it_too(llm: LLM):
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "frequency_penalty": 1.0},
        {"repetition_penalty": 1.3, "top_p": 0.5, "logprobs": 3},
        {"logit_bias": {97: 50.0}, "min_tokens": 5, "top_k": 3},
    ]
    for sampling in kinds:
        for finish, text in answers(llm, Grammar("regex", "[a-f]{8}"), n=3, **sampling):
            assert finish == "stop" and re.fullmatch("[a-f]{8}", text)


def test_a_stop_token_before_min_tokens_is_chosen_where_the_grammar_allows_no_other(llm: LLM):
    space: dict[str, Any] = {"stop_token_ids": (ord(" "),), "max_tokens": 12}
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 5}]
    for sampling in kinds:
        wanted = Grammar("choice", '["ab ab ab"]')
        [(finish, text)] = answers(llm, wanted, min_tokens=5, **space, **sampling)
        assert (finish, text) == ("stop", "ab ab")
        [(finish, text)] = answers(llm, wanted, min_tokens=0, **space, **sampling)
        assert (finish, text) == ("stop", "ab")


def test_log_probabilities_are_the_models_own(llm: LLM):
    """Those of the same tokens where nothing was masked, so that they do not add up to one."""
    prompt = [5, 6, 7]
    wanted = Grammar("regex", "[a-f]{4}")
    [held] = llm.generate(
        [prompt], SamplingParams(max_tokens=8, seed=4, logprobs=2, grammar=wanted)
    )
    choice = held.outputs[0]
    [free] = llm.generate(
        [prompt + choice.token_ids], SamplingParams(max_tokens=1, prompt_logprobs=2)
    )
    own = choice.logprobs or []
    scored = (free.prompt_logprobs or [])[len(prompt) :]
    assert len(own) == len(scored) == len(choice.token_ids)
    for one, other in zip(own, scored, strict=True):
        assert other is not None
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


def test_neighbours_of_a_real_step_get_the_same_tokens(llm: LLM):
    prompts = [[i, 2, 3] for i in range(4)]
    free = [SamplingParams(max_tokens=20, seed=i, temperature=0.9) for i in range(4)]
    alone = [answer.outputs[0].token_ids for answer in llm.generate(prompts, free)]
    held = SamplingParams(max_tokens=20, seed=9, grammar=Grammar("regex", "[a-z]{30}"))
    among = llm.generate([*prompts, [9, 9]], [*free, held])
    assert [answer.outputs[0].token_ids for answer in among[:4]] == alone
    assert re.fullmatch("[a-z]+", among[4].outputs[0].text)


def test_a_stop_string_ends_it_before_it_is_complete(llm: LLM):
    for finish, text in answers(llm, Grammar("regex", "[ab]{40}"), n=4, stop=("ab",)):
        assert finish == "stop" and "ab" not in text


def test_nothing_compiles_for_it_and_all_is_accounted_for(llm: LLM):
    assert llm.core.runner.compiles == 0
    llm.core.check()


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (grammar.schema_grammar({"properties": {"a": {"type": "nope"}}}), "#/properties/a"),
        (Grammar("regex", "("), "unclosed group"),
        (Grammar("lark", "start: x"), "unknown name"),
        (Grammar("gbnf", "x ::= "), "root"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_before_anything_runs(
    llm: LLM, wanted: Grammar, words: str
):
    with pytest.raises(RequestError, match=r"cannot be (used|enforced)") as caught:
        answers(llm, wanted)
    assert words in str(caught.value) and caught.value.info.param == "grammar"
    assert not llm.core.has_work
