"""A file of the store that is being written."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from jitney.engine.server.tasks.records import StoredFile, new_id


class NewFile:
    """Its bytes lie under its id once all are there. Every method blocks, and raises OSError."""

    #: Of its name until all of it is there.
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
        """The complete file, which survives a power cut; `write` was called before."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.rename(self._path)
        return StoredFile(self._id, owner, purpose, name, self.size, int(time.time()))

    def drop(self) -> None:
        """Remove what was written before its end."""
        if self._file is not None:
            with suppress(OSError):  # what is left in its buffer may have no room
                self._file.close()
            self._part.unlink(missing_ok=True)
