"""The kernel set for NVIDIA GPUs: what `jitney.kernels.interface` asks for, launched through
jax-triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jitney.kernels import reference
from jitney.kernels.int4 import Int4, matmul_int4
from jitney.kernels.interface import AttentionMeta, KernelError
from jitney.kernels.scales import limit_of, scales_of
from jitney.kernels.triton_gpu import attention, matmul, sampling, write
from jitney.kernels.triton_gpu.configs import Decode, Prompt, attention_config, matmul_config
from jitney.kernels.triton_gpu.launch import Launch

#: Bytes per activation -> rows up to which a product with narrow weights has a kernel of its own.
#: Above 64 it is bound by arithmetic, not by weights, and XLA's product is the faster one; float32
#: takes three times the registers.
NARROW_ROWS = {2: 64, 4: 16}
#: Inputs that a program of the fp8 product multiplies at a time.
FP8_INPUTS = 64


@dataclass(frozen=True)
class TritonKernels:
    """Every kernel, for one kind of GPU. Hashable, so that its methods can be constants of a jitted
    step.

    tiles: (compute capability, padded head dim, bytes per activation, query heads per key head) ->
    tile sizes; a bench tries others.
    """

    launch: Launch
    tiles: Callable[[int, int, int, int], tuple[Decode, Prompt]] = attention_config

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
        zero.
        """
        kv = self.write(k, v, kv, meta, kv_scales=kv_scales)
        o = self.attend(
            q, kv, meta, scale=scale, window=window, softcap=softcap, kv_scales=kv_scales
        )
        return o, kv

    def write(
        self,
        k: jax.Array,
        v: jax.Array,
        kv: jax.Array,
        meta: AttentionMeta,
        *,
        kv_scales: jax.Array | None = None,
    ) -> jax.Array:
        """k and v [T, K, D] into the pages of kv [N, page, 2K, D], in place."""
        n_kv, dim = k.shape[1:]
        scales, limit = self.pool_scales(kv, kv_scales)
        pool = jax.new_ref(kv)
        self.launch(
            write.write_pages,
            k,
            v,
            meta.write_rows,
            scales,
            pool,
            out=(),
            grid=(k.shape[0],),
            warps=4,
            stages=1,
            K=n_kv,
            D=dim,
            DP=power_of_two(dim),
            HEADS=power_of_two(n_kv),
            POOL=kv.shape[0] * kv.shape[1],
            LIMIT=limit,
        )
        return jax.freeze(pool)

    def rotate_and_write(
        self,
        heads: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        kv: jax.Array,
        meta: AttentionMeta,
        *,
        norms: tuple[jax.Array, jax.Array] | None = None,
        eps: float = 0.0,
        kv_scales: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """See `jitney.kernels.interface.RotateAndWrite`."""
        n_rows, n_all, dim = heads.shape
        n_kv = kv.shape[2] // 2
        n_heads = n_all - 2 * n_kv
        scales, limit = self.pool_scales(kv, kv_scales)
        pool = jax.new_ref(kv)
        q = self.launch(
            write.rotate_pages,
            heads,
            *rope,
            *(norms or (scales, scales)),
            meta.write_rows,
            scales,
            pool,
            out=jax.ShapeDtypeStruct((n_rows, n_heads, dim), heads.dtype),
            grid=(n_rows, n_all),
            warps=1,
            stages=1,
            H=n_heads,
            K=n_kv,
            D=dim,
            HALF=power_of_two(dim // 2),
            POOL=kv.shape[0] * kv.shape[1],
            LIMIT=limit,
            NORMED=norms is not None,
            EPS=float(eps),
        )
        return q, jax.freeze(pool)

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
        """See `jitney.kernels.interface.Attend`. A bucket with as many rows as sequences is one of
        decode only.
        """
        scales, limit = self.pool_scales(kv, kv_scales)
        (n_rows, n_heads, dim), n_kv, n_seqs = q.shape, kv.shape[2] // 2, meta.kv_lens.shape[0]
        shape = {"H": n_heads, "K": n_kv, "D": dim, "DP": power_of_two(dim), "WINDOW": window}
        tile = shape | {
            "PAGE": kv.shape[1],
            "P": meta.page_table.shape[1],
            "SEATS": power_of_two(n_seqs),
            "SCALE": float(scale),
            "SOFTCAP": float(softcap),
            "SCALED": limit > 0,
            "PRECISION": "ieee" if q.dtype == jnp.float32 else "tf32",
        }
        o = None if n_rows == n_seqs else self.prompts(q, kv, meta, scales, tile)
        return self.decode(q, kv, meta, scales, shape, tile, o)

    def prompts(
        self,
        q: jax.Array,
        kv: jax.Array,
        meta: AttentionMeta,
        scales: jax.Array,
        tile: dict[str, Any],
    ) -> jax.Array:
        """o [T, H, D] with the rows of prompt chunks; padding is zero, rows of decoding sequences
        are undefined.
        """
        (n_rows, n_heads, _), n_kv = q.shape, tile["K"]
        config = self.tiles(self.launch.sm, tile["DP"], q.dtype.itemsize, n_heads // n_kv)[1]
        packed = max(config.block_m, power_of_two(n_heads // n_kv))
        blocks = n_rows // (packed // (n_heads // n_kv)) + meta.kv_lens.shape[0]
        return self.launch(
            attention.prompt_attention,
            q,
            kv,
            meta.page_table,
            meta.kv_lens,
            meta.cu_q,
            meta.counts,
            scales,
            out=like(q),
            grid=(n_kv, blocks),
            warps=config.warps,
            stages=config.stages,
            T=n_rows,
            BLOCK_M=packed,
            BLOCK_N=config.block_n,
            **tile,
        )

    def decode(
        self,
        q: jax.Array,
        kv: jax.Array,
        meta: AttentionMeta,
        scales: jax.Array,
        shape: dict[str, Any],
        tile: dict[str, Any],
        o: jax.Array | None,
    ) -> jax.Array:
        """Rows of decoding sequences, added to o in place; o None: a step of decode only."""
        n_seqs, n_heads, n_kv = meta.kv_lens.shape[0], q.shape[1], tile["K"]
        config = self.tiles(self.launch.sm, tile["DP"], q.dtype.itemsize, n_heads // n_kv)[0]
        rows = max(16, power_of_two(n_heads // n_kv))
        length = tile["P"] * tile["PAGE"]
        ladder = splits_of(
            config, min(length, tile["WINDOW"] + config.block_n) if tile["WINDOW"] else length
        )
        ladder |= {"BLOCK_M": rows, "BLOCK_N": config.block_n, "SPAN": config.span}
        programs = min(config.programs, n_seqs * n_kv * ladder["SPLITS"])
        parts = (
            jax.ShapeDtypeStruct((n_seqs, n_heads, ladder["SPLITS"], tile["DP"]), jnp.float32),
            jax.ShapeDtypeStruct((n_seqs, n_heads, ladder["SPLITS"], 2), jnp.float32),
        )
        args = (q, kv, meta.page_table, meta.kv_lens, meta.counts, scales)
        options = {
            "grid": (programs,),
            "warps": config.warps,
            "stages": config.stages,
            "S": n_seqs,
            "PROGRAMS": programs,
            "ALONE": o is None,
            **ladder,
            **tile,
        }
        if o is None:
            o, *split = self.launch(
                attention.decode_attention, *args, out=(like(q), *parts), **options
            )
            whole = jax.new_ref(o)
        else:
            whole = jax.new_ref(o)
            split = self.launch(attention.decode_attention, *args, whole, out=parts, **options)
        if ladder["SPLITS"] > 1:
            self.launch(
                attention.merge_splits,
                meta.kv_lens,
                meta.counts,
                *split,
                whole,
                out=(),
                grid=(n_kv, n_seqs),
                warps=4,
                stages=2,
                **ladder,
                **shape,
            )
        return jax.freeze(whole)

    def matmul_int4(self, x: jax.Array, weights: Int4) -> jax.Array:
        """See `jitney.kernels.int4.Int4Matmul`; beyond NARROW_ROWS rows it is XLA's, with the
        weights written out.
        """
        (n_rows, size_in), size_out, group = x.shape, weights.shape[1], weights.group_size
        if n_rows > NARROW_ROWS[x.dtype.itemsize]:
            return matmul_int4(x, weights)
        config, splits = matmul_config(self.launch.sm, size_in // group, size_out)
        block = max(16, power_of_two(n_rows))
        y = self.launch(
            matmul.matmul_int4,
            x,
            weights.packed,
            weights.scales,
            weights.packed if weights.zeros is None else weights.zeros,
            out=jax.ShapeDtypeStruct((splits, n_rows, size_out), jnp.float32),
            grid=(-(-size_out // config.block_n), splits),
            warps=config.warps,
            stages=config.stages,
            M=n_rows,
            SIZE_IN=size_in,
            SIZE_OUT=size_out,
            R=group,
            BLOCK_M=block,
            BLOCK_N=config.block_n,
            SPLITS=splits,
            ZEROS=weights.zeros is not None,
            PRECISION="tf32x3",
        )
        return jnp.sum(y, axis=0)

    def matmul(self, x: jax.Array, w: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
        """See `jitney.kernels.interface.Matmul`: XLA's product, but for the fp8 weights that it
        would write out.

        On Hopper it widens them inside the product. On sm_80 and sm_89 it makes a bfloat16 copy of
        every weight in every step: 4.9 times the bytes of a decode step of Llama-3.1-8B.
        """
        (n_rows, size_in), size_out = x.shape, w.shape[1]
        if (
            w.dtype != jnp.float8_e4m3fn
            or self.launch.sm >= 90
            or n_rows > NARROW_ROWS[x.dtype.itemsize]
        ):
            return reference.matmul(x, w, dtype)
        config, splits = matmul_config(self.launch.sm, size_in // FP8_INPUTS, size_out)
        y = self.launch(
            matmul.matmul_fp8,
            x,
            jax.lax.bitcast_convert_type(w, jnp.uint8),
            out=jax.ShapeDtypeStruct((splits, n_rows, size_out), jnp.float32),
            grid=(-(-size_out // config.block_n), splits),
            warps=config.warps,
            stages=config.stages,
            M=n_rows,
            SIZE_IN=size_in,
            SIZE_OUT=size_out,
            BLOCK_M=max(16, power_of_two(n_rows)),
            BLOCK_N=config.block_n,
            BLOCK_K=FP8_INPUTS,
            SPLITS=splits,
            PRECISION="tf32x3",
        )
        return jnp.sum(y, axis=0).astype(dtype)

    def threshold(self, scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
        """See `jitney.kernels.interface.Threshold`."""
        n_rows, vocab = scaled.shape
        return self.launch(
            sampling.threshold,
            scaled,
            top_k,
            top_p,
            out=jax.ShapeDtypeStruct((n_rows,), jnp.float32),
            grid=(n_rows,),
            warps=16,
            stages=3,
            V=vocab,
            BLOCK=min(4096, power_of_two(vocab)),
        )

    def pool_scales(self, kv: jax.Array, kv_scales: jax.Array | None) -> tuple[jax.Array, float]:
        """(float32 [2K] factors, or one nobody reads; the pool's limit). Raises KernelError for
        what cannot run.
        """
        if jnp.dtype(kv.dtype) in (jnp.float8_e4m3fn, jnp.float8_e5m2) and self.launch.sm < 89:
            raise KernelError(
                f"fp8 pools need compute capability 8.9, this GPU has {self.launch.sm / 10}; use "
                "int8"
            )
        scales = scales_of(kv, kv_scales)
        return jnp.ones((1,), jnp.float32) if scales is None else scales, limit_of(kv)


def splits_of(config: Decode, length: int) -> dict[str, Any]:
    """How sequences of at most `length` keys are split: SPLITS (a power of two) and DOUBLINGS of
    the span at most.
    """
    splits = min(config.splits, power_of_two(-(-length // config.span)))
    return {
        "SPLITS": splits,
        "DOUBLINGS": max(0, math.ceil(math.log2(length / (splits * config.span)))),
    }


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape and dtype of x, for an output."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
