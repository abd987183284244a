"""Load beyond the capacity: the queue is bounded in work, and refused requests are told when there
should be room for them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from crowd import CrowdRun, crowd
from fakes import FakeClock, make_core, make_request
from step_tables import constant_table

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import EngineRequest, RequestGroup
from jitney.engine.common.trace import Arrival
from jitney.engine.config.schema import EngineSection
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.measuring.engine_shape import EngineShape
from jitney.engine.core.measuring.virtual import VirtualDevice, _FlyingStep
from jitney.engine.core.scheduler.admission import control
from jitney.engine.core.scheduler.admission.control import LONGEST_RETRY, ReturnTimes
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.plan import Plan, StepResult
from jitney.engine.core.scheduler.step_times import StepTimeEstimate
from jitney.engine.lab.simulation.simulator import simulate

#: 8 seats, answers of 35 tokens on average, 50 ms a step.
CAPACITY = 8 / (35 * 0.05)
TABLE = constant_table(0.05)
_BOUNDS = ("max_waiting_requests", "max_waiting_tokens", "max_predicted_wait_s")


def shape(**limits: Any) -> EngineShape:
    held_to = SchedulerLimits(
        8, 512, **({"max_waiting_requests": 64, "max_predicted_wait_s": 60.0} | limits)
    )
    return EngineShape(held_to, Buckets.of(max_seats=8, token_budget=128), 600, 16)


def open_loop(load: float, seconds: float) -> list[Arrival]:
    """Arrivals at a multiple of the capacity."""
    rng, now, arrivals = random.Random(1), 0.0, []
    while now < seconds:
        now += rng.expovariate(load * CAPACITY)
        arrivals.append(Arrival(now, rng.randint(8, 64), rng.randint(10, 60)))
    return arrivals


@pytest.fixture(scope="module")
def ten_times() -> CrowdRun:
    """Ten times the capacity for half a minute, and every refused request returns when told to."""
    return crowd(open_loop(10.0, 30.0), shape(), TABLE)


def test_requests_that_return_when_told_to_are_taken(ten_times: CrowdRun):
    """In the crowd and behind it, though no place is reserved for any of them."""
    assert ten_times.turned_away > 1000 and ten_times.returns >= ten_times.turned_away
    assert ten_times.share_taken >= 0.9
    assert ten_times.returns_during > 50
    assert ten_times.taken_during >= 0.8 * ten_times.returns_during
    assert len({round(wait, 3) for wait in ten_times.waits}) > 0.9 * len(ten_times.waits)


def test_admitted_requests_wait_no_longer_than_a_full_queue(ten_times: CrowdRun):
    """64 may wait."""
    assert ten_times.first_token_s(0.99) < 64 / CAPACITY


def test_seats_stay_full_and_no_request_is_refused_beside_a_free_one(ten_times: CrowdRun):
    last = max(record.end for record in ten_times.served)
    assert len(ten_times.served) / last > 0.9 * CAPACITY
    assert not ten_times.refused_beside_free_seats


def test_at_default_bounds_a_first_token_comes_within_the_bound_and_the_seats_stay_full():
    """256 may wait, or 60 s by prediction; answers here are so long that the latter is the less."""
    settings = EngineSection()
    limits = {name: getattr(settings, name) for name in _BOUNDS}
    arrivals = [
        msgspec.structs.replace(arrival, n_output=3 * arrival.n_output)
        for arrival in open_loop(10 / 3, 60.0)
    ]
    run = crowd(arrivals, shape(**limits), TABLE)
    assert run.turned_away > 500
    assert 0.4 * settings.max_predicted_wait_s < run.first_token_s(0.99)
    assert run.first_token_s(0.99) < settings.max_predicted_wait_s
    last = max(record.end for record in run.served)
    assert len(run.served) / last > 0.9 * CAPACITY / 3


def test_clients_that_return_are_taken_where_most_give_up():
    run = crowd(open_loop(10.0, 30.0), shape(), TABLE, obeys=0.1)
    assert run.share_taken >= 0.8 and not run.refused_beside_free_seats
    during = [record for record in run.served if record.end < 30.0]
    assert len(during) > 0.85 * 30.0 * CAPACITY, "no seat stays empty for those who gave up"


@pytest.mark.parametrize("order", ["fair", "shortest", "priority"])
def test_returning_requests_are_taken_in_any_order(order: str):
    assert crowd(open_loop(10.0, 10.0), shape(order=order), TABLE).share_taken >= 0.9


def test_a_bound_by_predicted_wait_keeps_it():
    limits = shape(max_waiting_requests=10_000, max_predicted_wait_s=10.0)
    run = crowd(open_loop(10.0, 15.0), limits, TABLE)
    assert run.share_taken >= 0.9 and run.first_token_s(0.99) < 11.0


def test_where_pages_are_short_free_seats_are_no_places():
    """Pages for two or three of eight: the wait is foreseen by who sits, and is kept."""
    limits = shape(max_waiting_requests=10_000, max_predicted_wait_s=20.0)
    short = replace(limits, pages=21)
    run = crowd(open_loop(10.0, 15.0), short, TABLE)
    assert run.share_taken >= 0.8 and run.first_token_s(0.99) < 1.5 * 20.0


def test_at_low_load_no_request_is_refused_by_default():
    """Nor at once when all seats are filled on an idle engine."""
    limits = SchedulerLimits.of(EngineSection(max_seats=8, token_budget=128), context_length=512)
    assert limits.max_predicted_wait_s == 60.0
    engine = EngineShape(limits, Buckets.of(max_seats=8, token_budget=128), 600, 16)
    quiet = simulate(open_loop(0.8, 100.0), engine, TABLE)
    burst = simulate([Arrival(0.0, 200, 250)] * 32, engine, TABLE)
    for run in (quiet, burst):
        assert {request.finish for request in run.requests} == {"length"}


def crowded_core(clock: FakeClock, **limits: Any) -> EngineCore:
    """Eight seats taken, and a step of 1 s known."""
    core = make_core(seats=8, pages=2000, context=2000, eos=(), clock=clock, **limits)
    for number in range(8):
        core.add(make_request(f"sits{number}", [1], max_tokens=200))
    fetch = core.runner.fetch

    def slow(launched: Any) -> StepResult:
        clock.now += 0.01
        return fetch(launched)

    core.runner.fetch = slow
    for _ in range(4):
        core.step()
    return core


def test_a_request_counts_as_many_sequences_as_it_has():
    """60 requests of 128 sequences are not 60 places of 256."""
    core = crowded_core(FakeClock(), max_requests=256, max_tokens=10**9)
    refused = 0
    for number in range(60):
        try:
            core.scheduler.add(make_request(f"r{number}", [1], n=128, max_tokens=1500))
        except RequestError as error:
            assert error.info.code == "queue_full"
            refused += 1
    assert (core.scheduler.n_waiting, refused) == (256, 58)
    core.check()


def test_the_wait_behind_many_siblings_is_foreseen():
    """By the work: 120 answers of 200 steps on 8 seats are ahead of the newcomer."""
    core = crowded_core(FakeClock(), max_requests=256, max_tokens=10**9, max_predicted_wait_s=1e6)
    core.scheduler.add(make_request("crowd", [1], n=120, max_tokens=200))
    wait = core.scheduler._admission.predicted_wait
    newcomer = core.scheduler.factory.leader(make_request("late", [1]), 10**6)
    assert wait.wait(newcomer) == pytest.approx(0.01 * 200 * (1 + 120 / 8), rel=0.05)


def test_a_crowd_of_siblings_is_no_wait_for_another_tenant_in_the_fair_order():
    core = crowded_core(FakeClock(), order="fair", max_requests=256, max_tokens=10**9)
    core.scheduler.add(make_request("crowd", [1], n=120, max_tokens=200, tenant="a"))
    newcomer = core.scheduler.factory.leader(make_request("late", [1], tenant="b"), 10**6)
    assert core.scheduler.sequences.n_ahead(newcomer) == 1


def test_aborted_siblings_give_back_their_places():
    core = crowded_core(FakeClock(), max_requests=256, max_tokens=10**9)
    core.scheduler.add(make_request("crowd", [1] * 9, n=128, max_tokens=200))
    backlog = core.scheduler.sequences.live.backlog
    core.scheduler.abort("crowd", 5)
    assert (backlog.sequences, backlog.tokens, backlog.expected) == (127, 9, 127 * 200)
    core.scheduler.abort("crowd")
    assert (backlog.sequences, backlog.work, dict(backlog.accounts)) == (0, 0, {})
    core.check()


def together(name: str, count: int, prompt: int = 2) -> list[EngineRequest]:
    """The requests of one client's that has so many prompts."""
    group = RequestGroup(name, count, count * prompt)
    requests = []
    for number in range(count):
        request = make_request(f"{name}-{number}", [number + 1] * prompt, max_tokens=200)
        requests.append(msgspec.structs.replace(request, group=group))
    return requests


