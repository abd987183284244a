"""Triton kernel that finds where top-k and top-p cut a row of logits, without sorting it.

XLA sorts the whole row for `top_k` beyond 16 entries. Here the ordered bits of float32 are searched
two at a time: 16 passes over the row for k and 16 for p, a row per program, out of the L2 cache.
"""

from __future__ import annotations

# pyright: reportArgumentType=false
# Kernels are compiled, not called: numbers become constexprs and tensors on the way.
import triton
import triton.language as tl


@triton.jit
def _reached(row, target, low, step, V: tl.constexpr, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """How many of the magnitudes low + step - 1, low + 2 step - 1, low + 3 step - 1 keep less than
    `target`.

    A magnitude keeps the entries of the row (float32, at most 0) that lie no further from 0; MASS:
    the sum of their exponentials counts, not their number. Always adds in the same order, so more
    entries never weigh less.
    """
    at = tl.arange(0, BLOCK)
    first = tl.zeros((BLOCK,), tl.float32)
    second = tl.zeros((BLOCK,), tl.float32)
    third = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(row + start + at, mask=start + at < V, other=float("-inf"))
        magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        weight = tl.where(start + at < V, 1.0, 0.0)
        if MASS:
            weight = tl.exp(x)
        first += tl.where(magnitude < low + step, weight, 0.0)
        second += tl.where(magnitude < low + 2 * step, weight, 0.0)
        third += tl.where(magnitude < low + 3 * step, weight, 0.0)
    return (
        (tl.sum(first, 0) < target).to(tl.int32)
        + (tl.sum(second, 0) < target).to(tl.int32)
        + (tl.sum(third, 0) < target).to(tl.int32)
    )


@triton.jit
def _search(row, target, V: tl.constexpr, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """The least magnitude that keeps `target`: two of its 31 bits a pass, the last one alone."""
    low = tl.zeros((), tl.int32)
    for i in range(16):
        step = tl.full((), 1, tl.int32) << tl.maximum(29 - 2 * i, 0)
        low += step * _reached(row, target, low, step, V, BLOCK, MASS)
    return low


@triton.jit
def _kept_mass(row, magnitude, V: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of the exponentials of the entries that `magnitude` keeps."""
    at = tl.arange(0, BLOCK)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(row + start + at, mask=start + at < V, other=float("-inf"))
        mass += tl.where((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) <= magnitude, tl.exp(x), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def threshold(scaled, top_k, top_p, floor, V: tl.constexpr, BLOCK: tl.constexpr):
    """scaled [S, V] -> floor [S], the smallest kept entry; program (row). See
    `jitney.kernels.interface.Threshold`.
    """
    s = tl.program_id(0)
    row = scaled + s.to(tl.int64) * V
    k = tl.load(top_k + s)
    p = tl.load(top_p + s)
    magnitude = tl.full((), 0x7F800000, tl.int32)
    if k > 0:
        magnitude = _search(row, tl.minimum(k, V).to(tl.float32), V, BLOCK, False)
    if p < 1.0:
        target = p * _kept_mass(row, magnitude, V, BLOCK)
        magnitude = tl.minimum(magnitude, _search(row, target, V, BLOCK, True))
    tl.store(floor + s, -magnitude.to(tl.float32, bitcast=True))
