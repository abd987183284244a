"""The core of an engine that shares the experts of its model with other engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jitney.engine.common.messages import StepReport
from jitney.engine.core.distributed.step_barrier import StepBarrier
from jitney.engine.core.engine_core import EngineCore


class _LockstepRunner(Protocol):
    """The runner of an engine that shares experts."""

    def run_empty_step(self) -> None:
        """Run a step without rows of this engine."""
        ...


@dataclass(eq=False, kw_only=True)
class LockstepCore(EngineCore):
    """Runs each step together with the other engines, without rows if it has no work."""

    lockstep_runner: _LockstepRunner
    #: Agrees with the other engines on the size of each step.
    barrier: StepBarrier

    def step(self) -> StepReport:
        """Run `EngineCore.step`, then an empty step if other engines wait for this one."""
        report = super().step()
        self.run_empty_step()
        return report

    def run_empty_step(self) -> None:
        """Run a step without rows if other engines wait for this one."""
        if self.barrier.is_asked():
            self.lockstep_runner.run_empty_step()

    def fileno(self) -> int:
        """A file descriptor that is readable while other engines wait for this one."""
        return self.barrier.fileno()
