"""Proof of attention, and of the kernel that norms, rotates and writes before it: compares random
steps with the definitions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jitney.kernels import definitions
from jitney.kernels.interface import AttentionMeta, KernelSet
from jitney.kernels.proof_shapes import ServedShapes, distance
from jitney.kernels.scales import limit_of

if TYPE_CHECKING:
    from jitney.kernels.attention_cases import AttentionCase

#: Most sequences with long contexts in a step; the others have one or two pages.
_LONG = 8
#: Most prompt rows in a step: more would only repeat the same tiles.
_PROMPT_ROWS = 256
#: New prompt rows of the longest context.
_LATE_ROWS = 5
#: Tokens, and least pages, that long contexts share: random numbers for completely different
#: contexts would make startup too slow.
_SHARED, _SHARED_PAGES = 1024, 32
#: Range of a quantised pool divided by the standard deviation of its random numbers.
_SPREADS = 8


class _StepArrays(NamedTuple):
    """The arrays of a step that are passed to a kernel."""

    q: Any  # [T, H, D]
    k: Any  # [T, K, D]
    v: Any  # [T, K, D], or None where keys serve as values
    kv: Any  # the pool before the step, [N, page, 2K, D], or [N, page, K, D]
    meta: AttentionMeta
    factors: dict[str, Any]  # kv_scales float32 [2K] of an 8-bit pool, else empty
    sinks: Any  # float32 [H], or None


class _RandomPool(NamedTuple):
    kv: np.ndarray  # [N, page, 2K, D]
    factors: dict[str, np.ndarray]  # kv_scales float32 [2K]; empty for a pool of floats
    limit: float  # greatest number of the pool's dtype; 0 for a pool of floats


@dataclass(frozen=True)
class _AttentionStep:
    """The inputs of attention in one step, in numpy."""

    arrays: _StepArrays
    rows: int  # number of rows before the padding
    limit: float  # greatest number of an 8-bit pool, else 0
    key_heads: tuple[int, ...]  # key heads that are compared, with their query heads

    def with_heads(self, heads: np.ndarray) -> _AttentionStep:
        """The step with these queries, keys and values, [T, H + 2K, D]."""
        n_kv = self.arrays.k.shape[1]
        q, k, v = np.split(heads, [-2 * n_kv, -n_kv], axis=1)
        return replace(self, arrays=self.arrays._replace(q=q, k=k, v=v))


@dataclass
class MetaBuilder:
    """Builds the metadata of a random step, sequence by sequence; axes as in `AttentionMeta`."""

    kv_lens: np.ndarray
    cu_q: np.ndarray
    page_table: np.ndarray
    write_rows: np.ndarray
    positions: np.ndarray
    free: np.ndarray  # free pages, in random order
    page_size: int
    count: int = 0  # sequences so far
    rows: int = 0  # rows so far

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int, int],
        n_pages: int,
        page_size: int,
        rng: np.random.Generator,
    ) -> MetaBuilder:
        """A builder without sequences. shape: S, T and P. Page 0 is trash; the other pages are
        assigned in random order.
        """
        seqs, rows, pages = shape
        return cls(
            kv_lens=np.zeros(seqs, np.int32),
            cu_q=np.zeros(seqs + 1, np.int32),
            page_table=np.zeros((seqs, pages), np.int32),
            write_rows=np.full(rows, n_pages * page_size, np.int32),
            positions=np.zeros(rows, np.int32),
            free=rng.permutation(n_pages - 1) + 1,
            page_size=page_size,
        )

    def add(self, length: int, rows: int) -> None:
        """Add a sequence of `length` tokens, the last `rows` of them new."""
        page = self.page_size
        used = -(-length // page)
        pages, self.free = self.free[:used], self.free[used:]
        at = np.arange(length - rows, length)
        new = slice(self.rows, self.rows + rows)
        self.page_table[self.count, :used] = pages
        self.positions[new] = at
        self.write_rows[new] = pages[at // page] * page + at % page
        self.kv_lens[self.count] = length
        self.count += 1
        self.rows += rows
        self.cu_q[self.count :] = self.rows

    def meta(self, n_decode: int) -> AttentionMeta:
        """The metadata of the sequences so far, of which the first `n_decode` decode."""
        return AttentionMeta(
            kv_lens=jnp.asarray(self.kv_lens),
            cu_q=jnp.asarray(self.cu_q),
            page_table=jnp.asarray(self.page_table),
            write_rows=jnp.asarray(self.write_rows),
            positions=jnp.asarray(self.positions),
            counts=jnp.array([n_decode, self.count, self.rows], jnp.int32),
        )


def attention_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """Errors of decode steps with the fewest and the most seats, and of the smallest steps with
    prompts, with few seats and with all; for each kind of heads and each window. Some steps of
    each kind have the longest contexts.

    For a set with `rotate_and_write`, it compares that and `attend`, as models call them.
    """
    for own in shapes.by_heads:
        yield from _errors_of_heads(kernels, own)


def _errors_of_heads(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    sizes = sorted({shapes.steps.decode[0], shapes.steps.decode[-1]})
    steps = [decode_step(shapes, seats) for seats in sizes]
    steps += _long_steps(shapes)
    steps += [_mixed_step(shapes, rows, seqs) for rows, seqs in shapes.steps.prompts]
    yield from _errors_of(kernels, shapes, steps)


def case_errors(kernels: KernelSet, case: AttentionCase) -> Iterator[float]:
    """Errors of one batch, in its dtypes."""
    shapes = case.shapes()
    seqs = case.seqs or len(case.lens)
    rows = case.rows or sum(case.counts)
    step = _make_step(shapes, list(case.decode), list(case.prompts), rows=rows, seqs=seqs)
    yield from _errors_of(kernels, shapes, [step])


def _errors_of(
    kernels: KernelSet, shapes: ServedShapes, steps: list[_AttentionStep]
) -> Iterator[float]:
    """Errors of all steps for each window, and of rotation and writing in the last step."""
    writes = _writes(kernels, shapes)
    if not writes:
        assert kernels.rotate_and_write is not None
        rotate = partial(kernels.rotate_and_write, eps=shapes.norms.eps)
        arrays = steps[-1].arrays
        heads = np.concatenate([arrays.q, arrays.k, arrays.v], axis=1)
        yield from rotation_errors(rotate, heads, shapes, steps[-1])

    def call_all(inputs: list[_StepArrays]) -> list[tuple[list[jax.Array], jax.Array | None]]:
        cases = itertools.product(shapes.attention.windows, inputs)
        return [_attend(kernels, shapes, arrays, window) for window, arrays in cases]

    results = jax.jit(call_all)([step.arrays for step in steps])
    cases = itertools.product(shapes.attention.windows, steps)
    for (window, step), (outputs, kv) in zip(cases, results, strict=True):
        pool = step.arrays.kv
        if writes:
            pool = _written(step, step.arrays.k, step.arrays.v)
        expected = _definition(shapes, step, pool, window)
        query_heads = _query_heads(shapes, step)
        for o in outputs:
            yield distance(np.asarray(o)[: step.rows, query_heads], expected[: step.rows])
        if writes:
            yield distance(_in_floats(np.asarray(kv), step), _in_floats(pool, step))


def _writes(kernels: KernelSet, shapes: ServedShapes) -> bool:
    """Whether attention writes keys and values for the models."""
    return kernels.rotate_and_write is None or shapes.attention.value_dim > 0


def _query_heads(shapes: ServedShapes, step: _AttentionStep) -> list[int]:
    """The query heads of the key heads that are compared."""
    group = shapes.attention.n_heads // shapes.attention.n_kv_heads
    return [head * group + at for head in step.key_heads for at in range(group)]


def _attend(
    kernels: KernelSet, shapes: ServedShapes, arrays: _StepArrays, window: int
) -> tuple[list[jax.Array], jax.Array | None]:
    """(outputs of the kernels that models call, pool); the pool is None if no kernel writes it."""
    q, k, v, kv, meta, factors, sinks = arrays
    scale = shapes.attention.head_dim**-0.5
    options: dict[str, Any] = {"scale": scale, "window": window, **factors}
    if shapes.attention.softcap:
        options["softcap"] = shapes.attention.softcap
    if sinks is not None:
        options["sinks"] = sinks
    if shapes.attention.value_dim:
        options["value_dim"] = shapes.attention.value_dim
    if not _writes(kernels, shapes):
        return [kernels.attend(q, kv, meta, **options)], None
    o, kv = kernels.paged_attention(q, k, v, kv, meta, **options)
    if not shapes.attention.read_again:
        return [o], kv
    return [o, kernels.attend(q, kv, meta, **options)], kv


def _definition(
    shapes: ServedShapes, step: _AttentionStep, pool: np.ndarray, window: int
) -> np.ndarray:
    """The step's output by definition over this pool, for the compared heads: [T, ., D]."""
    meta = step.arrays.meta
    if len(step.key_heads) < shapes.attention.n_kv_heads:
        rows = [row for head in step.key_heads for row in (2 * head, 2 * head + 1)]
        pool = pool[:, :, rows]
    heads, sinks = _query_heads(shapes, step), step.arrays.sinks
    return definitions.attention(
        step.arrays.q[:, heads],
        _in_floats(pool, step),
        np.asarray(meta.kv_lens),
        np.asarray(meta.cu_q),
        np.asarray(meta.page_table),
        scale=shapes.attention.head_dim**-0.5,
        window=window,
        softcap=shapes.attention.softcap,
        sinks=None if sinks is None else sinks[heads],
        value_dim=shapes.attention.value_dim,
    )


