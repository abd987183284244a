"""The kernel set for TPUs: implements `jitney.kernels.interface` with Pallas kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jitney.kernels.interface import AttentionMeta, AttentionOptions
from jitney.kernels.pallas_tpu.attention import attention_kernel
from jitney.kernels.pallas_tpu.interpreting import Interpret
from jitney.kernels.pallas_tpu.pool_layout import PoolLayout
from jitney.kernels.pallas_tpu.work_order import Constants
from jitney.kernels.scales import as_stored, scales_of

#: Scalar-prefetched arrays: those of `AttentionMeta` except the positions.
_SCALARS = 5
#: Most VMEM of the kernel: v7x has 64 MiB, v5e and v6e have 128.
_VMEM = 48 << 20
#: Most numbers in the query rows of a prompt's item: with their sums, scores and results they take
#: some twenty times as many bytes of VMEM. Heads of 256 use all of it with 4096 rows.
_TILE = 1 << 20
#: Supported page sizes.
_PAGES = 16, 32, 64, 128, 256
#: SMEM for the page table, in bytes: all three chips have 1 MiB.
_SMEM = 900 << 10
#: Chips on which a sum over devices should overlap with half of a product (`KernelSet`). The sums
#: then pass through main memory. Computed for 512 rows of an 8B model and a host of four chips: a
#: v7x moves 47 MiB more per layer, 13 us, and saves 24 us; a v6e 44 MiB, 28 us, and saves 16 us. A
#: v5e has no unit that overlaps them.
_SUMS_IN_HALVES = frozenset({"v7x"})


class _BlockSizes(NamedTuple):
    """Block sizes of the attention kernel, by chip and pool layout.

    Derived from the chips' data sheets, not measured. A copy from HBM takes about two microseconds,
    so bandwidth times two microseconds must be in flight at any time; with fewer key heads, as on
    each of many devices, blocks are smaller and more of them are in flight. Rows that share a block
    of keys do G * B operations per byte, which must exceed the chip's operations per byte read.
    """

    keys: int  # of a block
    depth: int  # blocks in memory at a time, one of them computed on
    rows: int  # most query rows times query heads of a prompt's item

    @classmethod
    def on(cls, chip: str, key_bytes: int, page: int) -> _BlockSizes:
        """The sizes on a chip ("" or unknown: any) for a pool with `key_bytes` per token (keys and
        values of all heads) and pages of `page` tokens.
        """
        limits = _CHIPS.get(chip, _OTHER)
        keys = max(_MANY_KEYS if key_bytes <= _SMALL else _KEYS, page)
        on_the_way = -(-limits.on_the_way // (keys * key_bytes))
        return cls(keys, min(max(on_the_way, 2) + 1, _DEEPEST), limits.rows)


class _Chip(NamedTuple):
    """Properties of a chip that determine block sizes."""

    on_the_way: int  # bytes in flight from HBM
    rows: int  # as in `_BlockSizes`; float32 sums and scores of 2048 take 2 MiB each


#: Properties by chip. Bandwidth and operations per byte: 819 GB/s and 240; 1,640 and 560; 3,690
#: (one of a chip's two devices) and 310.
_CHIPS = {
    "v5e": _Chip(2 << 20, 2048),
    "v6e": _Chip(4 << 20, 4096),
    "v7x": _Chip(8 << 20, 4096),
}
#: Defaults for other chips: enough bytes in flight for every chip, and rows that fit in every chip.
_OTHER = _Chip(8 << 20, 2048)
#: Keys of a block; keys of a block of small keys; most bytes of a small key.
_KEYS, _MANY_KEYS, _SMALL = 256, 512, 1024
#: A ring deeper than this takes more time to fill than it saves.
_DEEPEST = 12
#: Words in jax's `device_kind` of each chip.
_KINDS = {"v5e": ("v5 lite", "v5e"), "v6e": ("v6 lite", "v6e"), "v7x": ("tpu7", "v7")}


def chip_of(device_kind: str) -> str:
    """ "TPU v5 lite" -> "v5e"; "" for a chip that is not in the table."""
    kind = device_kind.lower()
    chips = (chip for chip, words in _KINDS.items() if any(word in kind for word in words))
    return next(chips, "")


@dataclass(frozen=True)
class PallasKernels:
    """Attention for TPUs; hashable, so that its methods can be constants of a jitted step."""

    #: See `Interpret`.
    interpret: Interpret = False
    #: A key of `_CHIPS`; "": another chip.
    chip: str = ""
    #: Block sizes in place of the table's.
    blocks: _BlockSizes | None = None

    @property
    def sums_in_halves(self) -> bool:
        """See `jitney.kernels.interface.KernelSet`."""
        return self.chip in _SUMS_IN_HALVES

    def pool_shape(
        self,
        n_pages: int,
        page_size: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        value_dim: int = 0,
    ) -> tuple[int, int, int, int]:
        """See `jitney.kernels.interface.Kernels.pool_shape`: [N, page, R, W]."""
        layout = PoolLayout.of(n_kv_heads, head_dim, jnp.dtype(dtype).itemsize, value_dim)
        return n_pages, page_size, layout.rows, layout.row_width

    def paged_attention(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        kv: jax.Array,
        meta: AttentionMeta,
        **options: Unpack[AttentionOptions],
    ) -> tuple[jax.Array, jax.Array]:
        """See `jitney.kernels.interface.Kernels.paged_attention`; sums are in float32, padding rows
        are finite.

        kv may have the shape of `pool_shape`, which is used in place, or the interface's shape,
        which is copied there and back. Raises ValueError for arguments that the kernel does not
        support.
        """
        n_rows, n_kv, dim = k.shape
        layout = PoolLayout.of(n_kv, dim, kv.dtype.itemsize, options.get("value_dim", 0))
        plain: Any = jax.ShapeDtypeStruct((*kv.shape[:2], layout.planes * n_kv, dim), kv.dtype)
        own_layout = kv.shape[2:] == (layout.rows, layout.row_width)
        if not own_layout and kv.shape != plain.shape:
            raise ValueError(
                f"a pool of {kv.shape} holds no {n_kv} heads of {dim}; make it as pool_shape says"
            )
        scales = scales_of(plain, options.get("kv_scales"))
        pairs = k
        if v is not None:
            pairs = jnp.stack([k, v], axis=2).reshape(n_rows, 2 * n_kv, dim)
        new = layout.new_rows(as_stored(pairs, plain, scales))
        pool = kv if own_layout else layout.pool(kv)
        fixed = self._constants(q, pool, meta, layout, options)
        fixed = replace(fixed, writes=True)
        o, pool = self._run(fixed, q, pool, new, meta, scales, options.get("sinks"))
        return o, pool if own_layout else layout.plain(pool)

    def attend(
        self,
        q: jax.Array,
        kv: jax.Array,
        meta: AttentionMeta,
        **options: Unpack[AttentionOptions],
    ) -> jax.Array:
        """See `jitney.kernels.interface.Kernels.attend`; kv has the interface's shape, [N, page,
        2K, D].
        """
        value_dim = options.get("value_dim", 0)
        n_kv = kv.shape[2] // (1 if value_dim else 2)
        layout = PoolLayout.of(n_kv, kv.shape[3], kv.dtype.itemsize, value_dim)
        scales = scales_of(kv, options.get("kv_scales"))
        own_layout = kv.shape[2:] == (layout.rows, layout.row_width)
        pool = kv if own_layout else layout.pool(kv)
        fixed = self._constants(q, pool, meta, layout, options)
        o, _ = self._run(fixed, q, pool, None, meta, scales, options.get("sinks"))
        return o

    def _constants(
        self,
        q: jax.Array,
        pool: jax.Array,
        meta: AttentionMeta,
        layout: PoolLayout,
        options: AttentionOptions,
    ) -> Constants:
        """Constants of a kernel that writes nothing. Raises ValueError for unsupported
        arguments.
        """
        _check(q, pool, meta)
        page = pool.shape[1]
        key_bytes = math.prod(pool.shape[2:]) * pool.dtype.itemsize
        blocks = self.blocks or _BlockSizes.on(self.chip, key_bytes, page)
        return Constants(
            layout=layout,
            n_heads=q.shape[1],
            page=page,
            keys=max(blocks.keys, page),
            depth=blocks.depth,
            block=_item_rows(q, meta, min(blocks.rows, _TILE // layout.width)),
            scale=options["scale"],
            window=options.get("window", 0),
            softcap=options.get("softcap", 0.0),
            scaled=options.get("kv_scales") is not None,
            sinks=options.get("sinks") is not None,
            writes=False,
        )

    def _run(
        self,
        fixed: Constants,
        q: jax.Array,
        pool: jax.Array,
        new: jax.Array | None,
        meta: AttentionMeta,
        scales: jax.Array | None,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Run the kernel: q [T, H, D], pool [N, page, R, W], new [T, R, W] -> (o [T, H, D],
        pool).
        """
        if not self.interpret:  # else XLA copies a small pool into VMEM first, with its free pages
            pool = pltpu.with_memory_space_constraint(pool, pltpu.HBM)
        queries = fixed.layout.queries(q)
        factors = [] if scales is None else [_by_lanes(scales, fixed.layout.heads)]
        if sinks is not None:
            factors.append(_sinks_by_lanes(sinks, fixed.layout.heads))
        first = _SCALARS + len(factors)  # operand of the pool
        arrays, results, aliases = [pool, queries], [queries], {first + 1: 0}
        if new is not None:
            arrays, results = [pool, new, queries], [pool, queries]
            aliases = {first: 0, first + 2: 1}
        in_hbm = pl.BlockSpec(memory_space=pl.ANY)
        in_vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
        call = pl.pallas_call(
            partial(attention_kernel, fixed),
            name="ragged_attention",
            interpret=self.interpret,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=_SCALARS,
                grid=(1,),
                in_specs=[in_vmem] * len(factors) + [in_hbm] * len(arrays),
                out_specs=[in_hbm] * len(results),
                scratch_shapes=_scratch(fixed, pool),
            ),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results],
            input_output_aliases=aliases,
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM),
        )
        scalars = (meta.kv_lens, meta.cu_q, meta.page_table, meta.write_rows, meta.counts)
        *written, o = call(*scalars, *factors, *arrays)
        return fixed.layout.values(o), written[0] if written else pool


