"""Paged attention for CPUs, compiled by Numba: flash attention (arXiv 2205.14135) over the pages as they lie.

A decoding row goes through its keys and values once, sixteen positions at a time, as fast as memory brings them; a
block of prompt rows goes through them in chunks, widened to float32 once per chunk, with both products in registers.
Nothing is computed for keys a row cannot see (but the rest of a chunk), for absent sequences, or for padding. Axes as
in `jitney.kernels.interface`; G = H // K rows share a key head. All addresses are in bytes, all strides in elements.
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
from jitney.kernels.cpu.pairs import block_dots
from jitney.kernels.cpu.softmax import ROWS, soften_rows
from jitney.kernels.cpu.vectors import (
    LANES,
    copy_row,
    dots,
    multiplies_pairs,
    pair_rows,
    prefetch,
    scratch,
    tile,
    transposed,
)
from jitney.kernels.interface import AttentionMeta

#: Keys per chunk of a prompt block.
CHUNK = 96
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
    turn = transposed(bf16 and not paired)
    widen, narrow, copy_queries = copy_row(bf16, False), copy_row(False, bf16), copy_row(bf16, paired)
    # A decoding row takes `span` keys at a time, which lie in one page.
    span, rows_padded = min(LANES, page), -(-n_heads // ROWS) * ROWS
    blocked = paired and span == LANES
    row_dots, key_dots = dots(group, columns, bf16), block_dots(1, LANES, max(1, size // (2 * LANES)))
    soften_heads = soften_rows(1, columns, False)
    asked = -(-item * width * span // (64 * n_heads)) * 64  # bytes to ask for beside each head
    row_scratch = scratch(FLOAT * (n_heads * size + rows_padded * (size + LANES + 2)))
    block_scratch = scratch(FLOAT * (2 * padded * size + padded * CHUNK + 2 * CHUNK * size + 2 * padded) + 8 * LANES)

    @njit
    def key_row(pool, table, position):
        """Address of a position's first key head."""
        return pool + item * width * (np.int64(int32(table, position // page)) * page + position % page)

    @njit
    def hide(scores, first, last):
        """Give the keys of a row's chunk from `first` up to `last` a score of no weight."""
        for j in range(first, last):
            set_float32(scores, j, HIDDEN)

    if blocked:
        @njit
        def score_keys(q, queries, keys, count, scores, ahead):
            """Scores [H, LANES] of all heads against the keys of one step; asks for what lies at `ahead`, unless 0."""
            for head in range(n_heads):
                key_dots(q + item * head * size, 0, keys + item * 2 * (head // group) * size, width,
                         scores + FLOAT * head * LANES, 0)
                if ahead:
                    prefetch(ahead + asked * head, asked)
    else:
        @njit
        def score_keys(q, queries, keys, count, scores, ahead):
            """The same with queries widened to float32."""
            for head in range(n_kv):
                row_dots(queries + FLOAT * head * group * size, size, keys + item * 2 * head * size, width, count,
                         scores + FLOAT * head * group * LANES, LANES)
                if ahead:
                    prefetch(ahead + asked * group * head, asked * group)

    @njit
    def sum_values(scores, keys, sums, count, add):
        """sums [H, D] (+)= weights [H, count] times the values of `count` positions of one page."""
        for head in range(0, n_heads, head_tile):
            values = keys + item * (2 * (head // group) + 1) * size
            for column in range(0, size, tile_vectors * LANES):
                heads_tile(scores + FLOAT * head * LANES, LANES, values + item * column, width,
                           sums + FLOAT * (head * size + column), size, count, add)

    @njit
    def decode_row(frame, row, table, first, n_keys):
        """All heads of one decoding row, `span` positions at a time; memory is asked for one such step early."""
        queries = row_scratch()
        sums = queries + FLOAT * n_heads * size
        scores = sums + FLOAT * rows_padded * size
        state = scores + FLOAT * rows_padded * LANES
        pool, at = argument(frame, KV), item * row * n_heads * size
        q = argument(frame, Q) + at
        if not blocked:
            widen(q, queries, n_heads * columns, one)
        for head in range(rows_padded):
            set_float32(state, 2 * head, HIDDEN)
            set_float32(state, 2 * head + 1, np.float32(0))
        for head in range(n_heads, rows_padded):  # heads that are not there, to fill the last ROWS
            hide(scores + FLOAT * head * LANES, 0, LANES)
            for column in range(size):
                set_float32(sums, head * size + column, np.float32(0))
        begin = first - first % span
        prefetch(key_row(pool, table, begin), item * width * span)
        for start in range(begin, n_keys, span):
            keys, count, later = key_row(pool, table, start), min(span, n_keys - start), start + span
            score_keys(q, queries, keys, count, scores, key_row(pool, table, later) if later < n_keys else 0)
            if count < LANES or start < first:
                for head in range(n_heads):
                    hide(scores + FLOAT * head * LANES, count, LANES)
                    hide(scores + FLOAT * head * LANES, 0, first - start)
            for head in range(0, rows_padded, ROWS):
                soften_heads(scores + FLOAT * head * LANES, state + 2 * FLOAT * head, sums + FLOAT * head * size,
                             factor, 1 if start == begin else 0)
            sum_values(scores, keys, sums, count, 1 if start > begin else 0)
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
                here = position + r // group - start  # the row's own position within the chunk
                hide(scores + FLOAT * r * CHUNK, max(0, min(here + 1, seen)), CHUNK)
                if window > 0:
                    hide(scores + FLOAT * r * CHUNK, 0, min(seen, here + 1 - window))
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
