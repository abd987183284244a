"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) of a matrix, side by side: every row
of a step is multiplied by all of them, and only the columns of its own adapter count.

A row's result does not depend on other adapters, because all numbers of all adapters are finite
(`engine.core.weights.checkpoints.adapter`): other adapters' columns are set to 0, and 0 times NaN
would be NaN. A step has the same shape whichever adapters its rows use. The cost is multiplying by
all adapters' columns in every step, which are few: eight adapters of rank 16 have 128 columns,
while the matrix has thousands.

Axes: T token rows, I and O a matrix's inputs and outputs, C columns of all adapters together.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jitney.kernels.interface import Kernels


class Adapters(nnx.Module):
    """All adapters of an engine for one matrix. Each adds x a b to its products, for its own
    columns of a and rows of b.

    a [I, C], b [C, O]; b includes the adapter's scale. owners: int32 [C], the adapter number of
    each column, from 1; below 0: no adapter. They are ordinary weights, so that a new adapter can
    use free columns without another program.
    """

    def __init__(self, a: Array, b: Array, owners: Array):
        self.a = nnx.Param(a)
        self.b = nnx.Param(b)
        self.owners = nnx.Param(owners)

    def __call__(self, x: Array, numbers: Array, kernels: Kernels) -> Array:
        """x [T, I], numbers int32 [T], each row's adapter, 0: none -> float32 [T, O]."""
        columns = kernels.matmul(x, self.a[...], jnp.float32)
        own = numbers[:, None] == self.owners[...]
        return kernels.matmul(jnp.where(own, columns, 0).astype(x.dtype), self.b[...], jnp.float32)

    @property
    def columns(self) -> int:
        """The number of columns C; not after packing."""
        return self.a.shape[1]

    def pack(self, kernels: Kernels) -> None:
        """Lay both out as the kernel set multiplies them fastest."""
        if kernels.pack is not None:
            self.a = nnx.Param(kernels.pack(self.a[...]))
            self.b = nnx.Param(kernels.pack(self.b[...]))
