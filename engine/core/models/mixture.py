"""Mixtures of experts (Shazeer et al. 2017, arXiv 1701.06538): Qwen3's, Mixtral and gpt-oss.

A layer has many feed-forwards of the same shape, its experts, and a router chooses a few of them
for each row. Rows are sorted by expert, and multiplied in blocks of one expert each: an expert that
no row chose is not read, and padding rows cost nothing. If the kernel set has a kernel for it, all
blocks are multiplied at once; else one after the other. The outputs of a row's experts are added in
the order of its own choices, so with a kernel set whose products of a row depend only on that row,
the result does not depend on the other rows of the step.

Axes: T rows, E embed, F an expert's feed-forward, X experts, C those that a row goes through, N
blocks, B rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from jitney.engine.core.models.layers import MLP, Linear, RowFacts, normal, rounded
from jitney.engine.core.models.llama import Block, Llama
from jitney.engine.core.models.quantization import Packed
from jitney.engine.core.models.sharding import DATA, TENSOR, experts_axes, laid_out_anew
from jitney.engine.core.weights.checkpoints.model_config import Activation, ModelConfig
from jitney.engine.core.weights.checkpoints.names import GGUF, HF, Dialect, FileFormat
from jitney.kernels.experts import Stack, gate
from jitney.kernels.interface import Kernels, OneOf, Pack
from jitney.kernels.mxfp4 import Mxfp4
from jitney.kernels.partial_sums import PartialSums, whole
from jitney.kernels.routing import Routes
from jitney.kernels.w8a8 import RoundedRows

#: A router's columns are padded to a multiple of this, as kernels for products need.
_COLUMNS = 16
_MIXTRAL = replace(
    HF,
    router="block_sparse_moe.gate",
    expert_gate="block_sparse_moe.experts.{e}.w1",
    expert_up="block_sparse_moe.experts.{e}.w3",
    expert_down="block_sparse_moe.experts.{e}.w2",
)
#: Names of Hugging Face's folders, by architecture.
_DIALECTS = {
    "Qwen3MoeForCausalLM": HF,
    "MixtralForCausalLM": _MIXTRAL,
    "GptOssForCausalLM": replace(HF, sinks="self_attn.sinks", router="mlp.router"),
}
#: Names of GGUF files, by architecture.
_GGUF = {
    "Qwen3MoeForCausalLM": GGUF,
    "MixtralForCausalLM": replace(GGUF, paired_rows=True),
    "GptOssForCausalLM": replace(GGUF, sinks="attn_sinks.weight", mlp_norm="post_attention_norm"),
}


class ExpertLinear(Linear):
    """The matrices [I, O] of X experts. They are side by side, [I, X * O], when loaded and
    quantised; after packing they are separate, [X, ...], and so are the scales of mxfp4. Biases
    stay side by side, [X * O].
    """

    def __init__(
        self,
        n_experts: int,
        size_in: int,
        size_out: int,
        *,
        bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        summed: bool = False,
        activation: Activation | None = None,
        group_size: int = 1,
    ):
        """group_size: number of devices whose products with the matrices are summed."""
        super().__init__(
            size_in,
            n_experts * size_out,
            bias=bias,
            dtype=dtype,
            rngs=rngs,
            summed=summed,
            activation=activation,
        )
        self.n_experts = n_experts
        self.group_size = group_size

    @property
    def _apart(self) -> bool:
        """Whether the matrices are separate."""
        return self.kernel.ndim > 2

    def of(self, expert: Array, kernels: Kernels) -> Packed:
        """The matrix of expert number `expert`, int32; without a copy if the kernel set can read
        one matrix of a stack.
        """

        def part(array: Array) -> Array:
            size = array.shape[-1] // self.n_experts
            return jax.lax.dynamic_slice_in_dim(array, expert * size, size, axis=-1)

        def one(array: Array) -> Any:
            among = OneOf(array, expert)
            return among if where_it_lies else among.apart()

        packed = self.packed
        if not self._apart:
            return jax.tree.map(part, packed)
        where_it_lies = kernels.takes_one_of and packed.scheme != "int4"
        if packed.scheme == "mxfp4":
            where_it_lies = where_it_lies and kernels.mxfp4 is not None
            return Packed(one(packed.kernel), one(packed.scale))
        rest = jax.tree.map(part, packed._replace(kernel=None))
        return rest._replace(kernel=one(packed.kernel))

    def with_bias(self, sums: Array, expert: Array) -> Array:
        """Add one expert's bias to the products with its matrix, float32 [B, O]."""
        if self._biases is None:
            return sums
        own = jax.lax.dynamic_index_in_dim(self._biases, expert, keepdims=False)
        return sums + own.astype(jnp.float32)

    @property
    def _biases(self) -> Array | None:
        """The biases [X, O] that this device adds. If a group of devices sums its products, only
        the first device adds biases.
        """
        if self.bias is None:
            return None
        biases = self.bias[...].reshape(self.n_experts, -1)
        if self.group_size == 1:
            return biases
        return jnp.where(TENSOR.number() % self.group_size == 0, biases, 0)

    def at_once(self, kernels: Kernels) -> bool:
        """Whether the kernel set multiplies all blocks at once with matrices of this scheme."""
        return kernels.experts is not None and self.packed.scheme != "int4"

    @property
    def stack(self) -> Stack:
        """All matrices, separate, for kernels that multiply all blocks at once."""
        scale = self.packed.scale
        arrays = self._to_set_apart
        if not self._apart:
            arrays = _set_apart(arrays, self.n_experts, None, 1)
        if arrays.scales is not None:
            scale = arrays.scales
        elif scale is not None:
            scale = scale.reshape(self.n_experts, -1)
        return Stack(arrays.packed, scale, self._biases)

    @property
    def _to_set_apart(self) -> Mxfp4:
        """The matrices, and the scales of mxfp4, which have the same layout; else None."""
        packed = self.packed
        return Mxfp4(packed.kernel, packed.scale if packed.scheme == "mxfp4" else None)

    def _replace_apart(self, arrays: Mxfp4) -> None:
        """Replace the matrices, and scales if any, by these arrays."""
        self.kernel = nnx.Param(arrays.packed)
        if arrays.scales is not None:
            self.scale = nnx.data(nnx.Param(arrays.scales))

    @property
    def sizes(self) -> tuple[int, int]:
        """(I, O) of one expert, over all devices of all engines; not after packing.

        With device groups, I or O is still the total over all devices, although each group holds
        different experts; divide it by all devices for the size of one device.
        """
        size_in, size_out = super().sizes
        return size_in, size_out // self.n_experts

    def pack(self, kernels: Kernels) -> None:
        """Lay each matrix out as the kernel set multiplies it fastest."""
        parts = 1 + self.gated_by_kernel
        pack: Any = self._packed_by(kernels)
        arrays = self._to_set_apart
        if arrays.scales is None:
            self.kernel = nnx.Param(_set_apart(arrays.packed, self.n_experts, pack, parts))
        else:
            pack = None if kernels.mxfp4 is None else kernels.mxfp4.pack
            self._replace_apart(_set_apart(arrays, self.n_experts, pack, parts))

    def pack_shares(self, kernels: Kernels, mesh: Mesh) -> None:
        """See `Linear.pack_shares`. The matrices are also separated if the kernel set multiplies
        all blocks at once.
        """
        axes = experts_axes(mesh)
        before, after = PartitionSpec(None, axes), PartitionSpec(None, None, axes)
        if self.summed:
            before, after = PartitionSpec(axes, None), PartitionSpec(None, axes, None)
        work = _SetApart(self.n_experts)
        if not self.at_once(kernels):
            if self.packed.scheme != "fp8" or kernels.fp8 is None:
                return
            work = replace(work, pack=kernels.fp8.pack)
            after = PartitionSpec(None, None, *reversed(before))
        lay_out = partial(laid_out_anew, mesh=mesh, before=before, after=after)
        self._set_apart_by(lambda work, array: lay_out(array, work), work, kernels)

    def set_apart(self, kernels: Kernels) -> None:
        """Separate the matrices, [I, X * O] -> [X, I, O]."""
        self._set_apart_by(_SetApart.__call__, _SetApart(self.n_experts), kernels)

    def _set_apart_by(
        self, lay_out: Callable[[_SetApart, Array], Array], work: _SetApart, kernels: Kernels
    ) -> None:
        packed, scales = self._to_set_apart
        if scales is not None:
            scales = lay_out(replace(work, rows=kernels.scale_rows), scales)
        self._replace_apart(Mxfp4(lay_out(work, packed), scales))


