"""Proof at startup: compares the kernels of a set with their definitions on the serving machine.

A kernel that is right on one machine may be wrong on another: a compiler once dropped a store for
another CPU (docs/decisions). So before an engine is ready, it runs its kernels on random inputs in
the served shapes and compares the results with definitions in numpy, which are not compiled. A
wrong kernel is replaced by the next set's, finally by the reference; if the user named the kernel
set, startup fails with an error (`engine.core.executor.proving`).

The error of a result is its largest distance from the definition, in units of the root mean square
of its row: a wrong head, page or column gives 0.5 and more, rounding to bfloat16 about 0.03.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from jitney.kernels.interface import KernelSet
from jitney.kernels.proof_attention import attention_errors, case_errors
from jitney.kernels.proof_delta_net import delta_net_errors
from jitney.kernels.proof_parts import part_errors
from jitney.kernels.proof_products import CHECKS
from jitney.kernels.proof_routing import routing_errors
from jitney.kernels.proof_shapes import ServedShapes
from jitney.kernels.select import reference

if TYPE_CHECKING:
    from jitney.kernels.attention_cases import AttentionCase
    from jitney.kernels.expert_cases import ExpertCase

_log = logging.getLogger(__name__)

#: Largest error that rounding explains, by dtype of the activations; the same with an 8-bit pool.
_LIMITS = {"bfloat16": 0.125, "float16": 0.125, "float32": 0.01}
_NARROW_POOL_LIMIT = 0.5
#: Limit of gated products and recurrent layers: the gates, their inputs and the result may each be
#: rounded to 16 bits, which makes an error of 0.11 for random numbers.
_GATED_LIMIT = 0.25
#: Limit of the difference between the probabilities that two top-k and top-p cuts keep of a row.
_MASS_LIMIT = 1e-3

#: Proved kernel -> fields of the kernel set that are replaced if it is wrong.
_FIELDS: dict[str, tuple[str, ...]] = {
    "attention": ("paged_attention", "attend", "rotate_and_write", "pool_shape"),
    "norm": ("rms_norm", "norm_sum"),
    # The reference's products do not accept a `OneOf`.
    "products": ("pack", "matmul", "gated", "takes_one_of", "leaves_out_padding"),
    "head": ("project",),
    "int4 product": ("matmul_int4", "gated_int4"),
    "int8 product": ("int8",),
    "fp8 product": ("fp8",),
    "mxfp4 product": ("mxfp4",),
    "products in parts": ("parts",),
    "routing": ("route",),
    "experts": ("experts", "takes_one_of"),
    "sampling cut": ("threshold",),
    "recurrent layers": ("delta_net", "mamba", "short_conv"),
}


_CHECKS = {
    "attention": attention_errors,
    **CHECKS,
    "products in parts": part_errors,
    "routing": routing_errors,
    "recurrent layers": delta_net_errors,
}


@dataclass(frozen=True)
class Proof:
    """The result of one kernel's proof."""

    kernel: str  # a key of _FIELDS
    error: float  # the largest error; infinite if the kernel could not run
    limit: float  # largest error that passes
    reason: str = ""  # why the kernel could not run

    @classmethod
    def of_attention(cls, kernels: KernelSet, case: AttentionCase) -> Proof:
        """Compare attention with its definition for one case on this device; never raises."""
        (proof,) = _compared("attention", case.shapes(), lambda: case_errors(kernels, case))
        return proof

    @classmethod
    def of_experts(cls, kernels: KernelSet, case: ExpertCase) -> Proof:
        """Like `of_attention`, for the products with experts of a set that multiplies all blocks at
        once.
        """
        assert kernels.experts is not None
        at_once, limit = kernels.experts, _LIMITS[case.dtype]
        (proof,) = _judged("experts", limit, lambda: case.errors(at_once))
        return proof

    @property
    def ok(self) -> bool:
        """True if the kernel may serve."""
        return self.error <= self.limit

    def __str__(self) -> str:
        if self.reason:
            return f"{self.kernel} failed ({self.reason})"
        return f"{self.kernel} is off by {self.error:.3g} (at most {self.limit:g})"


@cache
def prove(kernels: KernelSet, shapes: ServedShapes) -> tuple[Proof, ...]:
    """Compare each kernel that is not the reference's with its definition, on this device.

    Never raises: a kernel that cannot be compiled or run counts as wrong.
    """
    proofs = []
    started = time.perf_counter()
    for kernel in _CHECKS:
        if _replaces_reference(kernels, kernel):
            proofs += _proved(kernel, kernels, shapes)
    seconds = time.perf_counter() - started
    errors = ", ".join(f"{proof.kernel} {proof.error:.2g}" for proof in proofs)
    _log.info("kernels %s proved in %.2f s; errors: %s", kernels.label, seconds, errors or "none")
    return tuple(proofs)


def _replaces_reference(kernels: KernelSet, kernel: str) -> bool:
    plain = reference()
    return any(getattr(kernels, field) is not getattr(plain, field) for field in _FIELDS[kernel])


def _proved(kernel: str, kernels: KernelSet, shapes: ServedShapes) -> list[Proof]:
    """The proof of one kernel; an empty list if this engine never calls the kernel."""
    return _compared(kernel, shapes, lambda: _CHECKS[kernel](kernels, shapes))


def _compared(
    kernel: str, shapes: ServedShapes, compare: Callable[[], Iterator[float]]
) -> list[Proof]:
    """The proof from the errors that `compare` yields; an empty list if it yields none."""
    return _judged(kernel, _limit_for(kernel, shapes), compare)


def _judged(kernel: str, limit: float, compare: Callable[[], Iterator[float]]) -> list[Proof]:
    try:
        errors = list(compare())
    except Exception as error:  # compilers and drivers may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return [Proof(kernel, float("inf"), limit, reason)]
    if not errors:
        return []
    return [Proof(kernel, max(errors), limit)]


def _limit_for(kernel: str, shapes: ServedShapes) -> float:
    """The error that rounding explains."""
    if kernel == "sampling cut":
        return _MASS_LIMIT
    if kernel == "attention" and shapes.attention.kv_dtype not in _LIMITS:
        return _NARROW_POOL_LIMIT
    if kernel in ("products", "recurrent layers") and shapes.dtype != "float32":
        return _GATED_LIMIT
    return _LIMITS[shapes.dtype]


def without(kernels: KernelSet, names: Sequence[str]) -> KernelSet:
    """The set with the reference's kernels in place of those proved under `names`."""
    plain = reference()
    fields = [field for name in names for field in _FIELDS[name]]
    return replace(kernels, **{field: getattr(plain, field) for field in fields})
