"""Grouped-query attention, shared by all models.

Axes: T tokens, E embed, H query heads, K KV heads, D head dim, N pages of the pool.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jitney.engine.core.models.layers import Layer, Linear, RMSNorm, UnitNorm, normal
from jitney.engine.core.models.rope import Rope
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.kernels.interface import AttentionMeta, Kernels, RotateAndWrite
from jitney.kernels.partial_sums import PartialSums, whole
from jitney.kernels.w8a8 import RoundedRows


class Mixer(Layer):
    """The first half of a layer, which mixes the rows of a sequence. qkv is its first matrix, o its
    last.
    """

    qkv: Linear
    o: Linear

    def takes_rounded(self, kernels: Kernels) -> bool:
        """See `Linear.takes_rounded`; False if more than `qkv` reads the rows."""
        return False


def random_decays(rngs: nnx.Rngs, heads: int) -> tuple[nnx.Param, nnx.Param]:
    """Random `log_decay` and `rate_bias` of a recurrent layer, float32 [H] each, for a memory of a
    few tokens to a few hundred.
    """
    log_decay = nnx.Param(normal(rngs, (heads,), 1.5, jnp.float32) - 3.0)
    return log_decay, nnx.Param(normal(rngs, (heads,), 1.0, jnp.float32))


class Attention(Mixer):
    """Query, key and value projections fused into qkv [E, (H + 2K) * D].

    kv_scales: float32 [2K], factors of an int8 or fp8 pool; None for pools of plain floats.
    """

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        config, window = config.of_layer(layer), config.windows[layer]
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_kv_heads
        self.head_dim = config.head_dim
        self.keeps_kv = config.kv_projections > 0
        self.scale = config.attention_scale
        self.window = window
        self.softcap = config.attention_softcap
        self.qkv = Linear(
            config.attention_inputs, config.qkv_size, bias=config.qkv_bias, dtype=dtype, rngs=rngs
        )
        self.o = Linear(
            config.n_heads * config.head_dim,
            config.hidden_size,
            bias=config.o_bias,
            dtype=dtype,
            rngs=rngs,
            summed=config.shards > 1,
        )
        self.q_norm = self.head_norm(config, dtype)
        self.k_norm = self.head_norm(config, dtype) if self.keeps_kv else None
        #: [H]: for each head a score that is added to every softmax without a value.
        if config.attention_sinks:
            self.sinks = nnx.Param(normal(rngs, (config.n_heads,), 1.0, dtype))
        else:
            self.sinks = None
        self.kv_scales: nnx.Param | None = None

    @staticmethod
    def head_norm(config: ModelConfig, dtype: DTypeLike) -> RMSNorm | UnitNorm | None:
        """The norm of each query and key head, if they are normed."""
        if not config.qk_norm:
            return None
        return RMSNorm.of(config.head_dim, config, dtype)

    def __call__(
        self,
        x: Array | RoundedRows,
        rope: Rope,
        kv: Array,
        meta: AttentionMeta,
        kernels: Kernels,
    ) -> tuple[Array | PartialSums, Array]:
        """x [T, E], rope: the rotation of the rows, kv [N, page, 2K, D] -> ([T, E], kv)."""
        kernels = kernels.of_rows(meta.counts[2])
        heads = self.projected(x, kernels, meta.adapted)
        if isinstance(heads, Array):
            heads = heads.reshape(x.shape[0], -1, self.head_dim)
        o, kv = self.attended(heads, rope, kv, meta, kernels)
        return self.o.in_parts(o, kernels, meta.adapted), kv

    def attended(
        self,
        heads: Array | PartialSums,
        rope: Rope,
        kv: Array,
        meta: AttentionMeta,
        kernels: Kernels,
    ) -> tuple[Array, Array]:
        """heads [T, H + 2K, D] of queries, keys and values, or the product in parts that has them
        -> (the attention output [T, H * D], kv).
        """
        factors, options = self._pool_factors(), self.options()
        if isinstance(heads, PartialSums):
            assert kernels.parts is not None
            rotate = partial(kernels.parts.rotate_and_write, **factors)
            q, kv = self.write(heads, rope, kv, meta, rotate)
            o = kernels.attend(rope.scaled(q), kv, meta, **options)
        elif kernels.rotate_and_write is None:
            q, k, v = self.rotated(heads, rope, kernels)
            o, kv = kernels.paged_attention(rope.scaled(q), k, v, kv, meta, **options)
        else:
            q, kv = self.write(heads, rope, kv, meta, partial(kernels.rotate_and_write, **factors))
            o = kernels.attend(rope.scaled(q), kv, meta, **options)
        return o.reshape(heads.shape[0], -1), kv

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `jitney.kernels.interface.Kernels.attend` for the layer."""
        options: dict[str, Any] = {
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            **self._pool_factors(),
        }
        if self.sinks is not None:
            options["sinks"] = self.sinks[...].astype(jnp.float32)
        return options

    def takes_rounded(self, kernels: Kernels) -> bool:
        return self.qkv.takes_rounded(kernels)

    def projected(
        self, x: Array | RoundedRows, kernels: Kernels, adapted: Array | None
    ) -> Array | PartialSums:
        """x [T, E] -> queries, keys and values before the split into heads, [T, (H + 2K) * D]."""
        if self.o.summed:  # heads are split over devices
            return self.qkv(x, kernels, adapted=adapted)
        return self.qkv.in_parts(x, kernels, adapted)

    def _pool_factors(self) -> dict[str, Any]:
        if self.kv_scales is None:
            return {}
        return {"kv_scales": self.kv_scales[...]}

    def rotated(self, heads: Array, rope: Rope, kernels: Kernels) -> tuple[Array, Array, Array]:
        """heads [T, H + 2K, D] -> q [T, H, D] and k [T, K, D], normed and rotated, and v [T, K,
        D].
        """
        q, k, v = jnp.split(heads, [self.n_heads, self.n_heads + self.n_kv_heads], axis=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, kernels), self.k_norm(k, kernels)
        return rope.rotate(q), rope.rotate(k), v

    def write[Heads](
        self,
        heads: Heads,
        rope: Rope,
        kv: Array,
        meta: AttentionMeta,
        rotate_and_write: RotateAndWrite[Heads],
    ) -> tuple[Array, Array]:
        """heads [T, H + 2K, D] -> (q [T, H, D], kv with the keys and values), with one kernel that
        normalises, rotates and writes.
        """
        if self.q_norm is None or self.k_norm is None:
            return rotate_and_write(heads, rope.turns, kv, meta)
        norms = self.q_norm.weight[...], self.k_norm.weight[...]
        return rotate_and_write(heads, rope.turns, kv, meta, norms=norms, eps=self.q_norm.eps)


