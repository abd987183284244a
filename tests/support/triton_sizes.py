"""Runs our Triton kernels on arrays of more than 2**31 elements in the interpreter; run as a
program.

Prints one JSON object: case -> whether it is right.
"""

from __future__ import annotations

# pyright: reportArgumentType=false
# Kernels are compiled, not called: numbers become constexprs and tensors on the way.
import json
from dataclasses import dataclass, replace
from typing import Any

from triton_interpreter import Tensor, rubbish  # first: decides how kernels are made

# isort: split
import jax
import numpy as np
from sparse_arrays import TOO_MANY, large_pool, sparse

from jitney.kernels.interface import AttentionMeta
from jitney.kernels.triton_gpu import experts as expert_products
from jitney.kernels.triton_gpu import narrow_products, write_kv
from jitney.kernels.triton_gpu.kernel_set import TritonKernels
from jitney.kernels.triton_gpu.tiles import DecodeTiles, PromptTiles, attention_tiles

RANDOM = np.random.default_rng(9)
PAGE, K, D = 16, 2, 64


@dataclass(frozen=True)
class InPlace:
    """A launch that interprets on numpy arrays in place."""

    sm: int = 90

    def __call__(
        self,
        kernel: Any,
        *args: Any,
        out: Any,
        grid: tuple[int, ...],
        warps: int,
        stages: int,
        registers: int = 0,
        **constants: Any,
    ) -> Any:
        refs = [isinstance(arg, jax.Ref) for arg in args]
        arrays = [
            np.array(arg[...]) if is_ref else np.asarray(arg)
            for arg, is_ref in zip(args, refs, strict=True)
        ]
        leaves, tree = jax.tree.flatten(out)
        outputs = [rubbish(leaf) for leaf in leaves]
        kernel[grid](*map(Tensor, arrays), *map(Tensor, outputs), **constants)
        for arg, array, is_ref in zip(args, arrays, refs, strict=True):
            if is_ref:
                arg[...] = array
        return jax.tree.unflatten(tree, outputs)


def few_programs(*how: int) -> tuple[DecodeTiles, PromptTiles]:
    """The table's tiles with few programs, since each program counts all seats first."""
    decode, prompt = attention_tiles(*how)
    return replace(decode, programs=8), prompt


KERNELS = TritonKernels(InPlace(), few_programs)