@dataclass(frozen=True)
class _SetApart:
    """Separates the matrices of one device's share. rows: they are padded to a multiple of this."""

    n_experts: int
    pack: Pack | None = None
    rows: int = 1

    def __call__(self, share: Array) -> Array:
        apart = _set_apart(share, self.n_experts, self.pack, 1)
        missing = -apart.shape[1] % self.rows
        return jnp.pad(apart, ((0, 0), (0, missing), (0, 0))) if missing else apart


@partial(jax.jit, static_argnames=("n_experts", "pack", "parts"))
def _set_apart(w: Any, n_experts: int, pack: Callable[..., Any] | None, parts: int) -> Any:
    """Separate matrices, [I, X * O] -> [X, I, O], and pack each with `pack`. w: an array or a tree
    of arrays.
    """
    apart = jax.tree.map(lambda one: one.reshape(len(one), n_experts, -1).swapaxes(0, 1), w)
    if pack is None:
        return apart
    return jax.lax.map(partial(pack, parts=parts), apart)


class Experts(MLP):
    """A router [E, X], which is never quantised, and for each expert gate and up fused [E, 2F] (or
    only up), and down [F, E]. If there is a shared expert for all rows, its gate, if any, is the
    router's last column.

    On several devices in groups (`ExpertsConfig.groups`) the router chooses from X experts, and
    this module holds those of the device's group; outputs of the groups' experts are summed like
    the shares of one expert. Engines that share experts send all their rows to all engines.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        experts = config.experts
        assert experts is not None
        size, inner, own = config.hidden_size, config.intermediate_size, experts.own
        self.experts = experts
        self.shards = config.shards
        self.group_size = config.shards // experts.groups
        columns = experts.router_columns
        self.router = nnx.Param(normal(rngs, (size, columns), 1.5 * size**-0.5, dtype))
        #: [X], factors on the experts' routing weights; or None.
        self.share_factors: nnx.Param | None = None
        #: [X], or None.
        if config.mlp_bias:
            self.router_bias = nnx.Param(normal(rngs, (experts.n_experts,), 0.25, dtype))
        else:
            self.router_bias = None
        #: float32 [X], or None.
        if experts.choice_bias:
            self.choice_bias = nnx.Param(normal(rngs, (experts.n_experts,), 0.1, jnp.float32))
        else:
            self.choice_bias = None
        matrices = partial(ExpertLinear, own, bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        columns = (1 + config.is_gated) * inner
        self.gate_up = matrices(size, columns, activation=config.activation)
        is_split = config.shards * experts.engines > 1
        self.down = matrices(inner, size, summed=is_split, group_size=self.group_size)
        if experts.shared_size:
            alone = replace(config, intermediate_size=experts.shared_size, shards=1)
            self.shared = MLP(alone, dtype=dtype, rngs=rngs)
        else:
            self.shared = None

    def takes_rounded(self, kernels: Kernels) -> bool:
        """See `MLP.takes_rounded`; the router reads the rows, too."""
        return False

    def __call__(self, x: Array, kernels: Kernels, rows: RowFacts) -> Array:
        """x [T, E] -> [T, E]; rows of padding are 0."""
        sums = self.routed(x, x, kernels, rows)
        if self.shared is not None:
            sums = (sums + self._of_shared(self.shared, x, kernels, rows)).astype(x.dtype)
        return TENSOR.total(sums) if self.shards > 1 else sums

    def routed(self, x: Array, asking: Array, kernels: Kernels, rows: RowFacts) -> Array:
        """The sums of the experts' outputs [T, E], or this device's share of them. x [T, E]: input
        of the experts. asking [T, E]: input of the router.
        """
        if self.experts.engines == 1:
            count = jnp.int32(x.shape[0]) if rows.count is None else rows.count
            return self._answered(x, asking, kernels, count)
        counts = self._counts_of_all(x.shape[0], rows)
        all_rows = DATA.rows_of_all(x)
        all_asking = all_rows if asking is x else DATA.rows_of_all(asking)
        return DATA.own_sums(self._answered(all_rows, all_asking, kernels, counts))

    def _of_shared(self, shared: MLP, x: Array, kernels: Kernels, rows: RowFacts) -> Array:
        """The output of the shared expert, or this device's share of it: float32 [T, E]."""
        # Rounded once more: see `NoNorm`.
        answers = rounded(whole(shared(x, kernels, rows)), x.dtype).astype(jnp.float32)
        if not self.experts.shared_gate:
            return answers
        if rows.count is not None:
            kernels = kernels.of_rows(rows.count)
        scores = kernels.matmul(x, self.router[...], jnp.float32)
        return jax.nn.sigmoid(scores[:, self.experts.n_experts, None]) * answers

    def _answered(self, x: Array, asking: Array, kernels: Kernels, count: Array) -> Array:
        """The output of this device's experts [T, E], or its share of it. x, asking: see `routed`.
        count: `n_rows` of `jitney.kernels.routing.Route`.
        """
        of_router = kernels if count.ndim else kernels.of_rows(count)
        scores = of_router.matmul(asking, self.router[...], jnp.float32)
        if self.router_bias is not None:
            own = scores[:, : self.experts.n_experts]
            scores = own + self.router_bias[...].astype(jnp.float32)
        bias = None if self.choice_bias is None else self.choice_bias[...]
        factors = None if self.share_factors is None else self.share_factors[...]
        routes = kernels.route(scores, self.experts, count, self._first(), bias, factors)
        if self._at_once(kernels):
            sums = self._all_at_once(x, routes, kernels)
        else:
            sums = self._one_by_one(x, routes, kernels)
        return rounded(sums, x.dtype)

    def _counts_of_all(self, n_rows: int, rows: RowFacts) -> Array:
        """The number of each engine's rows that are not padding, int32 [engines]."""
        if rows.counts is not None:
            return rows.counts
        if rows.count is None:
            return jnp.full(self.experts.engines, n_rows)
        return DATA.rows_of_all(rows.count[None])

    def _at_once(self, kernels: Kernels) -> bool:
        return self.gate_up.at_once(kernels) and self.down.at_once(kernels)

    def _all_at_once(self, x: Array, routes: Routes, kernels: Kernels) -> Array:
        """The experts' output float32 [T, E], with the kernel set's products with experts."""
        assert kernels.experts is not None
        assert self.gate_up.activation is not None
        answers = kernels.experts(
            x, self.gate_up.stack, self.down.stack, routes.blocks, self.gate_up.activation
        )
        return _weighed(answers, routes)

    def _one_by_one(self, x: Array, routes: Routes, kernels: Kernels) -> Array:
        """The experts' output float32 [T, E], block after block."""

        blocks = routes.blocks

        def add_block(number: Array, sums: Array) -> Array:
            at, weights = (
                jax.lax.dynamic_slice_in_dim(array, number * blocks.size, blocks.size)
                for array in (blocks.rows, routes.weights)
            )
            block = x.at[at].get(mode="fill", fill_value=0)
            # A block's own rows come before its padding.
            own = kernels.of_rows(jnp.sum(at < len(x), dtype=jnp.int32))
            answers = self._answers(block, blocks.experts[number], own)
            return sums.at[at].add(answers * weights[:, None], mode="drop")

        return jax.lax.fori_loop(0, blocks.count, add_block, jnp.zeros(x.shape, jnp.float32))

    def _first(self) -> Array | int:
        """The number of the first expert on this device."""
        if self.experts.all_groups == 1:
            return 0
        group = TENSOR.number() // self.group_size
        if self.experts.engines > 1:
            group += DATA.number() * self.experts.groups
        return group * self.experts.own

    def pack(self, kernels: Kernels) -> None:
        """See `MLP.pack`; the router is padded with columns of zeros to whole vectors."""
        if self._at_once(kernels):
            self.gate_up.set_apart(kernels)
            self.down.set_apart(kernels)
        else:
            self.gate_up.pack(kernels)
            self.down.pack(kernels)
        if self.shared is not None:
            self.shared.pack(kernels)
        if kernels.pack is not None:
            missing = -self.router.shape[1] % _COLUMNS
            padded = jnp.pad(self.router[...], ((0, 0), (0, missing)))
            self.router = nnx.Param(kernels.pack(padded))

    def _answers(self, block: Array, expert: Array, kernels: Kernels) -> Array:
        """The output of one expert for [B, E]: float32 [B, E]."""
        opening, activation = self.gate_up.of(expert, kernels), self.gate_up.activation
        assert activation is not None
        if self.gate_up.bias is None:
            inner = opening.gated(block, activation, kernels)
        else:
            sums = self.gate_up.with_bias(opening.product(block, kernels), expert)
            inner = gate(sums, block.dtype, activation)
        return self.down.with_bias(self.down.of(expert, kernels).product(inner, kernels), expert)


