"""Checks every Triton kernel and option on random ragged batches against numpy; run as a program,
in the interpreter.

Prints one JSON object: case -> what `test_triton_interpreted.py` asserts about it.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from triton_interpreter import Interpreted  # first: decides how kernels are made

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
from delta_nets import (
    CONVOLUTION,
    Sizes,
    after_drafts,
    from_checkpoints,
    in_pieces,
    of_every_length,
    of_mamba,
    of_short_conv,
    row_by_row,
)
from flashinfer_reader import attend_by
from int4_weights import pack_int4
from ragged import Batch, Case, attention, make, written
from rounding_kernels import PARTS

from jitney.engine.core.weights.checkpoints.layer_configs import ExpertsConfig
from jitney.kernels import definitions, reference, w8a8
from jitney.kernels.attention_cases import _MIXED
from jitney.kernels.attention_cases import CASES as ATTENTION
from jitney.kernels.expert_cases import CASES as EXPERTS
from jitney.kernels.expert_cases import ExpertCase
from jitney.kernels.expert_cases import _make_inputs as make_experts
from jitney.kernels.experts import ExpertBlocks
from jitney.kernels.flashinfer_gpu.prompts import _hopper_plan, _page_lists
from jitney.kernels.interface import AttentionMeta
from jitney.kernels.partial_sums import PartialSums
from jitney.kernels.proof_routing import route_error
from jitney.kernels.proof_shapes import distance, rounded_distance
from jitney.kernels.select import select
from jitney.kernels.triton_gpu import top_k_top_p
from jitney.kernels.triton_gpu.kernel_set import TritonKernels
from jitney.kernels.w8a8 import Fp8, RoundedRows

KERNELS = TritonKernels(Interpreted())
OLDER = TritonKernels(Interpreted(sm=89))  # a GPU on which XLA does not widen fp8 inside a product
OLDEST = TritonKernels(Interpreted(sm=80))  # a GPU without fp8
SHORT = Case((8, 2, 64), (5, 20), ((30, 10),), rows=16, seqs=4)


def attend(batch: Batch, kernels: Any = KERNELS) -> tuple[np.ndarray, np.ndarray]:
    """(o, pool after the step) of the whole operation in one jitted program."""
    step = jax.jit(lambda *args: kernels.paged_attention(*args, **batch.options))
    o, kv = step(batch.q, batch.k, batch.v, batch.kv, batch.meta)
    return np.asarray(o), np.asarray(kv)


def prompts_by_plan(q: jax.Array, kv: jax.Array, meta: AttentionMeta, **options: Any) -> jax.Array:
    """Prompt attention by FlashInfer's plan, computed in numpy, instead of our prompt kernel."""
    plan = _hopper_plan(meta, *q.shape, processors=5)

    def call(workspace: Any, lists: Any, q: Any, kv: Any) -> np.ndarray:
        workspace, q, kv, *lists = map(np.asarray, (workspace, q, kv, *lists))
        return attend_by("fa3", (workspace, plan.fields), lists, q, kv, options, processors=5)

    shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    lists = _page_lists(meta, kv.shape[1])
    return jax.pure_callback(call, shape, plan.workspace, lists, q, kv)


def check_attention(case: Case, kernels: TritonKernels = KERNELS) -> dict[str, Any]:
    """Greatest error over real rows; whether the pool is right; whether padding rows are zero."""
    batch = make(case)
    o, kv = attend(batch, kernels)
    expected = written(batch)
    error = np.abs(o[: batch.n_rows] - attention(batch, expected)).max()
    return {
        "error": float(error),
        "pool": bool((kv == expected).all()),
        "padding": not o[batch.n_rows :].any(),
    }


def bfloat16_over_int8() -> dict[str, Any]:
    """Greatest error, relative for outputs above 1, of bfloat16 queries that float16 could not hold
    or would round to zero, over an int8 pool. The interpreter's products of float16 are right.
    """
    batch = make(replace(ATTENTION["decode"], dtype="bfloat16", pool="int8"))
    factors = np.array([1, 2.0**20, 2.0**-40, 1, 1, 1, 1, 1], np.float32)[:, None, None]
    batch = replace(batch, q=(batch.q.astype(np.float32) * factors).astype(batch.q.dtype))
    o, kv = attend(batch)
    expected = attention(batch, kv)
    errors = np.abs(o[: batch.n_rows].astype(np.float32) - expected)
    return {"error": float((errors / np.maximum(1, np.abs(expected))).max())}


def rows_of(batch: Batch, seq: int) -> slice:
    cu_q = np.asarray(batch.meta.cu_q)
    return slice(cu_q[seq], cu_q[seq + 1])


