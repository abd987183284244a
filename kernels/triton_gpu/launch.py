"""How a Triton kernel is called from a jitted step: the one place that knows jax-triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jitney.kernels import compat


class Launch(Protocol):
    """Runs kernels for one kind of GPU; tests put one in its place that interprets them."""

    @property
    def sm(self) -> int:
        """Compute capability, 90 for 9.0."""
        ...

    def __call__(
        self,
        kernel: Any,
        *args: Any,
        out: Any,
        grid: tuple[int, ...],
        warps: int,
        stages: int,
        **constants: Any,
    ) -> Any:
        """Call `kernel` with arrays, refs (read and written in place) and then one pointer per leaf
        of `out`.

        out: a pytree of jax.ShapeDtypeStruct, returned filled; () for a kernel that only writes
        refs.
        """
        ...


@dataclass(frozen=True)
class JaxTriton:
    """Launches through jax-triton; the program can be compiled for `sm` on a machine without a
    GPU.
    """

    sm: int

    def __call__(
        self,
        kernel: Any,
        *args: Any,
        out: Any,
        grid: tuple[int, ...],
        warps: int,
        stages: int,
        **constants: Any,
    ) -> Any:
        with jax.named_scope(kernel.__name__):  # the name that profiles and HLO show
            return compat.jax_triton().triton_call(
                *args,
                kernel=kernel,
                out_type=out,
                grid=grid,
                name=kernel.__name__,
                num_warps=warps,
                num_stages=stages,
                compute_capability=self.sm,
                backend_options=compat.compile_options(self.sm),
                **constants,
            )
