"""The simulator against schedules worked out by hand, and against the engine's own loop on another
fake device.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import VOCAB, FakeClock, FakeRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from step_tables import constant_table

from jitney.engine.cli import main
from jitney.engine.common.history import RequestRecords
from jitney.engine.common.records import ROW_KINDS, STEP_DTYPE, Ledger
from jitney.engine.common.request_record import Stay, stays_of
from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.common.summary import Slo
from jitney.engine.common.trace import Arrival, TraceLine
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.measuring.engine_shape import EngineShape
from jitney.engine.core.measuring.virtual import HostTimes, VirtualDevice
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.page_tables import PageTables
from jitney.engine.core.scheduler.plan import Plan, StepResult, StepWork
from jitney.engine.core.scheduler.scheduler import Scheduler
from jitney.engine.lab.simulation.drive import Offer, drive
from jitney.engine.lab.simulation.engine_run import EngineRun
from jitney.engine.lab.simulation.recordings import Recording
from jitney.engine.lab.simulation.simulator import simulate
from jitney.engine.lab.simulation.step_table import Curve, StepTable
from jitney.engine.lab.simulation.workload import Closed, Fixed, Poisson, Uniform, synthesise

POLICIES = ("static", "dynamic", "continuous")
SECOND = constant_table(1.0)


def shape(
    *,
    seats: int = 2,
    budget: int = 16,
    pages: int = 65,
    page_size: int = 4,
    context: int = 128,
    **limits: Any,
) -> EngineShape:
    held_to = replace(SchedulerLimits(seats, context, max_waiting_requests=10_000), **limits)
    return EngineShape(held_to, Buckets.of(max_seats=seats, token_budget=budget), pages, page_size)


def end_of(stay: Stay) -> float:
    assert stay.end is not None
    return stay.end


def times_of(run: EngineRun) -> list[tuple[float | None, float | None, float]]:
    """(boarded, first token, finished) of each request."""
    return [(t.boarded, t.first_token, t.end) for t in run.requests]


def stays_in(run: EngineRun) -> list[tuple[int, int, float, float | None, float | None]]:
    """(seat, request, start, first token, end) of each stay."""
    return [(s.seat, r.number, s.start, s.first_token, s.end) for r, s in stays_of(run.requests)]


def _ten_tokens() -> EngineRequest:
    sampling = SamplingParams(max_tokens=10)
    return EngineRequest(id="a", prompt=[1] * 4, sampling=sampling, arrival=0.0)


def test_steps_in_segments_may_take_no_time():
    """A fit to measured times may give 0."""
    buckets = replace(Buckets.of(max_seats=2, token_budget=1024), most_segments=6)
    cut = replace(shape(budget=1024, pages=600, context=2048), buckets=buckets, plans_late=True)
    run = simulate([Arrival(0.0, 1000, 1), Arrival(1.5, 4, 1)], cut, constant_table(0.0))
    assert [request.finished for request in run.requests] == [0.0, 1.5]


@pytest.mark.parametrize(("late", "second"), [(False, 8.0), (True, 7.0)])
def test_who_comes_while_a_step_runs_is_in_the_next_one_where_the_engine_plans_late(
    late: bool, second: float
):
    """Planned at once, the step that begins at 6 s was planned at 5 s."""
    arrivals = [Arrival(0.0, 4, 10), Arrival(5.5, 3, 1)]
    run = simulate(arrivals, replace(shape(), plans_late=late), SECOND)
    assert [request.first_token for request in run.requests] == [1.0, second]
    assert run.requests[0].finished == 10.0, "no step waits for its plan"


def test_where_nobody_could_board_the_next_step_is_planned_at_once():
    core = VirtualDevice(SECOND).new_core(replace(shape(seats=1), plans_late=True))
    core.add(_ten_tokens())
    for _ in range(6):
        core.step()
        assert core.late_plan_slack_s == 0.0 == core.pause_s


def test_planning_is_delayed_by_what_a_step_takes_less_the_time_of_a_launch():
    """At first to 85 % of the step, when its end may be near, and then to its end."""
    device = VirtualDevice(StepTable(SECOND.curves, HostTimes(before=0.02)))
    core = device.new_core(replace(shape(), plans_late=True))
    core.add(_ten_tokens())
    waits = []
    for _ in range(6):
        core.step()
        waits.append(round(core.late_plan_slack_s, 3))
    assert waits == [0.0] * 4 + [0.83] * 2, "three steps of a bucket must have been measured"
    ends = device.clock() + 1.0 - 0.02
    while core.late_plan_slack_s:
        device.clock.wait_until(device.clock() + core.late_plan_slack_s)
    assert 0.0 <= ends - device.clock() < 0.002, "the next step is ready when this one ends"
    core.abort("a")
    assert core.late_plan_slack_s == 0.0 and core.step().outputs[0].finish == "abort"


def test_planning_is_delayed_beyond_the_quickest_step_where_the_device_idles_little():
    """Steps of 1 s, one in ten of half of that. Planned for the quick ones, every second request
    would miss the step after the one in which it arrives.
    """
    table = StepTable(SECOND.curves, HostTimes(before=0.02), {"decode": [0.5] + [1.0] * 9})
    device = VirtualDevice(table)
    core = device.new_core(replace(shape(), plans_late=True))
    offer = Offer([0.0], lambda _, at: Arrival(at, 4, 120).request("a", [1] * 4, at))
    steps = drive(core, device.clock, offer, RequestRecords()).records
    took = np.round(steps["device_s"].astype(float), 2)
    assert set(took[60:].tolist()) == {0.5, 1.0}, "a step is timed to the moment when it is done"
    assert steps["gap_s"].sum() < 0.02 * steps["device_s"].sum()
    ends = 0.02 + np.cumsum(steps["gap_s"] + steps["device_s"], dtype=float)
    before_end = ends[60:-1] - steps["started"][61:]
    assert before_end.max() < 0.03, "a request that arrives until then is in the next step"


def test_three_requests_on_two_seats_by_hand():
    """Seconds:  0-1        1-2       2-3              3-4
    seat 0     A prompt   A 2nd     C prompt         C 2nd
    seat 1     B prompt   B 2nd     B 3rd            B 4th
    C boards at 1, when the third step is planned: A's last token is on its way then, and A needs no
    seat for it."""
    run = simulate([Arrival(0.0, 3, 2), Arrival(0.0, 3, 4), Arrival(0.0, 3, 2)], shape(), SECOND)
    assert times_of(run) == [(0.0, 1.0, 2.0), (0.0, 1.0, 4.0), (1.0, 3.0, 4.0)]
    assert stays_in(run) == [
        (0, 0, 0.0, 1.0, 1.0),
        (1, 1, 0.0, 1.0, 4.0),
        (0, 2, 1.0, 3.0, 4.0),
    ]
    rows = run.records[["prefill", "decode", "padding"]].tolist()
    assert rows == [(6, 0, 2), (0, 2, 0), (3, 1, 0), (0, 2, 0)]


def test_the_host_hides_behind_the_device_until_it_is_the_slower_one():
    """before the launch 0.3 s and after the result 0.2 s: hidden in a step of 1 s, not in one of
    0.1 s.
    """
    host = HostTimes(before=0.3, after=0.2)
    slow = simulate(
        [Arrival(0.0, 4, 10)], shape(), StepTable([Curve(2, 2, 1.0), Curve(8, 2, 1.0)], host)
    )
    # The first result comes at 0.3 + 1 and is told 0.2 later; then one a second.
    assert times_of(slow) == [(0.0, pytest.approx(1.5), pytest.approx(10.5))]
    assert slow.records["gap_s"].sum() == 0
    fast = simulate(
        [Arrival(0.0, 4, 10)], shape(), StepTable([Curve(2, 2, 0.1), Curve(8, 2, 0.1)], host)
    )
    assert fast.figures()["itl_s"]["p50"] == pytest.approx(0.5)
    assert fast.records["device_s"][2:-1].tolist() == pytest.approx(
        [0.5] * 7
    )  # until the host looks


def test_static_dynamic_and_continuous_are_three_policies():
    """Two seats, a second between arrivals, steps of a tenth: each at its own moment."""
    arrivals = [Arrival(float(second), 4, 2) for second in range(4)]
    tenth = constant_table(0.1)
    boarded = {
        policy: [t.boarded for t in simulate(arrivals, shape(policy=policy), tenth).requests]
        for policy in POLICIES
    }
    assert boarded["static"] == [1.0, 1.0, 3.0, 3.0], "when there are two, and not before"
    assert boarded["dynamic"] == pytest.approx([0.2, 1.2, 2.2, 3.2]), "after 200 ms"
    assert boarded["continuous"] == [0.0, 1.0, 2.0, 3.0]
    hurried = shape(policy="static", static_timeout_ms=500.0)
    assert [t.boarded for t in simulate(arrivals, hurried, tenth).requests] == pytest.approx(
        [0.5, 1.5, 2.5, 3.0]
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 5),
    count=st.integers(1, 40),
    seed=st.integers(0, 1000),
    concurrency=st.sampled_from((None, 2, 7)),
)
def test_static_boards_its_number_at_a_time(
    size: int, count: int, seed: int, concurrency: int | None
):
    """Every batch but the last is whole, and boards when the one before has left its seats.

    Answers have two tokens or more: one of a single token gives its seat on in the very next plan,
    which the host makes at the same virtual time, and batches are told apart by their times here.
    """
    arrivals = synthesise(count, Uniform(1, 9), Uniform(2, 15), Poisson(0.5), seed)
    run = simulate(
        arrivals,
        shape(seats=5, pages=80, policy="static", batch_size=size),
        SECOND,
        concurrency=concurrency,
    )
    batches: dict[float, list[Stay]] = {}
    for _, stay in stays_of(run.requests):
        batches.setdefault(stay.start, []).append(stay)
    in_turn = [batches[start] for start in sorted(batches)]
    whole = min(size, concurrency or size)
    assert [len(batch) for batch in in_turn[:-1]] == [whole] * (len(in_turn) - 1)
    assert sum(map(len, in_turn)) == count and len(in_turn[-1]) <= whole
    for before, after in pairwise(in_turn):
        # The seats are given on while the last tokens are on their way: a step of a second at most.
        assert max(end_of(stay) for stay in before) <= after[0].start + 1.001


@pytest.mark.usefixtures("rash")
def test_seats_in_use_are_counted_from_the_stays():
    """Few pages: sequences are preempted and wait in the queue, which is nobody's seat."""
    arrivals = synthesise(30, Uniform(4, 12), Uniform(15, 30), Poisson(2.0), 1)
    run = simulate(arrivals, shape(seats=4, pages=15), SECOND)
    assert run.records["preempted"].sum() > 10
    busy = np.zeros(4)
    for _, stay in stays_of(run.requests):
        busy[stay.seat] += end_of(stay) - stay.start
    figures = run.figures()
    assert figures["seat_fill"] == pytest.approx(busy.sum() / (4 * run.seconds))
    in_queue_too = sum(t.end - t.boarded for t in run.requests if t.boarded is not None) / (
        4 * run.seconds
    )
    assert figures["seat_fill"] < 0.9 * in_queue_too and (busy <= run.seconds + 1e-9).all()