def _weighed(answers: Array, routes: Routes) -> Array:
    """answers float32 [N * B, E] -> [T, E]: the weighted sum of each row's answers; 0 for padding.

    Answers are added from the first choice on: the order depends only on the row.
    """
    n_chosen, n_rows = routes.places.shape
    # Choice by choice, so that the addends are contiguous. Padding rows, and rows whose experts are
    # on other devices, may gather NaN, which is masked in the addition: masking at each gather
    # would be another pass.
    gathered = answers.at[routes.places.reshape(-1)].get(mode="clip").reshape(n_chosen, n_rows, -1)
    is_here = routes.places < len(answers)
    sums = jnp.zeros(gathered.shape[1:], jnp.float32)
    for choice in range(n_chosen):
        weighed = gathered[choice] * routes.shares[choice, :, None]
        sums = sums + jnp.where(is_here[choice, :, None], weighed, 0.0)
    return sums


class _Dense(MLP):
    """The feed-forward of a layer without experts in a model with experts; it is split over devices
    like a mixture's shared expert.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.shared = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Array | RoundedRows, kernels: Kernels, rows: RowFacts
    ) -> Array | PartialSums:
        """x [T, E] -> [T, E]."""
        return self.shared(x, kernels, rows)

    def takes_rounded(self, kernels: Kernels) -> bool:
        return self.shared.takes_rounded(kernels)


def _feed_forward(config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> MLP:
    """Make the experts if the model has any; else an MLP."""
    kind = MLP if config.experts is None else Experts
    return kind(config, dtype=dtype, rngs=rngs)


class MixtureBlock(Block):
    """One layer: attention and experts, or an MLP in a model without, each normed before and added
    after.
    """

    mlp_class = staticmethod(_feed_forward)
    dense_class = _Dense


class Mixture(Llama):
    block = MixtureBlock

    @classmethod
    def dialect(cls, config: ModelConfig, file_format: FileFormat) -> Dialect:
        names = _DIALECTS if file_format == "hf" else _GGUF
        return names[config.architecture]