def codes(core: EngineCore, requests: list[EngineRequest]) -> list[tuple[str, float | None]]:
    """What is said of each: its code and Retry-After, ("", None) where it may wait."""
    said = []
    for request in requests:
        try:
            core.scheduler.add(request)
            said.append(("", None))
        except RequestError as error:
            said.append((error.info.code, error.info.retry_after))
    return said


def test_prompts_that_came_together_wait_together_or_not_at_all():
    """Two of four places are left for three, and for two; those three are told one time."""
    for count in (2, 3):
        core = crowded_core(FakeClock(), max_requests=4, max_tokens=10**9)
        core.scheduler.add(make_request("two", [1], n=2, max_tokens=200))
        said = codes(core, together("prompts", count))
        assert len(set(said)) == 1, "all are told the same"
        assert said[0][0] == ("" if count == 2 else "queue_full")
        assert core.scheduler.n_waiting == (4 if count == 2 else 2)
        core.check()


def test_prompts_that_come_back_together_are_taken_together():
    clock = FakeClock()
    core = crowded_core(clock, max_requests=4, max_tokens=10**9)
    core.scheduler.add(make_request("four", [1], n=4, max_tokens=200))
    [(_, retry), *_] = codes(core, together("three", 3))
    core.scheduler.abort("four")
    assert retry is not None
    clock.now += retry
    assert codes(core, together("back", 3)) == [("", None)] * 3
    assert not core.scheduler._admission._verdicts


