"""Times steps of growing sizes in a process of its own: a `TimingOrder` on standard input,
lines of JSON (`TimingLine`) on standard output.

Its own process, since the threads that compute are chosen once, and so that nothing of it is left
when the engine starts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from jitney.engine.common.errors import ConfigError, JitneyError
from jitney.engine.config import Config
from jitney.engine.core import (
    LLM,
    Bucket,
    Buckets,
    OtherWork,
    PagePool,
    own_processors,
)
from jitney.engine.lab.bench.sizes import (
    OtherPrograms,
    SizeTimes,
    Timed,
    TimedStep,
    TimingLine,
    TimingOrder,
)
from jitney.engine.lab.bench.step import StepCase
from jitney.kernels.cpu.build import Level

#: KV positions of each decoding sequence, where the pool has room for them.
_CONTEXT = 384
#: The longest prompt of a step: rows beyond it are more prompts. What a row of a longer one attends
#: to, it does in steps of every size.
_PROMPT = 512
#: Seconds of a step beyond which no larger one is timed.
_LONGEST_S = 1.0
#: Each step is run so often, and for so many seconds, after one that does not count. The quickest
#: counts: what else a machine does makes steps slower, never quicker.
_REPEATS, _ENOUGH_S = 3, 0.25
#: A step beside which other programs worked is timed again, so often and after so many seconds.
_TRIES, _REST_S = 10, 1.0
#: Says a line to the process that started this one.
_Say = Callable[[TimingLine], None]
#: Linux: what ends with the process that started it, even while it stands still.
_PR_SET_PDEATHSIG = 1


def _main() -> int:
    """Load the model, time its steps, print; exit status 1 and one line if that cannot be."""
    # Libraries may print what they like.
    answers, sys.stdout = sys.stdout, sys.stderr
    order = msgspec.json.decode(sys.stdin.readline(), type=TimingOrder)
    config = Config.model_validate_json(bytes(order.config))
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(19)  # a server that serves meanwhile comes first

    def say(line: TimingLine) -> None:
        print(msgspec.json.encode(line).decode(), file=answers, flush=True)

    try:
        say(TimingLine(times=_measure(LLM(config), order, say)))
    except JitneyError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _die_with_parent() -> None:
    """End this process when its parent, which holds its standard input open, has ended."""
    sys.stdin.read()
    os._exit(1)


def _measure(llm: LLM, order: TimingOrder, say: _Say) -> SizeTimes:
    """Steps of an engine that does nothing else, from small ones up to the first that is too long
    to be chosen; of those that are not known, each is said once it is timed. Raises ConfigError,
    and OtherPrograms, which is said too.
    """
    scheduler = llm.core.scheduler
    pool, buckets = scheduler.pool, scheduler.buckets
    longest = min(llm.info.model.context_length, pool.capacity * pool.page_size) - 1
    decode = list(_decode_cases(buckets, pool, longest))
    if not decode:
        raise ConfigError("the KV pool is too small to time a step: give it more --pages")
    each = min(_PROMPT, longest)
    most = pool.capacity // pool.pages_for(each)
    prompts = [StepCase(bucket, (), _prompt_chunks(bucket, each, most)) for bucket in buckets.mixed]
    known = {(each.kind, each.step.size): each.step for each in order.known}
    timer = _StepTimer(llm, known, say, order.most_other_work)
    return SizeTimes(
        threads=len(own_processors()),
        decode=tuple(timer.timed("decode", decode)),
        prompts=tuple(timer.timed("prompts", prompts)),
        rows_choose=_rows_choose(llm.core.runner),
        untried=_untried(llm.core.runner),
    )


def _decode_cases(buckets: Buckets, pool: PagePool, longest: int) -> Iterator[StepCase]:
    """For as many seats as have a page each. longest: context of one."""
    for bucket in buckets.decode:
        if bucket.seats > pool.capacity:
            return
        room = pool.capacity // bucket.seats * pool.page_size
        context = min(_CONTEXT, longest, room) - 1
        yield StepCase(bucket, (context,) * bucket.seats)


def _rows_choose(runner: Any) -> bool:
    """Whether any of the model's products would be others' with more `product_rows`."""
    if runner.programs.step.kernels.name != "native":
        return False
    linears = runner.programs.step.model(runner.leaves).linears()
    return any(one.packed.scheme == "plain" and one.kernel.ndim == 2 for one in linears)


def _untried(runner: Any) -> bool:
    kernels = runner.programs.step.kernels
    return kernels.name == "native" and not Level.is_measured(kernels.instructions)


def _prompt_chunks(bucket: Bucket, each: int, most: int) -> tuple[tuple[int, int], ...]:
    """(start, rows) of prompts of `each` rows, the last one of what is left, that fill the bucket;
    at most `most` of them.
    """
    firsts = range(0, bucket.tokens, each)[: min(most, bucket.seats)]
    return tuple((0, min(each, bucket.tokens - first)) for first in firsts)


@dataclass(frozen=True)
class _StepTimer:
    llm: LLM
    #: By kind and size.
    known: Mapping[tuple[str, int], Timed]
    say: _Say
    #: See `TimingOrder`.
    most_other_work: float = OtherWork.most

    def timed(
        self, kind: Literal["decode", "prompts"], cases: Sequence[StepCase]
    ) -> Iterator[Timed]:
        """Each case, up to the first that takes too long. Raises OtherPrograms."""
        for case in cases:
            step = self.known.get((kind, case.bucket.tokens))
            if step is None:
                started = time.process_time()
                step = Timed(case.bucket.tokens, self._seconds_alone(case))
                # Not by the clock, which goes on while this process stands still.
                spent_s = (time.process_time() - started) / len(own_processors())
                self.say(TimingLine(step=TimedStep(kind, step, spent_s)))
            yield step
            if step.seconds > _LONGEST_S:
                return

    def _seconds_alone(self, case: StepCase) -> float:
        """Seconds of a step beside which no other program worked. Raises OtherPrograms."""
        for turn in range(_TRIES):
            if turn:
                time.sleep(_REST_S)
            others = OtherWork(own_processors())
            seconds = _least_seconds(self.llm, case)
            share = others.share()
            if share <= self.most_other_work:
                return seconds
        self.say(TimingLine(other_work=share))
        raise OtherPrograms(share)


def _least_seconds(llm: LLM, case: StepCase) -> float:
    """Least seconds of a step alone, from its plan to its tokens."""
    runner: Any = llm.core.runner
    plan = case.plan(0, llm.core.scheduler.pool.page_size)

    def run() -> float:
        started = time.perf_counter()
        runner.fetch(runner.launch(runner.batch(plan)))
        return time.perf_counter() - started

    run()
    seconds = [run()]
    while sum(seconds) < (_ENOUGH_S if len(seconds) >= _REPEATS else _LONGEST_S):
        seconds.append(run())
    return min(seconds)


if __name__ == "__main__":
    sys.exit(_main())
