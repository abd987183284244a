"""Proof at start: the kernels of a set are compared with what they should compute, where they run.

A kernel that is right on the machine it was written on may be wrong on the next: a compiler took
the same source for another CPU and dropped a store (docs/decisions). So each engine, before it
says ready, gives every kernel that it will use random inputs of the shapes that it will serve, and
compares the results with their definitions in numpy, which nothing compiles. What does not agree is
taken out, and the reference takes its place.

The error of a result is its largest distance from the definition, in units of the root mean square
of the row that it stands in: a wrong head, page or column is an error of 0.5 and more, rounding to
bfloat16 one of about 0.03.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jitney.kernels import definitions
from jitney.kernels.int4 import Int4, matmul_int4
from jitney.kernels.interface import AttentionMeta, KernelSet
from jitney.kernels.scales import limit_of
from jitney.kernels.select import reference as reference_set

log = logging.getLogger(__name__)

#: Largest error that rounding explains, by dtype of the activations, and with a pool of 8 bits.
LIMITS = {"bfloat16": 0.125, "float16": 0.125, "float32": 0.01}
NARROW_POOL_LIMIT = 0.5
#: Largest share of a row's probability by which two ways to cut it may differ.
MASS_LIMIT = 1e-3
#: Most rows of a product, and of prompts in a step: more are more of the same tiles.
MOST_ROWS = 256
#: Most columns of a matrix and rows of a table, but for a remainder (`narrowed`): sixty vectors of
#: 16, since tiles are chosen by divisors of up to six.
COLUMNS = 960
#: Most sequences of a step whose contexts are long; the others have a page or two.
LONG = 8

#: What is proved -> the fields of a kernel set that fall with it.
FIELDS: dict[str, tuple[str, ...]] = {
    "attention": ("paged_attention", "attend", "rotate_and_write", "pool_shape"),
    "norm": ("rms_norm",),
    "products": ("arrange", "matmul", "gated"),
    "head": ("project",),
    "int4 product": ("matmul_int4",),
    "sampling cut": ("threshold",),
}


@dataclass(frozen=True)
class Matrix:
    """One weight matrix that a model multiplies with."""

    size_in: int  # I
    size_out: int  # O
    scheme: str = "plain"  # how it is kept: plain, int8, fp8 or int4
    gated: bool = False  # its product is `KernelSet.gated`
    group: int = 0  # inputs per group of int4


@dataclass(frozen=True)
class Served:
    """What an engine will ask of its kernels, on one device."""

    n_heads: int  # H
    n_kv_heads: int  # K
    head_dim: int  # D
    hidden_size: int  # E
    vocab_size: int  # V
    eps: float  # of the norms
    qk_norm: bool  # heads are normed before they are rotated
    windows: tuple[int, ...]  # the different ones of the layers, 0 for none
    page_size: int
    pages: int  # of a seat's table, P
    context: int  # tokens a sequence may have
    dtype: str  # of activations
    kv_dtype: str  # of the pool
    matrices: tuple[Matrix, ...]  # the different ones of the layers
    table: int  # rows of the embedding where it is the head too, else 0
    decode: tuple[int, ...]  # seats of the decode buckets, ascending
    mixed: tuple[int, ...]  # rows of the mixed buckets, ascending; their seats are the largest

    @property
    def product_rows(self) -> tuple[int, ...]:
        """Row counts at which products are compared, ascending."""
        counts = {min(rows, MOST_ROWS) for rows in (*self.decode, *self.mixed)}
        return tuple(sorted(counts))


@dataclass(frozen=True)
class Proof:
    """What came of one kernel."""

    kernel: str  # a key of FIELDS
    error: float  # the largest one seen; infinite where it could not run
    limit: float  # the error it may have
    reason: str = ""  # why it could not run

    @property
    def ok(self) -> bool:
        """True if the kernel may serve."""
        return self.error <= self.limit

    def __str__(self) -> str:
        if self.reason:
            return f"{self.kernel} failed ({self.reason})"
        return f"{self.kernel} is off by {self.error:.3g} (at most {self.limit:g})"


@cache
def prove(kernels: KernelSet, served: Served) -> tuple[Proof, ...]:
    """Compare each kernel that is not the reference's own with its definition, on this device.

    Never raises: a kernel that cannot be compiled or run is one that is not right.
    """
    plain = reference_set()
    proofs = []
    started = time.perf_counter()
    for kernel, check in CHECKS.items():
        same = [getattr(kernels, field) is getattr(plain, field) for field in FIELDS[kernel]]
        if not all(same):
            proofs += proved(kernel, check, kernels, served)
    seconds = time.perf_counter() - started
    errors = ", ".join(f"{proof.kernel} {proof.error:.2g}" for proof in proofs)
    log.info("kernels %s proved in %.2f s; errors: %s", kernels.name, seconds, errors or "none")
    return tuple(proofs)


def proved(kernel: str, check: Check, kernels: KernelSet, served: Served) -> list[Proof]:
    """The proof of one kernel; none if this engine never calls it."""
    limit = limit_for(kernel, served)
    try:
        errors = list(check(kernels, served))
    except Exception as error:  # whatever a compiler or a driver may raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return [Proof(kernel, float("inf"), limit, reason)]
    if not errors:
        return []
    return [Proof(kernel, max(errors), limit)]


def limit_for(kernel: str, served: Served) -> float:
    """The error that rounding explains."""
    if kernel == "sampling cut":
        return MASS_LIMIT
    if kernel == "attention" and served.kv_dtype not in LIMITS:
        return NARROW_POOL_LIMIT
    return LIMITS[served.dtype]


def without(kernels: KernelSet, names: Sequence[str]) -> KernelSet:
    """The set with the reference's kernels in place of those proved under `names`."""
    plain = reference_set()
    fields = [field for name in names for field in FIELDS[name]]
    return replace(kernels, **{field: getattr(plain, field) for field in fields})


