"""Triton kernels of the products with a mixture's experts: all blocks of a step in one launch each
for what opens the experts' feed-forwards and for what closes them.

Axes as in `jitney.kernels.experts`. There are as many programs as all blocks could need; those of
blocks without rows end at once, so that a step is one program whatever its rows choose. Weights
stay narrow up to the registers.
"""

from __future__ import annotations

# pyright: reportArgumentType=false
# Kernels are compiled, not called: numbers become constexprs and tensors on the way.
import triton
import triton.language as tl

from jitney.kernels.triton_gpu.narrow_products import widened


@triton.jit
def _as_multiplied(weights, dtype: tl.constexpr):
    """Weights in dtype, exactly; uint8: the bits of float8_e4m3fn, which an A100 does not know."""
    wide = weights
    if weights.dtype == tl.uint8:
        wide = widened(weights, dtype)
    return wide.to(dtype)


@triton.jit
def _rows_of(lines, inputs, real, SIZE_IN: tl.constexpr, BLOCK_K: tl.constexpr):
    """Inputs of rows, 0 of nobody's. Where all tiles are whole nothing asks whether there are such
    inputs, for the registers that this would take.
    """
    read = real[:, None]
    if SIZE_IN % BLOCK_K != 0:
        read = read & (inputs < SIZE_IN)[None, :]
    return tl.load(lines[:, None] + inputs[None, :], mask=read, other=0.0)


@triton.jit
def _weights_of(
    cells,
    inputs,
    outs,
    dtype: tl.constexpr,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of an expert's weights in dtype, asked for likewise."""
    if (SIZE_IN % BLOCK_K == 0) & (SIZE_OUT % BLOCK_N == 0):
        found = tl.load(cells)
    else:
        read = (inputs < SIZE_IN)[:, None] & (outs < SIZE_OUT)[None, :]
        found = tl.load(cells, mask=read, other=0.0)
    return _as_multiplied(found, dtype)


@triton.jit
def open_experts(
    x,
    weights,
    scales,
    rows,
    experts,
    y,
    T: tl.constexpr,
    X: tl.constexpr,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr,
    GELU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows of x [T, I] times gates and ups of their experts [X, I, 2F] -> activation(gate) * up,
    y [N * BLOCK_M, F] in x's dtype. SIZE_OUT: F. Rows of nobody are not written.

    Program (block of rows, block of outputs): those of a block are neighbours, and so are the
    blocks of an expert, whose weights the second finds in the cache.
    """
    TILES: tl.constexpr = (SIZE_OUT + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // TILES
    expert = tl.load(experts + block).to(tl.int64)
    if expert >= X:
        return
    places = block * BLOCK_M + tl.arange(0, BLOCK_M)
    owners = tl.load(rows + places)
    real = owners < T
    outs = tl.program_id(0) % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = outs < SIZE_OUT
    lines = x + owners.to(tl.int64) * SIZE_IN
    columns = weights + expert * (SIZE_IN * 2 * SIZE_OUT) + outs
    inner = tl.arange(0, BLOCK_K)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, SIZE_IN, BLOCK_K):
        inputs = first + inner
        given = _rows_of(lines, inputs, real, SIZE_IN, BLOCK_K)
        cells = columns[None, :] + inputs[:, None] * (2 * SIZE_OUT)
        gates = _weights_of(cells, inputs, outs, given.dtype, SIZE_IN, SIZE_OUT, BLOCK_N, BLOCK_K)
        cells += SIZE_OUT
        ups = _weights_of(cells, inputs, outs, given.dtype, SIZE_IN, SIZE_OUT, BLOCK_N, BLOCK_K)
        gate = tl.dot(given, gates, gate, input_precision=PRECISION)
        up = tl.dot(given, ups, up, input_precision=PRECISION)
    if SCALED:
        factors = scales + expert * (2 * SIZE_OUT) + outs
        gate *= tl.load(factors, mask=inside, other=0.0)[None, :]
        up *= tl.load(factors + SIZE_OUT, mask=inside, other=0.0)[None, :]
    # Both activations are gate times the logistic function: of itself, or of this.
    bent = gate
    if GELU:
        bent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    opened = gate / (1.0 + tl.exp(-bent)) * up
    cells = y + places.to(tl.int64)[:, None] * SIZE_OUT + outs[None, :]
    tl.store(cells, opened.to(y.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def close_experts(
    x,
    weights,
    scales,
    rows,
    experts,
    y,
    T: tl.constexpr,
    X: tl.constexpr,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What `open_experts` wrote, x [N * BLOCK_M, I], times the same experts [X, I, O] -> y float32
    [N * BLOCK_M, O]. Rows of nobody are neither read nor written. Programs as there.
    """
    TILES: tl.constexpr = (SIZE_OUT + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // TILES
    expert = tl.load(experts + block).to(tl.int64)
    if expert >= X:
        return
    places = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = tl.load(rows + places) < T
    outs = tl.program_id(0) % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = outs < SIZE_OUT
    lines = x + places.to(tl.int64) * SIZE_IN
    columns = weights + expert * (SIZE_IN * SIZE_OUT) + outs
    inner = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, SIZE_IN, BLOCK_K):
        inputs = first + inner
        given = _rows_of(lines, inputs, real, SIZE_IN, BLOCK_K)
        cells = columns[None, :] + inputs[:, None] * SIZE_OUT
        matrix = _weights_of(cells, inputs, outs, given.dtype, SIZE_IN, SIZE_OUT, BLOCK_N, BLOCK_K)
        acc = tl.dot(given, matrix, acc, input_precision=PRECISION)
    if SCALED:
        acc *= tl.load(scales + expert * SIZE_OUT + outs, mask=inside, other=0.0)[None, :]
    cells = y + places.to(tl.int64)[:, None] * SIZE_OUT + outs[None, :]
    tl.store(cells, acc, mask=real[:, None] & inside[None, :])
