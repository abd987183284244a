"""The canary: requests that are computed again alone, and what is told when they come out
otherwise.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from api_fakes import FakeClient, call, make_app, run
from msgspec import structs
from wrong_kernels import SMALL, choose, wrong_set

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.messages import CanaryFinding, StepReport
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.canary import CanaryCore
from jitney.engine.core.scheduler.plan import StepResult
from jitney.engine.server.process.counters import EngineCounters

pytestmark = pytest.mark.usefixtures(
    "programs_when_used", "compiled_in_a_hurry", "kernels_unproved"
)

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10], [11, 12, 13, 14]]


def served(llm: LLM, prompts: list[list[int]], *params: SamplingParams) -> list[StepReport]:
    """All reports of an engine that answers these prompts."""
    for number, (prompt, one) in enumerate(zip(prompts, params * len(prompts), strict=False)):
        llm.core.add(EngineRequest(id=f"r{number}", prompt=prompt, sampling=one, arrival=0.0))
    reports = []
    while llm.core.has_work:
        reports.append(llm.core.step())
    llm.core.check()
    llm.close()
    return reports


def findings(reports: list[StepReport]) -> list[CanaryFinding]:
    return [finding for report in reports for finding in report.canary]


GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=8, temperature=1.5, seed=3, ignore_eos=True)


def test_right_answers_are_found_right():
    llm = LLM("tiny-random", canary_every=1, **SMALL)
    found = findings(served(llm, PROMPTS, GREEDY, DRAWN))
    assert len(found) == len(PROMPTS)
    assert all(finding.right and finding.apart < 1e-3 for finding in found)


def test_wrong_answers_are_found_wrong(monkeypatch: pytest.MonkeyPatch):
    choose(monkeypatch, wrong_set())
    monkeypatch.setattr("jitney.engine.core.executor.proving.prove", lambda kernels, asked: ())
    llm = LLM("tiny-random", canary_every=1, **SMALL)
    found = findings(served(llm, PROMPTS, GREEDY, DRAWN))
    assert len(found) == len(PROMPTS)
    assert not any(finding.right for finding in found)


def test_a_reference_that_is_not_a_number_is_not_agreed_with(monkeypatch: pytest.MonkeyPatch):
    llm = LLM("tiny-random", canary_every=1, **SMALL)
    assert isinstance(llm.core, CanaryCore)
    runner = llm.core.alone.runner
    fetch = runner.fetch

    def broken(launched: Any) -> StepResult:
        result = fetch(launched)
        scores = result.prompt_logprobs or []
        result.prompt_logprobs = [structs.replace(entry, logprob=math.nan) for entry in scores]
        return result

    monkeypatch.setattr(runner, "fetch", broken)
    found = findings(served(llm, PROMPTS[:1], GREEDY))
    assert [finding.right for finding in found] == [False]


def test_one_in_so_many_is_watched_and_no_client_notices():
    plain = served(LLM("tiny-random", **SMALL), PROMPTS, GREEDY)
    watched = served(LLM("tiny-random", canary_every=2, **SMALL), PROMPTS, GREEDY)
    assert len(findings(watched)) == 2 and not findings(plain)

    def told(reports: list[StepReport]) -> dict[str, Any]:
        outputs = [output for report in reports for output in report.outputs]
        assert all(output.logprobs is None and output.prompt_logprobs is None for output in outputs)
        assert sum(output.finish is not None for output in outputs) == len(PROMPTS)
        tokens: dict[str, list[int]] = {}
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.tokens)
        return tokens

    assert told(watched) == told(plain)


def test_requested_log_probabilities_are_returned():
    asking = SamplingParams(max_tokens=4, temperature=0.0, logprobs=2, ignore_eos=True)
    reports = served(LLM("tiny-random", canary_every=1, **SMALL), PROMPTS[:1], asking)
    entries = [
        entry for report in reports for output in report.outputs for entry in output.logprobs or ()
    ]
    assert [len(entry.top_ids) for entry in entries] == [2] * 4
    assert len(findings(reports)) == 1


def test_what_is_aborted_or_refused_is_not_computed_again():
    llm = LLM("tiny-random", canary_every=1, **SMALL)
    core = llm.core
    assert isinstance(core, CanaryCore)
    core.add(EngineRequest(id="gone", prompt=[1, 2], sampling=LONG, arrival=0.0))
    core.add(EngineRequest(id="bad", prompt=[10**6], sampling=GREEDY, arrival=0.0))
    core.step()
    core.abort("gone")
    reports = []
    while core.has_work:
        reports.append(core.step())
    assert not findings(reports)
    assert not core._watched and not core._waiting
    llm.close()


def test_an_answer_that_a_stop_string_ends_between_two_steps_is_computed_again():
    llm = LLM("tiny-random", canary_every=1, **SMALL)
    core = llm.core
    core.add(EngineRequest(id="cut", prompt=[1, 2], sampling=LONG, arrival=0.0))
    reports = [core.step() for _ in range(4)]
    core.abort("cut", reason="stop")
    report = core.report_ended()
    assert report is not None and [output.finish for output in report.outputs] == ["stop"]
    while core.has_work:
        reports.append(core.step())
    assert len(findings(reports)) == 1
    llm.close()


def test_an_answer_that_fills_the_context_is_left_alone():
    """Scoring it would need room for one token more; refused, it would count as wrong."""
    llm = LLM("tiny-random", canary_every=1, context=32, **SMALL)
    assert [one.right for one in findings(served(llm, [[1] * 24, [1] * 23], GREEDY))] == [True]


def test_the_next_one_that_can_be_is_watched():
    """Every second request is one that is not computed again."""
    several = SamplingParams(max_tokens=4, temperature=0.0, n=2, ignore_eos=True)
    reports = served(LLM("tiny-random", canary_every=2, **SMALL), PROMPTS, GREEDY, several)
    assert [one.right for one in findings(reports)] == [True]


def test_an_answer_without_a_limit_is_watched_until_it_is_too_long():
    open_end = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    llm = LLM("tiny-random", canary_every=1, context=32, **SMALL)
    reports = served(llm, [[1, 2]], open_end)
    outputs = [output for report in reports for output in report.outputs]
    assert sum(len(output.tokens) for output in outputs) == 30
    assert all(output.logprobs is None for output in outputs) and not findings(reports)
    llm = LLM("tiny-random", canary_every=1, context=32, **SMALL)
    ended = max(outputs[3].tokens)
    reports = served(llm, [[1, 2]], structs.replace(open_end, stop_token_ids=(ended,)))
    assert [one.right for one in findings(reports)] == [True]


def test_counters_metrics_and_page_count_what_was_found():
    client = FakeClient()
    assert isinstance(client.counters, EngineCounters)
    client.counters.observe_canary([CanaryFinding(0.1, True), CanaryFinding(2.5, False)])
    text = run(call(make_app(client), "/metrics", method="GET")).body.decode().splitlines()
    assert "jitney_canary_checked_total 2.0" in text
    assert "jitney_canary_mismatches_total 1.0" in text
    assert "jitney_canary_worst_difference 2.5" in text
