"""Background requests: they take what is left, and live requests do not notice them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from fakes import (
    FakeClock,
    code_of,
    ends_of,
    make_core,
    make_request,
    picture,
    solo,
    tokens_of,
    watch,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.engine_core import EngineCore


def fill(core: EngineCore, count: int, *, max_tokens: int = 40) -> list[EngineRequest]:
    """So many requests in the background, each with a prompt of its own."""
    requests = [
        make_request(f"b{i}", [i % 30 + 1] * 6, max_tokens=max_tokens, background=True)
        for i in range(count)
    ]
    for request in requests:
        core.add(request)
    return requests


def calm(core: EngineCore) -> EngineCore:
    """No request has come for long, so that the background has every seat."""
    assert isinstance(core.clock, FakeClock)
    core.clock.now += 60.0
    return core


def seats_of(core: EngineCore) -> list[bool]:
    """Of each seat that is taken, whether the background has it."""
    return [seat.background for seat in core.seat_map().seats if seat.state != "free"]


def steps_to_first_token(core: EngineCore, request: EngineRequest) -> int:
    core.add(request)
    for step in range(1, 200):
        if tokens_of(core.step().outputs, request.id):
            return step
    raise AssertionError("no token came")


def test_it_takes_every_seat_when_no_other_request_comes():
    core = calm(make_core(seats=4, pages=80, budget=32, eos=()))
    fill(core, 6)
    for _ in range(8):
        core.step()
    assert seats_of(core) == [True] * 4
    newest = core.ledger.since(0)[-1]
    assert (newest["seats_busy"], newest["waiting"], newest["waiting_tokens"]) == (4, 2, 12)


def test_it_takes_a_part_of_the_seats_while_others_come():
    core = make_core(seats=8, pages=200, budget=32, eos=(), background_seats=3)
    core.add(make_request("live", [1, 2], max_tokens=30))
    fill(core, 8)
    for _ in range(20):
        core.step()
    assert sorted(seats_of(core)) == [False, True, True, True]
    assert core.seat_map().seats[0].background is False


@given(
    prompt=st.integers(1, 40),
    before=st.integers(0, 12),
    n=st.integers(1, 4),
    budget=st.sampled_from((9, 16, 64)),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_live_request_gets_its_first_token_as_soon_as_alone(
    prompt: int, before: int, n: int, budget: int
):
    """In as many steps, however many sit and wait in the background."""
    live = make_request("live", list(range(prompt)), max_tokens=4, n=n)
    alone = make_core(seats=4, pages=60, budget=budget, eos=())
    crowded = calm(make_core(seats=4, pages=60, budget=budget, eos=()))
    fill(crowded, 9)
    for _ in range(before):
        crowded.step()
    assert steps_to_first_token(crowded, live) == steps_to_first_token(alone, live)
    crowded.check()


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_no_step_with_a_live_prompt_has_a_row_of_the_background(data: st.DataObject):
    core = calm(make_core(seats=4, pages=24, budget=16, eos=()))
    plans = watch(core)
    requests, outputs = fill(core, 6, max_tokens=20), []
    for number in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(0, 5))):
            outputs += core.step().outputs
        length = data.draw(st.integers(1, 30))
        requests.append(make_request(f"l{number}", [number + 1] * length, max_tokens=6))
        core.add(requests[-1])
    outputs += core.run_until_idle(3000)
    for plan in plans:
        prompts = [chunk for chunk in plan.chunks if not chunk.decode]
        if any(not chunk.seq.background for chunk in prompts):
            assert not any(chunk.seq.background for chunk in plan.chunks)
    for request in requests:
        assert tokens_of(outputs, request.id) == solo(request, 0, 99, ())
    core.check()


def with_times(core: EngineCore, decode: dict[int, float], mixed: float) -> EngineCore:
    """A core whose steps take as long as it is told: seconds by sequences that decode, and per row
    of steps with prompts.
    """
    scheduler = core.scheduler
    for bucket in scheduler.buckets.decode:
        scheduler.step_times.observe(bucket, decode[bucket.seats])
    for bucket in scheduler.buckets.mixed:
        scheduler.step_times.observe(bucket, mixed * bucket.tokens)
    scheduler.observe = lambda plan, seconds, gap=0.0: None
    return core


SLOW = {1: 0.01, 4: 0.011, 8: 0.03}


def test_streams_are_held_up_by_short_prompt_steps_and_seldom():
    """Those of the smallest bucket, and one step in eight."""
    core = with_times(make_core(seats=8, pages=80, budget=64, eos=()), SLOW, 0.0012)
    plans = watch(core)
    core.add(make_request("live", [1, 2], max_tokens=60))
    core.step()
    core.add(make_request("b", [3] * 60, max_tokens=2, background=True))
    core.run_until_idle()
    with_prompts = [plan for plan in plans[1:] if plan.prompt_chunks]
    assert [str(plan.bucket) for plan in with_prompts] == ["mixed-16"] * len(with_prompts)
    assert [chunk[2] - chunk[1] for chunk in picture(with_prompts[0])] == [1, 15]
    numbers = [plan.number for plan in with_prompts if plan.number < 60]
    assert len(numbers) > 2
    assert all(later - earlier >= 8 for earlier, later in pairwise(numbers))


def test_streams_have_no_more_beside_them_than_leaves_them_fast():
    """Four in a step are as fast as one, eight are not."""
    core = calm(with_times(make_core(seats=8, pages=200, budget=64, eos=()), SLOW, 0.001))
    fill(core, 7)
    for _ in range(4):
        core.step()
    plans = watch(core)
    core.add(make_request("live", [1, 2], max_tokens=12))
    outputs = core.run_until_idle()
    beside = [
        sum(chunk.seq.background for chunk in plan.chunks)
        for plan in plans
        if any(not chunk.seq.background for chunk in plan.chunks)
    ]
    assert beside == [0] + [3] * 11
    assert all(len(tokens_of(outputs, f"b{i}")) for i in range(7)), "the others go on later"


def test_nothing_is_launched_behind_a_background_step():
    """A request that comes has the very next step. Unless none has come for long."""
    core = make_core(seats=4, pages=80, budget=32, eos=())
    core.add(make_request("live", [1, 2], max_tokens=1))
    core.run_until_idle()
    plans = watch(core)
    fill(core, 1)
    counts = []
    for _ in range(6):
        core.step()
        counts.append(len(plans))
    assert counts == [1, 1, 2, 2, 3, 3]
    calm(core)
    for _ in range(3):
        core.step()
    assert len(plans) == 6


@pytest.mark.usefixtures("rash")
def test_the_background_loses_its_seat_first_when_pages_are_short():
    core = make_core(seats=3, pages=12, budget=32, eos=(), background_seats=2)
    plans = watch(core)
    core.add(make_request("young", [5] * 4, max_tokens=30))
    fill(core, 2, max_tokens=20)
    outputs = core.run_until_idle(2000)
    lost = {seq.request_id for plan in plans for seq in plan.preempted}
    assert lost and lost <= {"b0", "b1"}
    assert len(tokens_of(outputs, "b0")) == len(tokens_of(outputs, "b1")) == 20


def test_pages_of_the_background_are_free_for_live_requests():
    core = calm(make_core(seats=4, pages=17, budget=64, eos=()))
    fill(core, 3, max_tokens=14)
    for _ in range(6):
        core.step()
    live = make_request("live", [9] * 50, max_tokens=4)
    assert steps_to_first_token(core, live) <= 3
    core.run_until_idle()


def test_what_live_requests_are_told_does_not_count_the_background():
    """Room, predicted wait, and the seconds after which to come again."""
    told: list[tuple[float, str]] = []
    for crowd in (0, 12):
        core = make_core(
            seats=2, pages=80, budget=16, max_requests=3, eos=(), clock=FakeClock(tick=0.01)
        )
        fill(core, crowd)
        for number in range(2 + 3):
            core.add(make_request(f"l{number}", [number + 1] * 4, max_tokens=30))
        for _ in range(5):
            core.step()
        entrance = core.scheduler._admission
        late = make_request("late", [9] * 4, max_tokens=30)
        assert not core.scheduler.has_room(late)
        leader = core.scheduler.factory.leader(late, 99)
        ahead = entrance.predicted_wait._seat_steps(core.scheduler.sequences.n_ahead(leader))
        with pytest.raises(RequestError) as refused:
            core.scheduler.add(late)
        told.append((ahead, refused.value.info.code))
        assert core.scheduler.sequences.open_seats == 0
    assert told[0] == told[1]


def test_it_has_a_bound_of_its_own():
    core = make_core(seats=1, max_requests=3)
    fill(core, 3)
    live = make_request("live", [1], max_tokens=2)
    assert core.scheduler.has_room(live), "it waits for nobody in the background"
    late = make_request("late", [1], background=True)
    assert not core.scheduler.has_room(late)
    core.add(late)
    ends = ends_of(core.step().outputs)
    assert code_of(ends["late", 0]) == "queue_full"


def test_where_a_batch_keeps_its_seats_there_is_no_background():
    core = make_core(policy="static", batch_size=2)
    core.add(make_request("b", [1], background=True))
    assert code_of(ends_of(core.run_until_idle())["b", 0]) == "invalid_value"
