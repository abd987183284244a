"""An engine that shares the experts of its model with others, whose steps it takes part in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jitney.engine.common.messages import StepReport
from jitney.engine.core.distributed.rounds import Rounds
from jitney.engine.core.engine_core import EngineCore


class _Partner(Protocol):
    """The device half of an engine that shares experts."""

    def take_part(self) -> None:
        """Run a step in which this engine has no row."""
        ...


@dataclass(eq=False, kw_only=True)
class JoinedCore(EngineCore):
    """Each step is one of all engines; where this one has nothing to run it takes part without a
    row, as long as any other has.
    """

    #: Its runner.
    partner: _Partner
    #: How its runner agrees with the others.
    rounds: Rounds

    def step(self) -> StepReport:
        """As `EngineCore.step`. What this engine did not plan it takes part in."""
        report = super().step()
        self.take_part()
        return report

    def take_part(self) -> None:
        """Run a step for the others, if they wait for this engine."""
        if self.rounds.is_asked():
            self.partner.take_part()

    def fileno(self) -> int:
        """What an idle process may wait for, beside its own messages."""
        return self.rounds.fileno()
