"""Speculation changes no token: answers with and without it, drafts, and pages where few are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from grammars import tokenizer_json

from jitney.engine.common.records import Ledger
from jitney.engine.common.requests import EngineRequest, Grammar, SamplingParams
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.executor.program import StateSizes
from jitney.engine.core.executor.runner import Runner
from jitney.engine.core.executor.seat_tokens import DraftedTokens, Drafting, DraftRows, PromptLookup
from jitney.engine.core.executor.step_programs import StepPrograms
from jitney.engine.core.models.registry import random_model
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.page_tables import PageTables
from jitney.engine.core.scheduler.plan import REJECTED
from jitney.engine.core.scheduler.scheduler import Scheduler
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.kernels.select import select

pytestmark = pytest.mark.usefixtures("programs_when_used", "compiled_in_a_hurry")

SEATS, VOCAB = 8, 512
BUCKETS = Buckets.of(max_seats=SEATS, token_budget=32, seat_sizes=(8,), token_sizes=(32,))
SIZES = StateSizes(
    seats=SEATS, n_pages=64, page_size=16, context_length=128, kv_dtype=jnp.dtype("float32")
)
DRAFTING = Drafting(PromptLookup(), 7)
#: A random model does not repeat itself; with few tokens it must.
FEW = {token: 100.0 for token in (3, 9, 11, 40)}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, logit_bias=FEW, max_tokens=60),
    "drawn": SamplingParams(temperature=0.3, seed=1, logit_bias=FEW, max_tokens=50),
    "cut": SamplingParams(temperature=0.5, seed=2, top_k=3, logit_bias=FEW, max_tokens=40),
    "penalised": SamplingParams(
        temperature=0.0, frequency_penalty=0.02, logit_bias=FEW, max_tokens=60
    ),
    "banned": SamplingParams(
        temperature=0.2, seed=7, logit_bias=FEW, stop_token_ids=(40,), min_tokens=20, max_tokens=90
    ),
    "scored": SamplingParams(temperature=0.0, logprobs=3, logit_bias=FEW, max_tokens=40),
    "two": SamplingParams(temperature=0.4, seed=5, n=2, logit_bias=FEW, max_tokens=30),
    "held": SamplingParams(
        temperature=0.3,
        seed=3,
        frequency_penalty=0.02,
        grammar=Grammar("regex", "([abc]{2}-){4,9}"),
        logprobs=2,
        max_tokens=60,
    ),
    "ruled": SamplingParams(
        temperature=0.0,
        allowed_token_ids=tuple(FEW),
        banned_sequences=((9, 9, 9), (40, 40, 40)),
        max_tokens=60,
    ),
}


@cache
def runner(in_parts: bool, drafting: Drafting | None) -> Runner:
    programs = StepPrograms(
        random_model(tiny_config()),
        BUCKETS,
        select("cpu", "reference"),
        replace(SIZES, drafting=drafting),
        greedy_only_mixed=in_parts,
        in_parts=in_parts,
    )
    made = Runner(programs, end_ids=())
    made.compile()
    return made


def core_of(in_parts: bool, *, speculates: bool, pages: int = 64) -> EngineCore:
    drafting = DRAFTING if speculates else None
    own = runner(in_parts, drafting)
    own.state = own.programs.shapes.allocate(own.programs.config)
    own.builder = own.programs.sizes.builder(own.programs.config)
    limits = SchedulerLimits(SEATS, SIZES.context_length, max_drafts=7 if speculates else 0)
    scheduler = Scheduler(limits, BUCKETS, PageTables(PagePool(pages, 16)), vocab_size=VOCAB)
    core = EngineCore(scheduler, own, Ledger())
    core.learn(tokenizer_json())
    return core


def answers(core: EngineCore, names: list[str]) -> dict[tuple[str, int], Any]:
    """By request and sequence: tokens and log-probabilities; the core is checked at each step."""
    for number, name in enumerate(names):
        prompt = [(31 * number + 7 * (at % 5)) % VOCAB for at in range(12 + 3 * number)]
        core.add(EngineRequest(id=name, prompt=prompt, sampling=PARAMS[name], arrival=0.0))
    found: dict[tuple[str, int], Any] = {}
    while core.has_work:
        for output in core.step().outputs:
            assert output.error is None
            tokens, scores = found.setdefault((output.request_id, output.index), ([], []))
            tokens += output.tokens
            scores += [entry.logprob for entry in output.logprobs or []]
        core.check()
    return found


@pytest.mark.parametrize(
    ("in_parts", "names"),
    [
        (True, ["greedy"]),
        (True, ["held", "ruled"]),
        (True, list(PARAMS)),
        (False, list(PARAMS)),
    ],
    ids=["one", "constrained", "all", "whole"],
)
def test_answers_are_the_same(in_parts: bool, names: list[str]):
    core = core_of(in_parts, speculates=True)
    found = answers(core, names)
    expected = answers(core_of(True, speculates=False), names)  # as whole ones: `test_step_parts`
    assert {key: tokens for key, (tokens, _) in found.items()} == {
        key: tokens for key, (tokens, _) in expected.items()
    }
    for key, (_, scores) in found.items():
        np.testing.assert_allclose(scores, expected[key][1], atol=1e-4)
    totals = core.ledger.totals
    assert totals["accepted"] > 0


def test_a_fixed_chance_accepts_drafts_whatever_they_are():
    """As often as it says, and as it was said one token before."""
    seats, most = 50, 3
    state = Drafting(PromptLookup(), most, chance=0.6).empty(seats, 64, 16)
    rows = jnp.repeat(jnp.arange(seats), most + 1)
    numbers = jnp.tile(jnp.arange(most + 1), seats)
    drafts = DraftRows(numbers, jnp.full_like(rows, 9))
    taken = state.take(rows, 20 + rows % 7 + numbers, drafts, jnp.full_like(rows, 5))
    assert isinstance(taken.seat_tokens, DraftedTokens)
    accepted = np.asarray(taken.tokens).reshape(seats, -1) != REJECTED
    guessed = np.asarray(taken.guessed).reshape(seats, -1)
    np.testing.assert_array_equal(accepted[:, 1:], guessed[:, :-1])
    assert accepted[:, 0].all() and (accepted[:, :-1] >= accepted[:, 1:]).all()
    assert 0.4 < accepted[:, 1].mean() < 0.8
    expected = np.sum(accepted, axis=1) - 1
    np.testing.assert_array_equal(taken.seat_tokens.accepted, expected)
