"""Triton kernel that writes a step's keys and values into their pages, with or without norm,
rotation and quantising.

Axes as in `jitney.kernels.interface`; D is padded to DP, the heads of a token to a power of two.
"""

from __future__ import annotations

# pyright: reportArgumentType=false
# Kernels are compiled, not called: numbers become constexprs and tensors on the way.
import triton
import triton.language as tl

from jitney.kernels.triton_gpu.narrow_products import row_of_product


@triton.jit
def _stored(x, scale, dtype: tl.constexpr, LIMIT: tl.constexpr):
    """x float32 converted as by `jitney.kernels.scales.as_stored`; LIMIT 0: plain floats."""
    if LIMIT > 0:
        x = (
            tl.where(tl.abs(x) < float("inf"), x, 0.0) / scale
        )  # the comparison is false for NaN too
        x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    if dtype == tl.int8:
        x = tl.floor(x + 0.5)
    y = x.to(dtype)
    if LIMIT == 0:
        y = tl.where(tl.abs(y.to(tl.float32)) < float("inf"), y, 0.0).to(dtype)
    return y


@triton.jit
def write_pages(
    k,
    v,
    rows,
    kv_scales,
    kv,
    K: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    HEADS: tl.constexpr,
    POOL: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Write k and v [T, K, D] to flat rows [T] of kv [POOL, 2K, D], in place; program (token). Row
    POOL is dropped.
    """
    token = tl.program_id(0)
    row = tl.load(rows + token).to(tl.int64)
    if row >= POOL:
        return
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, DP)
    inside = (heads < K)[:, None] & (dims < D)[None, :]
    source = (token * K + heads)[:, None] * D + dims[None, :]
    target = kv + (row * 2 * K + 2 * heads)[:, None] * D + dims[None, :]
    k_scale = tl.full((HEADS,), 1.0, tl.float32)
    v_scale = k_scale
    if LIMIT > 0:
        k_scale = tl.load(kv_scales + 2 * heads, mask=heads < K, other=1.0)
        v_scale = tl.load(kv_scales + 2 * heads + 1, mask=heads < K, other=1.0)
    key = tl.load(k + source, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(v + source, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, _stored(key, k_scale[:, None], kv.dtype.element_ty, LIMIT), mask=inside)
    tl.store(target + D, _stored(value, v_scale[:, None], kv.dtype.element_ty, LIMIT), mask=inside)


@triton.jit
def rotate_pages(
    heads_in,
    units,
    scale_in,
    cos,
    sin,
    q_norm,
    k_norm,
    rows,
    kv_scales,
    kv,
    q,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    POOL: tl.constexpr,
    LIMIT: tl.constexpr,
    NORMED: tl.constexpr,
    EPS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    UNITS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Norm and rotate the queries of heads_in [T, H + 2K, D] to q [T, H, D]; write keys, likewise
    normed and rotated, and values to kv; program (token, head). heads_in may be a product in parts,
    with units and scale_in, see `narrow_products.row_of_product`.

    q_norm and k_norm [D] are the weights of the query and key norm. cos and sin float32 [T, D // 2]
    rotate pairs (j, j + D/2). HALF: D // 2 padded to a power of two.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    half: tl.constexpr = D // 2
    pairs = tl.arange(0, HALF)
    inside = pairs < half
    row = tl.load(rows + token).to(tl.int64)
    if (head >= H) & (row >= POOL):
        return
    dtype: tl.constexpr = q.dtype.element_ty
    columns = head * D + pairs
    SIZE: tl.constexpr = (H + 2 * K) * D
    left = row_of_product(
        heads_in, token, columns, inside, units, scale_in, dtype, SIZE, PARTS, PART, UNITS, SCALED
    )
    columns += half
    right = row_of_product(
        heads_in, token, columns, inside, units, scale_in, dtype, SIZE, PARTS, PART, UNITS, SCALED
    )
    if head < H + K:
        if NORMED:
            weights = (q_norm if head < H else k_norm) + pairs
            spread = 1.0 / tl.sqrt((tl.sum(left * left, 0) + tl.sum(right * right, 0)) / D + EPS)
            # The norm rounds to the activations' dtype, like a separate norm.
            left = (
                (left * spread * tl.load(weights, mask=inside, other=0.0).to(tl.float32))
                .to(dtype)
                .to(tl.float32)
            )
            right = right * spread * tl.load(weights + half, mask=inside, other=0.0).to(tl.float32)
            right = right.to(dtype).to(tl.float32)
        c = tl.load(cos + token * half + pairs, mask=inside, other=0.0)
        s = tl.load(sin + token * half + pairs, mask=inside, other=0.0)
        turned = left * c - right * s
        right = right * c + left * s
        left = turned
    if head < H:
        target = q + (token * H + head) * D + pairs
        tl.store(target, left.to(q.dtype.element_ty), mask=inside)
        tl.store(target + half, right.to(q.dtype.element_ty), mask=inside)
    else:
        slot = tl.where(head < H + K, 2 * (head - H), 2 * (head - H - K) + 1)
        scale = 1.0
        if LIMIT > 0:
            scale = tl.load(kv_scales + slot)
        cells = kv + (row * 2 * K + slot) * D + pairs
        # The result equals that of two separate operations.
        lower = _stored(left.to(dtype).to(tl.float32), scale, kv.dtype.element_ty, LIMIT)
        upper = _stored(right.to(dtype).to(tl.float32), scale, kv.dtype.element_ty, LIMIT)
        tl.store(cells, lower, mask=inside)
        tl.store(cells + half, upper, mask=inside)
