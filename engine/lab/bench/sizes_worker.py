"""Times steps of growing sizes in a separate process: a `TimingOrder` on standard input, lines of
JSON (`TimingLine`) on standard output.

The process is separate because the number of compute threads is fixed per process, and so that its
memory is free when the engine starts.
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
from jitney.engine.common.machine import own_processors
from jitney.engine.common.other_work import OtherWork
from jitney.engine.config import Config
from jitney.engine.core import (
    LLM,
    Bucket,
    StepCase,
)
from jitney.engine.lab.bench.sizes import (
    OtherPrograms,
    SizeTimes,
    Timed,
    TimedStep,
    TimingLine,
    TimingOrder,
)

#: KV positions of each decoding sequence, if the pool is large enough.
_CONTEXT = 384
#: Most rows of one prompt in a step; further rows are other prompts. Attention to longer contexts
#: costs the same in steps of every size.
_PROMPT = 512
#: Longest step after which no larger one is timed, seconds.
_LONGEST_S = 1.0
#: Least repeats and seconds for each step, after one that does not count. The fastest counts, since
#: other work of the machine only makes steps slower.
_REPEATS, _ENOUGH_S = 3, 0.25
#: Most tries for a step that other programs disturb, and seconds between two tries.
_TRIES, _REST_S = 10, 1.0
#: Sends a line to the process that started this one.
_Say = Callable[[TimingLine], None]
#: Option of Linux's prctl: a signal for this process when its parent ends, even while stopped.
_PR_SET_PDEATHSIG = 1


def _main() -> int:
    """Load the model, time its steps, print the times; exit status 1 and one line if that fails."""
    # Libraries may print to standard output.
    answers, sys.stdout = sys.stdout, sys.stderr
    order = msgspec.json.decode(sys.stdin.readline(), type=TimingOrder)
    config = Config.model_validate_json(bytes(order.config))
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(19)  # a serving engine has priority

    def say(line: TimingLine) -> None:
        print(msgspec.json.encode(line).decode(), file=answers, flush=True)

    try:
        say(TimingLine(times=_measure(LLM(config), order, say)))
    except JitneyError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _die_with_parent() -> None:
    """Make this process end with its parent, which keeps its standard input open."""
    sys.stdin.read()
    os._exit(1)


def _measure(llm: LLM, order: TimingOrder, say: _Say) -> SizeTimes:
    """Time steps of an idle engine, from small ones up to the first that is too long to be chosen.
    Each step that is not known yet is sent once it is timed. Raises ConfigError, and OtherPrograms,
    which is sent, too.
    """
    scheduler = llm.core.scheduler
    runner: Any = llm.core.runner
    pool, buckets = scheduler.pool, scheduler.buckets
    longest = min(llm.info.model.context_length, pool.capacity * pool.page_size) - 1
    decode = list(_decode_cases(llm, longest))
    if not decode:
        raise ConfigError("the KV pool is too small to time a step: give it more --pages")
    each = min(_PROMPT, longest)
    most = pool.capacity // pool.pages_for(each)
    prompts = [StepCase(bucket, (), _prompt_chunks(bucket, each, most)) for bucket in buckets.mixed]
    steps_by_size = {(each.kind, each.step.size): each.step for each in order.known}
    timer = _StepTimer(llm, steps_by_size, say, order.most_other_work)
    return SizeTimes(
        threads=len(own_processors()),
        decode=tuple(timer.timed("decode", decode)),
        prompts=tuple(timer.timed("prompts", prompts)),
        rows_choose=_rows_choose(runner),
        untried=runner.programs.step.kernels.untried,
    )


def _decode_cases(llm: LLM, longest: int) -> Iterator[StepCase]:
    """Decode steps for at most as many seats as there are pages. longest: context of a sequence."""
    pool = llm.core.scheduler.pool
    for bucket in llm.core.scheduler.buckets.decode:
        if bucket.seats > pool.capacity:
            return
        room = pool.capacity // bucket.seats * pool.page_size
        context = min(_CONTEXT, longest, room) - 1
        yield StepCase(bucket, (context,) * bucket.seats)


def _rows_choose(runner: Any) -> bool:
    """Whether a larger `product_rows` would change the kernel of any of the model's products."""
    if runner.programs.step.kernels.name != "native":
        return False
    linears = runner.programs.step.model(runner.leaves).linears()
    return any(one.packed.scheme == "plain" and one.kernel.ndim == 2 for one in linears)


def _prompt_chunks(bucket: Bucket, each: int, most: int) -> tuple[tuple[int, int], ...]:
    """(start, rows) of at most `most` prompts that fill the bucket: `each` rows per prompt, the
    last one with the remaining rows.
    """
    firsts = range(0, bucket.tokens, each)[: min(most, bucket.seats)]
    return tuple((0, min(each, bucket.tokens - first)) for first in firsts)


@dataclass(frozen=True)
class _StepTimer:
    llm: LLM
    #: (kind, size) -> time of a step that is known already.
    known: Mapping[tuple[str, int], Timed]
    say: _Say
    #: See `TimingOrder`.
    most_other_work: float = OtherWork.most

    def timed(
        self, kind: Literal["decode", "prompts"], cases: Sequence[StepCase]
    ) -> Iterator[Timed]:
        """Time each case, up to the first that takes too long. Raises OtherPrograms."""
        for case in cases:
            step = self.known.get((kind, case.bucket.tokens))
            if step is None:
                started = time.process_time()
                step = Timed(case.bucket.tokens, self._seconds_alone(case))
                # CPU time, since the clock also runs while this process is stopped.
                spent_s = (time.process_time() - started) / len(own_processors())
                self.say(TimingLine(step=TimedStep(kind, step, spent_s)))
            yield step
            if step.seconds > _LONGEST_S:
                return

    def _seconds_alone(self, case: StepCase) -> float:
        """Seconds of a step that no other program disturbed. Raises OtherPrograms."""
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
    """Least seconds of a step without overlap, from its plan to its tokens."""
    step = case.on(llm.core)

    def run() -> float:
        started = time.perf_counter()
        step.fetch(step.launch(step.batch()))
        return time.perf_counter() - started

    run()
    seconds = [run()]
    while sum(seconds) < (_ENOUGH_S if len(seconds) >= _REPEATS else _LONGEST_S):
        seconds.append(run())
    return min(seconds)


if __name__ == "__main__":
    sys.exit(_main())
