"""The folder of files, batches and jobs, and the one thread that reads and writes its store.

The folder must be ours alone, like the one of compiled programs, and one server's at a time: two
would answer every line twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate

from jitney.engine.common.errors import ConfigError
from jitney.engine.config import make_private
from jitney.engine.server.tasks.new_file import NewFile
from jitney.engine.server.tasks.store import StoreUnavailable, TaskStore

_log = logging.getLogger("jitney.api")

_DATABASE = "batches.sqlite3"
#: Seconds between two lines in the log about trouble with the disk.
_SILENT_S = 60.0
#: What the disk, or damage on it, raises. ValueError: what should be ours is no JSON, no text, or
#: of another type.
_TROUBLE = (sqlite3.Error, OSError, ValueError)
#: The part of SQLite's error codes that says of which kind an error is.
_PRIMARY = 0xFF


class StoreKeeper:
    """The store, reached from the event loop, and the paths of files. Made by `open`.

    Trouble with the disk is raised as StoreUnavailable, and logged once in a while. A store that is
    damaged is set aside with its files, and a new one begun.
    """

    def __init__(self, folder: Path, lock: int, thread: ThreadPoolExecutor):
        self.folder = folder
        self._lock = lock
        self._thread = thread
        #: Belongs to the thread; None before it is first asked for, and after damage.
        self._store: TaskStore | None = None
        #: time.monotonic() before which trouble is not logged again.
        self._silent_until = 0.0

    @classmethod
    async def open(cls, folder: Path) -> StoreKeeper:
        """The folder, made if there is none. Raises ConfigError if it is not ours alone, another
        server's at this time, or written by a newer version, and OSError.
        """
        lock = await asyncio.to_thread(_claim, folder)
        keeper = cls(folder, lock, ThreadPoolExecutor(1, thread_name_prefix="batches"))
        try:
            await keeper.do(TaskStore.unfinished)  # what is damaged is set aside at once
        except StoreUnavailable:
            pass
        except BaseException:
            await keeper.close()
            raise
        return keeper

    @classmethod
    def has_kept(cls, folder: Path) -> bool:
        """Whether a server has kept a store here. Blocks."""
        return (folder / _DATABASE).exists()

    async def do[**P, T](
        self, function: Callable[Concatenate[TaskStore, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function with the store on its thread. It is run to its end, even if its caller is
        cancelled.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._thread, self._run, lambda store: function(store, *args, **kwargs)
        )

    async def on_disk[**P, T](
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run what reads or writes a file on a thread. Raises StoreUnavailable."""
        try:
            return await asyncio.to_thread(function, *args, **kwargs)
        except OSError as error:
            raise self._trouble(error) from None

    def _run[T](self, function: Callable[[TaskStore], T]) -> T:
        """Call a function with the store, on its thread."""
        try:
            try:
                return function(self._opened())
            except _TROUBLE as error:
                if not _is_damage(error):
                    raise
                self._begin_anew(error)
                raise StoreUnavailable from None
        except _TROUBLE as error:
            raise self._trouble(error) from None

    def _opened(self) -> TaskStore:
        if self._store is None:
            try:
                self._store = _open_store(self.folder)
            except _TROUBLE as error:
                if not _is_damage(error, opening=True):
                    raise
                self._begin_anew(error)
                self._store = _open_store(self.folder)
        return self._store

    def _begin_anew(self, error: Exception) -> None:
        """Set the damaged store aside; a new one is made for the next that is asked."""
        self._close()
        aside = _set_aside(self.folder)
        _log.error(
            "THE STORE OF FILES, BATCHES AND JOBS IS DAMAGED (%s): it lies in %s now, with its "
            "files, and a new one is begun",
            error,
            aside,
        )

    def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with contextlib.suppress(sqlite3.Error):
                store.close()

    def _trouble(self, error: Exception) -> StoreUnavailable:
        """The answer to an error of the disk, which is logged."""
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + _SILENT_S
            _log.warning("files, batches and jobs cannot be kept in %s: %s", self.folder, error)
        return StoreUnavailable()

    def path(self, file_id: str) -> Path:
        """Where the bytes of a file lie. Only for ids of ours: those that the store knows."""
        return self.folder / "files" / file_id

    def new_file(self) -> NewFile:
        """A file that is about to be written."""
        return NewFile(self.folder / "files")

    async def close(self) -> None:
        """Let go of the folder, after what is being written."""
        with contextlib.suppress(RuntimeError):
            await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)
        os.close(self._lock)


def _claim(folder: Path) -> int:
    """A descriptor that holds the lock of a folder, which is made if there is none; the system lets
    go of it with the process.
    """
    reason = make_private(folder) or make_private(folder / "files")
    if reason:
        raise ConfigError(reason)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(
            f"{folder} is used by another server; give each its own data_dir"
        ) from None
    return lock


def _open_store(folder: Path) -> TaskStore:
    """The store, made if there is none. Files that no store knows are set aside where it is new,
    and else removed: an earlier process has not finished writing them.
    """
    files, database = folder / "files", folder / _DATABASE
    is_new = not database.exists() or not database.stat().st_size
    if is_new and any(path.suffix != NewFile.SUFFIX for path in files.iterdir()):
        _log.error("files without their store are set aside in %s", _set_aside(folder))
    store = TaskStore(database)
    known = store.file_ids()
    for path in files.iterdir():
        if path.name not in known:
            path.unlink(missing_ok=True)
    return store


def _set_aside(folder: Path) -> Path:
    """Move the store and its files into a folder of their own, where an operator may look at
    them.
    """
    aside = Path(tempfile.mkdtemp(prefix="damaged-", dir=folder))
    for name in (_DATABASE, f"{_DATABASE}-wal", f"{_DATABASE}-shm", "files"):
        if (folder / name).exists():
            (folder / name).rename(aside / name)
    make_private(folder / "files")
    return aside


def _is_damage(error: Exception, *, opening: bool = False) -> bool:
    """Whether what lies on the disk is not what was written; else the disk is full, or the like.
    opening: the store was being opened.
    """
    if not isinstance(error, sqlite3.DatabaseError):
        return isinstance(error, ValueError)
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # a text that is not UTF-8
        return isinstance(error, sqlite3.OperationalError)
    kinds = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
    # Tables that are there already, or cannot be read, under a version that says otherwise.
    return code & _PRIMARY in kinds or (opening and code == sqlite3.SQLITE_ERROR)
