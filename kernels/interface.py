"""The one signature of attention for all platforms, stated once.

Axes: T token rows, S sequences in the step, P pages per sequence, H query heads, K KV heads, D head dim, N pages in the
pool. Page 0 of every pool is the trash page: padding reads it and nothing else owns it.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax


class AttentionMeta(NamedTuple):
    """Who attends to what in one step (all int32, sliced inside jit from the one packed upload).

    Sequences with one query row (decode) come first. Rows past counts[1] are padding.
    """

    kv_lens: jax.Array  # [S] tokens of each sequence including this step's; 0 for absent sequences
    cu_q: jax.Array  # [S+1] prefix sum of query lengths; constant past the last sequence
    page_table: jax.Array  # [S, P] physical pages in order, 0 = trash
    write_rows: jax.Array  # [T] flat KV row (page * page_size + offset); N * page_size = drop
    positions: jax.Array  # [T] absolute positions
    counts: jax.Array  # [3] sequences that decode, sequences in all, token rows in all


class PagedAttention(Protocol):
    """Write k and v into the pages, then attend; pure; `kv` is aliased to the returned pool when donated."""

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, kv: jax.Array, meta: AttentionMeta, *, scale: float,
                 window: int = 0, softcap: float = 0.0) -> tuple[jax.Array, jax.Array]:
        """q [T, H, D], k and v [T, K, D], kv [N, page, 2K, D] -> (o [T, H, D] in q's dtype, kv).

        Row 2h of a token is key head h, row 2h + 1 value head h. window > 0: a row sees the last `window` positions
        up to its own.
        """
        ...
