"""The folder of files, batches and jobs, and the one thread of its store. Only one server may use a
folder at a time: two would answer every line twice.
"""

from __future__ import annotations

import logging
from pathlib import Path

from jitney.engine.common.database import DatabaseKeeper
from jitney.engine.server.tasks.new_file import NewFile
from jitney.engine.server.tasks.store import TaskStore

_log = logging.getLogger("jitney.api")


class StoreKeeper(DatabaseKeeper[TaskStore]):
    """The store, used from the event loop, and the paths of files."""

    DATABASE = "batches.sqlite3"
    COMPANIONS = ("files",)
    CONTENTS = "files, batches and jobs"

    @classmethod
    def has_kept(cls, folder: Path) -> bool:
        """Whether the folder has a store. Blocks."""
        return (folder / cls.DATABASE).exists()

    def open_database(self) -> TaskStore:
        """Open the store. Files not in it are moved aside if it is new, else deleted as
        unfinished.
        """
        files, database = self.folder / "files", self.folder / self.DATABASE
        is_new = not database.exists() or not database.stat().st_size
        if is_new and any(path.suffix != NewFile.SUFFIX for path in files.iterdir()):
            _log.error("files without their store are set aside in %s", self.set_aside())
        store = TaskStore(database)
        file_ids = store.file_ids()
        for path in files.iterdir():
            if path.name not in file_ids:
                path.unlink(missing_ok=True)
        return store

    def path(self, file_id: str) -> Path:
        """Path of a file's bytes. Only for ids in the store, since the id becomes part of the
        path.
        """
        return self.folder / "files" / file_id

    def new_file(self) -> NewFile:
        """A new file, to be written."""
        return NewFile(self.folder / "files")