def test_refused_requests_return_as_far_apart_as_work_is_released():
    returns, asked = ReturnTimes(), make_request("a", [1])
    times = [returns.next(asked, 0.0, 5.0, 2.0) for _ in range(20)]
    assert times[0] == pytest.approx(5.0, abs=0.3)
    gaps = [late - early for early, late in pairwise(times)]
    assert min(gaps) > 1.4 and sum(gaps) / 19 == pytest.approx(2.1, rel=0.1)
    assert returns.next(asked, 40.0, 1.0, 2.0) == pytest.approx(7.0, abs=0.4), "time passes for all"


def test_a_refused_request_is_told_by_how_much_the_wait_is_too_long():
    """In the first seconds of a crowd half of the longest predicted wait may be filled."""

    def behind_a_crowd(longest: float) -> EngineCore:
        core = crowded_core(FakeClock(), max_tokens=10**9, max_predicted_wait_s=longest)
        core.scheduler.add(make_request("crowd", [1], n=40, max_tokens=200))
        return core

    late = make_request("late", [1], max_tokens=200)
    core = behind_a_crowd(1e6)
    wait = core.scheduler._admission.predicted_wait.wait(core.scheduler.factory.leader(late, 99))
    [(code, retry)] = codes(behind_a_crowd(wait / 0.55), [late])
    assert code == "queue_full"
    assert retry == pytest.approx(wait * (1 - 0.5 / 0.55), rel=0.06)


