"""Products of this CPU's kernels in bfloat16 and int8 beside XLA's in bfloat16: all of a model's
layers, by rows.

    python docs/benchmarks/int8_products.py [--rows 1 8 32 128 512] [--rounds 30] [--json FILE]

The four products of each of 30 layers of SmolLM2-135M (random numbers, every layer its own, so that
weights come from memory), one after the other in one program. All kinds in turn in one process; the
figure is the shortest of all rounds, which is what other programs on the machine disturb least.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from jitney.engine.common.machine import cpu_name
from jitney.kernels.interface import KernelSet
from jitney.kernels.select import select
from jitney.kernels.w8a8 import Int8

LAYERS = 30
SIZE, QKV, INNER = 576, 960, 1536
#: (inputs, outputs, whether it is gated), in the order in which they are called.
SHAPES = ((SIZE, QKV, False), (SIZE, SIZE, False), (SIZE, 2 * INNER, True), (INNER, SIZE, False))

_Floats = list[list[jax.Array]]
_Int8 = list[list[Int8]]
_Step = Callable[[jax.Array], jax.Array]


def bfloat16_weights(kernels: KernelSet) -> _Floats:
    """Laid out as the set wants them."""
    layers: _Floats = []
    for layer in range(LAYERS):
        key = jax.random.key(layer)
        layers.append([])
        for size_in, size_out, gated in SHAPES:
            w = jax.random.normal(key, (size_in, size_out), jnp.bfloat16)
            if kernels.pack is not None:
                w = kernels.pack(w, 1 + gated)
            layers[-1].append(w)
    return layers


def int8_weights(kernels: KernelSet) -> _Int8:
    """Laid out as the set wants them."""
    assert kernels.int8 is not None
    layers: _Int8 = []
    for layer in range(LAYERS):
        key = jax.random.key(layer)
        layers.append([])
        for size_in, size_out, gated in SHAPES:
            w = jax.random.randint(key, (size_in, size_out), -127, 128, jnp.int8)
            scale = jnp.full((size_out,), 1e-3, jnp.float32)
            layers[-1].append(Int8(kernels.int8.pack(w, 1 + gated), scale))
    return layers


def plain_step(kernels: KernelSet, layers: _Floats, x: jax.Array) -> jax.Array:
    """x [T, 576] through every product; what attention would do is a slice."""
    for qkv, o, gate_up, down in layers:
        heads = kernels.matmul(x, qkv, x.dtype)[:, :SIZE]
        x = kernels.matmul(heads, o, x.dtype)
        x = kernels.matmul(kernels.gated(x, gate_up), down, x.dtype)
    return x


def int8_step(kernels: KernelSet, layers: _Int8, x: jax.Array) -> jax.Array:
    """The same with weights in int8."""
    own = kernels.int8
    assert own is not None
    for qkv, o, gate_up, down in layers:
        heads = own.matmul(x, qkv, x.dtype)[:, :SIZE]
        x = own.matmul(heads, o, x.dtype)
        x = own.matmul(own.gated(x, gate_up), down, x.dtype)
    return x


def shortest(steps: dict[str, _Step], rows: int, rounds: int) -> dict[str, float]:
    """The shortest time of each step with so many rows, in milliseconds."""
    x = jax.random.normal(jax.random.key(99), (rows, SIZE), jnp.bfloat16)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 2):
        for name, step in steps.items():
            started = time.perf_counter()
            step(x).block_until_ready()
            times[name].append(1e3 * (time.perf_counter() - started))
    return {name: min(taken[2:]) for name, taken in times.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    kernels = select("cpu", "native")
    print(f"{kernels.label} on {cpu_name()}")
    plain = jax.jit(partial(plain_step, kernels))
    reference = select("cpu", "reference")
    xlas = jax.jit(partial(plain_step, reference))
    rounded = jax.jit(partial(int8_step, kernels))
    steps: dict[str, _Step] = {
        "bfloat16": partial(plain, bfloat16_weights(kernels)),
        "int8": partial(rounded, int8_weights(kernels)),
        "XLA, bfloat16": partial(xlas, bfloat16_weights(reference)),
    }
    found = {rows: shortest(steps, rows, args.rounds) for rows in args.rows}
    print("| rows | XLA, bfloat16 | bfloat16 | times as fast | int8 | than bfloat16 |")
    print("|---|---|---|---|---|---|")
    for rows, ms in found.items():
        plain_ms, int8_ms, xla_ms = ms["bfloat16"], ms["int8"], ms["XLA, bfloat16"]
        print(
            f"| {rows} | {xla_ms:.2f} ms | {plain_ms:.2f} ms | {xla_ms / plain_ms:.1f} "
            f"| {int8_ms:.2f} ms | {plain_ms / int8_ms:.1f} |"
        )
    if args.json:
        figures = {"cpu": cpu_name(), "kernels": kernels.label, "milliseconds": found}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
