"""Bytes and operations of our kernels, by their documentation: compilers cannot see into a custom
call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hlo import Array
from memory_traffic import KernelCost

from jitney.engine.core.weights.checkpoints.layer_configs import ExpertsConfig
from jitney.kernels.triton_gpu.tiles import attention_tiles


@dataclass(frozen=True)
class Load:
    """The work of a step: sequences that decode, the keys of each, and the rows of one prompt that
    starts in it.
    """

    decode: int
    context: int
    prompt: int = 0

    @property
    def rows(self) -> int:
        """Token rows, each written once."""
        return self.decode + self.prompt

    @property
    def keys(self) -> int:
        """Keys read, each once: a prompt's blocks find them in the cache."""
        return self.decode * self.context + self.prompt

    @property
    def pairs(self) -> int:
        """Query-key pairs of the prompt."""
        return self.prompt * (self.prompt + 1) // 2

    def within(self, window: int) -> Load:
        """The load of a layer with this window; 0: no window."""
        return replace(self, context=min(self.context, window)) if window else self


@dataclass(frozen=True)
class Kept:
    """The state that layers keep between steps; element counts identify the arrays."""

    #: Elements of a pool -> window of the layers with such pools, 0: no window.
    pools: Mapping[int, int]
    #: Elements of an array of recurrent state -> its slots.
    slots: Mapping[int, int] = field(default_factory=dict)


def experts_read(experts: ExpertsConfig, rows: int) -> float:
    """Expected number of experts that `rows` rows use, if each row chooses at random."""
    missed = (1 - experts.n_chosen / experts.n_experts) ** rows
    return experts.n_experts * (1 - missed)


def blocks_read(experts: ExpertsConfig, rows: int, padded: int) -> float:
    """Expected number of blocks with rows, in a step that is padded to `padded` rows."""
    share = experts.n_chosen / experts.n_experts
    block = experts.block_rows(padded)
    each = sum(
        math.comb(rows, chose)
        * share**chose
        * (1 - share) ** (rows - chose)
        * math.ceil(chose / block)
        for chose in range(1, rows + 1)
    )
    return experts.n_experts * each


def kernel_cost(
    step: Load,
    kept: Kept,
    sm: int,
    experts: ExpertsConfig | None = None,
    *,
    gated: bool = True,
) -> KernelCost:
    """A function that returns the costs of a step's kernels. experts: of a mixture; gated: whether
    experts have gates.
    """

    def is_pool(array: Array) -> bool:
        return array.elements in kept.pools

    def moved(array: Array) -> float:
        """Bytes of an array that a kernel moves; of recurrent state, only the sequences' slots."""
        slots = kept.slots.get(array.elements)
        return array.nbytes if slots is None else array.nbytes * step.decode / slots

    def padding_of(array: Array) -> float:
        """Bytes of the padding rows of a product in parts [P, T, O], which its reader leaves out;
        other float32 arrays with three axes have no more rows than the step.
        """
        if len(array.dims) != 3 or array.dtype != "f32" or array.dims[1] <= step.rows:
            return 0.0
        return array.nbytes * (1 - step.rows / array.dims[1])

    def cost(name: str, taken: list[Array], made: list[Array]) -> tuple[float, float]:
        pool = next((array for array in taken if is_pool(array)), None)
        row = math.prod(pool.dims[-2:]) * pool.itemsize if pool else 0.0
        load = step.within(kept.pools[pool.elements]) if pool else step
        rest = sum(moved(array) for array in (*taken, *made) if not is_pool(array))
        if name in ("rotate_pages", "norm_rows", "norm_parts"):
            rest -= sum(padding_of(array) for array in taken)
        match name:
            case "rotate_pages" | "write_pages":
                return rest + load.rows * row, 0.0
            case "decode_attention":
                return decode_cost(load, row, taken, made, sm)
            case "merge_splits":
                parts, stats, whole = taken[2], taken[3], made[0]
                heads = load.decode * whole.dims[1]
                return split_bytes(load, parts, stats, sm) + heads * whole.dims[
                    2
                ] * whole.itemsize, 0.0
            case "prompt_attention":
                heads, dim = made[0].dims[1:]
                rows = 2 * load.prompt * heads * dim * made[0].itemsize
                return rows + load.prompt * row, 4.0 * heads * dim * load.pairs
            case "matmul_int4" | "gated_int4":
                x, weights = taken[:2]
                return rest, 4.0 * x.dims[0] * weights.elements  # a byte holds two weights
            case "matmul_fp8":
                x, weights = taken[:2]
                return rest, 2.0 * x.dims[0] * weights.elements
            case "open_experts" | "close_experts":
                assert experts is not None
                matrices = 2 if name == "open_experts" and gated else 1
                return expert_cost(load, experts, taken, made[0], matrices)
        if pool is None:
            return rest, 0.0
        outputs = [array for array in made if not is_pool(array)]
        return fused_cost(load, row, outputs[-1], rest, len(outputs) < len(made))

    return cost