def distance(got: Any, want: np.ndarray) -> float:
    """The largest distance of arrays [..., n], in root mean squares of want's rows; NaN:
    infinite.
    """
    wide = np.asarray(got).astype(np.float32)
    spread = np.sqrt(np.mean(want * want, axis=-1, keepdims=True))
    apart = np.abs(wide - want) / np.maximum(spread, 1e-6)
    if not np.isfinite(apart).all():
        return float("inf")
    return float(np.max(apart, initial=0.0))


@dataclass(frozen=True)
class Step:
    """The attention's part of one step."""

    q: np.ndarray  # [T, H, D]
    k: np.ndarray  # [T, K, D]
    v: np.ndarray  # [T, K, D]
    kv: np.ndarray  # the pool before the step, [N, page, 2K, D]
    meta: AttentionMeta
    rows: int  # that are not padding, the first of the T
    limit: float = 0.0  # greatest number of a pool of 8 bits
    factors: dict[str, np.ndarray] = field(default_factory=dict)  # kv_scales of such a pool

    @property
    def arrays(self) -> Arrays:
        """What is given to a kernel."""
        q, k, v, kv = (jnp.asarray(array) for array in (self.q, self.k, self.v, self.kv))
        factors = {name: jnp.asarray(array) for name, array in self.factors.items()}
        return Arrays(q, k, v, kv, self.meta, factors)


