"""Capabilities of the compiled CPU library on this machine."""

from __future__ import annotations

from jitney.kernels.cpu.library import NoLibrary, load


def packs_here() -> bool:
    """Whether weights are packed in panels on this machine; False if no library runs."""
    try:
        return load().packs
    except NoLibrary:
        return False
