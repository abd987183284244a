"""The three ways to batch on a fake device: when seats are taken and given back, what is padded,
the same tokens.
"""

from __future__ import annotations

import math
import random

import pytest
from fakes import (
    FakeClock,
    boarding_order,
    device_of,
    ends_of,
    make_core,
    make_request,
    picture,
    solo,
    tokens_of,
    watch,
)

from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.config.schema import EngineSection
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.policies import _ORDERS, POLICIES, Situation, make_policy

BATCHING = ("static", "dynamic")


def situation(now: float, arrivals: list[float], busy: int = 0) -> Situation:
    return Situation(now, 8 - busy, busy, len(arrivals), iter(arrivals))


def run_on(
    core: EngineCore, clock: FakeClock, seconds: float = 0.01, steps: int = 5000
) -> list[SequenceOutput]:
    """Step until idle, each step taking `seconds`; nobody else comes meanwhile."""
    core.scheduler.boarding.more_to_come = False
    outputs: list[SequenceOutput] = []
    for _ in range(steps):
        if not core.has_work:
            return outputs
        outputs += core.step().outputs
        clock.now += seconds
    raise AssertionError("still busy")


def states(core: EngineCore) -> str:
    """One letter a seat: . free, p prefill, d decode, h held."""
    return "".join({"free": "."}.get(seat.state, seat.state[0]) for seat in core.seat_map().seats)


def batching(policy: str, static_timeout_ms: float = 0.0) -> SchedulerLimits:
    """Batches of four, of which the oldest waits 1.5 seconds at most."""
    return SchedulerLimits(
        max_seats=8,
        context_length=64,
        policy=policy,
        batch_size=4,
        max_wait_ms=1500.0,
        static_timeout_ms=static_timeout_ms,
    )


@pytest.mark.parametrize(
    ("policy", "now", "arrivals", "busy", "boarders", "boards_at"),
    [
        ("continuous", 5.0, [4.0] * 3, 2, 6, 5.0),
        ("static", 5.0, [4.0] * 3, 0, 0, 5.75),  # three of four, the newest 1 s ago, 1.75 s to wait
        ("static", 5.0, [1.0, 2.0, 4.5], 0, 0, 6.25),
        ("static", 5.75, [1.0, 4.0], 0, 2, 5.75),
        ("static", 5.0, [5.0] * 6, 0, 4, 5.0),
        ("static", 5.0, [1.0] * 6, 1, 0, float("inf")),
        ("dynamic", 5.0, [4.0, 4.9], 0, 0, 5.5),
        ("dynamic", 5.5, [4.0, 5.5], 0, 2, 5.5),
        ("dynamic", 5.0, [5.0] * 6, 0, 4, 5.0),
        ("dynamic", 9.0, [1.0] * 6, 3, 0, float("inf")),
    ],
)
def test_the_number_that_may_board(
    policy: str, now: float, arrivals: list[float], busy: int, boarders: int, boards_at: float
):
    made = make_policy(batching(policy, static_timeout_ms=1750.0))
    assert made.boarders(situation(now, arrivals, busy)) == boarders
    if boarders:
        assert made.boards_at(situation(now, arrivals, busy)) <= now
    else:
        assert made.boards_at(situation(now, arrivals, busy)) == boards_at


def test_static_waits_for_its_number_until_the_traffic_ends():
    """Nobody has come for an hour, and still three of four do not board; the end of the traffic is
    known to a bench.
    """
    made = make_policy(batching("static"))
    assert made.boarders(situation(3605.0, [5.0] * 3)) == 0
    assert made.boards_at(situation(3605.0, [5.0] * 3)) == float("inf")
    last = situation(5.0, [5.0] * 3)._replace(more_to_come=False)
    assert made.boarders(last) == 3 and made.boards_at(last) == 5.0
    busy = situation(5.0, [5.0] * 3, busy=1)._replace(more_to_come=False)
    assert made.boarders(busy) == 0, "not even the last few board beside a batch"


