"""The start of a core's process: what its parent tells it, and the folder of their two sockets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from jitney.engine.common.child_process import child_environ

#: Makes glibc use huge pages, since a step on a CPU reads all weights.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
#: numpy's threads would busy-wait, which takes half of the time of the kernels' proof.
_ONE_NUMPY_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
#: Sockets in the folder of a core.
SOCKET_NAMES = ("to", "from")


class Start(msgspec.Struct, frozen=True):
    """The parent's one line."""

    #: Sections of the configuration.
    config: dict[str, Any]
    #: Folder of the two sockets.
    folder: str
    #: Function that builds the core, MODULE:FUNCTION.
    builder: str
    log_level: str = "info"
    #: Adapter numbers by name, from an earlier core.
    adapters: dict[str, int] = {}

    @property
    def to_core(self) -> str:
        """The address of the socket that the core reads."""
        return f"ipc://{self.folder}/to"

    @property
    def from_core(self) -> str:
        """The address of the socket that the core writes to."""
        return f"ipc://{self.folder}/from"


def remove_folder(folder: str) -> None:
    """Remove a folder of sockets; errors are ignored."""
    for name in SOCKET_NAMES:
        with contextlib.suppress(OSError):
            Path(folder, name).unlink()
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def core_environ(jax_environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that computes. jax_environment: what its settings set."""
    return _HUGE_PAGES | _ONE_NUMPY_THREAD | child_environ() | dict(jax_environment)
