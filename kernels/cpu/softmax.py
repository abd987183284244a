"""One chunk of the online softmax for several rows at once: the vector code of prompt attention.

A row's maximum and sum each end in a chain of exchanges within one register. Rows that stand side by side in straight
code wait for theirs at the same time: four cost little more than one. Conventions as in `jitney.kernels.cpu.vectors`.
"""

from __future__ import annotations

from typing import Any

from numba.core import types

from jitney.kernels.cpu.vectors import FLOAT, LANES, Emit, Value, intrinsic

#: Rows that are softened at once.
ROWS = 4


def soften_rows(vectors: int, columns: int, bf16: bool) -> Any:
    """ROWS rows of 16 * vectors scores become weights; what their 16 * columns sums held is scaled down to match.

    -> op(scores, state, sums, factor, first): rows of scores and sums follow one another; state holds each row's
    maximum score and sum of weights. A weight is 2 ** ((score - maximum) * factor), written over the scores, as
    bfloat16 into the first half of their row if `bf16`. first: not 0 if nothing was summed before.
    """

    @intrinsic
    def op(context, scores, state, sums, factor, first):
        def generate(target, builder, signature, args):
            e = Emit(builder)
            scores, state, sums, factor, first = args
            wide = e.splat(factor)
            at = [[e.load(scores, e.int(LANES * (r * vectors + v)), False) for v in range(vectors)]
                  for r in range(ROWS)]
            before = [e.splat(e.scalar(state, e.int(2 * r))) for r in range(ROWS)]
            most = [e.call("llvm.maxnum.v16f32", before[r].type, before[r], e.splat(greatest(e, at[r])))
                    for r in range(ROWS)]
            weights = [[e.exp2(builder.fmul(builder.fsub(x, most[r]), wide)) for x in at[r]] for r in range(ROWS)]
            shrink = [e.exp2(builder.fmul(builder.fsub(before[r], most[r]), wide)) for r in range(ROWS)]
            for r in range(ROWS):
                for v in range(vectors):
                    row = e.address(scores, e.int(LANES * vectors * r), 4)
                    e.store(weights[r][v], row, e.int(LANES * v), bf16)
                total = e.total(added(e, weights[r]))
                held = builder.fmul(e.scalar(state, e.int(2 * r + 1)), first_lane(e, shrink[r]))
                put(e, state, 2 * r, first_lane(e, most[r]))
                put(e, state, 2 * r + 1, builder.fadd(total, held))
            with builder.if_then(builder.icmp_signed("==", first, e.int(0)), likely=True):
                for r in range(ROWS):
                    for c in range(columns):
                        place = e.int(LANES * (r * columns + c))
                        e.store(builder.fmul(e.load(sums, place, False), shrink[r]), sums, place, False)
            return target.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.float32, types.int64), generate

    return op


def greatest(e: Emit, row: list[Value]) -> Value:
    """Largest number of some vectors."""
    most = row[0]
    for vector in row[1:]:
        most = e.call("llvm.maxnum.v16f32", most.type, most, vector)
    return e.call("llvm.vector.reduce.fmax.v16f32", FLOAT, most)


def added(e: Emit, row: list[Value]) -> Value:
    """Sum of some vectors, lane by lane."""
    total = row[0]
    for vector in row[1:]:
        total = e.b.fadd(total, vector)
    return total


def first_lane(e: Emit, vector: Value) -> Value:
    return e.b.extract_element(vector, e.int(0))


def put(e: Emit, base: Value, index: int, value: Value) -> None:
    """Store one float32."""
    e.b.store(value, e.pointer(e.address(base, e.int(index), 4), FLOAT))