def rows_going(load: Load, experts: ExpertsConfig, places: int) -> int:
    """Rows of a call whose blocks have `places` places: all rows of the step, or in the last layer
    only those with logits.
    """
    logit_rows = load.decode + (load.prompt > 0)
    if experts.block_rows(logit_rows) * experts.most_blocks(logit_rows) == places:
        return logit_rows
    return load.rows


def expert_cost(
    load: Load, experts: ExpertsConfig, taken: list[Array], y: Array, matrices: int
) -> tuple[float, float]:
    """Bytes and operations of a product with experts: an expert's weights and scales once for each
    of its blocks, rows and results once per expert of a row; padding rows are not counted.
    matrices: number of matrices side by side in one of an expert.
    """
    # On a TPU gates and ups are separate operands, and may be [X, O, I].
    weights = max((one for one in taken if len(one.dims) == 3), key=lambda one: one.elements)
    columns = matrices * y.dims[1]
    size_in = weights.elements // (weights.dims[0] * columns)
    per_expert = float(size_in * columns * weights.itemsize)
    if weights.itemsize == 1:
        per_expert += 4.0 * columns
    scales = [one for one in taken if one.dtype == weights.dtype == "u8" and len(one.dims) == 3]
    if min((one.elements for one in scales), default=weights.elements) < weights.elements:
        # MXFP4: two weights a byte, and a byte for each 32.
        size_in *= 2
        per_expert = size_in * columns * (0.5 + 1 / 32)
    x = next(one for one in taken if one is not weights and one.dims[-1:] == (size_in,))
    rows = rows_going(load, experts, y.dims[0])
    going = rows * experts.n_chosen
    moved = blocks_read(experts, rows, rows) * per_expert
    moved += going * (size_in * x.itemsize + y.dims[1] * y.itemsize)
    return moved, 2.0 * going * size_in * columns


def decode_cost(
    load: Load, row: float, taken: list[Array], made: list[Array], sm: int
) -> tuple[float, float]:
    """Bytes and operations of decode attention: keys of every sequence once; results, or the
    partial sums of all splits.
    """
    q, (parts, stats) = taken[0], made[-2:]
    heads, dim = q.dims[1:]
    rows = load.decode * heads * dim * q.itemsize
    splits = split_bytes(load, parts, stats, sm)
    tables = 4 * math.ceil(load.context / 16) * load.decode
    return rows + load.decode * load.context * row + tables + (splits or rows), (
        4.0 * heads * dim * load.decode * load.context
    )


def split_bytes(load: Load, parts: Array, stats: Array, sm: int) -> float:
    """Bytes of the partial sums in use (float32 [S, H, SPLITS, DP] and [S, H, SPLITS, 2]); 0 if no
    sequence is split.
    """
    _, heads, most, dim = parts.dims
    span = attention_tiles(sm, dim, 2, 1, 2)[0].span
    while span * most < load.context:
        span *= 2
    splits = math.ceil(load.context / span)
    return 0.0 if splits == 1 else load.decode * heads * splits * (dim + stats.dims[-1]) * 4.0


def fused_cost(load: Load, row: float, o: Array, rest: float, writes: bool) -> tuple[float, float]:
    """Bytes and operations of attention in one kernel, which may write the new rows itself: small
    arrays once, keys once.
    """
    pairs = load.decode * load.context + load.pairs
    return rest + load.keys * row + (
        load.rows * row if writes else 0.0
    ), 4.0 * o.elements / load.rows * pairs
