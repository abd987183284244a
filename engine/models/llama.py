"""The Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM2): one module, told apart by its
configuration.

The module holds weights only. KV pages, batch and attention come in as arguments, so the same
object serves every platform and every test.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jitney.engine.checkpoints.model_config import ModelConfig
from jitney.engine.models.layers import MLP, DType, Linear, RMSNorm, normal, rotary, rotate
from jitney.engine.models.quantization import KV_TYPES, quantise
from jitney.engine.models.sharding import lookup
from jitney.kernels.interface import AttentionMeta, Kernels, RotateAndWrite
from jitney.kernels.scales import LIMITS

#: Keys and values of random models stay within this, quantised or not.
RANDOM_KV = 16.0


class Attention(nnx.Module):
    """Grouped-query attention; query, key and value projections fused into qkv [E, (H + 2K) * D].

    kv_scales: float32 [2K], factors of an int8 or fp8 pool; None for pools of plain floats.
    """

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DType, rngs: nnx.Rngs):
        self.n_heads, self.n_kv_heads, self.head_dim = (
            config.n_heads,
            config.n_kv_heads,
            config.head_dim,
        )
        self.window = config.windows[layer]
        inner = config.n_heads * config.head_dim
        self.qkv = Linear(
            config.hidden_size, config.qkv_size, bias=config.qkv_bias, dtype=dtype, rngs=rngs
        )
        self.o = Linear(
            inner,
            config.hidden_size,
            bias=config.o_bias,
            dtype=dtype,
            rngs=rngs,
            summed=config.shards > 1,
        )
        self.q_norm = (
            RMSNorm(config.head_dim, config.rms_eps, dtype=dtype) if config.qk_norm else None
        )
        self.k_norm = (
            RMSNorm(config.head_dim, config.rms_eps, dtype=dtype) if config.qk_norm else None
        )
        self.kv_scales: nnx.Param | None = None

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        kv: jax.Array,
        meta: AttentionMeta,
        kernels: Kernels,
    ) -> tuple[jax.Array, jax.Array]:
        """x [T, E], rope (cos, sin), kv [N, page, 2K, D] -> ([T, E], kv)."""
        heads = self.qkv(x, kernels).reshape(x.shape[0], -1, self.head_dim)
        factors: dict[str, Any] = (
            {} if self.kv_scales is None else {"kv_scales": self.kv_scales[...]}
        )
        options: dict[str, Any] = {"scale": self.head_dim**-0.5, "window": self.window, **factors}
        if kernels.rotate_and_write is None:
            o, kv = kernels.paged_attention(
                *self.rotated(heads, rope, kernels), kv, meta, **options
            )
        else:
            q, kv = self.write(heads, rope, kv, meta, partial(kernels.rotate_and_write, **factors))
            o = kernels.attend(q, kv, meta, **options)
        return self.o(o.reshape(x.shape[0], -1), kernels), kv

    def rotated(
        self, heads: jax.Array, rope: tuple[jax.Array, jax.Array], kernels: Kernels
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """heads [T, H + 2K, D] -> q [T, H, D] and k [T, K, D], normed and rotated, and v [T, K,
        D].
        """
        q, k, v = jnp.split(heads, [self.n_heads, self.n_heads + self.n_kv_heads], axis=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, kernels), self.k_norm(k, kernels)
        return rotate(q, *rope), rotate(k, *rope), v

    def write(
        self,
        heads: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        kv: jax.Array,
        meta: AttentionMeta,
        rotate_and_write: RotateAndWrite,
    ) -> tuple[jax.Array, jax.Array]:
        """heads [T, H + 2K, D] -> (q [T, H, D], kv with the keys and values), by one kernel that
        norms and rotates.
        """
        if self.q_norm is None or self.k_norm is None:
            return rotate_and_write(heads, rope, kv, meta)
        norms = self.q_norm.weight[...], self.k_norm.weight[...]
        return rotate_and_write(heads, rope, kv, meta, norms=norms, eps=self.q_norm.eps)


class Block(nnx.Module):
    """One layer: attention and MLP, each normed before and added after."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DType, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_eps, dtype=dtype)
        self.attention = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        kv: jax.Array,
        meta: AttentionMeta,
        kernels: Kernels,
    ) -> tuple[jax.Array, jax.Array]:
        """x [T, E], kv [N, page, 2K, D] -> ([T, E], kv)."""
        o, kv = self.attention(self.attention_norm(x, kernels), rope, kv, meta, kernels)
        x = x + o
        return x + self.mlp(self.mlp_norm(x, kernels), kernels), kv


