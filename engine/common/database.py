"""A SQLite database with versioned tables, and the one thread that uses it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import sqlite3
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Concatenate, Self

from jitney.engine.common.cache_folder import make_private
from jitney.engine.common.errors import ConfigError, RequestError

_log = logging.getLogger("jitney.api")

#: Least seconds between two log lines about disk errors.
_SILENT_S = 60.0
#: Errors of a failing disk or a damaged file. ValueError: invalid JSON, text or type.
_TROUBLE = (sqlite3.Error, OSError, ValueError)
#: Number of damaged databases that are kept: the first, which holds most, and the latest others.
_MOST_ASIDE = 4
#: Mask of the primary code in SQLite's extended error codes.
_PRIMARY = 0xFF


class StoreUnavailable(RequestError):
    """The store cannot be read or written now: the disk is full, or the data is damaged."""

    def __init__(self, contents: str = "files, batches and jobs") -> None:
        super().__init__(
            f"{contents} cannot be read or written now; the server's log says why",
            code="store_unavailable",
        )


class Database:
    """The tables of one file. Blocks. Raises ConfigError (a newer version's) and sqlite3.Error."""

    #: SQL that updates the tables from each version to the next.
    VERSIONS: ClassVar[tuple[str, ...]]

    def __init__(self, path: Path):
        self.db = sqlite3.connect(path, isolation_level=None)
        try:
            self.db.row_factory = sqlite3.Row
            self.db.execute("PRAGMA journal_mode = WAL")
            self.db.execute("PRAGMA synchronous = NORMAL")
            self._make_tables(path)
        except BaseException:
            self.db.close()
            raise

    def _make_tables(self, path: Path) -> None:
        [version] = self.db.execute("PRAGMA user_version").fetchone()
        if version > len(self.VERSIONS):
            raise ConfigError(f"{path} was written by a newer version of Jitney")
        for number, tables in enumerate(self.VERSIONS[version:], version + 1):
            self.db.executescript(f"BEGIN; {tables} PRAGMA user_version = {number}; COMMIT;")
        if _columns_of(self.db) != _all_columns(self.VERSIONS):
            raise sqlite3.OperationalError("its tables are not those of its version")

    def check(self) -> None:
        """Read the data that a start needs, to find damage early."""

    def close(self) -> None:
        self.db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Context whose writes are atomic."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.db.execute("COMMIT")
        except BaseException:
            if self.db.in_transaction:  # some errors, such as a full disk, have already rolled back
                self.db.execute("ROLLBACK")
            raise

    def value(self, query: str, *values: Any) -> Any:
        """The first column of a query's first row; None if there is no row."""
        row = self.db.execute(query, values).fetchone()
        return None if row is None else row[0]


@cache
def _all_columns(versions: tuple[str, ...]) -> set[tuple[str, str]]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript("".join(versions))
        return _columns_of(db)


def _columns_of(db: sqlite3.Connection) -> set[tuple[str, str]]:
    """Tables and their columns."""
    query = """SELECT tables.name, columns.name
        FROM sqlite_master AS tables, pragma_table_info(tables.name) AS columns"""
    return {(table, column) for table, column in db.execute(query)}


def _pass(trouble: str) -> None:
    """Do nothing: errors are logged anyway."""


class DatabaseKeeper[D: Database](ABC):
    """A database in its own folder, used from the event loop; made by `open`. Disk errors are
    raised as StoreUnavailable; a damaged database is moved aside and replaced by a new one.
    """

    #: Name of the file; names of folders beside it, which are moved aside with a damaged file.
    DATABASE: ClassVar[str]
    COMPANIONS: ClassVar[tuple[str, ...]] = ()
    #: Its contents, for the log.
    CONTENTS: ClassVar[str]

    def __init__(
        self, folder: Path, lock: int | None = None, on_trouble: Callable[[str], None] = _pass
    ):
        """lock: holds the folder; None: nothing is written. on_trouble: called on the loop."""
        self.folder = folder
        self._lock = lock
        self._on_trouble = on_trouble
        #: Errors to be reported to it; the thread adds to them.
        self._untold: list[str] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self.DATABASE)
        #: Used only by the thread; None before its first use and after damage.
        self._database: D | None = None
        #: time.monotonic() before which trouble is not logged again.
        self._silent_until = 0.0

    @classmethod
    async def open(cls, folder: Path, on_trouble: Callable[[str], None] = _pass) -> Self:
        """The folder, made if absent. Raises ConfigError (not ours, in use, newer) and OSError."""
        lock = await asyncio.to_thread(_claim, folder, cls.COMPANIONS)
        keeper = cls(folder, lock, on_trouble)
        try:
            await keeper.do(lambda database: database.check())  # moves a damaged file aside now
        except StoreUnavailable:
            pass
        except BaseException:
            await keeper.close()
            raise
        return keeper

    @abstractmethod
    def open_database(self) -> D:
        """The database, made if there is none. Blocks."""

    async def do[**P, T](
        self, function: Callable[Concatenate[D, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function with the database in its thread, without cancelling it. Raises
        StoreUnavailable.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(
                self._thread, self._run, lambda database: function(database, *args, **kwargs)
            )
        finally:
            while self._untold:
                self._on_trouble(self._untold.pop(0))

    async def on_disk[**P, T](
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a function that reads or writes a file in a thread. Raises StoreUnavailable."""
        try:
            return await asyncio.to_thread(function, *args, **kwargs)
        except OSError as error:
            raise self._trouble(error) from None

    def _run[T](self, function: Callable[[D], T]) -> T:
        """Call a function with the database, on its thread."""
        try:
            try:
                return function(self._opened())
            except _TROUBLE as error:
                if not _is_damage(error):
                    raise
                self._begin_anew(error)
                raise StoreUnavailable(self.CONTENTS) from None
        except _TROUBLE as error:
            raise self._trouble(error) from None

    def _opened(self) -> D:
        if self._database is None:
            try:
                self._database = self.open_database()
            except _TROUBLE as error:
                if not _is_damage(error, opening=True):
                    raise
                self._begin_anew(error)
                self._database = self.open_database()
        return self._database

    def _begin_anew(self, error: Exception) -> None:
        """Move the damaged database aside; the next use makes a new one."""
        self._close()
        aside = self.set_aside()
        self._untold.append(f"{self.CONTENTS} were damaged; a new store is begun")
        _log.error(
            "THE STORE OF %s IS DAMAGED (%s): it lies in %s now, with its files, and a new one is "
            "begun",
            self.CONTENTS.upper(),
            error,
            aside,
        )

    def set_aside(self) -> Path:
        """Move a damaged database and its folders aside, for the operator. Blocks."""
        aside = Path(tempfile.mkdtemp(prefix="damaged-", dir=self.folder))
        database = (self.DATABASE, f"{self.DATABASE}-wal", f"{self.DATABASE}-shm")
        for name in (*database, *self.COMPANIONS):
            if (self.folder / name).exists():
                (self.folder / name).rename(aside / name)
        for name in self.COMPANIONS:
            make_private(self.folder / name)
        damaged = sorted(self.folder.glob("damaged-*"), key=lambda path: path.stat().st_mtime_ns)
        for surplus in damaged[1 : 1 - _MOST_ASIDE]:
            shutil.rmtree(surplus, ignore_errors=True)
        return aside

    def _close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with contextlib.suppress(sqlite3.Error):
                database.close()

    def _trouble(self, error: Exception) -> StoreUnavailable:
        """Log a disk error; returns the exception to raise."""
        # Without an OSError's path: all viewers of the page can read it.
        reason = getattr(error, "strerror", None) or error
        self._untold.append(f"{self.CONTENTS} cannot be kept ({reason})")
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + _SILENT_S
            _log.warning("%s cannot be kept in %s: %s", self.CONTENTS, self.folder, error)
        return StoreUnavailable(self.CONTENTS)

    async def close(self) -> None:
        """Finish pending writes and unlock the folder."""
        with contextlib.suppress(RuntimeError):
            await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)
        if self._lock is not None:
            os.close(self._lock)


def _claim(folder: Path, companions: Iterable[str]) -> int:
    """Make a private folder with companions and lock it. Returns the descriptor of the lock, which
    ends with the process.
    """
    for path in (folder, *(folder / name for name in companions)):
        reason = make_private(path)
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


def _is_damage(error: Exception, *, opening: bool = False) -> bool:
    """Whether the data is damaged, not the disk full or so. opening: while a database opens."""
    if not isinstance(error, sqlite3.DatabaseError):
        return isinstance(error, ValueError)
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # the text is not UTF-8
        return isinstance(error, sqlite3.OperationalError)
    kinds = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
    # The tables do not fit the file's version: they exist already, or are missing.
    return code & _PRIMARY in kinds or (opening and code == sqlite3.SQLITE_ERROR)
