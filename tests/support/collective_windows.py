"""Counts the all-reduces of a compiled program that overlap with other work.

On a TPU an all-reduce of the SparseCores is three instructions: call-start, call-update, which
takes the operand, and call-done. The instructions between the last two run at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

from hlo import Instruction, Module
from memory_traffic import operations


@dataclass(frozen=True)
class Sums:
    """Numbers of all-reduces."""

    all: int  #: in the program
    asynchronous: int  #: those that begin and end in separate instructions
    beside: int  #: those of the asynchronous ones that overlap with a product


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
    """The instructions between an all-reduce's call-update and its call-done."""
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
