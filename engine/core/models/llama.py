"""The Llama family (Llama, Mistral, Ministral, Qwen2, Qwen3, SmolLM, Seed-OSS): one module, whose
configuration selects the variant.

The module holds only weights. KV pages, batch and attention are arguments, so the same object works
on every platform and in every test. See `jitney.engine.core.models.protocol`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from jitney.engine.core.models.attention import Attention, Mixer
from jitney.engine.core.models.hidden import Hidden
from jitney.engine.core.models.layers import (
    MLP,
    Layer,
    Linear,
    NoMLP,
    NoNorm,
    RMSNorm,
    RowFacts,
    normal,
)
from jitney.engine.core.models.rope import Rope
from jitney.engine.core.models.sharding import TENSOR, laid_out_anew
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import GGUF, HF, Dialect, FileFormat, WeightMap
from jitney.kernels.interface import AttentionMeta, Kernels
from jitney.kernels.partial_sums import PartialSums, whole
from jitney.kernels.w8a8 import RoundedRows

#: Classes whose queries and keys llama.cpp's converter reorders.
_PAIRED = ("LlamaForCausalLM", "Ministral3ForCausalLM", "SmolLM3ForCausalLM")


#: The output of half a layer, [T, E], which its reader may have to add up.
type _Product = Array | PartialSums


class Block(Layer):
    """One layer: attention and MLP, each with a norm before it and a residual sum after it."""

    #: The halves of a layer.
    attention_class: type[Mixer] = Attention
    mlp_class: Callable[..., MLP | NoMLP] = MLP
    #: The first half of a recurrent layer, which has a state for each seat instead of pages.
    recurrent_class: Callable[..., Mixer] | None = None
    #: The second half of a layer without experts in a model with experts.
    dense_class: type[MLP] = MLP
    #: Whether the second half can run without the first, for the selected rows of the last layer.
    has_halves = True

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.attention_norm: RMSNorm | NoNorm = RMSNorm.of(config.hidden_size, config, dtype)
        mixer: Any = self.attention_class
        if config.recurrent is not None and layer in config.recurrent.layers:
            mixer = self.recurrent_class
        self.attention = mixer(config, layer, dtype=dtype, rngs=rngs)
        self.mlp_norm: RMSNorm | NoNorm = RMSNorm.of(config.hidden_size, config, dtype)
        own = config.of_layer(layer)
        feed_forward = self.mlp_class
        if layer in config.bare_layers:
            self.mlp_norm, feed_forward = NoNorm(), NoMLP
        elif config.experts is not None and own.experts is None:
            feed_forward = self.dense_class
        self.mlp = feed_forward(own, dtype=dtype, rngs=rngs)
        self.residual_factor = config.residual_factor

    def __call__(
        self,
        x: Array,
        added: _Product,
        rope: Rope,
        kv: Array,
        meta: AttentionMeta,
        kernels: Kernels,
    ) -> tuple[Array, _Product, Array]:
        """Run the layer. x [T, E]: the residual. added [T, E]: output of the layer before, which is
        not added to x yet. kv [N, page, 2K, D], or a recurrent layer's state. -> (x, this layer's
        `added`, kv). added has the activations' dtype; x may be wider (`float32_residual` of a
        kernel set).

        Each sum is computed together with the norm that reads it, since one kernel may do both.
        """
        x, o, kv = self.attended(x, added, rope, kv, meta, kernels)
        x, normed = _rounded_sum(self.mlp_norm, x, o, kernels, self.mlp.takes_rounded(kernels))
        return x, self.fed_forward(normed, kernels, RowFacts.of(meta)), kv

    def attended(
        self,
        x: Array,
        added: _Product,
        rope: Rope,
        kv: Array,
        meta: AttentionMeta,
        kernels: Kernels,
    ) -> tuple[Array, _Product, Array]:
        """Run the first half, with arguments and results as for `__call__`."""
        rounded = self.attention.takes_rounded(kernels)
        x, normed = _rounded_sum(self.attention_norm, x, added, kernels, rounded)
        o, kv = self.attention(normed, rope, kv, meta, kernels)
        return x, o, kv

    def fed_forward(
        self, normed: Array | RoundedRows, kernels: Kernels, rows: RowFacts
    ) -> _Product:
        """The second half's output, which is added to x: normed [T, E] -> [T, E]."""
        return self.mlp(normed, kernels, rows)


