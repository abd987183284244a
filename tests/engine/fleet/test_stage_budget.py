"""How many requests are in a pipeline at once."""

from __future__ import annotations

import asyncio
import time

import pytest

from jitney.engine.common.errors import RequestError
from jitney.engine.fleet.compositions.stage_budget import StageBudget, _in_flight


@pytest.mark.parametrize(
    "seats, seconds, limit",
    [
        # Nobody was timed yet: the fewest seats.
        ({"a": 8, "b": 2}, {"a": 0.0, "b": 1.0}, 2),
        # Only one model: its seats.
        ({"a": 8}, {"a": 3.0}, 8),
        # b gets 2 requests a second through and a 80: 2 in b, and what a has in the meantime.
        ({"a": 8, "b": 2}, {"a": 0.1, "b": 1.0}, 3),
        # a gets 1 through a second, b 20: 4 in a, and its share in b.
        ({"a": 4, "b": 20}, {"a": 4.0, "b": 1.0}, 5),
    ],
)
def test_the_slowest_models_seats_decide(seats: dict, seconds: dict, limit: int):
    assert _in_flight(seats, seconds) == limit


async def test_those_beyond_it_wait_in_their_order_and_more_are_refused():
    budget = StageBudget(["a"], max_waiting=2)
    budget.set_seats("a", 1)
    order: list[int] = []
    gate = asyncio.Event()

    async def one(number: int):
        async with budget.place(None):
            order.append(number)
            await gate.wait()

    tasks = [asyncio.create_task(one(number)) for number in range(3)]
    while not order or len(budget._waiting) < 2:
        await asyncio.sleep(0)
    with pytest.raises(RequestError, match="2 requests wait") as raised:
        await one(3)
    assert raised.value.info.code == "queue_full"
    assert raised.value.info.retry_after
    assert budget.open == 1
    gate.set()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]
    assert budget.open == 0


async def test_who_leaves_while_waiting_takes_no_place():
    budget = StageBudget(["a"], max_waiting=8)
    budget.set_seats("a", 1)

    async def one():
        async with budget.place(None):
            return True

    async with budget.place(None):
        tasks = [asyncio.create_task(one()) for _ in range(3)]
        while len(budget._waiting) < 3:
            await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        with pytest.raises(RequestError, match="time ran out"):
            async with budget.place(time.monotonic() + 0.01):
                pass
    tasks[1].cancel()  # it has its place already, and has not run since
    assert await tasks[2]
    assert budget.open == 0


async def test_more_seats_let_the_waiting_in():
    budget = StageBudget(["a", "b"], max_waiting=8)
    budget.set_seats("b", 9)
    assert budget.limit == 1
    async with budget.place(None):
        waiting = asyncio.create_task(budget._enter())
        await asyncio.sleep(0)
        assert not waiting.done()
        budget.set_seats("a", 2)
        await waiting
        assert budget.open == 2
