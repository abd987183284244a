"""Gemma 4 (text): the differences from Llama's layers.

As in Gemma 3 both halves of a layer have a norm before and after, and embeddings are scaled. Layers
that see all positions have larger heads, whose keys, before norm and rotation, may serve as values;
values are normed too. The last layers may read the keys and values of earlier ones. Each layer may
have its own inputs for each token, multiplied by a gate of the row (E2B, E4B), and experts beside
its feed-forward (26B-A4B). At the end of a layer the row is multiplied by the layer's factor.

Axes: T tokens, E embed, P size of a layer's own input for a token, L layers, H query heads, K KV
heads, D head dim, X experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jitney.engine.core.models.attention import Attention
from jitney.engine.core.models.gemma import Gemma
from jitney.engine.core.models.layers import (
    MLP,
    Layer,
    RMSNorm,
    RowFacts,
    UnitNorm,
    normal,
    rounded,
    scaled,
)
from jitney.engine.core.models.llama import PostNormBlock, looked_up
from jitney.engine.core.models.mixture import Experts
from jitney.engine.core.models.rope import Rope
from jitney.engine.core.models.sharding import TENSOR
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import (
    HF,
    Dialect,
    FileFormat,
    Target,
    WeightMap,
)
from jitney.kernels.interface import AttentionMeta, Kernels
from jitney.kernels.partial_sums import PartialSums, whole

_HF = replace(
    HF,
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    router="router.proj",
    expert_gate="experts.{e}.gate_proj",
    expert_up="experts.{e}.up_proj",
    expert_down="experts.{e}.down_proj",
    shared="mlp",
)
_GGUF = replace(
    Gemma.gguf,
    shared="mlp",
    others={
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm",
        "layer_scalar": "layer_output_scale.weight",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
        "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
        "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
    },
)
#: Norms of a layer with experts, and the tensors of their weights.
_EXPERT_NORMS = {
    "shared_post_norm": "post_feedforward_layernorm_1.weight",
    "experts_norm": "pre_feedforward_layernorm_2.weight",
    "experts_post_norm": "post_feedforward_layernorm_2.weight",
    "router_norm": "router.scale",
}


class _Attention(Attention):
    """Attention with normed values, or over the pages of another layer."""

    def attended(
        self,
        heads: Array | PartialSums,
        rope: Rope,
        kv: Array,
        meta: AttentionMeta,
        kernels: Kernels,
    ) -> tuple[Array, Array]:
        """As `Attention.attended`, with heads [T, H + 2K, D]; [T, H + K, D] if keys serve as
        values, and [T, H, D] if the layer reads another layer's pages.
        """
        heads = whole(heads).reshape(heads.shape[0], -1, self.head_dim)
        if not self.keeps_kv:
            assert self.q_norm is not None
            q = rope.rotate(self.q_norm(heads, kernels))
            o = kernels.attend(rope.scaled(q), kv, meta, **self.options())
            return o.reshape(heads.shape[0], -1), kv
        assert self.k_norm is not None
        own = self.n_heads + self.n_kv_heads
        norm = UnitNorm(self.head_dim, self.k_norm.eps)
        values = norm(heads[:, -self.n_kv_heads :], kernels)
        heads = jnp.concatenate([heads[:, :own], values], axis=1)
        return super().attended(heads, rope, kv, meta, kernels)


class _FeedForward(MLP):
    def of_sums(self, x: Array, normed: Array, kernels: Kernels, rows: RowFacts) -> Array:
        """x [T, E] and the normed x -> [T, E]."""
        return whole(self(normed, kernels, rows))


class _FeedForwardAndExperts(Experts):
    """A feed-forward, which is the shared expert here, and experts. Experts and router read rows
    through norms of their own, and both outputs are normed before they are added.

    share_factors [X]: factors on the experts' routing weights.
    """

    shared_post_norm: RMSNorm
    experts_norm: RMSNorm
    experts_post_norm: RMSNorm
    router_norm: RMSNorm

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        for name in _EXPERT_NORMS:
            setattr(self, name, RMSNorm.of(config.hidden_size, config, dtype))
        assert config.experts is not None
        self.share_factors = nnx.data(nnx.Param(jnp.ones((config.experts.n_experts,), dtype)))

    def of_sums(self, x: Array, normed: Array, kernels: Kernels, rows: RowFacts) -> Array:
        """x [T, E] and the normed x for the feed-forward -> [T, E]."""
        assert self.shared is not None
        dtype = normed.dtype
        reading, asking = (
            rounded(norm(x, kernels), dtype) for norm in (self.experts_norm, self.router_norm)
        )
        asking = rounded(asking.astype(jnp.float32) * x.shape[-1] ** -0.5, dtype)
        sums = [
            whole(self.shared(normed, kernels, rows)),
            self.routed(reading, asking, kernels, rows),
        ]
        if self.shards > 1:
            sums = [TENSOR.total(own) for own in sums]
        shared = self.shared_post_norm(sums[0], kernels)
        routed = self.experts_post_norm(sums[1], kernels)
        return rounded(shared.astype(jnp.float32) + routed, dtype)


def _feed_forward(
    config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs
) -> _FeedForward | _FeedForwardAndExperts:
    kind = _FeedForward if config.experts is None else _FeedForwardAndExperts
    return kind(config, dtype=dtype, rngs=rngs)


class _LayerInputs(Layer):
    """A layer's own inputs for tokens, multiplied by a gate of the row: gate [E, P], out [P, E],
    which are never quantised.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        size, inner = config.hidden_size, config.layer_input_size
        self.gate = nnx.Param(normal(rngs, (size, inner), 1.5 * size**-0.5, dtype))
        self.out = nnx.Param(normal(rngs, (inner, size), 1.5 * inner**-0.5, dtype))
        self.norm = RMSNorm.of(size, config, dtype)

    def __call__(self, x: Array, inputs: Array, kernels: Kernels) -> Array:
        """x [T, E], inputs [T, P] -> the sum to add to x, [T, E]."""
        gates = jax.nn.gelu(kernels.matmul(x, self.gate[...], jnp.float32), approximate=True)
        opened = rounded(gates * inputs.astype(jnp.float32), x.dtype)
        return self.norm(kernels.matmul(opened, self.out[...], x.dtype), kernels)

    def pack(self, kernels: Kernels) -> None:
        """See `Block.pack`."""
        if kernels.pack is not None:
            self.gate = nnx.Param(kernels.pack(self.gate[...]))
            self.out = nnx.Param(kernels.pack(self.out[...]))