def test_drafts_that_are_right_by_a_chance_save_steps():
    arrivals = [Arrival(0.0, 8, 100), Arrival(0.0, 8, 100)]
    plain = simulate(arrivals, shape(page_size=8), SECOND)
    drafted = simulate(arrivals, shape(page_size=8).drafting(0.8, 3), SECOND)
    tokens = [sum(each.n_output for each in run.requests) for run in (plain, drafted)]
    assert tokens == [200, 200]
    # 1 + 0.8 + 0.64 + 0.512 tokens a step, but for the first ones and the last
    assert 100 / 2.952 < drafted.seconds < 100 / 2 < plain.seconds
    sums = {kind: int(drafted.records[kind].sum()) for kind in ("accepted", "rejected")}
    assert 0.55 < sums["accepted"] / sum(sums.values()) < 0.75


def test_what_drafts_takes_time_beside_the_steps(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, int]] = []
    table = constant_table(1.0)

    def draft_seconds(work: StepWork, drafts: int) -> float:
        asked.append((work.decode, drafts))
        return 0.01 * drafts

    monkeypatch.setattr(table, "draft_seconds", draft_seconds)
    arrivals = [Arrival(0.0, 8, 100), Arrival(0.0, 8, 100)]
    records = simulate(arrivals, shape(page_size=8).drafting(0.8, 3), table).records
    rows, drafts = zip(*asked, strict=True)
    assert (max(rows), max(drafts), min(drafts)) == (2, 3, 0)
    assert records["device_s"].sum() == pytest.approx(len(records) + 0.01 * sum(drafts))