class GatedAttention(Attention):
    """Attention whose projection also makes a gate for each query head, after its query or after
    all queries (`ModelConfig.gates_apart`).
    """

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.gates_apart = config.gates_apart

    def __call__(
        self,
        x: Array | RoundedRows,
        rope: Rope,
        kv: Array,
        meta: AttentionMeta,
        kernels: Kernels,
    ) -> tuple[Array | PartialSums, Array]:
        kernels = kernels.of_rows(meta.counts[2])
        n_rows, split = x.shape[0], 2 * self.n_heads * self.head_dim
        rows = whole(self.projected(x, kernels, meta.adapted))
        if self.gates_apart:
            queries, gates = jnp.split(rows[:, :split], 2, axis=1)
            queries = queries.reshape(n_rows, self.n_heads, self.head_dim)
        else:
            pairs = rows[:, :split].reshape(n_rows, self.n_heads, 2, self.head_dim)
            queries, gates = pairs[:, :, 0], pairs[:, :, 1].reshape(n_rows, -1)
        others = rows[:, split:].reshape(n_rows, -1, self.head_dim)
        heads = jnp.concatenate([queries, others], axis=1)
        o, kv = self.attended(heads, rope, kv, meta, kernels)
        opened = jax.nn.sigmoid(gates.astype(jnp.float32))
        gated = (o.astype(jnp.float32) * opened).astype(x.dtype)
        return self.o.in_parts(gated, kernels, meta.adapted), kv
