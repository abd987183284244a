"""Compiles Triton kernels for GPUs that are not on this machine, exactly as the engine's wrappers
call them.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jitney.kernels.triton_gpu.launch import _compile_options

PROGRAMS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {
    "float32": "*fp32",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "int32": "*i32",
    "int8": "*i8",
    "uint8": "*u8",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e5m2": "*fp8e5",
}


@dataclass(frozen=True)
class Call:
    """One launch: the kernel, its pointers' types, its constants, and its compile options."""

    kernel: Any
    types: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    grid: tuple[int, ...]
    warps: int
    stages: int
    registers: int


@dataclass(frozen=True)
class Resources:
    """The compiled program of a call, and the resources that it uses."""

    name: str
    registers: int
    spilled: int  # bytes stored to and loaded from local memory
    shared: int  # bytes
    ptx: str

    @property
    def has_wgmma(self) -> bool:
        """Whether Hopper's warp-group products are used."""
        return "wgmma.mma_async" in self.ptx


@dataclass(frozen=True)
class Recorder:
    """A `jitney.kernels.triton_gpu.launch.Launch` that runs nothing and records its calls."""

    sm: int
    calls: list[Call] = field(default_factory=list, compare=False)

    def __call__(
        self,
        kernel: Any,
        *args: Any,
        out: Any,
        grid: tuple[int, ...],
        warps: int,
        stages: int,
        registers: int = 0,
        **constants: Any,
    ) -> Any:
        pointers = [*args, *jax.tree.leaves(out)]
        types = tuple(TYPES[jnp.dtype(array.dtype).name] for array in pointers)
        own = tuple(constants.items())
        self.calls.append(Call(kernel, types, own, grid, warps, stages, registers))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), out)


def record(sm: int, use: Callable[[Any], Any]) -> list[Call]:
    """The launches made while tracing use(launch)."""
    recorder = Recorder(sm)
    jax.eval_shape(lambda: use(recorder))
    return recorder.calls


def compile_call(call: Call, sm: int) -> Resources:
    """Compile one call for compute capability `sm`. Raises Triton's exceptions."""
    names = call.kernel.arg_names
    constants = dict(call.constants)
    pointers = [name for name in names if name not in constants]
    assert len(pointers) == len(call.types), "every pointer has an argument"
    signature = dict(zip(pointers, call.types, strict=True)) | dict.fromkeys(constants, "constexpr")
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(call.kernel, {name: signature[name] for name in names}, constants, aligned)
    options = {"num_warps": call.warps, "num_stages": call.stages}
    options |= _compile_options(sm, call.registers)
    made = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    ptx = str(made.asm["ptx"])
    registers, spilled = assemble(ptx, sm)
    return Resources(call.kernel.__name__, registers, spilled, made.metadata.shared, ptx)


def assemble(ptx: str, sm: int) -> tuple[int, int]:
    """(registers a thread, bytes spilled) as ptxas reports them."""
    report = _run_ptxas(ptx, sm, "/dev/null")
    registers = max(map(int, re.findall(r"Used (\d+) registers", report)))
    return registers, sum(map(int, re.findall(r"(\d+) bytes spill", report)))


def longest_loop(ptx: str, sm: int, folder: Path) -> list[str]:
    """The machine instructions of the longest innermost loop, each without its operands; files go
    into `folder`.
    """
    _run_ptxas(ptx, sm, str(folder / "kernel.cubin"))
    listing = subprocess.run(
        [str(PROGRAMS / "nvdisasm"), "-c", str(folder / "kernel.cubin")],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    names: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif found := re.match(r"\s+/\*\w{4,}\*/\s+(?:@!?U?P\w+ )?\s*(\S+)(.*);", line):
            names.append(found[1])
            target = re.search(r"`\((\.L_x_\d+)\)", found[2]) if found[1] == "BRA" else None
            if target and target[1] in labels:
                loops.append((labels[target[1]], len(names)))
    innermost = [
        (first, last)
        for first, last in loops
        if not any(first <= a and b <= last for a, b in loops if (a, b) != (first, last))
    ]
    first, last = max(innermost, key=lambda loop: loop[1] - loop[0])
    return names[first:last]


def _run_ptxas(ptx: str, sm: int, output: str) -> str:
    """Assemble to the file `output` -> the assembler's report."""
    command = [
        str(PROGRAMS / ("ptxas-blackwell" if sm >= 100 else "ptxas")),
        "-v",
        f"--gpu-name=sm_{sm}{'a' if sm >= 90 else ''}",
        "-",
        "-o",
        output,
    ]
    return subprocess.run(
        command, input=ptx, capture_output=True, text=True, check=True, timeout=300
    ).stderr
