"""Interprets the few PTX instructions of our kernels' inline assembly, on numpy arrays of words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

type Words = np.ndarray  # uint32, or uint16 for registers of 16 bits


def run(assembly: str, inputs: Sequence[Words], n_outputs: int) -> list[Words]:
    """The words of registers $0 .. $(n_outputs - 1); the inputs are the registers after them.
    Raises KeyError for an unknown instruction or a register without a value.
    """
    registers = {f"${n_outputs + i}": words for i, words in enumerate(inputs)}

    def read(operand: str) -> Words:
        if operand[0].isdigit():
            return np.full(inputs[0].shape, int(operand, 0), np.uint32)
        return registers[operand]

    for line in assembly.strip(" {}\n").split(";"):
        instruction, _, rest = line.strip().partition(" ")
        if not instruction or instruction == ".reg":
            continue
        halves = re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", rest)
        if instruction == "mov.b32" and halves:
            low, high, source = halves.groups()
            registers[low] = read(source).astype(np.uint16)
            registers[high] = (read(source) >> 16).astype(np.uint16)
            continue
        target, *sources = rest.split(", ")
        registers[target] = _INSTRUCTIONS[instruction](*map(read, sources))
    return [registers[f"${i}"] for i in range(n_outputs)]


def _permute(a: Words, b: Words, selector: Words) -> Words:
    """Four of the eight bytes of a and b, by the low three bits of each nibble of the selector."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << 32
    result = np.zeros_like(both)
    for byte in range(4):
        shift = (selector >> 4 * byte & 7).astype(np.uint64) * 8
        result |= (both >> shift & 0xFF) << 8 * byte
    return result.astype(np.uint32)


def _halves_minus(a: Words, b: Words) -> Words:
    return (a.view(np.float16) - b.view(np.float16)).view(np.uint32)


def _halves_of_e4m3(codes: Words) -> Words:
    return codes.view(jnp.float8_e4m3fn).astype(np.float16).view(np.uint32)


_INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "and.b32": np.bitwise_and,
    "cvt.rn.f16x2.e4m3x2": _halves_of_e4m3,
    "mov.b32": np.copy,
    "prmt.b32": _permute,
    "sub.f16x2": _halves_minus,
    "xor.b32": np.bitwise_xor,
}