def _scratch(fixed: Constants, pool: jax.Array) -> list[Any]:
    """Scratch memory: blocks of keys, and semaphores of copies and writes."""
    return [
        pltpu.VMEM((fixed.depth, fixed.keys, *pool.shape[2:]), pool.dtype),
        pltpu.SemaphoreType.DMA((fixed.depth,)),
        pltpu.SemaphoreType.DMA(()),
    ]


def _by_lanes(scales: jax.Array, heads: int) -> jax.Array:
    """scales [2K] -> [2, K, 1, 128]: those of keys and of values, broadcast over lanes."""
    pairs = scales.reshape(-1, 2).T
    return jnp.broadcast_to(pairs[:, :, None, None], (2, heads, 1, PoolLayout.LANES))


def _sinks_by_lanes(sinks: jax.Array, heads: int) -> jax.Array:
    """sinks [H] -> [K, G, 128]: the same in base 2, broadcast over lanes."""
    in_base_2 = sinks.reshape(heads, -1, 1) * math.log2(math.e)
    return jnp.broadcast_to(in_base_2, (*in_base_2.shape[:2], PoolLayout.LANES))


def _item_rows(q: jax.Array, meta: AttentionMeta, most: int) -> int:
    """Query rows of a prompt's item, a power of two: at most `most` rows times query heads; 0 in a
    decode-only bucket, which has as many rows as sequences.
    """
    n_rows, n_heads, _ = q.shape
    if n_rows == meta.kv_lens.shape[0]:
        return 0
    rows = max(1, min(most // n_heads, n_rows))
    return 1 << rows.bit_length() - 1


def _check(q: jax.Array, pool: jax.Array, meta: AttentionMeta) -> None:
    """Raise ValueError for arguments that the kernel does not support."""
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"kernels pallas compute in bfloat16 or float32, not {q.dtype}; choose one of these as "
            "dtype"
        )
    if pool.shape[1] not in _PAGES:
        raise ValueError(
            f"kernels pallas take a page_size of {', '.join(map(str, _PAGES))}, not {pool.shape[1]}"
        )
    n_seqs, n_pages = meta.page_table.shape
    size = 4 * n_seqs * -(-n_pages // PoolLayout.LANES) * PoolLayout.LANES
    if size > _SMEM:
        raise ValueError(
            f"a page table of {n_seqs} x {n_pages} takes {size >> 10} KiB of a TPU's scalar "
            "memory, more "
            f"than {_SMEM >> 10}; choose a larger page_size or fewer seats"
        )
