"""The rows of a step after the last layer's attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hidden:
    """Rows after the last attention; a pytree of arrays.

    From here on rows do not depend on each other: the last feed-forward, the final norm and the
    head are computed only for the rows that are needed (`Model.logits`, `Model.normed`), in a
    prompt mostly the last one.
    """

    #: [T, E]
    states: Array
    #: int32 [T], see `jitney.kernels.interface.AttentionMeta`; None without adapters.
    adapted: Array | None = None
    #: [T, E] after the final norm, if it is computed for all rows; else None.
    normed: Array | None = None
    #: [T, n E]: the inputs of `ModelConfig.noted_layers`, side by side; None without such layers.
    noted: Array | None = None

    def __getitem__(self, rows: Any) -> Hidden:
        """Select rows, with any index that an array takes; `noted` is left out."""
        adapted = None if self.adapted is None else self.adapted[rows]
        normed = None if self.normed is None else self.normed[rows]
        return Hidden(self.states[rows], adapted, normed)

    @property
    def for_head(self) -> Array | None:
        """The values of all rows that a prediction head reads; None without a head."""
        return self.normed if self.noted is None else self.noted

    @property
    def bare(self) -> Hidden:
        """The same rows with only `states` and `adapted`."""
        return Hidden(self.states, self.adapted)

    def broken_sequences(self, cu_q: Array) -> Array:
        """Sequences with a non-finite row: cu_q int32 [S + 1] -> bool [S]. A row that becomes
        non-finite only after the last attention shows in its token, and no other row reads it.
        """
        bad = ~jnp.all(jnp.isfinite(self.states), axis=-1)
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(bad.astype(jnp.int32))])
        return before[cu_q[1:]] > before[cu_q[:-1]]
