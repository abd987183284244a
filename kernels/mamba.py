"""Layers of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) over the rows of a step, in plain
jax.numpy, without the layer's opening and closing products.

A layer keeps the same state of each seat as a gated delta net (`DeltaState` of
`jitney.kernels.delta_net`). A row decays the memory of each head and adds its value at its key,
both scaled by the row's time step, and reads at its query; it does not subtract the old value.

Axes as in `jitney.kernels.delta_net`: G groups, H heads (H / G neighbours share a group's keys and
queries), V numbers of a head, D of the state of each of them, C channels of the convolution (values
of all heads, then keys and queries of all groups: H V + 2 G D).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jitney.kernels.delta_net import DeltaRows, DeltaSequences, DeltaState, Recur, convolve

if TYPE_CHECKING:
    from jitney.kernels.interface import AttentionMeta


class MambaWeights(NamedTuple):
    """Weights that mix a layer's rows; a pytree of arrays."""

    #: [W, C]: weights of the convolution, the oldest tap first.
    taps: jax.Array
    #: [C]: bias of the convolution, or None.
    taps_bias: jax.Array | None
    #: float32 [H]: the log of the memory's decay rate in a time step of length 1; the bias added to
    #: the rows' time steps.
    log_decay: jax.Array
    rate_bias: jax.Array
    #: float32 [H]: the share of its own value that a row reads in addition to the memory.
    skip: jax.Array


def mamba(
    x: jax.Array,
    weights: MambaWeights,
    state: DeltaState,
    meta: AttentionMeta,
    *,
    limits: tuple[float, float],
    recur: Recur,
) -> tuple[jax.Array, DeltaState]:
    """x [T, C + H] (inputs of the convolution, then time steps) -> (output of each head, float32
    [T, H, V]; new state).

    limits: least and greatest time step. recur: the function that updates and reads the memory.
    Padding rows of the output are undefined.
    """
    n_heads, dim, width = state.memory.shape[1:]
    channels = state.taps.shape[2]
    sequences = DeltaSequences.of(meta, state.lengths)
    mixed, taps = convolve(x[:, :channels], weights.taps, state.taps, sequences)
    if weights.taps_bias is not None:
        mixed = mixed + weights.taps_bias.astype(jnp.float32)
    keep_apart = jax.lax.optimization_barrier
    mixed = keep_apart(jax.nn.silu(mixed))
    n_rows, first_key = len(x), n_heads * width
    values = mixed[:, :first_key].reshape(n_rows, n_heads, width)
    keys, queries = jnp.split(mixed[:, first_key:].reshape(n_rows, -1, dim), 2, axis=1)
    steps = jax.nn.softplus(x[:, channels:].astype(jnp.float32) + weights.rate_bias)
    # A row that is in the memory already does not change it, and reads the same values again.
    again = sequences.again[sequences.owners(n_rows)][:, None] > 0
    # `keep_apart` fixes where numbers are rounded, whatever XLA fuses; otherwise a row's result
    # could differ from bucket to bucket.
    steps = keep_apart(jnp.where(again, 0.0, jnp.clip(steps, *limits)))
    rows = DeltaRows(
        queries=queries,
        keys=keys,
        values=values * steps[..., None],
        decay=jnp.exp(-jnp.exp(weights.log_decay) * steps),
        beta=None,
    )
    rows = keep_apart(rows)
    read, memory = recur(rows, state.memory, sequences, meta.counts[2])
    read += keep_apart(weights.skip[:, None] * values)
    return read, DeltaState(taps, memory, sequences.lengths(state.lengths))
