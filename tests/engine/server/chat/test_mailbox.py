"""What is put into a mailbox comes out once, in order, and a wait ends when it should."""

from __future__ import annotations

import asyncio
import time

import pytest

from jitney.engine.common.slices import TimeSlices
from jitney.engine.server.chat.mailbox import Mailbox


async def test_all_that_came_is_taken_at_once_and_in_order():
    box: Mailbox[int] = Mailbox(TimeSlices())
    for item in range(3):
        box.put(item)
    assert not box.is_empty
    assert await box.take(None) == [0, 1, 2]
    assert box.is_empty


@pytest.mark.parametrize("wait_s", [None, 20.0])
async def test_who_waits_is_woken_by_what_comes(wait_s: float | None):
    box: Mailbox[str] = Mailbox(TimeSlices())
    asyncio.get_running_loop().call_later(0.01, box.put, "a")
    assert await box.take(wait_s) == ["a"]


async def test_a_failure_comes_after_what_came_before_it_and_stays():
    box: Mailbox[str] = Mailbox(TimeSlices())
    box.put("a")
    box.fail(ValueError("first"))
    box.fail(ValueError("second"))
    assert box.has_failed
    assert await box.take(None) == ["a"]
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            await box.take(None)


async def test_a_failure_wakes_who_waits():
    box: Mailbox[str] = Mailbox(TimeSlices())
    asyncio.get_running_loop().call_later(0.01, box.fail, ValueError("gone"))
    with pytest.raises(ValueError, match="gone"):
        await box.take(20.0)


async def test_a_wait_is_as_long_as_it_may_be_also_after_many_short_ones():
    """One timer serves many waits: it may be that of a wait which something ended long ago."""

    loop = asyncio.get_running_loop()
    box: Mailbox[int] = Mailbox(TimeSlices())
    for item in range(5):
        loop.call_later(0.02, box.put, item)
        assert await box.take(0.2) == [item]
    begun = time.monotonic()
    late = asyncio.create_task(asyncio.sleep(5))
    taken = asyncio.create_task(box.take(0.2))
    await asyncio.wait([taken, late], return_when=asyncio.FIRST_COMPLETED)
    assert taken.done() and taken.result() == []
    assert time.monotonic() - begun > 0.19
    late.cancel()
    assert await box.take(0.01) == []


async def test_a_shorter_wait_is_not_held_up_by_the_timer_of_a_longer_one():
    loop = asyncio.get_running_loop()
    box: Mailbox[int] = Mailbox(TimeSlices())
    loop.call_later(0.01, box.put, 1)
    assert await box.take(25.0) == [1]
    assert await box.take(0.05) == []


async def test_a_timer_that_goes_off_while_nobody_waits_ends_no_later_wait():
    loop = asyncio.get_running_loop()
    box: Mailbox[int] = Mailbox(TimeSlices())
    box.put(0)
    loop.call_later(0.01, box.put, 1)
    assert await box.take(0.05) == [0]
    assert await box.take(0.05) == [1]
    await asyncio.sleep(0.1)
    loop.call_later(0.1, box.put, 2)
    assert await box.take(20.0) == [2]


async def test_a_closed_one_holds_nothing():
    box: Mailbox[int] = Mailbox(TimeSlices())
    box.put(1)
    box.fail(ValueError("gone"))
    box.close()
    assert box.is_empty
    assert not box.has_failed


async def test_a_reader_gets_what_comes_and_the_wait_begins_again():
    loop = asyncio.get_running_loop()
    box: Mailbox[int] = Mailbox(TimeSlices())
    read: list[list[int]] = []

    def reader(items: list[int]) -> bool:
        read.append(items)
        return True

    for item in range(4):
        loop.call_later(0.05 * (item + 1), box.put, item)
    begun = time.monotonic()
    assert await box.take(0.15, reader) == []
    assert read == [[0], [1], [2], [3]] and time.monotonic() - begun > 0.3
    loop.call_soon(box.put, 4)
    assert await box.take(20.0) == [4]  # a later wait has no reader


async def test_what_a_reader_does_not_take_and_what_ends_a_wait_come_to_the_task_in_order():
    loop = asyncio.get_running_loop()
    box: Mailbox[int] = Mailbox(TimeSlices())
    read: list[int] = []

    def put_all() -> None:
        box.put(0)
        box.put(1, ends_wait=True)

    loop.call_soon(put_all)
    assert await box.take(20.0, lambda items: not read.extend(items)) == [0, 1]
    assert read == []
    loop.call_soon(box.put, 2)
    assert await box.take(20.0, lambda items: False) == [2]


async def test_what_a_reader_raises_is_the_failure():
    box: Mailbox[int] = Mailbox(TimeSlices())
    asyncio.get_running_loop().call_soon(box.put, 0)
    with pytest.raises(ZeroDivisionError):
        await box.take(20.0, lambda items: bool(1 // items[0]))
