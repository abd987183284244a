"""Triton kernels of the products with a mixture's experts: one launch for the opening and one for
the closing products of all blocks of a step.

Axes as in `jitney.kernels.experts`. The launch has as many programs as all blocks could need;
programs of blocks without rows end at once, so that one compiled step serves any routing. Weights
are widened only in registers.
"""

from __future__ import annotations

# pyright: reportArgumentType=false
# Kernels are compiled, not called: numbers become constexprs and tensors on the way.
import triton
import triton.language as tl

from jitney.kernels.experts import CLAMP, CLAMPED_SLOPE
from jitney.kernels.triton_gpu.narrow_products import widened

_CLAMP, _CLAMPED_SLOPE = tl.constexpr(CLAMP), tl.constexpr(CLAMPED_SLOPE)


@triton.jit
def _as_multiplied(weights, dtype: tl.constexpr):
    """Weights converted exactly to dtype. uint8 holds the bits of float8_e4m3fn, which an A100 does
    not support.
    """
    wide = weights
    if weights.dtype == tl.uint8:
        wide = widened(weights, dtype)
    return wide.to(dtype)


@triton.jit
def _rows_of(lines, inputs, real, SIZE_IN: tl.constexpr, BLOCK_K: tl.constexpr):
    """Inputs of rows, 0 for padding rows. Whole tiles are read without a mask, which would use
    registers.
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
    """A tile of an expert's weights in dtype; whole tiles are read without a mask."""
    if (SIZE_IN % BLOCK_K == 0) & (SIZE_OUT % BLOCK_N == 0):
        found = tl.load(cells)
    else:
        read = (inputs < SIZE_IN)[:, None] & (outs < SIZE_OUT)[None, :]
        found = tl.load(cells, mask=read, other=0.0)
    return _as_multiplied(found, dtype)


@triton.jit
def _of_halves(codes, powers, dtype: tl.constexpr):
    """The e2m1 numbers in the lowest four bits of codes times their scales, exactly, in dtype;
    powers: the scales times 2**14.

    Moved into the bits of float16, a number is 2**14 times too small, and 0.5 becomes subnormal,
    which the conversion keeps.
    """
    bits = ((codes & 7).to(tl.int16) << 9) | ((codes & 8).to(tl.int16) << 12)
    return (bits.to(tl.float16, bitcast=True).to(tl.float32) * powers).to(dtype)