class PostNormBlock(Block):
    """One layer with norms before attention and MLP, and also on their outputs."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        behind = replace(config, rms_eps=config.post_norm_eps or config.rms_eps)
        self.attention_post_norm = RMSNorm.of(config.hidden_size, behind, dtype)
        self.mlp_post_norm = RMSNorm.of(config.hidden_size, behind, dtype)

    def attended(
        self, x: Array, added: Array, rope: Rope, kv: Array, meta: AttentionMeta, kernels: Kernels
    ) -> tuple[Array, Array, Array]:
        x, o, kv = super().attended(x, added, rope, kv, meta, kernels)
        return x, self.attention_post_norm(whole(o), kernels), kv

    def fed_forward(self, normed: Array | RoundedRows, kernels: Kernels, rows: RowFacts) -> Array:
        answers = whole(super().fed_forward(normed, kernels, rows))
        return self.mlp_post_norm(answers, kernels)


class Llama(Layer):
    """embed [V, E], L blocks, a final norm, and lm_head [E, V] unless the embedding is tied."""

    #: The class of layers.
    block: type[Block] = Block
    #: Names of the weights in Hugging Face's folders, and in GGUF files if those are read.
    hf: Dialect = HF
    gguf: Dialect = GGUF

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Param(normal(rngs, (config.vocab_share, config.hidden_size), 1.0, dtype))
        self.layers = nnx.List(
            [self.block(config, layer, dtype=dtype, rngs=rngs) for layer in range(config.n_layers)]
        )
        self.norm = RMSNorm.of(config.hidden_size, config, dtype)
        if config.tie_embeddings:
            self.lm_head = None
        else:
            self.lm_head = Linear(
                config.hidden_size, config.vocab_share, bias=False, dtype=dtype, rngs=rngs
            )

    def __call__(
        self, tokens: Array, kv: list[Array], meta: AttentionMeta, kernels: Kernels
    ) -> tuple[Hidden, list[Array]]:
        """tokens int32 [T], kv L times [N, page, 2K, D] (None for layers without a pool) -> (rows
        after the last attention, kv).
        """
        x = self.embedded(tokens)
        return self.through_layers(x, kv, self.layer_metas(tokens, x, meta, kernels), kernels)

    def through_layers(
        self, x: Array, kv: list[Array], metas: list[AttentionMeta], kernels: Kernels
    ) -> tuple[Hidden, list[Array]]:
        """Run the layers. x [T, E]: input of the first layer. metas: metadata for each layer."""
        added = jnp.zeros_like(x)
        if kernels.float32_residual:
            x = x.astype(jnp.float32)
        pools = list(kv)
        ropes = Rope.of_layers(metas[0].positions, self.config)
        sources = self.config.kv_sources
        read: dict[int, Array] = {}
        layers = zip(self.layers, ropes, sources, metas, strict=True)
        for number, (block, rope, source, own) in enumerate(layers):
            if number in self.config.noted_layers:
                read[number] = (x + whole(added)).astype(self.dtype)
            graph, weights = nnx.split(block)
            attend_only = block.has_halves and block is self.layers[-1]
            x, added, pools[source] = _run_block(
                graph, weights, x, added, rope, pools[source], own, kernels, attend_only=attend_only
            )
        noted = None
        if read:
            noted = jnp.concatenate([read[layer] for layer in self.config.noted_layers], axis=1)
        return Hidden(x + whole(added), metas[0].adapted, noted=noted), pools

    def layer_metas(
        self, tokens: Array, x: Array, meta: AttentionMeta, kernels: Kernels
    ) -> list[AttentionMeta]:
        """The metadata for each layer; tokens int32 [T], x [T, E] their embeddings."""
        return [meta.of_group(number) for number in self.config.layer_groups]

    def logits(self, hidden: Hidden, kernels: Kernels) -> Array:
        """Last feed-forward, final norm and output head, only for the selected R rows -> float32
        [R, V].

        In a model split over devices: the columns of the device's share of the vocabulary.
        """
        logits = self.projected(self.normed(hidden, kernels), kernels)
        if self.config.logit_factor != 1:
            logits = logits * self.config.logit_factor
        cap = self.config.logit_softcap
        return cap * jnp.tanh(logits / cap) if cap else logits

    def projected(self, x: Array, kernels: Kernels) -> Array:
        """Output head: x [R, E] after a final norm -> logits float32 [R, V]."""
        if self.lm_head is None:
            return kernels.project(x, self.embed[...])
        return self.lm_head(x, kernels, jnp.float32)

    def normed(self, hidden: Hidden, kernels: Kernels) -> Array:
        """R rows -> [R, E] after the final norm."""
        if not self.block.has_halves:
            return self.norm(hidden.states, kernels).astype(self.dtype)
        return self.ended(hidden, kernels)[1] if hidden.normed is None else hidden.normed

    def ended(self, hidden: Hidden, kernels: Kernels) -> tuple[Array, Array]:
        """R rows -> ([R, E] after the last layer, the same after the final norm)."""
        last, x = self.layers[-1], hidden.states
        rows = RowFacts(adapted=hidden.adapted)
        normed = last.mlp_norm(x, kernels).astype(self.dtype)
        added = last.fed_forward(normed, kernels, rows)
        return _normed_sum(self.norm, x, added, kernels)

    def embedded(self, tokens: Array) -> Array:
        """Embeddings of tokens int32 [T] -> [T, E]."""
        return looked_up(self.embed[...], tokens, self.config)[:, : self.config.hidden_size]

    def pack(self, kernels: Kernels) -> None:
        """Pack the matrices, and the embedding; a tied one is also the head, and stays as it is."""
        super().pack(kernels)
        if self.lm_head is not None:
            self.embed = nnx.Param(_with_columns(self.embed[...], kernels.table_columns))

    def pack_shares(self, kernels: Kernels, mesh: Mesh) -> None:
        """Pack the matrices and the embedding of a model that is split over devices."""
        super().pack_shares(kernels, mesh)
        table, columns = self.embed[...], kernels.table_columns
        if self.lm_head is not None and table.shape[1] % columns:
            split, work = PartitionSpec(TENSOR.name, None), partial(_with_columns, columns=columns)
            self.embed = nnx.Param(laid_out_anew(table, work, mesh, before=split, after=split))

    def set_kv_scales(self, scales: list[Array]) -> None:
        """Set the factors of each layer's quantised pool, float32 [2K]."""
        by_source = dict(zip(self.config.pool_layers, scales, strict=True))
        for layer in self.config.attending_layers:
            own = by_source[self.config.kv_sources[layer]]
            self.layers[layer].attention.kv_scales = nnx.data(nnx.Param(own))

    @property
    def dtype(self) -> np.dtype:
        """The dtype of activations, and of weights that are not quantised."""
        return self.embed[...].dtype

    def hidden_dtype(self, kernels: Kernels) -> np.dtype:
        """Dtype of `Hidden.states`."""
        return np.dtype(np.float32) if kernels.float32_residual else self.dtype

    @classmethod
    def weight_map(cls, config: ModelConfig, file_format: FileFormat) -> WeightMap:
        """The tensors of a checkpoint from which each weight is made."""
        return WeightMap.of(config, cls.dialect(config, file_format))

    @classmethod
    def dialect(cls, config: ModelConfig, file_format: FileFormat) -> Dialect:
        """The names of tensors in a file format."""
        if file_format == "hf":
            return cls.hf
        names = cls.gguf
        if config.architecture in _PAIRED:  # Mistral's GGUF files are Llama's
            names = replace(names, paired_rows=True)
        if config.architecture == "SeedOssForCausalLM":
            names = replace(names, mlp_norm="post_attention_norm")
        return names


