"""Storage schemes of a linear layer's matrix: plain, 8 bits with a scale per output channel, or 4
bits with a scale per group or block of inputs.

Axes: T tokens, I inputs, O outputs, R inputs per group. The arrays determine the scheme: a layer
holds a `Packed`, and the functions here make it from floats, multiply with it and convert it back.
int8 and fp8 (e4m3) apply their scale after the product, so that XLA fuses the conversion into it,
unless the kernel set multiplies int8 or fp8 itself. int4 and mxfp4 have scales within the sum, so
they need kernels for their products.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jitney.engine.common.errors import ConfigError
from jitney.engine.core.weights.checkpoints.model_config import Activation
from jitney.kernels.experts import gate
from jitney.kernels.int4 import Int4
from jitney.kernels.interface import Kernels
from jitney.kernels.mxfp4 import Mxfp4, matmul_mxfp4
from jitney.kernels.partial_sums import PartialSums
from jitney.kernels.w8a8 import Fp8, Int8, RoundedRows

#: Storage and largest magnitude of the schemes with one scale per output.
_EIGHT_BITS = {"int8": (jnp.dtype(jnp.int8), 127.0), "fp8": (jnp.dtype(jnp.float8_e4m3fn), 448.0)}
#: Schemes by the dtype of the stored matrix.
_SCHEMES_STORED = {jnp.dtype(jnp.uint8): "int4"} | {
    dtype: name for name, (dtype, _) in _EIGHT_BITS.items()
}
#: Storage of quantised KV pools, by name.
KV_TYPES = {"int8": jnp.dtype(jnp.int8), "fp8": jnp.dtype(jnp.float8_e4m3fn)}


class Packed(NamedTuple):
    """A weight matrix [I, O] in one of the schemes; a pytree of arrays.

    Nibble n of int4 means (n - zero) * scale, or n * scale + low; with neither, (n - 8) * scale.
    Some checkpoints are stored in mxfp4 (`kernels.mxfp4`); it cannot be chosen.
    """

    #: Names of the schemes that can be chosen; plain is the model's own dtype.
    schemes = ("plain", "int8", "fp8", "int4")

    #: plain, int8, fp8: [I, O] in that type, or as the kernel set packed it; int4, mxfp4: uint8
    #: [I // 2, O] as in `kernels.int4.Int4` and `kernels.mxfp4.Mxfp4`.
    kernel: Any
    #: int8, fp8: float32 [O]; int4: floating [I // R, O]; mxfp4: uint8 [I // 32, O]; plain: None.
    scale: Any = None
    #: int4: uint8 [I // R, O], or None.
    zeros: Any = None
    #: int4: floating [I // R, O], or None.
    lows: Any = None

    @property
    def scheme(self) -> str:
        """One of `schemes`, or mxfp4."""
        scheme = _SCHEMES_STORED.get(jnp.dtype(self.kernel.dtype), "plain")
        return "mxfp4" if scheme == "int4" and self.scale.dtype == jnp.uint8 else scheme

    @property
    def in_four_bits(self) -> bool:
        """Whether a byte of the matrix holds two weights."""
        return self.scheme in ("int4", "mxfp4")

    @property
    def halves_along_outputs(self) -> bool:
        """Whether `output_halves` costs nothing. It does in 4 bits, whose kernels would need
        copies, and if a half is not a multiple of 128 columns.
        """
        return not self.in_four_bits and self.kernel.shape[1] % 256 == 0

    def output_halves(self) -> tuple[Packed, Packed]:
        """Split the matrix into two halves [I, O // 2]; not for schemes of 4 bits."""
        middle = self.kernel.shape[1] // 2
        first, second = jnp.split(self.kernel, [middle], axis=1)
        if self.scale is None:
            return Packed(first), Packed(second)
        scales = jnp.split(self.scale, [middle])
        return Packed(first, scales[0]), Packed(second, scales[1])

    def product(
        self, x: Array | RoundedRows, kernels: Kernels, dtype: DTypeLike = jnp.float32
    ) -> Array:
        """x [T, I] times the matrix -> [T, O] in `dtype`, summed and scaled in float32."""
        if self.scheme == "fp8" and kernels.fp8 is not None:
            return kernels.fp8.matmul(x, Fp8(self.kernel, self.scale), dtype)
        assert not isinstance(x, RoundedRows)
        if self.scale is None:
            return kernels.matmul(x, self.kernel, dtype)
        if self.scheme == "int8" and kernels.int8 is not None:
            return kernels.int8.matmul(x, Int8(self.kernel, self.scale), dtype)
        if self.scheme == "mxfp4":
            multiply = matmul_mxfp4 if kernels.mxfp4 is None else kernels.mxfp4.matmul
            return multiply(x, Mxfp4(self.kernel, self.scale), dtype)
        if self.scheme != "int4":
            return (kernels.matmul(x, self.kernel) * self.scale).astype(dtype)
        weights = Int4(self.kernel, self.scale, self.zeros)
        if self.lows is None:
            return kernels.matmul_int4(x, weights, dtype)
        return (kernels.matmul_int4(x, weights) + _low_product(x, self)).astype(dtype)

    def in_parts(self, x: Array | RoundedRows, kernels: Kernels) -> PartialSums | None:
        """`product` in x's dtype, in parts; None if the kernel set computes it as a whole."""
        multiply = None if kernels.parts is None else kernels.parts.matmul
        match self.scheme:
            case _ if multiply is None:
                return None
            case "plain":
                return multiply(x, self.kernel)
            case "fp8" if kernels.fp8 is not None:
                return multiply(x, Fp8(self.kernel, self.scale))
            case "int8" if kernels.int8 is None:
                return multiply(x, self.kernel, self.scale)
            case "int4" if self.lows is None:
                return multiply(x, Int4(self.kernel, self.scale, self.zeros))
        return None

    def gated(self, x: Array | RoundedRows, activation: Activation, kernels: Kernels) -> Array:
        """x [T, I] times the matrix, then the activation of the gates (the first half of the
        outputs) times the ups -> [T, O // 2] in x's dtype. One kernel does this if the kernel set
        has it for this scheme.
        """
        if activation == "silu" and not isinstance(x, RoundedRows):
            if self.scheme == "plain":
                return kernels.gated(x, self.kernel)
            if self.scheme == "int8" and kernels.int8 is not None:
                return kernels.int8.gated(x, Int8(self.kernel, self.scale))
            if self.scheme == "int4" and self.lows is None and kernels.gated_int4 is not None:
                return kernels.gated_int4(x, Int4(self.kernel, self.scale, self.zeros))
        both = self.product(x, kernels, x.dtype if kernels.narrow_gates else jnp.float32)
        return gate(both, x.dtype, activation)


def _low_product(x: Array, packed: Packed) -> Array:
    """Adds `lows` to a product that took nibbles as n - 8: the sum of x over each group times
    (low + 8 * scale).

    Two products: XLA reads float16 within each, but would write out the sum of the two arrays in
    float32 first.
    """
    sums = jnp.sum(x.astype(jnp.float32).reshape(x.shape[0], packed.scale.shape[0], -1), axis=-1)
    low = jnp.matmul(sums, packed.lows.astype(jnp.float32))
    step = jnp.matmul(sums, packed.scale.astype(jnp.float32))
    return low + Int4.middle * step


@jax.jit
def widened(packed: Packed) -> Array:
    """The matrix as float32 [I, O]."""
    if packed.scheme == "mxfp4":
        return Mxfp4(packed.kernel, packed.scale).unpacked()
    if packed.scheme == "int4":
        wide = Int4(packed.kernel, packed.scale, packed.zeros).unpacked()
        if packed.lows is None:
            return wide
        groups = wide.reshape(packed.scale.shape[0], -1, wide.shape[1])
        lows = packed.lows.astype(jnp.float32) + Int4.middle * packed.scale.astype(jnp.float32)
        return (groups + lows[:, None]).reshape(wide.shape)
    wide = packed.kernel.astype(jnp.float32)
    if packed.scale is None:
        return wide
    return wide * packed.scale


@partial(jax.jit, static_argnames=("scheme", "dtype", "group"))
def quantise(
    weights: Array, *, scheme: str, dtype: DTypeLike, group: int = 0, most: Array | None = None
) -> Packed:
    """Quantise floats [I, O] to a scheme, rounded to nearest; plain: convert to dtype. group: R of
    int4, 0 for the largest that fits. most: `greatest` of the whole matrix, if `weights` are only
    some of its inputs.

    Raises ConfigError if no group size divides I.
    """
    match scheme:
        case "plain":
            return Packed(weights.astype(dtype))
        case "int4":
            return _quantise_int4(weights, group or group_size(weights.shape[0]))
        case "mxfp4":
            return Packed(*Mxfp4.rounded(weights))
    return _quantise_eight_bits(weights, *_EIGHT_BITS[scheme], most)


def greatest(weights: Array) -> Array:
    """The largest magnitude of each output of floats [I, O], float32 [O]."""
    return jnp.max(jnp.abs(weights.astype(jnp.float32)), axis=0)


def group_size(size_in: int) -> int:
    """The largest group that divides `size_in` inputs; ConfigError if none does."""
    for size in sorted(Int4.group_sizes, reverse=True):
        if size_in % size == 0:
            return size
    raise ConfigError(
        f"weights int4 need layers whose inputs divide by {min(Int4.group_sizes)}; this model has "
        f"one with {size_in}: use int8 or fp8"
    )


def _quantise_eight_bits(
    weights: Array, dtype: DTypeLike, limit: float, most: Array | None
) -> Packed:
    """Quantise [I, O], with the largest magnitude of each output mapped to `limit`."""
    wide = weights.astype(jnp.float32)
    scale = (greatest(weights) if most is None else most) / limit
    scale = jnp.where(scale > 0, scale, 1.0)
    steps = jnp.clip(wide / scale, -limit, limit)
    if dtype == jnp.int8:
        steps = jnp.rint(steps)
    return Packed(steps.astype(dtype), scale)


def _quantise_int4(weights: Array, group: int) -> Packed:
    """Quantise [I, O] to 16 levels per group and output, which span the group's range and include
    0.

    Scales are float16, and codes are chosen for the scale as stored. (Clipping the ends of a
    group's range for finer steps, by least squares, gave SmolLM2-135M no better answers:
    docs/benchmarks/perplexity.py.)
    """
    groups = weights.astype(jnp.float32).reshape(-1, group, weights.shape[1])
    low, high = jnp.minimum(groups.min(1), 0.0), jnp.maximum(groups.max(1), 0.0)
    scale = ((high - low) / 15).astype(jnp.float16)
    step = jnp.where(scale > 0, scale, 1.0).astype(jnp.float32)
    zeros = jnp.clip(jnp.rint(-low / step), 0, 15)
    codes = jnp.clip(jnp.rint(groups / step[:, None]) + zeros[:, None], 0, 15).astype(jnp.uint8)
    return Packed(_nibbles(codes), scale, zeros.astype(jnp.uint8))


def _nibbles(codes: Array) -> Array:
    """Pack codes uint8 [I // R, R, O] -> [I // 2, O], with the second half of each group in the
    high nibbles.
    """
    groups, group, outputs = codes.shape
    halves = codes.reshape(groups, 2, group // 2, outputs)
    return (halves[:, 0] | halves[:, 1] << 4).reshape(-1, outputs)
