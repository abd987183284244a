"""Triton kernel of recurrent layers: the rows of each sequence through its memory, one after the
other.

Axes as in `jitney.kernels.delta_net`; D and V are padded to powers of two.
"""

from __future__ import annotations

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# Kernels are compiled, not called: numbers become constexprs and tensors on the way.
import triton
import triton.language as tl


@triton.jit
def pass_rows(
    queries,
    keys,
    values,
    decay,
    beta,
    ends,
    stops,
    reads,
    writes,
    starts,
    memory,
    read,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    DIMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CORRECTS: tl.constexpr,
):
    """queries and keys [T, G, D], values [T, H, V], decay and beta [T, H] through memory
    [M, H, D, V], in place, to read [T, H, V], all float32; program (sequence, value head, block of
    columns), which keeps its part of the memory in registers.

    ends [S + 1], stops, reads and writes [S, K], starts [S]: see `DeltaSequences`. DIMS, COLUMNS:
    D, and columns of a block, padded. CORRECTS: beta is read, and values replace what is known at
    their keys.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(ends + sequence)
    last = tl.load(ends + sequence + 1)
    if first >= last:
        return
    group = head // (H // G)
    dims = tl.arange(0, DIMS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_dims = dims < D
    in_columns = columns < V
    inside = in_dims[:, None] & in_columns[None, :]
    cells = (head * D + dims)[:, None] * V + columns[None, :]
    slot = tl.load(reads + sequence * K).to(tl.int64)
    kept = tl.load(memory + slot * H * D * V + cells, mask=inside, other=0.0)
    kept = tl.where(tl.load(starts + sequence) > 0, kept, 0.0)
    begin = first
    for piece in tl.static_range(K):
        end = first + tl.load(stops + sequence * K + piece)
        for row in range(begin, end):
            of_group = (row * G + group) * D + dims
            of_head = (row * H + head) * V + columns
            key = tl.load(keys + of_group, mask=in_dims, other=0.0)
            query = tl.load(queries + of_group, mask=in_dims, other=0.0)
            value = tl.load(values + of_head, mask=in_columns, other=0.0)
            kept = kept * tl.load(decay + row * H + head)
            if CORRECTS:
                known = tl.sum(kept * key[:, None], 0)
                value = (value - known) * tl.load(beta + row * H + head)
            kept = kept + key[:, None] * value[None, :]
            tl.store(read + of_head, tl.sum(kept * query[:, None], 0), mask=in_columns)
        slot = tl.load(writes + sequence * K + piece).to(tl.int64)
        if slot < M:
            tl.store(memory + slot * H * D * V + cells, kept, mask=inside)
        begin = end
