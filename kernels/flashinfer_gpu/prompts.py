"""Attention of prompts by FlashInfer's kernels, called from a jitted step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jitney.kernels.flashinfer_gpu.modules import Variant, registered
from jitney.kernels.flashinfer_gpu.plan import Plan, hopper_plan, page_lists, tiled_plan
from jitney.kernels.interface import AttentionMeta, KernelError

_HEAD_DIMS = (64, 128, 256)
_DTYPES = ("bfloat16", "float16")
_HOPPER = 90


def why_not(head_dim: int, dtype: str, pool_dtype: str) -> str:
    """Why prompts of such heads are not for FlashInfer, empty if they are. dtype: of queries."""
    if head_dim not in _HEAD_DIMS:
        return f"it takes heads of {', '.join(map(str, _HEAD_DIMS))}, not {head_dim}"
    if dtype not in _DTYPES:
        return f"it takes {' and '.join(_DTYPES)}, not {dtype}"
    if pool_dtype != dtype:
        return f"its pools hold the activations' {dtype}, not {pool_dtype}"
    return ""


@dataclass(frozen=True)
class FlashInferPrompts:
    """Attention of prompt chunks for one kind of GPU. Hashable, a constant of a jitted step."""

    sm: int  # compute capability, 90 for 9.0
    processors: int  # multiprocessors of the GPU
    #: Makes a variant callable and names its target; tests put one in its place.
    target: Callable[[Variant], str] = registered

    @property
    def template(self) -> str:
        """FlashInfer's name for the kernels of this GPU."""
        return "fa3" if self.sm == _HOPPER else "fa2"

    def __call__(
        self,
        q: jax.Array,
        kv: jax.Array,
        meta: AttentionMeta,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> jax.Array:
        """o [T, H, D] with the rows of prompt chunks; padding is zero, rows of decoding sequences
        are undefined. Arguments as in `jitney.kernels.interface`.

        Raises KernelError for heads and numbers that FlashInfer does not take.
        """
        reason = why_not(q.shape[-1], q.dtype.name, kv.dtype.name)
        if reason:
            raise KernelError(f"kernels flashinfer: {reason}; choose kernels triton")
        variant = Variant(self.template, q.dtype.name, q.shape[-1], window > 0, softcap > 0)
        call = jax.ffi.ffi_call(self.target(variant), jax.ShapeDtypeStruct(q.shape, q.dtype))
        plan = self._plan(q, kv, meta)
        with jax.named_scope("flashinfer_prompts"):
            o = call(
                q,
                kv,
                plan.workspace,
                *page_lists(meta, kv.shape[1]),
                fields=np.array(plan.fields, np.int64),
                window_left=np.int64(window - 1),  # keys before a row's own; -1: all
                softcap=np.float64(softcap),
                scale=np.float64(scale),
            )
        # Rows of padding are nobody's tiles: the memory is as it was found.
        real = jnp.arange(len(q)) < meta.counts[2]
        return jnp.where(real[:, None, None], o, 0)

    def _plan(self, q: jax.Array, kv: jax.Array, meta: AttentionMeta) -> Plan:
        n_rows, n_heads, head_dim = q.shape
        if self.template == "fa3":
            return hopper_plan(meta, n_rows, n_heads, head_dim, self.processors)
        return tiled_plan(meta, n_rows, n_heads // (kv.shape[2] // 2), head_dim)