def test_free_seats_end_the_time_that_was_told():
    """Requests that were told to return have come, or do not: the next crowd is told anew."""
    core = crowded_core(FakeClock(), max_requests=4, max_tokens=10**9)
    core.scheduler.add(make_request("four", [1], n=4, max_tokens=200))
    told = [codes(core, [make_request(f"r{n}", [1], max_tokens=200)])[0][1] for n in range(30)]
    core.run_until_idle()
    for number in range(8):
        core.add(make_request(f"sits again{number}", [1], max_tokens=200))
    core.step()
    core.scheduler.add(make_request("four", [1], n=4, max_tokens=200))
    [(code, again)] = codes(core, [make_request("late", [1], max_tokens=200)])
    assert code == "queue_full" and again is not None
    assert again < 2 * (told[0] or 0.0) < (told[-1] or 0.0)


def test_a_request_that_a_crowd_refuses_has_its_digest_computed_once(
    monkeypatch: pytest.MonkeyPatch,
):
    counted: list[str] = []
    digest_of = control._digest_of

    def counting(request: EngineRequest) -> bytes:
        counted.append(request.id)
        return digest_of(request)

    monkeypatch.setattr(control, "_digest_of", counting)
    core = crowded_core(FakeClock(), max_requests=4, max_tokens=10**9)
    core.scheduler.add(make_request("four", [1], n=4, max_tokens=200))
    for number in range(3):
        codes(core, [make_request(f"r{number}", [number], max_tokens=200)])
    assert counted == ["r0", "r1", "r2"]


def test_a_refused_request_is_told_no_more_than_the_longest_time():
    returns = ReturnTimes()
    told = [returns.next(make_request("a", [1]), 0.0, 1.0, 100.0) for _ in range(100)]
    assert max(told) <= LONGEST_RETRY + 0.5 and len(set(told)) == 100


def make_slower(monkeypatch: pytest.MonkeyPatch, after: float, more: float) -> None:
    """After so many seconds a step takes longer by so many times its time."""

    class Slow(VirtualDevice):
        def launch(self, batch: Plan) -> _FlyingStep:
            before = max(self.clock.now, self._free_at)
            step = super().launch(batch)
            extra = more * (step.ready - before) if self.clock.now > after else 0.0
            self._free_at += extra
            step.ready += extra
            return step

    monkeypatch.setattr("crowd.VirtualDevice", Slow)


def test_an_engine_that_becomes_slower_is_not_flooded_by_returning_requests(
    monkeypatch: pytest.MonkeyPatch,
):
    """From a third of the time on each step takes twice as long: requests return too soon."""

    make_slower(monkeypatch, 10.0, 1.0)
    run = crowd(open_loop(10.0, 30.0), shape(), TABLE)
    assert run.share_taken > 0.5, "some come twice, none on and on"
    last = max(record.end for record in run.served)
    assert len(run.served) / last > 0.75 * CAPACITY / 2


def test_admitted_requests_wait_no_longer_than_the_bound_in_an_engine_that_slows_down(
    monkeypatch: pytest.MonkeyPatch,
):
    """A second after it comes, steps take 1.8 times as long."""

    make_slower(monkeypatch, 21.0, 0.8)
    calm = [one for one in open_loop(0.8, 20.0) if one.at < 20.0]
    flood = [msgspec.structs.replace(one, at=20.0 + one.at) for one in open_loop(30.0, 30.0)]
    limits = shape(max_waiting_requests=10_000, max_predicted_wait_s=20.0)
    run = crowd(calm + flood, limits, TABLE)
    assert 10.0 < run.first_token_s(0.99) < 20.0
    during = [record for record in run.served if 21.0 < record.end < 50.0]
    assert len(during) > 0.9 * 29 * CAPACITY / 1.8, "no seat is empty"


def test_the_predicted_wait_counts_steps_that_take_longer_than_is_typical():
    """Seven of eight steps take 0.75 of the mean, the eighth 2.75 times as long."""
    typical = StepTimeEstimate(Buckets.of(max_seats=8, token_budget=128))
    bucket = typical.buckets.decode[-1]
    for number in range(400):
        typical.observe(bucket, 0.1375 if number % 8 == 0 else 0.0375)
    assert typical.decode(8) == 0.0375
    assert typical.stretch == pytest.approx(0.05 / 0.0375, rel=0.05)
    for _ in range(400):
        typical.observe(bucket, 0.0375, gap=0.0125)
    assert typical.stretch == pytest.approx(0.05 / 0.0375, rel=0.05)
