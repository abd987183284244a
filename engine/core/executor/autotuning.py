"""XLA's autotuning results, which choose a GPU's products: stored between starts, and shipped for
some cards.

XLA writes a file for each product into a folder beside jax's compiled programs, and checks neither
card nor release when it reads them, so the folder's name contains both.
"""

from __future__ import annotations

import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

#: Shipped results for cards: a folder for each `_folder_name`.
_SHIPPED = Path(__file__).parent / "autotuned"
#: Subfolder of the folder of compiled programs in which XLA stores its results.
RESULTS = "xla_gpu_per_fusion_autotune_cache_dir"
_RELEASE = version("jaxlib")


def _folder_name(card: str, capability: str, release: str = _RELEASE) -> str:
    """The folder name for a card. card: as jax names it (`device_kind`). capability: compute
    capability, such as "9.0".

    Example: nvidia-h100-80gb-hbm3-9.0-jaxlib-0.11.2
    """
    name = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    return f"{name}-{capability}-jaxlib-{release}"


def programs_folder(programs: Path, device: Any, shipped: Path = _SHIPPED) -> Path:
    """The folder below `programs` for compiled programs of jax's `device`.

    A GPU has a folder of its own, into which the results shipped for the card are copied; existing
    results stay.
    """
    name = name_of(device)
    if not name:
        return programs
    _bring(shipped / name, programs / name / RESULTS)
    return programs / name


def name_of(device: Any) -> str:
    """`_folder_name` of jax's `device`; empty unless it is a GPU."""
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or not capability:
        return ""
    return _folder_name(device.device_kind, str(capability))


def _bring(shipped: Path, results: Path) -> None:
    """Copy shipped results to the folder that XLA reads, without replacing existing files."""
    results.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not shipped.is_dir():
        return
    for source in sorted(shipped.iterdir()):
        if source.is_file() and not (results / source.name).exists():
            partial = results / f".{source.name}.new"  # another process may start beside this one
            shutil.copyfile(source, partial)
            partial.rename(results / source.name)
