"""The scheduler's promises, one by one; each on a fake device that notices wrong pages
(fakes.py).
"""

from __future__ import annotations

import itertools

import pytest
from fakes import (
    VOCAB,
    FakeClock,
    boarding_order,
    code_of,
    ends_of,
    make_core,
    make_request,
    picture,
    score,
    solo,
    tokens_of,
    watch,
)

from jitney.engine.common.errors import RequestError
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.core.scheduler.kv_pages import _SHARED
from jitney.engine.core.scheduler.plan import StepResult
from jitney.engine.core.scheduler.queues import WaitingQueue
from jitney.engine.core.scheduler.sequence import Sequence
from jitney.engine.core.scheduler.sequence_factory import _sibling_seed


def test_decode_rows_go_first_and_prompts_fill_the_budget():
    core = make_core(seats=4, budget=8, eos=())
    plans = watch(core)
    core.add(make_request("a", [1] * 6, max_tokens=6))
    core.add(make_request("b", [2] * 11, max_tokens=2))
    core.run_until_idle()
    assert [picture(plan) for plan in plans[:4]] == [
        [("a", 0, 6, "prefill"), ("b", 0, 2, "prefill")],
        [("a", 6, 7, "decode"), ("b", 2, 9, "prefill")],
        [("a", 7, 8, "decode"), ("b", 9, 11, "prefill")],
        [("b", 11, 12, "decode"), ("a", 8, 9, "decode")],
    ]  # the longer context first
    assert [str(plan.bucket) for plan in plans[:4]] == ["mixed-8", "mixed-8", "mixed-8", "decode-4"]


def test_a_seat_freed_is_taken_in_the_very_next_plan():
    """a's second and last token is sampled in plan 2; b boards in plan 3, before that token is even
    known.
    """
    core = make_core(seats=1, budget=8, eos=())
    plans = watch(core)
    core.add(make_request("a", [1, 2], max_tokens=2))
    core.add(make_request("b", [3, 4], max_tokens=2))
    outputs = core.run_until_idle()
    assert [picture(plan)[0][0] for plan in plans] == ["a", "a", "b", "b"]
    assert core.ledger.totals["past_end"] == 0
    for name, prompt in (("a", [1, 2]), ("b", [3, 4])):
        assert tokens_of(outputs, name) == solo(make_request(name, prompt, max_tokens=2), 0, 9, ())


def test_a_seat_freed_by_a_stop_is_taken_in_the_plan_after_the_news():
    core = make_core(seats=1, budget=8, eos=())
    plans = watch(core)
    stop = solo(make_request("a", [1, 2], max_tokens=1), 0, 9, ())
    core.add(make_request("a", [1, 2], stop_token_ids=tuple(stop)))
    core.add(make_request("b", [3, 4], max_tokens=1))
    core.run_until_idle()
    assert [picture(plan) for plan in plans] == [
        [("a", 0, 2, "prefill")],
        [("a", 2, 3, "decode")],
        [("b", 0, 2, "prefill")],
    ]


@pytest.mark.parametrize(
    ("order", "boards"), [("fcfs", ["a", "b", "c", "d"]), ("priority", ["d", "b", "c", "a"])]
)
def test_the_order_of_boarding(order: str, boards: list[str]):
    core = make_core(seats=1, budget=8, order=order)
    plans = watch(core)
    for name, priority in (("a", 5), ("b", 0), ("c", 0), ("d", -1)):
        core.add(make_request(name, [1, 2], max_tokens=2, priority=priority))
    core.run_until_idle()
    assert boarding_order(plans) == boards


def test_no_request_starves():
    """A prompt as big as the pool boards before all who came later, and a stream gets a token in
    every step.
    """
    core = make_core(seats=3, pages=17, budget=8, context=64, eos=())
    plans = watch(core)
    core.add(make_request("stream", [1], max_tokens=30))
    core.step()
    core.add(make_request("small0", [1] * 5, max_tokens=3))
    core.add(make_request("big", [2] * 50, max_tokens=14))
    for i in range(1, 20):
        core.add(make_request(f"small{i}", [1] * 5, max_tokens=3))
    outputs = core.run_until_idle(1000)
    firsts = list(dict.fromkeys(boarding_order(plans)))
    assert firsts == ["stream", "small0", "big", *(f"small{i}" for i in range(1, 20))]
    assert len(tokens_of(outputs, "big")) == 14
    rows = [sum(chunk.seq.request.id == "stream" for chunk in plan.chunks) for plan in plans]
    assert rows[:30] == [1] * 30


