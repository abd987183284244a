"""What happens beyond the capacity: the queue is bounded in work, and who is turned away is told
when there will be a place for him.
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
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.estimates import StepTimeEstimate
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.plan import Plan, StepResult
from jitney.engine.core.scheduler.retry_schedule import _LONGEST_RETRY, ReleaseRate, RetrySchedule
from jitney.engine.core.scheduler.sequence import Sequence
from jitney.engine.lab.simulation.engine_shape import EngineShape
from jitney.engine.lab.simulation.simulator import VirtualDevice, _FlyingStep, simulate
from jitney.engine.server.process.process_client import _with_seed

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
    """Ten times the capacity for two minutes, and everybody comes back when told to."""
    return crowd(open_loop(10.0, 120.0), shape(), TABLE)


def test_who_comes_back_when_told_to_is_taken(ten_times: CrowdRun):
    assert ten_times.turned_away > 5000 and ten_times.returns >= ten_times.turned_away
    assert ten_times.share_taken >= 0.95


def test_who_was_let_in_waits_no_longer_than_a_full_queue(ten_times: CrowdRun):
    """64 may wait, which is 14 s of work."""
    assert ten_times.first_token_s(0.99) < 1.1 * 64 / CAPACITY


def test_at_default_bounds_a_first_token_comes_within_the_bound_and_the_seats_stay_full():
    """256 may wait, or 60 s by prediction; answers here are so long that the latter is the less."""
    settings = EngineSection()
    limits = {name: getattr(settings, name) for name in _BOUNDS}
    arrivals = [
        msgspec.structs.replace(arrival, n_output=3 * arrival.n_output)
        for arrival in open_loop(10 / 3, 240.0)
    ]
    run = crowd(arrivals, shape(**limits), TABLE)
    assert run.turned_away > 1000
    assert 0.4 * settings.max_predicted_wait_s < run.first_token_s(0.99)
    assert run.first_token_s(0.99) < settings.max_predicted_wait_s
    last = max(record.end for record in run.served)
    assert len(run.served) / last > 0.9 * CAPACITY / 3


def test_seats_are_not_kept_empty_for_those_who_were_told(ten_times: CrowdRun):
    last = max(record.end for record in ten_times.served)
    assert len(ten_times.served) / last > 0.9 * CAPACITY


def test_those_turned_away_together_are_told_different_times(ten_times: CrowdRun):
    assert len({round(wait, 3) for wait in ten_times.waits}) > 0.9 * len(ten_times.waits)


@pytest.mark.parametrize("obeys", [0.5, 0.1])
def test_most_give_up_and_those_who_do_not_are_taken(obeys: float):
    """Places of those who do not come go to newcomers, and later times get shorter."""
    run = crowd(open_loop(10.0, 90.0), shape(), TABLE, obeys=obeys)
    assert run.share_taken >= 0.8
    during = [record for record in run.served if record.end < 90.0]
    assert len(during) > 0.85 * 90.0 * CAPACITY, "nobody's place stays empty"
    assert max(run.waits) < (0.4 + obeys) * 10 * 90


@pytest.mark.parametrize("order", ["fair", "shortest", "priority"])
def test_whatever_the_order(order: str):
    assert crowd(open_loop(10.0, 40.0), shape(order=order), TABLE).share_taken >= 0.9


def test_a_bound_by_predicted_wait_keeps_it():
    limits = shape(max_waiting_requests=10_000, max_predicted_wait_s=10.0)
    run = crowd(open_loop(10.0, 60.0), limits, TABLE)
    assert run.share_taken >= 0.9 and run.first_token_s(0.99) < 11.0


def test_where_pages_are_short_free_seats_are_no_places():
    """Pages for two or three of eight: the wait is foreseen by who sits, and is kept."""
    limits = shape(max_waiting_requests=10_000, max_predicted_wait_s=20.0)
    short = replace(limits, pages=21)
    run = crowd(open_loop(10.0, 60.0), short, TABLE)
    assert run.share_taken >= 0.8 and run.first_token_s(0.99) < 1.5 * 20.0


def test_at_low_load_nobody_is_refused_by_default():
    """Nor at once when all seats are filled on an idle engine."""
    limits = SchedulerLimits.of(EngineSection(max_seats=8, token_budget=128), context_length=512)
    assert limits.max_predicted_wait_s == 60.0
    engine = EngineShape(limits, Buckets.of(max_seats=8, token_budget=128), 600, 16)
    quiet = simulate(open_loop(0.8, 300.0), engine, TABLE)
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
    assert (core.scheduler.state.n_waiting, refused) == (256, 58)
    core.check()


def test_the_wait_behind_many_siblings_is_foreseen():
    """By the work: 120 answers of 200 steps on 8 seats are ahead of the newcomer."""
    core = crowded_core(FakeClock(), max_requests=256, max_tokens=10**9, max_predicted_wait_s=1e6)
    core.scheduler.add(make_request("crowd", [1], n=120, max_tokens=200))
    wait = core.scheduler._admission.predicted_wait
    newcomer = core.scheduler._factory.leader(make_request("late", [1]), 10**6)
    assert wait.wait(newcomer) == pytest.approx(0.01 * 200 * (1 + 120 / 8), rel=0.05)


def test_too_long_a_wait_says_how_long_and_how_many():
    core = crowded_core(FakeClock(), max_requests=256, max_tokens=10**9, max_predicted_wait_s=20.0)
    core.scheduler.add(make_request("crowd", [1], n=120, max_tokens=200))
    with pytest.raises(
        RequestError, match=r"about 3\d\.\d s of waiting .* at most 20 .* sequences waiting: 120"
    ):
        core.scheduler.add(make_request("late", [1]))


def test_a_crowd_of_siblings_is_no_wait_for_another_tenant_in_the_fair_order():
    core = crowded_core(FakeClock(), order="fair", max_requests=256, max_tokens=10**9)
    core.scheduler.add(make_request("crowd", [1], n=120, max_tokens=200, tenant="a"))
    newcomer = core.scheduler._factory.leader(make_request("late", [1], tenant="b"), 10**6)
    assert core.scheduler.state.n_ahead(newcomer) == 1


def test_aborted_siblings_give_back_their_places():
    core = crowded_core(FakeClock(), max_requests=256, max_tokens=10**9)
    core.scheduler.add(make_request("crowd", [1] * 9, n=128, max_tokens=200))
    backlog = core.scheduler.state.backlog
    core.scheduler.abort("crowd", 5)
    assert (backlog.sequences, backlog.tokens, backlog.expected) == (127, 9, 127 * 200)
    core.scheduler.abort("crowd")
    assert (backlog.sequences, backlog.work, dict(backlog.accounts)) == (0, 0, {})
    core.check()


def together(name: str, count: int, prompt: int = 2) -> list[EngineRequest]:
    """The requests of one client's that has so many prompts."""
    whole = RequestGroup(name, count, count * prompt)
    requests = []
    for number in range(count):
        request = make_request(f"{name}-{number}", [number + 1] * prompt, max_tokens=200)
        requests.append(msgspec.structs.replace(request, whole=whole))
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
    """Two of four places are left for three, and for two; those three get one promise."""
    core = crowded_core(FakeClock(), max_requests=4, max_tokens=10**9)
    core.scheduler.add(make_request("two", [1], n=2, max_tokens=200))
    said = codes(core, together("three", 3))
    assert {code for code, _ in said} == {"queue_full"} and len(set(said)) == 1
    assert core.scheduler.state.n_waiting == 2 and len(core.scheduler._admission.promises) == 1
    core.clock.now += 10_000.0
    assert codes(core, together("pair", 2)) == [("", None)] * 2
    core.check()


