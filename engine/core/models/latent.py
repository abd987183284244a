"""Latent attention: DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437), GLM-4.7-Flash and Mistral 4.

A token's keys and values of all heads are products of one small row, its latent; beside it, one
rotated part of a key serves all heads. The pool stores only the latent and that part. The products
are absorbed: a query is multiplied by its head's key matrix before attention, and the output by the
head's value matrix after it. So attention reads latents directly, as one key head whose first
numbers are also its value.

Axes: T rows, E embed, H heads, R size of a latent, N size of a head's part that is not rotated, P
of the rotated part, V of a head's value.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jitney.engine.core.models.attention import Mixer
from jitney.engine.core.models.layers import Layer, Linear, RMSNorm, normal, rounded
from jitney.engine.core.models.llama import Llama
from jitney.engine.core.models.mixture import MixtureBlock
from jitney.engine.core.models.prediction import PredictionHead
from jitney.engine.core.models.rope import Rope
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.names import GGUF, HF, Dialect, FileFormat
from jitney.kernels.interface import AttentionMeta, Kernels, OneOf
from jitney.kernels.partial_sums import PartialSums

#: Epsilon of the norms of latents; the other norms have the model's own.
_EPS = 1e-6
_HF = replace(HF, shared="mlp.shared_experts", reads_layers_behind=False)
_GGUF = replace(GGUF, reads_layers_behind=False)


class _HeadMatrices(Layer):
    """One matrix for each head, weight [H * I, O], or [H * O, I] if `turned`; never quantised.
    After packing, [H, ...], each in the layout that the kernel set multiplies fastest.
    """

    def __init__(
        self,
        heads: int,
        size_in: int,
        size_out: int,
        *,
        turned: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.heads = heads
        self.turned = turned
        rows, columns = (size_out, size_in) if turned else (size_in, size_out)
        spread = 1.5 * size_in**-0.5
        self.weight = nnx.Param(normal(rngs, (heads * rows, columns), spread, dtype))

    @property
    def _apart(self) -> Array:
        """The matrices [H, I, O], or as packed."""
        weight = self.weight[...]
        if weight.ndim > 2:
            return weight
        apart = weight.reshape(self.heads, -1, weight.shape[1])
        return apart.swapaxes(1, 2) if self.turned else apart

    def __call__(self, x: Array, kernels: Kernels) -> Array:
        """x [T, H, I] -> [T, H, O] in x's dtype, summed in float32."""
        matrices = self._apart
        if not kernels.takes_one_of:
            if len(x) == 1:
                # For a single row XLA on a GPU writes out the unsummed products as float32; a
                # second row of zeros makes it an ordinary product.
                return self(jnp.pad(x, ((0, 1), (0, 0), (0, 0))), kernels)[:1]
            return jnp.einsum(
                "thi,hio->tho", x, matrices, preferred_element_type=jnp.float32
            ).astype(x.dtype)

        def product(at: tuple[Array, Array]) -> Array:
            matrix: Any = OneOf(matrices, at[1])
            return kernels.matmul(at[0], matrix, x.dtype)

        heads = jnp.arange(self.heads, dtype=jnp.int32)
        return jax.lax.map(product, (x.swapaxes(0, 1), heads)).swapaxes(0, 1)

    def pack(self, kernels: Kernels) -> None:
        """Pack each matrix."""
        if kernels.pack is not None:
            self.weight = nnx.Param(jax.lax.map(kernels.pack, self._apart))


class _LatentAttention(Mixer):
    """Latent attention. qkv [E, C + R + P] makes the queries of all heads, the latent and the
    rotated part of the key; with q_b [C, H (N + P)] it makes rows that are normed and multiplied by
    q_b to get the queries. o [H V, E] is the output projection.
    """

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        own = config.latent
        assert own is not None
        self.latent = own
        self.n_heads = config.n_heads
        self.scale = config.attention_scale
        size, heads = config.hidden_size, config.n_heads
        self.qkv = Linear(size, config.qkv_size, bias=False, dtype=dtype, rngs=rngs)
        if own.query_rank:
            columns = heads * own.query_dim
            self.q_b = Linear(own.query_rank, columns, bias=False, dtype=dtype, rngs=rngs)
            self.query_norm = RMSNorm(own.query_rank, _EPS, dtype=dtype)
        else:
            self.q_b = self.query_norm = None
        self.latent_norm = RMSNorm(own.rank, _EPS, dtype=dtype)
        matrices = partial(_HeadMatrices, heads, dtype=dtype, rngs=rngs)
        self.to_latent = matrices(own.plain_dim, own.rank, turned=False)
        self.from_latent = matrices(own.rank, own.value_dim, turned=True)
        columns = heads * own.value_dim
        is_split = config.shards > 1
        self.o = Linear(columns, size, bias=False, dtype=dtype, rngs=rngs, summed=is_split)

    def __call__(
        self, x: Array, rope: Rope, kv: Array, meta: AttentionMeta, kernels: Kernels
    ) -> tuple[Array | PartialSums, Array]:
        """x [T, E], kv [N, page, 1, R + P] -> ([T, E], kv)."""
        kernels = kernels.of_rows(meta.counts[2])
        own, n_rows = self.latent, x.shape[0]
        # Rounded explicitly before each rotation: see `NoNorm`.
        rows = rounded(self.qkv(x, kernels, adapted=meta.adapted), x.dtype)
        end = rows.shape[1] - own.rank - own.rotated_dim
        queries, latents, turning = jnp.split(rows, [end, end + own.rank], axis=1)
        if self.q_b is not None and self.query_norm is not None:
            normed = self.query_norm(queries, kernels)
            queries = rounded(self.q_b(normed, kernels, adapted=meta.adapted), x.dtype)
        heads = queries.reshape(n_rows, self.n_heads, own.query_dim)
        absorbed = self.to_latent(heads[..., : own.plain_dim], kernels)
        q = jnp.concatenate([absorbed, rope.rotate(heads[..., own.plain_dim :])], axis=-1)
        q = rope.scaled(rounded(q, x.dtype))
        parts = [self.latent_norm(latents, kernels)[:, None], rope.rotate(turning[:, None])]
        k = jnp.concatenate(parts, axis=-1)
        o, kv = kernels.paged_attention(q, k, None, kv, meta, scale=self.scale, value_dim=own.rank)
        o = self.from_latent(o, kernels).reshape(n_rows, -1)
        return self.o.in_parts(o, kernels, meta.adapted), kv


class _Block(MixtureBlock):
    attention_class = _LatentAttention


class Latent(Llama):
    block = _Block

    @classmethod
    def dialect(cls, config: ModelConfig, file_format: FileFormat) -> Dialect:
        assert config.latent is not None
        names = _HF if file_format == "hf" else _GGUF
        return replace(names, paired_rows=config.latent.paired)


class LatentPredictionHead(PredictionHead, Latent):
    """See `PredictionHead`."""
