"""Which of a compiled program's all-reduces run beside something else.

On a TPU an all-reduce of the SparseCores is three instructions: call-start, call-update, which
takes the operand, and call-done. What stands between the last two runs meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from hlo import Instruction, Module
from memory_traffic import operations


@dataclass(frozen=True)
class Sums:
    """Numbers of all-reduces."""

    all: int  #: in the program
    asynchronous: int  #: of them, those that begin and end as instructions of their own
    beside: int  #: of those, the ones with a product between


def sums_of(module: Module) -> Sums:
    """The all-reduces of a program."""
    entry = list(module.entry.instructions.values())
    waited = sum(made.op == "all-reduce" for made in entry)
    starts = [i for i, made in enumerate(entry) if _starts_sum(module, made)]
    beside = sum(_has_product(module, _window(entry, entry[start].name)) for start in starts)
    return Sums(waited + len(starts), len(starts), beside)


def _starts_sum(module: Module, made: Instruction) -> bool:
    if made.op != "call-start":
        return False
    called = module.called(made, "to_apply")
    return any(inner.op == "all-reduce" for inner in called.instructions.values())


def _window(entry: list[Instruction], start: str) -> list[Instruction]:
    """What stands between an all-reduce's operand and its result."""
    update = next(i for i, made in enumerate(entry) if start in made.operands)
    done = next(i for i, made in enumerate(entry) if entry[update].name in made.operands)
    return entry[update + 1 : done]


def _has_product(module: Module, made: list[Instruction]) -> bool:
    for part in made:
        if part.op == "fusion":
            inner = module.called(part)
            if any(operations(inner, one) for one in inner.instructions.values()):
                return True
    return False