def test_prompts_that_come_back_together_are_taken_together():
    clock = FakeClock()
    core = crowded_core(clock, max_requests=4, max_tokens=10**9)
    core.scheduler.add(make_request("four", [1], n=4, max_tokens=200))
    [(_, retry), *_] = codes(core, together("three", 3))
    core.scheduler.abort("four")
    assert retry is not None
    assert codes(core, [make_request("newcomer", [1], n=3)])[0][0] == "queue_full"
    clock.now += retry
    assert codes(core, together("back", 3)) == [("", None)] * 3
    assert not core.scheduler._admission._verdicts


def ended(tokens: int, n: int = 1) -> Sequence:
    request = make_request("r", [1] * 10, n=n)
    return Sequence(request, 0, 0, [1] * 10, tokens, expected=tokens)


def test_the_rate_of_places_is_measured_while_the_engine_is_crowded():
    """A place every 2 s, of 40 tokens; idle times say nothing; little is known at first."""
    rate = ReleaseRate()
    assert rate.per_place(7.0) == 7.0 and rate.per_token(8.0, 40.0) == 0.2
    for second in range(0, 400, 2):
        rate.step(float(second), crowded=True)
        rate.freed(ended(30))
    rate.step(400.0, crowded=False)
    rate.step(10_000.0, crowded=True)
    assert rate.per_place(2.0) == pytest.approx(2.0)
    assert rate.per_place(100.0) == pytest.approx((400 + 800) / 208)
    assert rate.per_token(2.0, 40.0) == pytest.approx(2.0 / 40)


def test_promises_are_as_far_apart_as_places_come_free():
    promises = RetrySchedule()
    times = [promises.give(bytes([number]), 0.0, 5.0, 2.0) for number in range(20)]
    assert times[0] == pytest.approx(5.0, abs=0.3)
    gaps = [late - early for early, late in pairwise(times)]
    assert min(gaps) > 1.0 and sum(gaps) / 19 == pytest.approx(2.1, rel=0.1)
    assert not promises.take(bytes([3]), times[3] - 0.5), "too early"
    assert promises.take(bytes([3]), times[3])
    assert not promises.take(bytes([3]), times[3] + 0.1), "once"
    assert not promises.take(bytes([0]), times[0] + 60.0), "it has lapsed"


