"""Reads the text of an optimised HLO module: its computations, their instructions, and the arrays
that these read and write.

It parses only what is needed to count bytes and operations: shapes, dtypes, memory spaces, operands
and attributes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property

#: Bits per element, where the name does not end in them.
BITS = {"pred": 8, "token": 0, "opaque": 0}
ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](?:\{([^{}]*)\})?")
COMMENT = re.compile(r"/\*.*?\*/")
HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
OPCODE = re.compile(r"\s*([\w\-]+)\(")


@dataclass(frozen=True)
class Array:
    """One array: dtype as in HLO, sizes, and memory space (0: the device's main memory)."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def itemsize(self) -> float:
        """Bytes per element: "bf16" 2, "f8e4m3fn" 1, "s4" 0.5."""
        bits = BITS.get(self.dtype)
        return (int(re.findall(r"\d+", self.dtype)[0]) if bits is None else bits) / 8

    @property
    def nbytes(self) -> float:
        """Bytes in main memory: an array kept on the chip costs no traffic."""
        return 0.0 if self.space else self.elements * self.itemsize


@dataclass(frozen=True)
class Instruction:
    """name = arrays op(operands), attributes; a tuple's arrays are flattened."""

    name: str
    arrays: tuple[Array, ...]
    op: str
    operands: tuple[str, ...]
    arguments: str  # the text between the parentheses
    attributes: str
    root: bool

    @property
    def nbytes(self) -> float:
        """Bytes of the whole result."""
        return sum(array.nbytes for array in self.arrays)

    def calls(self, key: str = "calls") -> str:
        """The computation that an attribute names; "" without one."""
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return match.group(1) if match else ""

    def numbers(self, key: str) -> tuple[int, ...]:
        """A list of numbers: lhs_contracting_dims={1} -> (1,)."""
        match = re.search(rf"\b{key}=\{{([\d,]*)\}}", self.attributes)
        return tuple(int(n) for n in match.group(1).split(",") if n) if match else ()

    def quoted(self, key: str) -> str:
        """A text: op_name="jit(plain)/add" -> jit(plain)/add."""
        match = re.search(rf'\b{key}="((?:[^"\\]|\\.)*)"', self.attributes)
        return match.group(1) if match else ""

    @property
    def index(self) -> int:
        """The index of a parameter or a get-tuple-element."""
        if self.op == "parameter":
            return int(self.arguments)
        match = re.search(r"\bindex=(\d+)", self.attributes)
        return int(match.group(1)) if match else 0


@dataclass(frozen=True)
class Computation:
    """Instructions in their order."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @cached_property
    def root(self) -> Instruction:
        return next(made for made in self.instructions.values() if made.root)

    @cached_property
    def parameters(self) -> list[Instruction]:
        """The parameters, in the order of a caller's operands."""
        parameters = [made for made in self.instructions.values() if made.op == "parameter"]
        return sorted(parameters, key=lambda made: made.index)

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Name -> the instructions that use it as an operand."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for made in self.instructions.values():
            for operand in dict.fromkeys(made.operands):
                users[operand].append(made)
        return users

    def inputs(self, made: Instruction) -> list[Instruction]:
        """The instructions that compute an instruction's operands."""
        return [self.instructions[name] for name in made.operands]


@dataclass(frozen=True)
class Module:
    """All computations; `entry` is the program."""

    computations: dict[str, Computation]
    entry: Computation

    def called(self, made: Instruction, key: str = "calls") -> Computation:
        """The computation that an instruction calls."""
        return self.computations[made.calls(key)]


def parse(text: str) -> Module:
    """A module from what `compiled.as_text()` returns. Raises ValueError for text that holds no
    ENTRY.
    """
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        header = HEADER.match(line)
        if header:
            current = computations[header.group(2)] = Computation(header.group(2))
            entry = current if header.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and INSTRUCTION.match(line):
            made = parse_instruction(line)
            current.instructions[made.name] = made
    if entry is None:
        raise ValueError("the text holds no ENTRY computation")
    return Module(computations, entry)


def parse_instruction(line: str) -> Instruction:
    """One line of a computation."""
    line = COMMENT.sub("", line)
    head = INSTRUCTION.match(line)
    assert head
    rest = line[head.end() :]
    end = closing(rest, 0) if rest.startswith("(") else re.match(r"\S+", rest).end()  # pyright: ignore[reportOptionalMemberAccess]
    shape, rest = rest[:end], rest[end:]
    opcode = OPCODE.match(rest)
    assert opcode, line[:200]
    stop = closing(rest, opcode.end() - 1)
    arguments = rest[opcode.end() : stop - 1]
    return Instruction(
        head.group(2),
        arrays_of(shape),
        opcode.group(1),
        tuple(re.findall(r"%([\w.\-]+)", arguments)),
        arguments,
        rest[stop:],
        bool(head.group(1)),
    )


def closing(text: str, start: int) -> int:
    """One past the parenthesis that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at + 1
    raise ValueError(f"an open parenthesis: {text[start : start + 80]}")


def arrays_of(shape: str) -> tuple[Array, ...]:
    """Every array of a shape: (f32[2,3]{1,0:T(8,128)S(1)}, s32[]) -> two."""
    arrays = []
    for dtype, dims, layout in ARRAY.findall(shape):
        space = re.search(r"S\((\d+)\)", layout)
        sizes = tuple(int(re.sub(r"\D", "", size)) for size in dims.split(",") if size)
        arrays.append(Array(dtype, sizes, int(space.group(1)) if space else 0))
    return tuple(arrays)
