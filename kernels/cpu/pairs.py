"""Products of bfloat16 matrices on CPUs that multiply pairs of them (avx512_bf16): the vector code.

One instruction adds the products of 16 pairs to 16 sums. Every sum here starts at zero and takes its pairs in the order
of the inputs, whatever the tile it stands in, so a row's result is the same bits alone and among any number of rows.
Conventions as in `jitney.kernels.cpu.vectors`: addresses in bytes, strides in elements; a word is a pair.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba.core import types

from jitney.kernels.cpu.vectors import FLOATS, INT, INTS, LANES, Emit, Value, intrinsic

LOG2E = math.log2(math.e)


def block_dots(rows: int, others: int, vectors: int, ahead: int = 0) -> Any:
    """out[r, j] = sum of A[r, :] * B[j, :] over 32 * vectors elements; rows * others = 16, all sums in registers.

    -> op(a, lda, b, ldb, out, ldo): A and B bfloat16, out float32. Rows of B are asked for `ahead` early; 0: not.
    """
    assert rows * others == LANES

    @intrinsic
    def op(context, a, lda, b, ldb, out, ldo):
        def generate(target, builder, signature, args):
            e = Emit(builder)
            a, lda, b, ldb, out, ldo = args

            def words(base, stride, row, v):
                at = builder.add(builder.mul(stride, e.int(row)), e.int(2 * LANES * v))
                return builder.load(e.pointer(e.address(base, at, 2), FLOATS), align=2)

            for j in range(others):
                e.ask(b, builder.mul(ldb, e.int(j)), ldb, ahead, 2 * LANES * vectors, True)
            sums = [e.floats(0.0)] * LANES
            for v in range(vectors):
                rights = [words(b, ldb, j, v) for j in range(others)]
                for r in range(rows):
                    left = words(a, lda, r, v)
                    for j in range(others):
                        sums[r * others + j] = e.add_pairs(left, rights[j], sums[r * others + j])
            totals = add_lanes(e, sums)
            part = ir.VectorType(ir.FloatType(), others)
            for r in range(rows):
                lanes = ir.Constant(ir.VectorType(INT, others), [r * others + j for j in range(others)])
                piece = builder.shuffle_vector(totals, ir.Constant(FLOATS, ir.Undefined), lanes)
                builder.store(piece, e.pointer(e.address(out, builder.mul(ldo, e.int(r)), 4), part), align=4)
            return target.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return op


def add_lanes(e: Emit, sums: list[Value]) -> Value:
    """One vector of the totals of 16 vectors, each total added up in the same order.

    Four rounds: two vectors that still spread over 2 * apart lanes each become one that spreads over `apart`.
    """
    for apart in (8, 4, 2, 1):
        half = len(sums) // 2
        keep = [j if not j & apart else LANES + (j ^ apart) for j in range(LANES)]
        turn = [j | apart if not j & apart else LANES + j for j in range(LANES)]
        sums = [e.b.fadd(e.b.shuffle_vector(sums[i], sums[i + half], ir.Constant(INTS, keep)),
                         e.b.shuffle_vector(sums[i], sums[i + half], ir.Constant(INTS, turn))) for i in range(half)]
    return sums[0]


def gate_row(vectors: int) -> Any:
    """out = silu(gates) * ups, of float32 gates [16 * vectors] and ups behind them, as bfloat16 -> op(sums, out)."""

    @intrinsic
    def op(context, sums, out):
        def generate(target, builder, signature, args):
            e = Emit(builder)
            one, zero = e.floats(1.0), e.floats(0.0)
            for v in range(vectors):
                gate, up = (e.load(args[0], e.int(LANES * (v + half)), False) for half in (0, vectors))
                size = e.call("llvm.fabs.v16f32", FLOATS, gate)
                power = e.exp2(builder.fmul(size, e.floats(-LOG2E)))  # of -|gate|, so it never overflows
                share = builder.select(builder.fcmp_ordered(">=", gate, zero), one, power)
                gated = builder.fdiv(builder.fmul(gate, share), builder.fadd(one, power))
                e.store(builder.fmul(gated, up), args[1], e.int(LANES * v), True)
            return target.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return op
