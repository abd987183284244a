"""Triton kernels of ragged paged attention: split-KV decode, its merge, and blocks of prompt rows.

Online softmax (Milakov and Gimelshein, arXiv 1805.02867) in base 2; split-KV decode after
Flash-Decoding (Dao et al., 2023). Axes as in `jitney.kernels.interface`; G = H // K query heads
share a key head and are packed into the rows of one tile, whatever G is; D is padded to a power of
two inside the tile.

SHARED: a key's first D numbers are its value, followed by REST more numbers, which only scores
read; a tile of keys is read once for both products. There is one key head then, and K is the number
of tiles that its query heads are divided into. CELL: numbers per position of the pool; STEP:
distance between neighbouring key heads in a position.

A sequence's result never depends on its neighbours: its keys are split by its own length alone.
"""

from __future__ import annotations

# Kernels are compiled, not called: numbers become constexprs and tensors on the way.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

#: exp(x) = exp2(x * LOG2E).
_LOG2E = tl.constexpr(1.4426950408889634)
#: Score of a key that a row must not see; finite, so that it causes no NaN.
_HIDDEN = tl.constexpr(-1e30)
#: PTX that widens two pairs of one-byte numbers, $2, to two float16 each: the first numbers of both
#: pairs, $0, and the second ones, $1. int8: x + 128 becomes the low byte of 1024 + (x + 128).
_INT8_TO_HALF = tl.constexpr("""{
    .reg .b32 codes, offset;
    xor.b32 codes, $2, 0x80808080;
    mov.b32 offset, 0x64806480;
    prmt.b32 $0, codes, 0x64646464, 0x4240;
    prmt.b32 $1, codes, 0x64646464, 0x4341;
    sub.f16x2 $0, $0, offset;
    sub.f16x2 $1, $1, offset;
}""")
_E4M3_TO_HALF = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 low, high;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
#: The high byte of a float16.
_E5M2_TO_HALF = tl.constexpr("""{
    prmt.b32 $0, $2, 0, 0x2404;
    and.b32 $1, $2, 0xff00ff00;
}""")


@triton.jit
def _span_of(length, SPAN: tl.constexpr, SPLITS: tl.constexpr, DOUBLINGS: tl.constexpr):
    """Keys per split: SPAN, doubled until SPLITS of them hold `length` keys."""
    span = tl.zeros_like(length) + SPAN
    for _ in tl.static_range(DOUBLINGS):
        span = tl.where(span * SPLITS < length, span * 2, span)
    return span


