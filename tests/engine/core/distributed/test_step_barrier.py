"""Engines that agree upon each step, all in this process; none of them has a device."""

from __future__ import annotations

import queue
import select
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from jitney.engine.core.distributed.messages import (
    AskForStep,
    BarrierMessage,
    DrainState,
    ProposeStep,
    RunStep,
    StepSize,
    Stragglers,
)
from jitney.engine.core.distributed.step_barrier import _ASK_S, Coordinator, StepBarrier, _largest

LIMIT_S = 30.0
SMALL = StepSize(tokens=4, seats=4, decode_only=True, greedy_only=True)
SAMPLED = StepSize(tokens=8, seats=8, decode_only=True, greedy_only=False)
PROMPT = StepSize(tokens=64, seats=2, decode_only=False, greedy_only=True)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([SMALL], SMALL),
        ([SMALL, SAMPLED], SAMPLED),
        ([PROMPT, SMALL], StepSize(64, 4, False, True)),
        ([SAMPLED, PROMPT], StepSize(64, 8, False, False)),
    ],
)
def test_one_step_holds_those_of_all(sizes: list[StepSize], expected: StepSize):
    assert _largest(sizes) == expected


def engines(count: int) -> list[StepBarrier]:
    """Engines that reach the coordinator at once."""
    found: list[StepBarrier] = []
    send: dict[int, Callable[[BarrierMessage], None]] = {}
    coordinator = Coordinator(send)

    def said_by(number: int) -> Callable[[ProposeStep | Stragglers | DrainState], None]:
        return lambda message: coordinator.take(number, message)

    for number in range(count):
        found.append(StepBarrier(said_by(number)))
        send[number] = found[number].take
    return found


def is_awake(engine: StepBarrier) -> bool:
    return bool(select.select([engine], [], [], 0)[0])


def test_no_engine_is_asked_while_none_has_a_step_to_run():
    assert not any(engine.is_asked() or is_awake(engine) for engine in engines(3))


def test_an_engine_that_sleeps_is_asked_and_takes_part():
    busy, idle = engines(2)
    with ThreadPoolExecutor(1) as pool:
        agreed = pool.submit(busy.agree, SMALL)
        assert select.select([idle], [], [], LIMIT_S)[0]
        assert not agreed.done()
        assert idle.is_asked() and not busy.is_asked()
        assert idle.agree(None) == agreed.result(LIMIT_S) == SMALL
    assert not idle.is_asked() and not is_awake(idle)


def test_all_engines_run_the_same_steps():
    """Every engine has work in some of the barrier, and nobody in all."""
    wanted = [[SMALL] * 40, [PROMPT] * 7, [SAMPLED] * 25]
    ran: list[list[StepSize]] = [[], [], []]
    done = threading.Barrier(3)

    def run(number: int, engine: StepBarrier) -> None:
        for size in wanted[number]:
            ran[number].append(engine.agree(size))
        while len(ran[number]) < 40:
            select.select([engine], [], [], LIMIT_S)
            if engine.is_asked():
                ran[number].append(engine.agree(None))
        done.wait(LIMIT_S)

    with ThreadPoolExecutor(3) as pool:
        for job in [pool.submit(run, *each) for each in enumerate(engines(3))]:
            job.result(LIMIT_S)
    assert ran[0] == ran[1] == ran[2]
    assert set(ran[0]) == {
        StepSize(64, 8, False, False),
        SAMPLED,
        SMALL,
    }


def test_a_late_question_wakes_no_engine_twice():
    """Somebody said what it wants while it was being asked."""
    said: list[ProposeStep | Stragglers | DrainState] = []
    engine = StepBarrier(said.append)
    engine.take(RunStep(0, SMALL))
    assert engine.agree(SMALL) == SMALL
    engine.take(AskForStep(0))
    assert is_awake(engine) and not engine.is_asked() and not is_awake(engine)
    assert said == [ProposeStep(0, SMALL)]


def test_an_engine_in_another_round_is_ignored():
    told: list[BarrierMessage] = []
    coordinator = Coordinator({0: told.append, 1: told.append})
    with pytest.raises(ConnectionError, match="host 1 is in round 1, not 0"):
        coordinator.take(1, ProposeStep(1, SMALL))
    coordinator.take(1, ProposeStep(0, SMALL))
    with pytest.raises(ConnectionError, match="host 1 is in round 0"):
        coordinator.take(1, ProposeStep(0, SMALL))
    assert told == [AskForStep(0)]


def partings(engine: StepBarrier) -> list[bool]:
    """What was heard of the end since; what woke it is read."""
    assert not engine.is_asked()
    return [drain_state.drained for drain_state in iter(engine.next_drain_state, None)]


def test_all_drain_once_one_is_told_to_end_and_none_leaves_before_the_last():
    first, second, third = engines(3)
    second.drain(drained=False)
    assert is_awake(first) and is_awake(third)
    assert [partings(engine) for engine in (first, second, third)] == [[False]] * 3
    second.drain(drained=True)
    first.drain(drained=False)
    third.drain(drained=True)
    assert [partings(engine) for engine in (first, second, third)] == [[]] * 3
    first.drain(drained=True)
    assert [partings(engine) for engine in (first, second, third)] == [[True]] * 3


def test_an_idle_engine_learns_of_both_at_once():
    """It may be that nobody had a request."""
    first, second = engines(2)
    first.drain(drained=True)
    second.drain(drained=True)
    assert partings(first) == partings(second) == [False, True]


def test_steps_go_on_while_engines_drain():
    busy, idle = engines(2)
    idle.drain(drained=True)
    with ThreadPoolExecutor(1) as pool:
        agreed = pool.submit(busy.agree, SMALL)
        while not idle.is_asked():
            select.select([idle], [], [], LIMIT_S)
        assert idle.agree(None) == agreed.result(LIMIT_S) == SMALL


def test_a_waiting_engine_learns_for_which_engine():
    """Every second, until the last one has answered."""
    first, second, third = engines(3)
    waits: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    second.on_wait = waits.put
    with ThreadPoolExecutor(2) as pool:
        agreed = [pool.submit(second.agree, SMALL)]
        told = [waits.get(timeout=LIMIT_S) for _ in range(2)]
        assert told == [[], [0, 2]]  # it asks once it has waited
        agreed.append(pool.submit(first.agree, PROMPT))
        while waits.get(timeout=LIMIT_S) != [2]:
            pass
        size = third.agree(None)
        assert [future.result(LIMIT_S) for future in agreed] == [size, size]


def test_a_round_that_is_over_waits_for_no_engine():
    told: list[BarrierMessage] = []
    coordinator = Coordinator({0: told.append, 1: lambda message: None})
    coordinator.take(0, ProposeStep(0, SMALL))
    coordinator.take(0, Stragglers(0))
    coordinator.take(1, ProposeStep(0, None))
    coordinator.take(0, Stragglers(0))
    assert told == [Stragglers(0, [1]), RunStep(0, SMALL), Stragglers(0, [])]
    assert _ASK_S <= 2.0, "a supervisor may bear no more than 10 s of silence"
