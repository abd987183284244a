"""Converts quantised checkpoints to `Packed` exactly, on the device.

A matrix has O outputs and I inputs. 4-bit codes are regrouped for `jitney.kernels.int4.Int4`: row r
of a group of R inputs holds inputs r and r + R // 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import bitcast_convert_type

from jitney.engine.core.models.quantization import Packed
from jitney.kernels.int4 import Int4

#: Which output of eight each 4-bit code of an AWQ word belongs to, from the lowest bits up.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
#: Inputs of a super-block of Q4_K, and of a group in it.
_SUPER, _GROUP = 256, 32
#: Group that stands for "one scale for all inputs of an output".
WHOLE_GROUP = 128


@jax.jit
def q4_0(rows: Array) -> Packed:
    """GGUF Q4_0, uint8 [O, I / 32 * 18]: 32 inputs have a float16 step and 16 bytes; (code - 8) *
    step.
    """
    blocks = _blocks(rows, 18)
    return Packed(_block_codes(blocks[..., 2:]), _float16(blocks[..., :2]))


@jax.jit
def q4_1(rows: Array) -> Packed:
    """GGUF Q4_1, uint8 [O, I / 32 * 20]: 32 inputs share a float16 step and low."""
    blocks = _blocks(rows, 20)
    return Packed(
        _block_codes(blocks[..., 4:]), _float16(blocks[..., :2]), lows=_float16(blocks[..., 2:4])
    )


@jax.jit
def q4_k(rows: Array) -> Packed:
    """GGUF Q4_K, uint8 [O, I / 256 * 144]: eight groups of 32 inputs share two float16 factors of
    their 6-bit steps and lows, whose products need float32.
    """
    blocks = _blocks(rows, 144)
    factors = blocks[..., :4].reshape(*blocks.shape[:2], 2, 2)
    factors = bitcast_convert_type(factors, jnp.float16).astype(jnp.float32)
    steps, lows = _six_bits(blocks[..., 4:16])
    scale = factors[..., :1] * steps
    low = -factors[..., 1:] * lows
    pairs = blocks[..., 16:].reshape(*blocks.shape[:2], _SUPER // _GROUP // 2, 1, _GROUP)
    codes = jnp.concatenate([pairs & 15, pairs >> 4], axis=3).reshape(len(rows), -1, 2, _GROUP // 2)
    return Packed(
        _block_codes(codes[:, :, 0] | codes[:, :, 1] << 4),
        scale.reshape(len(rows), -1).T,
        lows=low.reshape(len(rows), -1).T,
    )


def _six_bits(packed: Array) -> tuple[Array, Array]:
    """[..., 12] bytes of Q4_K -> (steps [..., 8], lows [..., 8]), 0..63 as float32.

    The first four are low bits of bytes 0..3 and 4..7; the last four are halves of bytes 8..11
    under the two highest bits of the bytes before.
    """
    first, second, third = (packed[..., i : i + 4] for i in (0, 4, 8))
    steps = jnp.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    lows = jnp.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return steps.astype(jnp.float32), lows.astype(jnp.float32)


def _blocks(rows: Array, size: int) -> Array:
    """uint8 [O, bytes] -> [O, blocks, size]."""
    return rows.reshape(len(rows), -1, size)


def _block_codes(codes: Array) -> Array:
    """Bytes [O, G, 16], a group's inputs j and j + 16 in each -> uint8 [I // 2, O]."""
    return codes.reshape(len(codes), -1).T


def _float16(pairs: Array) -> Array:
    """Bytes [O, G, 2] -> float16 [G, O]."""
    return bitcast_convert_type(pairs, jnp.float16).T


@partial(jax.jit, static_argnames="zero_offset")
def _gptq(words: Array, scales: Array, zero_words: Array, zero_offset: int) -> Packed:
    """GPTQ: words int32 [I / 8, O]; scales [G, O]; zero_words int32 [G, O / 8]."""
    codes = _nibbles(words).transpose(0, 2, 1).reshape(-1, words.shape[1])
    zeros = _nibbles(zero_words).reshape(len(zero_words), -1) + zero_offset
    return _grouped(codes, scales, zeros)


#: GPTQ's layout by what has to be added to the stored zero points.
GPTQ = {offset: partial(_gptq, zero_offset=offset) for offset in (0, 1)}


