"""Qwen3.5 and 3.6, dense and mixtures, and Qwen3-Next: recurrent layers between attention layers.

Three of four layers are gated delta nets (`jitney.kernels.delta_net`). In the others the query
projection also makes a gate, and the output of attention is multiplied by its sigmoid. Norm weights
are stored as w and applied as 1 + w, except in the delta nets.

Axes: T rows, E embed, H query heads, K KV heads, D head dim; of a delta net as there.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jitney.engine.core.models.attention import GatedAttention, Mixer, random_decays
from jitney.engine.core.models.layers import Linear, normal
from jitney.engine.core.models.llama import Block, Llama
from jitney.engine.core.models.mixture import MixtureBlock
from jitney.engine.core.models.prediction import PredictionHead
from jitney.engine.core.models.rope import Rope
from jitney.engine.core.weights.checkpoints.layer_configs import DeltaNetConfig
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import GGUF, HF, HeadNames
from jitney.kernels.delta_net import DeltaState, DeltaWeights
from jitney.kernels.interface import AttentionMeta, Kernels
from jitney.kernels.partial_sums import PartialSums

#: Columns of the matrix of rates are padded to a multiple of this, as kernels for products need.
_COLUMNS = 16
_HF = replace(
    HF,
    norm_offset=1.0,
    head=HeadNames(
        part="mtp.",
        layer="mtp.layers.0.",
        norm="mtp.norm",
        joint="mtp.fc",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
    ),
)
_GGUF = replace(GGUF, mlp_norm="post_attention_norm", tiled_values=True, reads_layers_behind=False)


class _GatedDeltaNet(Mixer):
    """A gated delta net: qkv [E, C + H V] makes the convolution's inputs and the gates, o [H V, E]
    is the output projection.

    rates [E, 2 H], never quantised: makes the share of its value that a row writes, and the decay
    of the memory. taps [W, 1, C], log_decay, rate_bias and norm: see `DeltaWeights`.
    """

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        own = config.recurrent
        assert isinstance(own, DeltaNetConfig)
        size, heads = config.hidden_size, own.value_heads
        self.eps = config.rms_eps
        self.n_rates = 2 * heads
        columns = own.channels + own.values
        self.qkv = Linear(size, columns, bias=False, dtype=dtype, rngs=rngs)
        self.rates = nnx.Param(normal(rngs, (size, 2 * heads), 1.5 * size**-0.5, dtype))
        self.taps = nnx.Param(normal(rngs, (own.taps, 1, own.channels), 0.7, dtype))
        self.log_decay, self.rate_bias = random_decays(rngs, heads)
        self.norm = nnx.Param(jnp.ones((own.value_dim,), jnp.float32))
        is_split = config.shards > 1
        self.o = Linear(own.values, size, bias=False, dtype=dtype, rngs=rngs, summed=is_split)

    def __call__(
        self, x: Array, rope: Rope, kv: DeltaState, meta: AttentionMeta, kernels: Kernels
    ) -> tuple[Array | PartialSums, DeltaState]:
        """x [T, E], kv: the layer's state -> ([T, E], kv). Positions are not used."""
        kernels = kernels.of_rows(meta.counts[2])
        rows = self.qkv(x, kernels, adapted=meta.adapted)
        rates = kernels.matmul(x, self.rates[...], jnp.float32)[:, : self.n_rates]
        taps = self.taps[...]
        weights = DeltaWeights(
            taps.reshape(taps.shape[0], -1),
            self.log_decay[...],
            self.rate_bias[...],
            self.norm[...],
        )
        o, kv = kernels.delta_net(rows, rates, weights, kv, meta, eps=self.eps)
        return self.o.in_parts(o, kernels, meta.adapted), kv

    def pack(self, kernels: Kernels) -> None:
        """See `Mixer.pack`; the rates are padded with columns of zeros to whole vectors."""
        super().pack(kernels)
        if kernels.pack is not None:
            padded = jnp.pad(self.rates[...], ((0, 0), (0, -self.n_rates % _COLUMNS)))
            self.rates = nnx.Param(kernels.pack(padded))


class _DenseBlock(Block):
    attention_class = GatedAttention
    recurrent_class = _GatedDeltaNet


class _ExpertsBlock(MixtureBlock):
    attention_class = GatedAttention
    recurrent_class = _GatedDeltaNet


class Qwen35(Llama):
    block = _DenseBlock
    hf, gguf = _HF, _GGUF


class Qwen35Mixture(Qwen35):
    block = _ExpertsBlock


class Qwen3Next(Qwen35Mixture):
    """See `Llama`; matrices of the delta nets are stored fused."""

    hf = replace(_HF, delta_qkvz="linear_attn.in_proj_qkvz", delta_rates="linear_attn.in_proj_ba")
    gguf = replace(_GGUF, delta_rates="ssm_ba", tiled_values=False)


class Qwen35PredictionHead(PredictionHead, Qwen35):
    """See `PredictionHead`."""


class Qwen35MixturePredictionHead(PredictionHead, Qwen35Mixture):
    """See `PredictionHead`. Qwen3-Next's has no layer whose matrices are stored otherwise."""