@triton.jit
def _add_mxfp4(
    acc,
    lines,
    codes,
    scales,
    first,
    outs,
    real,
    inside,
    COLUMNS: tl.constexpr,
    SIZE_IN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc plus the product of BLOCK_K inputs from `first` on for the outputs `outs`. codes and
    scales: an expert's, as in `jitney.kernels.mxfp4`, with COLUMNS outputs. A byte holds an input
    of a block's first half and one of its second half, so there are two products.
    """
    BLOCKS: tl.constexpr = BLOCK_K // 32
    halves = tl.arange(0, BLOCK_K // 2)
    inputs = first + halves // 16 * 32 + halves % 16
    low = _rows_of(lines, inputs, real, SIZE_IN, BLOCK_K)
    high = _rows_of(lines, inputs + 16, real, SIZE_IN, BLOCK_K)
    blocks = first // 32 + tl.arange(0, BLOCKS)
    cells = codes + (first // 2 + halves)[:, None] * COLUMNS + outs[None, :]
    places = scales + blocks[:, None] * COLUMNS + outs[None, :]
    both = tl.load(cells, mask=(inputs < SIZE_IN)[:, None] & inside[None, :], other=0)
    known = (blocks < SIZE_IN // 32)[:, None] & inside[None, :]
    exponents = tl.load(places, mask=known, other=0).to(tl.int32)
    # Clamped to 2**113, far above any weight.
    powers = ((tl.minimum(exponents, 240) + 14) << 23).to(tl.float32, bitcast=True)
    wide = tl.broadcast_to(powers[:, None, :], (BLOCKS, 16, BLOCK_N))
    wide = tl.reshape(wide, (BLOCK_K // 2, BLOCK_N))
    acc = tl.dot(low, _of_halves(both, wide, low.dtype), acc, input_precision=PRECISION)
    return tl.dot(high, _of_halves(both >> 4, wide, low.dtype), acc, input_precision=PRECISION)


@triton.jit
def _opened(gate, up, ACTIVATION: tl.constexpr):
    """The activation of gates and ups: gates times a sigmoid, times ups; or, for gates alone, the
    square of relu.
    """
    if ACTIVATION == "relu2":
        positive = tl.maximum(gate, 0.0)
        return positive * positive
    bent = gate
    if ACTIVATION == "gelu_tanh":
        bent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    if ACTIVATION == "clamped_silu":
        gate = tl.minimum(gate, _CLAMP)
        up = tl.minimum(tl.maximum(up, -_CLAMP), _CLAMP) + 1.0
        bent = _CLAMPED_SLOPE * gate
    return gate / (1.0 + tl.exp(-bent)) * up


@triton.jit
def open_experts(
    x,
    weights,
    scales,
    biases,
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
    MXFP4: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MATRICES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows of x [T, I] times the gates and ups of their experts [X, I, 2F], then the activation ->
    y [N * BLOCK_M, F] in x's dtype. SIZE_OUT: F. MATRICES 1: there are only ups, [X, I, F], which
    take the place of gates here. Padding rows are not written.

    Program (block of rows, block of outputs): programs of one block are neighbours, and so are the
    blocks of one expert, which then share its weights in the cache.
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
    inner = tl.arange(0, BLOCK_K)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if MXFP4:
        codes = weights + expert * (SIZE_IN // 2 * MATRICES * SIZE_OUT)
        powers = scales + expert * (SIZE_IN // 32 * MATRICES * SIZE_OUT)
        for first in range(0, SIZE_IN, BLOCK_K):
            gate = _add_mxfp4(
                gate,
                lines,
                codes,
                powers,
                first,
                outs,
                real,
                inside,
                MATRICES * SIZE_OUT,
                SIZE_IN,
                BLOCK_N,
                BLOCK_K,
                PRECISION,
            )
            if MATRICES == 2:
                up = _add_mxfp4(
                    up,
                    lines,
                    codes,
                    powers,
                    first,
                    SIZE_OUT + outs,
                    real,
                    inside,
                    MATRICES * SIZE_OUT,
                    SIZE_IN,
                    BLOCK_N,
                    BLOCK_K,
                    PRECISION,
                )
    else:
        columns = weights + expert * (SIZE_IN * MATRICES * SIZE_OUT) + outs
        for first in range(0, SIZE_IN, BLOCK_K):
            inputs = first + inner
            given = _rows_of(lines, inputs, real, SIZE_IN, BLOCK_K)
            cells = columns[None, :] + inputs[:, None] * (MATRICES * SIZE_OUT)
            gates = _weights_of(
                cells, inputs, outs, given.dtype, SIZE_IN, SIZE_OUT, BLOCK_N, BLOCK_K
            )
            gate = tl.dot(given, gates, gate, input_precision=PRECISION)
            if MATRICES == 2:
                cells += SIZE_OUT
                ups = _weights_of(
                    cells, inputs, outs, given.dtype, SIZE_IN, SIZE_OUT, BLOCK_N, BLOCK_K
                )
                up = tl.dot(given, ups, up, input_precision=PRECISION)
    if SCALED:
        factors = scales + expert * (MATRICES * SIZE_OUT) + outs
        gate *= tl.load(factors, mask=inside, other=0.0)[None, :]
        if MATRICES == 2:
            up *= tl.load(factors + SIZE_OUT, mask=inside, other=0.0)[None, :]
    if BIASED:
        added = biases + expert * (MATRICES * SIZE_OUT) + outs
        gate += tl.load(added, mask=inside, other=0.0).to(tl.float32)[None, :]
        if MATRICES == 2:
            up += tl.load(added + SIZE_OUT, mask=inside, other=0.0).to(tl.float32)[None, :]
    opened = _opened(gate, up, ACTIVATION)
    cells = y + places.to(tl.int64)[:, None] * SIZE_OUT + outs[None, :]
    tl.store(cells, opened.to(y.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def close_experts(
    x,
    weights,
    scales,
    biases,
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
    MXFP4: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The output of `open_experts`, x [N * BLOCK_M, I], times the same experts [X, I, O] -> y
    float32 [N * BLOCK_M, O]. Padding rows are neither read nor written. Programs as in
    `open_experts`.
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
    inner = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if MXFP4:
        codes = weights + expert * (SIZE_IN // 2 * SIZE_OUT)
        powers = scales + expert * (SIZE_IN // 32 * SIZE_OUT)
        for first in range(0, SIZE_IN, BLOCK_K):
            acc = _add_mxfp4(
                acc,
                lines,
                codes,
                powers,
                first,
                outs,
                real,
                inside,
                SIZE_OUT,
                SIZE_IN,
                BLOCK_N,
                BLOCK_K,
                PRECISION,
            )
    else:
        columns = weights + expert * (SIZE_IN * SIZE_OUT) + outs
        for first in range(0, SIZE_IN, BLOCK_K):
            inputs = first + inner
            given = _rows_of(lines, inputs, real, SIZE_IN, BLOCK_K)
            cells = columns[None, :] + inputs[:, None] * SIZE_OUT
            matrix = _weights_of(
                cells, inputs, outs, given.dtype, SIZE_IN, SIZE_OUT, BLOCK_N, BLOCK_K
            )
            acc = tl.dot(given, matrix, acc, input_precision=PRECISION)
    if SCALED:
        acc *= tl.load(scales + expert * SIZE_OUT + outs, mask=inside, other=0.0)[None, :]
    if BIASED:
        added = tl.load(biases + expert * SIZE_OUT + outs, mask=inside, other=0.0)
        acc += added.to(tl.float32)[None, :]
    cells = y + places.to(tl.int64)[:, None] * SIZE_OUT + outs[None, :]
    tl.store(cells, acc, mask=real[:, None] & inside[None, :])