def alone_and_in_a_crowd() -> dict[str, Any]:
    """Whether each sequence of a mixed batch gives the same bits alone in another bucket."""
    crowd = make(replace(_MIXED, decode=(600, 5, 300), pages=64))
    together, kv = attend(crowd)
    same = []
    for seq in range(crowd.n_seqs):
        rows, n_decode = rows_of(crowd, seq), int(seq < 3)
        count = rows.stop - rows.start
        meta = crowd.meta._replace(
            kv_lens=crowd.meta.kv_lens[seq : seq + 1],
            cu_q=jnp.array([0, count], jnp.int32),
            page_table=crowd.meta.page_table[seq : seq + 1],
            write_rows=crowd.meta.write_rows[rows],
            counts=jnp.array([n_decode, 1, count], jnp.int32),
        )
        pad = 0 if n_decode else 3  # a bucket with as many rows as sequences is decode-only
        meta = meta._replace(
            write_rows=jnp.pad(meta.write_rows, (0, pad), constant_values=kv.shape[0] * kv.shape[1])
        )
        q, k, v = (np.pad(x[rows], ((0, pad), (0, 0), (0, 0))) for x in (crowd.q, crowd.k, crowd.v))
        o, _ = attend(replace(crowd, q=q, k=k, v=v, kv=kv, meta=meta))
        same.append(bool((o[:count] == together[rows]).all()))
    return {"same": same}


def in_chunks() -> dict[str, Any]:
    """Greatest difference of a row between a prompt of 100 rows in one step and in chunks of 35, 1,
    30 and 34.

    The last bit of numpy's products depends on a row's position in the tile, unlike on a GPU.
    """
    whole = make(Case((8, 2, 64), (), ((100, 100),), seqs=2, pages=8))
    expected, _ = attend(whole)
    kv, done, errors = whole.kv, 0, []
    for count in (35, 1, 30, 34):
        rows = slice(done, done + count)
        done += count
        meta = whole.meta._replace(
            kv_lens=jnp.array([done, 0], jnp.int32),
            cu_q=jnp.array([0, count, count], jnp.int32),
            write_rows=jnp.pad(
                whole.meta.write_rows[rows], (0, 5), constant_values=kv.shape[0] * kv.shape[1]
            ),
            counts=jnp.array([0, 1, count], jnp.int32),
        )
        q, k, v = (np.pad(x[rows], ((0, 5), (0, 0), (0, 0))) for x in (whole.q, whole.k, whole.v))
        o, kv = attend(replace(whole, q=q, k=k, v=v, kv=kv, meta=meta))
        errors.append(float(np.abs(o[:count] - expected[rows]).max()))
    return {"error": max(errors)}


def in_parts(
    rows: int, size: int, n_parts: int, dtype: str, *, units: bool, scale: bool
) -> PartialSums:
    """A random product, with a padding row of NaN."""
    rng = np.random.default_rng(8)
    parts = rng.standard_normal((n_parts, rows + 1, size), np.float32) / np.float32(n_parts)
    parts[:, rows] = np.nan
    factors = rng.uniform(0.5, 2.0, rows + size).astype(np.float32)
    of_rows = jnp.asarray(factors[:rows, None]) if units else None
    of_outputs = jnp.asarray(factors[rows:]) if scale else None
    return PartialSums(jnp.asarray(parts), of_rows, of_outputs, rows, jnp.dtype(dtype))


def check_norm_of_parts(
    rows: int, size: int, n_parts: int = 4, dtype: str = "float32", *, units: bool = False
) -> dict[str, Any]:
    """Error of the norm of a sum with a product in parts, and of the same norm rounded to fp8;
    whether the sums are numpy's, and whether a row alone has the same bits.
    """
    product = in_parts(rows, size, n_parts, dtype, units=units, scale=rows > 1)
    rng = np.random.default_rng(9)
    x = jnp.asarray(rng.standard_normal((rows, size), np.float32).astype(dtype))
    weight = jnp.asarray(rng.standard_normal(size, np.float32).astype(dtype))

    def run(x: jax.Array, product: PartialSums) -> list[jax.Array]:
        total, normed = KERNELS.norm_parts(x, product, weight, 1e-5)
        again, rounded = KERNELS.rounded_norm_sum(x, product, weight, 1e-5)
        return [total, normed, again, rounded.widened()]

    total, normed, again, rounded = found = jax.tree.map(np.asarray, jax.jit(run)(x, product))
    own = product.units if product.units is None else product.units[-1:]
    last = replace(product, parts=product.parts[:, rows - 1 : rows], units=own, rows=1)
    alone = jax.jit(run)(x[-1:], last)
    same = all(np.array_equal(one[-1:], other) for one, other in zip(found, alone, strict=True))
    expected = np.asarray(x + product.whole())
    apart = np.abs(total.astype(np.float32) - expected.astype(np.float32)).max()
    expected = definitions.rms_norm(total, np.asarray(weight), 1e-5)
    return {
        "sum_error": float(apart),
        "error": distance(normed, expected),
        "rounded_error": rounded_distance(rounded, normed.astype(np.float32)),
        "same": same and np.array_equal(total, again),
    }


