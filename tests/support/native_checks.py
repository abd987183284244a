"""Checks every CPU kernel against float64, at the shapes of models and at odd shapes; shared by the
tests of all CPUs.

Each function takes nothing from the library under test but what `jitney.kernels.cpu.library.load`
returns, so a test (or `python tests/support/native_checks.py LIBRARY NAME`) can put any compiled
library in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ragged import Batch, Case, attention, make, written

from jitney.kernels import definitions
from jitney.kernels.cpu import library, norms, products
from jitney.kernels.cpu.attention import paged_attention, rotate_and_write
from jitney.kernels.w8a8 import Int8

#: The products with the default number of rows, which is not measured on this machine.
OURS = products.up_to(products.USUAL_ROWS)
#: (query heads, key heads, head dim): three query heads per key head, one, four, seven, and the
#: widest head.
LAYOUTS = [(9, 3, 64), (8, 8, 64), (32, 8, 128), (14, 2, 64), (4, 1, 256)]
#: Contexts on both sides of a page's edge and of a chunk's (96 keys); prompts that are whole, cut,
#: and of one row.
DECODE = (1, 15, 16, 17, 33, 97, 200)
PROMPTS = ((40, 40), (16, 16), (130, 35), (97, 1))
#: bfloat16 has 8 bits; kernels that multiply pairs round a prompt's softmax weights to as many.
ROUNDED = (2**-8, 4e-3)  # relative, absolute
EXACT = (0.0, 4e-6)


@cache
def attended(
    heads: tuple[int, int, int], dtype: str, window: int, page: int, softcap: float
) -> tuple[Batch, np.ndarray, np.ndarray]:
    """A batch, the pool after its step, and the expected output of each row."""
    case = Case(heads, DECODE, PROMPTS, rows=112, seqs=12, window=window, page=page, pages=64)
    batch = make(replace(case, softcap=softcap))
    if dtype == "bfloat16":
        narrow = {
            name: jnp.asarray(getattr(batch, name), jnp.bfloat16) for name in ("q", "k", "v", "kv")
        }
        wide = {name: np.asarray(array, np.float32) for name, array in narrow.items()}
        pool = written(replace(batch, **wide))
        return replace(batch, **narrow), pool, attention(replace(batch, **wide), pool)
    pool = written(batch)
    return batch, pool, attention(batch, pool)


def check_attention(
    heads: tuple[int, int, int],
    dtype: str,
    window: int = 0,
    page: int = 16,
    softcap: float = 0.0,
) -> None:
    """Check every head of every row, of decoding sequences and prompts; padding rows are zero."""
    batch, pool, expected = attended(heads, dtype, window, page, softcap)
    call = jax.jit(lambda *args: paged_attention(*args, **batch.options))
    o, after = call(batch.q, batch.k, batch.v, batch.kv, batch.meta)
    np.testing.assert_array_equal(np.asarray(after, np.float32), pool)
    relative, absolute = EXACT if dtype == "float32" else ROUNDED
    np.testing.assert_allclose(
        np.asarray(o, np.float32)[: batch.n_rows], expected, rtol=relative, atol=absolute
    )
    assert (np.asarray(o, np.float32)[batch.n_rows :] == 0).all()


def check_rotation(heads: tuple[int, int, int], dtype: str, norms: str = "") -> None:
    """Check rotated queries and keys, and the written pool: all rows, and one row alone, bit for
    bit. norms: the dtype of the norms' weights, if heads are normed before; "": no norms.
    """
    batch = attended(heads, dtype, 0, 16, 0.0)[0]
    rng = np.random.default_rng(11)
    angles = rng.uniform(0, 7, (len(batch.q), 1, heads[2] // 2)).astype(np.float32)
    rope = np.cos(angles), np.sin(angles)
    weights = None
    if norms:
        query, key = (rng.random((2, heads[2])) + 0.5).astype(norms)
        weights = jax.device_put(query), jax.device_put(key)

    def turned(x: np.ndarray, number: int) -> np.ndarray:
        x = np.asarray(x, np.float32)
        if weights is not None:
            x = definitions.rms_norm(x, np.asarray(weights[number]), 1e-5)
        return definitions.rotate(x, *rope)

    def run(rows: slice) -> tuple[np.ndarray, np.ndarray]:
        meta = batch.meta._replace(write_rows=batch.meta.write_rows[rows])
        call = jax.jit(lambda *args: rotate_and_write(*args, norms=weights, eps=1e-5))
        cos, sin = rope
        q, kv = call(everything[rows], (cos[rows], sin[rows]), batch.kv, meta)
        return np.asarray(q, np.float32), np.asarray(kv, np.float32)

    everything = np.concatenate([batch.q, batch.k, batch.v], axis=1)
    q, kv = run(slice(None))
    exact = {"k": turned(batch.k, 1), "v": np.asarray(batch.v, np.float32)}
    pool = written(replace(batch, kv=np.asarray(batch.kv, np.float32), **exact))
    # A head that is normed first is rounded twice.
    absolute = 4e-6 if dtype == "float32" else 3e-2 if norms else 1e-6
    relative = 0.0 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(q, turned(batch.q, 0), rtol=relative, atol=absolute)
    np.testing.assert_allclose(kv, pool, rtol=relative, atol=absolute)
    alone, kv_alone = run(slice(3, 4))
    np.testing.assert_array_equal(alone, q[3:4])
    slot = divmod(int(batch.meta.write_rows[3]), batch.kv.shape[1])
    np.testing.assert_array_equal(kv_alone[slot], kv[slot])


def numbers(seed: int, dtype: str, *shape: int) -> jax.Array:
    # numpy rounds the numbers: jax would compile a program for each shape.
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def of_each(call: Callable[..., Any], batches: list[np.ndarray], *weights: Any) -> list[Any]:
    """The results of a product for each of several batches, all in one program, since a hundred
    small programs take seconds to compile.
    """
    return jax.jit(lambda batches, *weights: [call(x, *weights) for x in batches])(
        batches, *weights
    )


def check_products(size_in: int, size_out: int, dtype: str) -> None:
    """Check products with unpacked weights and, if the kernels pack them, with packed weights; with
    few rows and many.
    """
    w = numbers(1, dtype, size_in, size_out)
    wide = np.asarray(w, np.float64)
    laid_out = products.pack(w)
    in_parts = products.pack(w, 2)
    batches = [np.asarray(numbers(2, dtype, rows, size_in)) for rows in (1, 3, 8, 9, 130)]
    as_it_comes = of_each(OURS.matmul, batches, w)
    packed = of_each(OURS.matmul, batches, laid_out)
    gated = of_each(OURS.gated, batches, in_parts)
    rounding = 2**-8 if dtype == "bfloat16" else 1e-5
    for i, x in enumerate(batches):
        exact = np.asarray(x, np.float64) @ wide
        close = 1e-5 * np.abs(exact).max()
        for product in (as_it_comes[i], packed[i]):
            np.testing.assert_allclose(product, exact, rtol=0, atol=close)
        gates, ups = np.split(exact, 2, axis=1)
        silu = gates / (1 + np.exp(-gates)) * ups
        result = np.asarray(gated[i], np.float64)
        np.testing.assert_allclose(result, silu, rtol=rounding, atol=close * np.abs(ups).max())


def int8_weights(seed: int, size_in: int, size_out: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes from -128 to 127 [I, O], as in a checkpoint; scales [O])."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-128, 128, (size_in, size_out), np.int8)
    return codes, (rng.random(size_out, np.float32) + 0.5) / (32 * size_in**0.5)


def check_int8(size_in: int, size_out: int, dtype: str) -> None:
    """Check rows rounded to int8 times int8 weights, plain and gated; a row has the same bits alone
    and among any other rows. Rows of zeros, and of numbers so small that their scales underflow,
    give 0.
    """
    codes, scale = int8_weights(7, size_in, size_out)
    x = np.array(numbers(8, dtype, 133, size_in))
    x[2] = 0
    x[3] *= np.asarray(1e-36, x.dtype)
    defined = definitions.matmul_int8(x, codes, scale)
    gated = definitions.gated(definitions.matmul_int8(x, codes, scale))
    packed = jax.jit(products.INT8.pack, static_argnums=1)
    plain_weights = Int8(packed(codes, 1), jax.device_put(scale))
    split_weights = Int8(packed(codes, 2), jax.device_put(scale))
    assert plain_weights.kernel.ndim == split_weights.kernel.ndim == 4
    whole = np.asarray(jax.jit(products.INT8.matmul)(x, plain_weights))
    np.testing.assert_array_equal(whole, defined)
    assert not whole[2:4].any()
    rounding = 2**-8 if dtype == "bfloat16" else 1e-5
    whole_gated = np.asarray(jax.jit(products.INT8.gated)(x, split_weights))
    np.testing.assert_allclose(whole_gated.astype(np.float32), gated, rtol=rounding, atol=1e-6)
    crowds = [x[:rows] for rows in (1, 2, 3, 5, 8, 13, 128, 129)]
    for some in of_each(products.INT8.matmul, crowds, plain_weights):
        np.testing.assert_array_equal(some, whole[: len(some)])
    for some in of_each(products.INT8.gated, crowds, split_weights):
        np.testing.assert_array_equal(some, whole_gated[: len(some)])


def check_padding(dtype: str) -> None:
    """Check products of only the first rows: they have the same bits as alone, whatever the rows
    after them hold; those rows become zero.
    """
    size_in, size_out, most = 576, 192, 133
    ours = products.up_to(most)
    x, w = np.asarray(numbers(9, dtype, most, size_in)), numbers(10, dtype, size_in, size_out)
    codes, scale = (jax.device_put(part) for part in int8_weights(11, size_in, size_out))
    calls = [
        (ours.matmul, w),
        (ours.matmul, products.pack(w)),
        (products.INT8.matmul, Int8(products.INT8.pack(codes), scale)),
        (products.INT8.gated, Int8(products.INT8.pack(codes, 2), scale)),
    ]
    in_parts = products.pack(w, 2)
    if in_parts is not w:  # else XLA gates, and its rounding depends on the surrounding program
        calls.append((ours.gated, in_parts))
    for product, weights in calls:
        whole = np.asarray(jax.jit(product)(x, weights))
        counted = jax.jit(lambda x, weights, count, call=product: call(x, weights, count=count))
        for count in (0, 1, 7, 8, 13, 100, 128, most):
            strange = x.copy()
            strange[count:] = np.nan
            result = np.asarray(counted(strange, weights, jnp.int32(count)))
            np.testing.assert_array_equal(result[:count], whole[:count])
            assert (result[count:] == 0).all()


def check_projection(words: int, size: int, dtype: str) -> None:
    """Check the output head, for few rows and many."""
    table = numbers(3, dtype, words, size)
    batches = [np.asarray(numbers(4, dtype, rows, size)) for rows in (1, 2, 3, 4, 7, 8, 21)]
    for x, result in zip(batches, of_each(OURS.project, batches, table), strict=True):
        exact = np.asarray(x, np.float64) @ np.asarray(table, np.float64).T
        np.testing.assert_allclose(result, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


def check_norms(size: int, dtype: str) -> None:
    """Check norms of 1, 17 and 40 rows of one model's width."""
    weight = numbers(5, dtype, size)
    for rows in (1, 17, 40):
        x = numbers(6, dtype, rows, size) * 3
        wide = np.asarray(x, np.float64)
        exact = (
            wide
            / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
            * np.asarray(weight, np.float64)
        )
        result = np.asarray(jax.jit(norms.rms_norm, static_argnums=2)(x, weight, 1e-5), np.float64)
        rounding = 2**-8 if dtype == "bfloat16" else 3e-6
        np.testing.assert_allclose(result, exact, rtol=rounding, atol=1e-6)
        added = numbers(7, dtype, rows, size)
        for stream in {dtype, "float32"}:
            before = jnp.asarray(np.asarray(x, np.float32) * 1.001, stream)
            total, normed = jax.jit(norms.norm_sum, static_argnums=3)(before, added, weight, 1e-5)
            summed = np.asarray(before, np.float32) + np.asarray(added, np.float32)
            np.testing.assert_array_equal(total, jnp.asarray(summed, stream))
            assert normed.dtype == added.dtype
            alone = jax.jit(norms.rms_norm, static_argnums=2)(total, weight, 1e-5)
            np.testing.assert_array_equal(normed, alone.astype(dtype))