def attends(decode: list[int], prompts: list[tuple[int, int]], seats: int = 0) -> bool:
    """Whether pages at the end of a large pool give the same bits as a small pool. decode: keys of
    decoding sequences; prompts: (keys, rows) of others.
    """
    counts = [1] * len(decode) + [rows for _, rows in prompts]
    lens = decode + [keys for keys, _ in prompts]
    seats = seats or len(lens)
    used = [-(-keys // PAGE) for keys in lens]
    width = max(used)
    table = np.zeros((seats, width), np.int32)
    first = 1
    for seat, pages in enumerate(used):
        table[seat, :pages] = np.arange(first, first + pages)
        first += pages
    kv_lens, cu_q = np.zeros(seats, np.int32), np.zeros(seats + 1, np.int32)
    kv_lens[: len(lens)] = lens
    cu_q[1 : len(lens) + 1] = np.cumsum(counts)
    cu_q[len(lens) + 1 :] = sum(counts)
    rows = seats if not prompts else sum(counts) + seats
    positions, writes = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    totals = np.array([len(decode), len(lens), sum(counts)], np.int32)
    small = RANDOM.standard_normal((first, PAGE, 2 * K, D), np.float32).astype(np.float16)
    large = large_pool(PAGE, K, D, np.float16)
    offset = len(large) - first
    assert offset * PAGE * 2 * K * D >= TOO_MANY
    large[offset:] = small
    q = RANDOM.standard_normal((rows, 3 * K, D), np.float32).astype(np.float16)
    outputs = []
    for pool, move in ((small, 0), (large, offset)):
        meta: Any = AttentionMeta(kv_lens, cu_q, table + move, writes, positions, totals)
        outputs.append(np.asarray(KERNELS.attend(q, pool, meta, scale=0.125)))
    real = slice(0, sum(counts))
    return bool((outputs[0][real] == outputs[1][real]).all() and outputs[0][real].any())


def as_defined() -> bool:
    """Whether rows equal numpy's softmax, with 512 seats and page tables for 32,768 keys; one of
    the 16 taken seats has that many.
    """
    lens = np.zeros(512, np.int32)
    lens[:16] = [32768, *range(1, 16)]
    table = np.zeros((512, 2048), np.int32)
    table[0] = np.arange(1, 2049)
    table[1:16, 0] = 2049 + np.arange(15)
    pool = RANDOM.standard_normal((2064, PAGE, 2, D), np.float32)
    q = RANDOM.standard_normal((512, 1, D), np.float32)
    cu_q, zeros = np.minimum(np.arange(513), 16).astype(np.int32), np.zeros(512, np.int32)
    totals = np.array([16, 16, 16], np.int32)
    meta: Any = AttentionMeta(lens, cu_q, table, zeros, zeros, totals)
    o = np.asarray(KERNELS.attend(q, pool, meta, scale=0.125))
    for seat in range(16):
        rows = pool[table[seat]].reshape(-1, 2, D)[: lens[seat]].astype(np.float64)
        weights = np.exp(rows[:, 0] @ q[seat, 0] * 0.125)
        expected = weights @ rows[:, 1] / weights.sum()
        if not np.abs(o[seat, 0] - expected).max() < 1e-5:
            return False
    return not o[16:].any()


def writes(dtype: Any, limit: float) -> bool:
    """Whether keys and values are written to the last rows of a large pool, and not where offsets
    that overflow 32 bits point.
    """
    pool = large_pool(PAGE, K, D, dtype)
    n_rows = len(pool) * PAGE
    rows = np.array([n_rows - 5, n_rows - 40 * PAGE, n_rows], np.int32)
    k, v = RANDOM.integers(-100, 100, (2, 3, K, D)).astype(np.float16)
    write_kv.write_pages[(3,)](
        *map(Tensor, (k, v, rows, np.ones(2 * K, np.float32), pool)),
        K=K,
        D=D,
        DP=D,
        HEADS=K,
        POOL=n_rows,
        LIMIT=limit,
    )
    flat = pool.reshape(n_rows, K, 2, D)
    return bool((flat[rows[:2], :, 0] == k[:2]).all() and (flat[rows[:2], :, 1] == v[:2]).all())


def rotates() -> bool:
    """Like `writes`, for the kernel that also rotates, here by angle 0."""
    pool = large_pool(PAGE, K, D, np.float16)
    n_rows = len(pool) * PAGE
    rows = np.array([n_rows - 1, n_rows - 50 * PAGE], np.int32)
    heads = RANDOM.standard_normal((2, 3 * K, D), np.float32).astype(np.float16)
    cos, sin = np.ones((2, D // 2), np.float32), np.zeros((2, D // 2), np.float32)
    unread = [np.ones(1, np.float32) for _ in range(5)]
    q = np.zeros((2, K, D), np.float16)
    write_kv.rotate_pages[(2, 3 * K)](
        *map(Tensor, (heads, *unread[:2], cos, sin, *unread[2:4], rows, unread[4], pool, q)),
        H=K,
        K=K,
        D=D,
        HALF=D // 2,
        POOL=n_rows,
        LIMIT=0.0,
        NORMED=False,
        EPS=0.0,
        PARTS=0,
        PART=0,
        UNITS=False,
        SCALED=False,
    )
    flat = pool.reshape(n_rows, K, 2, D)
    keys, values = heads[:, K : 2 * K], heads[:, 2 * K :]
    return bool((flat[rows, :, 0] == keys).all() and (flat[rows, :, 1] == values).all())


def multiplies(rows: int, outputs: int) -> bool:
    """Whether an int4 product is right if its last rows of results, or last groups of weights, lie
    beyond 2**31 elements; computes only its first 16 outputs.
    """
    inputs, group = 128, 32
    packed = sparse((inputs // 2, outputs), np.uint8)
    scales = sparse((inputs // group, outputs), np.float32)
    y = sparse((1, rows, outputs), np.float32)
    packed[:, :16] = RANDOM.integers(0, 256, (inputs // 2, 16), np.uint8)
    scales[:, :16] = 1
    x = RANDOM.standard_normal((rows, inputs), np.float32)
    narrow_products.matmul_int4[(-(-rows // 16), 1)](
        *map(Tensor, (x, packed, scales, packed, y)),
        M=rows,
        SIZE_IN=inputs,
        SIZE_OUT=outputs,
        R=group,
        BLOCK_M=16,
        BLOCK_N=16,
        SPLITS=1,
        ZEROS=False,
        PRECISION="ieee",
    )
    halves = packed[:, :16].reshape(inputs // group, -1, 16)
    codes = np.concatenate([halves & 15, halves >> 4], axis=1).reshape(inputs, 16) - 8.0
    return bool(np.abs(y[0, :, :16] - x @ codes).max() < 1e-3)


def widens(outputs: int) -> bool:
    """Whether an fp8 product is right if its last weights lie beyond 2**31 elements."""
    inputs = 128
    codes = sparse((inputs, outputs), np.uint8)
    codes[:, :16] = RANDOM.integers(0, 127, (inputs, 16), np.uint8)
    y = sparse((1, 2, outputs), np.float32)
    x = RANDOM.standard_normal((2, inputs), np.float32)
    narrow_products.matmul_fp8[(1, 1)](
        *map(Tensor, (x, codes, y)),
        M=2,
        SIZE_IN=inputs,
        SIZE_OUT=outputs,
        BLOCK_M=16,
        BLOCK_N=16,
        BLOCK_K=32,
        SPLITS=1,
        PRECISION="ieee",
    )
    weights = codes[:, :16].view(jax.numpy.float8_e4m3fn).astype(np.float32)
    return bool(np.abs(y[0, :, :16] - x @ weights).max() < 1e-2)


def meets_experts(n_experts: int, columns: int, blocks: int) -> bool:
    """Whether the rows of the last block are right, with the last expert, if its weights or results
    lie beyond 2**31 elements; all but the first 16 outputs are 0.
    """
    inputs, block = 128, 16
    weights = sparse((n_experts, inputs, 2 * columns), np.float16)
    gates = RANDOM.standard_normal((inputs, 16), np.float32).astype(np.float16)
    ups = RANDOM.standard_normal((inputs, 16), np.float32).astype(np.float16)
    weights[-1, :, :16], weights[-1, :, columns : columns + 16] = gates, ups
    rows = np.full(blocks * block, 3, np.int32)
    rows[-block : -block + 3] = 2, 0, 1
    experts = np.full(blocks, n_experts, np.int32)
    experts[-1] = n_experts - 1
    y = sparse((blocks * block, columns), np.float16)
    x = RANDOM.standard_normal((3, inputs), np.float32).astype(np.float16)
    expert_products.open_experts[(blocks,)](
        *map(Tensor, (x, weights, x, x, rows, experts, y)),
        T=3,
        X=n_experts,
        SIZE_IN=inputs,
        SIZE_OUT=columns,
        BLOCK_M=block,
        BLOCK_N=columns,
        BLOCK_K=32,
        MATRICES=2,
        SCALED=False,
        MXFP4=False,
        BIASED=False,
        ACTIVATION="silu",
        PRECISION="ieee",
    )
    wide = x.astype(np.float32)[[2, 0, 1]]
    gate, up = wide @ gates.astype(np.float32), wide @ ups.astype(np.float32)
    expected = gate / (1 + np.exp(-gate)) * up
    apart = np.abs(y[-block : -block + 3, :16] - expected)
    return bool((apart < 1e-2 + 2e-3 * np.abs(expected)).all())


CASES = {
    "decode": lambda: attends([40, 3, 17], []),
    "prompt": lambda: attends([30], [(50, 33), (20, 20)]),
    "512 seats, 32,768 keys": as_defined,
    "write": lambda: writes(np.float16, 0.0),
    "write int8": lambda: writes(np.int8, 127.0),
    "rotate": rotates,
    "int4, many results": lambda: multiplies(33, 1 << 26),
    "int4, many weights": lambda: multiplies(1, 1 << 26),
    "fp8, many weights": lambda: widens(1 << 25),
    "experts, many weights": lambda: meets_experts((1 << 14) + 1, 512, 1),
    "experts, many results": lambda: meets_experts(2, 1 << 15, 4097),
}


if __name__ == "__main__":
    print(json.dumps({name: case() for name, case in CASES.items()}))
