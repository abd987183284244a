"""Launches the kernels of `threshold`, which search the cut of top-k and top-p."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jitney.kernels.triton_gpu import threshold
from jitney.kernels.triton_gpu.launch import Launch

#: Lowest bit of each pass's digit, the highest first: digits of 8, 8, 8 and 7 bits.
_SHIFTS = (23, 15, 7, 0)
#: Most entries per row in the last search: more than any usual k, and than remain of 128k logits
#: after the second digit.
_LISTED = 4096
#: Entries of a row per program: float32 sums are exact up to the first number; the second is used
#: for fewer than _FEW_ROWS rows, which are too few to fill a GPU.
_LENGTH, _LENGTH_OF_FEW, _FEW_ROWS = 8192, 2048, 64
#: Block sizes: of the one-warp programs that count digits, and of other programs.
_COUNTED, _BLOCK = 128, 1024


class _Search(NamedTuple):
    """The rows' cuts, and the states of the search."""

    floor: jax.Array  # float32 [S]
    states: list[jax.Array]  # int32 [S, STATE_WORDS] after each digit


def search(
    launch: Launch, scaled: jax.Array, top_k: jax.Array, top_p: jax.Array, most: int = _LISTED
) -> _Search:
    """Search the cuts of scaled [S, V]. most: entries that a list holds."""
    n_rows, vocab = scaled.shape
    limits = top_k, top_p
    length = _LENGTH if n_rows >= _FEW_ROWS else _LENGTH_OF_FEW
    splits = -(-vocab // length)
    states = []
    state = top_k  # not read at first
    for shift in _SHIFTS:
        state = _digit(launch, scaled, limits, state, (shift, length, splits, most))
        states.append(state)
    lengths = jax.new_ref(jnp.zeros((n_rows,), jnp.int32))
    listed = launch(
        threshold.gather,
        scaled,
        state,
        lengths,
        out=jax.ShapeDtypeStruct((n_rows, most), jnp.float32),
        grid=(splits, n_rows),
        warps=4,
        stages=2,
        V=vocab,
        LENGTH=length,
        LISTED=most,
        BLOCK=_BLOCK,
    )
    floor = launch(
        threshold.finish,
        scaled,
        *limits,
        state,
        jax.freeze(lengths),
        listed,
        out=jax.ShapeDtypeStruct((n_rows,), jnp.float32),
        grid=(n_rows,),
        warps=8,
        stages=2,
        V=vocab,
        LISTED=most,
        BLOCK=_BLOCK,
    )
    return _Search(floor, states)


def _digit(
    launch: Launch,
    scaled: jax.Array,
    limits: tuple[jax.Array, jax.Array],
    state: jax.Array,
    sizes: tuple[int, int, int, int],
) -> jax.Array:
    """The state after one more digit; sizes: its shift, the entries of a split, the splits, and
    the entries of a list.
    """
    shift, length, splits, most = sizes
    n_rows, vocab = scaled.shape
    constants = {"V": vocab, "SPLITS": splits, "SHIFT": shift, "FIRST": shift == _SHIFTS[0]}
    sums = launch(
        threshold.count_digits,
        scaled,
        *limits,
        state,
        out=jax.ShapeDtypeStruct((n_rows, splits, threshold.SUMS, threshold.BINS), jnp.int32),
        grid=(splits, n_rows),
        warps=1,
        stages=2,
        LENGTH=length,
        BLOCK=_COUNTED,
        **constants,
    )
    return launch(
        threshold.choose_digit,
        *limits,
        state,
        sums,
        out=jax.ShapeDtypeStruct((n_rows, threshold.STATE_WORDS), jnp.int32),
        grid=(n_rows,),
        warps=4,
        stages=2,
        LISTED=most,
        **constants,
    )
