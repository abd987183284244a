"""The folder of files and batches, and the one thread that writes in it.

The folder must be ours alone, like the one of compiled programs, and one server's at a time: two
would answer every line twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Concatenate

from starlette.requests import Request

from jitney.engine.api.batches.store import BatchStore
from jitney.engine.api.context import Context
from jitney.engine.api.errors import HttpError, echo
from jitney.engine.config.cache_folder import make_private
from jitney.engine.errors import ConfigError

_DATABASE = "batches.sqlite3"
#: What an upload is called until all of it is there.
_PART = ".part"


class StoreKeeper:
    """The store, reached from the event loop, and the paths of files. Made by `open`."""

    def __init__(self, folder: Path, lock: int, store: BatchStore, thread: ThreadPoolExecutor):
        self.folder = folder
        self._lock = lock
        self._store = store
        self._thread = thread

    @classmethod
    async def open(cls, folder: Path) -> StoreKeeper:
        """The folder, made if there is none. Raises ConfigError if it is not ours alone, or another
        server's at this time.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(thread, _open, folder, thread)
        except BaseException:
            thread.shutdown(wait=False)
            raise

    @classmethod
    def has_kept(cls, folder: Path) -> bool:
        """Whether a server has kept batches here. Blocks."""
        return (folder / _DATABASE).exists()

    @staticmethod
    def settle(file: BinaryIO) -> None:
        """Close a file, and have what was written survive a power cut. Blocks."""
        file.flush()
        os.fsync(file.fileno())
        file.close()

    async def do[**P, T](
        self, method: Callable[Concatenate[BatchStore, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run one method of the store on its thread. It is run to its end, even if nobody waits for
        it any more.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._thread, lambda: method(self._store, *args, **kwargs)
        )

    async def find_or_404[T](
        self, request: Request, kind: str, find: Callable[[BatchStore, str, str], T | None]
    ) -> T:
        """The file, batch or job that the path of a request names, as `{kind}_id`. Raises HttpError
        404 if it is not there, or not theirs.
        """
        param = f"{kind}_id"
        id = request.path_params[param]
        thing = await self.do(find, id, Context.of(request).tenant)
        if thing is None:
            raise HttpError(404, f"no {kind} {echo(id)}", code="not_found", param=param)
        return thing

    def path(self, file_id: str) -> Path:
        """Where the bytes of a file lie. Only for ids of ours: those that the store knows."""
        return self.folder / "files" / file_id

    def part(self, file_id: str) -> Path:
        """Where they lie until all are there."""
        return self.folder / "files" / (file_id + _PART)

    async def close(self) -> None:
        """Let go of the folder, after what is being written."""
        with contextlib.suppress(RuntimeError):
            await self.do(BatchStore.close)
        self._thread.shutdown(wait=False)
        os.close(self._lock)


def _open(folder: Path, thread: ThreadPoolExecutor) -> StoreKeeper:
    reason = make_private(folder) or make_private(folder / "files")
    if reason:
        raise ConfigError(reason)
    lock = _locked(folder)
    try:
        store = BatchStore(folder / _DATABASE)
    except BaseException:
        os.close(lock)
        raise
    _sweep(folder / "files", store.file_ids())
    return StoreKeeper(folder, lock, store, thread)


def _locked(folder: Path) -> int:
    """A descriptor that holds the folder's lock; the system lets go of it with the process."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(
            f"{folder} is used by another server; give each its own data_dir"
        ) from None
    return lock


def _sweep(files: Path, known: set[str]) -> None:
    """Remove what an earlier process has not finished writing."""
    for path in files.iterdir():
        if path.name not in known:
            path.unlink(missing_ok=True)
