"""Products with weights, for CPUs.

Where the CPU multiplies pairs of bfloat16, weights are arranged once, when a model is loaded, in panels of pairs: any
number of rows is multiplied with a panel as it lies, and a row's result is the same bits in every number of rows.
Elsewhere, and in float32, products of up to eight rows read every weight once and widen it in registers. XLA packs a
matrix anew in each call, which for a handful of rows costs more than the product.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import njit

from jitney.kernels import reference
from jitney.kernels.cpu.code import threads
from jitney.kernels.cpu.ffi import argument, dim, handler, result
from jitney.kernels.cpu.pairs import block_dots, gate_row
from jitney.kernels.cpu.vectors import LANES, copy_row, dots, multiplies_pairs, prefetch, scratch, tile

#: Most rows that are multiplied with weights that are not arranged.
MOST_ROWS = 8
#: Rows of weights, of a panel and of a table that are asked for ahead of the one being multiplied.
AHEAD, PANEL_AHEAD, TABLE_AHEAD = 48, 24, 4
#: Vocabulary rows per task.
STRIPE = 512
#: Vectors of a panel's rows; pairs of rows of a panel, and rows of x, that one task takes at a time: what they need
#: (400 KB and less than 300) stays in the second-level cache.
VECTORS, DEPTH, CHUNK = 6, 1024, 128
FLOAT, HALF, LINE, REGISTERS = 4, 2, 64, 24
X, W = range(2)
ONE = np.float32(1)


def arrange(w: jax.Array, parts: int = 1) -> jax.Array:
    """w [I, O] -> panels [O / C, I / 2, C, 2] of C columns each, whose elements are pairs of neighbouring inputs.

    parts = 2: w is gates and what they gate, and a panel has C / 2 columns of each. As it is where pairs do not serve.
    """
    size_in, size_out = w.shape
    if not (multiplies_pairs() and w.dtype == jnp.bfloat16 and size_in % 2 == 0 and size_out % (LANES * parts) == 0):
        return w
    vectors = divisor(size_out // parts // LANES, VECTORS // parts)
    split = w.reshape(size_in // 2, 2, parts, -1, vectors * LANES)
    return split.transpose(3, 0, 2, 4, 1).reshape(-1, size_in // 2, parts * vectors * LANES, 2)


def matmul(x: jax.Array, w: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """x [T, I] times w, [I, O] or arranged in panels -> [T, O], summed in float32 and rounded to `dtype`."""
    if w.ndim == 4:
        return call_panels(x, w, jnp.dtype(dtype), 1)
    if x.ndim != 2 or not served(x, w) or w.shape[1] % LANES:
        return reference.matmul(x, w, dtype)
    name = register(x.shape[0], w.shape[1] // LANES, w.dtype == jnp.bfloat16)
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.float32))
    return call(x.astype(jnp.float32), w).astype(dtype)


def gated(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [T, I] times w, [I, 2F] or arranged in two parts -> silu(first half) * second half, [T, F] in x's dtype."""
    if w.ndim == 4:
        return call_panels(x, w, jnp.dtype(jnp.bfloat16), 2)
    return reference.gate(matmul(x, w), x.dtype)


