"""Products whose last addition is left to the kernel that reads them, which saves a kernel.

Axes: P parts, T rows, O outputs. A product of few rows is divided along its inputs, so that there
is work for every processor of a GPU. Each part is written as float32, and the reader adds them in
order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PartialSums:
    """A product [T, O] in parts: their sum * units * scale, rounded to `dtype`."""

    #: float32 [P, T, O]; the second axis may have more rows, of undefined numbers.
    parts: jax.Array
    #: Factors of the rows, float32 [T, 1]; None: 1.
    units: jax.Array | None
    #: Factors of the outputs, float32 [O]; None: 1.
    scale: jax.Array | None
    #: T.
    rows: int = field(metadata={"static": True})
    #: Of the product.
    dtype: np.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """(T, O)."""
        return self.rows, self.parts.shape[2]

    def whole(self) -> jax.Array:
        """The product, [T, O] in `dtype`."""
        total = jnp.sum(self.parts[:, : self.rows], axis=0)
        for factors in (self.units, self.scale):
            if factors is not None:
                total = total * factors
        return total.astype(self.dtype)


def whole(product: jax.Array | PartialSums) -> jax.Array:
    """A product [T, O], of which there may be only parts."""
    return product.whole() if isinstance(product, PartialSums) else product
