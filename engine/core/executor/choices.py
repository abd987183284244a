"""The small programs that choose tokens after a step, under masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

import jax

from jitney.engine.core.executor.program import DeviceState, Program, StepCall
from jitney.engine.core.executor.sampler_parts import SamplerParts
from jitney.engine.core.scheduler.buckets import Buckets

#: Factor between the row numbers of two programs; the smallest has one row. One client's grammar
#: should not cost the time of choosing for every seat, and each program costs a second or two of
#: start-up.
_FACTOR = 8
#: With at most this many seats there is a single program, for all of them.
_FEW_SEATS = 4


class Choices:
    """Executables by numbers of rows; `compile` must come first."""

    def __init__(self, seats: int):
        #: Numbers of rows of the programs, ascending; the last program is for all seats.
        self.sizes = [*_below(seats), seats]
        #: Rows -> compiled `Program.choose`, or an equivalent in parts.
        self.programs: dict[int, StepCall] = {}
        #: (a step's logit rows, rows) -> `Program.lower_pick`.
        self.picks: dict[tuple[int, int], jax.stages.Compiled] = {}

    def size(self, rows: int) -> int:
        """Number of rows of the smallest program that holds `rows` rows."""
        return next(size for size in self.sizes if size >= rows)

    def sizes_for(self, logit_rows: int) -> list[int]:
        """Sizes of the programs that may choose for a step of `logit_rows` logit rows."""
        return sorted({self.size(rows) for rows in range(1, logit_rows + 1)})

    def compile(
        self,
        program: Program,
        buckets: Buckets,
        state: DeviceState,
        samplers: SamplerParts | None = None,
    ) -> None:
        """Compile all programs for the steps of these buckets. samplers: for steps in parts."""
        logit_rows = {bucket.seats for bucket in buckets.all()}
        pairs = [(a, b) for a in sorted(logit_rows) for b in self.sizes_for(a) if a != b]
        with ThreadPoolExecutor(2) as pool:
            if samplers is None:
                programs = [
                    program.lowered(f"choose {size}", partial(program.lower_choose, size, state))
                    for size in self.sizes
                ]
                chooses = [pool.submit(program.compile, each).result for each in programs]
            else:
                chooses = [_masked_sampler(samplers, pool, size) for size in self.sizes]
            picks = [
                program.lowered(
                    f"pick {pair[1]} of {pair[0]}", partial(program.lower_pick, *pair, state)
                )
                for pair in pairs
            ]
            self.picks = dict(zip(pairs, pool.map(program.compile, picks), strict=True))
            for size, wait in zip(self.sizes, chooses, strict=True):
                self.programs[size] = wait()


def _masked_sampler(samplers: SamplerParts, pool: Executor, rows: int) -> Callable[[], StepCall]:
    """Begin to compile the sampler for `rows` rows. -> a function that waits for it and returns a
    callable like `Program.choose`.
    """
    wait = samplers.start(pool, rows)
    return lambda: wait().sample_masked


def _below(seats: int) -> Iterator[int]:
    size = 1
    while _FEW_SEATS < seats > size:
        yield size
        size *= _FACTOR
