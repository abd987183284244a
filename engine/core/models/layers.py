"""Layers shared by all models: every norm of the engine and every product with weights is called
from here.

Axes: T tokens, E embed, F feed-forward, I and O any input and output size. dtype in equals dtype
out; sums and norms are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from jitney.engine.core.models.adapters import Adapters
from jitney.engine.core.models.quantization import Packed
from jitney.engine.core.models.sharding import TENSOR, laid_out_anew
from jitney.engine.core.weights.checkpoints.model_config import Activation, ModelConfig
from jitney.kernels.experts import gate
from jitney.kernels.interface import AttentionMeta, Kernels, Pack
from jitney.kernels.partial_sums import PartialSums
from jitney.kernels.w8a8 import Fp8, RoundedRows

#: Fewest rows for which a product that is summed over devices is computed in two halves: from here
#: on half of the outputs take longer to send than a transfer takes to start.
_ROWS_IN_HALVES = 256
#: The most axes of an unpacked matrix: those of separate experts, [X, I, O].
_FLAT = 3
#: Array sizes up to which this many random numbers are drawn; most tiny models need no more.
_DRAWN = (1 << 15, 1 << 17)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], spread: float, dtype: DTypeLike) -> Array:
    """Random weights, drawn in float32 whatever the dtype: a bfloat16 model is the float32 one,
    rounded.
    """
    key, count = rngs.params(), math.prod(shape)
    enough = next((size for size in _DRAWN if size >= count), None)
    if enough is None or isinstance(key, Tracer):
        return (spread * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
    # A key's first numbers do not depend on how many are drawn, so two programs serve all small
    # arrays: compiling one for each shape would take seconds of a tiny model's start.
    drawn = np.asarray(jax.random.normal(key, (enough,), jnp.float32))[:count]
    return jnp.asarray((np.float32(spread) * drawn).astype(dtype).reshape(shape))


class Layer(nnx.Module):
    """A part of a model. Its matrices are those of its own parts, and are packed with them."""

    def _parts(self) -> Iterator[Layer]:
        for _, child in nnx.iter_children(self):
            for part in child if isinstance(child, nnx.List) else (child,):
                if isinstance(part, Layer):
                    yield part

    def linears(self) -> Iterator[Linear]:
        """Every matrix that may be quantised, in one order."""
        for part in self._parts():
            yield from part.linears()

    def pack(self, kernels: Kernels) -> None:
        """Pack the matrices in the layout that the kernel set multiplies fastest; this is the last
        change to a model's weights.
        """
        for part in self._parts():
            part.pack(kernels)

    def pack_shares(self, kernels: Kernels, mesh: Mesh) -> None:
        """Pack a model that is split over devices; see `Linear.pack_shares`."""
        for linear in self.linears():
            linear.pack_shares(kernels, mesh)


class Linear(Layer):
    """A matrix [I, O] in one of the schemes of `jitney.engine.core.models.quantization`, and bias
    [O] or None.

    kernel, scale, zeros, lows: the arrays of `Packed`; `set_matrix` replaces them. summed: the
    inputs are split over devices, so the products are summed over them (in x's dtype) before the
    bias. activation: of the first matrix of an MLP, see `gated`. adapters: added to the products,
    before the bias, for rows that use an adapter; None: no adapters.
    """

    def __init__(
        self,
        size_in: int,
        size_out: int,
        *,
        bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        summed: bool = False,
        activation: Activation | None = None,
    ):
        self.summed = summed
        self.activation: Activation | None = activation
        # Keeps random models lively: the top two logits stay well apart.
        spread = 1.5 / math.sqrt(size_in)
        self.kernel = nnx.Param(normal(rngs, (size_in, size_out), spread, dtype))
        self.scale: nnx.Param | None = None
        self.zeros: nnx.Param | None = None
        self.lows: nnx.Param | None = None
        if bias:
            self.bias = nnx.Param(normal(rngs, (size_out,), 0.25, dtype))
        else:
            self.bias = None
        self.adapters: Adapters | None = None

    def __call__(
        self,
        x: Array | RoundedRows,
        kernels: Kernels,
        dtype: DTypeLike | None = None,
        *,
        adapted: Array | None = None,
    ) -> Array:
        """x [T, I] -> [T, O] in `dtype` (x's own if None). adapted: see
        `jitney.kernels.interface.AttentionMeta`.
        """
        dtype = dtype or x.dtype
        if self.summed:
            y = self._sum(x, kernels, adapted)
        elif self.bias is None:
            return self._product(x, kernels, dtype, adapted)
        else:
            y = self._product(x, kernels, jnp.float32, adapted)
        if self.bias is not None:
            y = y.astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return y.astype(dtype)

    def _product(
        self, x: Array | RoundedRows, kernels: Kernels, dtype: DTypeLike, adapted: Array | None
    ) -> Array:
        """The products [T, O] in `dtype`, with adapters added."""
        if self.adapters is None or adapted is None:
            return self.packed.product(x, kernels, dtype)
        assert not isinstance(x, RoundedRows)
        y = self.packed.product(x, kernels)
        return (y + self.adapters(x, adapted, kernels)).astype(dtype)

    def in_parts(
        self, x: Array | RoundedRows, kernels: Kernels, adapted: Array | None
    ) -> Array | PartialSums:
        """See `__call__`; the result may be in parts if nothing is added to the product."""
        parts = None
        if not self.summed and self.bias is None and self.adapters is None:
            parts = self.packed.in_parts(x, kernels)
        return self(x, kernels, adapted=adapted) if parts is None else parts

    def _sum(self, x: Array | RoundedRows, kernels: Kernels, adapted: Array | None) -> Array:
        """The sum of all devices' products: [T, O] in x's dtype."""
        if self.adapters is not None:
            return TENSOR.total(self._product(x, kernels, x.dtype, adapted))
        packed = self.packed
        halves = kernels.sums_in_halves and packed.halves_along_outputs
        if not halves or x.shape[0] < _ROWS_IN_HALVES:
            return TENSOR.total(packed.product(x, kernels, x.dtype))
        sums = [TENSOR.total(half.product(x, kernels, x.dtype)) for half in packed.output_halves()]
        return jnp.concatenate(sums, axis=1)

    def takes_rounded(self, kernels: Kernels) -> bool:
        """Whether the kernels may round the rows of this product in advance."""
        rounds = kernels.rounding is not None and self.adapters is None
        return rounds and self.packed.scheme == "fp8"

    def gated(
        self,
        x: Array | RoundedRows,
        kernels: Kernels,
        adapted: Array | None = None,
        *,
        rounded: bool = False,
    ) -> Array | RoundedRows:
        """x [T, I] -> [T, O // 2] in x's dtype: the activation of the gates (the first half of the
        outputs) times the ups. For an activation without gates, the activation of all outputs.
        rounded: whether the result may be rounded, see `takes_rounded`.
        """
        assert self.activation is not None
        if self.bias is None and self.adapters is None:
            rounding = kernels.rounding
            opens = self.activation == "silu" and self.packed.scheme == "fp8"
            if rounded and opens and rounding is not None:
                return rounding.gated(x, Fp8(self.packed.kernel, self.packed.scale))
            return self.packed.gated(x, self.activation, kernels)
        dtype = x.dtype if kernels.narrow_gates else jnp.float32
        both = self(x, kernels, dtype, adapted=adapted)
        return gate(both, x.dtype, self.activation)

    @property
    def gated_by_kernel(self) -> bool:
        """Whether `gated` uses the kernel set's fused kernel, if it has one for this scheme: for
        silu, if nothing is added to the products.
        """
        opens = self.activation == "silu" and self.bias is None and self.adapters is None
        return opens and self.packed.scheme != "mxfp4"

    @property
    def sizes(self) -> tuple[int, int]:
        """(I, O) over all devices; not for a packed matrix."""
        size_in, size_out = self.kernel.shape
        if self.packed.in_four_bits:
            size_in *= 2
        return size_in, size_out

    @property
    def in_panels(self) -> bool:
        """Whether the matrix is packed for a CPU's kernels, for products of any number of rows."""
        return self.kernel.ndim > _FLAT

    def linears(self) -> Iterator[Linear]:
        """The matrix itself."""
        yield self

    def pack(self, kernels: Kernels) -> None:
        """Lay the matrix out as the kernel set multiplies it fastest."""
        pack = self._packed_by(kernels)
        if pack is not None:
            parts = 1 + self.gated_by_kernel
            self.kernel = nnx.Param(pack(self.kernel[...], parts))
        if self.adapters is not None:
            self.adapters.pack(kernels)

    def pack_shares(self, kernels: Kernels, mesh: Mesh) -> None:
        """Pack a matrix that is split over devices: each device packs its own share. This is done
        only if rows are rounded to fp8; other matrices stay unpacked.
        """
        if self.packed.scheme != "fp8" or kernels.fp8 is None:
            return
        before, after = PartitionSpec(None, TENSOR.name), PartitionSpec(None, TENSOR.name, None)
        if self.summed:
            before, after = PartitionSpec(TENSOR.name, None), PartitionSpec(None, None, TENSOR.name)
        pack = kernels.fp8.pack
        kernel = laid_out_anew(self.kernel[...], pack, mesh, before=before, after=after)
        self.kernel = nnx.Param(kernel)

    def _packed_by(self, kernels: Kernels) -> Pack | None:
        match self.packed.scheme:
            case "plain":
                return kernels.pack
            case "int8" if kernels.int8 is not None:
                return kernels.int8.pack
            case "fp8" if kernels.fp8 is not None:
                return kernels.fp8.pack
        return None

    @property
    def packed(self) -> Packed:
        """The matrix as it is stored; for an abstract model its shapes."""
        params = self.scale, self.zeros, self.lows
        return Packed(self.kernel.get_value(), *map(_array_of, params))

    def adapt(self, adapters: Adapters) -> None:
        """Add these adapters to the products of rows that use one of them."""
        self.adapters = nnx.data(adapters)

    def set_matrix(self, packed: Packed) -> None:
        """Replace the matrix, and with it the scheme."""
        for name, array in packed._asdict().items():
            if array is not None:
                # An attribute that is first set without arrays stays static in nnx; data() declares
                # that it may hold arrays.
                array = nnx.data(nnx.Param(array))
            setattr(self, name, array)


def _array_of(param: nnx.Param | None) -> Any:
    """The array of a weight, or its shape in an abstract model, which cannot be indexed."""
    return None if param is None else param.get_value()


class RMSNorm(nnx.Module):
    """weight [E]; x / rms(x) * weight."""

    def __init__(self, size: int, eps: float, *, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    @classmethod
    def of(cls, size: int, config: ModelConfig, dtype: DTypeLike) -> RMSNorm:
        """A norm of the model; dtype: of its other weights."""
        if config.float32_norms:
            dtype = jnp.float32
        kind = _LayerNorm if config.centred_norms else cls
        return kind(size, config.rms_eps, dtype=dtype)

    def __call__(self, x: Array, kernels: Kernels) -> Array:
        """x [..., E] -> [..., E] in x's dtype."""
        return kernels.rms_norm(x, self.weight[...], self.eps)

    def of_sum(self, x: Array, added: Array, kernels: Kernels) -> tuple[Array, Array]:
        """x and added [T, E] -> (their sum in x's dtype, the normed sum in added's dtype)."""
        return kernels.norm_sum(x, added, self.weight[...], self.eps)


class UnitNorm(nnx.Module):
    """x / rms(x) over the last axis E, without weights."""

    def __init__(self, size: int, eps: float):
        self.size = size
        self.eps = eps

    @property
    def weight(self) -> Array:
        """Ones, float32 [E], for kernels that multiply by weights."""
        return jnp.ones((self.size,), jnp.float32)

    def __call__(self, x: Array, kernels: Kernels) -> Array:
        """x [..., E] -> [..., E] in x's dtype."""
        return kernels.rms_norm(x, self.weight, self.eps)


class _LayerNorm(RMSNorm):
    """weight [E]; (x - mean(x)) / sqrt(variance(x) + eps) * weight."""

    def __call__(self, x: Array, kernels: Kernels) -> Array:
        wide = x.astype(jnp.float32)
        wide -= jnp.mean(wide, axis=-1, keepdims=True)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return rounded(wide * self.weight[...].astype(jnp.float32), x.dtype)

    def of_sum(self, x: Array, added: Array, kernels: Kernels) -> tuple[Array, Array]:
        total = rounded(x + added, x.dtype)
        return total, self(total, kernels).astype(added.dtype)


class NoNorm(nnx.Module):
    """An identity with the methods of `RMSNorm`, for layers without a norm."""

    def __call__(self, x: Array, kernels: Kernels) -> Array:
        return x

    def of_sum(self, x: Array, added: Array, kernels: Kernels) -> tuple[Array, Array]:
        """x and added [T, E] -> (their sum in x's dtype, the same sum in added's dtype).

        XLA skips the rounding if it fuses the sum with its reader, which differs from bucket to
        bucket (docs/decisions, 0033); an explicit second rounding prevents this.
        """
        total = rounded(x + added, x.dtype)
        return total, rounded(total, added.dtype)


def scaled(x: Array, factor: float) -> Array:
    """x times a factor, rounded to its dtype."""
    return rounded(x.astype(jnp.float32) * factor, x.dtype)


def rounded(x: Array, dtype: DTypeLike) -> Array:
    """Round x to a dtype, even where XLA continues in a wider one. (If x has the dtype already, XLA
    would skip a plain conversion, and the rounding before it too.)
    """
    numbers = jnp.finfo(dtype)
    wide = x.astype(jnp.float32)
    return jax.lax.reduce_precision(wide, numbers.nexp, numbers.nmant).astype(dtype)


class RowFacts(NamedTuple):
    """Facts about a feed-forward's rows; a pytree of arrays."""

    #: int32: number of rows that are not padding; None: all rows.
    count: Array | None = None
    #: int32 [T], see `jitney.kernels.interface.AttentionMeta`.
    adapted: Array | None = None
    #: int32 [engines]: the count of each engine that shares the model's experts; None: not known.
    counts: Array | None = None

    @classmethod
    def of(cls, meta: AttentionMeta) -> RowFacts:
        """The facts of all rows of a step."""
        return cls(meta.counts[2], meta.adapted, meta.row_counts)


class MLP(Layer):
    """down(activation(gate) * up), gate and up fused into one product [E, 2F]; without gates (see
    `ModelConfig.is_gated`) down(activation(up)).
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        columns = (1 + config.is_gated) * inner
        self.gate_up = Linear(
            size, columns, bias=bias, dtype=dtype, rngs=rngs, activation=config.activation
        )
        self.down = Linear(inner, size, bias=bias, dtype=dtype, rngs=rngs, summed=config.shards > 1)

    def __call__(
        self, x: Array | RoundedRows, kernels: Kernels, rows: RowFacts
    ) -> Array | PartialSums:
        """x [T, E] -> [T, E]."""
        if rows.count is not None:
            kernels = kernels.of_rows(rows.count)
        rounded = self.down.takes_rounded(kernels)
        inner = self.gate_up.gated(x, kernels, rows.adapted, rounded=rounded)
        return self.down.in_parts(inner, kernels, rows.adapted)

    def takes_rounded(self, kernels: Kernels) -> bool:
        """See `Linear.takes_rounded`."""
        return self.gate_up.takes_rounded(kernels)


class NoMLP(nnx.Module):
    """A feed-forward that adds zeros, for layers without an MLP."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        """The arguments are those of `MLP`."""

    def __call__(self, x: Array | RoundedRows, kernels: Kernels, rows: RowFacts) -> Array:
        """x [T, E] -> zeros like it."""
        return jnp.zeros(x.shape, x.dtype)

    def takes_rounded(self, kernels: Kernels) -> bool:
        """See `MLP.takes_rounded`."""
        return False