def test_recorded_hits_are_found_again():
    """Pages of 4: of a prompt of 12, of which 8 were found, 4 rows are computed; and never the
    whole of it.
    """
    arrivals = [
        Arrival(0.0, 12, 2, n_cached=8),
        Arrival(10.0, 12, 2, n_cached=12),
        Arrival(20.0, 12, 2),
    ]
    for policy in POLICIES:
        run = simulate(arrivals, shape(policy=policy), SECOND)
        assert run.records["prefill"].sum() == 4 + 4 + 12, policy
        assert run.records["cached_tokens"].sum() == 16
        assert [t.n_output for t in run.requests] == [2, 2, 2]


@pytest.mark.usefixtures("rash")
def test_what_was_found_once_is_found_after_a_preemption():
    arrivals = [Arrival(0.0, 12, 20, n_cached=8) for _ in range(6)]
    run = simulate(arrivals, shape(seats=3, pages=15), SECOND)
    assert run.records["preempted"].sum() > 0 and [t.n_output for t in run.requests] == [20] * 6
    assert run.records["prefill"].sum() == 6 * 4, "hits are counted once a request"


class TimedRunner(FakeRunner):
    """The numpy device of the other tests, with a second for every step, and a diary of what it was
    told to compute.
    """

    def __init__(self, pages: int, page_size: int, seats: int, clock: FakeClock):
        super().__init__(pages, page_size, seats)
        self.clock, self.free_at, self.diary = clock, 0.0, []
        self.due: dict[int, float] = {}

    def batch(self, plan: Plan):
        self.diary.append(diary_of(plan))
        return super().batch(plan)

    def launch(self, batch) -> StepResult:
        self.free_at = max(self.free_at, self.clock.now) + 1.0
        launched = super().launch(batch)
        self.due[id(launched)] = self.free_at
        return launched

    def fetch(self, launched: StepResult) -> StepResult:
        self.clock.now = max(self.clock.now, self.due[id(launched)])
        return super().fetch(launched)


