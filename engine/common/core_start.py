"""The start of a core's process: what its parent tells it, and the folder of their two sockets."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec

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
