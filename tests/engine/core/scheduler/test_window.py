"""Pages behind a sliding window go back to the pool while their sequence still runs, and nobody's
tokens change.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core_runs import steps_with_arrivals
from fakes import (
    EOS,
    FakeClock,
    FakeRunner,
    ends_of,
    make_core,
    make_request,
    next_token,
    tokens_of,
    watch,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle_logprobs, prompt

from jitney.engine import LLM, SamplingParams
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.executor.inputs import BatchBuilder
from jitney.engine.core.scheduler.page_demand import PageDemand
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.families.tiny import SMALLEST
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.load import load_model

pytestmark = pytest.mark.usefixtures("programs_when_used", "compiled_in_a_hurry")

WINDOW, PAGE = 6, 4


class WindowedRunner(FakeRunner):
    """Its rows see WINDOW positions, and must find exactly these in the pages they are given."""

    window = WINDOW


class DraftingRunner(WindowedRunner):
    """Two of three of its drafts are right."""

    drafted = 3


def windowed_core(**options: Any) -> EngineCore:
    return make_core(page_size=PAGE, eos=(), device=WindowedRunner, **options)


def solo(request: EngineRequest) -> list[int]:
    """Tokens of a request served alone by a model with a window."""
    tokens = list(request.prompt)
    for _ in range(request.sampling.max_tokens or 0):
        tokens.append(next_token(tokens[-WINDOW:], 0))
        if tokens[-1] == EOS and not request.sampling.ignore_eos:
            break
    return tokens[len(request.prompt) :]


def run(core: EngineCore, requests: list[EngineRequest], pause: random.Random) -> list:
    """No sequence holds more pages than its window needs."""
    outputs = []
    for new in steps_with_arrivals(core, requests, pause):
        outputs += new
        for seq in core.scheduler.sequences.seats.decoding:
            if seq.scheduled - seq.sat_with > PAGE:  # from its first full page on
                assert seq.n_pages <= core.scheduler.sequences.pages.most_each
    return outputs


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 3), st.integers(1, 3)),
        min_size=1,
        max_size=12,
    ),
    st.integers(8, 24),
    st.booleans(),
    st.booleans(),
    st.sampled_from([WindowedRunner, DraftingRunner]),
    st.integers(0, 99),
)
def test_tokens_are_those_of_a_solo_run(
    shapes, pages: int, retain: bool, rash: bool, device: type[FakeRunner], seed: int
):
    """Prompts that start alike, siblings, few pages, preemption, drafts."""
    core = make_core(
        seats=3,
        pages=pages,
        page_size=PAGE,
        budget=11,
        context=64,
        retain=retain,
        device=device,
        max_drafts=device.drafted,
        clock=FakeClock(tick=0.01),
    )
    longest = core.scheduler.factory.request_limits.longest
    requests = []
    for i, (n_prompt, n_output, head, n) in enumerate(shapes):
        prompt_tokens = [head] * min(n_prompt, max(1, longest - 31))
        requests.append(
            make_request(f"r{i}", prompt_tokens, max_tokens=n_output, n=n, ignore_eos=head > 1)
        )
    with pytest.MonkeyPatch.context() as patch:
        if rash:
            patch.setattr(PageDemand, "lasts", lambda *_: True)
        outputs = run(core, requests, random.Random(seed))
    assert len(ends_of(outputs)) == sum(request.sampling.n for request in requests)
    for request in requests:
        assert tokens_of(outputs, request.id) == solo(request)
    assert core.scheduler.pool.used == 0


def test_pages_by_hand():
    """Window 6, pages of 4: at position p the row sees p - 5 .. p, so at 12 the page 4 .. 7 is
    still seen in part.
    """
    core = windowed_core(seats=1, pages=17, budget=16, context=64)
    plans = watch(core)
    core.add(make_request("a", [1] * 3, max_tokens=30))
    held = {}
    while core.has_work:
        core.step()
        for seq in core.scheduler.sequences.seats.decoding:
            held[seq.scheduled - 1] = [index for index, page in enumerate(seq.pages) if page]
    # Position -> pages; one is given back when the next one is needed.
    assert [held[at] for at in (3, 4, 8, 11, 12, 16, 20)] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2],
        [1, 2, 3],
        [2, 3, 4],
        [3, 4, 5],
    ]
    assert (
        max(plan.occupancy.pages_used for plan in plans) == 3
        and sum(len(plan.dropped) for plan in plans) == 5
    )


def test_a_prompt_gives_back_pages_while_it_is_read():
    core = windowed_core(seats=2, pages=33, budget=8, context=128)
    plans = watch(core)
    core.add(make_request("long", [1] * 64, max_tokens=1))
    core.run_until_idle()
    assert [plan.occupancy.pages_used for plan in plans] == [16, 16, 14, 12, 10, 8, 6, 4]


def test_dropped_pages_are_cached_and_found_again():
    core = windowed_core(seats=1, pages=33, budget=64, context=128)
    first = make_request("first", [2] * 8, max_tokens=32)
    core.add(first)
    outputs = core.run_until_idle()
    assert core.scheduler.pool.n_cached == 9, (
        "of 39 positions nine pages are full, the first ones dropped long ago"
    )
    again = first.prompt + tokens_of(outputs, "first")
    core.add(make_request("again", again, max_tokens=4))
    outputs = core.run_until_idle()
    assert ends_of(outputs)["again", 0].finish == "length"
    assert next(output.cached_tokens for output in outputs if output.tokens) == 36
    assert tokens_of(outputs, "again") == solo(
        make_request("", again, max_tokens=4, ignore_eos=True)
    )


def test_many_long_answers_fit_a_pool_for_one_whole_one():
    """Each would take 16 pages; with a window of 6 it takes 4 at most, and four sit at once without
    any preemption.
    """
    core = windowed_core(seats=4, pages=18, budget=16, context=64)
    plans = watch(core)
    requests = [
        make_request(f"r{i}", [i + 1] * 4, max_tokens=56, ignore_eos=True) for i in range(8)
    ]
    for request in requests:
        core.add(request)
    outputs = core.run_until_idle()
    assert all(tokens_of(outputs, request.id) == solo(request) for request in requests)
    assert (
        max(plan.occupancy.seats_busy for plan in plans) == 4
        and core.ledger.totals["preempted"] == 0
    )


def test_the_packed_table_has_the_trash_page_there():
    core = windowed_core(seats=1, pages=17, budget=16, context=64)
    builder, tables = (
        BatchBuilder(seats=1, pages_per_seat=16, page_size=PAGE, pool_rows=17 * PAGE),
        [],
    )
    batch = core.runner.batch

    def packed(plan):
        words = builder.build(plan, True)
        tables.append(builder.layout(plan.bucket, True).split(words).page_table[0].tolist())
        assert tables[-1][: len(plan.chunks[0].seq.pages)] == plan.chunks[0].seq.pages
        return batch(plan)

    core.runner.batch = packed
    core.add(make_request("a", [1] * 3, max_tokens=30))
    core.run_until_idle()
    assert tables[0][0] > 0 and tables[-1][:5] == [0] * 5 and all(tables[-1][6:8])


def test_a_model_with_one_layer_that_sees_all_keeps_all():
    assert tiny_config("mistral").window == 32 and SMALLEST.window == 0
    assert (
        replace(SMALLEST, windows=(32, 0)).window == 0
        and replace(SMALLEST, windows=(8, 32)).window == 32
    )


def test_a_windowed_model_serves_the_same_tokens_on_fewer_pages():
    """The tiny Mistral, window 32: greedy tokens are those of the dense forward, on a third of the
    pages.
    """
    source = ModelSource.resolve("tiny-random:mistral")
    model = load_model(source, source.config)
    llm = LLM(
        "tiny-random:mistral",
        dtype="float32",
        max_seats=4,
        token_budget=64,
        context=256,
        page_size=8,
        pages=48,
        seat_buckets=[4],
        token_buckets=[64],
    )
    plans = watch(llm.core)
    prompts = [prompt(i, n) for i, n in enumerate((5, 70, 130, 40))]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    got = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    for words, tokens in zip(prompts, got, strict=True):
        logprobs = oracle_logprobs(model, words + tokens)
        for at, token in enumerate(tokens, start=len(words) - 1):
            first, second = np.sort(logprobs[at])[::-1][:2]
            assert token == logprobs[at].argmax() or first - second < 1e-4
    llm.core.check()
    decoding = [
        plan.occupancy.pages_used for plan in plans if plan.n_decode == 4 == len(plan.chunks)
    ]
    assert decoding and max(decoding[8:]) <= 4 * (32 // 8 + 2), (
        "all of them: 4 * (61 + 100) positions are 88 pages"
    )
    assert llm.core.ledger.totals["preempted"] == 0
