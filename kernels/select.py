"""Which kernel set serves a platform: chosen once, by name, and never replaced in silence."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache

import jax

from jitney.kernels.int4 import Int4Matmul
from jitney.kernels.interface import Attend, PagedAttention, Product, RotateAndWrite, Threshold

log = logging.getLogger(__name__)


class KernelError(ValueError):
    """A named kernel set does not exist or cannot run here."""


@dataclass(frozen=True)
class KernelSet:
    """A named implementation of every kernel the step calls.

    `paged_attention` writes and attends; a model that leaves norm and rotation to the kernel calls
    `rotate_and_write`, then `attend`.
    """

    name: str
    paged_attention: PagedAttention
    rotate_and_write: RotateAndWrite
    attend: Attend
    matmul_int4: Int4Matmul
    threshold: Threshold | None  # None: the sampler's own search does better on this platform
    matmul: Product
    project: Product


def reference() -> KernelSet:
    """Plain jax.numpy; runs wherever XLA does."""
    from jitney.kernels.int4 import matmul_int4
    from jitney.kernels.reference import attend, matmul, paged_attention, project, rotate_and_write

    return KernelSet("reference", paged_attention, rotate_and_write, attend, matmul_int4, None, matmul, project)


def native() -> KernelSet:
    """Attention and small products compiled for this machine's CPU by Numba; the reference's for everything else.

    Raises KernelError on another platform, or where Numba cannot be imported.
    """
    if jax.default_backend() != "cpu":
        raise KernelError(f"kernels native are for CPUs; jax runs on {jax.default_backend()}")
    try:
        from jitney.kernels.cpu import attention, products
    except ImportError as error:
        raise KernelError(f"kernels native cannot run here: {error}") from error
    return replace(reference(), name="native", paged_attention=attention.paged_attention, attend=attention.attend,
                   matmul=products.matmul, project=products.project)


def triton() -> KernelSet:
    """Triton kernels for the NVIDIA GPU that jax sees. Raises KernelError where there is none or jax-triton fails."""
    return triton_for(compute_capability())


@cache
def triton_for(sm: int) -> KernelSet:
    """Triton kernels for compute capability `sm` (90: 9.0), on a machine that may have no GPU.

    One set each: bound methods of equal objects are not equal, and would compile a step's layers again.
    """
    from jitney.kernels import compat

    try:
        compat.jax_triton()
    except ImportError as error:
        raise KernelError(f"kernels triton cannot run here: {error}") from error
    from jitney.kernels.reference import matmul, project
    from jitney.kernels.triton_launch import JaxTriton
    from jitney.kernels.triton_set import TritonKernels

    kernels = TritonKernels(JaxTriton(sm))
    return KernelSet("triton", kernels.paged_attention, kernels.rotate_and_write, kernels.attend, kernels.matmul_int4,
                     kernels.threshold, matmul, project)


def compute_capability() -> int:
    """Of the first device that jax sees, as 90 for 9.0; KernelError if that is no NVIDIA GPU from sm_80 on."""
    device = jax.devices()[0]
    text = str(getattr(device, "compute_capability", ""))
    major, _, minor = text.partition(".")
    if device.platform not in ("gpu", "cuda") or not (major.isdigit() and minor.isdigit()):
        raise KernelError(f"kernels triton need an NVIDIA GPU; jax runs on {device.platform}")
    if int(major) < 8:
        raise KernelError(f"kernels triton need compute capability 8.0; this {device.device_kind} has {text}")
    return 10 * int(major) + int(minor)


KERNEL_SETS = {"reference": reference, "native": native, "triton": triton}
#: The set that "auto" means, by platform; a platform not named here gets the reference.
BEST: dict[str, str] = {"cpu": "native", "gpu": "triton", "cuda": "triton"}


def select(platform: str, name: str = "auto") -> KernelSet:
    """The kernel set `name` for `platform` (cpu, gpu, tpu); "auto" is the best one that runs on it.

    Raises KernelError for an unknown name, listing the known ones, and for a named set that cannot run here.
    """
    if name == "auto":
        return best(platform)
    if name not in KERNEL_SETS:
        raise KernelError(f"unknown kernels {name!r}; known: auto, {', '.join(KERNEL_SETS)}")
    return KERNEL_SETS[name]()


def best(platform: str) -> KernelSet:
    """The platform's own set; the reference, with a warning that says why, where that cannot run."""
    try:
        return KERNEL_SETS[BEST.get(platform, "reference")]()
    except KernelError as error:
        log.warning("%s; the slower reference kernels serve", error)
        return reference()
