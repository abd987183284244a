"""Triton kernels of products with group-wise int4 weights, for any number of rows, and with fp8
weights, for the few rows of a decode step; and kernels that round rows to fp8.

Axes: M rows, I inputs, O outputs, R inputs per group. The weights are unpacked in registers. XLA
would write them to memory as bfloat16 first: int4 because the scales are inside the sum, fp8 on
GPUs older than Hopper.
"""

from __future__ import annotations

# pyright: reportArgumentType=false
# Kernels are compiled, not called: numbers become constexprs and tensors on the way.
import triton
import triton.language as tl


@triton.jit
def _unpacked(nibbles, zero, dtype: tl.constexpr):
    """nibbles (0..15) - zero in dtype, exactly.

    Or-ed into the bits of 128 (bfloat16) or 1024 (float16), whose last bit is worth 1, a nibble
    becomes a float without a conversion; an SM converts at a quarter of its usual rate.
    """
    if dtype == tl.bfloat16:
        wide = (nibbles.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        weights = wide - (zero + 128.0).to(tl.bfloat16)
    elif dtype == tl.float16:
        wide = (nibbles.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        weights = wide - (zero + 1024.0).to(tl.float16)
    else:
        weights = nibbles.to(tl.float32) - zero
    return weights


@triton.jit
def _of_group(
    low,
    high,
    packed,
    scales,
    zeros,
    group,
    columns,
    real,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    ZEROS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A group's contribution to a block of outputs, float32. low, high: x at the group's first and
    second half of inputs. columns: the block's columns among COLUMNS; real: whether they exist.
    Weights inside the group are integers up to 16; the sum is scaled once.
    """
    HALF: tl.constexpr = R // 2
    cells = packed + tl.cast(group, tl.int64) * (HALF * COLUMNS)
    cells += tl.arange(0, HALF)[:, None] * COLUMNS + columns[None, :]
    both = tl.load(cells, mask=real[None, :], other=0)
    factors = group * COLUMNS + columns
    scale = tl.load(scales + factors, mask=real, other=0.0).to(tl.float32)
    zero = scale * 0.0 + 8.0
    if ZEROS:
        zero = tl.load(zeros + factors, mask=real, other=0).to(tl.float32)
    part = tl.dot(low, _unpacked(both & 15, zero[None, :], low.dtype), input_precision=PRECISION)
    part = tl.dot(
        high, _unpacked(both >> 4, zero[None, :], low.dtype), part, input_precision=PRECISION
    )
    return part * scale[None, :]


@triton.jit
def matmul_int4(
    x,
    packed,
    scales,
    zeros,
    y,
    M: tl.constexpr,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    ZEROS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x [M, I] times weights [I, O] (see `jitney.kernels.int4`) -> y [SPLITS, M, O], float32 unless
    SPLITS is 1.

    Program (block of outputs and of rows, split): each split sums a share of the groups. Blocks of
    rows of the same outputs are adjacent, so that they share weights in the cache.
    """
    ROW_BLOCKS: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    HALF: tl.constexpr = R // 2
    GROUPS: tl.constexpr = SIZE_IN // R
    SHARE: tl.constexpr = (GROUPS + SPLITS - 1) // SPLITS
    block = tl.program_id(0)
    split = tl.program_id(1)
    first_row = block % ROW_BLOCKS * BLOCK_M
    lines = tl.arange(0, BLOCK_M)
    rows = first_row + lines
    outs = block // ROW_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, HALF)
    # Offsets of blocks need 64 bits: 65,536 rows of 57,344 outputs exceed 2**31.
    x += first_row.to(tl.int64) * SIZE_IN
    y += (split * M + first_row).to(tl.int64) * SIZE_OUT
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(split * SHARE, tl.minimum((split + 1) * SHARE, GROUPS)):
        inputs = x + lines[:, None] * SIZE_IN + (group * R + inner)[None, :]
        low = tl.load(inputs, mask=(rows < M)[:, None], other=0.0)
        high = tl.load(inputs + HALF, mask=(rows < M)[:, None], other=0.0)
        acc += _of_group(
            low,
            high,
            packed,
            scales,
            zeros,
            group,
            outs,
            outs < SIZE_OUT,
            R,
            SIZE_OUT,
            ZEROS,
            PRECISION,
        )
    cells = y + lines[:, None] * SIZE_OUT + outs[None, :]
    mask = (rows < M)[:, None] & (outs < SIZE_OUT)[None, :]
    tl.store(cells, acc.to(y.dtype.element_ty), mask=mask)


@triton.jit
def gated_int4(
    x,
    packed,
    scales,
    zeros,
    y,
    M: tl.constexpr,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ZEROS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x [M, I] times weights [I, 2F], gates and then ups -> silu(gate) * up, y [M, F] in x's dtype.
    SIZE_OUT: F.

    Program (block of outputs and of rows): BLOCK_N gates and their ups. Otherwise like
    `matmul_int4`.
    """
    ROW_BLOCKS: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    HALF: tl.constexpr = R // 2
    block = tl.program_id(0)
    first_row = block % ROW_BLOCKS * BLOCK_M
    lines = tl.arange(0, BLOCK_M)
    rows = first_row + lines
    outs = block // ROW_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    real = outs < SIZE_OUT
    inner = tl.arange(0, HALF)
    x += first_row.to(tl.int64) * SIZE_IN
    y += first_row.to(tl.int64) * SIZE_OUT
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(0, SIZE_IN // R):
        inputs = x + lines[:, None] * SIZE_IN + (group * R + inner)[None, :]
        low = tl.load(inputs, mask=(rows < M)[:, None], other=0.0)
        high = tl.load(inputs + HALF, mask=(rows < M)[:, None], other=0.0)
        gate += _of_group(
            low,
            high,
            packed,
            scales,
            zeros,
            group,
            outs,
            real,
            R,
            2 * SIZE_OUT,
            ZEROS,
            PRECISION,
        )
        up += _of_group(
            low,
            high,
            packed,
            scales,
            zeros,
            group,
            SIZE_OUT + outs,
            real,
            R,
            2 * SIZE_OUT,
            ZEROS,
            PRECISION,
        )
    opened = gate / (1.0 + tl.exp(-gate)) * up
    cells = y + lines[:, None] * SIZE_OUT + outs[None, :]
    tl.store(cells, opened.to(y.dtype.element_ty), mask=(rows < M)[:, None] & real[None, :])


@triton.jit
def widened(codes, dtype: tl.constexpr):
    """Bits of float8_e4m3fn converted exactly to dtype; weights must not be NaN.

    Shifted into float16, a code is 2**8 times too small. Subnormal results are exact, since
    conversions from float16 keep subnormals, unlike products of float32.
    """
    bits = ((codes.to(tl.int16) & 0x7F) << 7) | ((codes.to(tl.int16) & 0x80) << 8)
    return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)


@triton.jit
def matmul_fp8(
    x,
    codes,
    y,
    M: tl.constexpr,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x [M, I] times weights float8_e4m3fn [I, O], given as uint8 -> y [SPLITS, M, O], float32
    unless SPLITS is 1; M <= BLOCK_M.

    Program (block of outputs, split): each split sums a share of the inputs' blocks.
    """
    BLOCKS: tl.constexpr = (SIZE_IN + BLOCK_K - 1) // BLOCK_K
    SHARE: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    split = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(split * SHARE, tl.minimum((split + 1) * SHARE, BLOCKS)):
        at = block * BLOCK_K + inner
        inside = (at < SIZE_IN)[:, None] & (outs < SIZE_OUT)[None, :]
        cells = codes + tl.cast(block, tl.int64) * (BLOCK_K * SIZE_OUT)
        cells += inner[:, None] * SIZE_OUT + outs[None, :]
        weights = tl.load(cells, mask=inside, other=0)
        inputs = tl.load(
            x + rows[:, None] * SIZE_IN + at[None, :],
            mask=(rows < M)[:, None] & (at < SIZE_IN)[None, :],
            other=0.0,
        )
        acc = tl.dot(inputs, widened(weights, inputs.dtype), acc, input_precision=PRECISION)
    cells = y + (split * M + rows)[:, None] * SIZE_OUT + outs[None, :]
    mask = (rows < M)[:, None] & (outs < SIZE_OUT)[None, :]
    tl.store(cells, acc.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _store_rounded(
    numbers, row, places, inside, codes, units, LEAST: tl.constexpr, GREATEST: tl.constexpr
):
    """Store the numbers (float32, 0 where not inside) of a row at `places` of codes [T, SIZE] and
    their scale in units float32 [T, 1], rounded like `jitney.kernels.w8a8.round_to_fp8`.
    """
    size = tl.abs(numbers)
    # The comparison is false for NaN too, which a maximum may leave out.
    most = tl.max(tl.where(size < float("inf"), size, float("inf")), 0)
    most = tl.where(most == float("inf"), float("nan"), tl.maximum(most, LEAST))
    rounded = numbers * tl.div_rn(tl.zeros_like(most) + GREATEST, most)
    tl.store(codes + places, rounded.to(codes.dtype.element_ty), mask=inside)
    tl.store(units + row, most * (1.0 / GREATEST))


@triton.jit
def round_rows(
    x,
    codes,
    units,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    GREATEST: tl.constexpr,
):
    """x [T, SIZE] -> codes and units, see `_store_rounded`; program (row)."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    places = row.to(tl.int64) * SIZE + columns
    numbers = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    _store_rounded(numbers, row, places, inside, codes, units, LEAST, GREATEST)


@triton.jit
def row_of_product(
    product,
    row,
    columns,
    inside,
    units,
    scale,
    dtype: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    UNITS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Columns of a row of a product, rounded to dtype, as float32. PARTS 0: product [T, SIZE]; else
    its parts, float32 [PARTS, PART / SIZE, SIZE], see `jitney.kernels.partial_sums`; units and
    scale are read if UNITS and SCALED.
    """
    cells = product + row.to(tl.int64) * SIZE + columns
    total = tl.load(cells, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        total += tl.load(cells + part * PART, mask=inside, other=0.0)
    if UNITS:
        total *= tl.load(units + row)
    if SCALED:
        total *= tl.load(scale + columns, mask=inside, other=0.0)
    return total.to(dtype).to(tl.float32)


@triton.jit
def _normed_sum(
    x,
    added,
    weight,
    total,
    places,
    columns,
    inside,
    dtype: tl.constexpr,
    SIZE: tl.constexpr,
    EPS: tl.constexpr,
):
    """Store x + added (float32) at `places` of `total`, in x's dtype -> its RMS norm with `weight`
    [SIZE], in dtype.
    """
    whole = tl.load(x + places, mask=inside, other=0.0).to(tl.float32) + added
    whole = whole.to(x.dtype.element_ty)
    tl.store(total + places, whole, mask=inside)
    whole = whole.to(tl.float32)
    spread = 1.0 / tl.sqrt(tl.sum(whole * whole, 0) / SIZE + EPS)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    return (whole * spread * factors).to(dtype)


@triton.jit
def norm_parts(
    x,
    added,
    units_in,
    scale,
    weight,
    total,
    normed,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    UNITS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """x [T, SIZE] plus `added`, which is in parts (see `row_of_product`) -> total in x's dtype, and
    its RMS norm with weight [SIZE]; program (row).
    """
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    places = row.to(tl.int64) * SIZE + columns
    dtype: tl.constexpr = normed.dtype.element_ty
    other = row_of_product(
        added, row, columns, inside, units_in, scale, dtype, SIZE, PARTS, PART, UNITS, SCALED
    )
    result = _normed_sum(x, other, weight, total, places, columns, inside, dtype, SIZE, EPS)
    tl.store(normed + places, result, mask=inside)


@triton.jit
def norm_rows(
    x,
    added,
    units_in,
    scale,
    weight,
    total,
    codes,
    units,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    UNITS: tl.constexpr,
    SCALED: tl.constexpr,
    LEAST: tl.constexpr,
    GREATEST: tl.constexpr,
):
    """x + added [T, SIZE], which may be in parts (see `row_of_product`) -> total in x's dtype; its
    RMS norm, with weight [SIZE] and in added's dtype, -> codes and units, see `_store_rounded`;
    program (row).
    """
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    places = row.to(tl.int64) * SIZE + columns
    dtype: tl.constexpr = added.dtype.element_ty if PARTS == 0 else x.dtype.element_ty
    other = row_of_product(
        added, row, columns, inside, units_in, scale, dtype, SIZE, PARTS, PART, UNITS, SCALED
    )
    # Rounded to the activations' dtype first, like a separate norm.
    normed = _normed_sum(x, other, weight, total, places, columns, inside, dtype, SIZE, EPS)
    _store_rounded(normed.to(tl.float32), row, places, inside, codes, units, LEAST, GREATEST)


@triton.jit
def gate_rows(
    sums,
    units_in,
    scale,
    codes,
    units,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    GREATEST: tl.constexpr,
):
    """sums [T, 2 SIZE] of codes, gates and then ups, times units_in float32 [T, 1] and scale
    float32 [2 SIZE] -> silu(gate) * up as codes and units, see `_store_rounded`; program (row).
    """
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    dtype = sums.dtype.element_ty
    unit = tl.load(units_in + row)
    gates = sums + row.to(tl.int64) * (2 * SIZE) + columns
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32) * unit
    gate *= tl.load(scale + columns, mask=inside, other=0.0)
    up = tl.load(gates + SIZE, mask=inside, other=0.0).to(tl.float32) * unit
    up *= tl.load(scale + SIZE + columns, mask=inside, other=0.0)
    # Rounded to the activations' dtype after each operation, like separate ones.
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate)) * up).to(dtype).to(tl.float32)
    places = row.to(tl.int64) * SIZE + columns
    _store_rounded(opened, row, places, inside, codes, units, LEAST, GREATEST)
