"""Triton kernels of recurrent layers. `pass_rows` updates and reads the memory of each sequence, in
chunks or row by row. For the row of a sequence that decodes, two kernels compute a gated delta net
from the convolution to the gates, two others Mamba-2 up to the output of each head, and one a
layer of short convolutions.

Axes as in `jitney.kernels.delta_net`; D and V are padded to powers of two.
"""

from __future__ import annotations

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# Kernels are compiled, not called: numbers become constexprs and tensors on the way.
import triton
import triton.language as tl


@triton.jit
def _passed(kept, query, key, value, decay, beta, CORRECTS: tl.constexpr):
    """(memory [D, V] after one row, the row's output [V])."""
    kept = kept * decay
    if CORRECTS:
        value = (value - tl.sum(kept * key[:, None], 0)) * beta
    kept = kept + key[:, None] * value[None, :]
    return kept, tl.sum(kept * query[:, None], 0)


@triton.jit
def _product(a, b):
    """a [..., M, K] times b [..., K, N] on tensor cores, about as exact as in float32: each number
    is the sum of two TensorFloat-32 numbers. With similar keys the relative error of a row's output
    is up to 0.02 with one TensorFloat-32 number (11 bits), 3e-4 with two bfloat16 numbers, and 1e-5
    with two TensorFloat-32 numbers.
    """
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _chunk_passed(
    kept, query, key, value, since, until, shares, changes, inside, CORRECTS: tl.constexpr
):
    """(memory [P, D / P, V] after a chunk of rows, the rows' outputs [N, V]). query and key [P, N,
    D / P], value [N, V] are zero for rows that are not `inside` [N].

    Dims are divided into P parts, one for each warp. since, until, shares and the pointers
    `changes`: see `weigh_chunks`.
    """
    own = tl.sum(_product(query, kept), 0) * since[:, None]
    if CORRECTS:
        value -= tl.sum(_product(key, kept), 0) * since[:, None]
    own += _product(shares, value)
    if CORRECTS:
        value = _product(tl.load(changes, mask=inside[:, None], other=0.0), value)
    left = tl.min(tl.where(inside, since, 1.0), 0)
    value = (value * until[:, None])[None, :, :]
    value = tl.broadcast_to(value, kept.shape[0], value.shape[1], value.shape[2])
    return kept * left + _product(tl.permute(key, (0, 2, 1)), value), own


