"""Routing of a step's rows to the experts of a mixture, and their blocks, in plain jax.numpy.

Axes: T rows, X experts, C those that a row goes through, N blocks, B rows of a block; see
`jitney.kernels.experts`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jitney.kernels.experts import ExpertBlocks

#: Least divisor of shares, since those of sigmoids may all be 0.
LEAST_SUM = 1e-20
#: Most rows of a step that are counted by a product with a [T, T] matrix.
_MOST_ROWS_COUNTED = 1024


class Mixture(Protocol):
    """How a mixture chooses experts; see the fields of the models' `ExpertsConfig`."""

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
    #: int32 [C, T]: where each row stands in the blocks of its experts, the one chosen first
    #: before the others; N * B: nowhere.
    places: jax.Array
    #: float32 [C, T]: how much of these experts' answers it gets.
    shares: jax.Array

    @property
    def weights(self) -> jax.Array:
        """float32 [N * B]: how much of the expert's answer the row at each place gets."""
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
        """numbers float32 [T, X or more], the router's, of which the first X are read. n_rows
        int32: rows from there on pad the step, and go through no expert; an array [D]: so it is in
        each of D equal parts of the rows. first: of the experts that are here, `mixture.own` of
        them; they are numbered from there on. bias float32 [X], added to the scores that experts
        are chosen by; factors [X], of their shares.
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
    """(shares float32, experts int32) of each row [T, C], those first that are chosen first;
    arguments as in `Route`.
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
    """choice [T, X], -inf where an expert's cluster is not among the row's best ones: the groups of
    DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437).
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
    """goes bool [T, X], which rows go through which experts -> int32 [T, X], how many rows before
    each do.

    Of few rows by a product, which a GPU runs as one kernel, where a sort or a running sum is many.
    """
    ones = goes.astype(jnp.float32)
    n_rows = len(goes)
    if n_rows > _MOST_ROWS_COUNTED:
        return (jnp.cumsum(ones, axis=0) - ones).astype(jnp.int32)
    earlier = jnp.tri(n_rows, k=-1)
    return jnp.matmul(earlier, ones).astype(jnp.int32)
