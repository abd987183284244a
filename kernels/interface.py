"""The interface of a kernel set: the signature of each kernel for all platforms, stated once.

Axes: T token rows, S sequences in the step, P pages per sequence, H query heads, K KV heads, D head
dim, N pages in the pool. Page 0 of every pool is the trash page: padding reads it and nothing else
owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, Required, TypedDict, Unpack

import jax
import numpy as np
from jax.typing import DTypeLike

from jitney.kernels.delta_net import DeltaState, DeltaWeights, StateSlots
from jitney.kernels.experts import ExpertBlocks, Stack
from jitney.kernels.int4 import Int4, matmul_int4
from jitney.kernels.mamba import MambaWeights
from jitney.kernels.mxfp4 import Mxfp4
from jitney.kernels.partial_sums import PartialSums
from jitney.kernels.routing import Route
from jitney.kernels.w8a8 import Fp8, Int8, RoundedRows


class AttentionMeta(NamedTuple):
    """Indices of one step's attention (all int32, sliced inside jit from the one packed upload).

    Sequences with one query row (decode) come first. Rows past counts[1] are padding.
    """

    kv_lens: jax.Array  # [S] tokens of each sequence including this step's; 0 for absent sequences
    cu_q: jax.Array  # [S+1] prefix sum of query lengths; constant past the last sequence
    page_table: jax.Array  # [S, P] physical pages in order, 0 = trash
    write_rows: jax.Array  # [T] flat KV row (page * page_size + offset); N * page_size = drop
    positions: jax.Array  # [T] absolute positions
    #: [3]: number of decoding sequences, of all sequences and of all token rows. [4]: also the
    #: number of sequences after the decoding ones whose rows a CPU computes bit for bit like
    #: decode rows.
    counts: jax.Array
    #: [T] adapter number of each row, from 1; 0: none. None: the model has no adapters. Read by
    #: layers, not by kernels.
    adapted: jax.Array | None = None
    #: [engines] counts[2] of each engine that shares the experts; None: the experts are not shared.
    #: Read by layers, not by kernels.
    row_counts: jax.Array | None = None
    #: Slots from which recurrent layers read the states of sequences and to which they write them;
    #: None: all layers use pages.
    state: StateSlots | None = None
    #: [T, P] per-layer embeddings of the rows' tokens, in the activations' dtype; None: the model
    #: has none. Read by layers, not by kernels.
    layer_inputs: jax.Array | None = None
    #: (page_table, write_rows) of each cache group except the first; empty: all layers share pages.
    #: Not read by kernels.
    other_groups: tuple[tuple[jax.Array, jax.Array], ...] = ()

    def of_group(self, number: int) -> AttentionMeta:
        """The metadata for the layers of a cache group."""
        if not (number and self.other_groups):
            return self._replace(other_groups=())
        page_table, write_rows = self.other_groups[number - 1]
        return self._replace(page_table=page_table, write_rows=write_rows, other_groups=())


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of attention; all but scale may be left out."""

    #: Factor of the scores.
    scale: Required[float]
    #: > 0: a row sees the last `window` positions up to its own.
    window: int
    #: > 0: scores are softcap * tanh(score / softcap).
    softcap: float
    #: float32 [2K] or []: factors of an int8 or fp8 pool (see `jitney.kernels.scales`); without
    #: them such a pool raises ValueError.
    kv_scales: jax.Array | None
    #: float32 [H]: attention sinks, a score per head that joins the softmax of every row and has no
    #: value.
    sinks: jax.Array | None
    #: > 0: the first `value_dim` numbers of a key are its value. The pool then holds only keys, as
    #: plain floats, [N, page, K, D]; v is None, and o is [T, H, value_dim].
    value_dim: int


