"""Programs of engines that are compiled when a step first wants them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.core.build import build_engine
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.executor.choices import Choices
from jitney.engine.core.executor.runner import Runner
from jitney.engine.core.scheduler.buckets import Bucket


class ProgramsWhenUsed(dict[tuple[Bucket, bool], Any]):
    """Of one runner: the same programs, but those that no step runs are never compiled."""

    def __init__(self, runner: Runner):
        super().__init__(runner.executables)
        self.runner = runner

    def __missing__(self, kind: tuple[Bucket, bool]) -> Any:
        self.runner.compile_steps([kind])
        return self[kind]


class ChoicesWhenUsed(Choices):
    """The same programs, all of them compiled when one is first wanted: an engine whose requests
    choose nothing behind a step never compiles a second sampler.
    """

    def compile(self, *arguments: Any) -> None:
        def compile_all() -> None:
            self.programs, self.picks = {}, {}
            Choices.compile(self, *arguments)

        self.programs = _Awaited(lambda rows: self.programs[rows], compile_all)
        self.picks = _Awaited(lambda sizes: self.picks[sizes], compile_all)


class _Awaited(dict[Any, Any]):
    """Empty; who asks for something has all compiled, and gets what `found` then finds."""

    def __init__(self, found: Callable[[Any], Any], compile_all: Callable[[], None]):
        super().__init__()
        self.found = found
        self.compile_all = compile_all

    def __missing__(self, key: Any) -> Any:
        self.compile_all()
        return self.found(key)


def await_use(runner: Runner, _report: object) -> None:
    """In place of compiling all programs of a runner."""
    runner.executables = ProgramsWhenUsed(runner)
    runner.choices = ChoicesWhenUsed(runner.choices.sizes[-1])


def build_awaiting(*arguments: Any, **named: Any) -> tuple[EngineCore, EngineInfo]:
    """As `build_engine`, for a process of its own that runs few of its programs:
    `ProcessClient(builder="programs:build_awaiting")`.
    """
    with mock.patch.object(Runner, "_compile_steps", await_use):
        return build_engine(*arguments, **named)
