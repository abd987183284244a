"""The kernel set for NVIDIA GPUs: implements `jitney.kernels.interface` with Triton kernels,
launched through jax-triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Unpack

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jitney.kernels import delta_net as plain_delta_net
from jitney.kernels import mamba as plain_mamba
from jitney.kernels import reference, w8a8
from jitney.kernels import routing as plain_routing
from jitney.kernels.delta_net import DeltaRows, DeltaSequences, DeltaState, DeltaWeights
from jitney.kernels.experts import ExpertBlocks, Stack, gate, opened_size
from jitney.kernels.int4 import Int4
from jitney.kernels.interface import AttentionMeta, AttentionOptions, KernelError
from jitney.kernels.mamba import MambaWeights
from jitney.kernels.partial_sums import PartialSums
from jitney.kernels.routing import Mixture, Routes
from jitney.kernels.scales import limit_of, scales_of
from jitney.kernels.triton_gpu import (
    attention,
    delta_net,
    narrow_products,
    routing,
    top_k_top_p,
    write_kv,
)
from jitney.kernels.triton_gpu import experts as expert_products
from jitney.kernels.triton_gpu.launch import Launch
from jitney.kernels.triton_gpu.tiles import (
    LATENT_HEADS,
    DecodeTiles,
    ProductTiles,
    PromptTiles,
    attention_tiles,
    latent_tiles,
    most_registers,
    parts_of,
)
from jitney.kernels.w8a8 import Fp8, RoundedRows

_FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
#: Most elements that 32-bit offsets can address, and most programs along a launch's second axis.
_MOST_ELEMENTS, _MOST_BLOCKS = 1 << 31, 65535
#: Most dims of a head whose splits one program joins: 32 registers a thread for 32 splits.
_MERGED_DIMS = 128
#: Most choices of experts that one program deals out to blocks; pairs of choices that it compares,
#: and places that it writes, at a time: some tens a thread.
_MOST_CHOICES, _COMPARED, _FILLED = 1024, 1 << 14, 1 << 10
#: Most experts that one warp chooses from.
_EXPERTS_OF_A_WARP = 128
#: With fewer columns than this, XLA writes the single products of one row to memory (seen with 128
#: and 2048, not with 4096).
_FEW_COLUMNS = 4096
#: Least compute capability whose kernels support fp8.
_FP8_SINCE = 89
#: Columns of a memory that a program keeps in registers: 32 registers a thread, with 128 rows.
_DELTA_COLUMNS = 32
#: Most and least rows of a chunk: fewer rows are computed one after another.
_DELTA_CHUNK, _FEW_OF_CHUNK = 32, 8
#: Dims of a chunk's keys that are multiplied at a time: all of them would spill registers.
_CHUNK_DIMS = 32
#: Least decay factor of a memory, so that its log is finite.
_LEAST_DECAY = 1e-30
#: Inputs of a convolution that a program writes to the taps.
_KEPT_CHANNELS = 512
#: Least number of inputs of a product.
_LEAST_INPUTS = 16
#: Inputs that a program of the fp8 product multiplies at a time.
_FP8_INPUTS = 64
#: Least rows of codes, except of a single row: cuBLASLt multiplies no fewer. XLA would pad the rows
#: by a kernel before each product, and pass on a slice of its result (see `_in_one_piece`).
_FP8_ROWS = 16
#: Numbers of a row that a warp rounds to fp8: 16 per thread; and 4 if it adds up to 8 parts first.
_ROUNDED_BY_WARP, _ADDED_BY_WARP = 512, 128


class _Prompts(Protocol):
    """Attention of the rows of prompt chunks over the same pool, by kernels of another library."""

    def __call__(
        self,
        q: jax.Array,
        kv: jax.Array,
        meta: AttentionMeta,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> jax.Array:
        """o [T, H, D] with the rows of prompt chunks; padding is zero, rows of decoding sequences
        are undefined. kv: [N, page, 2K, D] of q's dtype.
        """
        ...


@dataclass(frozen=True)
class TritonKernels:
    """Every kernel, for one kind of GPU. Hashable, so that its methods can be constants of a jitted
    step.
    """

    launch: Launch
    #: (compute capability, padded head dim, bytes per activation, query heads per key head, bytes
    #: per element of the pool) -> tile sizes; a bench tries others.
    tiles: Callable[[int, int, int, int, int], tuple[DecodeTiles, PromptTiles]] = attention_tiles
    #: Attention of prompts in place of the kernel here; None: the kernel here.
    prompts: _Prompts | None = None

    def paged_attention(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        kv: jax.Array,
        meta: AttentionMeta,
        **options: Unpack[AttentionOptions],
    ) -> tuple[jax.Array, jax.Array]:
        """See `jitney.kernels.interface.Kernels.paged_attention`; sums in float32, rows of padding
        are zero.
        """
        if v is None:
            kv = reference.write_kv(kv, k, None, meta.write_rows)
        else:
            kv = self.write(k, v, kv, meta, kv_scales=options.get("kv_scales"))
        return self.attend(q, kv, meta, **options), kv

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
            write_kv.write_pages,
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
            DP=_power_of_two(dim),
            HEADS=_power_of_two(n_kv),
            POOL=kv.shape[0] * kv.shape[1],
            LIMIT=limit,
        )
        return jax.freeze(pool)

    def delta_net(
        self,
        x: jax.Array,
        rates: jax.Array,
        weights: DeltaWeights,
        state: DeltaState,
        meta: AttentionMeta,
        *,
        eps: float,
    ) -> tuple[jax.Array, DeltaState]:
        """See `jitney.kernels.interface.DeltaNet`. A bucket with as many rows as sequences is
        decode-only; in other buckets XLA computes convolution, norm and gates.
        """
        sequences = DeltaSequences.of(meta, state.lengths)
        if not _rows_are_sequences(len(x), sequences, meta):
            return plain_delta_net.delta_net(
                x, rates, weights, state, meta, eps=eps, recur=self.recur
            )
        return self._delta_net_rows(x, rates, weights, state, sequences, eps)

    def _delta_net_rows(
        self,
        x: jax.Array,
        rates: jax.Array,
        weights: DeltaWeights,
        state: DeltaState,
        sequences: DeltaSequences,
        eps: float,
    ) -> tuple[jax.Array, DeltaState]:
        """`delta_net` for steps in which row s belongs to sequence s."""
        _, n_heads, dim, width = state.memory.shape
        n_taps, channels = state.taps.shape[1:]
        read, again, memory = self._pass_row(
            delta_net.pass_row,
            [x, _in_one_piece(rates), *weights[:3]],
            state,
            sequences,
            SCALE=dim**-0.5,
            NORM_EPS=plain_delta_net.NORM_EPS,
        )
        taps, lengths = jax.new_ref(state.taps), jax.new_ref(state.lengths)
        o = self.launch(
            delta_net.close_row,
            x,
            read,
            weights.norm,
            again,
            *_places(sequences),
            taps,
            lengths,
            out=jax.ShapeDtypeStruct((len(x), n_heads * width), x.dtype),
            grid=(len(x), n_heads),
            warps=4,
            stages=1,
            H=n_heads,
            V=width,
            COLUMNS=_power_of_two(width),
            TAPS=_power_of_two(n_taps),
            CHANNELS=_power_of_two(-(-channels // n_heads)),
            EPS=float(eps),
            **_row_sizes(x, state),
        )
        return o, DeltaState(*map(jax.freeze, (taps, memory, lengths)))

    def _pass_row(
        self,
        kernel: Any,
        inputs: list[jax.Array],
        state: DeltaState,
        sequences: DeltaSequences,
        **own: Any,
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Launch `delta_net.pass_row` or `pass_mamba_row` -> (outputs, float32 [T, H, V]; 1 for
        rows that are in the state already, int32 [T]; a reference to the new memory).

        inputs: the kernel's arguments before the state, with the rows first. own: constants that
        only this kernel has.
        """
        _, n_heads, dim, width = state.memory.shape
        n_seqs, block = len(inputs[0]), min(_power_of_two(width), _DELTA_COLUMNS)
        memory = jax.new_ref(state.memory)
        read, again = self.launch(
            kernel,
            *inputs,
            state.taps,
            state.lengths,
            *_places(sequences),
            memory,
            out=(
                jax.ShapeDtypeStruct((n_seqs, n_heads, width), jnp.float32),
                jax.ShapeDtypeStruct((n_seqs,), jnp.int32),
            ),
            grid=(n_seqs, n_heads, -(-width // block)),
            warps=4,
            stages=1,
            G=(state.taps.shape[2] - n_heads * width) // (2 * dim),
            H=n_heads,
            D=dim,
            V=width,
            DIMS=_power_of_two(dim),
            COLUMNS=block,
            **_row_sizes(inputs[0], state),
            **own,
        )
        return read, again, memory

    def mamba(
        self,
        x: jax.Array,
        weights: MambaWeights,
        state: DeltaState,
        meta: AttentionMeta,
        *,
        limits: tuple[float, float],
    ) -> tuple[jax.Array, DeltaState]:
        """See `jitney.kernels.interface.Mamba`; decode-only buckets are as in `delta_net`."""
        sequences = DeltaSequences.of(meta, state.lengths)
        if not _rows_are_sequences(len(x), sequences, meta):
            return plain_mamba.mamba(x, weights, state, meta, limits=limits, recur=self.recur)
        n_taps, channels = state.taps.shape[1:]
        bias = weights.taps if weights.taps_bias is None else weights.taps_bias  # unread then
        read, again, memory = self._pass_row(
            delta_net.pass_mamba_row,
            [x, weights.taps, bias, weights.log_decay, weights.rate_bias, weights.skip],
            state,
            sequences,
            BIASED=weights.taps_bias is not None,
            SHORTEST=float(limits[0]),
            LONGEST=min(float(limits[1]), float(jnp.finfo(jnp.float32).max)),
        )
        taps, lengths = jax.new_ref(state.taps), jax.new_ref(state.lengths)
        self.launch(
            delta_net.keep_row,
            x,
            again,
            *_places(sequences),
            taps,
            lengths,
            out=(),
            grid=(len(x), -(-channels // _KEPT_CHANNELS)),
            warps=4,
            stages=1,
            TAPS=_power_of_two(n_taps),
            CHANNELS=_KEPT_CHANNELS,
            **_row_sizes(x, state),
        )
        return read, DeltaState(*map(jax.freeze, (taps, memory, lengths)))

    def short_conv(
        self, x: jax.Array, weights: jax.Array, state: DeltaState, meta: AttentionMeta
    ) -> tuple[jax.Array, DeltaState]:
        """See `jitney.kernels.interface.ShortConv`; one kernel in decode-only buckets, XLA's in
        others.
        """
        sequences = DeltaSequences.of(meta, state.lengths)
        if not _rows_are_sequences(len(x), sequences, meta):
            return plain_delta_net.short_conv(x, weights, state, meta)
        n_taps, channels = weights.shape
        taps, lengths = jax.new_ref(state.taps), jax.new_ref(state.lengths)
        o = self.launch(
            delta_net.pass_conv_row,
            _in_one_piece(x),
            weights,
            *_places(sequences),
            taps,
            lengths,
            out=jax.ShapeDtypeStruct((len(x), channels), x.dtype),
            grid=(len(x),),
            warps=8,
            stages=1,
            TAPS=_power_of_two(n_taps),
            CHANNELS=_power_of_two(channels),
            **_row_sizes(x, state),
        )
        return o, state._replace(taps=jax.freeze(taps), lengths=jax.freeze(lengths))

    def recur(
        self, rows: DeltaRows, memory: jax.Array, sequences: DeltaSequences, count: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """See `jitney.kernels.delta_net.Recur`; the output of padding rows is undefined."""
        n_slots, n_heads, dim, width = memory.shape
        n_rows, n_seqs = len(rows.decay), len(sequences.starts)
        columns = max(min(_power_of_two(width), _DELTA_COLUMNS), _LEAST_INPUTS)
        dims = max(_power_of_two(dim), _LEAST_INPUTS)
        beta = rows.decay if rows.beta is None else rows.beta  # unread then
        # A step with as many sequences as rows has only decode rows and drafts.
        is_chunked = n_seqs < n_rows >= _DELTA_CHUNK
        weights = self._weights_of_chunks(rows, sequences) if is_chunked else [beta] * 4  # unread
        memory_ref = jax.new_ref(memory)
        read = self.launch(
            delta_net.pass_rows,
            *rows[:-1],
            beta,
            sequences.ends,
            sequences.stops,
            sequences.reads,
            sequences.writes,
            sequences.starts,
            *weights,
            memory_ref,
            out=jax.ShapeDtypeStruct(rows.values.shape, jnp.float32),
            grid=(n_seqs, n_heads, -(-width // columns)),
            warps=8 if is_chunked else 4,
            stages=2 if is_chunked else 1,
            V=width,
            M=n_slots,
            DIMS=dims,
            COLUMNS=columns,
            PART=max(dims // 4, _LEAST_INPUTS),
            CHUNK=_DELTA_CHUNK if is_chunked else 0,
            **_chunk_sizes(rows, sequences),
        )
        return read, jax.freeze(memory_ref)

    def _weights_of_chunks(self, rows: DeltaRows, sequences: DeltaSequences) -> list[jax.Array]:
        """Launch `delta_net.weigh_chunks`."""
        n_rows, n_heads = rows.decay.shape
        vectors = jax.ShapeDtypeStruct((n_rows, n_heads), jnp.float32)
        matrices = jax.ShapeDtypeStruct((n_rows, n_heads, _DELTA_CHUNK), jnp.float32)
        corrects = rows.beta is not None
        return self.launch(
            delta_net.weigh_chunks,
            rows.queries,
            rows.keys,
            jnp.log(jnp.maximum(rows.decay, _LEAST_DECAY)),
            rows.beta if corrects else rows.decay,  # unread then
            sequences.ends,
            sequences.stops,
            sequences.starts,
            out=[vectors, vectors, matrices, matrices if corrects else vectors],
            grid=(-(-n_rows // _FEW_OF_CHUNK), n_heads),
            warps=4,
            stages=1,
            S=len(sequences.starts),
            DIMS=_CHUNK_DIMS,
            SEQUENCES=_power_of_two(len(sequences.starts)),
            PIECES=_power_of_two(sequences.stops.shape[1]),
            CHUNK=_DELTA_CHUNK,
            DOUBLINGS=_DELTA_CHUNK.bit_length() - 1,
            **_chunk_sizes(rows, sequences),
        )

    def rotate_and_write(
        self,
        heads: jax.Array | PartialSums,
        rope: tuple[jax.Array, jax.Array],
        kv: jax.Array,
        meta: AttentionMeta,
        *,
        norms: tuple[jax.Array, jax.Array] | None = None,
        eps: float = 0.0,
        kv_scales: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """See `jitney.kernels.interface.RotateAndWrite`, and `PartialProducts`."""
        n_rows, dim = heads.shape[0], kv.shape[3]
        if not isinstance(heads, PartialSums):
            _check_rows(heads)
            heads = _in_one_piece(heads)
        product, parts = _product_of(heads)
        n_all, n_kv = math.prod(heads.shape[1:]) // dim, kv.shape[2] // 2
        n_heads = n_all - 2 * n_kv
        scales, limit = self.pool_scales(kv, kv_scales)
        q_norm, k_norm = norms or (scales, scales)  # unread without norms
        pool = jax.new_ref(kv)
        q = self.launch(
            write_kv.rotate_pages,
            *product,
            *rope,
            q_norm,
            k_norm,
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
            HALF=_power_of_two(dim // 2),
            POOL=kv.shape[0] * kv.shape[1],
            LIMIT=limit,
            NORMED=norms is not None,
            EPS=float(eps),
            **parts,
        )
        return q, jax.freeze(pool)

    def attend(
        self,
        q: jax.Array,
        kv: jax.Array,
        meta: AttentionMeta,
        **options: Unpack[AttentionOptions],
    ) -> jax.Array:
        """See `jitney.kernels.interface.Kernels.attend`. A bucket with as many rows as sequences is
        decode-only. `prompts` is not used if heads have sinks, nor if keys serve as values, which
        needs a single key head.
        """
        _check_rows(q)
        scale, window = options["scale"], options.get("window", 0)
        softcap, sinks = options.get("softcap", 0.0), options.get("sinks")
        value_dim = options.get("value_dim", 0)
        scales, limit = self.pool_scales(kv, options.get("kv_scales"))
        n_rows, n_heads, dim = q.shape
        n_seqs, pages = meta.page_table.shape
        rest = dim - value_dim if value_dim else 0
        constants = {
            "H": n_heads,
            "K": _head_tiles(n_heads, q.dtype.itemsize) if value_dim else kv.shape[2] // 2,
            "D": value_dim or dim,
            "DP": _power_of_two(value_dim or dim),
            "SHARED": value_dim > 0,
            "REST": rest,
            "RP": max(_LEAST_INPUTS, _power_of_two(rest)) if rest else 0,
            "CELL": kv.shape[2] * dim,
            "STEP": 0 if value_dim else 2 * dim,
            "PAGE": kv.shape[1],
            "P": pages,
            "SEATS": _power_of_two(n_seqs),
            "SCALE": float(scale),
            "WINDOW": window,
            "SOFTCAP": float(softcap),
            "SCALED": limit > 0,
            "SINKS": sinks is not None,
            "PRECISION": "ieee" if q.dtype == jnp.float32 else "tf32",
        }
        o = None
        factors = scales, scales if sinks is None else sinks  # unread then
        others = self.prompts if sinks is None and not value_dim else None
        if n_rows != n_seqs and others is not None:
            o = others(q, kv, meta, scale=scale, window=window, softcap=softcap)
        elif n_rows != n_seqs:
            o = self._prompts(q, kv, meta, factors, constants)
        return self._decode(q, kv, meta, factors, constants, o)

    @property
    def _product_tiles(self) -> ProductTiles:
        return ProductTiles(self.launch.sm)

    def _tiles(
        self, q: jax.Array, kv: jax.Array, constants: dict[str, Any]
    ) -> tuple[DecodeTiles, PromptTiles]:
        group = constants["H"] // constants["K"]
        if constants["SHARED"]:
            return latent_tiles(self.launch.sm, constants["DP"], q.dtype.itemsize, group)
        return self.tiles(
            self.launch.sm, constants["DP"], q.dtype.itemsize, group, kv.dtype.itemsize
        )

    def _prompts(
        self,
        q: jax.Array,
        kv: jax.Array,
        meta: AttentionMeta,
        factors: tuple[jax.Array, jax.Array],
        constants: dict[str, Any],
    ) -> jax.Array:
        """o [T, H, D] with the rows of prompt chunks; padding is zero, rows of decoding sequences
        are undefined. factors: of the pool, and sinks.
        """
        n_rows, n_heads, _ = q.shape
        n_kv = constants["K"]
        group = n_heads // n_kv
        _, tiles = self._tiles(q, kv, constants)
        packed = max(tiles.block_m, _power_of_two(group))
        blocks = n_rows // (packed // group) + meta.kv_lens.shape[0]
        if blocks > _MOST_BLOCKS:
            raise KernelError(
                f"{n_rows} rows of {group} query heads a key head are {blocks} blocks, a GPU takes "
                f"{_MOST_BLOCKS}: choose a smaller token_budget"
            )
        return self.launch(
            attention.prompt_attention,
            q,
            kv,
            meta.page_table,
            meta.kv_lens,
            meta.cu_q,
            meta.counts,
            *factors,
            out=_output_of(q, constants),
            grid=(n_kv, blocks),
            warps=tiles.warps,
            stages=tiles.stages,
            T=n_rows,
            BLOCK_M=packed,
            BLOCK_N=tiles.block_n,
            **constants,
        )

    def _decode(
        self,
        q: jax.Array,
        kv: jax.Array,
        meta: AttentionMeta,
        factors: tuple[jax.Array, jax.Array],
        constants: dict[str, Any],
        o: jax.Array | None,
    ) -> jax.Array:
        """Attention of the decoding sequences' rows, written to o in place; o None: a decode-only
        step.
        """
        n_seqs = meta.kv_lens.shape[0]
        n_heads, n_kv = constants["H"], constants["K"]
        group = n_heads // n_kv
        tiles, _ = self._tiles(q, kv, constants)
        longest = constants["P"] * constants["PAGE"]
        if constants["WINDOW"]:
            longest = min(longest, constants["WINDOW"] + tiles.block_n)
        splitting = _splitting_of(tiles, longest)
        splits = splitting["SPLITS"]
        programs = min(tiles.programs, n_seqs * n_kv * splits)
        part_o = jax.ShapeDtypeStruct((n_seqs, n_heads, splits, constants["DP"]), jnp.float32)
        part_stats = jax.ShapeDtypeStruct((n_seqs, n_heads, splits, 2), jnp.float32)
        decode = partial(
            self.launch,
            attention.decode_attention,
            q,
            kv,
            meta.page_table,
            meta.kv_lens,
            meta.counts,
            *factors,
            grid=(programs,),
            warps=tiles.warps,
            stages=tiles.stages,
            registers=most_registers(self.launch.sm, tiles),
            S=n_seqs,
            PROGRAMS=programs,
            ALONE=o is None,
            PAIRED=kv.dtype.itemsize == 1,
            BLOCK_M=max(16, _power_of_two(group)),
            **splitting,
            **constants,
        )
        if o is None:
            o, *parts = decode(out=(_output_of(q, constants), part_o, part_stats))
            whole = jax.new_ref(o)
        else:
            whole = jax.new_ref(o)
            parts = decode(whole, out=(part_o, part_stats))
        if splits > 1:
            self._merge(meta, parts, whole, {**splitting, **constants})
        return jax.freeze(whole)

    def _merge(
        self, meta: AttentionMeta, parts: list[jax.Array], whole: Any, constants: dict[str, Any]
    ) -> None:
        """Join the splits in `parts` and write the results to the rows of `whole`."""
        block = min(constants["DP"], _MERGED_DIMS)
        names = ("H", "D", "DP", "WINDOW", "BLOCK_N", "SPAN", "SPLITS", "DOUBLINGS")
        self.launch(
            attention.merge_splits,
            meta.kv_lens,
            meta.counts,
            *parts,
            whole,
            out=(),
            grid=(constants["H"] * constants["DP"] // block, meta.kv_lens.shape[0]),
            warps=4,
            stages=1,
            BLOCK_D=block,
            **{name: constants[name] for name in names},
        )

    def matmul_int4(self, x: jax.Array, weights: Int4, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """See `jitney.kernels.interface.KernelSet.matmul_int4`."""
        return _added(self._int4_sums(x, weights, dtype), dtype)

    def _int4_sums(self, x: jax.Array, weights: Int4, dtype: DTypeLike) -> jax.Array:
        """See `_narrow_sums`."""
        packed, scales, zeros = weights
        return self._narrow_sums(
            narrow_products.matmul_int4,
            x,
            packed,
            scales,
            packed if zeros is None else zeros,
            dtype=dtype,
            size_out=weights.shape[1],
            inputs=weights.group_size,
            R=weights.group_size,
            ZEROS=zeros is not None,
        )

    def gated_int4(self, x: jax.Array, weights: Int4) -> jax.Array:
        """See `jitney.kernels.interface.KernelSet.gated_int4`."""
        n_rows, size_in = x.shape
        inner = weights.shape[1] // 2
        tiles = self._product_tiles.gated(n_rows, x.dtype.itemsize, inner)
        block_m = min(tiles.block_m, max(16, _power_of_two(n_rows)))
        row_blocks = -(-n_rows // block_m)
        packed, scales, zeros = weights
        return self.launch(
            narrow_products.gated_int4,
            x,
            packed,
            scales,
            packed if zeros is None else zeros,
            out=jax.ShapeDtypeStruct((n_rows, inner), x.dtype),
            grid=(row_blocks * -(-inner // tiles.block_n),),
            warps=tiles.warps,
            stages=tiles.stages,
            M=n_rows,
            SIZE_IN=size_in,
            SIZE_OUT=inner,
            R=weights.group_size,
            BLOCK_M=block_m,
            BLOCK_N=tiles.block_n,
            ZEROS=zeros is not None,
            PRECISION="tf32x3",
        )

    def matmul(self, x: jax.Array, w: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """See `jitney.kernels.interface.Kernels.matmul`: XLA's product, except for fp8 weights
        that XLA would write to memory as bfloat16.

        On Hopper XLA widens them inside the product. On sm_80 and sm_89 it makes a bfloat16 copy of
        every weight in every step: 4.9 times the bytes of a decode step of Llama-3.1-8B.

        For one row and few columns XLA writes all single products to memory as float32 and sums
        them afterwards: the same row twice makes it an ordinary product, and takes no kernel.
        """
        if len(x) == 1 and w.shape[-1] < _FEW_COLUMNS:
            return self.matmul(jnp.broadcast_to(x, (2, x.shape[1])), w, dtype)[:1]
        written_out = w.dtype == jnp.float8_e4m3fn and self.launch.sm < 90
        if not written_out or not self._product_tiles.are_few(len(x), x.dtype.itemsize):
            return reference.matmul(x, w, dtype)
        sums = self._narrow_sums(
            narrow_products.matmul_fp8,
            x,
            jax.lax.bitcast_convert_type(w, jnp.uint8),
            dtype=dtype,
            size_out=w.shape[1],
            inputs=_FP8_INPUTS,
            BLOCK_K=_FP8_INPUTS,
        )
        return _added(sums, dtype)

    def matmul_fp8(
        self, x: jax.Array | RoundedRows, w: Fp8, dtype: DTypeLike = jnp.float32
    ) -> jax.Array:
        """See `jitney.kernels.w8a8.matmul_fp8`: XLA's product of rows that one Triton kernel
        rounds; XLA would need two or three kernels.
        """
        return w8a8.matmul_fp8(x, w, dtype, rounded=self.round_to_fp8)

    def round_to_fp8(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """See `jitney.kernels.w8a8.round_to_fp8`; codes may have more rows, see `_FP8_ROWS`."""
        return self._rounded(narrow_products.round_rows, x, shape=x.shape)

    def norm_parts(
        self, x: jax.Array, added: PartialSums, weight: jax.Array, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """See `jitney.kernels.interface.PartialProducts`: sums and norm in one kernel."""
        product, parts = _product_of(added)
        total, normed = self.launch(
            narrow_products.norm_parts,
            x,
            *product,
            weight,
            out=(
                jax.ShapeDtypeStruct(x.shape, x.dtype),
                jax.ShapeDtypeStruct(x.shape, added.dtype),
            ),
            grid=(len(x),),
            EPS=float(eps),
            **_sizes_of_rows(x.shape[1], _ADDED_BY_WARP),
            **parts,
        )
        return total, normed

    def rounded_norm_sum(
        self, x: jax.Array, added: jax.Array | PartialSums, weight: jax.Array, eps: float
    ) -> tuple[jax.Array, RoundedRows]:
        """See `jitney.kernels.interface.RoundingKernels`: sum, norm and rounding in one kernel."""
        product, parts = _product_of(added)
        total, codes, units = self._rounded(
            narrow_products.norm_rows,
            x,
            *product,
            weight,
            shape=x.shape,
            others=(jax.ShapeDtypeStruct(x.shape, x.dtype),),
            by_warp=_ADDED_BY_WARP if parts["PARTS"] else _ROUNDED_BY_WARP,
            EPS=float(eps),
            **parts,
        )
        return total, RoundedRows(codes, units, added.dtype)

    def multiply_in_parts(
        self, x: jax.Array | RoundedRows, w: jax.Array | Fp8 | Int4, scale: jax.Array | None = None
    ) -> PartialSums | None:
        """See `jitney.kernels.interface.PartialProducts`: XLA multiplies all parts at once, except
        of int4.
        """
        if isinstance(w, Int4):
            assert isinstance(x, jax.Array)
            return self._int4_in_parts(x, w)
        if isinstance(w, Fp8):
            _, size_out, size_in = w.kernel.shape
        else:
            size_in, size_out = w.shape
        n_parts = parts_of(x.shape[0], size_in, size_out)
        if n_parts == 1:
            return None
        if isinstance(w, Fp8):
            codes, units = w8a8.codes_of(x, self.round_to_fp8)
            kernel, axes = w.kernel[0].reshape(size_out, n_parts, -1), ((2,), (1,))
            sums = _part_products(codes, kernel, axes, _FP8_ROWS, jax.lax.Precision.HIGHEST)
            return PartialSums(sums, units, w.scale, len(units), x.dtype)
        assert isinstance(x, jax.Array)
        if w.dtype == w8a8.FP8:
            return None  # see `matmul`
        kernel, axes = w.reshape(n_parts, -1, size_out).astype(x.dtype), ((1,), (0,))
        return PartialSums(_part_products(x, kernel, axes, 2), None, scale, len(x), x.dtype)

    def _int4_in_parts(self, x: jax.Array, weights: Int4) -> PartialSums | None:
        size_in, size_out = weights.shape
        groups = size_in // weights.group_size
        if self._product_tiles.matmul(len(x), x.dtype.itemsize, groups, size_out)[1] == 1:
            return None
        sums = self._int4_sums(x, weights, jnp.float32)
        return PartialSums(sums, None, None, len(x), x.dtype)

    def rounded_gated_fp8(self, x: jax.Array | RoundedRows, w: Fp8) -> RoundedRows:
        """See `jitney.kernels.interface.RoundingKernels`: one kernel applies the scales and the
        gate to XLA's sums, and rounds the result.
        """
        codes, units = w8a8.codes_of(x, self.round_to_fp8)
        sums = w8a8.sums_of_codes(codes, w, x.dtype)
        shape = len(units), sums.shape[1] // 2
        codes, units = self._rounded(narrow_products.gate_rows, sums, units, w.scale, shape=shape)
        return RoundedRows(codes, units, x.dtype)

    def _rounded(
        self,
        kernel: Any,
        *args: jax.Array,
        shape: tuple[int, ...],
        others: tuple[jax.ShapeDtypeStruct, ...] = (),
        by_warp: int = _ROUNDED_BY_WARP,
        **constants: Any,
    ) -> Any:
        """Launch a kernel with a program for each row of its result -> (`others`, codes and scales
        of the result). shape: of the result, [T, I]. by_warp: numbers of a row per warp.
        """
        n_rows, size = shape
        padded = n_rows if n_rows == 1 else max(n_rows, _FP8_ROWS)
        units = jax.ShapeDtypeStruct((n_rows, 1), jnp.float32)
        return self.launch(
            kernel,
            *args,
            out=(*others, jax.ShapeDtypeStruct((padded, size), w8a8.FP8), units),
            grid=(n_rows,),
            LEAST=w8a8.LEAST,
            GREATEST=w8a8.GREATEST_FP8,
            **_sizes_of_rows(size, by_warp),
            **constants,
        )

    def gated(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """See `jitney.kernels.interface.Kernels.gated`; gates and ups go through memory."""
        return gate(self.matmul(x, w, x.dtype), x.dtype)

    def _narrow_sums(
        self,
        kernel: Any,
        x: jax.Array,
        *weights: jax.Array,
        dtype: DTypeLike,
        size_out: int,
        inputs: int,
        **constants: Any,
    ) -> jax.Array:
        """x [M, I] times weights with `size_out` columns, read `inputs` rows at a time: in parts
        [P, M, O], which are float32, or in `dtype` if there is one.
        """
        n_rows, size_in = x.shape
        groups = size_in // inputs
        tiles, splits = self._product_tiles.matmul(n_rows, x.dtype.itemsize, groups, size_out)
        block_m = min(tiles.block_m, max(16, _power_of_two(n_rows)))
        row_blocks = -(-n_rows // block_m)
        return self.launch(
            kernel,
            x,
            *weights,
            out=jax.ShapeDtypeStruct(
                (splits, n_rows, size_out), dtype if splits == 1 else jnp.float32
            ),
            grid=(row_blocks * -(-size_out // tiles.block_n), splits),
            warps=tiles.warps,
            stages=tiles.stages,
            M=n_rows,
            SIZE_IN=size_in,
            SIZE_OUT=size_out,
            BLOCK_M=block_m,
            BLOCK_N=tiles.block_n,
            SPLITS=splits,
            PRECISION="tf32x3",
            **constants,
        )

    def route(
        self,
        numbers: jax.Array,
        mixture: Mixture,
        n_rows: jax.Array,
        first: jax.Array | int = 0,
        bias: jax.Array | None = None,
        factors: jax.Array | None = None,
    ) -> Routes:
        """See `jitney.kernels.routing.Route`; XLA's kernels route many rows, and all rows if
        experts are spread over devices.
        """
        n_padded, columns = numbers.shape
        n_experts, n_chosen = mixture.n_experts, mixture.n_chosen
        choices = _power_of_two(n_padded * n_chosen)
        dealt_out = mixture.own < n_experts or n_rows.ndim > 0
        if dealt_out or choices > _MOST_CHOICES:
            return plain_routing.route(numbers, mixture, n_rows, first, bias, factors)
        numbers = _in_one_piece(numbers)
        by_choice = jax.ShapeDtypeStruct((n_chosen, n_padded), jnp.int32)
        shares, chosen = self.launch(
            routing.choose_experts,
            numbers,
            numbers if bias is None else bias,  # unread then, as the next one
            numbers if factors is None else factors,
            out=(
                jax.ShapeDtypeStruct(by_choice.shape, jnp.float32),
                jax.ShapeDtypeStruct((n_padded, n_chosen), jnp.int32),
            ),
            grid=(n_padded,),
            warps=1 if n_experts <= _EXPERTS_OF_A_WARP else 4,
            stages=1,
            T=n_padded,
            COLUMNS=columns,
            X=n_experts,
            XP=_power_of_two(n_experts),
            C=n_chosen,
            CP=_power_of_two(n_chosen),
            SOFTMAX=mixture.scoring == "softmax",
            BIASED=bias is not None,
            RENORMALISED=mixture.renormalised,
            FACTORED=factors is not None,
            FACTOR=float(mixture.share_factor),
            CLUSTERS=mixture.clusters,
            CHOSEN_CLUSTERS=mixture.chosen_clusters,
            CLUSTER_BEST=min(mixture.cluster_best, n_experts // mixture.clusters),
        )
        size, most = mixture.block_rows(n_padded), mixture.most_blocks(n_padded)
        others = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (most * size, most, 1)]
        places, rows, experts, used = self.launch(
            routing.deal_out,
            chosen,
            # Not a slice: see `_in_one_piece`.
            jnp.minimum(n_rows, n_padded)[None],
            out=(by_choice, *others),
            grid=(1,),
            warps=8,
            stages=1,
            T=n_padded,
            C=n_chosen,
            X=n_experts,
            CHOICES=choices,
            AT_ONCE=min(choices, _COMPARED // choices),
            B=size,
            N=most,
            FILLED=_FILLED,
        )
        return Routes(ExpertBlocks(rows, experts, used[0]), places, shares)

    def experts(
        self, x: jax.Array, opening: Stack, closing: Stack, blocks: ExpertBlocks, activation: str
    ) -> jax.Array:
        """See `jitney.kernels.interface.ExpertProducts`; outputs of padding rows are undefined."""
        n_places, columns = blocks.rows.shape[0], opening.kernel.shape[-1]
        inner = opened_size(columns, activation)
        opened = self._with_experts(
            expert_products.open_experts,
            x,
            opening,
            blocks,
            out=jax.ShapeDtypeStruct((n_places, inner), x.dtype),
            n_rows=len(x),
            matrices=columns // inner,
            ACTIVATION=activation,
            MATRICES=columns // inner,
        )
        return self._with_experts(
            expert_products.close_experts,
            opened,
            closing,
            blocks,
            out=jax.ShapeDtypeStruct((n_places, closing.kernel.shape[-1]), jnp.float32),
            n_rows=len(x),
            matrices=1,
        )

    def _with_experts(
        self,
        kernel: Any,
        x: jax.Array,
        stack: Stack,
        blocks: ExpertBlocks,
        *,
        out: jax.ShapeDtypeStruct,
        n_rows: int,
        matrices: int,
        **constants: Any,
    ) -> jax.Array:
        """x times the experts of its blocks; each expert is `matrices` matrices side by side."""
        n_blocks, size_out = blocks.experts.shape[0], out.shape[1]
        tiles = self._product_tiles.experts(
            blocks.size, x.dtype.itemsize, n_blocks, matrices * size_out, mxfp4=stack.is_mxfp4
        )
        weights, scales, bias = stack
        if weights.dtype == jnp.float8_e4m3fn and self.launch.sm < _FP8_SINCE:
            weights = jax.lax.bitcast_convert_type(weights, jnp.uint8)
        columns = tiles.block_n // matrices
        return self.launch(
            kernel,
            x,
            weights,
            x if scales is None else scales,  # unread then
            x if bias is None else bias,
            blocks.rows,
            blocks.experts,
            out=out,
            grid=(n_blocks * -(-size_out // columns),),
            warps=tiles.warps,
            stages=tiles.stages,
            T=n_rows,
            X=len(weights),
            SIZE_IN=x.shape[1],
            SIZE_OUT=size_out,
            BLOCK_M=blocks.size,
            BLOCK_N=columns,
            BLOCK_K=tiles.block_k,
            MXFP4=stack.is_mxfp4,
            SCALED=scales is not None and not stack.is_mxfp4,
            BIASED=bias is not None,
            PRECISION="tf32x3",
            **constants,
        )

    def threshold(self, scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
        """See `jitney.kernels.interface.Threshold`."""
        return top_k_top_p.search(self.launch, scaled, top_k, top_p).floor

    def pool_scales(self, kv: jax.Array, kv_scales: jax.Array | None) -> tuple[jax.Array, float]:
        """(float32 [2K] factors, or one factor that is not read; the pool's limit). Raises
        KernelError for a pool that the kernels do not support.
        """
        if kv.dtype in _FP8 and self.launch.sm < _FP8_SINCE:
            raise KernelError(
                f"fp8 pools need compute capability 8.9, this GPU has {self.launch.sm / 10}; use "
                "int8"
            )
        scales = scales_of(kv, kv_scales)
        if scales is None:
            scales = jnp.ones((1,), jnp.float32)
        return scales, limit_of(kv.dtype)


def _splitting_of(tiles: DecodeTiles, longest: int) -> dict[str, int]:
    """Constants of the decode kernels that split sequences of at most `longest` keys.

    SPLITS is a power of two; DOUBLINGS is how often the span is doubled at most.
    """
    splits = min(tiles.splits, _power_of_two(-(-longest // tiles.span)))
    doublings = max(0, math.ceil(math.log2(longest / (splits * tiles.span))))
    return {
        "BLOCK_N": tiles.block_n,
        "SPAN": tiles.span,
        "SPLITS": splits,
        "DOUBLINGS": doublings,
    }


def _places(sequences: DeltaSequences) -> tuple[jax.Array, ...]:
    """The arrays that locate the state for kernels of a decode row, in the order of their
    parameters.
    """
    return sequences.stops, sequences.reads, sequences.writes, sequences.starts


def _row_sizes(x: jax.Array, state: DeltaState) -> dict[str, int]:
    """Constants of all kernels of a decode row; see `delta_net.pass_row`."""
    n_slots, n_taps, channels = state.taps.shape
    return {"X": x.shape[1], "C": channels, "W": n_taps, "M": n_slots}


def _chunk_sizes(rows: DeltaRows, sequences: DeltaSequences) -> dict[str, Any]:
    """Constants of `delta_net.weigh_chunks` and `pass_rows`."""
    _, groups, dim = rows.keys.shape
    return {
        "G": groups,
        "H": rows.decay.shape[1],
        "D": dim,
        "K": sequences.stops.shape[1],
        "FEW": _FEW_OF_CHUNK,
        "CORRECTS": rows.beta is not None,
    }


def _rows_are_sequences(n_rows: int, sequences: DeltaSequences, meta: AttentionMeta) -> bool:
    """Whether row s of a step belongs to sequence s, and no row is a draft."""
    assert meta.state is not None
    return sequences.stops.shape == (n_rows, 1) and meta.state.drafts is None


def _in_one_piece(rows: jax.Array) -> jax.Array:
    """Rows [T, ...] of a product, copied for use by a kernel. XLA computes one row as two, and a
    kernel that reads a slice of them would be recorded again in every step, so one row goes through
    a copying kernel of XLA's.
    """
    return jnp.where(jnp.isnan(rows), jnp.nan, rows) if len(rows) == 1 else rows


def _part_products(
    x: jax.Array,
    kernel: jax.Array,
    axes: tuple[tuple[int, ...], tuple[int, ...]],
    least_rows: int,
    precision: jax.lax.Precision | None = None,
) -> jax.Array:
    """x [T, I] times each part of a kernel -> float32 [P, rows, O]; more rows than T repeat row 0.
    axes: those of the kernel that are the inputs of a part, and the parts.

    XLA would multiply one row without tensor cores, and write its products to memory.
    """
    if len(x) == 1:
        x = jnp.broadcast_to(x, (least_rows, x.shape[1]))
    inputs, parts = axes
    return jax.lax.dot_general(
        x.reshape(len(x), kernel.shape[parts[0]], -1),
        kernel,
        (((2,), inputs), ((1,), parts)),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _added(parts: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The sum of the parts [P, T, O] of a product, in dtype."""
    return parts[0] if len(parts) == 1 else jnp.sum(parts, axis=0).astype(dtype)


def _product_of(product: jax.Array | PartialSums) -> tuple[tuple[jax.Array, ...], dict[str, int]]:
    """Arguments and constants of `narrow_products.row_of_product`."""
    unread = jnp.zeros((1,), jnp.float32)
    if not isinstance(product, PartialSums):
        constants = {"PARTS": 0, "PART": 0, "UNITS": False, "SCALED": False}
        return (product, unread, unread), constants
    parts, units, scale = product.parts, product.units, product.scale
    n_parts, n_rows, size = parts.shape
    constants = {"PARTS": n_parts, "PART": n_rows * size}
    constants |= {"UNITS": units is not None, "SCALED": scale is not None}
    operands = unread if units is None else units, unread if scale is None else scale
    return (parts, *operands), constants


def _sizes_of_rows(size: int, by_warp: int) -> dict[str, int]:
    """Constants of kernels whose programs have a row of `size` numbers each."""
    block = _power_of_two(size)
    warps = max(1, min(32, block // by_warp))
    return {"SIZE": size, "BLOCK": block, "warps": warps, "stages": 1}


def _check_rows(rows: jax.Array) -> None:
    """Raise KernelError if 32-bit offsets in rows [T, heads, D] would overflow in the kernels.
    Offsets in pools have 64 bits.
    """
    if rows.size >= _MOST_ELEMENTS:
        raise KernelError(
            f"{' x '.join(map(str, rows.shape))} numbers of a step's rows are 2**31 or more: "
            "choose a smaller token_budget"
        )


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _head_tiles(n_heads: int, itemsize: int) -> int:
    """Number of tiles into which the query heads of one key head are divided evenly."""
    most = min(n_heads, LATENT_HEADS[itemsize])
    return n_heads // max(size for size in range(1, most + 1) if n_heads % size == 0)


def _output_of(q: jax.Array, constants: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """The output of attention for queries [T, H, .]."""
    return jax.ShapeDtypeStruct((*q.shape[:2], constants["D"]), q.dtype)
