"""The reference kernels in plain jax.numpy: they run on every platform, and tests compare other
kernels with them.

Online softmax (Milakov and Gimelshein, arXiv 1805.02867) over chunks of pages with a dynamic trip
count, so a step costs what its contexts need and never attends across sequences. Axes as in
`jitney.kernels.interface`; C keys per chunk, B rows per query block, G = H // K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jitney.kernels import w8a8
from jitney.kernels.experts import gate
from jitney.kernels.interface import AttentionMeta, AttentionOptions
from jitney.kernels.scales import as_stored, scales_of
from jitney.kernels.w8a8 import Int8

#: Keys per chunk: small enough that a short context wastes little, large enough for XLA:CPU's
#: matrix products.
_DECODE_KEYS = 128
_PREFILL_KEYS = 128
#: Sequences that share a trip count in decode.
_DECODE_GROUP = 8
#: Query rows per prefill block.
_PREFILL_ROWS = 128
#: Score of a key a row must not see; finite, so that a row that sees nothing gives 0 and not NaN.
_HIDDEN = -1e30


class _Scoring(NamedTuple):
    """Operations of a call on every score."""

    scale: float
    window: int  # positions that a row sees, its own included; 0: all
    softcap: float  # 0: none
    keys: jax.Array | None  # float32 [H]: factor of each head's stored keys; None: 1
    values: jax.Array | None  # float32 [H]: the same for stored values
    sinks: jax.Array | None  # float32 [H]: attention sink of each head; None: no sinks
    value_dim: int  # first numbers of a key that are its value; 0: values are stored separately

    @classmethod
    def of(cls, q: jax.Array, kv: jax.Array, options: AttentionOptions) -> _Scoring:
        keys, values = _head_factors(kv, options.get("kv_scales"), q.shape[1])
        return cls(
            scale=options["scale"],
            window=options.get("window", 0),
            softcap=options.get("softcap", 0.0),
            keys=keys,
            values=values,
            sinks=options.get("sinks"),
            value_dim=options.get("value_dim", 0),
        )

    @property
    def planes(self) -> int:
        """Rows of the pool for each key head."""
        return 1 if self.value_dim else 2

    def size_out(self, dim: int) -> int:
        """Size of a head's value, for keys of size `dim`."""
        return self.value_dim or dim


class _Carry(NamedTuple):
    """The running softmax of some rows, float32."""

    top: jax.Array  # [..., rows] greatest score so far
    total: jax.Array  # [..., rows] sum of the weights
    acc: jax.Array  # [..., rows, width] weighted values


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    kv: jax.Array,
    meta: AttentionMeta,
    **options: Unpack[AttentionOptions],
) -> tuple[jax.Array, jax.Array]:
    """See `jitney.kernels.interface.Kernels.paged_attention`; any floating dtype, sums in
    float32.
    """
    kv = write_kv(kv, k, v, meta.write_rows, options.get("kv_scales"))
    return attend(q, kv, meta, **options), kv


def attend(
    q: jax.Array,
    kv: jax.Array,
    meta: AttentionMeta,
    **options: Unpack[AttentionOptions],
) -> jax.Array:
    """See `jitney.kernels.interface.Kernels.attend`."""
    how = _Scoring.of(q, kv, options)
    n_rows, n_seqs = q.shape[0], meta.kv_lens.shape[0]
    if n_rows == n_seqs:  # a decode-only bucket: row s is sequence s
        return _attend_decode(q, kv, meta.page_table, meta.kv_lens, how)
    decodes = jnp.arange(n_seqs) < meta.counts[0]
    decode_lens = jnp.where(decodes, meta.kv_lens, 0)
    decoded = _attend_decode(q[:n_seqs], kv, meta.page_table, decode_lens, how)
    o = _attend_prefill(q, kv, meta, how)
    first = jnp.where(decodes[:, None, None], decoded, o[:n_seqs])
    return jax.lax.dynamic_update_slice_in_dim(o, first, 0, axis=0)


