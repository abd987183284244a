"""FlashInfer's paged attention in numpy, one row at a time.

Written from FlashInfer 0.7.2's sources (batch_prefill_paged.cuh, batch_prefill_sm90.cu, the tile
schedulers and paged_kv_t), so that tests read a plan independently of the code that makes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

#: FlashInfer's codes of the mask and of the layout that the kernels use.
CAUSAL, POSITIONS_FIRST = 1, 0


class Rows(NamedTuple):
    """Some query rows of one head, and the sequence that they attend to."""

    first: int  # of the sequence's rows in q
    last: int  # end of the sequence's rows in q
    outputs: int  # row in o of the sequence's first row
    chosen: range  # the query rows, counted in the sequence
    head: int
    key_head: int
    pages: np.ndarray
    length: int


def paged_run(template: str, *args: Any, processors: int = 0) -> None:
    """Write o, with the arguments of FlashInfer's function of that name.

    processors: number of blocks of "fa3", one per multiprocessor. Raises if a row is written twice.
    """
    _, workspace, fields, q, k, v, q_starts, page_starts, pages, last_lengths, o, lse = args[:12]
    mask, layout, window_left, pdl, *rest = args[12:]
    assert (lse, mask, layout, pdl) == (None, CAUSAL, POSITIONS_FIRST, False)
    unused = 8 if template == "fa2" else 4
    assert rest[:unused] == [None] * unused
    softcap, scale, *others = rest[unused:]
    assert others == ([1.0, 1.0, 0] if template == "fa2" else [1.0, 0])
    if template == "fa3":
        work = _listed(workspace, fields, q, k, pages, processors)
    else:
        work = _tiled(workspace, fields, q, k, q_starts, page_starts, pages, last_lengths)
    written = np.zeros(o.shape[:2], bool)
    for rows in work:
        for at in rows.chosen:
            place = rows.outputs + at, rows.head
            assert not written[place], f"row and head {place} are computed twice"
            written[place] = True
            position = rows.length - (rows.last - rows.first) + at
            low = 0 if window_left < 0 else max(0, position - window_left)
            seen = np.arange(low, position + 1)
            page, entry = rows.pages[seen // k.shape[1]], seen % k.shape[1]
            keys = k[page, entry, rows.key_head].astype(np.float64)
            values = v[page, entry, rows.key_head].astype(np.float64)
            scores = keys @ q[rows.first + at, rows.head].astype(np.float64) * scale
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            o[place] = (weights @ values / weights.sum()).astype(o.dtype)


def attend_by(
    template: str,
    plan: tuple[np.ndarray, tuple[int, ...]],
    lists: Any,
    q: np.ndarray,
    kv: np.ndarray,
    options: dict[str, Any],
    *,
    nobodys: float = 0.0,
    processors: int = 0,
) -> np.ndarray:
    """o [T, H, D] as FlashInfer computes it over our pool [N, page, 2K, D]; rows that it does not
    write hold `nobodys`.
    """
    workspace, fields = plan
    o = np.full_like(q, nobodys)
    unused: list[Any] = [None] * (8 if template == "fa2" else 4)
    ends = [1.0, 1.0, 0] if template == "fa2" else [1.0, 0]
    keys, values = kv[:, :, 0::2], kv[:, :, 1::2]
    paged_run(
        template,
        *(workspace, workspace, list(fields), q, keys, values, *lists, o, None),
        *(CAUSAL, POSITIONS_FIRST, options["window"] - 1, False),
        *(*unused, options["softcap"], options["scale"], *ends),
        processors=processors,
    )
    return o


def _words(workspace: np.ndarray, offset: int, count: int) -> np.ndarray:
    """`count` int32 from byte `offset` on."""
    return workspace.view(np.uint8)[offset : offset + 4 * count].view(np.int32)


def _listed(
    workspace: np.ndarray,
    fields: list[int],
    q: np.ndarray,
    k: np.ndarray,
    pages: np.ndarray,
    processors: int,
) -> Iterator[Rows]:
    """The rows that BatchPrefillPersistentTileScheduler gives each multiprocessor."""
    tiles, first_rows, first_pages, row_counts, lengths, heads, bounds, _, alike = fields
    assert not alike
    group, tile_rows = q.shape[1] // k.shape[2], 192 if q.shape[2] == 64 else 128
    begins = _words(workspace, bounds, processors + 1)
    assert begins[0] == 0
    for begin, end in pairwise(begins):
        for work in range(begin, end):

            def read(offset: int, work: int = work) -> int:
                return int(_words(workspace, offset, work + 1)[work])

            first, count, head = read(first_rows), read(row_counts), read(heads)
            start = read(tiles) * tile_rows
            assert start < count
            yield Rows(
                first,
                first + count,
                first,
                range(start, min(start + tile_rows, count)),
                head,
                head // group,
                pages[read(first_pages) :],
                read(lengths),
            )


def _tiled(
    workspace: np.ndarray,
    fields: list[int],
    q: np.ndarray,
    k: np.ndarray,
    q_starts: np.ndarray,
    page_starts: np.ndarray,
    pages: np.ndarray,
    last_lengths: np.ndarray,
) -> Iterator[Rows]:
    """The rows of BatchPrefillWithPagedKVCacheKernel: a block for each tile and key head."""
    blocks, most_rows, total_at, tile_rows, requests, tiles, parts, _, outputs, _, _, _, mask = (
        fields[:13]
    )
    graphs, split = fields[13:]
    assert (graphs, split, most_rows) == (1, 0, len(q))
    assert _words(workspace, total_at, 1)[0] == q_starts[-1]
    valid = workspace.view(np.uint8)[mask : mask + blocks].astype(bool)
    group = q.shape[1] // k.shape[2]
    for block in np.flatnonzero(valid):
        request, tile = (int(_words(workspace, at, blocks)[block]) for at in (requests, tiles))
        assert _words(workspace, parts, blocks)[block] == 0
        first, last = int(q_starts[request]), int(q_starts[request + 1])
        begin, end = page_starts[request : request + 2]
        packed = np.arange(tile * tile_rows, min((tile + 1) * tile_rows, (last - first) * group))
        assert len(packed)
        for key_head in range(k.shape[2]):
            for one in packed.tolist():
                yield Rows(
                    first,
                    last,
                    int(_words(workspace, outputs, request + 1)[request]),
                    range(one // group, one // group + 1),
                    key_head * group + one % group,
                    key_head,
                    pages[begin:end],
                    int((end - begin - 1) * k.shape[1] + last_lengths[request]),
                )
