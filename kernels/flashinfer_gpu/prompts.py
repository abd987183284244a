"""Prompt attention by FlashInfer's kernels, called from a jitted step.

FlashInfer's `plan` reads lengths on the host and uploads lists of tiles. Here the step computes the
lists, whose sizes depend only on the step's shapes: nothing waits for the host, and one program
runs every step of a bucket. The lists have FlashInfer's format (PrefillPlan and PrefillSM90Plan in
its scheduler.cuh) for CUDA graphs and unsplit contexts.

Axes as in `jitney.kernels.interface`; a tile is a block of query rows of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jitney.kernels.flashinfer_gpu.modules import Variant
from jitney.kernels.interface import AttentionMeta, KernelError

_HEAD_DIMS = (64, 128, 256)
_DTYPES = ("bfloat16", "float16")
_HOPPER = 90
#: Alignment of each list in the workspace, in bytes.
_ALIGNED = 16
#: Query rows of a tile in the kernels for Hopper ("fa3"), by head dim; other head dims have 128.
_HOPPER_ROWS = {64: 192}
#: A limit that no context reaches, so that none is split.
_WHOLE_CONTEXT = (1 << 31) - 1


@dataclass(frozen=True)
class FlashInferPrompts:
    """Attention of prompt chunks for one kind of GPU. Hashable, a constant of a jitted step."""

    sm: int  # compute capability, 90 for 9.0
    processors: int  # multiprocessors of the GPU
    #: Registers a variant and returns its target's name; tests replace it.
    target: Callable[[Variant], str] = Variant.registered

    @staticmethod
    def why_not(head_dim: int, dtype: str, pool_dtype: str, sinks: bool = False) -> str:
        """The reason why FlashInfer does not support these heads, or "". dtype: of the queries."""
        if sinks:
            return "the variant of its kernels that is called here takes no attention sinks"
        if head_dim not in _HEAD_DIMS:
            return f"it takes heads of {', '.join(map(str, _HEAD_DIMS))}, not {head_dim}"
        if dtype not in _DTYPES:
            return f"it takes {' and '.join(_DTYPES)}, not {dtype}"
        if pool_dtype != dtype:
            return f"its pools hold the activations' {dtype}, not {pool_dtype}"
        return ""

    @property
    def template(self) -> str:
        """FlashInfer's name for the kernels of this GPU."""
        return "fa3" if self.sm == _HOPPER else "fa2"

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
        are undefined. Arguments as in `jitney.kernels.interface`.

        Raises KernelError for heads and dtypes that FlashInfer does not support.
        """
        reason = self.why_not(q.shape[-1], q.dtype.name, kv.dtype.name)
        if reason:
            raise KernelError(f"kernels flashinfer: {reason}; choose kernels triton")
        variant = Variant(self.template, q.dtype.name, q.shape[-1], window > 0, softcap > 0)
        call = jax.ffi.ffi_call(self.target(variant), jax.ShapeDtypeStruct(q.shape, q.dtype))
        plan = self._plan(q, kv, meta)
        with jax.named_scope("flashinfer_prompts"):
            o = call(
                q,
                kv,
                plan.workspace,
                *_page_lists(meta, kv.shape[1]),
                fields=np.array(plan.fields, np.int64),
                window_left=np.int64(window - 1),  # keys before a row's own; -1: all
                softcap=np.float64(softcap),
                scale=np.float64(scale),
            )
        # No tile writes the rows of padding, whose memory is uninitialised.
        real = jnp.arange(len(q)) < meta.counts[2]
        return jnp.where(real[:, None, None], o, 0)

    def _plan(self, q: jax.Array, kv: jax.Array, meta: AttentionMeta) -> _Plan:
        n_rows, n_heads, head_dim = q.shape
        if self.template == "fa3":
            return _hopper_plan(meta, n_rows, n_heads, head_dim, self.processors)
        return _tiled_plan(meta, n_rows, n_heads // (kv.shape[2] // 2), head_dim)


class _Plan(NamedTuple):
    """A kernel's plan, in place of FlashInfer's."""

    workspace: jax.Array  # int32 [.], the lists one after the other
    #: The numbers of FlashInfer's PlanInfo, in its order: sizes, and byte offsets of the lists.
    fields: tuple[int, ...]


class _PageLists(NamedTuple):
    """The pages of all sequences in FlashInfer's form, int32.

    Its lists have no gaps: a sequence's length follows from the begin and end of its pages. Our
    table has a row of P pages per sequence, so sequence s is request 2s, and the rest of its row is
    request 2s + 1, without queries.
    """

    q_starts: jax.Array  # [2S + 1] first query row of each request, then the end
    page_starts: jax.Array  # [2S + 1] index in `pages` of each request's first page, then the end
    pages: jax.Array  # [S * P]
    last_lengths: jax.Array  # [2S] tokens in each request's last page


class _Tiles(NamedTuple):
    """The tiles of all prompts, int32; only the first `count` are used."""

    sequence: jax.Array  # [n]
    number: jax.Array  # [n] index of the tile in its sequence
    count: jax.Array  # []


def _page_lists(meta: AttentionMeta, page_size: int) -> _PageLists:
    """The step's page table in FlashInfer's form."""
    n_seqs, width = meta.page_table.shape
    row_starts = jnp.arange(n_seqs + 1, dtype=jnp.int32) * width
    used = -(-meta.kv_lens // page_size)
    last = meta.kv_lens - (used - 1) * page_size
    return _PageLists(
        q_starts=_alternating(meta.cu_q[:-1], meta.cu_q[1:], meta.cu_q[-1:]),
        page_starts=_alternating(row_starts[:-1], row_starts[:-1] + used, row_starts[-1:]),
        pages=meta.page_table.reshape(-1),
        last_lengths=_alternating(last, jnp.full_like(last, page_size)),
    )


def _alternating(first: jax.Array, second: jax.Array, *last: jax.Array) -> jax.Array:
    """first[0], second[0], first[1], second[1], ..., then `last`."""
    return jnp.concatenate([jnp.stack([first, second], axis=1).reshape(-1), *last])


def _tiled_plan(meta: AttentionMeta, n_rows: int, group: int, head_dim: int) -> _Plan:
    """The plan of kernels that tile the rows of all heads of a group ("fa2"): a block per tile and
    key head. n_rows: T.
    """
    n_seqs = meta.kv_lens.shape[0]
    tile_rows = _packed_tile_rows(n_rows * group, head_dim)
    most = -(-n_rows * group // tile_rows) + n_seqs - 1
    tiles = _tiles_of(meta, tile_rows, group, most)
    request = 2 * jnp.minimum(tiles.sequence, n_seqs - 1)
    q_starts = _alternating(meta.cu_q[:-1], meta.cu_q[1:], meta.cu_q[-1:])
    valid = jnp.arange(most) < tiles.count
    workspace, offsets = _one_behind_the_other(
        request,
        tiles.number,
        jnp.zeros((most,), jnp.int32),  # the part of a context: always 0, not split
        q_starts,  # outputs are stored like queries
        jnp.full((1,), _WHOLE_CONTEXT, jnp.int32),
        meta.cu_q[-1:],
        _bytes_in_words(valid),
    )
    requests, numbers, parts, outputs, limit, total, mask = offsets
    fields = (
        most,
        n_rows,
        total,
        tile_rows,
        requests,
        numbers,
        parts,
        0,  # how parts are merged
        outputs,
        limit,
        0,  # their outputs
        0,  # and sums
        mask,
        1,  # as with CUDA graphs: lists have their greatest length
        0,  # contexts are not split
    )
    return _Plan(workspace, fields)


def _hopper_plan(
    meta: AttentionMeta, n_rows: int, n_heads: int, head_dim: int, processors: int
) -> _Plan:
    """The plan of kernels for Hopper ("fa3"): a list of tiles and heads per multiprocessor. n_rows:
    T, n_heads: H.

    Tiles are dealt in rounds, those with most keys first, in reverse in every second round.
    """
    n_seqs, width = meta.page_table.shape
    tile_rows = _HOPPER_ROWS.get(head_dim, 128)
    most = -(-n_rows // tile_rows) + n_seqs - 1
    tiles = _tiles_of(meta, tile_rows, 1, most)
    bounds, rank = _dealt(tiles.count * n_heads, most * n_heads, processors)
    tile = _by_keys(meta, tiles, tile_rows)[jnp.minimum(rank // n_heads, most - 1)]
    sequence = jnp.minimum(tiles.sequence[tile], n_seqs - 1)
    first_row = meta.cu_q[sequence]
    workspace, offsets = _one_behind_the_other(
        tiles.number[tile],
        first_row,
        sequence * width,  # its first page
        meta.cu_q[sequence + 1] - first_row,
        meta.kv_lens[sequence],
        rank % n_heads,
        bounds,
        sequence,
    )
    return _Plan(workspace, (*offsets, 0))  # 0: the lists have separate entries for heads


def _packed_tile_rows(packed_rows: int, head_dim: int) -> int:
    """Rows of a tile, over all heads of a group; packed_rows: most rows of a sequence."""
    if packed_rows > 64 and head_dim < 256:
        return 128
    return 64 if packed_rows > 16 else 16


def _tiles_of(meta: AttentionMeta, tile_rows: int, group: int, most: int) -> _Tiles:
    """The tiles of the sequences that do not decode, in order; room for `most` tiles."""
    n_seqs = meta.kv_lens.shape[0]
    rows = (meta.cu_q[1:] - meta.cu_q[:-1]) * group
    rows = jnp.where(jnp.arange(n_seqs) < meta.counts[0], 0, rows)
    ends = jnp.cumsum(-(-rows // tile_rows), dtype=jnp.int32)
    places = jnp.arange(most, dtype=jnp.int32)
    sequence = _intervals(ends, places)
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
    return _Tiles(sequence, places - starts[sequence], ends[-1])


def _by_keys(meta: AttentionMeta, tiles: _Tiles, tile_rows: int) -> jax.Array:
    """Indices of the tiles, int32 [n], sorted by number of keys, most first, unused ones last."""
    sequence = jnp.minimum(tiles.sequence, meta.kv_lens.shape[0] - 1)
    rows = meta.cu_q[sequence + 1] - meta.cu_q[sequence]
    end = jnp.minimum((tiles.number + 1) * tile_rows, rows)
    keys = meta.kv_lens[sequence] - rows + end
    keys = jnp.where(jnp.arange(len(keys)) < tiles.count, keys, -1)
    return jnp.argsort(-keys).astype(jnp.int32)


def _dealt(count: jax.Array, most: int, processors: int) -> tuple[jax.Array, jax.Array]:
    """Deal `count` pieces, at most `most`, to the processors: (the start of each processor's list,
    then the end, int32 [processors + 1]; the piece at each index, int32 [most]).
    """
    number = jnp.arange(processors, dtype=jnp.int32)
    rounds, rest = count // processors, count % processors
    extra = _seat(number, rounds, processors) < rest
    ends = jnp.cumsum(rounds + extra, dtype=jnp.int32)
    bounds = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
    places = jnp.arange(most, dtype=jnp.int32)
    owner = jnp.minimum(_intervals(ends, places), processors - 1)
    turn = places - bounds[owner]
    return bounds, turn * processors + _seat(owner, turn, processors)


def _seat(number: jax.Array, turn: jax.Array, processors: int) -> jax.Array:
    """A processor's index in a round; every second round is reversed."""
    return jnp.where(turn % 2 == 0, number, processors - 1 - number)


def _intervals(ends: jax.Array, places: jax.Array) -> jax.Array:
    """For each index the first interval that ends after it, or the number of intervals."""
    return jnp.searchsorted(ends, places, side="right", method="compare_all").astype(jnp.int32)


def _bytes_in_words(flags: jax.Array) -> jax.Array:
    """Flags [n], a byte each, as int32 [ceil(n / 4)]."""
    padded = jnp.pad(flags.astype(jnp.uint8), (0, -len(flags) % 4))
    return jax.lax.bitcast_convert_type(padded.reshape(-1, 4), jnp.int32)


def _one_behind_the_other(*lists: jax.Array) -> tuple[jax.Array, list[int]]:
    """(all lists in one int32 array, each aligned; the byte offset of each list)."""
    parts, offsets, size = [], [], 0
    for each in lists:
        padding = -len(each) % (_ALIGNED // 4)
        parts.append(jnp.pad(each.astype(jnp.int32), (0, padding)))
        offsets.append(4 * size)
        size += len(each) + padding
    return jnp.concatenate(parts), offsets
