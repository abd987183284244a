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
                 window: int = 0, softcap: float = 0.0, sinks: jax.Array | None = None,
                 kv_scales: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """q [T, H, D], k and v [T, K, D], kv [N, page, 2K, D] -> (o [T, H, D] in q's dtype, kv).

        Row 2h of a token is key head h, row 2h + 1 value head h. window > 0: a row sees the last `window` positions
        up to its own. sinks [H]: scores that join every row's softmax and carry no value. kv_scales float32 [2K] or
        []: factors of an int8 or fp8 pool (see `jitney.kernels.scales`), which raises ValueError without them.
        """
        ...


class RotateAndWrite(Protocol):
    """Norm and rotate queries and keys, and write keys and values into the pages; pure; `kv` is aliased if donated."""

    def __call__(self, heads: jax.Array, rope: tuple[jax.Array, jax.Array], kv: jax.Array, meta: AttentionMeta, *,
                 norms: jax.Array | None = None, eps: float = 0.0,
                 kv_scales: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """heads [T, H + 2K, D] (queries, keys, values), kv [N, page, 2K, D] -> (q [T, H, D] in heads' dtype, kv).

        rope: cos and sin, float32 [T, 1, D // 2], rotating pairs (j, j + D/2). norms [2, D]: weights of an RMS norm
        with `eps` over each query and key head, before the rotation.
        """
        ...


class Attend(Protocol):
    """Attention over pages that hold the step's keys and values already; see `PagedAttention`."""

    def __call__(self, q: jax.Array, kv: jax.Array, meta: AttentionMeta, *, scale: float, window: int = 0,
                 softcap: float = 0.0, sinks: jax.Array | None = None,
                 kv_scales: jax.Array | None = None) -> jax.Array:
        """q [T, H, D], kv [N, page, 2K, D] -> o [T, H, D] in q's dtype."""
        ...


class Threshold(Protocol):
    """Where top-k, then top-p of what it left, cut rows of logits."""

    def __call__(self, scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
        """scaled float32 [S, V], greatest entry of each row 0; top_k int32 [S] (0: all), top_p float32 [S] (1: all).

        Returns the smallest kept entry, float32 [S]: entries that tie with it are kept too. -inf keeps all.
        """
        ...


class Product(Protocol):
    """A matrix product with weights, summed in float32: `matmul` takes w [I, O], `project` a table [O, I]."""

    def __call__(self, x: jax.Array, w: jax.Array, /) -> jax.Array:
        """x [T, I] -> float32 [T, O]."""
        ...


class Kernels(Protocol):
    """What a model's step takes from a kernel set; a static argument of the jitted step, so hashable."""

    @property
    def paged_attention(self) -> PagedAttention: ...
    @property
    def matmul(self) -> Product: ...
    @property
    def project(self) -> Product: ...
