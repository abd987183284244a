"""RMS norms on the CPU: each row by itself, added up in one order in every number of rows.

XLA adds up fewer than eight rows in another order than more, and keeps what it norms in float32 or rounds it first as
each bucket's fusions happen to fall; both move a sum across a rounding edge now and then, and then an answer.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import njit
from numba.core import cgutils, types

from jitney.kernels import reference
from jitney.kernels.cpu.ffi import argument, dim, handler, result
from jitney.kernels.cpu.vectors import FLOATS, LANES, Emit, intrinsic

#: Rows per task.
ROWS = 16
X, WEIGHT = range(2)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., E] / rms(x) * weight [E] -> x's dtype; bfloat16 or float32, E a multiple of 16, else the reference's."""
    size = x.shape[-1]
    if size % LANES or x.dtype != weight.dtype or x.dtype not in (jnp.bfloat16, jnp.float32):
        return reference.rms_norm(x, weight, eps)
    rows = x.reshape(-1, size)
    call = jax.ffi.ffi_call(register(x.dtype == jnp.bfloat16, eps), jax.ShapeDtypeStruct(rows.shape, x.dtype))
    return call(rows, weight).reshape(x.shape)


@cache
def register(bf16: bool, eps: float) -> str:
    """Compile the norm of one dtype; the name of its custom call."""
    name = f"jitney_norm_{'bf16' if bf16 else 'f32'}_{eps:.9g}"
    handler(name, lambda: compile_norm(bf16, eps))
    return name


def compile_norm(bf16: bool, eps: float) -> tuple[Any, Any]:
    """(tickets, task): a task has ROWS rows."""
    norm, item, small = norm_row(bf16), 2 if bf16 else 4, np.float32(eps)

    @njit
    def tickets(frame):
        return (dim(frame, X, 0) + ROWS - 1) // ROWS

    @njit
    def task(frame, ticket):
        rows, size = dim(frame, X, 0), dim(frame, X, 1)
        share = np.float32(1) / np.float32(size)
        for row in range(ticket * ROWS, min(rows, ticket * ROWS + ROWS)):
            at = item * row * size
            norm(argument(frame, X) + at, argument(frame, WEIGHT), result(frame, 0) + at, size // LANES, share, small)

    return tickets, task


def norm_row(bf16: bool) -> Any:
    """out = x / sqrt(mean(x * x) + eps) * weight over n = 16 * vectors elements.

    -> op(x, weight, out, vectors, 1 / n, eps).
    """

    @intrinsic
    def op(context, x, weight, out, vectors, share, eps):
        def generate(target, builder, signature, args):
            e = Emit(builder)
            x, weight, out, vectors, share, eps = args
            squares = cgutils.alloca_once(builder, FLOATS)
            builder.store(e.floats(0.0), squares)
            with cgutils.for_range(builder, vectors) as loop:
                here = e.load(x, builder.mul(loop.index, e.int(LANES)), bf16)
                builder.store(e.fma(here, here, builder.load(squares)), squares)
            mean = builder.fmul(e.total(builder.load(squares)), share)
            root = e.call("llvm.sqrt.f32", mean.type, builder.fadd(mean, eps))
            factor = e.splat(builder.fdiv(mean.type(1.0), root))
            with cgutils.for_range(builder, vectors) as loop:
                at = builder.mul(loop.index, e.int(LANES))
                scaled = builder.fmul(e.load(x, at, bf16), factor)
                e.store(builder.fmul(scaled, e.load(weight, at, bf16)), out, at, bf16)
            return target.get_dummy_value()

        return types.void(*[types.int64] * 4, types.float32, types.float32), generate

    return op