class _Block(PostNormBlock):
    """One layer, not split into halves, since its factor comes after the second half.

    factor [1]: multiplies the layer's rows.
    """

    attention_class = _Attention
    has_halves = False
    mlp_class = staticmethod(_feed_forward)
    mlp: _FeedForward | _FeedForwardAndExperts

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.factor = nnx.Param(jnp.ones((1,), dtype))
        if config.layer_input_size:
            self.layer_inputs = _LayerInputs(config, dtype=dtype, rngs=rngs)
        else:
            self.layer_inputs = None

    def __call__(
        self, x: Array, added: Array, rope: Rope, kv: Array, meta: AttentionMeta, kernels: Kernels
    ) -> tuple[Array, Array, Array]:
        x, o, kv = self.attended(x, added, rope, kv, meta, kernels)
        x, normed = self.mlp_norm.of_sum(x, o, kernels)
        answers = self.mlp.of_sums(x, normed, kernels, RowFacts.of(meta))
        added = self.mlp_post_norm(answers, kernels)
        if self.layer_inputs is not None and meta.layer_inputs is not None:
            x = rounded(x + added, x.dtype)
            own = kernels.of_rows(meta.counts[2])
            added = self.layer_inputs(rounded(x, added.dtype), meta.layer_inputs, own)
        factor = self.factor[...].astype(jnp.float32)
        x = rounded(x.astype(jnp.float32) * factor, x.dtype)
        return x, rounded(added.astype(jnp.float32) * factor, added.dtype), kv