def matmul(x: jax.Array, w: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """x [..., I] times w [I, O] -> [..., O] in `dtype`; int8 and fp8 weights are widened to x's
    dtype on the way.

    Without `preferred_element_type` XLA:CPU multiplies bfloat16 matrices 10 to 30 times slower.
    """
    wide = w.astype(x.dtype) if w.dtype.itemsize == 1 else w
    return jnp.matmul(x, wide, preferred_element_type=jnp.float32).astype(dtype)


def gated(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [T, I] times w [I, 2F] -> silu(first half) * second half, [T, F] in x's dtype."""
    return gate(matmul(x, w), x.dtype)


def matmul_int8(x: jax.Array, w: Int8, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """x [T, I], its rows rounded to int8, times w [I, O] -> [T, O] in `dtype`.

    The codes of x and w are exact integers in any floating dtype, and so are their products in
    float32: only the sums are rounded.
    """
    codes, steps = w8a8.round_to_int8(x)
    return (matmul(codes, w.kernel) * steps * w.scale).astype(dtype)


def matmul_fp8(
    x: jax.Array | w8a8.RoundedRows, w: w8a8.Fp8, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """x [T, I], its rows rounded to fp8, times w [I, O] -> [T, O] in `dtype`.

    fp8 numbers are exact in any floating dtype, and so are their products in float32: only the sums
    are rounded.
    """
    codes, units = w8a8.codes_of(x)
    sums = matmul(codes[: len(units)].astype(x.dtype), w.kernel)
    return (sums * units * w.scale).astype(dtype)


def gated_int8(x: jax.Array, w: Int8) -> jax.Array:
    """x [T, I], its rows rounded to int8, times w [I, 2F] -> silu(first half) * second half, [T, F]
    in x's dtype.
    """
    return gate(matmul_int8(x, w), x.dtype)


def gated_narrow(x: jax.Array, w: jax.Array) -> jax.Array:
    """`gated` that writes gates and ups to memory in x's dtype instead of float32."""
    return gate(matmul(x, w, x.dtype), x.dtype)


def project(x: jax.Array, table: jax.Array) -> jax.Array:
    """x [R, E] times the transpose of table [V, E] -> float32 [R, V].

    One dot over both last axes: `x @ table.T` makes XLA:CPU convert the whole table to float32 in
    every step.
    """
    return jax.lax.dot_general(
        x, table, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def rotate_and_write(
    heads: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    kv: jax.Array,
    meta: AttentionMeta,
    *,
    norms: tuple[jax.Array, jax.Array] | None = None,
    eps: float = 0.0,
    kv_scales: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `jitney.kernels.interface.RotateAndWrite`; norm and rotation each round to heads'
    dtype.
    """
    n_kv = kv.shape[2] // 2
    q, k, v = jnp.split(heads, [heads.shape[1] - 2 * n_kv, heads.shape[1] - n_kv], axis=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    return _rotate(q, *rope), write_kv(kv, _rotate(k, *rope), v, meta.write_rows, kv_scales)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., E] / rms(x) * weight [E] -> x's dtype, in float32: bfloat16 squares lose the sum
    after 256 equal ones.
    """
    return _rms_norm(x, weight, eps, x.dtype)


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float, dtype: DTypeLike) -> jax.Array:
    """`rms_norm` with the result in `dtype`."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32)).astype(dtype)


def norm_sum(
    x: jax.Array, added: jax.Array, weight: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """(x + added [T, E] in x's dtype, its RMS norm in added's dtype)."""
    x = x + added.astype(x.dtype)
    return x, _rms_norm(x, weight, eps, added.dtype)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate pairs (j, j + D/2) of x [T, heads, D] by cos and sin [T, 1, D // 2], in float32 -> x's
    dtype.
    """
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _head_factors(
    kv: jax.Array, kv_scales: jax.Array | None, n_heads: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """(keys [H], values [H]): factors of the keys and values that each query head reads from a
    quantised pool; None for plain floats.
    """
    scales = scales_of(kv, kv_scales)
    if scales is None:
        return None, None
    keys, values = jnp.repeat(scales.reshape(-1, 2), n_heads // (kv.shape[2] // 2), axis=0).T
    return keys, values


def write_kv(
    kv: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    rows: jax.Array,
    kv_scales: jax.Array | None = None,
) -> jax.Array:
    """Write k and v [T, K, D] to flat rows [T] of the pool [N, page, 2K, D], in place if it is
    donated. v None: the pool holds only keys, [N, page, K, D].

    A non-finite value is stored as 0: a masked key still multiplies its value by 0, and 0 * NaN
    would carry one request's NaN to the next owner of the page. The request itself ends because of
    its own logits.
    """
    pairs = k
    if v is not None:
        pairs = jnp.stack([k, v], axis=2).reshape(k.shape[0], -1, k.shape[2])  # [T, 2K, D]
    new = as_stored(pairs, kv, scales_of(kv, kv_scales))
    flat = kv.reshape(-1, *kv.shape[2:])
    return flat.at[rows].set(new, mode="drop", unique_indices=True).reshape(kv.shape)


def _attend_decode(
    q: jax.Array, kv: jax.Array, page_table: jax.Array, kv_lens: jax.Array, how: _Scoring
) -> jax.Array:
    """One query row a sequence: q [S, H, D], page_table [S, P], kv_lens [S] (0: no sequence) -> [S,
    H, D].

    A group of sequences takes as many rounds as its longest context needs. The scheduler puts long
    contexts first, so that short contexts share groups with short ones, and groups of absent
    sequences take no rounds.
    """
    n_seqs = q.shape[0]
    if n_seqs <= _DECODE_GROUP or n_seqs % _DECODE_GROUP:
        return _attend_group(q, kv, page_table, kv_lens, how)

    def group(g: jax.Array, o: jax.Array) -> jax.Array:
        first = g * _DECODE_GROUP
        queries = jax.lax.dynamic_slice_in_dim(q, first, _DECODE_GROUP)
        tables = jax.lax.dynamic_slice_in_dim(page_table, first, _DECODE_GROUP)
        lens = jax.lax.dynamic_slice_in_dim(kv_lens, first, _DECODE_GROUP)
        done = _attend_group(queries, kv, tables, lens, how)
        return jax.lax.dynamic_update_slice_in_dim(o, done, first, 0)

    empty = jnp.zeros((*q.shape[:2], how.size_out(q.shape[2])), q.dtype)
    return jax.lax.fori_loop(0, n_seqs // _DECODE_GROUP, group, empty)


def _attend_group(
    q: jax.Array, kv: jax.Array, page_table: jax.Array, kv_lens: jax.Array, how: _Scoring
) -> jax.Array:
    """`_attend_decode` for sequences that take the same number of rounds; same shapes.

    The queries are spread over a row of the pool ([H, W], W = 2K * D, or K * D in a pool of keys
    only; zero outside their own key head), so that scores and values are one product per sequence
    over the pages as stored: six times the arithmetic, but no transposed copy of the keys. This
    takes 25 ms instead of 38 ms for 30 layers of 32 rows with 160 keys (2 Zen 5 cores, bfloat16).
    """
    n_seqs, _, dim = q.shape
    n_kv = kv.shape[2] // how.planes
    wide = _spread_queries(q, n_kv, how.planes)  # [S, H, W]
    pages = _chunk_pages(kv, page_table, _DECODE_KEYS)
    n_keys = pages * kv.shape[1]  # C
    first_seen = jnp.zeros_like(kv_lens)
    if how.window:
        first_seen = jnp.maximum(kv_lens - how.window, 0)

    def chunk(i: jax.Array, carry: _Carry) -> _Carry:
        ids = jax.lax.dynamic_slice_in_dim(page_table, i * pages, pages, axis=1)
        rows = _read_pages(kv, ids).reshape(n_seqs, n_keys, -1).astype(q.dtype)
        scores = _product("shw,scw->shc", wide, rows)
        position = i * n_keys + jnp.arange(n_keys)
        seen = (position < kv_lens[:, None]) & (position >= first_seen[:, None])
        scores = _finish_scores(scores, seen[:, None], how, how.keys)
        return _merge(carry, scores, lambda p: _product("shc,scw->shw", p.astype(rows.dtype), rows))

    present = kv_lens > 0
    start = jnp.min(jnp.where(present, first_seen, jnp.max(first_seen))) // n_keys
    stop = _rounds(jnp.max(kv_lens), n_keys)
    o = _online_softmax(chunk, start, stop, wide.shape, how.sinks)
    o = _gather_values(o, n_kv, dim, how)
    if how.values is not None:
        o *= how.values[:, None]
    return o.astype(q.dtype)


def _spread_queries(q: jax.Array, n_kv: int, planes: int) -> jax.Array:
    """q [S, H, D] -> [S, H, W]: each query in the columns of its key head, zero elsewhere.

    This copies slices: a product with a 0/1 mask costs XLA:CPU five times as much in index
    arithmetic.
    """
    n_seqs, n_heads, dim = q.shape
    group = n_heads // n_kv
    wide = jnp.zeros((n_seqs, n_heads, planes * n_kv * dim), q.dtype)
    for h in range(n_kv):
        wide = jax.lax.dynamic_update_slice(
            wide, q[:, h * group : (h + 1) * group], (0, h * group, planes * h * dim)
        )
    return wide


def _gather_values(o: jax.Array, n_kv: int, dim: int, how: _Scoring) -> jax.Array:
    """o [S, H, W] -> [S, H, V]: each query head's own value columns."""
    group = o.shape[1] // n_kv
    own = []
    for h in range(n_kv):
        column = (how.planes * (h + 1) - 1) * dim
        own.append(o[:, h * group : (h + 1) * group, column : column + how.size_out(dim)])
    return jnp.concatenate(own, axis=1)


def _attend_prefill(q: jax.Array, kv: jax.Array, meta: AttentionMeta, how: _Scoring) -> jax.Array:
    """Attention of the rows of prompt chunks: q [T, H, D] -> [T, H, V]; rows of decoding sequences
    and padding are undefined.

    Each sequence's rows are cut into blocks. The next block overwrites a block's rows past the end
    of its sequence, since blocks are computed in row order.
    """
    n_rows, n_seqs = q.shape[0], meta.kv_lens.shape[0]
    size = min(_PREFILL_ROWS, n_rows)
    q_lens = jnp.diff(meta.cu_q)
    blocks = jnp.where(jnp.arange(n_seqs) < meta.counts[0], 0, -(-q_lens // size))
    last_block = jnp.cumsum(blocks)  # [S], exclusive end of each sequence's blocks
    q = jnp.pad(q, ((0, size), (0, 0), (0, 0)))

    def block(b: jax.Array, o: jax.Array) -> jax.Array:
        seq = jnp.searchsorted(last_block, b, side="right")
        skip = (b - (last_block[seq] - blocks[seq])) * size
        row = meta.cu_q[seq] + skip
        first = meta.kv_lens[seq] - q_lens[seq] + skip  # absolute position of the block's first row
        rows = jax.lax.dynamic_slice_in_dim(q, row, size, 0)
        done = _attend_block(rows, kv, meta.page_table[seq], first, meta.kv_lens[seq], how)
        return jax.lax.dynamic_update_slice_in_dim(o, done, row, 0)

    empty = jnp.zeros((*q.shape[:2], how.size_out(q.shape[2])), q.dtype)
    return jax.lax.fori_loop(0, last_block[-1], block, empty)[:n_rows]


def _attend_block(
    q: jax.Array,
    kv: jax.Array,
    pages_of: jax.Array,
    first: jax.Array,
    kv_len: jax.Array,
    how: _Scoring,
) -> jax.Array:
    """Attention of B consecutive rows of one sequence, the first at position `first`: q [B, H, D],
    pages_of [P] -> [B, H, V]. The G query heads of a key head are rows of one product: M = G * B.
    """
    n_rows, n_heads, dim = q.shape
    n_kv = kv.shape[2] // how.planes
    size_out = how.size_out(dim)
    group = n_heads // n_kv
    tall = _by_key_head(q, n_kv)  # [K, M, D]
    pages = _chunk_pages(kv, pages_of[None], _PREFILL_KEYS)
    n_keys = pages * kv.shape[1]  # C
    position = first + jnp.arange(n_rows)[:, None]  # [B, 1]
    key_factors = _per_row(how.keys, n_kv, n_rows)
    value_factors = _per_row(how.values, n_kv, n_rows)

    def chunk(i: jax.Array, carry: _Carry) -> _Carry:
        ids = jax.lax.dynamic_slice_in_dim(pages_of, i * pages, pages, axis=0)
        rows = _read_pages(kv, ids).reshape(n_keys, n_kv, how.planes, dim).astype(q.dtype)
        keys = rows[:, :, 0].transpose(1, 0, 2)  # [K, C, D]
        values = rows[:, :, -1, :size_out].transpose(1, 0, 2)  # [K, C, V]
        scores = _product("kmd,kcd->kmc", tall, keys)
        key_position = i * n_keys + jnp.arange(n_keys)
        seen = (key_position <= position) & (key_position < kv_len)
        if how.window:
            seen &= key_position > position - how.window
        scores = _finish_scores(scores, jnp.tile(seen, (group, 1)), how, key_factors)
        return _merge(
            carry, scores, lambda p: _product("kmc,kcd->kmd", p.astype(values.dtype), values)
        )

    start = jnp.maximum(first - how.window + 1, 0) // n_keys if how.window else 0
    stop = _rounds(jnp.minimum(first + n_rows, kv_len), n_keys)
    shape = n_kv, group * n_rows, size_out
    o = _online_softmax(chunk, start, stop, shape, _per_row(how.sinks, n_kv, n_rows))
    if value_factors is not None:
        o *= value_factors[:, :, None]
    by_row = o.reshape(n_kv, group, n_rows, size_out).transpose(2, 0, 1, 3)
    return by_row.reshape(n_rows, n_heads, size_out).astype(q.dtype)


def _by_key_head(q: jax.Array, n_kv: int) -> jax.Array:
    """q [B, H, D] -> [K, G * B, D]: the rows of one query head together."""
    n_rows, n_heads, dim = q.shape
    grouped = q.reshape(n_rows, n_kv, n_heads // n_kv, dim).transpose(1, 2, 0, 3)
    return grouped.reshape(n_kv, -1, dim)


def _per_row(factors: jax.Array | None, n_kv: int, n_rows: int) -> jax.Array | None:
    """The factor per query head [H] repeated for each row of `_by_key_head`: [K, G * B]; None
    stays None.
    """
    if factors is None:
        return None
    return jnp.repeat(factors.reshape(n_kv, -1), n_rows, axis=1)


def _product(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """einsum, summed in float32."""
    return jnp.einsum(axes, x, y, preferred_element_type=jnp.float32)


def _read_pages(kv: jax.Array, ids: jax.Array) -> jax.Array:
    """Pages [...] of the pool, each as one row of all its numbers."""
    return kv.reshape(kv.shape[0], -1).at[ids.reshape(-1)].get(mode="promise_in_bounds")


def _rounds(keys: jax.Array, n_keys: int) -> jax.Array:
    """Chunks of n_keys that hold `keys` keys."""
    return -(-keys // n_keys)


def _finish_scores(
    scores: jax.Array, seen: jax.Array, how: _Scoring, factors: jax.Array | None
) -> jax.Array:
    """Scores from products of queries and keys [..., rows, C]: scaled, capped, and `_HIDDEN` where
    not `seen`. factors [rows] or [..., rows]: of the stored keys; None: 1.
    """
    scale = how.scale if factors is None else how.scale * factors[..., None]
    scores = scores * scale
    if how.softcap:
        scores = how.softcap * jnp.tanh(scores / how.softcap)
    return jnp.where(seen, scores, _HIDDEN)


def _online_softmax(
    chunk: Callable[[jax.Array, _Carry], _Carry],
    start: jax.Array | int,
    stop: jax.Array,
    shape: tuple[int, ...],
    sinks: jax.Array | None,
) -> jax.Array:
    """Run `chunk` over the chunks [start, stop) -> sums of weighted values, float32 `shape`.

    sinks: scores that broadcast to the rows; a row starts with its sink before its first key.
    """
    rows = shape[:-1]
    empty = _Carry(jnp.full(rows, _HIDDEN), jnp.zeros(rows), jnp.zeros(shape))
    if sinks is not None:
        empty = empty._replace(top=jnp.broadcast_to(sinks, rows), total=jnp.ones(rows))
    done = jax.lax.fori_loop(start, stop, chunk, empty)
    return done.acc / jnp.maximum(done.total, 1e-30)[..., None]


def _merge(carry: _Carry, scores: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> _Carry:
    """Add one chunk's scores [..., rows, C] to the running softmax; weigh(p) returns the sum of the
    values weighted by p.

    A row that has seen no key yet weighs hidden keys by exp(0); its first visible key multiplies
    these sums by exp(_HIDDEN - top) = 0. A row that never sees a key (padding) ends as a finite
    mean, which is not read.
    """
    top = jnp.maximum(carry.top, jnp.max(scores, axis=-1))
    p = jnp.exp(scores - top[..., None])
    keep = jnp.exp(carry.top - top)
    total = carry.total * keep + jnp.sum(p, axis=-1)
    return _Carry(top, total, carry.acc * keep[..., None] + weigh(p))


def _chunk_pages(kv: jax.Array, page_table: jax.Array, keys: int) -> int:
    """Pages per chunk: about `keys` positions, a divisor of P so that the last chunk never runs off
    the table.
    """
    n_pages = page_table.shape[1]
    pages = max(1, min(keys // kv.shape[1], n_pages))
    while n_pages % pages:
        pages -= 1
    return pages