def test_a_static_batch_drawn():
    """Prompts of 6, 2 and 3 tokens and 4, 2 and 3 outputs, batches of 3 in 4 seats, budget 12: 4
    columns a step.
    """
    core = make_core(seats=4, budget=12, eos=(), policy="static", batch_size=3)
    plans = watch(core)
    for name, prompt, outputs in (("a", 6, 4), ("b", 2, 2), ("c", 3, 3), ("next", 2, 1)):
        core.add(make_request(name, [1] * prompt, max_tokens=outputs))
    seats = []
    for _ in range(6):
        core.step()
        seats.append(states(core))
    assert [picture(plan) for plan in plans] == [
        [
            ("a", 0, 4, "prefill"),
            ("c", 0, 1, "prefill"),
        ],  # columns 0 to 3: b's prompt begins in column 4, c's in 3
        [("a", 4, 6, "prefill"), ("b", 0, 2, "prefill"), ("c", 1, 3, "prefill")],
        [("a", 6, 7, "decode"), ("c", 3, 4, "decode"), ("b", 2, 3, "decode")],
        [("a", 7, 8, "decode"), ("c", 4, 5, "decode")],
        [("a", 8, 9, "decode")],
    ]
    assert seats == ["ppp.", "ddd.", "ddd.", "dhd.", "dhh.", "...."], "the seats come back together"
    assert [(plan.rows, plan.reserved) for plan in plans] == [
        (5, 7),
        (6, 0),
        (3, 0),
        (2, 1),
        (1, 2),
    ]
    assert [str(plan.bucket) for plan in plans] == [
        "mixed-12",
        "mixed-8",
        "decode-4",
        "decode-4",
        "decode-4",
    ]
    assert sum(plan.rows + plan.reserved for plan in plans[:2]) == 3 * 6, (
        "every prompt is padded to the longest"
    )
    assert core.ledger.since(0)["padding"].tolist() == [7, 2, 1, 2, 3]


@pytest.mark.parametrize("policy", BATCHING)
def test_the_next_batch_boards_when_the_last_seat_is_given_back(policy: str):
    clock = FakeClock()
    core = make_core(seats=2, budget=8, eos=(), policy=policy, max_wait_ms=0.0, clock=clock)
    plans = watch(core)
    for name, tokens in (("a", 2), ("b", 6), ("c", 1), ("d", 1), ("e", 1)):
        core.add(make_request(name, [1, 2], max_tokens=tokens))
    run_on(core, clock)
    batches = [[seq.request.id for seq in plan.boarded] for plan in plans if plan.boarded]
    assert batches == [["a", "b"], ["c", "d"], ["e"]]
    assert [plan.number for plan in plans if plan.boarded] == [1, 7, 8], "b's last row is in step 6"


@pytest.mark.parametrize(
    ("policy", "pauses"),
    # Of batches of three two have come, at 0 and 0.4 s: half a second after the newest, or the
    # oldest.
    [("static", [0.5, 0.5, 0.01]), ("dynamic", [0.5, 0.1])],
)
def test_a_batch_waits_for_its_number_or_for_its_time(policy: str, pauses: list[float]):
    clock = FakeClock()
    limits = {"policy": policy, "batch_size": 3}
    core = make_core(
        seats=4, eos=(), static_timeout_ms=500.0, max_wait_ms=500.0, clock=clock, **limits
    )
    plans = watch(core)
    for number, pause in enumerate(pauses):
        clock.now = (0.0, 0.4, 0.89)[number]
        if number < 2:
            core.add(make_request(f"r{number}", [1], arrival=clock.now))
        core.step()
        assert not plans and core.pause_s == pytest.approx(pause)
    clock.now += core.pause_s
    core.step()
    assert boarding_order(plans) == ["r0", "r1"] and core.pause_s == 0.0


def test_a_static_server_without_a_timeout_waits_for_its_number():
    settings = EngineSection(max_seats=4, policy="static", batch_size=3, static_timeout_ms=0)
    assert SchedulerLimits.of(settings, context_length=64).static_timeout_s == math.inf
    clock = FakeClock()
    core = make_core(
        seats=4, eos=(), policy="static", batch_size=3, static_timeout_ms=0.0, clock=clock
    )
    plans = watch(core)
    for number in range(2):
        core.add(make_request(f"r{number}", [1]))
    core.step()
    clock.now = 1e6
    core.step()
    assert not plans and core.pause_s == math.inf
    core.add(make_request("r2", [1], arrival=clock.now))
    core.step()
    assert boarding_order(plans) == ["r0", "r1", "r2"]


def test_a_custom_order_boards(monkeypatch: pytest.MonkeyPatch):
    """Its name and its entry are all that an order takes."""
    latest = _ORDERS["fcfs"]._replace(key=lambda request, expected: -request.arrival)
    monkeypatch.setitem(_ORDERS, "latest", latest)
    core = make_core(seats=1, eos=(), order="latest")
    plans = watch(core)
    for number in range(3):
        core.add(make_request(f"r{number}", [1], arrival=0.1 * number, max_tokens=2))
    core.run_until_idle()
    assert boarding_order(plans) == ["r2", "r1", "r0"]


def test_a_pause_ends_with_a_deadline():
    clock = FakeClock()
    core = make_core(seats=2, policy="static", clock=clock)
    core.add(make_request("a", [1], deadline=2.0))
    assert core.pause_s == 2.0
    clock.now = 2.0
    assert ends_of(core.step().outputs)["a", 0].finish == "deadline" and not core.has_work


