"""A core without a model, for tests of the process around it:
`ProcessClient(builder="process_core:build")`.

Each step gives every open sequence one token: prompt[0], prompt[0] + 1, ... Some first prompt
tokens make it misbehave; those in _ONCE only in the first core that gets the request.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from engine_infos import changed, engine_info

from jitney.engine.common.engine_info import Seat
from jitney.engine.common.errors import ErrorInfo, ModelError, RequestError
from jitney.engine.common.messages import AskSeatMap, Progress, SeatMap, SequenceEvent, StepReport
from jitney.engine.common.outputs import FinishReason, SequenceOutput
from jitney.engine.common.records import STEP_DTYPE
from jitney.engine.common.requests import EngineRequest

RAISE, DIE, PAUSE, HANG_ONCE, RAISE_ONCE, DIE_ONCE, FAIL = 900, 901, 902, 903, 904, 905, 906
INFO = engine_info(
    vocab_size=1000, seats=16, pages=8, page_size=16, token_budget=64, prefix_cache=False
)


@dataclass
class Row:
    request: EngineRequest
    index: int
    done: int = 0
    seat: int = -1


class Core:
    pause_s = late_plan_slack_s = 0.0  # it never delays a step for more requests

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.ended: list[SequenceOutput] = []
        self.asked: list[AskSeatMap] = []
        self.steps = 0
        self.asleep = False
        self.resets = 0

    @property
    def has_work(self) -> bool:
        return bool(self.rows or self.ended)

    def add(self, request: EngineRequest) -> None:
        if request.prompt[0] == FAIL:
            error = ErrorInfo("request_failed", "it failed")
            self.ended.append(SequenceOutput(request.id, 0, finish="error", error=error))
            return
        had = request.resumed or [[] for _ in range(request.sampling.n)]
        self.rows += [
            Row(request, index, len(tokens))
            for index, tokens in enumerate(had)
            if tokens is not None
        ]

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = "abort"
    ) -> None:
        hit = [
            row for row in self.rows if row.request.id == request_id and index in (None, row.index)
        ]
        self.rows = [row for row in self.rows if row not in hit]
        self.ended += [
            SequenceOutput(request_id=request_id, index=row.index, finish=reason) for row in hit
        ]

    def report_ended(self) -> StepReport | None:
        ended, self.ended = self.ended, []
        return StepReport(ended) if ended else None

    def step(self) -> StepReport:
        assert not self.asleep
        outputs, self.ended = self.ended, []
        self.steps += 1
        events = [self.board(row) for row in self.rows if row.seat < 0]
        for row in self.rows:
            first = row.request.prompt[0]
            fresh = row.request.resumed is None
            if first == RAISE or (first == RAISE_ONCE and fresh):
                raise RuntimeError("asked to fail")
            if first == DIE or (first == DIE_ONCE and fresh):
                os._exit(3)
            if first == HANG_ONCE and fresh:
                time.sleep(60)
            if first == PAUSE:
                time.sleep(0.02)
            row.done += 1
            last = row.done == row.request.sampling.max_tokens
            outputs.append(
                SequenceOutput(
                    request_id=row.request.id,
                    index=row.index,
                    tokens=[self.token(row)],
                    finish="length" if last else None,
                )
            )
        self.rows = [row for row in self.rows if row.done < (row.request.sampling.max_tokens or 1)]
        record = np.zeros(1, STEP_DTYPE)
        for name, value in (("step", self.steps), ("decode", len(outputs)), ("seats", 4)):
            record[name] = value
        asked, self.asked = self.asked, []
        return StepReport(
            outputs,
            record.tobytes(),
            events,
            answers=[self.seat_map(one.ticket) for one in asked],
        )

    def token(self, row: Row) -> int:
        """The newest token of this row."""
        return row.request.prompt[0] + row.done - 1

    def sleep(self, alive: Callable[[], None]) -> int:
        if self.has_work:
            raise RequestError("there is work to do", code="busy")
        alive()
        freed = 0 if self.asleep else 1000
        self.asleep = True
        return freed

    def wake(self, alive: Callable[[], None]) -> None:
        if os.environ.get("JITNEY_TEST_NO_WAKING"):
            raise RuntimeError("there is no memory left")
        self.asleep = False

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def board(self, row: Row) -> SequenceEvent:
        row.seat = min(set(range(INFO.sizes.seats)) - {other.seat for other in self.rows})
        return SequenceEvent(
            "seated", row.request.id, row.index, row.seat, self.steps, 0.0, 1, row.done
        )

    def ask(self, question: AskSeatMap) -> None:
        self.asked.append(question)

    def seat_map(self, ticket: int, *, seats: bool = True) -> SeatMap:
        return SeatMap(
            ticket,
            [Seat(seat=0, state="decode", request_id=row.request.id) for row in self.rows],
            b"",
        )


class SlowLetters(Core):
    """A core whose tokens are letters, and whose steps are slow."""

    def learn(self, tokenizer: str) -> None:
        """Ignore the tokenizer: this core supports no grammars."""

    def step(self) -> StepReport:
        time.sleep(0.01)
        return super().step()

    def token(self, row: Row) -> int:
        return ord("a") + row.done % 26


def build_slow_letters(config, source, progress):
    return SlowLetters(), changed(INFO, model=source.name, context_length=512, pages=256)


def build(config, source, progress):
    progress(Progress("compile", 1, 2, source.name))
    progress(Progress("compile", 2, 2, source.name))
    return Core(), INFO


def build_never(config, source, progress):
    raise ModelError("no such\nmodel")


def _n_builds() -> int:
    """Number of cores that have begun to start, including this one."""
    with open(os.environ["JITNEY_TEST_BUILDS"], "a+") as file:
        file.write("x")
        return file.tell()


def build_that_dies_twice(config, source, progress):
    """Die in the first two builds; the first is killed, as if memory ran out."""
    number = _n_builds()
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 2:
        os._exit(3)
    return Core(), INFO


def build_that_breaks(config, source, progress):
    """Fail in every build, with the same message from the second build on."""
    raise RuntimeError(f"broken {min(_n_builds(), 2)}")


def build_slowly(config, source, progress):
    time.sleep(60)


def build_that_hangs(config, source, progress):
    progress(Progress("compile", 1, 2, source.name))
    time.sleep(60)


def build_step_by_step(config, source, progress):
    """Build for more than a limit of five seconds, with progress reports in between."""
    for done in range(1, 6):
        time.sleep(1.2)
        progress(Progress("compile", done, 5, source.name))
    return Core(), INFO


def build_slowed(*arguments, **named):
    """A core with a model, whose steps take 20 ms more, so that a test can stop an answer."""
    from jitney.engine.core.build import build_engine
    from jitney.engine.core.engine_core import EngineCore

    step = EngineCore.step

    def slowed(self: EngineCore) -> StepReport:
        time.sleep(0.02)
        return step(self)

    EngineCore.step = slowed
    return build_engine(*arguments, **named)