@jax.jit
def awq(words: Array, scales: Array, zero_words: Array) -> Packed:
    """AWQ (gemm): words int32 [I, O / 8]; scales [G, O]; zero_words int32 [G, O / 8]."""
    return _grouped(_awq_numbers(words), scales, _awq_numbers(zero_words))


def _awq_numbers(words: Array) -> Array:
    """int32 [N, O / 8] -> uint8 [N, O]."""
    back = jnp.argsort(jnp.array(_AWQ_ORDER))
    return _nibbles(words)[..., back].reshape(len(words), -1)


@jax.jit
def packed_rows(words: Array, scales: Array, zero_words: Array | None = None) -> Packed:
    """compressed-tensors: words int32 [O, I / 8]; scales [O, G]; zero_words int32 [O / 8, G] or
    None.
    """
    codes = _nibbles(words).reshape(len(words), -1).T
    zeros = None
    if zero_words is not None:
        zeros = _nibbles(zero_words).transpose(0, 2, 1).reshape(-1, zero_words.shape[1]).T
    return _grouped(codes, scales.T, zeros)


@jax.jit
def eight_bits(weights: Array, scale: Array) -> Packed:
    """int8 or fp8 numbers [O, I] with a scale for the matrix or for each output."""
    return Packed(weights.T, jnp.broadcast_to(scale.astype(jnp.float32).ravel(), len(weights)))


@jax.jit
def mxfp4(blocks: Array, scales: Array) -> Packed:
    """MXFP4: blocks uint8 [O, I / 32, 16], of two inputs each byte; scales uint8 [O, I / 32]."""
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:2], 2, -1)
    return Packed(_block_codes(codes[:, :, 0] | codes[:, :, 1] << 4), scales.T)


@jax.jit
def gguf_mxfp4(rows: Array) -> Packed:
    """GGUF MXFP4, uint8 [O, I / 32 * 17]: 32 inputs have an exponent and 16 bytes."""
    blocks = _blocks(rows, 17)
    return Packed(_block_codes(blocks[..., 1:]), blocks[..., 0].T)


def _nibbles(words: Array) -> Array:
    """int32 [...] -> uint8 [..., 8], the lowest bits first."""
    words = bitcast_convert_type(words, jnp.uint32)
    return (words[..., None] >> jnp.arange(0, 32, 4, dtype=jnp.uint32) & 15).astype(jnp.uint8)


def _grouped(codes: Array, scales: Array, zeros: Array | None) -> Packed:
    """Codes uint8 [I, O], scales and zeros [G, O] -> int4; one group for all inputs is divided."""
    if len(scales) == 1 and len(codes) > WHOLE_GROUP:
        times = len(codes) // WHOLE_GROUP
        scales = jnp.repeat(scales, times, 0)
        if zeros is not None:
            zeros = jnp.repeat(zeros, times, 0)
    halves = codes.reshape(len(scales), 2, -1, codes.shape[1])
    return Packed((halves[:, 0] | halves[:, 1] << 4).reshape(-1, codes.shape[1]), scales, zeros)


@dataclass(frozen=True)
class Regrouped:
    """A layout of 4-bit codes, and then its groups of inputs in another order."""

    lay_out: Callable[..., Packed]
    #: The stored group that stands at each place.
    groups: tuple[int, ...]

    def __call__(self, *tensors: Array) -> Packed:
        order = np.array(self.groups)

        def moved(array: Array) -> Array:
            return array.reshape(len(order), -1, array.shape[1])[order].reshape(array.shape)

        return jax.tree.map(moved, self.lay_out(*tensors))


def alike(parts: list[Packed]) -> list[Packed] | None:
    """Matrices of the same inputs made to lie side by side; None if they are packed differently."""
    if any(part.lows is not None for part in parts):
        parts = [_with_lows(part) for part in parts]
    if len(set(map(_describe, parts))) > 1:
        return None
    return parts


@jax.jit
def join(parts: list[Packed]) -> Packed:
    """Matrices that can lie side by side, as one."""
    same = alike(parts)
    assert same is not None
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=-1), *same)


def _with_lows(part: Packed) -> Packed:
    """int4 without zero points as int4 with lows (-8 steps, exact), else the same."""
    if part.scheme != "int4" or part.zeros is not None or part.lows is not None:
        return part
    return part._replace(lows=-Int4.middle * part.scale)


def _describe(part: Packed) -> tuple[object, ...]:
    """Properties that two matrices must share to lie side by side."""
    return tuple(None if array is None else (array.dtype, array.shape[:-1]) for array in part)