class Llama(nnx.Module):
    """embed [V, E], L blocks, a final norm, and lm_head [E, V] unless the embedding serves as
    one.
    """

    def __init__(self, config: ModelConfig, *, dtype: DType, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Param(normal(rngs, (config.vocab_share, config.hidden_size), 1.0, dtype))
        self.layers = nnx.List(
            [Block(config, layer, dtype=dtype, rngs=rngs) for layer in range(config.n_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_eps, dtype=dtype)
        self.lm_head = (
            None
            if config.tie_embeddings
            else Linear(config.hidden_size, config.vocab_share, bias=False, dtype=dtype, rngs=rngs)
        )

    def __call__(
        self, tokens: jax.Array, kv: list[jax.Array], meta: AttentionMeta, kernels: Kernels
    ) -> tuple[jax.Array, list[jax.Array]]:
        """tokens int32 [T], kv L times [N, page, 2K, D] -> (hidden [T, E] before the final norm,
        kv).
        """
        x = self.embedded(tokens)
        rope = rotary(meta.positions, self.config)
        pools = []
        for block, pool in zip(self.layers, kv, strict=True):
            x, pool = run_block(*nnx.split(block), x, rope, pool, meta, kernels)
            pools.append(pool)
        return x, pools

    def linears(self) -> Iterator[Linear]:
        """Every matrix that may be quantised; a tied head is the embedding, which is not."""
        for block in self.layers:
            yield from (block.attention.qkv, block.attention.o, block.mlp.gate_up, block.mlp.down)
        if self.lm_head is not None:
            yield self.lm_head

    def arrange(self, kernels: Kernels) -> None:
        """Lay the matrices out as the kernel set multiplies them fastest; the last thing done to a
        model's weights.
        """
        if kernels.arrange is None:
            return
        gates = [block.mlp.gate_up for block in self.layers]
        for linear in self.linears():
            gated = linear.bias is None and any(linear is gate for gate in gates)
            linear.arrange(kernels.arrange, 2 if gated else 1)

    def set_kv_scales(self, scales: list[jax.Array]) -> None:
        """Give each layer the factors of its quantised pool, float32 [2K]."""
        for block, layer in zip(self.layers, scales, strict=True):
            block.attention.kv_scales = nnx.data(nnx.Param(layer))

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """tokens int32 [T] -> [T, E]."""
        if self.config.shards > 1:
            return lookup(self.embed[...], tokens)
        return jnp.take(self.embed[...], tokens, axis=0, mode="clip")

    def logits(self, hidden: jax.Array, kernels: Kernels) -> jax.Array:
        """Final norm and output head of the selected rows only: hidden [R, E] -> float32 [R, V].

        Of a model split over devices: the columns of the device's own share of the vocabulary.
        """
        x = self.norm(hidden, kernels)
        if self.lm_head is None:
            return kernels.project(x, self.embed[...])
        return self.lm_head(x, kernels, jnp.float32)


@partial(jax.jit, static_argnames=("graph", "kernels"))
def run_block(
    graph: nnx.GraphDef[Block],
    weights: Any,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    kv: jax.Array,
    meta: AttentionMeta,
    kernels: Kernels,
) -> tuple[jax.Array, jax.Array]:
    """One block as a function of its weights: layers of the same make are traced once per bucket,
    not once each.

    The calls are inlined when the step is compiled, so the program is the unrolled one.
    """
    return nnx.merge(graph, weights)(x, rope, kv, meta, kernels)


def random_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: DType = jnp.float32,
    weights: str = "plain",
    kv: str = "auto",
) -> Llama:
    """A model with random weights: the same seed gives the same weights on every platform, rounded
    to dtype.

    weights: one of `quantization.SCHEMES`. kv: auto, or one of `quantization.KV_TYPES` for a model
    with factors of pools of that type.
    """
    model = Llama(config, dtype=dtype, rngs=nnx.Rngs(seed))
    if weights != "plain":
        for linear in model.linears():
            linear.set_matrix(quantise(linear.packed.kernel, scheme=weights, dtype=dtype))
    if kv in KV_TYPES:
        scales = jnp.full((2 * config.n_kv_heads,), RANDOM_KV / LIMITS[KV_TYPES[kv]], jnp.float32)
        model.set_kv_scales([scales] * config.n_layers)
    return model


def abstract_model(
    config: ModelConfig, *, dtype: DType = jnp.float32, weights: str = "plain", kv: str = "auto"
) -> Llama:
    """The model with shapes and dtypes in place of arrays; costs no memory. See `random_model`."""
    return nnx.eval_shape(lambda: random_model(config, dtype=dtype, weights=weights, kv=kv))
