"""The Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM2): one module, told apart by its configuration.

The module holds weights only. KV pages, batch and attention come in as arguments, so the same object serves every
platform and every test.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jitney.engine.models.config import ModelConfig
from jitney.engine.models.layers import MLP, DType, Linear, RMSNorm, normal, rotary, rotate
from jitney.kernels.interface import AttentionMeta, Kernels


class Attention(nnx.Module):
    """Grouped-query attention; query, key and value projections fused into qkv [E, (H + 2K) * D]."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DType, rngs: nnx.Rngs):
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.window = config.windows[layer]
        inner = config.n_heads * config.head_dim
        self.qkv = Linear(config.hidden_size, config.qkv_size, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.o = Linear(inner, config.hidden_size, bias=config.o_bias, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(config.head_dim, config.rms_eps, dtype=dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_eps, dtype=dtype) if config.qk_norm else None

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], kv: jax.Array, meta: AttentionMeta,
                 kernels: Kernels) -> tuple[jax.Array, jax.Array]:
        """x [T, E], rope (cos, sin), kv [N, page, 2K, D] -> ([T, E], kv)."""
        q, k, v = self.project(x, kernels)
        o, kv = kernels.paged_attention(rotate(q, *rope), rotate(k, *rope), v, kv, meta, scale=self.head_dim**-0.5,
                                        window=self.window)
        return self.o(o.reshape(x.shape[0], -1), kernels), kv

    def project(self, x: jax.Array, kernels: Kernels) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [T, E] -> q [T, H, D], k and v [T, K, D], not yet rotated."""
        heads = self.qkv(x, kernels).reshape(x.shape[0], -1, self.head_dim)
        q, k, v = jnp.split(heads, [self.n_heads, self.n_heads + self.n_kv_heads], axis=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v


class Block(nnx.Module):
    """One layer: attention and MLP, each normed before and added after."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DType, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_eps, dtype=dtype)
        self.attention = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], kv: jax.Array, meta: AttentionMeta,
                 kernels: Kernels) -> tuple[jax.Array, jax.Array]:
        """x [T, E], kv [N, page, 2K, D] -> ([T, E], kv)."""
        o, kv = self.attention(self.attention_norm(x), rope, kv, meta, kernels)
        x = x + o
        return x + self.mlp(self.mlp_norm(x), kernels), kv


class Llama(nnx.Module):
    """embed [V, E], L blocks, a final norm, and lm_head [E, V] unless the embedding serves as one."""

    def __init__(self, config: ModelConfig, *, dtype: DType, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Param(normal(rngs, (config.vocab_size, config.hidden_size), 1.0, dtype))
        self.layers = nnx.List([Block(config, layer, dtype=dtype, rngs=rngs) for layer in range(config.n_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_eps, dtype=dtype)
        self.lm_head = (None if config.tie_embeddings else
                        Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, rngs=rngs))

    def __call__(self, tokens: jax.Array, kv: list[jax.Array], meta: AttentionMeta,
                 kernels: Kernels) -> tuple[jax.Array, list[jax.Array]]:
        """tokens int32 [T], kv L times [N, page, 2K, D] -> (hidden [T, E] before the final norm, kv)."""
        x = jnp.take(self.embed[...], tokens, axis=0, mode="clip")
        rope = rotary(meta.positions, self.config)
        pools = []
        for block, pool in zip(self.layers, kv, strict=True):
            x, pool = run_block(*nnx.split(block), x, rope, pool, meta, kernels)
            pools.append(pool)
        return x, pools

    def logits(self, hidden: jax.Array, kernels: Kernels) -> jax.Array:
        """Final norm and output head of the selected rows only: hidden [R, E] -> float32 [R, V]."""
        x = self.norm(hidden)
        if self.lm_head is None:
            return kernels.project(x, self.embed[...])
        return self.lm_head(x, kernels, jnp.float32)


@partial(jax.jit, static_argnames=("graph", "kernels"))
def run_block(graph: nnx.GraphDef[Block], weights: Any, x: jax.Array, rope: tuple[jax.Array, jax.Array], kv: jax.Array,
              meta: AttentionMeta, kernels: Kernels) -> tuple[jax.Array, jax.Array]:
    """One block as a function of its weights: layers of the same make are traced once per bucket, not once each.

    The calls are inlined when the step is compiled, so the program is the unrolled one.
    """
    return nnx.merge(graph, weights)(x, rope, kv, meta, kernels)


def random_model(config: ModelConfig, *, seed: int = 0, dtype: DType = jnp.float32) -> Llama:
    """A model with random weights: the same seed gives the same weights on every platform, rounded to dtype."""
    return Llama(config, dtype=dtype, rngs=nnx.Rngs(seed))


def abstract_model(config: ModelConfig, *, dtype: DType = jnp.float32) -> Llama:
    """The model with shapes and dtypes in place of arrays; costs no memory."""
    return nnx.eval_shape(lambda: random_model(config, dtype=dtype))
