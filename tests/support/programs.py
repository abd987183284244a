"""Engine programs that are compiled when a step first uses them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import jax
from jax.stages import Compiled, Lowered

from jitney.engine.core.executor.choices import Choices
from jitney.engine.core.executor.sampler_parts import RowSampler, SamplerParts
from jitney.engine.core.executor.step_parts import StepParts
from jitney.engine.core.executor.step_programs import StepPrograms
from jitney.engine.core.scheduler.buckets import Bucket, Buckets


class ProgramsWhenUsed(dict[tuple[Bucket, bool], Any]):
    """The step programs, each compiled when a step first runs it."""

    def __init__(self, programs: StepPrograms):
        super().__init__(programs.executables)
        self.programs = programs

    def __missing__(self, kind: tuple[Bucket, bool]) -> Any:
        self.programs.compile_steps([kind])
        return self[kind]


class PartsWhenUsed(StepParts):
    """The step parts, each compiled when a step first calls it: an engine without requests that
    score a prompt never compiles that program.
    """

    def _lower_scores(self, *arguments: Any) -> Any:
        return partial(super()._lower_scores, *arguments)

    def _submit(self, pool: Executor, lowered: Lowered | Callable[[], Lowered]) -> Future[Any]:
        compiled: list[Compiled] = []

        def run(*arguments: Any) -> Any:
            if not compiled:
                own = lowered if isinstance(lowered, Lowered) else lowered()
                compiled.append(self._program.compile(own))
            return compiled[0](*arguments)

        part: Future[Any] = Future()
        part.set_result(run)
        return part


class ChoicesWhenUsed(Choices):
    """The programs that choose tokens after a step, all compiled when one is first used: an engine
    whose requests do not need them never compiles a second sampler.
    """

    def compile(self, *arguments: Any) -> None:
        def compile_all() -> None:
            self.programs, self.picks = {}, {}
            Choices.compile(self, *arguments)

        self.programs = _Awaited(lambda rows: self.programs[rows], compile_all)
        self.picks = _Awaited(lambda sizes: self.picks[sizes], compile_all)


class _Awaited(dict[Any, Any]):
    """An empty dict; looking up a key compiles everything, then returns `found(key)`."""

    def __init__(self, found: Callable[[Any], Any], compile_all: Callable[[], None]):
        super().__init__()
        self.found = found
        self.compile_all = compile_all

    def __missing__(self, key: Any) -> Any:
        self.compile_all()
        return self.found(key)


class SamplersWhenUsed(SamplerParts):
    """The sampler programs, each compiled when a row first needs it, and once for all engines of a
    process whose samplers have the same shapes.
    """

    def start(self, pool: Executor, rows: int) -> Callable[[], RowSampler]:
        if rows not in self._made:
            self._made[rows] = {name: Future() for name in self._lowerings(rows)}
            for name, lower in self._lowerings(rows).items():
                run: Any = partial(self._run, (name, rows, *self._kind), lower)
                self._made[rows][name].set_result(run)
        return partial(self._finish, rows)

    @property
    def _kind(self) -> tuple[Hashable, ...]:
        """Key of everything, except the number of rows, that the programs depend on."""
        state = jax.tree.leaves((self._state.seat_tokens, self._state.seats))
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in state)
        hurried = jax.config.read("jax_disable_most_optimizations")
        return self._program.sampler, shapes, self._program.kernels.sums_in_halves, hurried

    def _run(self, key: Hashable, lower: Callable[[], Lowered], *args: Any) -> Any:
        if key not in _SAMPLER_PROGRAMS:
            _SAMPLER_PROGRAMS[key] = self._program.compile(lower())
        return _SAMPLER_PROGRAMS[key](*args)


_SAMPLER_PROGRAMS: dict[Hashable, Compiled] = {}


def await_use(programs: StepPrograms, _report: object) -> None:
    """Replaces the function that compiles the programs of all steps; keeps no lowered programs."""
    programs.step = replace(programs.step, kept=None)
    programs.beside = replace(programs.beside, kept=None)
    programs.executables = ProgramsWhenUsed(programs)
    if programs.parts is not None:
        before, state = programs.parts, programs.shapes
        programs.parts = PartsWhenUsed(
            programs.step,
            programs.leaves,
            state,
            programs.builder.layout,
            before._sizes,
            before._segments_of,
        )
        programs.parts.samplers = SamplersWhenUsed(programs.step, state)
    programs.choices = ChoicesWhenUsed(programs.choices.sizes[-1])


@contextmanager
def decoding_beside_prompts() -> Iterator[None]:
    """Run decode steps in the buckets of mixed steps, so that an engine needs only one program."""
    choose = Buckets.choose

    def mixed(self: Buckets, **sizes: Any) -> Bucket:
        return choose(self, **sizes | {"decode_only": False})

    with mock.patch.object(Buckets, "choose", mixed):
        yield
