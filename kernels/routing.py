"""Routing of a step's rows to the experts of a mixture, in blocks, in plain jax.numpy.

Axes: T rows, X experts, C experts chosen per row, N blocks, B rows of a block; see
`jitney.kernels.experts`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jitney.kernels.experts import ExpertBlocks

#: Least divisor when shares are normalised, since sigmoid scores may all be 0.
LEAST_SUM = 1e-20
#: Most rows of a step for which a product with a [T, T] matrix counts rows per expert.
_MOST_ROWS_COUNTED = 1024


class Mixture(Protocol):
    """The settings by which a mixture chooses experts; see the fields of the models'
    `ExpertsConfig`.
    """

    @property
    def n_experts(self) -> int: ...
    @property
    def own(self) -> int: ...
    @property
    def n_chosen(self) -> int: ...
    @property
    def choice_bias(self) -> bool: ...
    @property
    def renormalised(self) -> bool: ...
    @property
    def scoring(self) -> str: ...
    @property
    def clusters(self) -> int: ...
    @property
    def chosen_clusters(self) -> int: ...
    @property
    def cluster_best(self) -> int: ...
    @property
    def share_factor(self) -> float: ...
    def block_rows(self, rows: int) -> int: ...
    def most_blocks(self, rows: int) -> int: ...


class Routes(NamedTuple):
    """The assignment of rows to experts, in blocks; a pytree of arrays."""

    #: The rows at each place of the blocks, and the blocks' experts.
    blocks: ExpertBlocks
    #: int32 [C, T]: the place of each row in the blocks of its experts, best choice first; N * B:
    #: in no block.
    places: jax.Array
    #: float32 [C, T]: the weights of these experts' outputs.
    shares: jax.Array

    @property
    def weights(self) -> jax.Array:
        """The weight of the expert's output for the row at each place, float32 [N * B]."""
        nothing = jnp.zeros(self.blocks.rows.shape, jnp.float32)
        return nothing.at[self.places].set(self.shares, mode="drop")


class Route(Protocol):
    """Chooses the experts of a step's rows."""

    def __call__(
        self,
        numbers: jax.Array,
        mixture: Mixture,
        n_rows: jax.Array,
        first: jax.Array | int = 0,
        bias: jax.Array | None = None,
        factors: jax.Array | None = None,
    ) -> Routes:
        """Route the rows. numbers float32 [T, X or more]: router outputs, of which the first X are
        read. n_rows int32: rows from `n_rows` on are padding and get no expert; an array [D] gives
        one count for each of D equal parts of the rows. first: number of the first of the
        `mixture.own` experts on this device, which is 0 in the blocks. bias float32 [X]:
        added to the scores by which experts are chosen. factors [X]: multiply their shares.
        """
        ...


def route(
    numbers: jax.Array,
    mixture: Mixture,
    n_rows: jax.Array,
    first: jax.Array | int = 0,
    bias: jax.Array | None = None,
    factors: jax.Array | None = None,
) -> Routes:
    """See `Route`."""
    n_padded, n_experts = numbers.shape[0], mixture.own
    shares, chosen = _chosen(numbers[:, : mixture.n_experts], mixture, bias, factors)
    here = chosen - first
    mine = _real_rows(n_padded, n_rows) & (here >= 0) & (here < n_experts)
    at = jnp.clip(here, 0, n_experts - 1)
    experts = jnp.arange(n_experts)
    goes = jnp.any((here[:, :, None] == experts) & mine[:, :, None], axis=1)
    block = mixture.block_rows(n_padded)
    sizes = jnp.sum(goes, axis=0, dtype=jnp.int32)
    blocks = -(-sizes // block)
    ends = jnp.sum(jnp.where(experts[:, None] >= experts, blocks, 0), axis=1)
    within = jnp.take_along_axis(_rows_before(goes), at, axis=1)
    most = mixture.most_blocks(n_padded)
    nowhere = most * block
    places = jnp.where(mine, (ends - blocks)[at] * block + within, nowhere).T
    rows = jnp.broadcast_to(jnp.arange(n_padded), places.shape)
    return Routes(
        ExpertBlocks(
            rows=jnp.full(nowhere, n_padded, jnp.int32).at[places].set(rows, mode="drop"),
            experts=jnp.sum(ends <= jnp.arange(most)[:, None], axis=1),
            count=ends[-1],
        ),
        places,
        shares.T,
    )


def _chosen(
    numbers: jax.Array, mixture: Mixture, bias: jax.Array | None, factors: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """(shares float32, experts int32) of each row, both [T, C], best choice first; arguments as in
    `Route`.
    """
    if mixture.scoring == "softmax":
        scores = jax.nn.softmax(numbers, axis=-1)
    else:
        scores = jax.nn.sigmoid(numbers)
    choice = scores if bias is None else scores + bias
    if mixture.clusters > 1:
        choice = _of_best_clusters(choice, mixture)
    shares, chosen = jax.lax.top_k(choice, mixture.n_chosen)
    if choice is not scores:
        shares = jnp.take_along_axis(scores, chosen, axis=1)
    if mixture.renormalised:
        shares = shares / jnp.maximum(jnp.sum(shares, axis=-1, keepdims=True), LEAST_SUM)
    if factors is not None:
        shares = shares * factors.astype(jnp.float32)[chosen]
    return shares * mixture.share_factor, chosen


def _of_best_clusters(choice: jax.Array, mixture: Mixture) -> jax.Array:
    """choice [T, X] with -inf for experts whose cluster is not among the row's best clusters: the
    expert groups of DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437).
    """
    clusters = choice.reshape(len(choice), mixture.clusters, -1)
    best, _ = jax.lax.top_k(clusters, min(mixture.cluster_best, clusters.shape[2]))
    _, chosen = jax.lax.top_k(jnp.sum(best, axis=2), mixture.chosen_clusters)
    is_chosen = jnp.any(chosen[:, :, None] == jnp.arange(mixture.clusters), axis=1)
    return jnp.where(is_chosen[:, :, None], clusters, -jnp.inf).reshape(choice.shape)


def _real_rows(n_padded: int, n_rows: jax.Array) -> jax.Array:
    """Mask of the rows that are not padding, bool [T, 1]; n_rows: see `Route`."""
    if not n_rows.ndim:
        return jnp.arange(n_padded)[:, None] < n_rows
    part = n_padded // n_rows.size
    return (jnp.arange(part) < n_rows[:, None]).reshape(-1, 1)


def _rows_before(goes: jax.Array) -> jax.Array:
    """goes bool [T, X]: whether each row uses each expert -> int32 [T, X]: the number of earlier
    rows that use it.

    Few rows are counted by a matrix product, which a GPU runs as one kernel; a sort or a running
    sum takes several.
    """
    ones = goes.astype(jnp.float32)
    n_rows = len(goes)
    if n_rows > _MOST_ROWS_COUNTED:
        return (jnp.cumsum(ones, axis=0) - ones).astype(jnp.int32)
    earlier = jnp.tri(n_rows, k=-1)
    return jnp.matmul(earlier, ones).astype(jnp.int32)