def diary_of(plan: Plan) -> tuple:
    return (
        str(plan.bucket),
        [(c.seq.request.id, c.seq.seat, c.start, c.count, c.sample) for c in plan.chunks],
        [seq.request.id for seq in plan.boarded],
        [seq.request.id for seq in plan.preempted],
    )


def real_loop(arrivals: list[Arrival], engine: EngineShape) -> tuple[list[tuple], np.ndarray]:
    """The engine's own core and scheduler on the numpy device, with real prompts of those
    lengths.
    """
    clock, rng = FakeClock(), np.random.default_rng(0)
    runner = TimedRunner(engine.pages, engine.page_size, engine.limits.max_seats, clock)
    scheduler = Scheduler(
        engine.limits,
        engine.buckets,
        PageTables(PagePool(engine.pages, engine.page_size, retain=False)),
        clock,
        (),
        VOCAB,
    )
    core, waiting = EngineCore(scheduler, runner, Ledger(), clock), list(enumerate(arrivals))
    while waiting or core.has_work:
        while waiting and waiting[0][1].at <= clock.now:
            number, arrival = waiting.pop(0)
            core.add(
                EngineRequest(
                    id=str(number),
                    prompt=rng.integers(VOCAB, size=arrival.n_prompt).tolist(),
                    arrival=arrival.at,
                    sampling=SamplingParams(
                        temperature=0.0, max_tokens=arrival.n_output, ignore_eos=True
                    ),
                )
            )
        core.scheduler.boarding.more_to_come = bool(waiting)
        if core.has_work and not core.pause_s:
            core.step()
        else:
            clock.now += 1 / 64  # every time in this test is a multiple of this
    return runner.diary, core.ledger.since(0)


