"""Recurrent layers for CPUs: `native/delta_net.cc`, or the reference for unsupported shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jitney.kernels import delta_net as plain
from jitney.kernels.cpu import library
from jitney.kernels.delta_net import DeltaRows, DeltaSequences, DeltaState, DeltaWeights
from jitney.kernels.interface import AttentionMeta

#: Numbers per vector; heads must be multiples of it.
_LANES = 16
#: Supported dtypes of rows and taps.
_DTYPES = (jnp.bfloat16, jnp.float32)


def delta_net(
    x: jax.Array,
    rates: jax.Array,
    weights: DeltaWeights,
    state: DeltaState,
    meta: AttentionMeta,
    *,
    eps: float,
) -> tuple[jax.Array, DeltaState]:
    """See `jitney.kernels.interface.DeltaNet`; padding rows are zero.

    Rows and taps must have one dtype, bfloat16 or float32, and D and V must be multiples of 16;
    otherwise the reference computes the layer.
    """
    _, heads, dim, width = state.memory.shape
    if x.dtype not in _DTYPES or weights.taps.dtype != x.dtype or dim % _LANES or width % _LANES:
        return plain.delta_net(x, rates, weights, state, meta, eps=eps)
    sequences = DeltaSequences.of(meta, state.lengths)
    shapes = (
        jax.ShapeDtypeStruct((x.shape[0], heads * width), x.dtype),
        jax.ShapeDtypeStruct(state.taps.shape, state.taps.dtype),
        jax.ShapeDtypeStruct(state.memory.shape, state.memory.dtype),
    )
    # The state is updated in place.
    target = library.load().target("delta_net")
    call = jax.ffi.ffi_call(target, shapes, input_output_aliases={12: 1, 13: 2})
    taps, *others = weights
    o, new_taps, memory = call(
        x, rates, taps, *others, *sequences, state.taps, state.memory, eps=np.float32(eps)
    )
    return o, DeltaState(new_taps, memory, sequences.lengths(state.lengths))


def recur(
    rows: DeltaRows, memory: jax.Array, sequences: DeltaSequences, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `jitney.kernels.delta_net.Recur`; the output of padding rows is 0.

    Rows must have no beta, D must be even and V a multiple of 16; otherwise the reference computes
    the layer.
    """
    _, _, dim, width = memory.shape
    if rows.beta is not None or dim % 2 or width % _LANES:
        return plain.recur(rows, memory, sequences, count)
    shapes = (
        jax.ShapeDtypeStruct(rows.values.shape, jnp.float32),
        jax.ShapeDtypeStruct(memory.shape, memory.dtype),
    )
    # The memory is updated in place.
    target = library.load().target("recur")
    call = jax.ffi.ffi_call(target, shapes, input_output_aliases={9: 1})
    where = sequences[:-1]
    read, memory = call(*rows[:-1], *where, memory)
    return read, memory