def check_rotation_of_parts(case: Case, normed: bool) -> dict[str, Any]:
    """`check_rotation` of a product in parts, compared with the same kernel on the whole
    product.
    """
    batch = make(case)
    rows, n_heads, dim = batch.q.shape
    n_all = n_heads + 2 * batch.k.shape[1]
    product = in_parts(rows, n_all * dim, 3, case.dtype, units=normed, scale=normed)
    angles = np.random.default_rng(1).uniform(0, 7, (rows, 1, dim // 2)).astype(np.float32)
    options: dict[str, Any] = {"kv_scales": batch.options.get("kv_scales")}
    if normed:
        weights = np.random.default_rng(2).standard_normal((2, dim), np.float32)
        options |= {"norms": tuple(weights.astype(case.dtype)), "eps": 1e-5}
    rope = jnp.cos(angles), jnp.sin(angles)
    heads = product.whole().reshape(rows, n_all, dim)
    rotate = jax.jit(functools.partial(KERNELS.rotate_and_write, **options))
    results = [rotate(one, rope, batch.kv, batch.meta) for one in (product, heads)]
    (q, kv), (expected_q, expected_kv) = jax.tree.map(
        lambda x: np.asarray(x).astype(np.float64), results
    )
    steps = np.abs(kv - expected_kv) / np.maximum(1, np.abs(expected_kv))
    return {
        "error": float(np.abs(q - expected_q).max()),
        "pool_error": float(steps.max()),
        "moved": float((kv != batch.kv.astype(np.float64)).mean()),
    }


def check_product_in_parts(rows: int, scheme: str) -> dict[str, Any]:
    """Error of a product's parts, added by numpy, against the definition; number of parts."""
    rng = np.random.default_rng(10)
    x = rng.standard_normal((rows, 1024), np.float32)
    scale = rng.uniform(0.5, 2.0, 96).astype(np.float32)
    if scheme == "int4":
        weights = pack_int4(rng.integers(0, 16, (1024, 96)), np.tile(scale, (16, 1)) / 64, None)
        weights = jax.tree.map(jnp.asarray, weights)
        expected = np.asarray(KERNELS.matmul_int4(jnp.asarray(x), weights))
        product = jax.jit(lambda x: KERNELS.multiply_in_parts(x, weights))(x)
    elif scheme == "fp8":
        w = rng.standard_normal((1024, 96), np.float32).astype(jnp.float8_e4m3fn)
        packed = Fp8(w8a8.pack_fp8(jnp.asarray(w)), jnp.asarray(scale))
        expected = definitions.matmul_fp8(x, w, scale)
        product = jax.jit(lambda x: KERNELS.multiply_in_parts(x, packed))(x)
    else:
        w = rng.integers(-127, 128, (1024, 96), np.int8)
        expected = definitions.matmul(x, w) * scale
        operands = jnp.asarray(w), jnp.asarray(scale)
        product = jax.jit(lambda x: KERNELS.multiply_in_parts(x, *operands))(x)
    return {"error": distance(product.whole(), expected), "parts": len(product.parts)}


def check_rotation(case: Case, normed: bool) -> dict[str, Any]:
    """Compare norm, rotation and write in one kernel with the reference's three."""
    batch = make(case)
    rng = np.random.default_rng(1)
    angles = rng.uniform(0, 7, (len(batch.q), 1, batch.q.shape[2] // 2)).astype(np.float32)
    rope = jnp.cos(angles), jnp.sin(angles)
    heads = np.concatenate([batch.q, batch.k, batch.v], axis=1)
    heads[0, -1, 0], heads[1, -2, 3] = np.nan, np.inf
    options: dict[str, Any] = {"kv_scales": batch.options.get("kv_scales")}
    if normed:
        norms = rng.standard_normal((2, heads.shape[2]), np.float32).astype(case.dtype)
        options |= {"norms": tuple(norms), "eps": 1e-5}
    results = [
        jax.jit(lambda *args, make=make: make.rotate_and_write(*args, **options))(
            heads, rope, batch.kv, batch.meta
        )
        for make in (KERNELS, reference)
    ]
    (q, kv), (expected_q, expected_kv) = jax.tree.map(
        lambda x: np.asarray(x).astype(np.float64), results
    )
    steps = np.abs(kv - expected_kv) / np.maximum(1, np.abs(expected_kv))
    return {
        "error": float(np.abs(q - expected_q).max()),
        "pool_error": float(steps.max()),
        "moved": float((kv != batch.kv.astype(np.float64)).mean()),
    }


def check_int4(
    rows: int,
    group: int,
    symmetric: bool,
    dtype: str = "float32",
    outputs: int = 80,
    result: str = "float32",
    inputs: int = 1024,
) -> dict[str, Any]:
    """Greatest error of the int4 product against numpy's product with the weights in float64.
    result: dtype of the product. inputs: fewer than 8 groups are one program's sum.
    """
    rng = np.random.default_rng(3)
    nibbles = rng.integers(0, 16, (inputs, outputs))
    scales = rng.uniform(0.5, 2.0, (inputs // group, outputs)).astype(np.float32) / 64
    zeros = None if symmetric else rng.integers(0, 17, scales.shape)
    weights = jax.tree.map(jnp.asarray, pack_int4(nibbles, scales, zeros))
    x = rng.standard_normal((rows, inputs), np.float32).astype(dtype)
    levels = nibbles - (8 if zeros is None else np.repeat(zeros, group, axis=0))
    expected = x.astype(np.float64) @ (levels * np.repeat(scales, group, axis=0).astype(np.float64))
    y = np.asarray(jax.jit(functools.partial(KERNELS.matmul_int4, dtype=result))(x, weights))
    assert y.dtype == result
    return {"error": float(np.abs(y - expected).max() / np.abs(expected).max())}


def check_gated_int4(rows: int, inner: int, dtype: str = "float32") -> dict[str, Any]:
    """Like `check_int4`, for the gated product in one kernel, with zero points."""
    rng = np.random.default_rng(5)
    nibbles = rng.integers(0, 16, (256, 2 * inner))
    scales = rng.uniform(0.5, 2.0, (4, 2 * inner)).astype(np.float32) / 64
    zeros = rng.integers(0, 17, scales.shape)
    weights = jax.tree.map(jnp.asarray, pack_int4(nibbles, scales, zeros))
    x = (rng.standard_normal((rows, 256)) / 2).astype(dtype)
    levels = nibbles - np.repeat(zeros, 64, axis=0)
    both = x.astype(np.float64) @ (levels * np.repeat(scales, 64, axis=0).astype(np.float64))
    gates, ups = np.split(both, 2, axis=1)
    expected = gates / (1 + np.exp(-gates)) * ups
    y = np.asarray(jax.jit(KERNELS.gated_int4)(x, weights))
    assert (y.dtype, y.shape) == (dtype, expected.shape)
    return {"error": float(np.abs(y - expected).max() / np.abs(expected).max())}


def check_fp8(rows: int, outputs: int, dtype: str = "float32") -> dict[str, Any]:
    """Greatest error of the fp8 product against numpy's in float64; every code but NaN is among the
    weights.
    """
    rng = np.random.default_rng(4)
    codes = rng.permutation(
        np.tile(np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF]), 800 * outputs // 254 + 1)
    )
    weights = codes[: 800 * outputs].reshape(800, outputs).view(jnp.float8_e4m3fn)
    x = rng.standard_normal((rows, 800), np.float32).astype(dtype)
    expected = x.astype(np.float64) @ weights.astype(np.float64)
    y = np.asarray(jax.jit(OLDER.matmul)(x, jnp.asarray(weights)))
    return {"error": float(np.abs(y - expected).max() / np.abs(expected).max())}


def check_rounding(rows: int, size: int, dtype: str = "float32") -> dict[str, Any]:
    """Share of codes and scales that differ from numpy's in any bit; scales of rows with a
    non-finite number are NaN.
    """
    rng = np.random.default_rng(5)
    x = rng.standard_normal((rows + 4, size), np.float32)
    x[:rows] *= np.exp2(np.arange(rows, dtype=np.float32) % 9 - 4)[:, None]
    x[rows], x[rows + 1, 1], x[rows + 2, 2], x[rows + 3, 0] = 0.0, np.inf, np.nan, -np.inf
    x = x.astype(dtype)
    codes, units = map(np.asarray, jax.jit(KERNELS.round_to_fp8)(x))
    padded = max(16, len(x))
    assert (codes.dtype, codes.shape) == (jnp.float8_e4m3fn, (padded, size))
    assert units.shape == (len(x), 1)
    finite = x[:-3].astype(np.float32)
    most = np.maximum(np.abs(finite).max(1, keepdims=True), np.float32(1e-30))
    expected = (finite * (np.float32(448) / most)).astype(jnp.float8_e4m3fn)
    wrong = codes[: len(finite)].view(np.uint8) != expected.view(np.uint8)
    wrong_units = units[:-3] != most * np.float32(1 / 448)
    hidden = np.isfinite(units[-3:])
    return {"wrong": float(sum(map(np.mean, (wrong, wrong_units, hidden))))}


def check_rounded_norm(rows: int, size: int, dtype: str = "float32") -> dict[str, Any]:
    """Error of the norm of a sum beyond its rounding to fp8; whether each sum is numpy's, and
    whether a row alone has the same bits.
    """
    rng = np.random.default_rng(6)
    x, added = (rng.standard_normal((rows, size), np.float32).astype(dtype) for _ in range(2))
    weight = rng.standard_normal(size, np.float32).astype(dtype)

    def run(x: jax.Array, added: jax.Array) -> list[jax.Array]:
        total, rounded = KERNELS.rounded_norm_sum(x, added, jnp.asarray(weight), 1e-5)
        return [total, rounded.codes[: len(x)].view(jnp.uint8), rounded.units, rounded.widened()]

    total, *found = map(np.asarray, jax.jit(run)(x, added))
    alone = jax.jit(run)(x[-1:], added[-1:])[1:]
    same = all(np.array_equal(one[-1:], other) for one, other in zip(found, alone, strict=True))
    expected = definitions.rms_norm(total, weight, 1e-5)
    error = rounded_distance(found[-1], expected)
    return {"error": error, "same": same and np.array_equal(total, x + added)}


def check_rounded_gate(rows: int, outputs: int, dtype: str = "float32") -> dict[str, Any]:
    """Error of a gated product beyond its rounding to fp8; whether it is the same for rows that are
    rounded already.
    """
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((rows, 256), np.float32) / 16).astype(dtype)
    w = rng.standard_normal((256, 2 * outputs), np.float32).astype(jnp.float8_e4m3fn)
    scale = rng.uniform(0.5, 2.0, 2 * outputs).astype(np.float32)
    packed = Fp8(w8a8.pack_fp8(jnp.asarray(w)), jnp.asarray(scale))
    found = np.asarray(jax.jit(lambda x: KERNELS.rounded_gated_fp8(x, packed).widened())(x))
    rounded = RoundedRows(*w8a8.round_to_fp8(jnp.asarray(x)), jnp.dtype(dtype))
    again = np.asarray(jax.jit(lambda: KERNELS.rounded_gated_fp8(rounded, packed).widened())())
    expected = definitions.gated(definitions.matmul_fp8(x, w, scale))
    return {"error": rounded_distance(found, expected), "same": np.array_equal(found, again)}


def check_experts(case: ExpertCase, kernels: TritonKernels = KERNELS) -> dict[str, Any]:
    """Greatest error of the outputs against numpy, in standard deviations of their rows; number of
    padding places that were written.
    """
    inputs = make_experts(case)
    find = jax.jit(kernels.experts, static_argnums=4)
    args = inputs.x, inputs.opening, inputs.closing, inputs.blocks
    outputs = np.asarray(find(*args, case.activation))
    expected = definitions.experts(*args, case.activation)
    nobody = np.setdiff1d(np.arange(len(outputs)), inputs.real)
    return {
        "error": distance(outputs[inputs.real], expected[inputs.real]),
        "written": int(np.isfinite(outputs[nobody]).sum()),
    }


def check_routing(
    mixture: ExpertsConfig, rows: int, count: int, *, columns: int = 0, ties: bool = False
) -> dict[str, Any]:
    """Error of the shares; infinite if a row's place differs from numpy's. columns: additional
    router outputs, which are not read. ties: many experts have the same number.
    """
    rng = np.random.default_rng(rows)
    numbers = rng.normal(size=(rows, mixture.n_experts + columns)).astype(np.float32)
    if ties:
        numbers = np.round(numbers)
    bias, factors = rng.uniform(size=(2, mixture.n_experts)).astype(np.float32)
    more = (bias, factors) if mixture.choice_bias else ()
    return {"error": route_error(KERNELS.route, mixture, numbers, count, *more)}


def check_no_numbers() -> dict[str, Any]:
    """Whether rows with a NaN get shares that are NaN, and other rows get theirs."""
    none = []
    for scoring in ("softmax", "sigmoid"):
        mixture = ExpertsConfig(20, 3, renormalised=True, scoring=scoring)
        numbers = np.random.default_rng(2).normal(size=(4, 20)).astype(np.float32)
        numbers[1, 5], numbers[2] = np.nan, np.nan
        shares = KERNELS.route(jnp.asarray(numbers), mixture, jnp.int32(4)).shares
        none += np.isnan(np.asarray(shares)).T.tolist()
    return {"none": none}


def experts_alone() -> dict[str, Any]:
    """Whether rows give the same bits in separate blocks, at the same place of a block: the last
    bit of numpy's products depends on a row's position in the tile, unlike on a GPU.
    """
    case = ExpertCase(rows=40)
    inputs = make_experts(case)
    find = jax.jit(KERNELS.experts, static_argnums=4)
    together = np.asarray(
        find(inputs.x, inputs.opening, inputs.closing, inputs.blocks, case.activation)
    )
    same = []
    for place in inputs.real[::5]:
        alone = np.full(case.block, 1, np.int32)
        alone[place % case.block] = 0
        owner = inputs.blocks.experts[place // case.block]
        blocks = ExpertBlocks(*map(jnp.asarray, (alone, [owner], 1)))
        x = inputs.x[inputs.blocks.rows[place]][None]
        answers = find(x, inputs.opening, inputs.closing, blocks, case.activation)
        own = np.asarray(answers)[place % case.block]
        same.append(bool((own == together[place]).all()))
    return {"same": same}


def spread_rows(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Rows of many ties in which every seventh entry is banned (-inf)."""
    scaled = np.round(rng.standard_normal((rows, vocab)) * 3, 2).astype(np.float32)
    scaled[:, ::7] = -np.inf
    return scaled


def odd_rows(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Rows with one value; with two; with all but five entries banned; with one entry; with entries
    close to the best one; with entries too small to have mass; and with a non-finite number.
    """
    scaled = rng.standard_normal((rows, vocab)).astype(np.float32)
    scaled[0::7] = 1.5
    scaled[1::7] = np.where(np.arange(vocab) % 2, 0.0, -5.0)
    scaled[2::7, 5:] = -np.inf
    scaled[3::7, :-1] = -np.inf
    scaled[4::7] *= np.float32(1e-6)
    scaled[5::7] *= 100
    scaled[6::7, 3] = np.nan
    return scaled


def check_threshold(
    make: Callable[[np.random.Generator, int, int], np.ndarray],
    rows: int,
    vocab: int,
    most: int = top_k_top_p._LISTED,
) -> dict[str, Any]:
    """Rows whose cut differs from the one found by sorting; most passes over a row with one limit,
    and with both. most: entries that a list holds.
    """
    rng = np.random.default_rng(5)
    scaled = make(rng, rows, vocab)
    scaled -= scaled.max(1, keepdims=True)
    top_k = rng.choice([0, 1, 5, 40, vocab // 2, vocab, 2 * vocab], rows).astype(np.int32)
    top_p = rng.choice([1.0, 0.95, 0.9, 0.5, 1e-6], rows).astype(np.float32)
    top_k[0], top_p[0] = 0, 1.0
    search = jax.jit(functools.partial(top_k_top_p.search, Interpreted(), most=most))
    result = search(scaled, top_k, top_p)
    floor, states = np.asarray(result.floor), np.asarray(result.states)
    finite = ~np.isnan(scaled).any(1)
    wrong = [
        s
        for s in np.flatnonzero(finite).tolist()
        if floor[s] != cut_by_sorting(scaled[s], int(top_k[s]), float(top_p[s]))
    ]
    limits = ((top_k > 0) & (top_k < vocab)).astype(int) + (top_p < 1.0)
    counted = (limits > 0) + (states[:-1, :, 0] != 0).sum(0)
    gathered = states[-1, :, 2] < states[-1, :, 3]
    passes = np.where(finite, counted + gathered, 0)
    return {
        "wrong": wrong,
        "one_limit": int(passes[limits == 1].max()),
        "both": int(passes[limits == 2].max()),
    }


def cut_by_sorting(row: np.ndarray, k: int, p: float) -> float:
    """The smallest kept entry of a row, -inf if all are kept; masses are integer multiples of
    2**-33.
    """
    best = np.sort(row)[::-1]
    last = best[k - 1] if 0 < k < len(row) else -np.inf
    if p == 1.0:
        return float(last)
    top = best[best >= last]
    mass = np.cumsum(np.floor(np.exp(top).astype(np.float64) * 2.0**33 + 0.5))
    return float(top[np.searchsorted(mass, p * mass[-1])])


def whole_model() -> dict[str, Any]:
    """Compare logits of a small Llama with the reference kernels, in a mixed step and the decode
    step after it; also with attention that does not rotate and write, and with products in parts.
    """
    from jitney.engine.core.models.hidden import Hidden
    from jitney.engine.core.models.registry import random_model
    from jitney.engine.core.weights.checkpoints.model_config import ModelConfig

    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=64,
        hidden_size=48,
        n_layers=2,
        n_heads=6,
        n_kv_heads=2,
        head_dim=16,
        intermediate_size=64,
        windows=(0, 16),
        context_length=256,
        qk_norm=True,
    )
    model = random_model(config, kv="int8")
    logits = []
    plain = select("cpu", "reference")
    fused = replace(plain, rotate_and_write=KERNELS.rotate_and_write, attend=KERNELS.attend)
    unfused = replace(plain, paged_attention=KERNELS.paged_attention)
    readers = {"norm_sum": KERNELS.norm_parts, "rotate_and_write": KERNELS.rotate_and_write}
    in_parts = replace(fused, parts=replace(PARTS, **readers))
    for kernels in (unfused, fused, in_parts, plain):
        # Few rows, since the interpreter rotates each head of each row separately.
        batch = make(Case((6, 2, 16), (40,), ((9, 9), (35, 8)), rows=24, seqs=4, pages=8))
        pools = [jnp.zeros(batch.kv.shape, "int8")] * 2
        tokens = jnp.arange(24, dtype=jnp.int32)
        # In one program: otherwise each small operation would be compiled for each shape.
        forward = jax.jit(functools.partial(model, kernels=kernels))
        hidden, pools = forward(tokens, pools, batch.meta)
        decode = batch.meta._replace(
            kv_lens=batch.meta.kv_lens.at[:3].add(1),
            cu_q=jnp.array([0, 1, 2, 3, 3], jnp.int32),
            positions=batch.meta.kv_lens,
            counts=jnp.array([3, 3, 3], jnp.int32),
            write_rows=jnp.where(
                jnp.arange(4) < 3,
                batch.meta.page_table[jnp.arange(4), batch.meta.kv_lens // 16] * 16
                + batch.meta.kv_lens % 16,
                batch.kv.shape[0] * 16,
            ),
        )
        after, _ = forward(tokens[:4], pools, decode)
        rows = jnp.concatenate([hidden.states[: batch.n_rows], after.states[:3]])
        logits.append(np.asarray(model.logits(Hidden(rows), kernels)))
    *ours, expected = logits
    return {"error": max(float(np.abs(output - expected).max()) for output in ours)}


def sampled_tokens() -> dict[str, Any]:
    """Rows that draw another token if the kernel computes the top-k and top-p cut instead of the
    sampler's own search.
    """
    from jitney.engine.common.requests import SamplingParams
    from jitney.engine.core.executor.inputs import SAMPLING
    from jitney.engine.core.executor.sampling import Sampler, SamplingRows, SeatState

    rng = np.random.default_rng(11)
    n, vocab = 16, 700
    temperatures = rng.uniform(0.5, 2.0, n).tolist()
    top_ps = rng.choice([1.0, 0.95, 0.6], n).tolist()
    top_ks = rng.choice([0, 3, 40, 400], n).tolist()
    packed = []
    for seed in range(n):
        params = SamplingParams(
            temperature=temperatures[seed], top_p=top_ps[seed], top_k=top_ks[seed]
        )
        packed.append(SAMPLING.pack(params, seed))
    words = np.frombuffer(b"".join(packed), np.int32).reshape(n, SAMPLING.words)
    rows = SamplingRows(
        SAMPLING.columns(jnp.asarray(words)), jnp.zeros(n, jnp.int32), jnp.full(n, 4, jnp.int32)
    )
    logits = rng.standard_normal((n, vocab), np.float32) * 2
    drawn = [
        np.asarray(jax.jit(Sampler(search).sample)(logits, rows, SeatState.empty(4, vocab)).tokens)
        for search in (KERNELS.threshold, None)
    ]
    return {"other": int((drawn[0] != drawn[1]).sum()), "distinct": len(set(drawn[1].tolist()))}


#: Cases of the tables that other cases cover: only a bench runs them.
CONTAINED = {
    *("window in decode", "sinks in decode", "window, softcap in decode", "window in mixed"),
    *("group of three", "head dim 96", "int8 pool", "latents in decode"),
    *("prompts alone", "group of seven", "head dim 128"),
    *("gelu", "fp8", "biases, clamped"),
}
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        f"attention: {name}": lambda case=case: check_attention(case)
        for name, case in ATTENTION.items()
        if name not in CONTAINED
    },
    **{
        f"attention: prompts by FlashInfer, {name}": lambda case=ATTENTION[name]: check_attention(
            case, TritonKernels(Interpreted(), prompts=prompts_by_plan)
        )
        for name in ("mixed", "window in mixed", "decode")
    },
    "queries: bfloat16 over int8": bfloat16_over_int8,
    "invariance: alone and in a crowd": alone_and_in_a_crowd,
    "invariance: in chunks": in_chunks,
    "rotation: plain": lambda: check_rotation(SHORT, False),
    "rotation: normed, head dim 80": lambda: check_rotation(replace(SHORT, heads=(4, 2, 80)), True),
    "rotation: int8 pool": lambda: check_rotation(replace(SHORT, pool="int8"), False),
    "rotation: int8 pool, float16, normed": lambda: check_rotation(
        replace(SHORT, dtype="float16", pool="int8"), True
    ),
    "rotation: of parts": lambda: check_rotation_of_parts(SHORT, False),
    "rotation: of parts, int8 pool, float16, normed": lambda: check_rotation_of_parts(
        replace(SHORT, dtype="float16", pool="int8"), True
    ),
    "int4: one row": lambda: check_int4(1, 128, True),
    "int4: zero points": lambda: check_int4(5, 128, False),
    "int4: groups of 32": lambda: check_int4(9, 32, False),
    "int4: groups of 64, outputs no multiple": lambda: check_int4(16, 64, True, outputs=77),
    "int4: float16": lambda: check_int4(64, 64, False, "float16"),
    "int4: three blocks of rows, float16": lambda: check_int4(257, 64, False, "float16"),
    "int4: gated": lambda: check_gated_int4(5, 80),
    "int4: gated, results in float16": lambda: check_gated_int4(129, 40, "float16"),
    "int4: results in float16": lambda: check_int4(
        129, 128, False, "float16", result="float16", inputs=768
    ),
    "fp8: one row": lambda: check_fp8(1, 80),
    "fp8: outputs no multiple": lambda: check_fp8(13, 77),
    "fp8: float16": lambda: check_fp8(40, 64, "float16"),
    "fp8: more rows than the kernel takes": lambda: check_fp8(17, 64),
    "rounding: one row": lambda: check_rounding(1, 512),
    "rounding: padded rows": lambda: check_rounding(5, 700, "bfloat16"),
    "rounding: float16": lambda: check_rounding(9, 64, "float16"),
    "rounded: norm of one row": lambda: check_rounded_norm(1, 512),
    "rounded: norm of padded rows": lambda: check_rounded_norm(5, 700),
    "rounded: norm of many rows": lambda: check_rounded_norm(17, 64, "float16"),
    "parts: norm of one row": lambda: check_norm_of_parts(1, 512, 8),
    "parts: norm of padded rows": lambda: check_norm_of_parts(5, 700, units=True),
    "parts: norm of many rows, float16": lambda: check_norm_of_parts(17, 64, 2, "float16"),
    "product in parts: one row": lambda: check_product_in_parts(1, "int8"),
    "product in parts: rounded rows": lambda: check_product_in_parts(5, "fp8"),
    "product in parts: one rounded row": lambda: check_product_in_parts(1, "fp8"),
    "product in parts: int4": lambda: check_product_in_parts(5, "int4"),
    "rounded: gate of one row": lambda: check_rounded_gate(1, 96),
    "rounded: gate of padded rows": lambda: check_rounded_gate(5, 700),
    "rounded: gate of many rows": lambda: check_rounded_gate(17, 64, "float16"),
    **{
        f"experts: {name}": lambda case=case: check_experts(case)
        for name, case in EXPERTS.items()
        if name not in CONTAINED
    },
    "experts: float16": lambda: check_experts(ExpertCase(size=96, dtype="float16")),
    "experts: fp8 on a card without fp8": lambda: check_experts(
        ExpertCase(size=96, schemes=("fp8", "fp8")), OLDEST
    ),
    "alone: experts": experts_alone,
    "routing: shares of all": lambda: check_routing(ExpertsConfig(32, 4, renormalised=False), 5, 4),
    "routing: one row, sigmoids, a bias, factors": lambda: check_routing(
        ExpertsConfig(
            40, 8, renormalised=True, scoring="sigmoid", choice_bias=True, share_factor=2.5
        ),
        1,
        1,
    ),
    "routing: several blocks of an expert": lambda: check_routing(
        ExpertsConfig(6, 3, renormalised=True), 70, 61
    ),
    "routing: many experts, unread columns": lambda: check_routing(
        ExpertsConfig(256, 8, renormalised=True), 32, 32, columns=1
    ),
    "routing: ties": lambda: check_routing(
        ExpertsConfig(16, 5, renormalised=True), 24, 20, ties=True
    ),
    "routing: nobody": lambda: check_routing(ExpertsConfig(16, 2, renormalised=True), 8, 0),
    "routing: groups": lambda: check_routing(
        ExpertsConfig(24, 3, renormalised=True, clusters=6, chosen_clusters=2), 9, 7
    ),
    "routing: groups by one each, a bias": lambda: check_routing(
        ExpertsConfig(
            256,
            8,
            renormalised=True,
            scoring="sigmoid",
            choice_bias=True,
            clusters=8,
            chosen_clusters=4,
            cluster_best=1,
        ),
        5,
        5,
    ),
    "routing: more choices than the kernel takes": lambda: check_routing(
        ExpertsConfig(16, 4, renormalised=True), 264, 200
    ),
    "no numbers: routing": check_no_numbers,
    "delta net: value heads that share keys": lambda: in_pieces(KERNELS.delta_net, Sizes()),
    "delta net: padded heads": lambda: in_pieces(KERNELS.delta_net, Sizes(2, 2, 24, 80, 3)),
    "delta net: of Mamba": lambda: in_pieces(
        of_mamba(KERNELS.mamba), Sizes(2, 4, 24, 80, 3, corrects=False)
    ),
    **{
        f"delta net: row by row, of Mamba, {sizes}": lambda sizes=sizes: row_by_row(
            of_mamba(KERNELS.mamba), sizes
        )
        for sizes in (Sizes(corrects=False), Sizes(1, 4, 24, 40, 3, corrects=False))
    },
    **{
        f"delta net: row by row, {sizes}": lambda sizes=sizes: row_by_row(KERNELS.delta_net, sizes)
        for sizes in (Sizes(), Sizes(1, 4, 64, 40, 3), Sizes(1, 2, 128, 64))
    },
    "delta net: row by row, of convolutions": lambda: row_by_row(
        of_short_conv(KERNELS.short_conv), CONVOLUTION
    ),
    "delta net: of every length": lambda: of_every_length(KERNELS.delta_net, Sizes(1, 2)),
    "delta net: of every length, of Mamba": lambda: of_every_length(
        of_mamba(KERNELS.mamba), Sizes(1, 2, corrects=False)
    ),
    "delta net: checkpoints": lambda: from_checkpoints(KERNELS.delta_net, Sizes()),
    "delta net: drafts": lambda: after_drafts(KERNELS.delta_net, Sizes()),
    "threshold: small vocabulary": lambda: check_threshold(spread_rows, 12, 500),
    "threshold: several splits": lambda: check_threshold(spread_rows, 6, 9001),
    "threshold: odd rows": lambda: check_threshold(odd_rows, 21, 300),
    "threshold: short lists": lambda: check_threshold(odd_rows, 28, 300, 8),
    "sampling: tokens": sampled_tokens,
    "model: logits, normed heads, int8 pool": whole_model,
}


def main(names: list[str]) -> None:
    chosen = [name for name in CASES if not names or any(part in name for part in names)]
    print(json.dumps({name: CASES[name]() for name in chosen}))


if __name__ == "__main__":
    main(sys.argv[1:])