def check_rest(dtype: str) -> None:
    """Check products, projections, norms and rotations at the default model's and at odd sizes."""
    for size_in, size_out in ((576, 960), (100, 96), (2100, 64), (64, 32)):
        check_products(size_in, size_out, dtype)
    for size_in, size_out in ((576, 960), (64, 32), (4112, 96)):
        check_int8(size_in, size_out, dtype)
    check_padding(dtype)
    for words, size in ((1040, 64), (528, 576), (48, 48)):
        check_projection(words, size, dtype)
    for size in (64, 576, 48):
        check_norms(size, dtype)
    for heads in ((9, 3, 64), (4, 1, 256), (16, 1, 96)):
        check_rotation(heads, dtype)
        check_rotation(heads, dtype, norms="float32")
    check_rotation((6, 2, 80), dtype, norms=dtype)
    check_rotation((9, 3, 64), dtype, norms=dtype)


def check_all() -> None:
    """Run all checks above, in both dtypes, with and without a window, and on pages that no span
    divides.
    """
    for dtype in ("float32", "bfloat16"):
        for heads in LAYOUTS:
            check_attention(heads, dtype)
            check_attention(heads, dtype, window=24)
            check_attention(heads, dtype, window=24, softcap=5.0)
        check_attention((9, 3, 64), dtype, page=8)
        check_attention((6, 2, 80), dtype, window=40, page=24)
        check_rest(dtype)


def use(path: Path, name: str) -> library._Library:
    """Register a compiled library under its own name; the caller uses the result in place of that
    of `library.load()`.
    """
    return library._register(path, name)


if __name__ == "__main__":
    loaded = use(Path(sys.argv[1]), sys.argv[2])
    library.load = lambda: loaded
    check_all()
    print(f"{sys.argv[2]}: right")
