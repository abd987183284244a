"""The folder in which the sockets to a core lie: of this user alone, and never left behind for
good.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "jitney-core-"
#: What is in one: the two sockets.
_SOCKETS = ("to", "from")
#: A sweep by another server may take a folder in the moment between its making and its lock.
_TRIES = 3


@contextlib.contextmanager
def private_folder() -> Iterator[str]:
    """A new folder in the temporary directory, locked while it is in use and then removed.

    The lock ends with this process, however it dies, and says to `remove_left_folders` that nobody
    uses the folder any more. Services that clean the temporary directory by age respect it too.
    Raises OSError if there is no room, no descriptor, or no temporary directory.
    """
    folder, lock = _locked_folder()
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def remove_left_folders() -> None:
    """Remove the folders of servers that were killed: ours, locked by nobody, and with nothing but
    sockets in them.
    """
    for path in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            _remove_if_left(str(path))


def _locked_folder() -> tuple[str, int]:
    """A new folder and the descriptor that locks it."""
    for _ in range(_TRIES):
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        except OSError:
            _remove(folder)
            raise
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.isdir(folder):
            return folder, lock
        os.close(lock)
    raise OSError(f"folders in {tempfile.gettempdir()} vanish as soon as they are made")


def _remove_if_left(folder: str) -> None:
    """Remove one folder, if it is ours and nobody uses it. Raises OSError if somebody does."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        ours = os.fstat(lock).st_uid == os.geteuid()
        if ours and set(os.listdir(lock)) <= set(_SOCKETS):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
    finally:
        os.close(lock)


def _remove(folder: str) -> None:
    """Remove a folder and the sockets in it; what does not go stays."""
    for name in _SOCKETS:
        with contextlib.suppress(OSError):
            Path(folder, name).unlink()
    with contextlib.suppress(OSError):
        os.rmdir(folder)
