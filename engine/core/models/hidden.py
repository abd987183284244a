"""The rows of a step behind the last layer's attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hidden:
    """Rows behind the last attention; a pytree of arrays.

    No row looks at another any more: the last feed-forward, the final norm and the head are
    computed for the rows that are wanted (`Model.logits`, `Model.normed`), of a prompt most
    often for its last one.
    """

    #: [T, E]
    states: Array
    #: int32 [T], see `jitney.kernels.interface.AttentionMeta`; None where there are no adapters.
    adapted: Array | None = None
    #: [T, E] behind the final norm, where that is computed of all rows; else None.
    normed: Array | None = None
    #: [T, n E]: what went into each of `ModelConfig.noted_layers`; None where there are none.
    noted: Array | None = None

    def __getitem__(self, rows: Any) -> Hidden:
        """Some of the rows, by whatever an array takes; without what was noted."""
        adapted = None if self.adapted is None else self.adapted[rows]
        normed = None if self.normed is None else self.normed[rows]
        return Hidden(self.states[rows], adapted, normed)

    @property
    def for_head(self) -> Array | None:
        """What a prediction head reads of all rows; None where none drafts."""
        return self.normed if self.noted is None else self.noted

    @property
    def bare(self) -> Hidden:
        """Without what else is known of the rows."""
        return Hidden(self.states, self.adapted)

    def broken_sequences(self, cu_q: Array) -> Array:
        """Sequences any of whose rows is not finite: cu_q int32 [S + 1] -> bool [S]. What a row
        would become only behind the last attention, its token says, and no other row reads it.
        """
        bad = ~jnp.all(jnp.isfinite(self.states), axis=-1)
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(bad.astype(jnp.int32))])
        return before[cu_q[1:]] > before[cu_q[:-1]]