class Arrays(NamedTuple):
    """The arrays of a `Step`, on the device."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    kv: jax.Array
    meta: AttentionMeta
    factors: dict[str, jax.Array]


def attention_errors(kernels: KernelSet, served: Served) -> Iterator[float]:
    """Decode steps of the least and the most seats, and a step with prompts; for each window.

    A set with `rotate_and_write` is asked for that and for `attend`, as models do.
    """
    sizes = sorted({served.decode[0], served.decode[-1]})
    steps = [decode_step(served, seats) for seats in sizes]
    steps.append(mixed_step(served))
    if kernels.rotate_and_write is not None:
        yield from rotation_errors(kernels, served, steps[-1])
    scale = served.head_dim**-0.5

    def call(given: Arrays, window: int) -> tuple[jax.Array, jax.Array]:
        q, k, v, kv, meta, factors = given
        options: dict[str, Any] = {"scale": scale, "window": window, **factors}
        if kernels.rotate_and_write is None:
            return kernels.paged_attention(q, k, v, kv, meta, **options)
        return kernels.attend(q, kv, meta, **options), kv

    def call_all(inputs: list[Arrays]) -> list[tuple[jax.Array, jax.Array]]:
        return [call(given, window) for window in served.windows for given in inputs]

    writes = kernels.rotate_and_write is None
    results = iter(jax.jit(call_all)([step.arrays for step in steps]))
    for window in served.windows:
        for step in steps:
            pool = written(step, step.k, step.v) if writes else step.kv
            wanted = definitions.attention(
                step.q,
                in_floats(pool, step),
                np.asarray(step.meta.kv_lens),
                np.asarray(step.meta.cu_q),
                np.asarray(step.meta.page_table),
                scale=scale,
                window=window,
            )
            o, kv = next(results)
            yield distance(np.asarray(o)[: step.rows], wanted[: step.rows])
            yield distance(in_floats(np.asarray(kv), step), in_floats(pool, step))


def rotation_errors(kernels: KernelSet, served: Served, step: Step) -> Iterator[float]:
    """Of the kernel that norms, rotates and writes, in a step with prompts."""
    assert kernels.rotate_and_write is not None
    rng = np.random.default_rng(3)
    speeds = rng.random(served.head_dim // 2, np.float32)
    angles = np.asarray(step.meta.positions, np.float32)[:, None, None] * speeds
    rope = np.cos(angles), np.sin(angles)
    q, k = step.q, step.k
    options: dict[str, Any] = dict(step.factors)
    if served.qk_norm:
        weights = (rng.random((2, served.head_dim), np.float32) + 0.5).astype(step.q.dtype)
        options |= {"norms": (weights[0], weights[1])}
        q = definitions.rms_norm(q, weights[0], served.eps)
        k = definitions.rms_norm(k, weights[1], served.eps)

    rotate = jax.jit(partial(kernels.rotate_and_write, eps=served.eps))
    heads = np.concatenate([step.q, step.k, step.v], axis=1)
    got_q, got_kv = rotate(heads, rope, step.kv, step.meta, **options)
    yield distance(np.asarray(got_q)[: step.rows], definitions.rotate(q, *rope)[: step.rows])
    pool = written(step, definitions.rotate(k, *rope), step.v)
    yield distance(in_floats(np.asarray(got_kv), step), in_floats(pool, step))


def written(step: Step, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The step's pool with k and v [T, K, D] in it."""
    kv = step.kv.copy()
    rows = kv.reshape(-1, *kv.shape[2:])
    new = np.stack([k, v], axis=2).reshape(len(k), -1, k.shape[2])[: step.rows].astype(np.float32)
    if step.factors:
        new = np.clip(new / step.factors["kv_scales"][:, None], -step.limit, step.limit)
    if kv.dtype == np.int8:
        new = np.floor(new + 0.5)
    rows[np.asarray(step.meta.write_rows)[: step.rows]] = new.astype(kv.dtype)
    return kv


def in_floats(kv: np.ndarray, step: Step) -> np.ndarray:
    """The numbers that a pool [N, page, 2K, D] stands for, float32."""
    wide = kv.astype(np.float32)
    if step.factors:
        wide *= step.factors["kv_scales"][:, None]
    return wide


def context_lengths(served: Served, count: int) -> list[int]:
    """`count` lengths: one of 40 pages, some around the edges of pages, the others short."""
    page = served.page_size
    long = [40 * page + 7, 6 * page + 1, 5 * page + 3, 2 * page, page + 1, page, page - 1, 1]
    short = [1 + 7 * i % (2 * page) for i in range(count)]
    lengths = [*long[:LONG], *short][:count]
    return [max(1, min(length, served.context)) for length in lengths]


def decode_step(served: Served, seats: int) -> Step:
    """A step of one row a seat; the last seat is empty where there is more than one."""
    pieces = [(length, 1) for length in context_lengths(served, max(1, seats - 1))]
    return make_step(served, pieces, len(pieces), rows=seats, seqs=seats)


