"""Products of a few rows with weights, for CPUs: every weight is read once, as it lies, and widened in registers.

XLA packs a matrix anew in each call, which for a handful of rows costs more than the product.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from numba import njit

from jitney.kernels import reference
from jitney.kernels.cpu.code import threads
from jitney.kernels.cpu.ffi import argument, dim, handler, result
from jitney.kernels.cpu.vectors import LANES, dots, tile

#: Most rows these kernels take; from there on XLA is as fast.
MOST_ROWS = 8
#: Rows of weights, and of a table, that are asked for ahead of the one being multiplied.
AHEAD, TABLE_AHEAD = 48, 4
#: Vocabulary rows per task.
STRIPE = 512
FLOAT, REGISTERS = 4, 24
X, W = range(2)


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [T, I] times w [I, O] -> float32 [T, O]."""
    if x.ndim != 2 or not served(x, w) or w.shape[1] % LANES:
        return reference.matmul(x, w)
    name = register(x.shape[0], w.shape[1] // LANES, w.dtype == jnp.bfloat16)
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.float32))(x.astype(jnp.float32), w)


def project(x: jax.Array, table: jax.Array) -> jax.Array:
    """x [T, E] times the transpose of table [V, E] -> float32 [T, V]."""
    if not served(x, table) or x.shape[1] % LANES:
        return reference.project(x, table)
    name = register_stripes(x.shape[0], x.shape[1] // LANES, table.dtype == jnp.bfloat16)
    shape = jax.ShapeDtypeStruct((x.shape[0], table.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(name, shape)(x.astype(jnp.float32), table)


def served(x: jax.Array, w: jax.Array) -> bool:
    """Few rows, and weights these kernels know how to widen."""
    return x.shape[0] <= MOST_ROWS and w.dtype in (jnp.bfloat16, jnp.float32)


@cache
def register(rows: int, columns: int, bf16: bool) -> str:
    """Compile the product for `rows` rows and tiles that divide `columns` vectors; the name of its custom call."""
    vectors = max(v for v in range(1, max(1, min(6, REGISTERS // rows)) + 1) if columns % v == 0)
    name = f"jitney_product_{rows}_{vectors}_{'bf16' if bf16 else 'f32'}"
    register_product(name, rows, vectors, bf16)
    return name


@cache
def register_product(name: str, rows: int, vectors: int, bf16: bool) -> None:
    """Widths that share a tile share its code."""
    handler(name, lambda: compile_product(rows, vectors, bf16))


def compile_product(rows: int, vectors: int, bf16: bool) -> tuple[Any, Any]:
    """(tickets, task) of a product: a task has a run of columns, two runs a thread."""
    multiply, width, item, runs = tile(rows, vectors, bf16, AHEAD), vectors * LANES, 2 if bf16 else 4, 2 * threads()

    @njit
    def run_of(frame):
        """Columns of a task, a multiple of the tile's width."""
        tiles = dim(frame, W, 1) // width
        return (tiles + runs - 1) // runs * width

    @njit
    def tickets(frame):
        run = run_of(frame)
        return (dim(frame, W, 1) + run - 1) // run

    @njit
    def task(frame, ticket):
        depth, outs, run = dim(frame, W, 0), dim(frame, W, 1), run_of(frame)
        x, w, y = argument(frame, X), argument(frame, W), result(frame, 0)
        for column in range(ticket * run, min(outs, ticket * run + run), width):
            multiply(x, depth, w + item * column, outs, y + FLOAT * column, outs, depth, 0)

    return tickets, task


@cache
def register_stripes(rows: int, vectors: int, bf16: bool) -> str:
    """Compile the product with a transposed table of 16 * vectors columns; the name of its custom call."""
    name = f"jitney_project_{rows}_{vectors}_{'bf16' if bf16 else 'f32'}"
    handler(name, lambda: compile_stripes(rows, vectors, bf16))
    return name


def compile_stripes(rows: int, vectors: int, bf16: bool) -> tuple[Any, Any]:
    """(tickets, task): a task has a stripe of the table's rows."""
    multiply, size, item = dots(rows, vectors, bf16, TABLE_AHEAD), vectors * LANES, 2 if bf16 else 4

    @njit
    def tickets(frame):
        return (dim(frame, W, 0) + STRIPE - 1) // STRIPE

    @njit
    def task(frame, ticket):
        words, first = dim(frame, W, 0), ticket * STRIPE
        multiply(argument(frame, X), size, argument(frame, W) + item * first * size, size,
                 min(STRIPE, words - first), result(frame, 0) + FLOAT * first, words)

    return tickets, task