@pytest.mark.usefixtures("rash")
@pytest.mark.parametrize("policy", POLICIES)
def test_the_steps_are_those_of_the_real_core(policy: str):
    """Plan by plan, row by row, with preemptions: 60 random requests at random times on 4 seats and
    few pages.
    """
    rng = np.random.default_rng(1)
    arrivals = [
        Arrival(float(at), int(n), int(m))
        for at, n, m in zip(
            np.cumsum(rng.integers(0, 128, 60)) / 64,
            rng.integers(1, 24, 60),
            rng.integers(1, 20, 60),
            strict=True,
        )
    ]
    engine = shape(
        seats=4,
        budget=16,
        pages=17,
        context=64,
        policy=policy,
        max_wait_ms=1500.0,
        static_timeout_ms=1500.0,
    )
    diary: list[tuple] = []

    new_core = VirtualDevice.new_core

    def watched(device: VirtualDevice, *shape: Any) -> EngineCore:
        batch = device.batch
        device.batch = lambda plan: (diary.append(diary_of(plan)), batch(plan))[1]
        return new_core(device, *shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VirtualDevice, "new_core", watched)
        run = simulate(arrivals, engine, SECOND)
    real_diary, real_records = real_loop(arrivals, engine)
    assert diary == real_diary and len(diary) > 100
    same = [
        name for name in STEP_DTYPE.names or () if not name.endswith("_s") and name != "started"
    ]
    assert run.records[same].tolist() == real_records[same].tolist()
    assert run.records["preempted"].sum() > 0
    assert np.abs(run.records["started"] - real_records["started"]).max() < 1 / 64 + 1e-9


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    policy=st.sampled_from(POLICIES),
    seats=st.integers(1, 5),
    pages=st.integers(10, 40),
    count=st.integers(1, 30),
    seed=st.integers(0, 1000),
    order=st.sampled_from(("fcfs", "priority", "shortest", "fair")),
    concurrency=st.sampled_from((None, 1, 3, 100)),
)
def test_every_request_ends_and_the_ledger_closes(
    policy, seats, pages, count, seed, order, concurrency
):
    arrivals = synthesise(count, Uniform(1, 20), Uniform(1, 15), Poisson(0.5), seed)
    run = simulate(
        arrivals,
        shape(seats=seats, pages=pages, policy=policy, order=order),
        SECOND,
        concurrency=concurrency,
    )
    assert [t.finish for t in run.requests] == ["length"] * count
    assert [(t.n_prompt, t.n_output) for t in run.requests] == [
        (a.n_prompt, a.n_output) for a in arrivals
    ]
    records = run.records
    assert (np.sum([records[kind] for kind in ROW_KINDS], axis=0) == records["bucket_tokens"]).all()
    # Nothing is shared: all prompt tokens are computed, and every output token but the last is fed
    # back.
    assert records["prefill"].sum() == sum(a.n_prompt for a in arrivals)
    assert records["decode"].sum() == sum(a.n_output - 1 for a in arrivals)
    for t in run.requests:
        assert t.boarded is not None and t.first_token is not None
        assert t.arrival <= t.boarded < t.first_token <= t.end
    for seat in range(seats):
        stays = [stay for _, stay in stays_of(run.requests) if stay.seat == seat]
        assert all(end_of(before) <= after.start for before, after in pairwise(stays))