class _TokenInputs(Layer):
    """All layers' own inputs for tokens: from a table embed [V, L * P], and from the token's
    embedding through projection [E, L * P], which is never quantised.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        size, width = config.hidden_size, config.n_layers * config.layer_input_size
        self.embed = nnx.Param(normal(rngs, (config.vocab_share, width), 1.0, dtype))
        self.projection = nnx.Param(normal(rngs, (size, width), 1.5, dtype))
        self.norm = RMSNorm.of(config.layer_input_size, config, dtype)

    def __call__(self, tokens: Array, x: Array, kernels: Kernels) -> Array:
        """tokens int32 [T], x [T, E] their embeddings -> [T, L, P]."""
        size, shape = self.config.layer_input_size, (len(tokens), self.config.n_layers, -1)
        own = looked_up(self.embed[...], tokens, self.config).reshape(shape)
        own = scaled(own, float(np.asarray(size**0.5, own.dtype)))
        made = kernels.matmul(x, self.projection[...], jnp.float32) * x.shape[-1] ** -0.5
        made = self.norm(rounded(made, x.dtype).reshape(shape), kernels)
        return rounded((made.astype(jnp.float32) + own) * 2**-0.5, x.dtype)

    def pack(self, kernels: Kernels) -> None:
        """See `Block.pack`."""
        if kernels.pack is not None:
            self.projection = nnx.Param(kernels.pack(self.projection[...]))


class Gemma4(Gemma):
    block = _Block
    hf, gguf = _HF, _GGUF

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        if config.layer_input_size:
            self.token_inputs = _TokenInputs(config, dtype=dtype, rngs=rngs)
        else:
            self.token_inputs = None

    def layer_metas(
        self, tokens: Array, x: Array, meta: AttentionMeta, kernels: Kernels
    ) -> list[AttentionMeta]:
        """See `Llama.layer_metas`; each layer's metadata also has its own token inputs."""
        metas = super().layer_metas(tokens, x, meta, kernels)
        if self.token_inputs is None:
            return metas
        inputs = self.token_inputs(tokens, x, kernels.of_rows(meta.counts[2]))
        return [own._replace(layer_inputs=inputs[:, at]) for at, own in enumerate(metas)]

    @classmethod
    def weight_map(cls, config: ModelConfig, file_format: FileFormat) -> WeightMap:
        weights, names = super().weight_map(config, file_format), cls.dialect(config, file_format)
        readers = range(config.n_layers - config.n_kv_readers, config.n_layers)
        # Published files contain these also for layers that read other layers' keys and values.
        unread = [
            f"{names.layer.format(i=layer)}{name}.weight"
            for layer in readers
            for name in (names.k, names.v, names.k_norm, names.k_norm.replace("k_norm", "v_norm"))
        ]
        return replace(
            weights,
            targets=(*weights.targets, *_own_weights(config, names)),
            ignored=(*weights.ignored, *unread),
        )


def _own_weights(config: ModelConfig, names: Dialect) -> Iterator[Target]:
    """Weights that no other family has."""
    size, inner = config.hidden_size, config.layer_input_size
    width = config.n_layers * inner
    if inner:
        table, making, norm = [
            f"{names.named(f'model.{name}')}.weight"
            for name in (
                "embed_tokens_per_layer",
                "per_layer_model_projection",
                "per_layer_projection_norm",
            )
        ]
        yield Target.of(("token_inputs", "embed"), table, config.vocab_size, width)
        yield Target.of(("token_inputs", "projection"), making, width, size, transpose=True)
        yield Target.of(("token_inputs", "norm", "weight"), norm, inner)
    for layer in range(config.n_layers):
        path, prefix = ("layers", layer), names.layer.format(i=layer)
        yield Target.of((*path, "factor"), prefix + names.named("layer_scalar"), 1)
        if inner:
            gate, out, norm = [
                f"{prefix}{names.named(name)}.weight"
                for name in (
                    "per_layer_input_gate",
                    "per_layer_projection",
                    "post_per_layer_input_norm",
                )
            ]
            path = (*path, "layer_inputs")
            yield Target.of((*path, "gate"), gate, inner, size, transpose=True)
            yield Target.of((*path, "out"), out, size, inner, transpose=True)
            yield Target.of((*path, "norm", "weight"), norm, size)
        if config.experts is not None:
            path = ("layers", layer, "mlp")
            for name, stored in _EXPERT_NORMS.items():
                yield Target.of((*path, name, "weight"), prefix + names.named(stored), size)
            factors = prefix + names.named("router.per_expert_scale")
            yield Target.of((*path, "share_factors"), factors, config.experts.n_experts)