def test_siblings_board_in_one_batch():
    clock = FakeClock()
    core = make_core(seats=4, eos=(), policy="static", batch_size=3, clock=clock)
    plans = watch(core)
    request = make_request("a", [1, 2, 3], n=3, max_tokens=4, seed=5)
    core.add(request)
    run_on(core, clock)
    assert [len(plan.boarded) for plan in plans] == [3, 0, 0, 0]


def test_a_batch_whose_longest_is_aborted_goes_on():
    core = make_core(seats=2, budget=8, eos=(), policy="static")
    plans = watch(core)
    for name, prompt in (("long", 20), ("short", 2)):
        core.add(make_request(name, [1] * prompt, max_tokens=2))
    core.step()
    core.abort("long")
    assert states(core) == "hp"
    outputs = core.run_until_idle()
    assert tokens_of(outputs, "short") == solo(
        make_request("short", [1, 1], max_tokens=2), 0, 9, ()
    )
    assert len(plans) == 3 and states(core) == ".."


def test_the_news_of_seats_given_back_follow_the_ends():
    core = make_core(seats=2, eos=(), policy="static", batch_size=2)
    for name, tokens in (("a", 1), ("b", 3)):
        core.add(make_request(name, [1], max_tokens=tokens))
    told = []
    while core.has_work:
        report = core.step()
        told += [("end", out.request_id) for out in report.outputs if out.finish]
        told += [(event.event, event.seat) for event in report.events]
    assert told == [
        ("seated", 0),
        ("seated", 1),
        ("end", "a"),
        ("end", "b"),
        ("released", 0),
        ("released", 1),
    ]


@pytest.mark.usefixtures("rash")
def test_pages_run_out_in_a_batch():
    """Three of up to 18 positions on 8 pages of 4: who is preempted rides in the next batch, and
    has its tokens.
    """
    clock = FakeClock()
    core = make_core(seats=3, pages=9, budget=16, eos=(), policy="static", clock=clock)
    requests = [make_request(f"r{i}", [i + 1] * 4, max_tokens=14) for i in range(3)]
    for request in requests:
        core.add(request)
    outputs = run_on(core, clock)
    for request in requests:
        assert tokens_of(outputs, request.id) == solo(request, 0, 99, ())
    assert core.ledger.totals["preempted"] and core.ledger.closes()


def test_prompts_that_are_scored_are_one_batch_with_others():
    clock = FakeClock()
    core = make_core(seats=3, budget=16, eos=(), policy="static", clock=clock)
    prompts = {"a": [1, 2, 3, 4, 5, 6, 7], "b": [7, 8, 9, 1, 2], "c": [5, 5, 5, 6]}
    for name, prompt in prompts.items():
        core.add(
            make_request(name, prompt, max_tokens=3, prompt_logprobs=None if name == "c" else 1)
        )
    outputs = run_on(core, clock)
    for name, prompt in prompts.items():
        assert tokens_of(outputs, name) == solo(make_request(name, prompt, max_tokens=3), 0, 9, ())
        told = [
            out.prompt_logprobs
            for out in outputs
            if out.request_id == name and out.prompt_logprobs is not None
        ]
        assert [len(entries) for entries in told] == ([] if name == "c" else [len(prompt)])


@pytest.mark.parametrize("budget", [12, 40])
def test_the_same_tokens_under_every_policy(budget: int):
    """And the price of batching: each policy computes the same useful rows, and static pads the
    most.
    """
    rng = random.Random(budget)
    requests = [
        make_request(
            f"r{i}",
            [rng.randrange(1, 40) for _ in range(rng.randint(1, 20))],
            seed=i,
            max_tokens=rng.randint(1, 20),
            arrival=0.02 * i,
        )
        for i in range(40)
    ]
    answers, padding, rows = {}, {}, {}
    for policy in POLICIES:
        clock = FakeClock()
        core = make_core(
            seats=8,
            pages=65,
            budget=budget,
            context=41,
            retain=False,
            policy=policy,
            max_wait_ms=50.0,
            clock=clock,
        )
        waiting, outputs = list(requests), []
        while waiting or core.has_work:
            while waiting and waiting[0].arrival <= clock.now:
                core.add(waiting.pop(0))
            core.scheduler.boarding.more_to_come = bool(waiting)
            outputs += core.step().outputs
            clock.now += 0.01
            core.check()
        answers[policy] = {request.id: tokens_of(outputs, request.id) for request in requests}
        padding[policy] = core.ledger.totals["padding"] / core.ledger.totals["bucket_tokens"]
        rows[policy] = core.ledger.totals["prefill"] + core.ledger.totals["decode"]
        assert core.ledger.totals["bucket_tokens"] == device_of(core).rows_run
    assert answers["continuous"] == {r.id: solo(r, r.sampling.seed or 0, 99) for r in requests}
    assert answers["static"] == answers["dynamic"] == answers["continuous"]
    assert len(set(rows.values())) == 1 and padding["continuous"] < min(
        padding["static"], padding["dynamic"]
    )
