"""Memory of compiled steps, from XLA's analysis of each program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import jax

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of a step on each device, without weights, pools and the state of seats. For a step in
    parts, the most of any part.
    """

    #: Name of the step, such as "mixed-512 sampling".
    name: str
    temporaries: int
    #: Bytes of results that do not reuse the memory of donated arguments.
    outputs: int

    @classmethod
    def of(cls, name: str, step: Any) -> StepMemory:
        """The memory of a compiled step."""
        analyses = [_analysed(program) for program in programs_of(step)]
        return cls(
            name,
            temporaries=max(memory.temp_size_in_bytes for memory in analyses),
            outputs=max(
                memory.output_size_in_bytes - memory.alias_size_in_bytes for memory in analyses
            ),
        )

    @property
    def total(self) -> int:
        return self.temporaries + self.outputs


@dataclass(frozen=True, slots=True)
class ProgramsMemory:
    """Memory of all compiled steps of an engine, on each device."""

    steps: tuple[StepMemory, ...]
    #: Bytes of machine code of all programs; 0 if XLA does not report it, as on CPUs.
    code: int

    @classmethod
    def of(cls, named: Iterable[tuple[str, Any]]) -> ProgramsMemory:
        """The memory of all steps. named: the name and the compiled program of each step."""
        named = list(named)
        programs = {program for _, step in named for program in programs_of(step)}
        code = sum(_analysed(program).generated_code_size_in_bytes for program in programs)
        return cls(tuple([StepMemory.of(name, step) for name, step in named]), code)

    @property
    def largest(self) -> StepMemory:
        """The step that needs most memory; without compiled steps, one that needs none."""
        return max(self.steps, key=lambda step: step.total, default=StepMemory("none", 0, 0))

    def __str__(self) -> str:
        largest = self.largest
        code = f"; code of all {self.code / _MIB:.1f} MiB" if self.code else ""
        return (
            f"{len(self.steps)} steps; the largest ({largest.name}) needs "
            f"{largest.temporaries / _MIB:.1f} MiB of temporaries and {largest.outputs / _MIB:.1f} "
            f"MiB of results{code}"
        )

    def table(self) -> Iterator[str]:
        """A line for each step, the largest first."""
        width = max([len("step"), *[len(step.name) for step in self.steps]])
        yield f"{'step':<{width}}  temporaries, MiB  results, MiB"
        for step in sorted(self.steps, key=lambda step: -step.total):
            yield (
                f"{step.name:<{width}}  {step.temporaries / _MIB:>16.1f}  "
                f"{step.outputs / _MIB:>12.1f}"
            )


def programs_of(step: Any) -> Iterable[jax.stages.Compiled]:
    """The programs that run a step: the step itself, or its parts."""
    return (step,) if isinstance(step, jax.stages.Compiled) else step.programs


#: Cache by program: XLA takes 2 ms for an analysis, and steps in parts share most programs.
_analyses: WeakKeyDictionary[jax.stages.Compiled, Any] = WeakKeyDictionary()


def _analysed(program: jax.stages.Compiled) -> Any:
    memory = _analyses.get(program)
    if memory is not None:
        return memory
    memory = _analyses[program] = program.memory_analysis()
    assert memory is not None  # XLA reports it on every platform that we compile for
    return memory
