"""Triton kernels that choose the experts of a few rows and distribute the rows to blocks: two
launches instead of XLA's ten or so kernels.

Axes as in `jitney.kernels.routing`; a choice is one of the T * C pairs of a row and its expert.
"""

from __future__ import annotations

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# Kernels are compiled, not called: numbers become constexprs and tensors on the way.
import triton
import triton.language as tl

from jitney.kernels.routing import LEAST_SUM

_LEAST_SUM = tl.constexpr(LEAST_SUM)


@triton.jit
def _of_best_clusters(
    choice,
    experts,
    SIZE: tl.constexpr,
    CLUSTERS: tl.constexpr,
    CHOSEN: tl.constexpr,
    BEST: tl.constexpr,
):
    """choice [XP] with -inf for experts whose group of SIZE neighbours is not among the row's
    CHOSEN best groups, ranked by the sum of the BEST greatest choices in each.
    """
    own = experts // SIZE
    sums = tl.zeros(experts.shape, tl.float32) + float("-inf")  # of each expert's group
    for cluster in tl.static_range(CLUSTERS):
        left = tl.where(own == cluster, choice, float("-inf"))
        total = 0.0
        for _ in tl.static_range(BEST):
            best = tl.max(left, 0)
            total += best  # pyright: ignore[reportOperatorIssue]
            first = tl.min(tl.where(left >= best, experts, CLUSTERS * SIZE), 0)
            left = tl.where(experts == first, float("-inf"), left)
        sums = tl.where(own == cluster, total, sums)
    may_be = experts < 0
    for _ in tl.static_range(CHOSEN):
        best = tl.max(sums, 0)
        cluster = tl.min(tl.where(sums >= best, own, CLUSTERS), 0)
        may_be = may_be | (own == cluster)
        sums = tl.where(own == cluster, float("-inf"), sums)
    return tl.where(may_be, choice, float("-inf"))


@triton.jit
def choose_experts(
    numbers,
    bias,
    factors,
    shares,
    chosen,
    T: tl.constexpr,
    COLUMNS: tl.constexpr,
    X: tl.constexpr,
    XP: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BIASED: tl.constexpr,
    RENORMALISED: tl.constexpr,
    FACTORED: tl.constexpr,
    FACTOR: tl.constexpr,
    CLUSTERS: tl.constexpr,
    CHOSEN_CLUSTERS: tl.constexpr,
    CLUSTER_BEST: tl.constexpr,
):
    """numbers [T, COLUMNS] and bias [X] float32, factors [X] -> shares float32 [C, T], chosen int32
    [T, C]; program (row). XP and CP: X and C padded to powers of two.

    Of experts with equal numbers the first one is chosen, as by `jax.lax.top_k`. A NaN makes all
    shares of its row NaN. CLUSTERS > 1: experts are divided into that many groups of neighbours,
    and only those of the CHOSEN_CLUSTERS best groups may be chosen (`_of_best_clusters`).
    """
    row = tl.program_id(0)
    experts = tl.arange(0, XP)
    known = experts < X
    scores = tl.load(numbers + row * COLUMNS + experts, mask=known, other=float("-inf"))
    if SOFTMAX:
        scores = tl.exp(scores - tl.max(scores, 0))
        scores = scores / tl.sum(scores, 0)
    else:
        scores = tl.where(known, 1.0 / (1.0 + tl.exp(-scores)), 0.0)
    choice = scores
    if BIASED:
        choice = scores + tl.load(bias + experts, mask=known, other=0.0)
    choice = tl.where(known, choice, float("-inf"))
    if CLUSTERS > 1:
        choice = _of_best_clusters(
            choice, experts, X // CLUSTERS, CLUSTERS, CHOSEN_CLUSTERS, CLUSTER_BEST
        )
    doubt = tl.sum(scores, 0) * 0.0
    choices = tl.arange(0, CP)
    own_experts = tl.zeros((CP,), tl.int32)
    own_shares = tl.zeros((CP,), tl.float32)
    for number in tl.static_range(C):
        best = tl.max(choice, 0)
        expert = tl.min(tl.where(choice >= best, experts, X - 1), 0)
        share = tl.sum(tl.where(experts == expert, scores, 0.0), 0) + doubt
        choice = tl.where(experts == expert, float("-inf"), choice)
        own_experts = tl.where(choices == number, expert, own_experts)
        own_shares = tl.where(choices == number, share, own_shares)
    if RENORMALISED:
        total = tl.sum(own_shares, 0)
        own_shares = own_shares / tl.where(total < _LEAST_SUM, _LEAST_SUM, total)
    if FACTORED:
        own = tl.load(factors + own_experts, mask=choices < C, other=0.0)
        own_shares = own_shares * own.to(tl.float32)
    tl.store(chosen + row * C + choices, own_experts, mask=choices < C)
    tl.store(shares + choices * T + row, own_shares * FACTOR, mask=choices < C)


@triton.jit
def deal_out(
    chosen,
    count,
    places,
    rows,
    experts,
    used,
    T: tl.constexpr,
    C: tl.constexpr,
    X: tl.constexpr,
    CHOICES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    B: tl.constexpr,
    N: tl.constexpr,
    FILLED: tl.constexpr,
):
    """chosen [T, C] of the first count [1] rows -> places [C, T], rows [N * B], experts [N], used
    [1], as in `Routes`; int32. One program, which compares all choices with AT_ONCE others at a
    time. CHOICES: T * C, padded to a power of two; FILLED: places written at a time.

    An expert's choices are in its blocks in the order of their rows, and the blocks are in the
    order of experts: a choice begins a block if a multiple of the block size of its expert's
    choices come before it.
    """
    own = tl.arange(0, CHOICES)
    n_real = tl.load(count) * C
    real = own < n_real
    expert = tl.load(chosen + own, mask=real, other=X)
    before = tl.zeros((CHOICES,), tl.int32)
    for start in range(0, n_real, AT_ONCE):
        others = start + tl.arange(0, AT_ONCE)
        theirs = tl.load(chosen + others, mask=others < n_real, other=X)
        alike = (theirs[None, :] == expert[:, None]) & (others[None, :] < own[:, None])
        before += tl.sum(alike.to(tl.int32), 1)
    # Every choice needs to know which of the other choices begin a block.
    tl.store(places + own, before, mask=own < T * C)
    for start in range(0, N * B, FILLED):
        at = start + tl.arange(0, FILLED)
        tl.store(rows + at, tl.zeros((FILLED,), tl.int32) + T, mask=at < N * B)
        tl.store(experts + at, tl.zeros((FILLED,), tl.int32) + X, mask=at < N)
    tl.debug_barrier()
    blocks = tl.zeros((CHOICES,), tl.int32)
    for start in range(0, n_real, AT_ONCE):
        others = start + tl.arange(0, AT_ONCE)
        theirs = tl.load(chosen + others, mask=others < n_real, other=X)
        begins = tl.load(places + others, mask=others < n_real, other=1) % B == 0
        earlier = begins[None, :] & (theirs[None, :] < expert[:, None])
        blocks += tl.sum(earlier.to(tl.int32), 1)
    tl.debug_barrier()
    place = blocks * B + before
    cells = places + own % C * T + own // C
    tl.store(cells, tl.where(real, place, N * B), mask=own < T * C)
    tl.store(rows + place, own // C, mask=real)
    begins = real & (before % B == 0)
    tl.store(experts + place // B, expert, mask=begins)
    tl.store(used, tl.sum(begins.to(tl.int32), 0))
