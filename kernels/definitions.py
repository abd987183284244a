"""Definitions of all kernels in plain numpy, to compare compiled kernels with.

Axes as in `jitney.kernels.interface`. Everything is float32, whatever the dtype of the inputs.
"""

from __future__ import annotations

import numpy as np

from jitney.kernels.delta_net import DeltaWeights
from jitney.kernels.experts import ExpertBlocks, Stack
from jitney.kernels.mamba import MambaWeights
from jitney.kernels.routing import LEAST_SUM, Mixture


def attention(
    q: np.ndarray,
    kv: np.ndarray,
    kv_lens: np.ndarray,
    cu_q: np.ndarray,
    page_table: np.ndarray,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
    value_dim: int = 0,
) -> np.ndarray:
    """softmax(q k) v over the keys that each row sees, one sequence at a time: [T, H, D].

    q [T, H, D], kv [N, page, 2K, D], kv_lens [S], cu_q [S+1], page_table [S, P], sinks [H]: scores
    that join each row's softmax without a value. value_dim > 0: kv [N, page, K, D] holds only keys,
    whose first numbers are the values; the result is [T, H, value_dim]. Padding rows are 0.
    """
    if value_dim:
        kv = np.repeat(kv, 2, axis=2)
    out = np.zeros(q.shape, np.float32)
    for s in np.flatnonzero(np.diff(cu_q)):
        pages = page_table[s, : -(-kv_lens[s] // kv.shape[1])]
        cells = kv[pages].astype(np.float32).reshape(-1, *kv.shape[2:])[: kv_lens[s]]
        rows = slice(cu_q[s], cu_q[s + 1])
        out[rows] = _attend(q[rows].astype(np.float32), cells, scale, window, softcap, sinks)
    return out[..., :value_dim] if value_dim else out


def _attend(
    q: np.ndarray,
    cells: np.ndarray,
    scale: float,
    window: int,
    softcap: float,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """Attention of a sequence's last rows q [R, H, D] over its keys and values [C, 2K, D]:
    [R, H, D].
    """
    n_rows, n_heads, dim = q.shape
    length, n_kv = len(cells), cells.shape[1] // 2
    keys = cells[:, 0::2].transpose(1, 2, 0)  # [K, D, C]
    values = cells[:, 1::2].transpose(1, 0, 2)  # [K, C, D]
    heads = q.reshape(n_rows, n_kv, n_heads // n_kv, dim).transpose(1, 2, 0, 3)  # [K, G, R, D]
    scores = heads @ keys[:, None] * np.float32(scale)  # [K, G, R, C]
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    position = length - n_rows + np.arange(n_rows)[:, None]  # of each row
    key_position = np.arange(length)
    seen = key_position <= position
    if window:
        seen &= key_position > position - window
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        of_heads = sinks.astype(np.float32).reshape(n_kv, -1, 1, 1)
        columns = np.broadcast_to(of_heads, (*scores.shape[:3], 1))
        scores = np.concatenate([scores, columns], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    summed = weights[..., :length] @ values[:, None]  # [K, G, R, D]
    return summed.transpose(2, 0, 1, 3).reshape(n_rows, n_heads, dim)


def delta_net(
    x: np.ndarray,
    rates: np.ndarray,
    weights: DeltaWeights,
    key_heads: int,
    dim: int,
    eps: float,
) -> np.ndarray:
    """A gated delta net over one whole sequence, token by token and head by head, as in
    `jitney.kernels.delta_net`: x [L, C + H V], rates [L, 2 H] -> [L, H V].
    """
    taps, log_decay, bias, norm = (np.asarray(one).astype(np.float32) for one in weights)
    heads, width, keys = len(log_decay), len(norm), key_heads * dim
    values = heads * width
    mixed, gates = np.split(x.astype(np.float32), [2 * keys + values], axis=1)
    memory = np.zeros((heads, dim, width), np.float32)
    out = np.zeros((len(x), values), np.float32)
    for t in range(len(x)):
        seen = range(min(len(taps), t + 1))
        total = _silu(np.sum([mixed[t - lag] * taps[-1 - lag] for lag in seen], axis=0))
        queries, stored = (part.reshape(key_heads, dim) for part in np.split(total[: 2 * keys], 2))
        for head in range(heads):
            group, own = head * key_heads // heads, slice(head * width, (head + 1) * width)
            q = queries[group] / np.sqrt(queries[group] @ queries[group] + 1e-6) / np.sqrt(dim)
            k = stored[group] / np.sqrt(stored[group] @ stored[group] + 1e-6)
            speed = np.exp(log_decay[head]) * np.log1p(np.exp(rates[t, heads + head] + bias[head]))
            decayed = np.exp(-speed) * memory[head]
            change = (total[2 * keys :][own] - k @ decayed) / (1 + np.exp(-rates[t, head]))
            memory[head] = decayed + np.outer(k, change)
            read = rms_norm(q @ memory[head], norm, eps)
            out[t, own] = read * _silu(gates[t, own])
    return out


def mamba(
    x: np.ndarray, weights: MambaWeights, groups: int, dim: int, limits: tuple[float, float]
) -> np.ndarray:
    """A layer of Mamba-2 over one whole sequence, token by token and head by head, as in
    `jitney.kernels.mamba`: x [L, C + H] -> output of each head, [L, H, V].
    """
    taps = np.asarray(weights.taps).astype(np.float32)
    log_decay, bias, skip = (np.asarray(one, np.float32) for one in weights[2:])
    added = 0.0 if weights.taps_bias is None else np.asarray(weights.taps_bias).astype(np.float32)
    heads, channels = len(skip), taps.shape[1]
    values = channels - 2 * groups * dim
    wide = x.astype(np.float32)
    memory = np.zeros((heads, dim, values // heads), np.float32)
    out = np.zeros((len(x), *memory.shape[::2]), np.float32)
    for t in range(len(x)):
        seen = range(min(len(taps), t + 1))
        total = np.sum([wide[t - lag, :channels] * taps[-1 - lag] for lag in seen], axis=0)
        total = _silu(total + added)
        keys, queries = (part.reshape(groups, dim) for part in np.split(total[values:], 2))
        for head, value in enumerate(total[:values].reshape(heads, -1)):
            group = head * groups // heads
            step = np.clip(np.log1p(np.exp(wide[t, channels + head] + bias[head])), *limits)
            decayed = np.exp(-np.exp(log_decay[head]) * step) * memory[head]
            memory[head] = decayed + np.outer(step * keys[group], value)
            out[t, head] = queries[group] @ memory[head] + skip[head] * value
    return out


def short_conv(x: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """A short convolution over one whole sequence, token by token, as in
    `jitney.kernels.delta_net.short_conv`: x [L, 3 C], taps [W, C] -> [L, C].
    """
    before, behind, values = np.split(x.astype(np.float32), 3, axis=1)
    inputs, coefficients = before * values, np.asarray(taps).astype(np.float32)
    out = np.zeros_like(values)
    for t in range(len(x)):
        for lag in range(min(len(coefficients), t + 1)):
            out[t] += behind[t] * inputs[t - lag] * coefficients[-1 - lag]
    return out


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x [..., E] / sqrt(mean(x * x) + eps) * weight [E]."""
    wide = x.astype(np.float32)
    mean = np.mean(wide * wide, axis=-1, keepdims=True)
    return wide / np.sqrt(mean + np.float32(eps)) * weight.astype(np.float32)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [T, heads, D] with its pairs (j, j + D/2) rotated by cos and sin [T, 1, D // 2]."""
    first, second = np.split(x.astype(np.float32), 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def matmul(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x [T, I] times w [I, O]."""
    return x.astype(np.float32) @ w.astype(np.float32)


def matmul_int8(x: np.ndarray, w: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """x [T, I] times w [I, O] with a scale for each output [O]; each row of x is rounded to
    multiples of 1/127 of its greatest magnitude.
    """
    wide = x.astype(np.float32)
    most = np.maximum(np.abs(wide).max(axis=1, keepdims=True), np.float32(1e-30))
    codes = np.rint(wide * (np.float32(127) / most))
    # Exact in float64 up to 2**53.
    sums = codes.astype(np.float64) @ w.astype(np.float64)
    return sums.astype(np.float32) * (most / np.float32(127)) * scale


def gated(sums: np.ndarray) -> np.ndarray:
    """sums [T, 2F] of a product -> silu(first half) * second half, [T, F]."""
    gates, ups = np.split(sums, 2, axis=-1)
    return _silu(gates) * ups


def matmul_fp8(x: np.ndarray, w: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """x [T, I] times w [I, O] with a scale for each output [O]; each row of x is scaled so that its
    greatest magnitude is 448, and rounded to e4m3.
    """
    wide = x.astype(np.float32)
    most = np.maximum(np.abs(wide).max(axis=1, keepdims=True), np.float32(1e-30))
    codes = (wide * (np.float32(448) / most)).astype(w.dtype)
    sums = codes.astype(np.float64) @ w.astype(np.float64)
    return sums.astype(np.float32) * (most / np.float32(448)) * scale


def choose_experts(
    numbers: np.ndarray,
    mixture: Mixture,
    bias: np.ndarray | None = None,
    factors: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(shares, experts) chosen for each row, both [T, C], best choice first. numbers [T, X]: router
    outputs; bias and factors [X].
    """
    powers = np.exp(numbers - numbers.max(axis=1, keepdims=True))
    scores = powers / powers.sum(axis=1, keepdims=True)
    if mixture.scoring != "softmax":
        scores = 1 / (1 + np.exp(-numbers))
    choice = scores.copy() if bias is None else scores + bias
    if mixture.clusters > 1:
        clusters = choice.reshape(len(choice), mixture.clusters, -1)
        best = np.sort(clusters, axis=2)[:, :, -mixture.cluster_best :].sum(axis=2)
        ranks = np.argsort(np.argsort(-best, axis=1, kind="stable"), axis=1)
        clusters[ranks >= mixture.chosen_clusters] = -np.inf
    chosen = np.argsort(-choice, axis=1, kind="stable")[:, : mixture.n_chosen]
    shares = np.take_along_axis(scores, chosen, axis=1)
    if mixture.renormalised:
        shares = shares / np.maximum(shares.sum(axis=1, keepdims=True), LEAST_SUM)
    if factors is not None:
        shares = shares * factors[chosen]
    return shares * np.float32(mixture.share_factor), chosen


def experts(
    x: np.ndarray, opening: Stack, closing: Stack, blocks: ExpertBlocks, activation: str
) -> np.ndarray:
    """The output of each block's expert for each row of the block, [N * B, E]; 0 for padding.
    x [T, E], opening [X, E, 2F], closing [X, F, E].
    """
    rows, owners = np.asarray(blocks.rows), np.asarray(blocks.experts)
    out = np.zeros((len(rows), closing.kernel.shape[2]), np.float32)
    for place in np.flatnonzero(rows < len(x)):
        expert = owners[place // blocks.size]
        inner = _opened(_with_expert(x[rows[place]], opening, expert), activation)
        out[place] = _with_expert(inner, closing, expert)
    return out


def _with_expert(x: np.ndarray, stack: Stack, expert: int) -> np.ndarray:
    """x [I] times the matrix of an expert, and its bias: [O]."""
    sums = matmul(x, _widened(stack, expert))
    return sums if stack.bias is None else sums + np.asarray(stack.bias[expert], np.float32)


def _widened(stack: Stack, expert: int) -> np.ndarray:
    """The matrix of an expert, [I, O]."""
    kernel = np.asarray(stack.kernel[expert])
    if stack.is_mxfp4:
        return mxfp4(kernel, np.asarray(stack.scale)[expert])
    wide = kernel.astype(np.float32)
    return wide if stack.scale is None else wide * np.asarray(stack.scale[expert])


def mxfp4(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The matrix [I, O] from codes [I // 2, O] and exponents [I // 32, O] in the format of
    `jitney.kernels.mxfp4.Mxfp4`; decodes each weight from its bits.
    """
    halves = packed.reshape(len(scales), 16, -1)
    codes = np.concatenate([halves % 16, halves // 16], axis=1).reshape(-1, packed.shape[1])
    exponent, fraction = codes // 2 % 4, codes % 2
    size = np.where(exponent > 0, (1 + fraction / 2) * 2.0 ** (exponent - 1.0), fraction / 2)
    powers = np.repeat(2.0 ** (scales - 127.0), 32, axis=0)
    return (np.where(codes < 8, size, -size) * powers).astype(np.float32)


def _opened(sums: np.ndarray, activation: str) -> np.ndarray:
    """sums [2F] of gates and ups -> silu(gate) * up, or the same with gelu (tanh formula) or
    gpt-oss's activation; for ups alone, [F], the square of relu.
    """
    if activation == "relu2":
        return np.maximum(sums, 0) ** 2
    gate, up = np.split(sums, 2)
    match activation:
        case "silu":
            return _silu(gate) * up
        case "clamped_silu":
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    bent = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + np.tanh(bent)) * up