@pytest.mark.usefixtures("rash")
def test_no_livelock_when_each_needs_nearly_the_whole_pool():
    """10 requests of up to 41 positions on 11 pages of 4: at most one can finish at a time, and all
    do.
    """
    core = make_core(seats=4, pages=12, budget=16, context=42, eos=())
    requests = [make_request(f"r{i}", [i + 1] * 2, max_tokens=40) for i in range(10)]
    for request in requests:
        core.add(request)
    outputs = core.run_until_idle(10 * 40 * 3)
    for request in requests:
        assert tokens_of(outputs, request.id) == solo(request, 0, 99, ())
    assert core.ledger.totals["preempted"] > 5
    decoded = sum(len(tokens_of(outputs, request.id)) - 1 for request in requests)
    assert core.ledger.totals["decode"] == decoded and core.ledger.totals["prefill"] == 20


@pytest.mark.usefixtures("rash")
@pytest.mark.parametrize(
    ("order", "priorities", "boards"),
    [
        ("fcfs", [0, 0], ["r0", "r1", "r1"]),  # the youngest loses its seat
        ("priority", [9, 0], ["r1", "r0", "r0"]),  # the class served last loses it
        ("fcfs", [0, 0, 0], ["r0", "r1", "r1", "r2"]),  # preempted before fresh
    ],
)
def test_the_last_to_be_served_is_preempted_and_repeats_no_token(
    order: str, priorities: list[int], boards: list[str]
):
    core = make_core(seats=2, pages=7, budget=16, order=order, eos=())
    plans = watch(core)
    requests = [
        make_request(f"r{i}", [i + 1] * 8, max_tokens=10, priority=priority)
        for i, priority in enumerate(priorities)
    ]
    for request in requests:
        core.add(request)
    outputs = core.run_until_idle(300)
    assert boarding_order(plans)[: len(boards)] == boards
    assert max(len(plan.preempted) for plan in plans) == 1
    for request in requests:
        assert tokens_of(outputs, request.id) == solo(request, 0, 99, ())