def project(x: jax.Array, table: jax.Array) -> jax.Array:
    """x [T, E] times the transpose of table [V, E] -> float32 [T, V]."""
    (rows, size), words = x.shape, table.shape[0]
    shape = jax.ShapeDtypeStruct((rows, words), jnp.float32)
    in_pairs = multiplies_pairs() and x.dtype == table.dtype == jnp.bfloat16
    if in_pairs and size % (2 * LANES) == 0 and words % LANES == 0:
        return jax.ffi.ffi_call(register_blocks(size // (2 * LANES)), shape)(x, table)
    if not served(x, table) or size % LANES:
        return reference.project(x, table)
    name = register_stripes(rows, size // LANES, table.dtype == jnp.bfloat16)
    return jax.ffi.ffi_call(name, shape)(x.astype(jnp.float32), table)


def served(x: jax.Array, w: jax.Array) -> bool:
    """Few rows, and weights these kernels know how to widen."""
    return x.shape[0] <= MOST_ROWS and w.dtype in (jnp.bfloat16, jnp.float32)


def divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return max(d for d in range(1, max(1, most) + 1) if number % d == 0)


def call_panels(x: jax.Array, w: jax.Array, dtype: Any, parts: int) -> jax.Array:
    """bfloat16 [T, I] times panels [P, I / 2, C, 2] -> [T, P * C / parts] in dtype."""
    rows, (panels, _, columns, _) = x.shape[0], w.shape
    vectors = columns // LANES
    tall = min(MOST_ROWS, REGISTERS // vectors)
    name = register_panels(min(rows, tall), vectors, rows > tall, dtype == jnp.bfloat16, parts)
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((rows, panels * columns // parts), dtype))(x, w)


@cache
def register_panels(tall: int, vectors: int, more: bool, bf16: bool, parts: int) -> str:
    """Compile the product of `tall` rows, or any number of `more`, with panels; the name of its custom call."""
    kind = "gated" if parts == 2 else "bf16" if bf16 else "f32"
    name = f"jitney_panels_{tall}{'_more' if more else ''}_{vectors}_{kind}"
    handler(name, lambda: compile_panels(tall, vectors, bf16, parts))
    return name


def compile_panels(tall: int, vectors: int, bf16: bool, parts: int) -> tuple[Any, Any]:
    """(tickets, task): a task has CHUNK rows and one panel, and asks for the panel it expects next meanwhile.

    The last tile of rows overlaps the one before where the rows do not divide: it computes the same bits again.
    """
    columns, item, helpers = vectors * LANES, HALF if bf16 else FLOAT, threads()
    width = columns // parts
    opening = tile(tall, vectors, False, PANEL_AHEAD, paired=True)
    following = tile(tall, vectors, False, paired=True)
    copy, gate = copy_row(False, bf16), gate_row(vectors // parts)
    sums_of = scratch(FLOAT * (CHUNK + tall) * columns)

    @njit
    def tickets(frame):
        return dim(frame, W, 0) * ((dim(frame, X, 0) + CHUNK - 1) // CHUNK)

    @njit
    def task(frame, ticket):
        rows, panels, pairs = dim(frame, X, 0), dim(frame, W, 0), dim(frame, W, 1)
        x, w, y, sums = argument(frame, X), argument(frame, W), result(frame, 0), sums_of()
        panel, first = ticket % panels, ticket // panels * CHUNK
        tiles = (min(CHUNK, rows - first) + tall - 1) // tall
        here, there = w + FLOAT * panel * pairs * columns, w + FLOAT * ((panel + helpers) % panels) * pairs * columns
        for start in range(0, pairs, DEPTH):
            deep = min(DEPTH, pairs - start)
            block, add = here + FLOAT * start * columns, 1 if start > 0 else 0
            share = FLOAT * deep * columns // tiles // LINE * LINE
            for i in range(tiles):
                at, to = min(first + i * tall, rows - tall), sums + FLOAT * i * tall * columns
                if i == 0:
                    opening(x + FLOAT * (at * pairs + start), pairs, block, columns, to, columns, deep, add)
                else:
                    following(x + FLOAT * (at * pairs + start), pairs, block, columns, to, columns, deep, add)
                if tiles > 1:
                    prefetch(there + FLOAT * start * columns + i * share, share)
        for i in range(tiles):
            at = min(first + i * tall, rows - tall)
            for r in range(tall):
                source, target = sums + FLOAT * (i * tall + r) * columns, y + item * ((at + r) * panels + panel) * width
                if parts == 2:
                    gate(source, target)
                else:
                    copy(source, target, vectors, ONE)

    return tickets, task


@cache
def register_blocks(vectors: int) -> str:
    """Compile the product with a transposed table of 32 * vectors columns, in pairs; the name of its custom call."""
    name = f"jitney_blocks_{vectors}"
    handler(name, lambda: compile_blocks(vectors))
    return name


def compile_blocks(vectors: int) -> tuple[Any, Any]:
    """(tickets, task): a task has a stripe of the table's rows, sixteen at a time for all rows of x."""
    size = 2 * LANES * vectors
    first_four, four = block_dots(4, 4, vectors, TABLE_AHEAD * 4), block_dots(4, 4, vectors)
    two, one = block_dots(2, 8, vectors), block_dots(1, 16, vectors, LANES)

    @njit
    def tickets(frame):
        return (dim(frame, W, 0) + STRIPE - 1) // STRIPE

    @njit
    def task(frame, ticket):
        rows, words = dim(frame, X, 0), dim(frame, W, 0)
        x, y = argument(frame, X), result(frame, 0)
        for word in range(ticket * STRIPE, min(words, ticket * STRIPE + STRIPE), LANES):
            table, out = argument(frame, W) + HALF * word * size, y + FLOAT * word
            row = 0
            while row < rows:
                at, to = x + HALF * row * size, out + FLOAT * row * words
                if rows - row >= 4:
                    for j in range(0, LANES, 4):
                        if row == 0:
                            first_four(at, size, table + HALF * j * size, size, to + FLOAT * j, words)
                        else:
                            four(at, size, table + HALF * j * size, size, to + FLOAT * j, words)
                    row += 4
                elif rows - row >= 2:
                    for j in range(0, LANES, 8):
                        two(at, size, table + HALF * j * size, size, to + FLOAT * j, words)
                    row += 2
                else:
                    one(at, size, table, size, to, words)
                    row += 1

    return tickets, task


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
    multiply, width = tile(rows, vectors, bf16, AHEAD), vectors * LANES
    item, runs = HALF if bf16 else FLOAT, 2 * threads()

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
    multiply, size, item = dots(rows, vectors, bf16, TABLE_AHEAD), vectors * LANES, HALF if bf16 else FLOAT

    @njit
    def tickets(frame):
        return (dim(frame, W, 0) + STRIPE - 1) // STRIPE

    @njit
    def task(frame, ticket):
        words, first = dim(frame, W, 0), ticket * STRIPE
        multiply(argument(frame, X), size, argument(frame, W) + item * first * size, size,
                 min(STRIPE, words - first), result(frame, 0) + FLOAT * first, words)

    return tickets, task
