"""Times steps in the background of a serving engine: only while that is idle, for a limited time,
and stored step by step, so that the next start of the server continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

import msgspec

from jitney.engine.config import Config
from jitney.engine.lab.bench.sizes import NoTimeLeft, SizeTimes, Timed, TimedStep, time_apart
from jitney.engine.lab.tuned_sizes import MeasuredTimes

#: Most seconds of timing over all starts.
_MOST_S = 15.0


class TimingBehind:
    """Times steps in a process that is stopped while the engine is busy.

    times: the times so far. keep: called after each new time, to store them.
    """

    def __init__(self, times: MeasuredTimes, keep: Callable[[], object]):
        self.times = times
        self._keep = keep
        self._process: asyncio.subprocess.Process | None = None
        self._busy = False

    def hold(self, busy: bool) -> None:
        """Stop the process if the engine is busy, or continue it."""
        self._busy = busy
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGSTOP if busy else signal.SIGCONT)

    async def time_steps(self, config: Config) -> SizeTimes:
        """`time_apart`, without timing known steps again. Also raises NoTimeLeft, once timing has
        taken 15 s in all.
        """
        engine = config.engine
        # The settings on which the time of a step depends, besides its size.
        made_by = f"{engine.threads} {engine.product_rows} {engine.kernels}"
        sizes = engine.max_seats, engine.token_budget, engine.seat_buckets, engine.token_buckets
        name = " ".join((made_by, *map(str, sizes)))
        done = self.times.engines.get(name)
        if done is not None:
            return msgspec.convert(done, SizeTimes)
        if self.times.spent_s >= _MOST_S:
            raise NoTimeLeft("timing steps has taken as long as it may")

        def keep(timed: TimedStep) -> None:
            self.times.steps[f"{made_by} {timed.kind} {timed.step.size}"] = timed.step.seconds
            self.times.spent_s += timed.spent_s
            self._keep()

        try:
            times = await time_apart(
                config,
                tuple(self._known(made_by)),
                on_process=self._began,
                on_step=keep,
                limit_s=None,
            )
        finally:
            self._process = None
        self.times.engines[name] = msgspec.to_builtins(times)
        self._keep()
        return times

    def _began(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.hold(self._busy)

    def _known(self, made_by: str) -> Iterator[TimedStep]:
        """Known steps of engines that differ only in their sizes."""
        for name, seconds in self.times.steps.items():
            maker, kind, size = name.rsplit(" ", 2)
            if maker == made_by and kind in ("decode", "prompts"):
                yield TimedStep(kind, Timed(int(size), seconds))
