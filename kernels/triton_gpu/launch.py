"""Calls Triton kernels from a jitted step, with workarounds for incompatible versions of jax,
jax-triton and Triton. The only user of jax-triton.

Each workaround names the version that makes it unnecessary; drop it when pyproject.toml requires
that version.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any, Protocol

import jax

#: Compute capability -> PTX version of its kernels. 8.7 is the newest that ptxas of CUDA 12.8
#: supports; Triton 3.9 writes 9.4, and XLA then fails with "unsupported .version". Newer cards need
#: a newer one, without which LLVM ends the process: 8.8 needs CUDA 12.9, 9.0 CUDA 13. Unnecessary
#: once XLA links with CUDA 13.2.
_PTX_VERSIONS = {
    80: 87,
    86: 87,
    87: 87,
    89: 87,
    90: 87,
    100: 87,
    103: 88,
    110: 90,
    120: 87,
    121: 88,
}
#: CUtensorMapDataType of TensorFloat-32, which jax-triton imports from Triton's driver; Triton >=
#: 3.7 has it.
_TMA_TF32 = 11


class Launch(Protocol):
    """Runs kernels for one kind of GPU; tests replace it with a launcher that interprets them."""

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
        registers: int = 0,
        **constants: Any,
    ) -> Any:
        """Call `kernel` with arrays, refs (read and written in place) and then one pointer per leaf
        of `out`.

        out: a pytree of jax.ShapeDtypeStruct; the call returns arrays of these shapes. () for a
        kernel that only writes refs. registers: the most of a thread; 0: the compiler decides.
        """
        ...


@dataclass(frozen=True)
class JaxTriton:
    """Launches through jax-triton; the program can be compiled for `sm` on a machine without a
    GPU.
    """

    sm: int

    def check(self) -> None:
        """Raise ImportError if kernels for this card cannot be called."""
        _compile_options(self.sm)
        _jax_triton()

    def __call__(
        self,
        kernel: Any,
        *args: Any,
        out: Any,
        grid: tuple[int, ...],
        warps: int,
        stages: int,
        registers: int = 0,
        **constants: Any,
    ) -> Any:
        with jax.named_scope(kernel.__name__):  # the name that profiles and HLO show
            return _jax_triton().triton_call(
                *args,
                kernel=kernel,
                out_type=out,
                grid=grid,
                name=kernel.__name__,
                num_warps=warps,
                num_stages=stages,
                compute_capability=self.sm,
                backend_options=_compile_options(self.sm, registers),
                **constants,
            )


def _compile_options(sm: int, registers: int = 0) -> dict[str, Any]:
    """Compiler options of a kernel for compute capability `sm`. registers: see `Launch`.

    Raises ImportError for an unknown card, for which the compiler would end the process.
    enable_fp_fusion: fused multiply-add, on by default up to Triton 3.9; its warning says that 3.10
    turns it off.
    """
    version = _PTX_VERSIONS.get(sm)
    if version is None:
        known = ", ".join(f"{known / 10}" for known in _PTX_VERSIONS)
        raise ImportError(f"compute capability {sm / 10} is not known, only {known}")
    options = {"ptx_version": version, "enable_fp_fusion": True}
    return options | ({"maxnreg": registers} if registers else {})


def _jax_triton() -> ModuleType:
    """The `jax_triton` module with an NVIDIA backend. Raises ImportError without one."""
    _check_versions()
    _name_tf32()
    cache = os.environ.get("TRITON_CACHE_DIR")  # importing jax-triton <= 0.4.1 deletes it
    module = importlib.import_module("jax_triton")
    if cache is not None:
        os.environ["TRITON_CACHE_DIR"] = cache
    return module


def _check_versions() -> None:
    """Raise ImportError for a jax and jax-triton that cannot work together, naming both.

    jax 0.12 calls elimination rules with a third argument that jax-triton <= 0.4.1 does not take:
    every jitted call fails.
    """
    found = {}
    for name in ("jax", "jax-triton", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise ImportError(
                f'{name} is not installed: pip install -e ".[cuda12]" (or cuda13)'
            ) from None
    if _release(found["jax"]) >= (0, 12) and _release(found["jax-triton"]) <= (0, 4, 1):
        raise ImportError(
            f"jax-triton {found['jax-triton']} fails with jax {found['jax']}; install jax<0.12"
        )


def _name_tf32() -> None:
    """Define a constant for Triton < 3.7, without which jax-triton silently finds no NVIDIA
    backend.
    """
    driver = importlib.import_module("triton.backends.nvidia.driver")
    if not hasattr(driver, "TMA_TF32"):
        driver.TMA_TF32 = _TMA_TF32  # pyright: ignore[reportAttributeAccessIssue]


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "0.12.0.1" -> (0, 12, 0, 1), "3.9.0rc1" -> (3, 9)."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