@partial(jax.jit, static_argnames=("graph", "kernels", "attend_only"))
def _run_block(
    graph: nnx.GraphDef[Block],
    weights: Any,
    x: Array,
    added: _Product,
    rope: Rope,
    kv: Array,
    meta: AttentionMeta,
    kernels: Kernels,
    *,
    attend_only: bool,
) -> tuple[Array, _Product, Array]:
    """One block, or its first half, as a function of its weights, so that equal layers are traced
    once per bucket, not once each.

    The calls are inlined when the step is compiled, so the program is the same as without it.
    """
    block = nnx.merge(graph, weights)
    run = block.attended if attend_only else block
    return run(x, added, rope, kv, meta, kernels)


def _normed_sum(
    norm: RMSNorm | NoNorm, x: Array, added: _Product, kernels: Kernels
) -> tuple[Array, Array]:
    """See `RMSNorm.of_sum`; kernels for products in parts are for RMS norms alone."""
    if isinstance(added, PartialSums) and kernels.parts is not None and type(norm) is RMSNorm:
        return kernels.parts.norm_sum(x, added, norm.weight[...], norm.eps)
    return norm.of_sum(x, whole(added), kernels)


def _rounded_sum(
    norm: RMSNorm | NoNorm, x: Array, added: _Product, kernels: Kernels, rounded: bool
) -> tuple[Array, Array | RoundedRows]:
    """`_normed_sum`. rounded: whether the norm may be rounded, see `Linear.takes_rounded`."""
    if not rounded or kernels.rounding is None or type(norm) is not RMSNorm:
        return _normed_sum(norm, x, added, kernels)
    if isinstance(added, PartialSums) and kernels.parts is not None:
        return kernels.parts.rounded_norm_sum(x, added, norm.weight[...], norm.eps)
    return kernels.rounding.norm_sum(x, whole(added), norm.weight[...], norm.eps)


def _with_columns(table: Array, columns: int) -> Array:
    """Pad a table of embeddings [V, E] with columns of zeros to a multiple of `columns`."""
    missing = -table.shape[1] % columns
    return jnp.pad(table, ((0, 0), (0, missing))) if missing else table


def looked_up(table: Array, tokens: Array, config: ModelConfig) -> Array:
    """Rows of a table with one row per token: tokens int32 [T] -> [T, C]. config: one device's."""
    if config.shards > 1:
        return _lookup(table, tokens)
    return jnp.take(table, tokens, axis=0, mode="clip")


def _lookup(table: Array, tokens: Array) -> Array:
    """Rows of a table that is split by rows: table [V / n, E], tokens int32 [T] of the whole
    vocabulary -> [T, E], exact.

    For each token all devices but one add zeros. Only inside the step.
    """
    rows = table.shape[0]
    own = tokens - TENSOR.number() * rows
    mine = (own >= 0) & (own < rows)
    return TENSOR.total(jnp.where(mine[:, None], jnp.take(table, own, axis=0, mode="clip"), 0))
