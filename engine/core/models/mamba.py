"""Layers of Mamba-2, shared by all models: the products around `jitney.kernels.mamba`, and the norm
between them.

Axes: T rows, E embed; G, H, V and C as there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jitney.engine.core.models.attention import Mixer, random_decays
from jitney.engine.core.models.layers import Linear, normal
from jitney.engine.core.models.rope import Rope
from jitney.engine.core.models.sharding import TENSOR
from jitney.engine.core.weights.checkpoints.layer_configs import MambaConfig
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.kernels.delta_net import DeltaState
from jitney.kernels.interface import AttentionMeta, Kernels
from jitney.kernels.mamba import MambaWeights
from jitney.kernels.partial_sums import PartialSums


class Mamba(Mixer):
    """A layer of Mamba-2: qkv [E, H V + C + H] makes gates, the convolution's inputs and the steps;
    o [H V, E] is the output projection.

    taps [W, 1, C], taps_bias [C] or None, log_decay, rate_bias and skip [H]: see `MambaWeights`.
    value_norm float32 [H V]: weights of the norm of the heads' outputs, which is over each group's
    heads at once, after the gates.
    """

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        own = config.recurrent
        assert isinstance(own, MambaConfig)
        size, heads = config.hidden_size, own.heads
        self.eps = config.rms_eps
        self.limits = own.step_limits
        self.groups = own.groups
        self.values = own.values
        self.sharers = own.sharers
        columns = own.values + own.channels + heads
        self.qkv = Linear(size, columns, bias=False, dtype=dtype, rngs=rngs)
        self.taps = nnx.Param(normal(rngs, (own.taps, 1, own.channels), 0.7, dtype))
        if own.conv_bias:
            self.taps_bias = nnx.Param(normal(rngs, (own.channels,), 0.25, dtype))
        else:
            self.taps_bias = None
        self.log_decay, self.rate_bias = random_decays(rngs, heads)
        self.skip = nnx.Param(normal(rngs, (heads,), 1.0, jnp.float32))
        self.value_norm = nnx.Param(jnp.ones((own.values,), jnp.float32))
        is_split = config.shards > 1
        self.o = Linear(own.values, size, bias=False, dtype=dtype, rngs=rngs, summed=is_split)

    def __call__(
        self, x: Array, rope: Rope, kv: DeltaState, meta: AttentionMeta, kernels: Kernels
    ) -> tuple[Array | PartialSums, DeltaState]:
        """x [T, E], kv: the layer's state -> ([T, E], kv). Positions are not used."""
        kernels = kernels.of_rows(meta.counts[2])
        rows = self.qkv(x, kernels, adapted=meta.adapted)
        gates, rest = rows[:, : self.values], rows[:, self.values :]
        taps = self.taps[...]
        weights = MambaWeights(
            taps.reshape(taps.shape[0], -1),
            None if self.taps_bias is None else self.taps_bias[...],
            self.log_decay[...],
            self.rate_bias[...],
            self.skip[...],
        )
        read, kv = kernels.mamba(rest, weights, kv, meta, limits=self.limits)
        gated = read.reshape(x.shape[0], -1) * jax.nn.silu(gates.astype(jnp.float32))
        normed = self._normed(gated, kernels) * self.value_norm[...]
        return self.o.in_parts(normed.astype(x.dtype), kernels, meta.adapted), kv

    def _normed(self, gated: Array, kernels: Kernels) -> Array:
        """Divide gated float32 [T, H V] by the root mean square of each group."""
        if self.sharers > 1:  # this device has as many heads of the group as any other
            own = jnp.mean(gated * gated, axis=-1, keepdims=True)
            return gated * jax.lax.rsqrt(TENSOR.total(own) / self.sharers + self.eps)
        grouped = gated.reshape(-1, self.values // self.groups)
        ones = jnp.ones(grouped.shape[1:], jnp.float32)
        return kernels.rms_norm(grouped, ones, self.eps).reshape(gated.shape)
