"""What the compiled library can do on this machine."""

from __future__ import annotations

from jitney.kernels.cpu.library import NoLibrary, load


def packs_here() -> bool:
    """Whether weights are packed in panels on this machine; False also where no library runs."""
    try:
        return load().packs
    except NoLibrary:
        return False
