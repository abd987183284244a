"""The core with grammars on the fake device: masks at the right time, for the right rows, whatever
else happens to their sequences.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from fakes import (
    EOS,
    FakeRunner,
    StepFailed,
    code_of,
    device_of,
    ends_of,
    make_core,
    make_request,
    tokens_of,
    watch,
)
from grammars import CODE, WORDS, core_with_grammars, text_of

from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import EngineRequest, Grammar
from jitney.engine.core.engine_core import EngineCore

PAIRS = Grammar("json_schema", '{"type":"array","items":{"enum":["a","b",10]},"maxItems":4}')
PATTERNS = {
    CODE: r"[a-f]{3}-[0-9]{2,6}",
    WORDS: "no|nod|hello",
    PAIRS: r'\[((("a"|"b"|10),){0,3}("a"|"b"|10))?\]',
}


def finish(core: EngineCore) -> list[SequenceOutput]:
    """Step to the end; grammars are compiled on a thread, in their own time."""
    outputs: list[SequenceOutput] = []
    most = time.monotonic() + 30
    while core.has_work:
        outputs += core.step().outputs
        core.check()
        time.sleep(core.pause_s)
        assert time.monotonic() < most
    return outputs


def held(
    id: str, grammar: Grammar, prompt: Sequence[int] = (5, 6, 7), **sampling: Any
) -> EngineRequest:
    sampling = {"max_tokens": 24} | sampling
    return make_request(id, list(prompt), grammar=grammar, **sampling)


def alone(request: EngineRequest) -> list[list[int]]:
    """Tokens of each of its sequences, served by an engine that does nothing else."""
    outputs = finish_with(core_with_grammars(), [request])
    return [tokens_of(outputs, request.id, index) for index in range(request.sampling.n)]


def finish_with(core: EngineCore, requests: list[EngineRequest]) -> list[SequenceOutput]:
    for request in requests:
        core.add(request)
    return finish(core)


@pytest.mark.parametrize("grammar", PATTERNS, ids=lambda grammar: grammar.kind)
def test_an_answer_is_what_its_grammar_says(grammar: Grammar):
    core = core_with_grammars()
    outputs = finish_with(core, [held(f"r{seed}", grammar, seed=seed) for seed in range(12)])
    for seed in range(12):
        end = ends_of(outputs)[f"r{seed}", 0]
        text = text_of(tokens_of(outputs, f"r{seed}"))
        assert end.finish == "stop", end
        assert re.fullmatch(PATTERNS[grammar], text), text


def test_a_complete_grammar_ends_an_answer_without_an_end_token():
    outputs = finish_with(core_with_grammars(), [held("a", Grammar("regex", "[0-9]{3}"))])
    tokens = tokens_of(outputs, "a")
    assert len(tokens) == 3 and EOS not in tokens
    end = ends_of(outputs)["a", 0]
    assert (end.finish, end.stop_token) == ("stop", None)


def test_an_end_token_ends_an_answer_only_where_its_grammar_may_end():
    lengths = set()
    for seed in range(30):
        request = held("a", Grammar("regex", "(ab)*"), [seed + 1, 6], max_tokens=12)
        outputs = finish_with(core_with_grammars(), [request])
        end, tokens = ends_of(outputs)["a", 0], tokens_of(outputs, "a")
        if end.finish == "stop":
            assert end.stop_token == EOS and tokens[-1] == EOS
            assert re.fullmatch("(ab)*", text_of(tokens))
            lengths.add(len(tokens))
    assert len(lengths) > 1


def test_min_tokens_and_ignore_eos_keep_an_answer_going_as_long_as_there_is_anything_to_say():
    kinds: list[dict[str, Any]] = [{"min_tokens": 9}, {"ignore_eos": True}]
    for sampling in kinds:
        request = held("a", Grammar("regex", "(ab)*"), max_tokens=12, **sampling)
        tokens = tokens_of(finish_with(core_with_grammars(), [request]), "a")
        assert len(tokens) >= 9 and EOS not in tokens[:8]
        request = held("a", Grammar("regex", "a?"), max_tokens=12, **sampling)
        outputs = finish_with(core_with_grammars(), [request])
        assert ends_of(outputs)["a", 0].finish == "stop"
        assert text_of(tokens_of(outputs, "a")) == "a"


def test_a_step_without_them_has_no_masked_rows():
    core = core_with_grammars()
    plans = watch(core)
    finish_with(core, [make_request("n", [1, 2, 3])])
    assert not any(plan.masked for plan in plans)
    finish_with(core, [held("a", CODE), make_request("m", [1, 2, 3], max_tokens=12)])
    masked = [plan for plan in plans if plan.masked]
    assert masked and not any(plan.greedy_only for plan in masked)
    assert {row.chunk.seq.request_id for plan in masked for row in plan.masked} == {"a"}


def test_siblings_preempted_and_lonely_ones_answer_alike(rash: None):
    """Too few pages for all: some lose their seats, and their matchers stay where they are."""
    requests = [
        held(f"r{i}", [CODE, PAIRS, WORDS][i % 3], [i, 2, 3, 4, 5], seed=i, n=1 + i % 3)
        for i in range(8)
    ]
    core = core_with_grammars(pages=8, seats=4, retain=False)
    # Compiled now: all of them board at once, whatever the time that compiling takes.
    finish_with(core, [held(grammar.kind, grammar) for grammar in PATTERNS])
    plans = watch(core)
    outputs = finish_with(core, requests)
    for request in requests:
        for index, tokens in enumerate(alone(request)):
            assert tokens_of(outputs, request.id, index) == tokens
    assert sum(len(plan.preempted) for plan in plans) > 0


def test_a_step_that_fails_leaves_matchers_where_the_tokens_are(monkeypatch: pytest.MonkeyPatch):
    expected = {f"r{i}": alone(held(f"r{i}", CODE, seed=i))[0] for i in range(3)}
    for method in ("launch", "choose"):
        core = core_with_grammars()
        runner, steps = device_of(core), 0
        original = getattr(FakeRunner, method)

        def failing(*args, original=original, runner=runner):
            nonlocal steps
            steps += 1
            if steps == 4:
                raise StepFailed
            return original(runner, *args)

        monkeypatch.setattr(runner, method, failing)
        outputs = finish_with(core, [held(f"r{i}", CODE, seed=i) for i in range(3)])
        assert {id: tokens_of(outputs, id) for id in expected} == expected


def test_random_requests_and_aborts_lose_nothing():
    rng = random.Random(5)
    core = core_with_grammars(pages=20, seats=4)
    grammars = [None, CODE, WORDS, PAIRS, Grammar("regex", "("), Grammar("lark", "start: x")]
    outputs: list[SequenceOutput] = []
    opened: dict[str, int] = {}
    for number in range(150):
        id, n = f"r{number}", rng.choice((1, 1, 2, 3))
        prompt = [rng.randrange(1, 30) for _ in range(rng.randrange(1, 12))]
        grammar = rng.choice(grammars)
        core.add(make_request(id, prompt, seed=number, n=n, max_tokens=10, grammar=grammar))
        opened[id] = n
        if rng.random() < 0.3:
            index = rng.choice((None, 0))
            core.abort(rng.choice(list(opened)), index)
        for _ in range(rng.randrange(4)):
            outputs += core.step().outputs
            core.check()
    outputs += finish(core)
    ends = ends_of(outputs)
    assert ends.keys() == {(id, index) for id, n in opened.items() for index in range(n)}
    codes = {code_of(end) for end in ends.values() if end.finish == "error"}
    assert codes <= {"invalid_value"}


def test_an_engine_that_knows_no_tokenizer_refuses():
    core = make_core()
    core.add(held("a", CODE))
    [end] = ends_of(core.run_until_idle()).values()
    assert code_of(end) == "unsupported_parameter"


def test_a_bad_grammar_ends_its_request_alone():
    core = core_with_grammars()
    outputs = finish_with(core, [held("bad", Grammar("regex", "(")), held("good", CODE)])
    ends = ends_of(outputs)
    assert code_of(ends["bad", 0]) == "invalid_value"
    assert ends["good", 0].finish == "stop"


@pytest.mark.parametrize(
    ("text", "written"), [("start: s\ns: s /a/", 0), ("start: /b/ s\ns: s /a/", 1)]
)
def test_a_grammar_without_any_text_is_not_too_complex(text: str, written: int):
    """From its beginning on, or from where an answer has come to."""
    outputs = finish_with(core_with_grammars(), [held("bad", Grammar("lark", text))])
    [end] = ends_of(outputs).values()
    assert code_of(end) == "invalid_value" and len(tokens_of(outputs, "bad")) == written


def test_aborted_while_its_grammar_is_compiled():
    core = core_with_grammars()
    assert core.intake.grammars is not None
    core.add(held("a", Grammar("regex", "[a-c]{5}"), n=2))
    core.abort("a")
    ends = ends_of(finish(core))
    assert {key: end.finish for key, end in ends.items()} == {("a", 0): "abort", ("a", 1): "abort"}


def test_log_probabilities_are_of_all_tokens_and_the_work_is_counted():
    core = core_with_grammars()
    core.add(held("a", CODE, logprobs=2))
    work = []
    while core.has_work:
        report = core.step()
        work.append(report.grammars)
        for output in report.outputs:
            assert len(output.logprobs or []) == len(output.tokens)
        time.sleep(core.pause_s)
    counted = [entry for entry in work if entry is not None]
    assert sum(entry.compiled for entry in counted) == 1
    assert sum(entry.masks for entry in counted) >= 6
    assert counted[-1].cached == 1