def scattered(seed: int) -> EngineRun:
    arrivals = synthesise(40, Uniform(1, 30), Uniform(1, 20), Poisson(1.0), 3)
    table = StepTable(
        [Curve(2, 2, 0.1), Curve(8, 2, 0.2)], noise={"decode": [0.5, 1.0, 1.5], "mixed": [0.9, 1.1]}
    )
    return simulate(arrivals, shape(pages=20), table, seed=seed)


def test_the_same_seed_gives_the_same_run():
    first, again, other = scattered(0), scattered(0), scattered(1)
    assert first.requests == again.requests and first.records.tobytes() == again.records.tobytes()
    assert first.requests != other.requests
    decode = first.records[first.records["mixed"] == 0]["device_s"]
    assert np.unique(decode).tolist() == pytest.approx([0.05, 0.1, 0.15])
    assert decode.mean() == pytest.approx(0.1, rel=0.1)


def test_a_closed_loop_keeps_so_many_open():
    run = simulate(
        synthesise(12, Fixed(4), Uniform(1, 6), Closed(), 0), shape(), SECOND, concurrency=3
    )
    moments = sorted({t.arrival for t in run.requests})
    for moment in moments:
        assert (
            sum(t.arrival <= moment < t.end for t in run.requests) == 3
            or moment > run.requests[-1].arrival - 1e-9
        )
    assert run.requests[3].arrival == min(t.end for t in run.requests)


def test_refused_requests_are_counted_as_such():
    run = simulate([Arrival(0.0, 4, 50)] * 6, shape(seats=1, max_waiting_requests=2), SECOND)
    assert [t.finish for t in run.requests] == ["length"] * 3 + ["error"] * 3
    assert run.figures(slo=Slo(ttft_s=100.0), price_per_hour=2.0)["finish"] == {
        "length": 3,
        "error": 3,
    }


@pytest.fixture
def table_file(tmp_path: Path) -> Path:
    """A table of steps of 20 ms (decode) and 50 ms (mixed)."""
    table = StepTable([Curve(4, 4, 0.02), Curve(64, 8, 0.05)])
    (file := tmp_path / "table.json").write_text(json.dumps({"table": table.contents()}))
    return file


TRACE = [
    {
        "t": 0.0,
        "in": 8,
        "out": 3,
        "queue_s": 0.0,
        "ttft_s": 0.05,
        "e2e_s": 0.09,
        "finish": "length",
    },
    {"t": 1.0, "in": 8, "out": 2, "queue_s": 0.0, "ttft_s": 0.1, "e2e_s": 0.14, "finish": "length"},
]


def test_the_command_prints_the_error_beside_a_recording(tmp_path: Path, table_file: Path, capsys):
    (trace := tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, TRACE)))
    assert (
        main(
            shlex.split(
                f"simulate --table {table_file} --trace {trace} --max-seats 8 --json "
                f"{tmp_path / 'out.json'}"
            )
        )
        == 0
    )
    report = json.loads((tmp_path / "out.json").read_text())
    assert list(report["policies"]) == list(POLICIES)
    figures = report["policies"]["continuous"]
    assert figures["ttft_s"]["p50"] == pytest.approx(0.05) and figures["e2e_s"][
        "max"
    ] == pytest.approx(0.09)
    assert report["errors"]["continuous"]["ttft_p50_s"] == pytest.approx(0.05 / 0.075 - 1)
    assert report["errors"]["continuous"]["output_tok_s"] == pytest.approx(1.14 / 1.07 - 1)
    assert list(report["errors"]) == ["continuous"]
    assert f"{0.05 / 0.075 - 1:+.1%}" in capsys.readouterr().out
    measured = Recording.of(TraceLine.read_all(trace)).figures()
    assert measured is not None and measured["seconds"] == pytest.approx(1.14)


