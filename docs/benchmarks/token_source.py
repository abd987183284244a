"""A core without a device: every open sequence gets a token per step, at a fixed step time.

For `http_cost.py --step-ms`, whose server builds it in place of an engine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from engine_infos import engine_info
from process_core import Core, Row

from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.common.messages import Progress, SequenceEvent, StepReport
from jitney.engine.config import Config
from jitney.engine.core import ModelSource

#: Environment variable with the seconds of a step.
STEP_S = "HTTP_COST_STEP_S"
_SEATS = 1024
#: Tokens are single letters: the code of the first, and their number.
_A, _LETTERS = 97, 26


class PacedCore(Core):
    """A core whose steps take a fixed time, like a device's."""

    def __init__(self, step_s: float):
        super().__init__()
        self._step_s = step_s
        self._next = 0.0
        self._free = set(range(_SEATS))

    def step(self) -> StepReport:
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + self._step_s
        before = self.rows
        report = super().step()
        still = {row.seat for row in self.rows}
        self._free |= {row.seat for row in before if row.seat not in still}
        for output in report.outputs:
            output.tokens = [_A + token % _LETTERS for token in output.tokens]
        return report

    def board(self, row: Row) -> SequenceEvent:
        row.seat = min(self._free)
        self._free.discard(row.seat)
        return SequenceEvent("seated", row.request.id, 0, row.seat, self.steps, 0.0, 1, 0)

    def learn(self, tokenizer: str) -> None:
        """Do nothing: this core has no grammars."""

    def check(self) -> None:
        """Do nothing: this core has no pages."""


def build(
    config: Config, source: ModelSource, progress: Callable[[Progress], None]
) -> tuple[PacedCore, EngineInfo]:
    """Build the core; has the signature of `jitney.engine.core.build:build_engine`."""
    info = engine_info(
        vocab_size=256,
        seats=_SEATS,
        pages=1 << 16,
        page_size=16,
        token_budget=64,
        context_length=4096,
        max_waiting_requests=2048,
        prefix_cache=False,
    )
    return PacedCore(float(os.environ[STEP_S])), info
