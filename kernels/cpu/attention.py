"""Paged attention for CPUs, compiled by Numba: flash attention (arXiv 2205.14135) over the pages as they lie.

A decoding row goes through its keys once; a block of prompt rows goes through them in chunks, widened to float32 once
per chunk, with both products in registers. Nothing is computed for keys a row cannot see (but the rest of a chunk), for
absent sequences, or for padding. Axes as in `jitney.kernels.interface`; G = H // K rows share a key head. All addresses
are in bytes, all strides in elements.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import njit

from jitney.kernels import reference
from jitney.kernels.cpu.ffi import argument, dim, handler, result
from jitney.kernels.cpu.memory import float32, int32, set_float32, set_word
from jitney.kernels.cpu.softmax import ROWS, soften_rows
from jitney.kernels.cpu.vectors import (
    LANES,
    copy_row,
    dots,
    exp2,
    multiplies_pairs,
    pair_rows,
    prefetch,
    row_exp2,
    row_max,
    scratch,
    tile,
    transposed,
)
from jitney.kernels.interface import AttentionMeta

#: Keys per chunk of a prompt block, and of a decoding row.
CHUNK, DECODE_CHUNK = 96, 128
#: Rows of a prompt block, all G heads of a key head counted, and of a tile of its scores.
BLOCK_ROWS, SCORE_ROWS = 96, 4
LOG2E = math.log2(math.e)
HIDDEN = np.float32(-1e30)
FLOAT = 4
DTYPES = (jnp.bfloat16, jnp.float32)
#: Operands of the custom call.
Q, KV, KV_LENS, CU_Q, TABLE, COUNTS = range(6)


def paged_attention(q: jax.Array, k: jax.Array, v: jax.Array, kv: jax.Array, meta: AttentionMeta, *, scale: float,
                    window: int = 0, softcap: float = 0.0, sinks: jax.Array | None = None,
                    kv_scales: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """See `jitney.kernels.interface.PagedAttention`."""
    kv = reference.write_kv(kv, k, v, meta.write_rows, kv_scales)
    return attend(q, kv, meta, scale=scale, window=window, softcap=softcap, sinks=sinks, kv_scales=kv_scales), kv


def attend(q: jax.Array, kv: jax.Array, meta: AttentionMeta, *, scale: float, window: int = 0, softcap: float = 0.0,
           sinks: jax.Array | None = None, kv_scales: jax.Array | None = None) -> jax.Array:
    """See `jitney.kernels.interface.Attend`: q and pool of one dtype, bfloat16 or float32, D a multiple of 16.

    Other shapes, quantised pools, sinks and soft caps are the reference's.
    """
    (n_heads, size), (page, width) = q.shape[1:], kv.shape[1:3]
    if softcap or sinks is not None or size % LANES or q.dtype != kv.dtype or q.dtype not in DTYPES:
        return reference.attend(q, kv, meta, scale=scale, window=window, softcap=softcap, sinks=sinks,
                                kv_scales=kv_scales)
    name = register(n_heads, width // 2, size, page, q.dtype == jnp.bfloat16, scale, window)
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(q, kv, meta.kv_lens, meta.cu_q, meta.page_table, meta.counts)


def register_tile(columns: int) -> tuple[int, int]:
    """(rows, vectors) of a tile that fits 24 registers; the vectors divide the columns."""
    vectors = max(v for v in range(1, 7) if columns % v == 0)
    return 24 // vectors, vectors


@cache
def register(n_heads: int, n_kv: int, size: int, page: int, bf16: bool, scale: float, window: int) -> str:
    """Compile attention for one make of layer and register its custom call, whose name it returns."""
    name = f"jitney_attention_{n_heads}_{n_kv}_{size}_{page}_{'bf16' if bf16 else 'f32'}_{scale:.9g}_{window}"
    handler(name, lambda: compile_attention(n_heads, n_kv, size, page, bf16, scale, window))
    return name


def compile_attention(n_heads: int, n_kv: int, size: int, page: int, bf16: bool, scale: float,
                      window: int) -> tuple[Any, Any]:
    """(tickets(frame), task(frame, ticket)) for `handler`."""
    group, width, columns, item = n_heads // n_kv, 2 * n_kv * size, size // LANES, 2 if bf16 else 4
    tile_rows, tile_vectors = register_tile(columns)
    block = max(4, BLOCK_ROWS // group)  # prompt rows of a task
    step = math.lcm(tile_rows, SCORE_ROWS, ROWS)
    padded = -(-block * group // step) * step
    head_tile = max(h for h in range(1, tile_rows + 1) if group % h == 0)  # heads of a decoding row summed at once
    factor, one = np.float32(scale * LOG2E), np.float32(1)
    # Where the CPU multiplies pairs of bfloat16, a prompt's products stay in bfloat16 and take half the instructions.
    paired = bf16 and size % (2 * LANES) == 0 and multiplies_pairs()
    score_tile = tile(SCORE_ROWS, CHUNK // LANES, False, paired=paired)
    value_tile = tile(tile_rows, tile_vectors, False, paired=paired)
    query_row, pair = size // 2 if paired else size, 2 if paired else 1  # words of a query; keys in a word
    heads_tile = tile(head_tile, tile_vectors, bf16)
    soften_block = soften_rows(CHUNK // LANES, columns, paired)
    row_dots, turn = dots(group, columns, bf16), transposed(bf16 and not paired)
    widen, narrow, rescale = copy_row(bf16, False), copy_row(False, bf16), copy_row(False, False)
    copy_queries = copy_row(bf16, paired)
    row_scratch = scratch(FLOAT * n_heads * (2 * size + DECODE_CHUNK + 2))
    block_scratch = scratch(FLOAT * (2 * padded * size + padded * CHUNK + 2 * CHUNK * size + 2 * padded) + 8 * LANES)

    @njit
    def key_row(pool, table, position):
        """Address of a position's first key head."""
        return pool + item * width * (np.int64(int32(table, position // page)) * page + position % page)

    @njit
    def soften(scores, vectors, state, sums, first):
        """One row's chunk of the online softmax: scores become weights, what was summed before is scaled down.

        state: running maximum and sum of weights.
        """
        before = float32(state, 0)
        most = max(before, row_max(scores, vectors))
        total = row_exp2(scores, vectors, most)
        if not first:
            shrink = exp2(before - most)
            total += float32(state, 1) * shrink
            if shrink != 1:
                rescale(sums, sums, columns, shrink)
        set_float32(state, 0, most)
        set_float32(state, 1, total)

    @njit
    def score_keys(queries, keys, count, scores):
        """scores [H, count] of all heads against `count` keys of one page."""
        for head in range(n_kv):
            row_dots(queries + FLOAT * head * group * size, size, keys + item * 2 * head * size, width, count,
                     scores + FLOAT * head * group * DECODE_CHUNK, DECODE_CHUNK)

    @njit
    def sum_values(scores, keys, sums, count, add):
        """sums [H, D] (+)= weights [H, count] times the values of `count` positions of one page."""
        for head in range(0, n_heads, head_tile):
            values = keys + item * (2 * (head // group) + 1) * size
            for column in range(0, size, tile_vectors * LANES):
                heads_tile(scores + FLOAT * head * DECODE_CHUNK, DECODE_CHUNK, values + item * column, width,
                           sums + FLOAT * (head * size + column), size, count, add)

    @njit
    def decode_row(frame, row, table, first, n_keys):
        """All heads of one decoding row, chunk by chunk; a page is asked for while the one before is multiplied."""
        queries = row_scratch()
        sums = queries + FLOAT * n_heads * size
        scores = sums + FLOAT * n_heads * size
        state = scores + FLOAT * n_heads * DECODE_CHUNK
        pool = argument(frame, KV)
        at = item * row * n_heads * size
        widen(argument(frame, Q) + at, queries, n_heads * columns, factor)
        for head in range(n_heads):
            set_float32(state, 2 * head, HIDDEN)
        for start in range(first, n_keys, DECODE_CHUNK):
            count = min(DECODE_CHUNK, n_keys - start)
            vectors = (count + LANES - 1) // LANES
            j = 0
            while j < count:
                run = min(page - (start + j) % page, count - j)
                if start + j + run < n_keys:
                    prefetch(key_row(pool, table, start + j + run), item * width * page)
                score_keys(queries, key_row(pool, table, start + j), run, scores + FLOAT * j)
                j += run
            for head in range(n_heads):
                mine = scores + FLOAT * head * DECODE_CHUNK
                for j in range(count, vectors * LANES):
                    set_float32(mine, j, HIDDEN)
                soften(mine, vectors, state + 2 * FLOAT * head, sums + FLOAT * head * size, start == first)
            j = 0
            while j < count:
                run = min(page - (start + j) % page, count - j)
                sum_values(scores + FLOAT * j, key_row(pool, table, start + j), sums, run,
                           1 if j > 0 or start > first else 0)
                j += run
        for head in range(n_heads):
            narrow(sums + FLOAT * head * size, result(frame, 0) + at + item * head * size, columns,
                   np.float32(1) / float32(state, 2 * head + 1))

    @njit
    def read_chunk(pool, table, start, count, keys, values, rows):
        """Keys [D, CHUNK], turned, and values [CHUNK, D] of `count` positions, in float32 or in pairs of bfloat16:
        then keys [D / 2, CHUNK] hold two neighbouring elements, values [CHUNK / 2, D] those of two positions."""
        for j in range(0, count, LANES):
            for lane in range(LANES):
                set_word(rows, lane, key_row(pool, table, start + min(j + lane, count - 1)))
            for column in range(0, query_row, LANES):
                turn(rows, column, keys + FLOAT * (column * CHUNK + j), CHUNK)
        for j in range(0, count, pair):
            values_at = key_row(pool, table, start + j) + item * size
            if paired:
                next_at = key_row(pool, table, start + min(j + 1, count - 1)) + item * size
                pair_rows(values_at, next_at, values + FLOAT * j // 2 * size, columns)
            else:
                widen(values_at, values + FLOAT * j * size, columns, one)

    @njit
    def hide(scores, position, start, count):
        """Give the keys of a chunk that a row at `position` must not see a score of no weight."""
        for j in range(max(0, min(position + 1 - start, count)), CHUNK):
            set_float32(scores, j, HIDDEN)
        if window > 0:
            for j in range(0, min(count, position + 1 - window - start)):
                set_float32(scores, j, HIDDEN)

    @njit
    def prefill_block(frame, head, table, row, position, count):
        """`count` prompt rows from `row` on, the first at `position`, the G heads of key head `head`."""
        queries = block_scratch()
        sums = queries + FLOAT * padded * size
        scores = sums + FLOAT * padded * size
        keys = scores + FLOAT * padded * CHUNK
        values = keys + FLOAT * CHUNK * size
        state = values + FLOAT * CHUNK * size
        rows = state + FLOAT * 2 * padded
        pool = argument(frame, KV) + item * 2 * head * size
        at = item * (row * n_heads + head * group) * size
        for t in range(count):
            copy_queries(argument(frame, Q) + at + item * t * n_heads * size, queries + FLOAT * t * group * query_row,
                         group * columns, one)
        n_rows = count * group
        for r in range(padded):
            set_float32(state, 2 * r, HIDDEN)
            set_float32(state, 2 * r + 1, np.float32(0))
        first = max(0, position + 1 - window) if window > 0 else 0
        for start in range(first, position + count, CHUNK):
            seen = min(CHUNK, position + count - start)
            read_chunk(pool, table, start, seen, keys, values, rows)
            for r in range(0, n_rows, SCORE_ROWS):
                score_tile(queries + FLOAT * r * query_row, query_row, keys, CHUNK, scores + FLOAT * r * CHUNK, CHUNK,
                           query_row, 0)
            for r in range(n_rows):
                hide(scores + FLOAT * r * CHUNK, position + r // group, start, seen)
            for r in range(0, n_rows, ROWS):
                soften_block(scores + FLOAT * r * CHUNK, state + 2 * FLOAT * r, sums + FLOAT * r * size, factor,
                             1 if start == first else 0)
            for r in range(0, n_rows, tile_rows):
                for column in range(0, columns, tile_vectors):
                    value_tile(scores + FLOAT * r * CHUNK, CHUNK, values + FLOAT * column * LANES, size,
                               sums + FLOAT * (r * size + column * LANES), size, (seen + pair - 1) // pair,
                               0 if start == first else 1)
        for r in range(n_rows):
            narrow(sums + FLOAT * r * size, result(frame, 0) + at + item * (r // group * n_heads + r % group) * size,
                   columns, np.float32(1) / float32(state, 2 * r + 1))

    @njit
    def blocks_of(frame, sequence):
        cu_q = argument(frame, CU_Q)
        return (int32(cu_q, sequence + 1) - int32(cu_q, sequence) + block - 1) // block

    @njit
    def tickets(frame):
        """Prompt blocks first, they are the largest; then a ticket for each decoding row. Padding rows become 0."""
        counts = argument(frame, COUNTS)
        decoding, present, rows = int32(counts, 0), int32(counts, 1), int32(counts, 2)
        row_words = n_heads * size * item // 8
        for index in range(rows * row_words, dim(frame, Q, 0) * row_words):
            set_word(result(frame, 0), index, 0)
        total = np.int64(decoding)
        for sequence in range(decoding, present):
            total += blocks_of(frame, sequence) * n_kv
        return total

    @njit
    def task(frame, ticket):
        counts, cu_q, lens = argument(frame, COUNTS), argument(frame, CU_Q), argument(frame, KV_LENS)
        decoding, present = int32(counts, 0), int32(counts, 1)
        table, row_bytes = argument(frame, TABLE), 4 * dim(frame, TABLE, 1)
        for sequence in range(decoding, present):
            here = blocks_of(frame, sequence) * n_kv
            if ticket < here:
                offset = ticket // n_kv * block
                row, end = int32(cu_q, sequence), int32(cu_q, sequence + 1)
                position = int32(lens, sequence) - (end - row) + offset
                prefill_block(frame, ticket % n_kv, table + sequence * row_bytes, row + offset, np.int64(position),
                              min(block, end - row - offset))
                return
            ticket -= here
        n_keys = np.int64(int32(lens, ticket))
        decode_row(frame, np.int64(int32(cu_q, ticket)), table + ticket * row_bytes,
                   max(0, n_keys - window) if window > 0 else 0, n_keys)

    return tickets, task