@pytest.mark.parametrize(
    ("timed", "traced", "told"),
    [
        ({"model": "m-1b", "device": "CPU A, 2 cores"}, ("m-1b", "CPU A, 2 cores"), ""),
        ({"model": "m-1b", "device": "CPU A, 2 cores"}, ("m-1b", "CPU B, 2 cores"), "CPU B"),
        ({"model": "m-1b", "device": "CPU A, 2 cores"}, ("m-8b", "CPU A, 2 cores"), "m-8b"),
        # Who wrote a table by hand, or an old trace, is believed.
        ({}, ("m-8b", "CPU A, 2 cores"), ""),
        ("h100", ("llama-3.1-8b", "NVIDIA H100 80GB HBM3"), ""),
        ("h100", ("llama-3.1-8b", "CPU A, 2 cores"), "CPU A"),
        ("h100", ("m-1b", "NVIDIA H100 80GB HBM3"), "m-1b"),
        ("h100", None, "does not say"),
    ],
)
def test_a_trace_of_another_machine_is_no_measure(
    timed: dict[str, str] | str,
    traced: tuple[str, str] | None,
    told: str,
    tmp_path: Path,
    table_file: Path,
    capsys: pytest.CaptureFixture[str],
):
    lines = [dict(line) for line in TRACE]
    if traced is not None:
        lines[0] |= {"model": traced[0], "device": traced[1]}
    (trace := tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["simulate", "--trace", str(trace), "--max-seats", "8", "--policy", "continuous"]
    if isinstance(timed, str):
        words += ["--device", timed, "--model", "llama-3.1-8b"]
    else:
        table_file.write_text(json.dumps(json.loads(table_file.read_text()) | timed))
        words += ["--table", str(table_file)]
    assert main([*words, "--json", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert bool(report["errors"]) == (not told)
    said = " ".join(capsys.readouterr().out.split())
    assert told in report["not_compared"] and report["not_compared"] in said


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "exactly one of"),
        (["--device", "h100", "--table", "x"], "exactly one of"),
        (["--device", "h9"], "unknown device"),
        (["--table", "/nonexistent"], "cannot be read"),
        (["--records", "/nonexistent.npz"], "cannot be read"),
        (["--device", "h100", "--requests", "0"], "at least 1"),
        (["--device", "l4", "--model", "llama-3.1-70b"], "does not fit"),
        (["--device", "h100", "--count", "0"], "--count"),
        (["--device", "h100", "--weights", "int3"], "int3"),
        (["--device", "h100", "--model", "llama-3.1-8b", "--policies", "other"], "unknown policy"),
    ],
)
def test_bad_flags_are_one_line(words: list[str], complaint: str, capsys):
    assert main(["simulate", *words]) in (1, 2)
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1


def test_records_calibrate_the_command(tmp_path: Path, capsys):
    run = simulate(
        synthesise(30, Uniform(1, 30), Uniform(1, 20), Poisson(1.0), 3),
        shape(seats=8, budget=64, pages=200),
        StepTable([Curve(4, 4, 0.02), Curve(64, 8, 0.05)]),
    )
    np.savez(tmp_path / "r.npz", continuous=run.records, other=np.zeros(3))
    assert (
        main(
            shlex.split(
                f"simulate --records {tmp_path / 'r.npz'} --seats 8 --policies "
                "continuous --requests 20 --json -"
            )
        )
        == 0
    )
    out = capsys.readouterr().out
    figures = json.loads(out[: out.rindex("}") + 1])["policies"]["continuous"]
    assert figures["itl_s"]["p50"] == pytest.approx(0.02, rel=0.01)
    np.savez(tmp_path / "none.npz", other=np.zeros(3))
    assert main(["simulate", "--records", str(tmp_path / "none.npz")]) == 2