def mixed_step(served: Served) -> Step:
    """The smallest step with prompts: some rows decode, one prompt begins, others go on in the
    middle of a page and of a context."""
    rows, seqs = served.mixed[0], served.decode[-1]
    decoding = context_lengths(served, max(0, min(LONG, seqs - 3, rows // 2)))
    pieces = [(length, 1) for length in decoding]
    starts = [0, served.page_size - 1, 3 * served.page_size + 5][: max(1, seqs - len(pieces))]
    left = min(rows - len(pieces) - 1, MOST_ROWS)  # a row of padding at the end
    share = max(1, left // len(starts))
    for start in starts:
        count = min(share, served.context - start)
        if count > 0:
            pieces.append((start + count, count))
    return make_step(served, pieces, len(decoding), rows=rows, seqs=seqs)


def make_step(
    served: Served, pieces: list[tuple[int, int]], decoding: int, *, rows: int, seqs: int
) -> Step:
    """Random numbers for sequences of (context, new rows), the first `decoding` of them of one row.

    Their pages are scattered over the pool; T rows and S sequences, so the rest is padding.
    """
    rng = np.random.default_rng(len(pieces) + rows)
    page = served.page_size
    n_pages = 2 + sum(-(-length // page) for length, _ in pieces)
    free = rng.permutation(n_pages - 1) + 1
    kv_lens = np.zeros(seqs, np.int32)
    cu_q = np.zeros(seqs + 1, np.int32)
    table = np.zeros((seqs, served.pages), np.int32)
    positions = np.zeros(rows, np.int32)
    write_rows = np.full(rows, n_pages * page, np.int32)
    row = 0
    taken = 0
    for s, (length, count) in enumerate(pieces):
        used = -(-length // page)
        table[s, :used] = free[taken : taken + used]
        at = np.arange(length - count, length)
        positions[row : row + count] = at
        write_rows[row : row + count] = table[s, at // page] * page + at % page
        kv_lens[s] = length
        taken += used
        row += count
        cu_q[s + 1] = row
    cu_q[len(pieces) + 1 :] = row
    counts = np.array([decoding, len(pieces), row], np.int32)
    arrays = kv_lens, cu_q, table, write_rows, positions, counts
    meta = AttentionMeta(*(jnp.asarray(array) for array in arrays))
    q = rng.standard_normal((rows, served.n_heads, served.head_dim), np.float32)
    k, v = rng.standard_normal((2, rows, served.n_kv_heads, served.head_dim), np.float32)
    shape = (n_pages, page, 2 * served.n_kv_heads, served.head_dim)
    kv = rng.standard_normal(shape, np.float32)
    factors: dict[str, np.ndarray] = {}
    limit = limit_of(jnp.zeros((), served.kv_dtype))
    if limit:  # eight times the numbers' spread fills the range
        kv = np.clip(kv * limit / 8, -limit, limit)
        factors["kv_scales"] = np.full(2 * served.n_kv_heads, 8 / limit, np.float32)
    dtype = jnp.dtype(served.dtype)
    return Step(
        q=q.astype(dtype),
        k=k.astype(dtype),
        v=v.astype(dtype),
        kv=kv.astype(jnp.dtype(served.kv_dtype)),
        meta=meta,
        rows=row,
        limit=limit,
        factors=factors,
    )


def norm_errors(kernels: KernelSet, served: Served) -> Iterator[float]:
    """Rows of the hidden size at every row count, and heads where they are normed."""
    cases = [(rows, served.hidden_size) for rows in served.product_rows]
    if served.qk_norm:
        cases.append((served.decode[-1] * served.n_heads, served.head_dim))
    rng = np.random.default_rng(5)
    inputs = []
    for rows, size in cases:
        x = random_array(rng, (rows, size), served.dtype)
        inputs.append((x, random_array(rng, (size,), served.dtype)))

    def call_all(inputs: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        return [kernels.rms_norm(x, weight, served.eps) for x, weight in inputs]

    for got, (x, weight) in zip(jax.jit(call_all)(inputs), inputs, strict=True):
        yield distance(got, definitions.rms_norm(x, weight, served.eps))


def product_errors(kernels: KernelSet, served: Served) -> Iterator[float]:
    """Every matrix of a layer but those in 4 bits, at every row count."""
    matrices = [matrix for matrix in served.matrices if matrix.scheme != "int4"]
    inputs = [random_product(served, matrix) for matrix in matrices]

    def multiply(matrix: Matrix, x: jax.Array, w: jax.Array) -> list[jax.Array]:
        if kernels.arrange is not None and matrix.scheme == "plain":
            w = kernels.arrange(w, 2 if matrix.gated else 1)
        product = kernels.gated if matrix.gated else kernels.matmul
        return [product(x[:rows], w) for rows in served.product_rows]

    def call_all(inputs: list[tuple[jax.Array, jax.Array]]) -> list[list[jax.Array]]:
        pairs = zip(matrices, inputs, strict=True)
        return [multiply(matrix, x, w) for matrix, (x, w) in pairs]

    results = jax.jit(call_all)(inputs)
    for matrix, (x, w), products in zip(matrices, inputs, results, strict=True):
        define = definitions.gated if matrix.gated else definitions.matmul
        wanted = define(x, w)
        for got in products:
            yield distance(got, wanted[: len(got)])


def head_errors(kernels: KernelSet, served: Served) -> Iterator[float]:
    """The head, where it is the embedding: at every row count."""
    if not served.table:
        return
    rng = np.random.default_rng(11)
    x = random_array(rng, (served.product_rows[-1], served.hidden_size), served.dtype)
    table = random_array(rng, (narrowed(served.table, COLUMNS), served.hidden_size), served.dtype)

    def call_all(x: jax.Array, table: jax.Array) -> list[jax.Array]:
        return [kernels.project(x[:rows], table) for rows in served.product_rows]

    wanted = definitions.matmul(x, table.T)
    for got in jax.jit(call_all)(x, table):
        yield distance(got, wanted[: len(got)])


def int4_errors(kernels: KernelSet, served: Served) -> Iterator[float]:
    """Matrices in 4 bits, with zero points, at every row count; against the reference's product."""
    rng = np.random.default_rng(13)
    for matrix in served.matrices:
        if matrix.scheme != "int4":
            continue
        size_out = narrowed(matrix.size_out, COLUMNS)
        groups = matrix.size_in // matrix.group
        packed = rng.integers(0, 256, (matrix.size_in // 2, size_out), np.uint8)
        scales = (rng.random((groups, size_out), np.float32) + 0.5).astype(np.float16)
        zeros = rng.integers(0, 16, (groups, size_out), np.uint8)
        weights = Int4(*map(jnp.asarray, (packed, scales, zeros)))
        x = random_array(rng, (served.product_rows[-1], matrix.size_in), served.dtype)

        def call_all(x: jax.Array, weights: Int4) -> list[jax.Array]:
            return [kernels.matmul_int4(x[:rows], weights) for rows in served.product_rows]

        wanted = np.asarray(jax.jit(matmul_int4)(x, weights), np.float32)
        for got in jax.jit(call_all)(x, weights):
            yield distance(got, wanted[: len(got)])


def random_product(served: Served, matrix: Matrix) -> tuple[np.ndarray, np.ndarray]:
    """x [rows, I] and a matrix [I, O] of that scheme, O at most some two thousand."""
    rng = np.random.default_rng(matrix.size_in + matrix.size_out)
    x = random_array(rng, (served.product_rows[-1], matrix.size_in), served.dtype)
    size_out = narrowed(matrix.size_out, COLUMNS * (2 if matrix.gated else 1))
    match matrix.scheme:
        case "int8":
            return x, rng.integers(-127, 128, (matrix.size_in, size_out), np.int8)
        case "fp8":
            return x, random_array(rng, (matrix.size_in, size_out), "float8_e4m3fn")
    return x, random_array(rng, (matrix.size_in, size_out), served.dtype)


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Numbers spread evenly over [-1, 1)."""
    return (2 * rng.random(shape, np.float32) - 1).astype(jnp.dtype(dtype))


def narrowed(size: int, columns: int) -> int:
    """A size under twice `columns` with the same remainder, so that tiles are chosen alike."""
    return min(size, columns + size % columns)


def cut_errors(kernels: KernelSet, served: Served) -> Iterator[float]:
    """Top-k and top-p in several sizes: how much more or less probability is kept than should
    be.
    """
    if kernels.threshold is None:
        return
    size = served.vocab_size
    cases = [(1, 1.0), (50, 1.0), (0, 0.9), (0, 0.1), (40, 0.8), (size, 0.5), (2000, 0.999)]
    top_k = np.array([min(k, size) for k, _ in cases], np.int32)
    top_p = np.array([p for _, p in cases], np.float32)
    logits = 3 * np.random.default_rng(17).standard_normal((len(cases), size), np.float32)
    logits -= logits.max(axis=-1, keepdims=True)
    floors = np.asarray(jax.jit(kernels.threshold)(logits, top_k, top_p))
    for row, k, p, floor in zip(logits, top_k, top_p, floors, strict=True):
        weights = np.exp(row.astype(np.float64))
        kept = weights[row >= floor].sum() / weights.sum()
        yield abs(float(kept) - definitions.kept_mass(row, int(k), float(p)))


#: Yields errors, none if the engine never calls the kernel.
Check = Callable[[KernelSet, Served], Iterator[float]]

CHECKS: dict[str, Check] = {
    "attention": attention_errors,
    "norm": norm_errors,
    "products": product_errors,
    "head": head_errors,
    "int4 product": int4_errors,
    "sampling cut": cut_errors,
}