def test_who_came_in_time_and_found_no_place_does_not_go_to_the_end():
    promises = RetrySchedule()
    for number in range(50):
        promises.give(bytes([number]), 0.0, 1.0, 10.0)
    assert promises.take(bytes([0]), 1.3)
    again = promises.put_off(bytes([0]), 1.3, 4.0, 10.0)
    assert again == pytest.approx(4.0, abs=0.3) and promises.take(bytes([0]), 1.3 + again)


def test_those_put_off_come_one_after_the_other():
    """Every second place while others are promised too, and every one after that."""
    promises = RetrySchedule()
    promises.give(b"a", 0.0, 50.0, 1.0)
    times = [promises.put_off(b"%d" % number, 0.0, 1.0, 10.0) for number in range(6)]
    assert times == [pytest.approx(at, abs=0.6) for at in (1, 21, 41, 61, 71.5, 82)]


def test_an_engine_that_becomes_slower_does_not_drown_in_those_it_told(
    monkeypatch: pytest.MonkeyPatch,
):
    """From a third of the time on each step takes twice as long: promises come due too soon."""

    class Slow(VirtualDevice):
        def launch(self, batch: Plan) -> _FlyingStep:
            before = max(self.clock.now, self._free_at)
            step = super().launch(batch)
            more = step.ready - before if self.clock.now > 20.0 else 0.0
            self._free_at += more
            return step._replace(ready=step.ready + more)

    monkeypatch.setattr("crowd.VirtualDevice", Slow)
    run = crowd(open_loop(10.0, 60.0), shape(), TABLE)
    assert run.share_taken > 0.5, "some come twice, and nobody knocks on and on"
    last = max(record.end for record in run.served)
    assert len(run.served) / last > 0.75 * CAPACITY / 2


def test_who_is_let_in_waits_no_longer_than_the_bound_though_the_crowd_slows_the_engine(
    monkeypatch: pytest.MonkeyPatch,
):
    """A second after it comes, steps take 1.8 times as long."""

    class Slow(VirtualDevice):
        def launch(self, batch: Plan) -> _FlyingStep:
            before = max(self.clock.now, self._free_at)
            step = super().launch(batch)
            more = 0.8 * (step.ready - before) if self.clock.now > 21.0 else 0.0
            self._free_at += more
            return step._replace(ready=step.ready + more)

    monkeypatch.setattr("crowd.VirtualDevice", Slow)
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


def test_a_client_that_does_not_wait_gets_no_more_places_than_it_uses():
    """It asks a thousand times; its promises are bounded, and the others' times get shorter."""
    promises = RetrySchedule()
    for number in range(1000):
        promises.give(b"hasty", number / 100, 1.0, 1.0)
    assert len(promises) <= 128
    now = 1000.0
    assert not promises.take(b"hasty", now) and len(promises) == 0
    first = promises.give(b"a", now, 1.0, 1.0)
    assert promises.give(b"b", now, 1.0, 1.0) - first < 0.5


def test_what_an_earlier_crowd_did_is_forgotten():
    """Nobody came for a hundred promises; a few minutes later they are as far apart as before."""
    promises = RetrySchedule()
    for number in range(100):
        promises.give(bytes([number]), 0.0, 1.0, 0.1)

    def apart(now: float) -> float:
        promises.give(b"a", now, 1000.0, 1.0)
        before = promises.left(now)
        promises.give(b"b", now, 1000.0, 1.0)
        return promises.left(now) - before

    assert apart(30.0) < 0.5, "more are promised than come free"
    assert apart(600.0) > 1.0


def test_nobody_is_told_more_than_the_longest_time():
    promises = RetrySchedule()
    told = [promises.give(str(n).encode(), 0.0, 1.0, 100.0) for n in range(100)]
    assert max(told) <= _LONGEST_RETRY + 1.0
    assert len(promises) < 40 and len(set(told)) == 100


def test_requests_are_known_again_by_what_they_ask_for():
    names = [
        RetrySchedule.name_of(make_request("a", [1, 2], tenant="x")),
        RetrySchedule.name_of(make_request("a", [1, 2], tenant="y")),
        RetrySchedule.name_of(make_request("a", [1, 3], tenant="x")),
        RetrySchedule.name_of(make_request("a", [1, 2], tenant="x", n=2)),
    ]
    assert len(set(names)) == 4
    assert names[0] == RetrySchedule.name_of(make_request("b", [1, 2], tenant="x", arrival=9.0))
    for _ in range(2):  # each time that it comes it is given a seed on its way to the core
        assert names[0] == RetrySchedule.name_of(_with_seed(make_request("b", [1, 2], tenant="x")))
