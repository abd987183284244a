"""Drafts on a fake device: every sequence gets the tokens of a solo run, and no page is lost."""

from __future__ import annotations

import random

import pytest
from core_runs import assert_solo_tokens, cramped_core, random_events
from fakes import FakeClock, FakeRunner, StepFailed, device_of, make_core, make_request, watch
from grammars import tokenizer_json

from jitney.engine.common.history import RequestRecords
from jitney.engine.common.requests import Grammar
from jitney.engine.core.scheduler import speculation
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.open_sequences import OpenSequences
from jitney.engine.core.scheduler.page_tables import PageTables
from jitney.engine.core.scheduler.plan import Draft
from jitney.engine.core.scheduler.policies import make_order
from jitney.engine.core.scheduler.seats import Seats
from jitney.engine.core.scheduler.sequence import Sequence
from jitney.engine.core.scheduler.speculation import Speculation
from jitney.engine.core.scheduler.step_times import StepTimeEstimate


class DraftingRunner(FakeRunner):
    """Two of three of its drafts are right."""

    drafted = 3


class ConstrainedDraftingRunner(DraftingRunner):
    drafted_from = (1, 2)  # a and b


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are checked wherever a step has rows for them."""
    monkeypatch.setattr(speculation, "_PAYS", 0.0)


@pytest.mark.usefixtures("rash", "eager")
@pytest.mark.parametrize(("order", "seed"), [("fcfs", 1), ("fair", 2)])
def test_random_events_lose_nothing(order: str, seed: int):
    """Submit, abort, step, against a pool too small for all who sit, so that sequences with drafts
    in flight are preempted.
    """
    clock = FakeClock(tick=0.001)
    core = cramped_core(
        seats=6,
        order=order,
        clock=clock,
        device=DraftingRunner,
        max_drafts=3,
    )
    requests, outputs = random_events(core, clock, random.Random(seed), 4000)
    assert core.scheduler.pool.used == 0
    assert_solo_tokens(requests, outputs)
    totals = core.ledger.totals
    assert totals["accepted"] > 100 and totals["rejected"] > 100 and totals["preempted"] > 10


def test_right_drafts_of_an_aborted_request_are_counted():
    core = make_core(
        context=64, page_size=8, clock=FakeClock(tick=0.001), device=DraftingRunner, max_drafts=3
    )
    records = RequestRecords()
    request = make_request("one", [1, 2, 3], max_tokens=50, ignore_eos=True)
    records.submit(request)
    core.add(request)
    while core.ledger.totals["accepted"] < 5:
        records.apply(core.step(), 0, 0.0)
    core.abort("one")
    for report in (core.step(), core.step()):
        records.apply(report, 0, 0.0)
    [record] = records.oldest()
    assert record.finish == "abort"
    assert record.accepted == core.ledger.totals["accepted"]


def test_a_failed_step_with_drafts_loses_no_token(caplog: pytest.LogCaptureFixture):
    clock = FakeClock(tick=0.001)
    core = make_core(
        seats=6, context=64, page_size=8, clock=clock, device=DraftingRunner, max_drafts=3
    )
    request = make_request("one", [1, 2, 3], max_tokens=40, ignore_eos=True)
    core.add(request)
    outputs = []
    while core.ledger.totals["accepted"] < 5:
        outputs += core.step().outputs
    launch = core.runner.launch

    def fail_once(batch: object) -> None:
        core.runner.launch = launch
        raise StepFailed

    core.runner.launch = fail_once
    outputs += core.run_until_idle()
    core.check()
    assert_solo_tokens([request], outputs)
    assert "failed with 1 sequences" in caplog.text


def test_drafts_save_steps_and_none_stands_behind_the_last_position():
    steps = {}
    for drafts in (0, 3):
        core = make_core(
            seats=4,
            context=64,
            page_size=8,
            clock=FakeClock(tick=0.001),
            device=DraftingRunner,
            max_drafts=drafts,
        )
        core.add(make_request("one", [1, 2, 3], max_tokens=50, ignore_eos=True))
        core.run_until_idle()
        assert device_of(core).positions.max() == 51  # the last token needs no row
        steps[drafts] = core.ledger.steps
    assert steps[3] < 0.75 * steps[0]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("seats", [2, 4])
def test_drafts_stand_in_full_batches_and_beside_prompts(seats: int):
    core = make_core(
        seats=seats,
        context=64,
        page_size=8,
        clock=FakeClock(tick=0.001),
        device=DraftingRunner,
        max_drafts=3,
    )
    plans = watch(core)
    requests = [make_request("one", [1, 2, 3], max_tokens=50, ignore_eos=True)]
    for number in range(12):
        requests.append(make_request(f"{number}", [number] * 30, max_tokens=4, ignore_eos=True))
    outputs = []
    for request in requests:
        core.add(request)
        for _ in range(3):
            outputs += core.step().outputs
    outputs += core.run_until_idle()
    assert_solo_tokens(requests, outputs)
    drafted = [plan for plan in plans if any(chunk.draft for chunk in plan.chunks)]
    if seats == 2:
        assert any([len({chunk.seq for chunk in plan.chunks}) == seats for plan in drafted])
    else:
        assert any([plan.prompt_chunks for plan in drafted])


def test_as_many_drafts_are_checked_as_pay():
    """By what they add to a step, and the likeliest ones: none where they add what they save."""
    pages = PageTables(PagePool(65, 16))
    sequences = OpenSequences(Seats(4), pages, make_order("fcfs").queue)
    buckets = Buckets.of(max_seats=4, token_budget=32, seat_sizes=(1, 2, 4)).with_drafts(7)
    for seconds, expected in (
        ((1.0, 1.0, 1.0, 1.0), [7, 7]),
        ((1.0, 2.0, 5.0, 19.0), []),
        ((1.0, 1.0, 1.2, 9.0), [2]),
    ):
        times = StepTimeEstimate(buckets)
        for bucket, taken in zip(buckets.decode, seconds, strict=True):
            times.observe(bucket, taken)
        policy = Speculation(7, buckets, sequences, times)
        draft = Draft(32, 4)
        likely, unlikely = (sequence_of(name, right) for name, right in (("a", 0.9), ("b", 0.5)))
        draft.add_decode_rows([likely, unlikely])
        policy.widen(draft, 32)
        assert [seq.drafting for seq in (likely, unlikely) if seq.drafting] == expected


def sequence_of(name: str, right_drafts: float) -> Sequence:
    """One whose newest token is on the device, with pages for drafts."""
    request = make_request(name, [1, 2, 3], max_tokens=50)
    seq = Sequence(request, 0, 0, [1, 2, 3], 50, pages=[1, 2, 3], scheduled=3)
    seq.lookahead, seq.right_drafts = 7, right_drafts
    return seq


LETTERS = Grammar("regex", "[ab]{12,40}")
CONSTRAINED = {
    "grammar": {"grammar": LETTERS},
    "two": {"grammar": LETTERS, "min_tokens": 20, "n": 2},
    "forbidden": {"grammar": Grammar("regex", "(a[ab])*-"), "ignore_eos": True},
    "rules": {"allowed_token_ids": (1, 2, 5), "banned_sequences": ((1, 2, 1), (5, 5))},
    "free": {},
}


def test_drafts_under_grammars_change_no_token():
    """Nor do those that a grammar forbids or whose text has ended there."""
    answers = []
    for drafts in (0, 3):
        core = make_core(
            pages=65,
            context=64,
            page_size=8,
            clock=FakeClock(tick=0.001),
            device=ConstrainedDraftingRunner,
            max_drafts=drafts,
        )
        core.learn(tokenizer_json())
        for number, (name, params) in enumerate(CONSTRAINED.items()):
            core.add(make_request(name, [3, number], max_tokens=40, **params))
        found: dict[tuple[str, int], list[int]] = {}
        while core.has_work:
            for output in core.step().outputs:
                found.setdefault((output.request_id, output.index), []).extend(output.tokens)
            core.check()
        answers.append(found)
    assert answers[0] == answers[1]
    assert core.ledger.totals["accepted"] > 20 and core.ledger.totals["rejected"] > 20
