"""A file of the store that is being written."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from jitney.engine.server.tasks.records import StoredFile, new_id


class NewFile:
    """A file that gets its final name when it is complete. Every method blocks and raises
    OSError.
    """

    #: Suffix of the name while it is incomplete.
    SUFFIX = ".part"

    def __init__(self, folder: Path):
        self._id = new_id("file-")
        self._path = folder / self._id
        self._part = folder / (self._id + self.SUFFIX)
        self._file: BinaryIO | None = None
        self.size = 0

    def write(self, data: bytes) -> None:
        if self._file is None:
            self._file = self._part.open("wb")
        self.size += self._file.write(data)

    def end(self, owner: str, purpose: str, name: str) -> StoredFile:
        """Complete the file, synced to disk. Call `write` at least once before."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.rename(self._path)
        return StoredFile(self._id, owner, purpose, name, self.size, int(time.time()))

    def drop(self) -> None:
        """Delete an incomplete file."""
        if self._file is not None:
            with suppress(OSError):  # there may be no room to flush the buffer
                self._file.close()
            self._part.unlink(missing_ok=True)
