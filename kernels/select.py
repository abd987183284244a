"""Which kernel set serves a platform: chosen once, by name, and never replaced in silence."""

from __future__ import annotations

from dataclasses import dataclass

from jitney.kernels.interface import PagedAttention


class KernelError(ValueError):
    """A named kernel set does not exist or cannot run here."""


@dataclass(frozen=True)
class KernelSet:
    """A named implementation of every kernel the step calls."""

    name: str
    paged_attention: PagedAttention


def reference() -> KernelSet:
    """Plain jax.numpy; runs wherever XLA does."""
    from jitney.kernels.reference import paged_attention

    return KernelSet("reference", paged_attention)


KERNEL_SETS = {"reference": reference}
#: The set that "auto" means, by platform; a platform not named here gets the reference.
BEST: dict[str, str] = {}


def select(platform: str, name: str = "auto") -> KernelSet:
    """The kernel set `name` for `platform` (cpu, gpu, tpu); "auto" is the best one that exists for it.

    Raises KernelError for an unknown name, listing the known ones.
    """
    chosen = BEST.get(platform, "reference") if name == "auto" else name
    if chosen not in KERNEL_SETS:
        raise KernelError(f"unknown kernels {chosen!r}; known: auto, {', '.join(KERNEL_SETS)}")
    return KERNEL_SETS[chosen]()
