"""Whether the disks that a running server writes to have room left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from jitney.engine.common.cache_folder import why_no_room

_log = logging.getLogger("jitney.api")

#: Seconds between two checks, and free bytes below which a disk counts as full.
_LOOK_S, _LEAST_BYTES = 10.0, 64 << 20
_REMEDY = (
    "move them with data_dir (files, batches, jobs) and record; until then what has to be written "
    "is refused or lost, and answers go on"
)


async def watch_disks(
    folders: Sequence[Path], on_full: Callable[[], None], pause_s: float = _LOOK_S
) -> None:
    """Run for ever; log once when the disk of a folder gets full, and once when it has room
    again.
    """
    full: set[Path] = set()
    while True:
        for folder in folders:
            reason = await asyncio.to_thread(_why_full, folder)
            if reason and folder not in full:
                full.add(folder)
                _log.error("DISK FULL: %s", reason)
                on_full()
            elif not reason and folder in full:
                full.remove(folder)
                _log.info("%s has room again", folder)
        await asyncio.sleep(pause_s)


def _why_full(folder: Path) -> str:
    return why_no_room(folder, _LEAST_BYTES, _REMEDY) if folder.is_dir() else ""