@triton.jit
def _first_key(length, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first key that a decoding sequence of `length` keys reads: the start of the block that
    holds its window's first key.
    """
    start = tl.zeros_like(length)
    if WINDOW > 0:
        start = tl.maximum(length - WINDOW, 0) // BLOCK_N * BLOCK_N
    return start


@triton.jit
def _weigh(
    scores,
    at,
    high,
    position,
    top,
    k_scale,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(weights [M, BLOCK_N] of the keys at positions `at`, the rows' new maxima [M], the factors
    [M] that rescale the earlier sums). scores [M, BLOCK_N]: products of the queries and these keys,
    in units of k_scale, a number or [M]; top [M]: maxima so far, in base 2.
    """
    factor = k_scale * SCALE + tl.zeros_like(top)
    if SOFTCAP > 0:
        scores = SOFTCAP - 2.0 * SOFTCAP / (
            tl.exp2(scores * (factor * (2.0 * _LOG2E / SOFTCAP))[:, None]) + 1.0
        )  # SOFTCAP * tanh
        factor = tl.zeros_like(top) + 1.0
    factor *= _LOG2E
    if MASKED:
        seen = (at[None, :] <= position[:, None]) & (at < high)[None, :]
        if WINDOW > 0:
            seen = seen & (at[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, _HIDDEN)
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor[:, None] - new_top[:, None])  # one fused operation a score
    if MASKED:
        weights = tl.where(
            seen, weights, 0.0
        )  # a row that has seen nothing yet: exp2(HIDDEN - HIDDEN) is 1
    return weights, new_top, tl.exp2(top - new_top)


@triton.jit
def _pages_of(table, start, high, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of the BLOCK_N keys of a sequence from position `start` on, int64 [BLOCK_N], or one
    number if they are all in one page; 0 for positions from `high` on.

    Sweeps read them a tile ahead: a tile's loads would otherwise wait for them, and not run beside
    the products of the tile before.
    """
    at = start
    if PAGE % BLOCK_N != 0:
        at = start + tl.arange(0, BLOCK_N)
    return tl.load(table + at // PAGE, mask=at < high, other=0).to(tl.int64)


@triton.jit
def _places_of(
    pages,
    start,
    head,
    CELL: tl.constexpr,
    STEP: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Offsets [BLOCK_N] in the pool of the keys from position `start` on, in these pages."""
    rows = tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N == 0:
        places = (pages * PAGE + start % PAGE) * CELL + head * STEP + rows * CELL
    else:
        places = (pages * PAGE + (start + rows) % PAGE) * CELL + head * STEP
    return places


@triton.jit
def _widen(pairs, number: tl.constexpr, kind: tl.constexpr):
    """(first, second) numbers of `pairs` as dtype `kind`, exactly; pairs: int16 that hold two
    numbers of one-byte dtype `number` each.

    Two to five instructions for four numbers; casts would take three times as many.
    """
    if number == tl.int8:
        assembly: tl.constexpr = _INT8_TO_HALF
    elif number == tl.float8e4nv:
        assembly: tl.constexpr = _E4M3_TO_HALF
    else:
        assembly: tl.constexpr = _E5M2_TO_HALF
    first, second = tl.inline_asm_elementwise(
        assembly, "=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
    )
    return first.to(kind), second.to(kind)


@triton.jit
def _fit_half(first, second):
    """(first, second, units [M]): rows [M, ..] of bfloat16 in units of a power of two, as float16:
    exact, but for numbers below 2**-31 of their row's greatest. Other dtypes are unchanged.
    """
    units = tl.zeros((first.shape[0],), tl.float32) + 1.0
    if first.dtype == tl.bfloat16:
        first = first.to(tl.float32)
        second = second.to(tl.float32)
        peak = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)
        power = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        units = tl.maximum(power, 2.0**-100) * 2.0**-14
        first = (first / units[:, None]).to(tl.float16)
        second = (second / units[:, None]).to(tl.float16)
    return first, second, units


@triton.jit
def _sweep_bytes(
    acc,
    odd,
    top,
    total,
    queries,
    odd_queries,
    position,
    kv,
    table,
    head,
    low,
    high,
    k_scale,
    CELL: tl.constexpr,
    STEP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`_sweep` over a pool of one-byte numbers. queries and odd_queries, acc and odd: even and odd
    dims, [M, DP // 2] each.

    Numbers are read in pairs, 16 bytes a thread, and widened in the registers of the products.
    """
    number: tl.constexpr = kv.dtype.element_ty
    pairs = kv.to(tl.pointer_type(tl.int16), bitcast=True)
    halves = tl.arange(0, DP // 2)
    keys = low + tl.arange(0, BLOCK_N)
    pages = _pages_of(table, low, high, PAGE, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        at = start - low + keys
        places = _places_of(pages, start, head, CELL // 2, STEP // 2, PAGE, BLOCK_N)
        pages = _pages_of(table, start + BLOCK_N, high, PAGE, BLOCK_N)
        cells = pairs + places[:, None] + halves[None, :]
        inside = (at < high)[:, None] & (halves < D // 2)[None, :]
        even_key, odd_key = _widen(tl.load(cells, mask=inside, other=0), number, queries.dtype)
        scores = tl.dot(queries, tl.trans(even_key), input_precision=PRECISION)
        scores = tl.dot(odd_queries, tl.trans(odd_key), scores, input_precision=PRECISION)
        weights, top, keep = _weigh(
            scores,
            at,
            high,
            position,
            top,
            k_scale,
            SCALE,
            WINDOW,
            SOFTCAP,
            True,
        )
        both = tl.load(cells + D // 2, mask=inside, other=0)
        even_value, odd_value = _widen(both, number, queries.dtype)
        total = total * keep + tl.sum(weights, 1)
        weights = weights.to(queries.dtype)
        acc = tl.dot(weights, even_value, acc * keep[:, None], input_precision=PRECISION)
        odd = tl.dot(weights, odd_value, odd * keep[:, None], input_precision=PRECISION)
    return acc, odd, top, total


@triton.jit
def _sweep(
    acc,
    top,
    total,
    queries,
    rest,
    position,
    kv,
    table,
    head,
    low,
    high,
    k_scale,
    dims,
    CELL: tl.constexpr,
    STEP: tl.constexpr,
    SHARED: tl.constexpr,
    REST: tl.constexpr,
    RP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the keys [low, high) of one sequence and key head to the running softmax (acc, top,
    total) of a tile.

    queries [M, DP] and their remaining numbers rest [M, RP], if any; position [M]: of the rows;
    table points at the sequence's pages. MASKED: a row may not see all of these keys, or high is
    not a multiple of BLOCK_N.
    """
    keys = low + tl.arange(0, BLOCK_N)
    pages = _pages_of(table, low, high, PAGE, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        at = start - low + keys
        places = _places_of(pages, start, head, CELL, STEP, PAGE, BLOCK_N)
        pages = _pages_of(table, start + BLOCK_N, high, PAGE, BLOCK_N)
        cells = kv + places[:, None] + dims[None, :]
        inside = (dims < D)[None, :]
        if MASKED:
            inside = (at < high)[:, None] & inside
        key = tl.load(cells, mask=inside, other=0.0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(key), input_precision=PRECISION)
        if REST > 0:
            more = tl.arange(0, RP)
            known = (more < REST)[None, :]
            if MASKED:
                known = (at < high)[:, None] & known
            behind = tl.load(kv + places[:, None] + D + more[None, :], mask=known, other=0.0)
            scores += tl.dot(rest, tl.trans(behind.to(rest.dtype)), input_precision=PRECISION)
        weights, top, keep = _weigh(
            scores,
            at,
            high,
            position,
            top,
            k_scale,
            SCALE,
            WINDOW,
            SOFTCAP,
            MASKED,
        )
        value = key if SHARED else tl.load(cells + D, mask=inside, other=0.0).to(queries.dtype)
        total = total * keep + tl.sum(weights, 1)
        weights = weights.to(queries.dtype)
        acc = acc * keep[:, None] + tl.dot(weights, value, input_precision=PRECISION)
    return acc, top, total


@triton.jit
def _load_scales(kv_scales, head, SCALED: tl.constexpr):
    """(key, value) factors of a key head; 1 for pools that hold plain floats."""
    k_scale = 1.0
    v_scale = 1.0
    if SCALED:
        k_scale = tl.load(kv_scales + 2 * head)
        v_scale = tl.load(kv_scales + 2 * head + 1)
    return k_scale, v_scale


@triton.jit
def _load_queries(
    q,
    rows,
    known,
    dims,
    D: tl.constexpr,
    REST: tl.constexpr,
    RP: tl.constexpr,
):
    """(query heads [M, DP], their REST further numbers [M, RP]) from `rows` of q; 0 where `known`
    is false.
    """
    starts = q + rows[:, None] * (D + REST)
    inside = known[:, None] & (dims < D)[None, :]
    queries = tl.load(starts + dims[None, :], mask=inside, other=0.0)
    rest = queries
    if REST > 0:
        more = tl.arange(0, RP)
        inside = known[:, None] & (more < REST)[None, :]
        rest = tl.load(starts + D + more[None, :], mask=inside, other=0.0)
    return queries, rest


@triton.jit
def _unseen(sinks, heads, real, first, BLOCK_M: tl.constexpr, SINKS: tl.constexpr):
    """Initial (top, total) of rows that have seen no key; includes the heads' sinks in the first
    split of a sequence.
    """
    top = tl.full((BLOCK_M,), _HIDDEN, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:
        own = real & first
        top = tl.where(own, tl.load(sinks + heads, mask=real, other=0.0) * _LOG2E, top)
        total = tl.where(own, 1.0, total)
    return top, total


@triton.jit
def decode_attention(
    q,
    kv,
    page_table,
    kv_lens,
    counts,
    kv_scales,
    sinks,
    o,
    part_o,
    part_stats,
    S: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SHARED: tl.constexpr,
    REST: tl.constexpr,
    RP: tl.constexpr,
    CELL: tl.constexpr,
    STEP: tl.constexpr,
    PAGE: tl.constexpr,
    P: tl.constexpr,
    SEATS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    SPLITS: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    SINKS: tl.constexpr,
    ALONE: tl.constexpr,
    PAIRED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One query row per decoding sequence: q [T, H, D] -> o, or partial sums if a sequence has
    several splits.

    PROGRAMS programs share a list of (sequence, split, key head) with only real work, so an
    inert seat costs nothing; neighbours in the list read neighbouring heads of the same pages.
    SEATS is S padded to a power of two. part_o float32 [S, H, SPLITS, DP], part_stats float32 [S,
    H, SPLITS, 2] (top, total). ALONE: the step has no prompt rows, so this kernel writes the rows
    of absent sequences as zero. PAIRED: the pool's numbers are one byte each.
    """
    G: tl.constexpr = H // K
    WIDTH: tl.constexpr = DP // 2 if PAIRED else DP
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DP)
    seats = tl.arange(0, SEATS)
    n_decode = tl.load(counts)
    lens = tl.load(kv_lens + seats, mask=seats < n_decode, other=0)
    lens = lens - _first_key(lens, WINDOW, BLOCK_N)
    ends = tl.cumsum(tl.cdiv(lens, _span_of(lens, SPAN, SPLITS, DOUBLINGS)), 0)
    n_items = tl.max(ends, 0) * K
    for item in range(tl.program_id(0), n_items, PROGRAMS):
        work = item // K
        head = item % K
        seq = tl.sum((ends <= work).to(tl.int32), 0)
        split = work - tl.max(tl.where(ends <= work, ends, 0), 0)
        length = tl.load(kv_lens + seq)
        start = _first_key(length, WINDOW, BLOCK_N)
        span = _span_of(length - start, SPAN, SPLITS, DOUBLINGS)
        low = start + split * span
        high = tl.minimum(low + span, length)
        heads = head * G + rows
        inside = (rows < G)[:, None] & (dims < D)[None, :]
        k_scale, v_scale = _load_scales(kv_scales, head, SCALED)
        position = tl.zeros((BLOCK_M,), tl.int32) + (length - 1)
        top, total = _unseen(sinks, heads, rows < G, split == 0, BLOCK_M, SINKS)
        acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        if PAIRED:
            halves = 2 * tl.arange(0, WIDTH)
            even, _ = _load_queries(q, seq * H + heads, rows < G, halves, D, 0, 0)
            odd, _ = _load_queries(q, seq * H + heads, rows < G, halves + 1, D, 0, 0)
            even, odd, units = _fit_half(even, odd)
            acc, odd_acc, top, total = _sweep_bytes(
                acc,
                acc,
                top,
                total,
                even,
                odd,
                position,
                kv,
                page_table + seq * P,
                head,
                low,
                high,
                units * k_scale,
                CELL,
                STEP,
                D,
                DP,
                PAGE,
                BLOCK_N,
                SCALE,
                WINDOW,
                SOFTCAP,
                PRECISION,
            )
            acc = tl.interleave(acc, odd_acc)
        else:
            queries, rest = _load_queries(q, seq * H + heads, rows < G, dims, D, REST, RP)
            acc, top, total = _sweep(
                acc,
                top,
                total,
                queries,
                rest,
                position,
                kv,
                page_table + seq * P,
                head,
                low,
                high,
                k_scale,
                dims,
                CELL,
                STEP,
                SHARED,
                REST,
                RP,
                D,
                DP,
                PAGE,
                BLOCK_N,
                SCALE,
                WINDOW,
                SOFTCAP,
                True,
                PRECISION,
            )
        acc = acc * v_scale
        if length - start <= span:
            done = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(
                o + (seq * H + heads)[:, None] * D + dims[None, :],
                done.to(o.dtype.element_ty),
                mask=inside,
            )
        else:
            slot = (seq * H + heads).to(tl.int64) * SPLITS + split
            tl.store(part_o + slot[:, None] * DP + dims[None, :], acc, mask=inside)
            tl.store(part_stats + slot * 2, top, mask=rows < G)
            tl.store(part_stats + slot * 2 + 1, total, mask=rows < G)
    if ALONE:
        for row in range(n_decode + tl.program_id(0), SEATS, PROGRAMS):
            for head in range(H):
                cells = o + (row * H + head) * D + dims
                tl.store(cells, tl.zeros((DP,), o.dtype.element_ty), mask=(dims < D) & (row < S))


@triton.jit
def merge_splits(
    kv_lens,
    counts,
    part_o,
    part_stats,
    o,
    H: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    SPLITS: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Join the splits of `decode_attention`; program (BLOCK_D dims of a query head, sequence). It
    reads all splits at once: one after another, each read would wait for the memory.
    """
    seq = tl.program_id(1)
    if seq >= tl.load(counts):
        return
    length = tl.load(kv_lens + seq)
    length = length - _first_key(length, WINDOW, BLOCK_N)
    span = _span_of(length, SPAN, SPLITS, DOUBLINGS)
    if length <= span:
        return
    head = seq * H + tl.program_id(0) * BLOCK_D // DP
    dims = tl.program_id(0) * BLOCK_D % DP + tl.arange(0, BLOCK_D)
    splits = tl.arange(0, SPLITS)
    known = splits < tl.cdiv(length, span)
    slots = head.to(tl.int64) * SPLITS + splits
    tops = tl.load(part_stats + slots * 2, mask=known, other=_HIDDEN)
    totals = tl.load(part_stats + slots * 2 + 1, mask=known, other=0.0)
    inside = known[:, None] & (dims < D)[None, :]
    parts = tl.load(part_o + slots[:, None] * DP + dims[None, :], mask=inside, other=0.0)
    factors = tl.exp2(tops - tl.max(tops, 0))
    total = tl.sum(totals * factors, 0)
    done = tl.sum(parts * factors[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(o + head * D + dims, done.to(o.dtype.element_ty), mask=dims < D)


@triton.jit
def prompt_attention(
    q,
    kv,
    page_table,
    kv_lens,
    cu_q,
    counts,
    kv_scales,
    sinks,
    o,
    T: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SHARED: tl.constexpr,
    REST: tl.constexpr,
    RP: tl.constexpr,
    CELL: tl.constexpr,
    STEP: tl.constexpr,
    PAGE: tl.constexpr,
    P: tl.constexpr,
    SEATS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of the rows of prompt chunks: q [T, H, D] -> o; program (key head, block of
    BLOCK_M // G rows of one sequence).

    The number of blocks launched is the upper bound T // rows + S: programs past the real blocks
    write the padding rows as zero. The last blocks of a sequence see the most keys and run first.
    """
    G: tl.constexpr = H // K
    BLOCK_T: tl.constexpr = BLOCK_M // G
    head = tl.program_id(0)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DP)
    heads = head * G + rows % G
    seats = tl.arange(0, SEATS)
    n_decode = tl.load(counts)
    n_seqs = tl.load(counts + 1)
    prompts = (seats >= n_decode) & (seats < n_seqs)
    row_counts = tl.load(cu_q + seats + 1, mask=prompts, other=0) - tl.load(
        cu_q + seats, mask=prompts, other=0
    )
    ends = tl.cumsum(tl.cdiv(row_counts, BLOCK_T), 0)
    block = tl.max(ends, 0) - 1 - tl.program_id(1)
    if block < 0:
        token = tl.load(counts + 2) - (block + 1) * BLOCK_T + rows // G
        inside = ((token < T) & (rows < BLOCK_T * G))[:, None] & (dims < D)[None, :]
        cells = o + (token * H + heads)[:, None] * D + dims[None, :]
        tl.store(cells, tl.zeros((BLOCK_M, DP), o.dtype.element_ty), mask=inside)
        return
    seq = tl.sum((ends <= block).to(tl.int32), 0)
    skip = (block - tl.max(tl.where(ends <= block, ends, 0), 0)) * BLOCK_T
    row_start = tl.load(cu_q + seq)
    n_rows = tl.load(cu_q + seq + 1) - row_start
    length = tl.load(kv_lens + seq)
    token = skip + rows // G
    known = (token < n_rows) & (rows < BLOCK_T * G)
    inside = known[:, None] & (dims < D)[None, :]
    cells = ((row_start + token) * H + heads)[:, None] * D + dims[None, :]
    queries, rest = _load_queries(q, (row_start + token) * H + heads, known, dims, D, REST, RP)
    before = length - n_rows  # keys of the sequence that earlier steps wrote
    position = before + token
    k_scale, v_scale = _load_scales(kv_scales, head, SCALED)
    top, total = _unseen(sinks, heads, rows < BLOCK_T * G, True, BLOCK_M, SINKS)
    acc = tl.zeros((BLOCK_M, DP), tl.float32)
    table = page_table + seq * P
    high = tl.minimum(length, before + skip + BLOCK_T)
    if WINDOW > 0:
        whole = tl.maximum(before + skip - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    else:
        whole = (before + skip + 1) // BLOCK_N * BLOCK_N  # keys that all rows see
        acc, top, total = _sweep(
            acc,
            top,
            total,
            queries,
            rest,
            position,
            kv,
            table,
            head,
            0,
            whole,
            k_scale,
            dims,
            CELL,
            STEP,
            SHARED,
            REST,
            RP,
            D,
            DP,
            PAGE,
            BLOCK_N,
            SCALE,
            WINDOW,
            SOFTCAP,
            False,
            PRECISION,
        )
    acc, top, total = _sweep(
        acc,
        top,
        total,
        queries,
        rest,
        position,
        kv,
        table,
        head,
        whole,
        high,
        k_scale,
        dims,
        CELL,
        STEP,
        SHARED,
        REST,
        RP,
        D,
        DP,
        PAGE,
        BLOCK_N,
        SCALE,
        WINDOW,
        SOFTCAP,
        True,
        PRECISION,
    )
    done = acc * v_scale / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(o + cells, done.to(o.dtype.element_ty), mask=inside)
