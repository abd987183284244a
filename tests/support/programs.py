"""Programs of engines that are compiled when a step first wants them."""

from __future__ import annotations

from typing import Any

from jitney.engine.executor.runner import Runner
from jitney.engine.scheduler.buckets import Bucket


class ProgramsWhenUsed(dict[tuple[Bucket, bool], Any]):
    """Of one runner: the same programs, but those that no step runs are never compiled."""

    def __init__(self, runner: Runner):
        super().__init__(runner.executables)
        self.runner = runner

    def __missing__(self, kind: tuple[Bucket, bool]) -> Any:
        self.runner.compile_steps([kind])
        return self[kind]


def await_use(runner: Runner, _report: object) -> None:
    """In place of compiling all programs of a runner."""
    runner.executables = ProgramsWhenUsed(runner)