class _PagedAttention(Protocol):
    """Write k and v into the pages, then attend; pure; `kv` is aliased to the returned pool when
    donated.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        kv: jax.Array,
        meta: AttentionMeta,
        **options: Unpack[AttentionOptions],
    ) -> tuple[jax.Array, jax.Array]:
        """q [T, H, D], k and v [T, K, D], kv [N, page, 2K, D] -> (o [T, H, D] in q's dtype, kv).

        Row 2h of a token is key head h, row 2h + 1 value head h.
        """
        ...


class RotateAndWrite[Heads](Protocol):
    """Norm and rotate queries and keys, and write keys and values into the pages; pure; `kv` is
    aliased if donated.
    """

    def __call__(
        self,
        heads: Heads,
        rope: tuple[jax.Array, jax.Array],
        kv: jax.Array,
        meta: AttentionMeta,
        *,
        norms: tuple[jax.Array, jax.Array] | None = None,
        eps: float = 0.0,
        kv_scales: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """heads [T, H + 2K, D] (queries, keys, values), kv [N, page, 2K, D] -> (q [T, H, D] in
        heads' dtype, kv).

        rope: cos and sin, float32 [T, 1, D // 2], rotating pairs (j, j + D/2). norms: weights [D]
        of an RMS norm with `eps` over each query head, and of one over each key head, before the
        rotation.
        """
        ...


class _Attend(Protocol):
    """Attention over pages that hold the step's keys and values already; see `_PagedAttention`."""

    def __call__(
        self,
        q: jax.Array,
        kv: jax.Array,
        meta: AttentionMeta,
        **options: Unpack[AttentionOptions],
    ) -> jax.Array:
        """q [T, H, D], kv [N, page, 2K, D] -> o [T, H, D] in q's dtype."""
        ...


class Threshold(Protocol):
    """Finds the threshold of logits for top-k, then top-p of the remaining ones."""

    def __call__(self, scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
        """scaled float32 [S, V], greatest entry of each row 0; top_k int32 [S] (0: all), top_p
        float32 [S] (1: all).

        Returns the smallest kept entry, float32 [S]: entries that tie with it are kept too. -inf
        keeps all.
        """
        ...


class Pack(Protocol):
    """Packs a matrix once, when a model is loaded, for `matmul` or `gated` of the same kernel
    set.
    """

    def __call__(self, w: jax.Array, parts: int = 1) -> jax.Array:
        """w [I, O] -> the same numbers in the layout that the set multiplies fastest; parts = 2 for
        `gated`.
        """
        ...


class _Product[W](Protocol):
    """A product with weights W [I, O], summed in float32.

    Plain arrays in int8 and fp8 are widened to x's dtype during the product. With `Int8` and `Fp8`
    weights, the rows of x are rounded to the same format (see `jitney.kernels.w8a8`).
    """

    def __call__(self, x: jax.Array, w: W, /, dtype: DTypeLike = ...) -> jax.Array:
        """x [T, I] -> [T, O] in `dtype`, which is float32 unless given."""
        ...


class _GatedProduct[W](Protocol):
    """The opening product of an MLP with its gate applied, if possible without writing the float32
    sums to memory.
    """

    def __call__(self, x: jax.Array, w: W, /) -> jax.Array:
        """x [T, I], w [I, 2F] -> silu(first F columns of x @ w) * the others, [T, F] in x's
        dtype.
        """
        ...


class _Norm(Protocol):
    """RMS norm, which all models use."""

    def __call__(self, x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
        """x [..., E], weight [E] -> x / sqrt(mean(x * x) + eps) * weight, computed in float32, in
        x's dtype.
        """
        ...


class _NormSum[Added](Protocol):
    """RMS norm of a sum of two arrays; returns the sum too."""

    def __call__(
        self, x: jax.Array, added: Added, weight: jax.Array, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """x and added [T, E], weight [E] -> (x + added in x's dtype; its norm in added's)."""
        ...


class _Project(Protocol):
    """A product with the rows of a table [V, E], summed in float32."""

    def __call__(self, x: jax.Array, table: jax.Array, /) -> jax.Array:
        """x [T, E] -> float32 [T, V]."""
        ...


class _PoolShape(Protocol):
    """The shape of one device's KV pool, for kernel sets that need a shape other than [N, page,
    2K, D].
    """

    def __call__(
        self,
        n_pages: int,
        page_size: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        value_dim: int = 0,
    ) -> tuple[int, ...]:
        """The pool's shape, [N, page, rows, width]. n_pages: N; n_kv_heads and head_dim: K and D on
        one device; dtype: of the pool; value_dim: see `AttentionOptions`.
        """
        ...


def _bound(product: Callable[..., jax.Array], count: jax.Array) -> Any:
    """The product with its `count` argument bound to the number of rows."""
    return partial(product, count=count)


@dataclass(frozen=True)
class Int8Products:
    """Products of int8 weights with rows rounded to int8."""

    #: For both products: int8 [I, O] -> the matrix in the kernels' layout, or unchanged.
    pack: Pack
    matmul: _Product[Int8]
    gated: _GatedProduct[Int8]


class _Fp8Product(Protocol):
    """A product with fp8 weights, like `_Product`, of rows that may be rounded already."""

    def __call__(
        self, x: jax.Array | RoundedRows, w: Fp8, /, dtype: DTypeLike = ...
    ) -> jax.Array: ...


class _RoundedNormSum[Added](Protocol):
    """`_NormSum` with its norm rounded to fp8."""

    def __call__(
        self, x: jax.Array, added: Added, weight: jax.Array, eps: float
    ) -> tuple[jax.Array, RoundedRows]: ...


class _RoundedGatedProduct(Protocol):
    """`_GatedProduct` with its result rounded to fp8."""

    def __call__(self, x: jax.Array | RoundedRows, w: Fp8, /) -> RoundedRows: ...


@dataclass(frozen=True)
class RoundingKernels:
    """Kernels that round their results to fp8, for results that only fp8 products read."""

    norm_sum: _RoundedNormSum[jax.Array]
    gated: _RoundedGatedProduct


@dataclass(frozen=True)
class Fp8Products:
    """Products of fp8 weights with rows rounded to fp8."""

    #: float8_e4m3fn [I, O] -> [1, O, I]; unchanged in sets that need no other layout.
    pack: Pack
    matmul: _Fp8Product
    #: None: only `matmul` rounds rows.
    rounding: RoundingKernels | None = None


class _PartialProduct(Protocol):
    """A product in parts, see `jitney.kernels.partial_sums`."""

    def __call__(
        self,
        x: jax.Array | RoundedRows,
        w: jax.Array | Fp8 | Int4,
        /,
        scale: jax.Array | None = None,
    ) -> PartialSums | None:
        """x [T, I] times w [I, O] (Fp8: packed), and scale float32 [O] -> [T, O] in x's dtype;
        None: one kernel computes the whole product, since its shape or format needs no parts.
        """
        ...


@dataclass(frozen=True)
class PartialProducts:
    """Products in parts, and kernels that add the parts that they read."""

    matmul: _PartialProduct
    norm_sum: _NormSum[PartialSums]
    #: Its result is rounded as by `RoundingKernels.norm_sum`.
    rounded_norm_sum: _RoundedNormSum[PartialSums]
    #: heads: a product [T, (H + 2K) * D].
    rotate_and_write: RotateAndWrite[PartialSums]


@dataclass(frozen=True)
class Mxfp4Products:
    """Products of single matrices in MXFP4."""

    #: Packs a matrix once, when a model is loaded, or leaves it unchanged; takes `parts` as `Pack`
    #: does.
    pack: Callable[..., Mxfp4]
    matmul: _Product[Mxfp4]


class ExpertProducts(Protocol):
    """Applies the experts of a mixture to the rows routed to them, all blocks at once; axes and
    arguments as in `jitney.kernels.experts`.
    """

    def __call__(
        self, x: jax.Array, opening: Stack, closing: Stack, blocks: ExpertBlocks, activation: str, /
    ) -> jax.Array:
        """x [T, E], opening [X, E, 2F] (gates, then ups), closing [X, F, E] -> float32 [N * B, E]:
        the expert's output for each row of each block. The activation, a name of
        `jitney.kernels.experts.ACTIVATIONS`, combines gates and ups in x's dtype.

        Sums are float32. 8-bit weights are widened to x's dtype during the product; their scales
        are applied after the sum, then the biases. MXFP4 weights are widened with their scales.
        Outputs of padding rows, and of blocks from `blocks.count` on, are undefined (maybe NaN) and
        must not be read.
        """
        ...


class DeltaNet(Protocol):
    """A gated delta net without the layer's opening and closing products; axes as in
    `jitney.kernels.delta_net`. Pure; a donated state is updated in place.
    """

    def __call__(
        self,
        x: jax.Array,
        rates: jax.Array,
        weights: DeltaWeights,
        state: DeltaState,
        meta: AttentionMeta,
        *,
        eps: float,
    ) -> tuple[jax.Array, DeltaState]:
        """x [T, C + H V] (inputs of the convolution, then gates), rates float32 [T, 2 H] (write
        strengths, then decay rates) -> (o [T, H V] in x's dtype, new state).

        eps: of the RMS norm of each head's output, which the gates multiply. Padding rows of o are
        undefined.
        """
        ...


class Mamba(Protocol):
    """A Mamba-2 layer without its opening product and its gates, like `DeltaNet`; see
    `jitney.kernels.mamba.mamba`.
    """

    def __call__(
        self,
        x: jax.Array,
        weights: MambaWeights,
        state: DeltaState,
        meta: AttentionMeta,
        *,
        limits: tuple[float, float],
    ) -> tuple[jax.Array, DeltaState]:
        """x [T, C + H] (inputs of the convolution, then time steps, which are clamped to `limits`)
        -> (output of each head, float32 [T, H, V]; new state).
        """
        ...


class ShortConv(Protocol):
    """A short convolution with its gates, without the layer's opening and closing products, like
    `DeltaNet`.
    """

    def __call__(
        self, x: jax.Array, weights: jax.Array, state: DeltaState, meta: AttentionMeta
    ) -> tuple[jax.Array, DeltaState]:
        """x [T, 3 C] (gates of the convolution's input, gates of its output, values), weights
        [W, C] -> (o [T, C] in x's dtype, new state). The state has no memory.
        """
        ...


class Kernels(Protocol):
    """The kernels that a model's step uses; hashable, since they are a static argument of the
    jitted step.
    """

    @property
    def paged_attention(self) -> _PagedAttention: ...
    @property
    def rotate_and_write(self) -> RotateAndWrite[jax.Array] | None: ...
    @property
    def attend(self) -> _Attend: ...
    @property
    def threshold(self) -> Threshold | None: ...
    @property
    def rms_norm(self) -> _Norm: ...
    @property
    def norm_sum(self) -> _NormSum[jax.Array]: ...
    @property
    def pack(self) -> Pack | None: ...
    @property
    def matmul(self) -> _Product[jax.Array]: ...
    @property
    def gated(self) -> _GatedProduct[jax.Array]: ...
    @property
    def project(self) -> _Project: ...
    @property
    def pool_shape(self) -> _PoolShape | None: ...
    @property
    def table_columns(self) -> int: ...
    @property
    def scale_rows(self) -> int: ...
    @property
    def narrow_gates(self) -> bool: ...
    @property
    def sums_in_halves(self) -> bool: ...
    @property
    def float32_residual(self) -> bool: ...
    @property
    def takes_one_of(self) -> bool: ...
    def of_rows(self, count: jax.Array) -> Kernels: ...
    @property
    def matmul_int4(self) -> _Product[Int4]: ...
    @property
    def gated_int4(self) -> _GatedProduct[Int4] | None: ...
    @property
    def int8(self) -> Int8Products | None: ...
    @property
    def fp8(self) -> Fp8Products | None: ...
    @property
    def rounding(self) -> RoundingKernels | None: ...
    @property
    def parts(self) -> PartialProducts | None: ...
    @property
    def mxfp4(self) -> Mxfp4Products | None: ...
    @property
    def route(self) -> Route: ...
    @property
    def experts(self) -> ExpertProducts | None: ...
    @property
    def delta_net(self) -> DeltaNet: ...
    @property
    def mamba(self) -> Mamba: ...
    @property
    def short_conv(self) -> ShortConv: ...
    @property
    def part_seconds(self) -> Callable[[], Mapping[str, float]] | None: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OneOf:
    """One matrix of a stack, multiplied in place without a copy."""

    matrices: jax.Array  # [X, ...], each packed by the kernel set
    number: jax.Array  # int32, index in the stack

    @property
    def dtype(self) -> np.dtype:
        return self.matrices.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one of the matrices."""
        return self.matrices.shape[1:]

    @property
    def ndim(self) -> int:
        return self.matrices.ndim - 1

    def apart(self) -> jax.Array:
        """A copy of the matrix."""
        return jax.lax.dynamic_index_in_dim(self.matrices, self.number, keepdims=False)


class KernelError(ValueError):
    """A named kernel set does not exist or cannot run here."""


@dataclass(frozen=True)
class KernelSet:
    """A named implementation of every kernel that the step calls.

    `paged_attention` writes keys and values, then attends. If the set has `rotate_and_write`,
    models call it for norm, rotation and writing, then call `attend`.
    """

    name: str  # value of --kernels
    paged_attention: _PagedAttention
    #: None: the model applies norm and rotation itself, which XLA fuses well enough.
    rotate_and_write: RotateAndWrite[jax.Array] | None
    attend: _Attend
    matmul_int4: _Product[Int4]
    #: None: the sampler's own search is faster on this platform.
    threshold: Threshold | None
    #: The norm of rows; the norm of a sum, returned with the sum.
    rms_norm: _Norm
    norm_sum: _NormSum[jax.Array]
    #: None: weights stay [I, O].
    pack: Pack | None
    #: Products with a weight matrix; with gates; with the output head.
    matmul: _Product[jax.Array]
    gated: _GatedProduct[jax.Array]
    project: _Project
    #: The choice of a mixture's experts.
    route: Route
    #: Kernels of recurrent layers.
    delta_net: DeltaNet
    mamba: Mamba
    short_conv: ShortConv
    #: None: [N, page, 2K, D].
    pool_shape: _PoolShape | None = None
    #: The columns of an embedding table are padded to a multiple of this. A TPU stores a table
    #: transposed if its rows are not whole vectors, and would transpose it back in every step to
    #: read its rows.
    table_columns: int = 1
    #: The rows of MXFP4 experts' scales, once stored separately, are padded to a multiple of this,
    #: for the same reason: a TPU would transpose the scales of all experts in every step.
    scale_rows: int = 1
    #: None: the gate is applied after `matmul_int4`.
    gated_int4: _GatedProduct[Int4] | None = None
    #: None: `matmul` widens int8 weights to the rows' dtype.
    int8: Int8Products | None = None
    #: None: `matmul` widens fp8 weights to the rows' dtype.
    fp8: Fp8Products | None = None
    #: None: each product is computed as a whole.
    parts: PartialProducts | None = None
    #: None: an MXFP4 matrix that is multiplied outside `experts` is widened first.
    mxfp4: Mxfp4Products | None = None
    #: None: the other products multiply a mixture's experts, one block after another. Otherwise the
    #: experts stay [X, I, O], except int4 experts, which are still multiplied block by block.
    experts: ExpertProducts | None = None
    #: True if the gates of an MLP are written to memory in the activations' dtype (half the bytes
    #: of float32), since no kernel applies them inside the product.
    narrow_gates: bool = False
    #: True if products of many rows that are summed over devices are computed in two halves of
    #: their outputs, so that the first half is communicated while the second is computed.
    sums_in_halves: bool = False
    #: True if a model adds up its layers' results in float32, whatever the activations' dtype.
    #: Log-probabilities of the default model (root mean square of the 20 likeliest) are 0.050 from
    #: those in float32; rounded to bfloat16 after each of 60 additions they are 0.092 from them.
    float32_residual: bool = False
    #: True if `matmul`, `gated` and the int8 and MXFP4 products accept a `OneOf` as weights.
    takes_one_of: bool = False
    #: True if these products also accept `count`, int32: rows from `count` on are padding, whose
    #: results are 0 or those of ordinary rows. False if all rows of a shape are always computed.
    leaves_out_padding: bool = False
    #: Seconds that this process has spent in the kernels of each part of a step, by part; None: not
    #: measured.
    part_seconds: Callable[[], Mapping[str, float]] | None = None
    #: Instructions that the kernels were compiled for, if there are several: "avx512_bf16".
    instructions: str = ""
    #: True if the kernels were never compared with the reference on a CPU of this kind.
    untried: bool = False
    #: The set to use instead if a kernel of this one fails the proof and the user did not name it;
    #: None: the reference replaces that kernel only.
    instead: KernelSet | None = None

    @property
    def label(self) -> str:
        """The name with its instructions, such as "native (avx512_bf16)"."""
        return f"{self.name} ({self.instructions})" if self.instructions else self.name

    def of_rows(self, count: jax.Array) -> KernelSet:
        """The set for a step whose rows from `count` on are padding; it leaves out their products
        if it can. Use it only inside the traced function, not as an argument of another one.
        """
        if not self.leaves_out_padding:
            return self
        int8 = self.int8
        if int8 is not None:
            int8 = replace(
                int8,
                matmul=_bound(int8.matmul, count),
                gated=_bound(int8.gated, count),
            )
        mxfp4 = self.mxfp4
        if mxfp4 is not None:
            mxfp4 = replace(mxfp4, matmul=_bound(mxfp4.matmul, count))
        return replace(
            self,
            matmul=_bound(self.matmul, count),
            gated=_bound(self.gated, count),
            int8=int8,
            mxfp4=mxfp4,
        )

    @property
    def rounding(self) -> RoundingKernels | None:
        """The kernels that round rows for fp8 products; None: there are none."""
        return None if self.fp8 is None else self.fp8.rounding

    @property
    def multiplies_int4(self) -> bool:
        """False where an int4 product writes the weights out as floats first."""
        return self.matmul_int4 is not matmul_int4
