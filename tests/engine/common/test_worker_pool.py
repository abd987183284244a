"""Processes that may be ended in the middle of their work: whom that costs what."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import obedient_worker
import pytest
from leftovers import garbage
from obedient_worker import Obeyed, Order

from jitney.engine.common import worker_pool as workers
from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import Grammar
from jitney.engine.common.worker_pool import WorkerPool
from jitney.engine.core.grammar.checks import Grammars

SUPPORT = str(Path(obedient_worker.__file__).parent)
#: Longer than any test waits.
FOR_EVER = 300.0
PATIENCE = 30.0


@pytest.fixture(autouse=True)
def support_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{SUPPORT}")


@contextlib.asynccontextmanager
async def working(
    timeout_s: float = FOR_EVER, n: int = 2, module: str = "obedient_worker"
) -> AsyncIterator[WorkerPool[Obeyed]]:
    pool = WorkerPool("obeys", module, Order("setup"), Obeyed, timeout_s, n)
    try:
        yield pool
    finally:
        await pool.close()


def pids(pool: WorkerPool[Obeyed]) -> set[int]:
    return {worker.process.pid for worker in pool._workers if worker.process is not None}


async def said(pool: WorkerPool[Obeyed], text: str) -> int:
    """Who said it."""
    answer = await pool.ask(Order(text))
    assert answer.text == text
    return answer.pid


async def code_of(work: Coroutine[Any, Any, Any]) -> str:
    with pytest.raises(RequestError) as caught:
        await work
    return caught.value.info.code


async def hanging(pool: WorkerPool[Obeyed]) -> asyncio.Task[Obeyed]:
    """A task that a process has and will not answer."""
    before = len(pool._idle)
    task = asyncio.create_task(pool.ask(Order(hangs=True)))
    await until(lambda: len(pool._idle) < before)
    return task


async def until(condition: Any) -> None:
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends
        await asyncio.sleep(0.01)


async def test_none_is_started_before_the_first_task_and_all_are_then():
    async with working() as pool:
        await asyncio.sleep(0)
        assert not pids(pool)
        first = await said(pool, "a")
        await until(lambda: len(pids(pool)) == 2)
        assert first in pids(pool)
        before = pids(pool)
        assert {await said(pool, str(n)) for n in range(20)} <= before
    assert not pids(pool)
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_task_that_does_not_end_holds_only_its_process_and_that_is_replaced():
    async with working() as pool:
        await pool.start()
        before = pids(pool)
        stuck = await hanging(pool)
        others = {await said(pool, str(n)) for n in range(50)}
        assert len(others) == 1 and not stuck.done()
        (held,) = before - others
        pool._timeout_s = 0.05
        also_stuck = asyncio.create_task(pool.ask(Order(hangs=True)))
        with pytest.raises(TimeoutError):
            await also_stuck
        await until(lambda: len(pids(pool)) == 2)
        assert held in pids(pool) and not others & pids(pool)
        pool._timeout_s = FOR_EVER
        assert await said(pool, "again") not in before
        os.kill(held, signal.SIGKILL)
        await until(lambda: held not in pids(pool))
        stuck.cancel()


async def test_one_that_ends_over_a_task_is_tried_once_more_and_others_go_on():
    async with working() as pool:
        await pool.start()
        before = pids(pool)
        dying = [asyncio.create_task(pool.ask(Order(dies=True))) for _ in range(2)]
        fine = [asyncio.create_task(said(pool, str(n))) for n in range(4)]
        for task in dying:
            with pytest.raises(EOFError):
                await task
        answered = set(await asyncio.gather(*fine))
        assert not answered & before, "both processes had ended over the others"


async def test_one_that_ended_while_idle_is_replaced_unnoticed():
    async with working() as pool:
        await pool.start()
        before = pids(pool)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert await said(pool, "a") not in before
        assert await said(pool, "b") not in before


async def test_who_waits_comes_in_turn_and_who_leaves_loses_nothing():
    async with working(n=1) as pool:
        await pool.start()
        came: list[int] = []

        async def come(number: int) -> None:
            await said(pool, str(number))
            came.append(number)

        tasks = [asyncio.create_task(come(number)) for number in range(30)]
        await asyncio.sleep(0)
        left = {0, 1, 7, 8, 29}
        for number in left:
            tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert came == [number for number in range(30) if number not in left]
        assert await said(pool, "after") in pids(pool)


async def test_only_so_many_may_wait_and_only_so_long(monkeypatch: pytest.MonkeyPatch):
    async with working(n=1) as pool:
        await pool.start()
        stuck = await hanging(pool)
        monkeypatch.setattr(workers, "_MOST_WAITING", 2)
        waiting = [asyncio.create_task(code_of(said(pool, "a"))) for _ in range(2)]
        await until(lambda: pool._n_waiting == 2)
        assert await code_of(said(pool, "b")) == "busy"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        monkeypatch.setattr(workers, "_WAIT_S", 0.05)
        assert await code_of(said(pool, "c")) == "busy"
        assert not pool._n_waiting and not stuck.done()


async def test_the_end_ends_what_runs_and_who_waits():
    async def wait_for(task: asyncio.Task[Any]) -> Any:
        return await task

    async with working() as pool:
        await pool.start()
        stuck = [await hanging(pool) for _ in range(2)]
        before = pids(pool)
        waiting = [asyncio.create_task(said(pool, "a")) for _ in range(5)]
        await until(lambda: pool._n_waiting == 5)
        await pool.close()
        for task in [*stuck, *waiting]:
            assert await code_of(wait_for(task)) == "draining"
        assert await code_of(said(pool, "b")) == "draining"
        assert not pids(pool)
        for pid in before:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


async def test_the_end_while_processes_start_leaves_none():
    async with working() as pool:
        starting = asyncio.create_task(pool.start())
        asking = asyncio.create_task(code_of(said(pool, "a")))
        await asyncio.sleep(0.01)
        await pool.close()
        await starting
        assert await asking == "draining"
        assert not pids(pool) and not pool._tasks


async def test_a_module_that_does_not_start_is_told_of():
    async with working(module="obedient_worker_that_is_not_there") as pool:
        await pool.start()
        for _ in range(3):
            assert await code_of(said(pool, "a")) == "busy"


async def test_a_slow_grammar_does_not_keep_a_fast_one_waiting():
    """The real checker, one of whose processes does not get on."""

    grammars = Grammars(("<eos>",), 260, timeout_s=FOR_EVER)
    try:
        await grammars._workers.start()
        first, _ = grammars._workers._workers
        assert first.process is not None
        first.process.send_signal(signal.SIGSTOP)
        asked = [Grammar("regex", text) for text in ("a+", "b+")]
        tasks = [asyncio.create_task(grammars.checked(one, "regex")) for one in asked]
        done, slow = await asyncio.wait(tasks, return_when="FIRST_COMPLETED", timeout=PATIENCE)
        assert len(done) == len(slow) == 1
        for number in range(20):
            await grammars.checked(Grammar("regex", f"c{{{number + 1}}}"), "regex")
        (again,) = [one for one, task in zip(asked, tasks, strict=True) if task in slow]
        same = asyncio.create_task(grammars.checked(again, "regex"))
        await asyncio.sleep(0)
        assert len(grammars._checks) == 1, "it is checked once for both"
        first.process.send_signal(signal.SIGCONT)
        assert (await same).grammar == again
    finally:
        await grammars.close()


async def ordinary(pool: WorkerPool[Obeyed]) -> None:
    """Tasks that are answered, and one whose client leaves."""
    await asyncio.gather(*(said(pool, str(n)) for n in range(5)))
    left = asyncio.create_task(pool.ask(Order("b")))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])


async def hostile(pool: WorkerPool[Obeyed]) -> None:
    """Tasks that end their processes, or do not end."""
    with contextlib.suppress(EOFError):
        await pool.ask(Order(dies=True))
    pool._timeout_s = 0.05
    with contextlib.suppress(TimeoutError):
        await pool.ask(Order(hangs=True))
    pool._timeout_s = FOR_EVER


@pytest.mark.parametrize(
    ("work", "rooms"),
    # A process that is over leaves cycles of asyncio's own; it is rare.
    [(ordinary, ("jitney", "asyncio")), (hostile, ("jitney",))],
)
async def test_a_task_that_is_over_leaves_no_cycle(work: Any, rooms: tuple[str, ...]):
    """Twice, since a thread of an earlier test may let go of its own things beside it, once."""

    async with working() as pool:
        await pool.start()
        await work(pool)
        assert not set.intersection(*[await left_by(work, pool, rooms) for _ in range(2)])


async def left_by(work: Any, pool: WorkerPool[Obeyed], rooms: tuple[str, ...]) -> set[str]:
    with garbage(*rooms) as found:
        await work(pool)
    return set(found)