@triton.jit
def weigh_chunks(
    queries,
    keys,
    log_decay,
    beta,
    ends,
    stops,
    starts,
    since,
    until,
    shares,
    changes,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    K: tl.constexpr,
    DIMS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PIECES: tl.constexpr,
    CHUNK: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    FEW: tl.constexpr,
    CORRECTS: tl.constexpr,
):
    """Compute the influence of a chunk's rows on each other for `pass_rows`, which explains the
    other parameters. Program (block of FEW rows, value head) computes the chunk of the block's
    first row, unless an earlier block's first row is in it too, or it has fewer than FEW rows.

    Row i changes the memory at its key by u_i = beta_i (r_i - the sum over j < i of d_ij (k_i k_j)
    u_j). r_i is its value minus the decayed old value at its key from before the chunk; d_ij is the
    decay from after row j to row i. So u = (I + L)^-1 diag(beta) r = `changes` r (the UT transform
    of Yang et al. 2024, arXiv 2412.06464). In addition to the old memory, row i reads the sum over
    j <= i of d_ij (q_i k_j) u_j, which is `shares` r. Without a correction u is r, the values.

    since, until [T, H]: factors by which the memory from before the chunk has decayed after each
    row, and by which a row's change decays until the end of the chunk. shares, changes [T, H,
    CHUNK]: changes only if CORRECTS. log_decay [T, H]. DIMS: dims of keys at a time. SEQUENCES,
    PIECES: S and K, padded. CHUNK is 2 ** DOUBLINGS.
    """
    row = tl.program_id(0) * FEW
    head = tl.program_id(1)
    numbers = tl.arange(0, SEQUENCES)
    passed = tl.load(ends + 1 + numbers, mask=numbers < S, other=row + 1) <= row
    sequence = tl.sum(passed.to(tl.int32), 0)
    if sequence == S:
        return
    first = tl.load(ends + sequence)
    numbers = tl.arange(0, PIECES)
    cuts = first + tl.load(stops + sequence * K + numbers, mask=numbers < K, other=0)
    begin = tl.max(tl.where(cuts <= row, cuts, first), 0)
    end = tl.min(tl.where(cuts > row, cuts, tl.load(ends + sequence + 1)), 0)
    zero = first - tl.load(starts + sequence)
    chunk = zero + (row - zero) // CHUNK * CHUNK
    begin = tl.maximum(begin, chunk)
    end = tl.minimum(end, chunk + CHUNK)
    if (end - begin < FEW) | (row - FEW >= begin):
        return

    group = head // (H // G)
    places = tl.arange(0, CHUNK)
    rows = chunk + places
    inside = (rows >= begin) & (rows < end)
    share = tl.zeros((CHUNK, CHUNK), tl.float32)
    alike = tl.zeros((CHUNK, CHUNK), tl.float32)
    for first_dim in range(0, D, DIMS):
        dims = first_dim + tl.arange(0, DIMS)
        of_groups = (rows * G + group)[:, None] * D + dims[None, :]
        in_group = inside[:, None] & (dims < D)[None, :]
        key = tl.load(keys + of_groups, mask=in_group, other=0.0)
        query = tl.load(queries + of_groups, mask=in_group, other=0.0)
        share += _product(query, tl.trans(key))
        if CORRECTS:
            alike += _product(key, tl.trans(key))
    of_head = rows * H + head
    logs = tl.load(log_decay + of_head, mask=inside, other=0.0)
    later = places[:, None] > places[None, :]
    # Each span is summed separately: differences of two long sums lose small terms.
    spans = tl.cumsum(tl.where(later, logs[:, None], 0.0), 0)
    decay = tl.where(later, tl.exp(spans), (places[:, None] == places[None, :]).to(tl.float32))
    tl.store(since + of_head, tl.exp(tl.cumsum(logs, 0)), mask=inside)
    last = tl.sum(tl.where(places[:, None] == CHUNK - 1, spans, 0.0), 0)
    tl.store(until + of_head, tl.exp(last), mask=inside)

    share *= decay
    matrices = of_head[:, None] * CHUNK + places[None, :]
    if CORRECTS:
        rate = tl.load(beta + of_head, mask=inside, other=0.0)
        lower = tl.where(later, alike * decay * rate[:, None], 0.0)
        # Each round inverts blocks twice as large from the inverses of their halves. The power
        # series would have terms up to 3e8 for similar keys, and lose all digits.
        inverse = (places[:, None] == places[None, :]).to(tl.float32)
        for doubling in tl.static_range(DOUBLINGS):
            halves = places >> doubling
            below = (halves % 2 == 1)[:, None] & (halves[:, None] == halves[None, :] + 1)
            between = tl.where(below, lower, 0.0)
            inverse -= _product(_product(inverse, between), inverse)
        change = inverse * rate[None, :]
        share = _product(share, change)
        tl.store(changes + matrices, change, mask=inside[:, None])
    tl.store(shares + matrices, share, mask=inside[:, None])


@triton.jit
def _rows_passed(
    kept,
    begin,
    end,
    head,
    dims,
    columns,
    queries,
    keys,
    values,
    decay,
    beta,
    read,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    CORRECTS: tl.constexpr,
):
    """The memory after the rows from `begin` up to `end`, computed one after another; see
    `pass_rows`.
    """
    group = head // (H // G)
    for row in range(begin, end):
        of_group = (row * G + group) * D + dims
        of_head = (row * H + head) * V + columns
        key = tl.load(keys + of_group, mask=dims < D, other=0.0)
        query = tl.load(queries + of_group, mask=dims < D, other=0.0)
        value = tl.load(values + of_head, mask=columns < V, other=0.0)
        kept, own = _passed(
            kept,
            query,
            key,
            value,
            tl.load(decay + row * H + head),
            tl.load(beta + row * H + head),
            CORRECTS,
        )
        tl.store(read + of_head, own, mask=columns < V)
    return kept


