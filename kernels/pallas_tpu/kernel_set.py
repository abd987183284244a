"""The kernel set for TPUs: what `jitney.kernels.interface` asks for, in our own Pallas kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jitney.kernels.interface import AttentionMeta
from jitney.kernels.pallas_tpu.attention import attention_kernel
from jitney.kernels.pallas_tpu.layout import LANES, Layout, layout_of
from jitney.kernels.pallas_tpu.walk import Constants
from jitney.kernels.scales import as_stored, scales_of

#: Query rows of a prompt's item times query heads, at most: float32 sums and scores of an item take
#: 2 MiB then.
ITEM_ROWS = 2048
#: Arrays that are in scalar memory before the kernel starts: `AttentionMeta` but for the positions.
SCALARS = 5
#: VMEM the kernel may take: v7x has 64 MiB, v5e and v6e have 128.
VMEM = 48 << 20
#: Tokens of a page.
PAGES = 16, 32, 64, 128, 256
#: SMEM for the page table: all three have 1 MiB.
SMEM = 900 << 10


@dataclass(frozen=True)
class PallasKernels:
    """Attention for TPUs; hashable, so that its methods can be constants of a jitted step.

    interpret: run on any platform, slowly, as `jax.experimental.pallas.pallas_call` does. keys: of
    a block; depth: blocks in memory at a time.
    """

    interpret: Any = False
    keys: int = 256
    depth: int = 3

    def paged_attention(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kv: jax.Array,
        meta: AttentionMeta,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        kv_scales: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """See `jitney.kernels.interface.PagedAttention`; sums in float32, rows of padding are
        finite.

        kv may have the interface's shape, or that of `layout.pool_shape`, which is used
        where it lies; the other one is copied there and back. Raises ValueError for what the kernel
        cannot do.
        """
        (n_rows, n_kv, dim), layout = k.shape, layout_of(k.shape[1], k.shape[2], kv.dtype.itemsize)
        plain: Any = jax.ShapeDtypeStruct((*kv.shape[:2], 2 * n_kv, dim), kv.dtype)
        native = kv.shape[2:] == (layout.rows, layout.width)
        if not native and kv.shape != plain.shape:
            raise ValueError(
                f"a pool of {kv.shape} holds no {n_kv} heads of {dim}; make it as pool_shape says"
            )
        scales = scales_of(plain, kv_scales)
        new = as_stored(jnp.stack([k, v], axis=2).reshape(n_rows, 2 * n_kv, dim), plain, scales)
        o, pool = self.run(
            layout,
            q,
            kv if native else layout.pool(kv),
            layout.new_rows(new),
            meta,
            scales,
            scale=scale,
            window=window,
            softcap=softcap,
        )
        return o, pool if native else layout.plain(pool)

    def attend(
        self,
        q: jax.Array,
        kv: jax.Array,
        meta: AttentionMeta,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        kv_scales: jax.Array | None = None,
    ) -> jax.Array:
        """See `jitney.kernels.interface.Attend`; kv of that shape, [N, page, 2K, D]."""
        layout, scales = (
            layout_of(kv.shape[2] // 2, kv.shape[3], kv.dtype.itemsize),
            scales_of(kv, kv_scales),
        )
        native = kv.shape[2:] == (layout.rows, layout.width)
        return self.run(
            layout,
            q,
            kv if native else layout.pool(kv),
            None,
            meta,
            scales,
            scale=scale,
            window=window,
            softcap=softcap,
        )[0]

    def run(
        self,
        layout: Layout,
        q: jax.Array,
        pool: jax.Array,
        new: jax.Array | None,
        meta: AttentionMeta,
        scales: jax.Array | None,
        **how: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """The kernel: q [T, H, D], pool [N, page, R, W], new [T, R, W] -> (o [T, H, D], pool)."""
        check(q, pool, meta)
        fixed = Constants(
            layout,
            q.shape[1],
            page=pool.shape[1],
            keys=max(self.keys, pool.shape[1]),
            depth=self.depth,
            block=item_rows(q, meta),
            scaled=scales is not None,
            writes=new is not None,
            **how,
        )
        queries = layout.queries(q)
        somewhere = pl.BlockSpec(memory_space=pl.ANY)
        optional, specs = [], []
        if scales is not None:
            factors = jnp.broadcast_to(
                scales.reshape(-1, 2).T[:, :, None, None], (2, layout.heads, 1, LANES)
            )
            optional, specs = [factors], [pl.BlockSpec(memory_space=pltpu.VMEM)]
        arrays = [pool, queries] if new is None else [pool, new, queries]
        results = [queries] if new is None else [pool, queries]
        first = SCALARS + len(optional)
        call = pl.pallas_call(
            partial(attention_kernel, fixed),
            name="ragged_attention",
            interpret=self.interpret,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=SCALARS,
                grid=(1,),
                in_specs=[*specs, *[somewhere] * len(arrays)],
                out_specs=[somewhere] * len(results),
                scratch_shapes=[
                    pltpu.VMEM((fixed.depth, fixed.keys, *pool.shape[2:]), pool.dtype),
                    pltpu.SemaphoreType.DMA((fixed.depth,)),
                    pltpu.SemaphoreType.DMA(()),
                ],
            ),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
            input_output_aliases={first + 1: 0} if new is None else {first: 0, first + 2: 1},
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM),
        )
        *written, o = call(
            meta.kv_lens,
            meta.cu_q,
            meta.page_table,
            meta.write_rows,
            meta.counts,
            *optional,
            *arrays,
        )
        return layout.values(o), written[0] if written else pool


def item_rows(q: jax.Array, meta: AttentionMeta) -> int:
    """Query rows of a prompt's item, a power of two; 0 in a bucket of as many rows as sequences:
    one of decode only.
    """
    n_rows, n_heads, _ = q.shape
    rows = max(1, min(ITEM_ROWS // n_heads, n_rows))
    return 0 if n_rows == meta.kv_lens.shape[0] else 1 << rows.bit_length() - 1


def check(q: jax.Array, pool: jax.Array, meta: AttentionMeta) -> None:
    """Raise ValueError, in one line, for what the kernel cannot do."""
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"kernels pallas compute in bfloat16 or float32, not {q.dtype}; choose one of these as "
            "dtype"
        )
    if pool.shape[1] not in PAGES:
        raise ValueError(
            f"kernels pallas take a page_size of {', '.join(map(str, PAGES))}, not {pool.shape[1]}"
        )
    n_seqs, n_pages = meta.page_table.shape
    if (size := 4 * n_seqs * -(-n_pages // LANES) * LANES) > SMEM:
        raise ValueError(
            f"a page table of {n_seqs} x {n_pages} takes {size >> 10} KiB of a TPU's scalar "
            "memory, more "
            f"than {SMEM >> 10}; choose a larger page_size or fewer seats"
        )