@pytest.mark.usefixtures("rash")
def test_no_sequence_boards_while_its_token_is_in_flight():
    """Three plans without a commit: "young" is preempted, has room again, and must still wait for
    its token.
    """
    core = make_core(seats=2, pages=6, budget=16, eos=())
    scheduler = core.scheduler
    for i, name in enumerate(("old", "young")):
        scheduler.add(make_request(name, [i + 1] * 7, max_tokens=10))
    plans = [plan for _ in range(3) if (plan := scheduler.plan(0.0)) is not None]
    assert [len(plan.preempted) for plan in plans] == [0, 0, 1]
    scheduler.abort("old")
    assert scheduler.plan(0.0) is None
    for plan in plans:
        scheduler.commit(plan, StepResult([9] * len(plan.chunks)), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None and [picture(plan)[0][:2], plan.boarded[0].n_output] == [
        ("young", 4),
        2,
    ]


def test_boarding_leaves_each_seated_sequence_a_page_to_grow_into():
    """Of 5 pages "old" holds 2; a prompt of 3 pages would fit now, and be preempted 1 token
    later.
    """
    core = make_core(seats=2, pages=6, budget=16, eos=())
    plans = watch(core)
    core.add(make_request("old", [1] * 7, max_tokens=4))
    core.step()
    core.add(make_request("young", [2] * 12, max_tokens=1))
    core.run_until_idle()
    assert core.ledger.totals["preempted"] == 0
    assert [plan.number for plan in plans if plan.boarded] == [1, 5]


def test_the_preempted_stand_before_the_fresh_of_their_class_alone():
    queue = WaitingQueue()
    for rank, preemptions in (((1, 9, 0), 1), ((0, 5, 1), 0), ((0, 7, 0), 1), ((0, 4, 0), 0)):
        request = make_request(str(rank), [1])
        queue.push(Sequence(request, 0, 0, [1], 1, rank=rank, preemptions=preemptions))
    order = []
    while (head := queue.head()) is not None:
        order.append(head.rank)
        queue.remove(head)
    assert order == [(0, 7, 0), (0, 4, 0), (0, 5, 1), (1, 9, 0)]


@pytest.mark.usefixtures("rash")
def test_rows_computed_again_are_recomputed_rows():
    """Prompt rows are prefill once; what preemption costs is counted apart (no prefix cache to
    soften it).
    """
    core = make_core(seats=2, pages=7, budget=16, retain=False, eos=())
    plans = watch(core)
    for i, name in enumerate(("old", "young")):
        core.add(make_request(name, [i + 1] * 8, max_tokens=10))
    core.run_until_idle(300)
    again = [chunk.recomputed for plan in plans for chunk in plan.chunks if chunk.recomputed]
    totals = core.ledger.totals
    assert again and totals["recomputed"] == sum(again) >= 8
    assert (totals["prefill"], totals["decode"]) == (16, 18)


@pytest.mark.parametrize("retain", [True, False])
def test_siblings_share_the_prompts_pages(retain: bool):
    """n = 3, 10 prompt tokens, pages of 4: two pages shared, and only the last two tokens are
    computed thrice.
    """
    core = make_core(seats=4, retain=retain, eos=())
    plans = watch(core)
    request = make_request("a", list(range(1, 11)), n=3, max_tokens=6, seed=5)
    core.add(request)
    outputs = [out for _ in range(3) for out in core.step().outputs]
    assert (core.scheduler.pool.states() == _SHARED).sum() == 2
    outputs += core.run_until_idle()
    assert [len(plan.boarded) for plan in plans[:3]] == [1, 2, 0], (
        "siblings board right after the leader's prompt"
    )
    assert core.ledger.totals["prefill"] == 10 + 2 + 2 and core.ledger.totals["cached_tokens"] == 16
    texts = [tokens_of(outputs, "a", i) for i in range(3)]
    assert texts == [solo(request, _sibling_seed(5, i), 99, ()) for i in range(3)]
    assert len(set(map(tuple, texts))) == 3
    assert [out.cached_tokens for out in outputs if out.queued_s is not None] == [0, 8, 8]


def test_siblings_outlive_their_leader():
    core = make_core(seats=4, budget=6, eos=())
    request = make_request("a", [1] * 15, n=3, max_tokens=3)
    core.add(request)
    core.step()
    core.abort("a", 0)
    outputs = core.run_until_idle()
    assert {key[1]: end.finish for key, end in ends_of(outputs).items()} == {
        0: "abort",
        1: "length",
        2: "length",
    }
    assert tokens_of(outputs, "a", 2) == solo(request, _sibling_seed(0, 2), 99, ())


def test_a_prompt_seen_before_costs_its_last_page():
    core = make_core(eos=())
    prompt = list(range(1, 13))
    for name in ("first", "again"):
        core.add(make_request(name, prompt, max_tokens=4))
        outputs = core.run_until_idle()
    assert outputs[0].cached_tokens == 8, (
        "of 12 tokens in pages of 4 the last must be computed for its logits"
    )
    assert core.ledger.totals["prefill"] == 12 + 4
    assert tokens_of(outputs, "again") == solo(
        make_request("again", prompt, max_tokens=4), 0, 9, ()
    )


def test_a_conversation_finds_the_pages_of_its_answer():
    core = make_core(eos=())
    first = make_request("turn1", [1, 2, 3], max_tokens=9)
    core.add(first)
    answer = tokens_of(core.run_until_idle(), "turn1")
    core.add(make_request("turn2", [1, 2, 3, *answer, 4, 5], max_tokens=2))
    outputs = core.run_until_idle()
    assert outputs[0].cached_tokens == 8  # of 11 positions computed, two full pages


def test_pages_of_an_answer_are_not_found_where_outputs_are_not_shared():
    """Prompt pages do, and nothing that nobody can find is kept."""
    core = make_core(eos=(), share_outputs=False)
    core.add(make_request("turn1", [1, 2, 3, 4, 5], max_tokens=9))
    answer = tokens_of(core.run_until_idle(), "turn1")
    assert core.scheduler.pool.n_cached == 1
    core.add(make_request("turn2", [1, 2, 3, 4, 5, *answer, 6], max_tokens=2))
    assert core.run_until_idle()[0].cached_tokens == 4
    core.check()


@pytest.mark.usefixtures("rash")
@pytest.mark.parametrize("share_outputs", [True, False])
def test_a_sequence_finds_the_pages_of_its_own_answer_after_a_preemption(share_outputs: bool):
    """Two that do not fit together, in a pool that keeps some pages of who lost its seat."""
    computed = {}
    for retain in (True, False):
        core = make_core(
            seats=2, pages=9, budget=16, retain=retain, eos=(), share_outputs=share_outputs
        )
        for i, name in enumerate(("old", "young")):
            core.add(make_request(name, [i + 1] * 6, max_tokens=14))
        outputs = core.run_until_idle(400)
        for i, name in enumerate(("old", "young")):
            request = make_request(name, [i + 1] * 6, max_tokens=14)
            assert tokens_of(outputs, name) == solo(request, 0, 99, ())
        computed[retain] = core.ledger.totals["recomputed"]
    assert computed[True] < computed[False], "pages found again are not computed again"


@pytest.mark.parametrize(("tenant", "salt"), [("b", ""), ("a", "x")])
def test_tenants_and_salts_do_not_share(tenant: str, salt: str):
    core = make_core(eos=())
    core.add(make_request("a", [1] * 12, max_tokens=1, tenant="a"))
    core.run_until_idle()
    core.add(make_request("b", [1] * 12, max_tokens=1, tenant=tenant, salt=salt))
    assert core.run_until_idle()[0].cached_tokens == 0


def test_without_prefix_cache_requests_do_not_share():
    core = make_core(retain=False, eos=())
    for name in ("a", "b"):
        core.add(make_request(name, [1] * 12, max_tokens=4))
        core.step()
        core.step()
    assert core.ledger.totals["cached_tokens"] == 0
    core.run_until_idle()
    assert core.scheduler.pool.n_cached == 0


@pytest.mark.parametrize(("phase", "steps"), [("waiting", 0), ("prefill", 1), ("decode", 4)])
def test_deadline_in_any_phase(phase: str, steps: int):
    clock = FakeClock()
    core = make_core(seats=1, budget=8, clock=clock, eos=())
    if phase == "waiting":
        core.add(make_request("ahead", [1], max_tokens=50))
        core.step()
    core.add(make_request("late", [2] * 20, max_tokens=40, deadline=10.0))
    for _ in range(steps):
        core.step()
    state = core.seat_map().seats[0]
    assert (state.request_id == "late", state.state) == (
        phase != "waiting",
        phase.replace("waiting", "decode"),
    )
    clock.now = 9.9
    early = core.step().outputs
    assert not ends_of(early)
    clock.now = 10.0
    end = ends_of(core.step().outputs)["late", 0]
    assert (end.finish, code_of(end)) == ("deadline", "deadline_exceeded")
    assert "late" not in {seat.request_id for seat in core.seat_map().seats}
    core.run_until_idle()
    core.check()


@pytest.mark.parametrize("steps", range(8))
def test_abort_in_any_phase_ends_each_sequence_once(steps: int):
    core = make_core(seats=2, budget=6, eos=())
    core.add(make_request("a", [1] * 9, n=3, max_tokens=4))
    outputs = [out for _ in range(steps) for out in core.step().outputs]
    core.abort("a")
    core.abort("a")
    assert core.scheduler.pool.used == 0
    outputs += core.run_until_idle()
    assert len(ends_of(outputs)) == 3
    core.check()


REFUSED = [
    (make_request("r", []), "invalid_value", "prompt"),
    (make_request("r", [VOCAB]), "invalid_value", "prompt"),
    (make_request("r", [-1]), "invalid_value", "prompt"),
    (make_request("r", [1] * 40), "context_length_exceeded", "prompt"),
    (make_request("r", [1] * 30, max_tokens=11), "context_length_exceeded", "max_tokens"),
    (
        make_request("r", [1] * 30, max_tokens=None, min_tokens=11),
        "context_length_exceeded",
        "min_tokens",
    ),
    (make_request("r", [1], temperature=9.0), "invalid_value", "temperature"),
    (make_request("r", [1], logit_bias={VOCAB: 1.0}), "invalid_value", "logit_bias"),
    (make_request("open", [1]), "invalid_value", "request_id"),
]


@pytest.mark.parametrize(("request_", "code", "param"), REFUSED)
def test_refused_at_admission(request_, code: str, param: str):
    core = make_core(context=40)
    core.add(make_request("open", [1]))
    with pytest.raises(RequestError) as refusal:
        core.scheduler.add(request_)
    assert (refusal.value.info.code, refusal.value.info.param) == (code, param)
    core.check()


def test_what_can_never_fit_the_pool_is_refused():
    """5 pages of 4 hold 20 positions; the last token needs none."""
    core = make_core(pages=6, page_size=4, context=64, eos=())
    for prompt, max_tokens in ((10, 12), (21, 1), (21, None)):
        with pytest.raises(RequestError, match="KV cache") as refusal:
            core.scheduler.add(make_request("r", [1] * prompt, max_tokens=max_tokens))
        assert refusal.value.info.code == "context_length_exceeded"
    core.add(make_request("fits", [1] * 10, max_tokens=11))
    assert len(tokens_of(core.run_until_idle(), "fits")) == 11


@pytest.mark.parametrize(("pages", "tokens"), [(33, 54), (6, 11)])
def test_without_max_tokens_it_ends_with_the_context_or_the_pool(pages: int, tokens: int):
    core = make_core(pages=pages, context=64, eos=())
    core.add(make_request("a", [1] * 10, max_tokens=None))
    outputs = core.run_until_idle()
    assert ends_of(outputs)["a", 0].finish == "length"
    assert tokens_of(outputs, "a") == solo(
        make_request("a", [1] * 10, max_tokens=None), 0, tokens, ()
    )


def test_the_caps_on_waiting():
    """Two sequences may wait, and 20 tokens: prompts, and answers as long as they may get."""
    clock = FakeClock()
    core = make_core(seats=1, max_requests=2, max_tokens=20, clock=clock, eos=())
    add = core.scheduler.add
    add(make_request("sits", [1], max_tokens=1))
    core.step()
    add(make_request("waits", [1] * 11, max_tokens=4))
    with pytest.raises(RequestError, match="too many tokens") as refusal:
        add(make_request("long", [1] * 4, max_tokens=2))
    assert refusal.value.info.code == "queue_full" and refusal.value.info.retry_after is not None
    with pytest.raises(RequestError, match="too many sequences"):
        add(make_request("twins", [1], max_tokens=1, n=2))
    # A waiting tenant's place is kept until it lapses.
    clock.now = 100.0
    add(make_request("waits too", [1], max_tokens=4))
    core.check()
    core.run_until_idle()
    add(make_request("later", [1] * 5))


def test_a_request_above_the_token_cap_may_wait_alone():
    core = make_core(seats=1, max_tokens=20)
    core.add(make_request("sits", [1]))
    core.step()
    core.add(make_request("a", [1] * 30))
    core.add(make_request("b", [1]))
    ends = ends_of(core.run_until_idle())
    assert ends["a", 0].error is None
    assert code_of(ends["b", 0]) == "queue_full"


def test_a_request_that_finds_seats_does_not_wait_and_is_not_refused():
    core = make_core(seats=4, max_requests=1, max_tokens=2)
    core.add(make_request("a", [1] * 30))
    core.add(make_request("b", [1], n=3))
    core.add(make_request("c", [1], n=2))
    ends = ends_of(core.run_until_idle())
    assert [code_of(ends[name, 0]) for name in "abc"] == [None, None, "queue_full"]


def scores_of(
    outputs: list[SequenceOutput], name: str, index: int = 0
) -> list[tuple[float, list[int]] | None]:
    """What a sequence was told of its prompt's tokens."""
    told = [
        out.prompt_logprobs
        for out in outputs
        if (out.request_id, out.index) == (name, index) and out.prompt_logprobs is not None
    ]
    assert len(told) == 1
    return [entry and (entry.logprob, entry.top_ids) for entry in told[0]]


def wanted_scores(prompt: list[int], most: int) -> list[tuple[float, list[int]] | None]:
    """By the definition: each token given all before it."""
    entries = [score(prompt[: i + 1], token) for i, token in enumerate(prompt[1:])]
    return [None, *((entry.logprob, entry.top_ids[:most]) for entry in entries)]


@pytest.mark.usefixtures("rash")
@pytest.mark.parametrize("pages", [40, 11])
def test_prompt_logprobs_are_scored_once_each(pages: int):
    """With 10 pages one of the two is preempted; entries are still one per prompt token, in
    order.
    """
    core = make_core(seats=4, pages=pages, budget=16, eos=())
    plans = watch(core)
    prompts = {
        "a": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8],
        "b": [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9],
    }
    for name, prompt in prompts.items():
        core.add(make_request(name, prompt, max_tokens=16, prompt_logprobs=2))
    outputs = core.run_until_idle(500)
    for name, prompt in prompts.items():
        assert scores_of(outputs, name) == wanted_scores(prompt, 2)
        assert tokens_of(outputs, name) == solo(
            make_request(name, prompt, max_tokens=16), 0, 99, ()
        )
    assert max(sum(chunk.scored for chunk in plan.chunks) for plan in plans) > 10, (
        "as many as the step has rows"
    )
    assert sum(chunk.scored for plan in plans for chunk in plan.chunks) == 11 + 12
    assert (core.ledger.totals["preempted"] > 0) == (pages == 11)