@triton.jit
def pass_rows(
    queries,
    keys,
    values,
    decay,
    beta,
    ends,
    stops,
    reads,
    writes,
    starts,
    since,
    until,
    shares,
    changes,
    memory,
    read,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    DIMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    FEW: tl.constexpr,
    CORRECTS: tl.constexpr,
):
    """Update memory [M, H, D, V] in place with the rows, and write their outputs to read [T, H, V].
    queries and keys [T, G, D], values [T, H, V], decay and beta [T, H]; all float32. Program
    (sequence, value head, block of columns) keeps its part of the memory in registers.

    ends [S + 1], stops, reads and writes [S, K], starts [S]: see `DeltaSequences`. DIMS, COLUMNS:
    D, and columns of a block, padded. CORRECTS: beta is read, and values replace the old values at
    their keys.

    Chunks begin at positions that CHUNK divides. The rows of a piece in one chunk are computed at
    once from the results of `weigh_chunks`, so that they have the same bits in any step that has
    all of them; fewer than FEW rows are computed one after another. CHUNK 0: all rows are computed
    one after another, and since, until, shares and changes are not read. PART: dims of a chunk that
    one warp multiplies.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(ends + sequence)
    last = tl.load(ends + sequence + 1)
    if first >= last:
        return
    group = head // (H // G)
    dims = tl.arange(0, DIMS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_dims = dims < D
    in_columns = columns < V
    inside = in_dims[:, None] & in_columns[None, :]
    cells = (head * D + dims)[:, None] * V + columns[None, :]
    slot = tl.load(reads + sequence * K).to(tl.int64)
    kept = tl.load(memory + slot * H * D * V + cells, mask=inside, other=0.0)
    kept = tl.where(tl.load(starts + sequence) > 0, kept, 0.0)
    zero = first - tl.load(starts + sequence)
    places = tl.arange(0, max(CHUNK, 1))
    dims_of_parts = tl.reshape(dims, (DIMS // PART, 1, PART))
    begin = first
    for piece in range(K):
        end = first + tl.load(stops + sequence * K + piece)
        many = end
        behind = end
        if CHUNK > 0:
            # Chunks before `many` and from `behind` on have fewer than FEW rows of the piece.
            many = tl.minimum(end, zero + tl.cdiv(begin - zero, CHUNK) * CHUNK)
            behind = tl.maximum(many, zero + (end - zero) // CHUNK * CHUNK)
            many = tl.where(many - begin < FEW, many, begin)
            behind = tl.where(end - behind < FEW, behind, end)
        kept = _rows_passed(
            kept,
            begin,
            many,
            head,
            dims,
            columns,
            queries,
            keys,
            values,
            decay,
            beta,
            read,
            G,
            H,
            D,
            V,
            CORRECTS,
        )
        if CHUNK > 0:
            parts = tl.reshape(kept, (DIMS // PART, PART, COLUMNS))
            for chunk in range((many - zero) // CHUNK, tl.cdiv(behind - zero, CHUNK)):
                rows = zero + chunk * CHUNK + places
                in_chunk = (rows >= many) & (rows < behind)
                in_group = in_chunk[None, :, None] & (dims_of_parts < D)
                in_head = in_chunk[:, None] & in_columns[None, :]
                of_groups = (rows * G + group)[None, :, None] * D + dims_of_parts
                of_heads = rows * H + head
                of_values = of_heads[:, None] * V + columns[None, :]
                matrices = of_heads[:, None] * CHUNK + places[None, :]
                parts, own = _chunk_passed(
                    parts,
                    tl.load(queries + of_groups, mask=in_group, other=0.0),
                    tl.load(keys + of_groups, mask=in_group, other=0.0),
                    tl.load(values + of_values, mask=in_head, other=0.0),
                    tl.load(since + of_heads, mask=in_chunk, other=0.0),
                    tl.load(until + of_heads, mask=in_chunk, other=0.0),
                    tl.load(shares + matrices, mask=in_chunk[:, None], other=0.0),
                    changes + matrices,
                    in_chunk,
                    CORRECTS,
                )
                tl.store(read + of_values, own, mask=in_head)
            kept = tl.reshape(parts, (DIMS, COLUMNS))
            kept = _rows_passed(
                kept,
                behind,
                end,
                head,
                dims,
                columns,
                queries,
                keys,
                values,
                decay,
                beta,
                read,
                G,
                H,
                D,
                V,
                CORRECTS,
            )
        slot = tl.load(writes + sequence * K + piece).to(tl.int64)
        if slot < M:
            tl.store(memory + slot * H * D * V + cells, kept, mask=inside)
        begin = end


@triton.jit
def _sum_of_taps(
    newest, taps, weights, channels, inside, start, again, C: tl.constexpr, W: tl.constexpr
):
    """The convolution of some channels for a row. newest: the row's own inputs, float32; taps: of
    the row's slot. It reads one tap more than needed, so that no load waits for `again`, which says
    whether the row is among the taps already.
    """
    wide = tl.load(weights + (W - 1) * C + channels, mask=inside, other=0.0).to(tl.float32)
    total = newest * wide
    newer = tl.load(taps + (W - 1) * C + channels, mask=inside, other=0.0)
    for back in tl.static_range(1, W):
        place = (W - 1 - back) * C + channels
        older = tl.load(taps + place, mask=inside, other=0.0)
        earlier = tl.where(start >= back, tl.where(again, older, newer), 0.0)
        total += earlier * tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
        newer = older
    return total


@triton.jit
def _convolved(x, taps, weights, channels, inside, start, again, C: tl.constexpr, W: tl.constexpr):
    """silu of the convolution of some channels for a row x; see `_sum_of_taps`."""
    newest = tl.load(x + channels, mask=inside, other=0.0).to(tl.float32)
    total = _sum_of_taps(newest, taps, weights, channels, inside, start, again, C, W)
    return total * tl.sigmoid(total)


@triton.jit
def _convolved_with_bias(
    x, taps, weights, bias, channels, inside, start, again, C: tl.constexpr, W: tl.constexpr
):
    """`_convolved` with a bias before the silu."""
    newest = tl.load(x + channels, mask=inside, other=0.0).to(tl.float32)
    total = _sum_of_taps(newest, taps, weights, channels, inside, start, again, C, W)
    total += tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)
    return total * tl.sigmoid(total)


@triton.jit
def _keep_inputs(
    newest,
    before,
    behind,
    channels,
    inside,
    start,
    again,
    C: tl.constexpr,
    W: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Write a row's inputs of some channels, float32, and the W - 1 inputs before it, read from the
    taps at `before`, to the taps at `behind`, which may be the same. TAPS: W, padded.
    """
    places = tl.arange(0, TAPS)[:, None]
    older = (places < W - 1) & (start >= W - 1 - places)
    cells = before + (places + 1 - again) * C + channels[None, :]
    kept = tl.load(cells, mask=older & inside[None, :], other=0.0)
    kept = tl.where(places == W - 1, newest[None, :], kept)
    tl.debug_barrier()  # other threads read what is written here
    cells = behind + places * C + channels[None, :]
    tl.store(cells, kept, mask=(places < W) & inside[None, :])


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), also exact for small results, which a slowly decaying memory needs."""
    small = tl.exp(-tl.abs(x))
    more = 1.0 + small  # the rounding error of `more` cancels in log(more) / (more - 1)
    log = tl.where(more == 1.0, small, tl.log(more) * small / (more - 1.0))
    return tl.maximum(x, 0.0) + log


@triton.jit
def pass_row(
    x,
    rates,
    weights,
    log_decay,
    rate_bias,
    taps,
    lengths,
    stops,
    reads,
    writes,
    starts,
    memory,
    read,
    again,
    X: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    DIMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE: tl.constexpr,
    NORM_EPS: tl.constexpr,
):
    """Update memory [M, H, D, V] in place with one row of each sequence; write its output to read
    [T, H, V], and again [S] (see `DeltaSequences`). A row of x [T, X] begins with the inputs of the
    convolution; rates float32 [T, 2 H]. Program (sequence, value head, block of columns), as in
    `pass_rows`.

    weights [W, C] of the convolution, log_decay and rate_bias [H]: see `DeltaWeights`. taps
    [M, W, C] and lengths [M] are from before the step; `close_row` updates them afterwards, since
    all programs of a key head convolve its query and key. SCALE: factor of queries.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(reads + sequence).to(tl.int64)
    to = tl.load(writes + sequence).to(tl.int64)
    start = tl.load(starts + sequence)
    if tl.load(stops + sequence) == 0:
        return
    dims = tl.arange(0, DIMS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_dims = dims < D
    in_columns = columns < V
    inside = in_dims[:, None] & in_columns[None, :]
    cells = (head * D + dims)[:, None] * V + columns[None, :]
    in_memory = dims < tl.where(start > 0, D, 0)  # nothing is, before a sequence's first token
    before = memory + slot * H * D * V + cells
    kept = tl.load(before, mask=in_memory[:, None] & in_columns[None, :], other=0.0)
    known = tl.load(lengths + slot)
    # A row that is in the state already changes nothing, and reads what it read.
    is_again = (start > 0) & (start < known)
    if head + tl.program_id(2) == 0:
        tl.store(again + sequence, is_again.to(tl.int32))

    x += sequence * X
    taps += slot * W * C
    first = head // (H // G) * D
    query = _convolved(x, taps, weights, first + dims, in_dims, start, is_again, C, W)
    key = _convolved(x, taps, weights, G * D + first + dims, in_dims, start, is_again, C, W)
    channels = 2 * G * D + head * V + columns
    value = _convolved(x, taps, weights, channels, in_columns, start, is_again, C, W)
    query = query * tl.rsqrt(tl.sum(query * query, 0) + NORM_EPS) * SCALE
    key = key * tl.rsqrt(tl.sum(key * key, 0) + NORM_EPS)
    rate = tl.load(rates + sequence * 2 * H + H + head) + tl.load(rate_bias + head)
    decay = tl.exp(-tl.exp(tl.load(log_decay + head)) * _softplus(rate))
    beta = tl.sigmoid(tl.load(rates + sequence * 2 * H + head))
    decay = tl.where(is_again, 1.0, decay)
    beta = tl.where(is_again, 0.0, beta)
    kept, own = _passed(kept, query, key, value, decay, beta, True)
    tl.store(read + (sequence * H + head) * V + columns, own, mask=in_columns)
    if to < M:
        tl.store(memory + to * H * D * V + cells, kept, mask=inside)


@triton.jit
def close_row(
    x,
    read,
    norm,
    again,
    stops,
    reads,
    writes,
    starts,
    taps,
    lengths,
    o,
    X: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EPS: tl.constexpr,
):
    """Finish `pass_row`: norm read [T, H, V], multiply it by the gates in x, write o [T, H V], and
    add the row to taps [M, W, C] and lengths [M], in place. Program (sequence, value head); each
    also writes a block of the channels.

    COLUMNS, TAPS: V and W, padded. CHANNELS: of a block.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(reads + sequence).to(tl.int64)
    to = tl.load(writes + sequence).to(tl.int64)
    start = tl.load(starts + sequence)
    is_again = tl.load(again + sequence)
    if tl.load(stops + sequence) == 0:
        return
    x += sequence * X
    columns = tl.arange(0, COLUMNS)
    in_columns = columns < V
    of_head = (sequence * H + head) * V + columns
    own = tl.load(read + of_head, mask=in_columns, other=0.0)
    gates = tl.load(x + C + head * V + columns, mask=in_columns, other=0.0).to(tl.float32)
    own *= tl.rsqrt(tl.sum(own * own, 0) / V + EPS)
    own *= tl.load(norm + columns, mask=in_columns, other=0.0) * gates * tl.sigmoid(gates)
    tl.store(o + of_head, own.to(o.dtype.element_ty), mask=in_columns)
    if to >= M:
        return
    channels = head * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < C
    newest = tl.load(x + channels, mask=inside, other=0.0).to(tl.float32)
    before, behind = taps + slot * W * C, taps + to * W * C
    _keep_inputs(newest, before, behind, channels, inside, start, is_again, C, W, TAPS)
    if head == 0:
        tl.store(lengths + to, start + 1)


@triton.jit
def pass_mamba_row(
    x,
    weights,
    bias,
    log_decay,
    rate_bias,
    skip,
    taps,
    lengths,
    stops,
    reads,
    writes,
    starts,
    memory,
    read,
    again,
    X: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    DIMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """`pass_row` for Mamba-2: a row of x [T, X] has the inputs of the convolution (values, keys and
    queries), then a time step for each head, which is clamped to SHORTEST and LONGEST. weights,
    bias [C], log_decay, rate_bias and skip [H]: see `MambaWeights`. BIASED: bias is read.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(reads + sequence).to(tl.int64)
    to = tl.load(writes + sequence).to(tl.int64)
    start = tl.load(starts + sequence)
    if tl.load(stops + sequence) == 0:
        return
    dims = tl.arange(0, DIMS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_dims = dims < D
    in_columns = columns < V
    cells = (head * D + dims)[:, None] * V + columns[None, :]
    in_memory = dims < tl.where(start > 0, D, 0)  # nothing is, before a sequence's first token
    before = memory + slot * H * D * V + cells
    kept = tl.load(before, mask=in_memory[:, None] & in_columns[None, :], other=0.0)
    known = tl.load(lengths + slot)
    # A row that is in the state already changes nothing, and reads what it read.
    is_again = (start > 0) & (start < known)
    if head + tl.program_id(2) == 0:
        tl.store(again + sequence, is_again.to(tl.int32))

    x += sequence * X
    taps += slot * W * C
    of_values = head * V + columns
    of_keys = H * V + head // (H // G) * D + dims
    of_queries = G * D + of_keys
    if BIASED:
        value = _convolved_with_bias(
            x, taps, weights, bias, of_values, in_columns, start, is_again, C, W
        )
        key = _convolved_with_bias(x, taps, weights, bias, of_keys, in_dims, start, is_again, C, W)
        query = _convolved_with_bias(
            x, taps, weights, bias, of_queries, in_dims, start, is_again, C, W
        )
    else:
        value = _convolved(x, taps, weights, of_values, in_columns, start, is_again, C, W)
        key = _convolved(x, taps, weights, of_keys, in_dims, start, is_again, C, W)
        query = _convolved(x, taps, weights, of_queries, in_dims, start, is_again, C, W)
    step = tl.load(x + C + head).to(tl.float32) + tl.load(rate_bias + head)
    step = tl.minimum(tl.maximum(_softplus(step), SHORTEST), LONGEST)
    step = tl.where(is_again, 0.0, step)
    decay = tl.exp(-tl.exp(tl.load(log_decay + head)) * step)
    kept, own = _passed(kept, query, key, value * step, decay, 0.0, False)
    own += tl.load(skip + head) * value
    tl.store(read + (sequence * H + head) * V + columns, own, mask=in_columns)
    if to < M:
        inside = in_dims[:, None] & in_columns[None, :]
        tl.store(memory + to * H * D * V + cells, kept, mask=inside)


@triton.jit
def keep_row(
    x,
    again,
    stops,
    reads,
    writes,
    starts,
    taps,
    lengths,
    X: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Finish `pass_mamba_row`: add the row to taps [M, W, C] and lengths [M], in place; program
    (sequence, block of channels).
    """
    sequence = tl.program_id(0)
    slot = tl.load(reads + sequence).to(tl.int64)
    to = tl.load(writes + sequence).to(tl.int64)
    start = tl.load(starts + sequence)
    is_again = tl.load(again + sequence)
    if tl.load(stops + sequence) == 0:
        return
    if to >= M:
        return
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < C
    newest = tl.load(x + sequence * X + channels, mask=inside, other=0.0).to(tl.float32)
    before, behind = taps + slot * W * C, taps + to * W * C
    _keep_inputs(newest, before, behind, channels, inside, start, is_again, C, W, TAPS)
    if tl.program_id(1) == 0:
        tl.store(lengths + to, start + 1)


@triton.jit
def pass_conv_row(
    x,
    weights,
    stops,
    reads,
    writes,
    starts,
    taps,
    lengths,
    o,
    X: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Convolve one row of each sequence, x [T, 3 C] as in `jitney.kernels.delta_net.short_conv`;
    write o [T, C], and add the row to taps [M, W, C] and lengths [M], in place. Program (sequence)
    computes all channels: another program could read a length that this one has changed.
    """
    sequence = tl.program_id(0)
    slot = tl.load(reads + sequence).to(tl.int64)
    to = tl.load(writes + sequence).to(tl.int64)
    start = tl.load(starts + sequence)
    if tl.load(stops + sequence) == 0:
        return
    known = tl.load(lengths + slot)
    is_again = (start > 0) & (start < known)
    channels = tl.arange(0, CHANNELS)
    inside = channels < C
    x += sequence * X
    before, behind = taps + slot * W * C, taps + to * W * C
    newest = tl.load(x + channels, mask=inside, other=0.0).to(tl.float32)
    newest *= tl.load(x + 2 * C + channels, mask=inside, other=0.0).to(tl.float32)
    total = _sum_of_taps(newest, before, weights, channels, inside, start, is_again, C, W)
    total *= tl.load(x + C + channels, mask=inside, other=0.0).to(tl.float32)
    tl.store(o + sequence * C + channels, total.to(o.dtype.element_ty), mask=inside)
    if to < M:
        again = is_again.to(tl.int32)
        _keep_inputs(newest, before, behind, channels, inside, start, again, C, W, TAPS)
        tl.store(lengths + to, start + 1)
