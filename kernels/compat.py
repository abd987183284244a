"""What the versions of jax, jax-triton and Triton that we meet do not agree on, in one place.

Each trap says which version makes it unnecessary; drop it when pyproject.toml asks for that
version.
"""

from __future__ import annotations

import importlib
import os
from importlib import metadata
from types import ModuleType
from typing import Any

#: What every kernel is compiled with. ptx_version: the newest PTX that the ptxas of CUDA 12.8
#: takes, where Triton 3.9 writes 9.4 and XLA then fails with "unsupported .version"; good for sm_80
#: to sm_120, unnecessary once XLA links with CUDA 13.2. enable_fp_fusion: fused multiply-add, on by
#: default up to Triton 3.9, which warns that 3.10 turns it off.
COMPILE_OPTIONS: dict[str, Any] = {"ptx_version": 87, "enable_fp_fusion": True}
#: CUtensorMapDataType of TensorFloat-32, which jax-triton imports from Triton's driver; Triton >=
#: 3.7 has it.
TMA_TF32 = 11


def jax_triton() -> ModuleType:
    """The `jax_triton` module with a live NVIDIA backend. Raises ImportError with the reason where
    there is none.
    """
    _check_versions()
    name_tf32()
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
    if release(found["jax"]) >= (0, 12) and release(found["jax-triton"]) <= (0, 4, 1):
        raise ImportError(
            f"jax-triton {found['jax-triton']} fails with jax {found['jax']}; install jax<0.12"
        )


def name_tf32() -> None:
    """Give Triton < 3.7 the constant without which jax-triton takes the NVIDIA backend for absent,
    in silence.
    """
    driver = importlib.import_module("triton.backends.nvidia.driver")
    if not hasattr(driver, "TMA_TF32"):
        driver.TMA_TF32 = TMA_TF32  # pyright: ignore[reportAttributeAccessIssue]


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "0.12.0.1" -> (0, 12, 0, 1), "3.9.0rc1" -> (3, 9)."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
