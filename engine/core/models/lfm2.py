"""LFM2 and LFM2.5, dense and mixtures: short gated convolutions between layers that attend.

A convolution reads a row and the few before it. Its inputs are values times a gate, and its output
is multiplied by a second gate. For each seat the last inputs are stored.

Axes: T rows, E embed; C and W as in `ShortConvConfig`.
"""

from __future__ import annotations

from dataclasses import replace

from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jitney.engine.core.models.attention import Mixer
from jitney.engine.core.models.layers import Linear, normal
from jitney.engine.core.models.llama import Llama
from jitney.engine.core.models.mixture import MixtureBlock
from jitney.engine.core.models.rope import Rope
from jitney.engine.core.weights.checkpoints.layer_configs import ShortConvConfig
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import GGUF, HF
from jitney.kernels.delta_net import DeltaState
from jitney.kernels.interface import AttentionMeta, Kernels
from jitney.kernels.partial_sums import PartialSums

_HF = replace(
    HF,
    norm="model.embedding_norm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    o="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    router="feed_forward.gate",
    choice_bias="feed_forward.expert_bias",
    expert_gate="feed_forward.experts.{e}.w1",
    expert_up="feed_forward.experts.{e}.w3",
    expert_down="feed_forward.experts.{e}.w2",
)


class _ShortConv(Mixer):
    """A gated convolution: qkv [E, 3 C] makes both gates and the values, taps [W, 1, C] are its
    coefficients, o [C, E] is the output projection.
    """

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        own = config.recurrent
        assert isinstance(own, ShortConvConfig)
        size = config.hidden_size
        self.qkv = Linear(size, 3 * own.channels, bias=False, dtype=dtype, rngs=rngs)
        self.taps = nnx.Param(normal(rngs, (own.taps, 1, own.channels), 0.7, dtype))
        is_split = config.shards > 1
        self.o = Linear(own.channels, size, bias=False, dtype=dtype, rngs=rngs, summed=is_split)

    def __call__(
        self, x: Array, rope: Rope, kv: DeltaState, meta: AttentionMeta, kernels: Kernels
    ) -> tuple[Array | PartialSums, DeltaState]:
        """x [T, E], kv: the layer's state -> ([T, E], kv). Positions are not used."""
        kernels = kernels.of_rows(meta.counts[2])
        rows = self.qkv(x, kernels, adapted=meta.adapted)
        taps = self.taps[...]
        o, kv = kernels.short_conv(rows, taps.reshape(taps.shape[0], -1), kv, meta)
        return self.o.in_parts(o, kernels, meta.adapted), kv


class _Block(MixtureBlock):
    recurrent_class = _ShortConv


class Lfm2(Llama):
    block = _Block
    hf, gguf = _HF, replace(GGUF, norm="token_embd_norm")