@pytest.mark.usefixtures("rash")
def test_preempted_while_its_prompt_is_scored():
    """The second prompt has one row a step while the first outgrows the pool; no position is scored
    twice.
    """
    core = make_core(seats=2, pages=10, budget=16, eos=(), prefill_share=0.07)
    plans = watch(core)
    core.add(make_request("old", [1, 2, 3], max_tokens=30))
    core.step()
    prompt = [5, 4, 3, 2, 1] * 4
    core.add(make_request("scored", prompt, max_tokens=2, prompt_logprobs=0))
    outputs = core.run_until_idle(500)
    scored = [sum(chunk.scored for chunk in plan.chunks) for plan in plans]
    when = [len(plan.preempted) for plan in plans].index(1)
    assert 0 < sum(scored[:when]) < sum(scored) == 19
    assert scores_of(outputs, "scored") == wanted_scores(prompt, 0)


@pytest.mark.parametrize(("seats", "budget", "steps"), [(1, 512, 16), (32, 512, 16), (1, 64, 63)])
def test_scored_prompts_take_rows_of_the_token_budget(seats: int, budget: int, steps: int):
    """4,000 tokens, however few the seats."""
    core = make_core(seats=seats, pages=260, page_size=16, budget=budget, context=4096, eos=())
    plans = watch(core)
    prompt = [(7 * i + i // 50) % 40 for i in range(4000)]
    core.add(make_request("a", prompt, max_tokens=1, prompt_logprobs=1))
    outputs = core.run_until_idle()
    assert len(plans) <= steps
    assert scores_of(outputs, "a")[:300] == wanted_scores(prompt[:300], 1)
    assert len(scores_of(outputs, "a")) == 4000


def test_a_scored_prefix_is_scored_and_computed_once():
    """Of 48 tokens that were scored the last page is computed again: its last row scores the first
    other token.
    """
    core = make_core(seats=2, pages=60, budget=64, eos=())
    plans = watch(core)
    start = [(3 * i) % 40 for i in range(50)]
    counts = {}
    for name, prompt in {
        "first": [*start, 1, 2],
        "second": [*start, 3, 4, 5],
        "same": [*start, 1, 2],
    }.items():
        core.add(make_request(name, prompt, max_tokens=1, prompt_logprobs=2))
        before = len(plans)
        outputs = core.run_until_idle()
        assert scores_of(outputs, name) == wanted_scores(prompt, 2)
        chunks = [chunk for plan in plans[before:] for chunk in plan.chunks]
        counts[name] = sum(chunk.count for chunk in chunks), sum(chunk.scored for chunk in chunks)
    assert counts == {"first": (52, 51), "second": (53 - 44, 5), "same": (52 - 44, 4)}


def test_what_is_known_of_a_prefix_serves_fewer_alternatives_only():
    core = make_core(seats=2, pages=60, budget=64, eos=())
    plans = watch(core)
    prompt = [(3 * i) % 40 for i in range(30)]
    rows = []
    for number, most in enumerate((2, 4, 1, 0)):
        core.add(make_request(f"r{number}", prompt, max_tokens=1, prompt_logprobs=most))
        before = len(plans)
        assert scores_of(core.run_until_idle(), f"r{number}") == wanted_scores(prompt, most)
        rows.append(sum(chunk.count for plan in plans[before:] for chunk in plan.chunks))
    assert rows == [30, 30, 30 - 24, 30 - 24]


def test_a_prompt_that_is_scored_takes_fewer_rows_of_a_step_beside_others():
    """Rows with log-probabilities take longer, and those who decode would wait for them."""
    prompt = [(3 * i) % 40 for i in range(60)]
    rows: dict[bool, list[int]] = {}
    for beside in (False, True):
        core = make_core(seats=4, pages=60, budget=31, eos=(), prefill_share=1.0)
        if beside:
            core.add(make_request("stream", [1], max_tokens=60, ignore_eos=True))
            core.step()
            core.step()
        plans = watch(core)
        core.add(make_request("scored", prompt, max_tokens=2, prompt_logprobs=1))
        outputs = core.run_until_idle()
        assert scores_of(outputs, "scored") == wanted_scores(prompt, 1)
        chunks = [chunk for plan in plans for chunk in plan.prompt_chunks]
        rows[beside] = [chunk.count for chunk in chunks if chunk.seq.request.id == "scored"]
        assert sum(rows[beside]) == 60
    assert rows[False] == [31, 29]
    assert rows[True][:5] == [10] * 5


def test_siblings_have_their_prompt_scored_once():
    core = make_core(seats=4, pages=60, budget=64, eos=())
    plans = watch(core)
    prompt = [(3 * i) % 40 for i in range(30)]
    core.add(make_request("a", prompt, max_tokens=3, n=4, prompt_logprobs=2))
    outputs = core.run_until_idle()
    assert all(scores_of(outputs, "a", index) == wanted_scores(prompt, 2) for index in range(4))
    assert sum(chunk.scored for plan in plans for chunk in plan.chunks) == 29


def test_siblings_of_a_leader_that_left_have_its_scores():
    """Aborted with its last prompt row on the device: what comes back is its siblings' all the
    same.
    """
    core = make_core(seats=4, pages=60, budget=64, eos=())
    prompt = [(3 * i) % 40 for i in range(30)]
    core.add(make_request("a", prompt, max_tokens=3, n=2, prompt_logprobs=2))
    core.step()
    core.abort("a", 0)
    outputs = core.run_until_idle()
    assert scores_of(outputs, "a", 1) == wanted_scores(prompt, 2)


def test_logprobs_come_with_their_tokens():
    core = make_core(eos=())
    core.add(make_request("a", [1, 2], max_tokens=3, logprobs=1))
    outputs = core.run_until_idle()
    history = [1, 2]
    for out in outputs:
        want = score(history, out.tokens[0])
        assert out.logprobs is not None and out.logprobs[0].logprob == want.logprob
        assert out.logprobs[0].top_ids == want.top_ids[:1]
        history += out.tokens


@pytest.mark.parametrize(
    ("params", "plain"), [({}, True), ({"temperature": 1.0}, False), ({"logprobs": 0}, False)]
)
def test_a_step_is_plain_only_if_every_row_is(params: dict, plain: bool):
    core = make_core(eos=())
    plans = watch(core)
    core.add(make_request("greedy", [1]))
    core.add(make_request("other", [1], **params))
    core.step()
    assert plans[0].greedy_only is plain


def test_min_tokens_holds_even_if_the_device_lets_a_stop_through():
    core = make_core(eos=())
    whole = solo(make_request("a", [1, 2]), 0, 9, ())
    core.add(make_request("a", [1, 2], stop_token_ids=tuple(set(whole)), min_tokens=3))
    assert tokens_of(core.run_until_idle(), "a") == whole[:3]


def test_times_are_told_with_the_first_token():
    clock = FakeClock()
    core = make_core(clock=clock, eos=())
    clock.now = 3.0
    core.add(make_request("a", [1], arrival=1.0, max_tokens=2))
    core.step()
    clock.now = 7.0
    outputs = core.run_until_idle()
    assert [(out.queued_s, out.prefill_s) for out in outputs] == [(2.0, 4.0), (None, None)]


def test_seeds():
    admitted = []
    for seed in (None, None, 7):
        core = make_core()
        core.add(make_request("a", [1], n=3, seed=seed))
        admitted.append([seq.seed for seq in core.scheduler.sequences.requests.open_of("a")])
    assert admitted[2] == [7, _sibling_seed(7, 1), _sibling_seed(7, 2)]
    assert len(set(itertools.chain(*admitted))) == 9
    assert all(-(2**63) <= seed < 2**63 for seed in itertools.chain(*admitted))


def test_what_has_ended_is_forgotten():
    """Deadlines far away and discarded queue entries must not pile up."""
    core = make_core(seats=1, max_requests=10)
    core.add(make_request("sits", [1], max_tokens=60, ignore_eos=True))
    core.step()
    for i in range(1000):
        core.add(make_request(f"r{i}", [1], deadline=1e9))
        core.abort(f"r{i}")
    assert (
        len(core.scheduler.sequences.requests._deadlines) < 150
        and len(core.scheduler.sequences.live.queue._heap) < 150
    )
    assert len(ends_of(core.step().outputs)) == 1000
