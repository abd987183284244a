"""Proof of recurrent layers: compares steps of random sequences with the definitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jitney.kernels import definitions
from jitney.kernels.delta_net import DeltaState, DeltaWeights, StateSlots, short_conv
from jitney.kernels.interface import AttentionMeta, KernelSet
from jitney.kernels.mamba import MambaWeights
from jitney.kernels.proof_shapes import DeltaShape, ServedShapes, ShortConvShape, distance

#: Sequences of a step, and rows of the longest one in a step with prompts: more rows would use the
#: same code paths.
_SEQUENCES, _PROMPT_ROWS = 3, 40
_EPS = 1e-6
#: Least and greatest time step of Mamba-2, chosen so that some steps are clamped.
_LIMITS = (0.1, 2.0)


def delta_net_errors(kernels: KernelSet, shapes: ServedShapes) -> Iterator[float]:
    """Errors of steps in which sequences begin and continue, in the smallest and the largest mixed
    bucket, then of a decode step in the largest bucket; the slots hold other numbers before. Yields
    nothing without recurrent layers, or if the set has no kernel for short convolutions.
    """
    own = shapes.delta_net
    is_plain = isinstance(own, ShortConvShape) and kernels.short_conv is short_conv
    if own is None or is_plain:
        return
    rng = np.random.default_rng(8)
    rows, seqs = shapes.steps.prompts[0]
    decode = shapes.steps.decode[-1]
    count = min(_SEQUENCES, seqs, rows, decode)
    # A kernel may compute longer steps differently (`triton_gpu.delta_net.pass_rows`).
    largest = shapes.steps.mixed[-1], shapes.steps.prompts[-1][1]
    steps = [
        (n_rows, n_seqs, [min(_PROMPT_ROWS, n_rows - count + 1), *[1] * (count - 1)])
        for n_rows, n_seqs in dict.fromkeys(((rows, seqs), largest))
    ]
    steps.append((decode, decode, [1] * count))
    weights, call, define = _layer_of(kernels, own, rng, shapes.dtype)
    lengths = np.sum([counts for *_, counts in steps], axis=0)
    texts = [_random_text(rng, own, length, shapes.dtype) for length in lengths]
    defined = [define(*text) for text in texts]
    starts = [0] * count
    state = jax.tree.map(lambda array: array + 3, DeltaState.empty(own.state_shapes(count)))
    for n_rows, n_seqs, counts in steps:
        x, rates = (
            _put_together([text[part] for text in texts], starts, counts, n_rows)
            for part in range(2)
        )
        meta = _meta_of(starts, counts, n_rows, n_seqs)
        step = jax.jit(call, donate_argnums=3)
        got, state = step(jnp.asarray(x), rates, weights, state, meta)
        first = 0
        for number, own_count in enumerate(counts):
            start = starts[number]
            expected = defined[number][start : start + own_count]
            yield distance(got[first : first + own_count], expected)
            first += own_count
            starts[number] += own_count


def _layer_of(
    kernels: KernelSet, own: DeltaShape | ShortConvShape, rng: np.random.Generator, dtype: str
) -> tuple[Any, Callable[..., Any], Callable[..., np.ndarray]]:
    """(weights, the layer's function in the set, its definition)."""
    if isinstance(own, ShortConvShape):
        taps = _random_taps(rng, own, dtype)

        def convolve(x: jax.Array, rates: jax.Array, *others: Any) -> Any:
            return kernels.short_conv(x, *others)

        return taps, convolve, lambda x, rates: definitions.short_conv(x, np.asarray(taps))
    weights = _random_weights(rng, own, dtype)
    if own.corrects:

        def define(x: np.ndarray, rates: np.ndarray) -> np.ndarray:
            return definitions.delta_net(x, rates, weights, own.key_heads, own.dim, _EPS)

        return weights, partial(kernels.delta_net, eps=_EPS), define
    of_mamba = MambaWeights(
        weights.taps,
        jnp.asarray(0.2 * rng.standard_normal(own.channels), dtype),
        weights.log_decay,
        weights.rate_bias,
        jnp.asarray(rng.standard_normal(own.heads), jnp.float32),
    )

    def call(x: jax.Array, rates: jax.Array, own: MambaWeights, *others: Any) -> Any:
        read, state = kernels.mamba(x, own, *others, limits=_LIMITS)
        return read.reshape(len(x), -1), state

    def define_mamba(x: np.ndarray, rates: np.ndarray) -> np.ndarray:
        read = definitions.mamba(x, of_mamba, own.key_heads, own.dim, _LIMITS)
        return read.reshape(len(x), -1)

    return of_mamba, call, define_mamba


def _random_weights(rng: np.random.Generator, own: DeltaShape, dtype: str) -> DeltaWeights:
    """Random weights: some heads remember a few tokens, others some hundred."""
    return DeltaWeights(
        _random_taps(rng, own, dtype),
        jnp.asarray(rng.standard_normal(own.heads) - 2, jnp.float32),
        jnp.asarray(rng.standard_normal(own.heads), jnp.float32),
        jnp.asarray(1 + 0.2 * rng.standard_normal(own.width), jnp.float32),
    )


def _random_taps(
    rng: np.random.Generator, own: DeltaShape | ShortConvShape, dtype: str
) -> jax.Array:
    return jnp.asarray(0.7 * rng.standard_normal((own.taps, own.channels)), dtype)


def _random_text(
    rng: np.random.Generator, own: DeltaShape | ShortConvShape, length: int, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Random inputs of one sequence: x [L, C + H V] (Mamba-2: [L, C + H], short convolutions:
    [L, 3 C]), rates [L, 2 H].
    """
    x = rng.standard_normal((length, own.columns), np.float32).astype(jnp.dtype(dtype))
    return x, rng.standard_normal((length, 2 * own.heads), np.float32)


def _put_together(
    texts: list[np.ndarray], starts: list[int], counts: list[int], rows: int
) -> np.ndarray:
    """The step's rows of these texts, followed by zeros."""
    parts = [
        text[start : start + count]
        for text, start, count in zip(texts, starts, counts, strict=True)
    ]
    together = np.concatenate(parts)
    return np.pad(together, ((0, rows - len(together)), (0, 0)))


def _meta_of(starts: list[int], counts: list[int], rows: int, seqs: int) -> AttentionMeta:
    """The metadata of a step in which sequence s uses slot s."""
    absent = seqs - len(counts)
    ends = np.concatenate([[0], np.cumsum(counts)])
    at = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    positions = np.pad(np.concatenate(at), (0, rows - ends[-1]))
    slots = np.pad(np.arange(len(counts)), (0, absent), constant_values=len(counts))
    none = jnp.zeros(0, jnp.int32)
    return AttentionMeta(
        kv_lens=none,
        cu_q=jnp.asarray(np.pad(ends, (0, absent), mode="edge"), jnp.int32),
        page_table=none,
        write_rows=none,
        positions=jnp.asarray(positions, jnp.int32),
        counts=jnp.array([0, len(counts), ends[-1]], jnp.int32),
        state=StateSlots.in_place(jnp.asarray(slots, jnp.int32)),
    )