def rotation_errors(
    rotate_and_write: Callable[..., Any], heads: Any, shapes: ServedShapes, step: _AttentionStep
) -> Iterator[float]:
    """Errors of the kernel that norms, rotates and writes the heads of a step."""
    arrays = step.arrays
    q, k = arrays.q, arrays.k
    rng = np.random.default_rng(3)
    speeds = rng.random(shapes.attention.head_dim // 2, np.float32)
    angles = np.asarray(arrays.meta.positions, np.float32)[:, None, None] * speeds
    rope = np.cos(angles), np.sin(angles)
    options: dict[str, Any] = dict(arrays.factors)
    if shapes.attention.qk_norm:
        weights = rng.random((2, shapes.attention.head_dim), np.float32) + 0.5
        weights = weights.astype(shapes.norms.dtype)
        options["norms"] = weights[0], weights[1]
        q = definitions.rms_norm(q, weights[0], shapes.norms.eps)
        k = definitions.rms_norm(k, weights[1], shapes.norms.eps)

    got_q, got_kv = jax.jit(rotate_and_write)(heads, rope, arrays.kv, arrays.meta, **options)
    yield distance(np.asarray(got_q)[: step.rows], definitions.rotate(q, *rope)[: step.rows])
    pool = _written(step, definitions.rotate(k, *rope), arrays.v)
    yield distance(_in_floats(np.asarray(got_kv), step), _in_floats(pool, step))


def _written(step: _AttentionStep, k: np.ndarray, v: np.ndarray | None) -> np.ndarray:
    """The step's pool after writing k and v [T, K, D], or k alone."""
    arrays = step.arrays
    kv = arrays.kv.copy()
    rows = kv.reshape(-1, *kv.shape[2:])
    new = k if v is None else np.stack([k, v], axis=2).reshape(len(k), -1, k.shape[2])
    new = new[: step.rows].astype(np.float32)
    if arrays.factors:
        new = np.clip(new / arrays.factors["kv_scales"][:, None], -step.limit, step.limit)
    if kv.dtype == np.int8:
        new = np.floor(new + 0.5)
    rows[np.asarray(arrays.meta.write_rows)[: step.rows]] = new.astype(kv.dtype)
    return kv


def _in_floats(kv: np.ndarray, step: _AttentionStep) -> np.ndarray:
    """The numbers that a pool [N, page, 2K, D] represents, float32."""
    wide = kv.astype(np.float32)
    if step.arrays.factors:
        wide *= step.arrays.factors["kv_scales"][: kv.shape[2], None]  # all are equal
    return wide


def _context_lengths(shapes: ServedShapes, count: int) -> list[int]:
    """`count` context lengths: one of 40 pages, some near page boundaries, the others short."""
    page = shapes.attention.page_size
    long = [40 * page + 7, 6 * page + 1, 5 * page + 3, 2 * page, page + 1, page, page - 1, 1]
    short = [1 + 7 * i % (2 * page) for i in range(count)]
    lengths = [*long[:_LONG], *short][:count]
    return [max(1, min(length, shapes.attention.context)) for length in lengths]


def decode_step(shapes: ServedShapes, seats: int) -> _AttentionStep:
    """A step with one row per seat; the last seat is empty if there are several."""
    lengths = _context_lengths(shapes, max(1, seats - 1))
    return _make_step(shapes, lengths, [], rows=seats, seqs=seats)


def _mixed_step(shapes: ServedShapes, rows: int, seqs: int) -> _AttentionStep:
    """A step with prompts: some rows decode, one prompt begins, others continue in the middle of a
    page and of a context.
    """
    decoding = _context_lengths(shapes, max(0, min(_LONG, seqs - 3, rows // 2)))
    starts = [0, shapes.attention.page_size - 1, 3 * shapes.attention.page_size + 5]
    starts = starts[: max(1, seqs - len(decoding))]
    left = min(rows - len(decoding) - 1, _PROMPT_ROWS)  # a row of padding at the end
    share = max(1, left // len(starts))
    prompts = []
    for start in starts:
        count = min(share, shapes.attention.context - start)
        if count > 0:
            prompts.append((start + count, count))
    return _make_step(shapes, decoding, prompts, rows=rows, seqs=seqs)


def _long_steps(shapes: ServedShapes) -> list[_AttentionStep]:
    """Steps with longer contexts than the others: the longest served context, alone and with prompt
    rows, and repeated halves of it, since a kernel may split contexts differently at each power of
    two.
    """
    lengths = _long_lengths(shapes)
    if not lengths:
        return []
    pool = _random_pool(np.random.default_rng(29), shapes, _long_pages(shapes))
    decode = shapes.steps.decode
    seats = min(decode[-1], _LONG)
    steps = []
    for first in range(0, len(lengths), seats):
        few = lengths[first : first + seats]
        steps.append(_long_step(shapes, pool, few, (decode[-1], decode[-1])))
    if decode[0] != decode[-1]:
        least = decode[0]
        steps.append(_long_step(shapes, pool, lengths[:1], (least, least)))
    rows, seqs = shapes.steps.prompts[0]
    late = min(_LATE_ROWS, rows - 1)
    steps.append(_long_step(shapes, pool, lengths[:1], (seqs, rows), late))
    return steps


def _long_pages(shapes: ServedShapes) -> int:
    """Pages of a pool for long steps: the trash page, shared pages, and two pages per context."""
    return 1 + _shared_pages(shapes) + 2 * _LONG


def _shared_pages(shapes: ServedShapes) -> int:
    return max(_SHARED_PAGES, _SHARED // shapes.attention.page_size)


def _long_lengths(shapes: ServedShapes) -> list[int]:
    lengths = []
    length = shapes.attention.context
    while length > _context_lengths(shapes, 1)[0]:
        lengths.append(length)
        length = -(-length // 2)  # rounded up, to lie between the next lower powers of two
    return lengths


def _long_step(
    shapes: ServedShapes,
    pool: _RandomPool,
    lengths: list[int],
    sizes: tuple[int, int],
    new: int = 1,
) -> _AttentionStep:
    """A step of sizes (S, T) with `new` rows for each of these contexts. Contexts share most of
    their pages, as in a prefix cache; several entries of a context's table name the same page.
    """
    seqs, rows = sizes
    shared = _shared_pages(shapes)
    rng = np.random.default_rng(len(lengths) + rows)
    shape = seqs, rows, shapes.attention.pages
    sequences = MetaBuilder.empty(shape, _long_pages(shapes), shapes.attention.page_size, rng)
    own = sequences.free[sequences.free > shared].reshape(_LONG, 2)
    for length, at_the_end in zip(lengths, own, strict=False):
        first = -(-length // shapes.attention.page_size) - 2
        spread = np.arange(first) * shared // first
        sequences.free = np.concatenate([rng.permutation(shared)[spread] + 1, at_the_end])
        sequences.add(length, new)
    key_heads = tuple({0, shapes.attention.n_kv_heads - 1})
    n_decode = len(lengths) if new == 1 else 0
    return _random_step(rng, shapes, sequences, pool, n_decode, key_heads)


def _make_step(
    shapes: ServedShapes,
    decoding: list[int],
    prompts: list[tuple[int, int]],
    *,
    rows: int,
    seqs: int,
) -> _AttentionStep:
    """A random step of rows that decode at these context lengths, and of prompts (context length,
    new rows). Pages are scattered over the pool; rows up to T and sequences up to S are padding.
    """
    pieces = [(length, 1) for length in decoding] + prompts
    page = shapes.attention.page_size
    rng = np.random.default_rng(len(pieces) + rows)
    n_pages = 2 + sum(-(-length // page) for length, _ in pieces)
    sequences = MetaBuilder.empty((seqs, rows, shapes.attention.pages), n_pages, page, rng)
    for length, count in pieces:
        sequences.add(length, count)
    key_heads = tuple(range(shapes.attention.n_kv_heads))
    pool = _random_pool(rng, shapes, n_pages)
    return _random_step(rng, shapes, sequences, pool, len(decoding), key_heads)


def _random_step(
    rng: np.random.Generator,
    shapes: ServedShapes,
    sequences: MetaBuilder,
    pool: _RandomPool,
    n_decode: int,
    key_heads: tuple[int, ...],
) -> _AttentionStep:
    """A step with random numbers for the sequences, of which the first n_decode decode."""
    rows = len(sequences.positions)
    dtype = jnp.dtype(shapes.dtype)
    heads = shapes.attention
    q = rng.standard_normal((rows, heads.n_heads, heads.head_dim), np.float32).astype(dtype)
    new_shape = (2, rows, heads.n_kv_heads, heads.head_dim)
    k, v = rng.standard_normal(new_shape, np.float32).astype(dtype)
    if heads.value_dim:
        v = None
    meta = sequences.meta(n_decode)
    arrays = _StepArrays(q, k, v, pool.kv, meta, pool.factors, _random_sinks(rng, shapes))
    return _AttentionStep(arrays, sequences.rows, pool.limit, key_heads)


def _random_sinks(rng: np.random.Generator, shapes: ServedShapes) -> np.ndarray | None:
    """Random sinks, different for each head: those of every second head outweigh all keys together,
    the others weigh less than one key.
    """
    if not shapes.attention.sinks:
        return None
    n_heads = shapes.attention.n_heads
    high = np.log(shapes.attention.context) + rng.random(n_heads, np.float32)
    return np.where(np.arange(n_heads) % 2, high, high - 12).astype(np.float32)


def _random_pool(rng: np.random.Generator, shapes: ServedShapes, n_pages: int) -> _RandomPool:
    n_rows = shapes.attention.pool_rows
    page_shape = shapes.attention.page_size, n_rows, shapes.attention.head_dim
    kv = np.empty((n_pages, *page_shape), jnp.dtype(shapes.attention.kv_dtype))
    factors: dict[str, np.ndarray] = {}
    limit = limit_of(shapes.attention.kv_dtype)
    if limit:
        factors["kv_scales"] = np.full(n_rows, _SPREADS / limit, np.float32)
    for page in range(n_pages):  # drawing all pages at once in float32 would be slow
        numbers = rng.standard_normal(page_shape, np.float32)
        if limit:
            numbers = np.clip(numbers * limit / _SPREADS, -limit, limit)
        kv[page] = numbers.astype(kv.dtype)
    return _RandomPool(kv, factors, limit)
