"""Factors of quantised KV pools: the largest key and value of each head, seen while the model reads
a text.

The factors travel with the weights (`Attention.kv_scales`); what a pool stores is a number over its
factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from jitney.engine.models.protocol import Model
from jitney.engine.models.sharding import AXIS
from jitney.kernels.interface import AttentionMeta
from jitney.kernels.scales import LIMITS
from jitney.kernels.select import select

#: Keys and values may exceed what the text gave by this factor before they are cut off. The steps
#: of int8 grow as much (SmolLM2-135M diverges from its plain self by 2.1e-3 nats a token without a
#: margin, 2.4 with 1.1, 4.6 with 1.5); fp8 has as many digits left wherever its factor puts a
#: number.
_MARGINS = {jnp.dtype(jnp.int8): 1.1, jnp.dtype(jnp.float8_e4m3fn): 2.0}
#: Most positions that are read, and positions per page of the pool that they are read into.
_MOST_TOKENS, PAGE = 512, 16


def calibrate(
    model: Model, tokens: Sequence[int], kv_dtype: DTypeLike, mesh: Mesh | None = None
) -> None:
    """Give the model factors for pools of kv_dtype (int8 or fp8), from what its heads do on
    `tokens`.
    """
    seen = _largest(model, tokens, mesh)
    model.set_kv_scales([factors(_MARGINS[jnp.dtype(kv_dtype)] * most, kv_dtype) for most in seen])


def factors(most: Array, kv_dtype: DTypeLike) -> Array:
    """most float32 [2K], the largest magnitude to be stored of each key and value head -> factors,
    float32 [2K].
    """
    return jnp.where(most > 0, most, 1.0) / LIMITS[jnp.dtype(kv_dtype)]


def _largest(model: Model, tokens: Sequence[int], mesh: Mesh | None = None) -> list[Array]:
    """Largest magnitude of each layer's keys (rotated) and values by head, float32 [2K], after
    reading `tokens` in one step into a small pool of plain floats, with the reference kernels."""
    graph, state = nnx.split(model)
    config, dtype, kernels = model.config, model.dtype, select("", "reference")
    count = min(len(tokens), _MOST_TOKENS, config.context_length)
    pages = -(-count // PAGE)
    shape = (pages + 1, PAGE, 2 * config.n_kv_heads, config.head_dim)

    def read(state: Any, row: Array, meta: AttentionMeta) -> list[Array]:
        empty = [jnp.zeros(shape, dtype)] * config.n_layers
        _, pools = nnx.merge(graph, state)(row, empty, meta, kernels)
        return [_largest_by_head(pool) for pool in pools]

    if mesh is not None:
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)
        read = jax.shard_map(
            read,
            mesh=mesh,
            in_specs=(specs, PartitionSpec(), PartitionSpec()),
            out_specs=PartitionSpec(AXIS),
            check_vma=False,
        )
    # In numpy: what all hosts have alike is no array of any device.
    meta = jax.tree.map(np.asarray, one_prompt(count, pages))
    return jax.jit(read)(state, np.asarray(tokens[:count], np.int32), meta)


def _largest_by_head(pool: Array) -> Array:
    """pool [N, page, 2K, D] -> float32 [2K]."""
    return jnp.max(jnp.abs(pool), axis=(0, 1, 3)).astype(jnp.float32)


def one_prompt(count: int, pages: int) -> AttentionMeta:
    """A step of one sequence with `count` rows from position 0, in pages 1, 2, ..."""
    rows = jnp.arange(count, dtype=jnp.int32)
    table = jnp.zeros((2, pages), jnp.int32).at[0].set(jnp.arange(1, pages + 1))
    return AttentionMeta(
        kv_lens=jnp.array([count, 0]),
        cu_q=jnp.array([0, count, count]),
        page_table=table,
        write_rows=rows + PAGE,
        positions=rows,
        counts=jnp.array([0, 1, count]),
    )
