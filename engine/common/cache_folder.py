"""The cache folder: measurement files, compiled programs, and checks that it can be used. Programs
are run, so their folder is used only if no other user can write to it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

_PRIVATE = 0o700
#: Most bytes of a measurement file.
_FILE_BYTES = 1 << 14
_REMEDY = "name another folder in JITNEY_CACHE"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_dir() -> Path:
    """Cache folder of models and programs: $JITNEY_CACHE, or jitney/ in $XDG_CACHE_HOME."""
    named = os.environ.get("JITNEY_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jitney"


def compilation_cache_dir() -> Path:
    """Folder that keeps compiled programs between starts."""
    return cache_dir() / "xla"


def kept_file(room: str, facts: Mapping[str, object]) -> Path:
    """The file in folder `room` of the cache for measurements under these facts."""
    text = json.dumps(facts, sort_keys=True)
    return cache_dir() / room / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def keep(contents: msgspec.Struct, path: Path) -> str:
    """Replace a file of `kept_file`. Returns why it cannot be written, or ""."""
    reason = make_private(path.parent)
    if reason:
        return reason
    # Replaced at once, so that another process reads the old file or the new one.
    new = path.with_suffix(".new")
    try:
        new.write_bytes(msgspec.json.encode(contents) + b"\n")
        new.replace(path)
    except OSError as error:
        return why_not_stored(error, path.parent, _FILE_BYTES)
    return ""


def make_private(folder: Path) -> str:
    """Make `folder` with mode 700 if absent. Returns why it must not be trusted, or ""."""
    # Without "..", which means another folder once a link is followed.
    folder = Path(os.path.abspath(folder))
    try:
        # Checked first, to make no folder inside one that others can write to.
        reason = _why_others_write(_nearest(folder), folder)
        if not reason:
            make_folders(folder)
            reason = _why_unsafe(folder)
    except OSError as error:
        return f"{folder} cannot be used: {error.strerror}"
    return reason


def _why_unsafe(folder: Path) -> str:
    """The reason to fear that another user wrote into an existing folder, or "". Raises OSError.

    The folder and all above it must belong to this user or root, and no one else may write to them.
    A sticky folder such as /tmp is allowed above a folder that only this user can open.
    """
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        return f"{folder} is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is not a folder"
    return _why_others_write(folder, folder)


def _why_others_write(folder: Path, used: Path) -> str:
    """The reason for a folder and those above it, links resolved. used: it will hold programs."""
    real = folder.resolve()
    for each in dict.fromkeys((*folder.parents, folder, *real.parents, real)):
        reason = _why_others_write_here(each, used)
        if reason:
            return reason
    return ""


def _why_others_write_here(folder: Path, used: Path) -> str:
    status = folder.lstat()
    if status.st_uid not in (os.geteuid(), 0):
        return f"{folder} belongs to another user (number {status.st_uid})"
    if stat.S_ISLNK(status.st_mode) or not status.st_mode & _WRITABLE_BY_OTHERS:
        return ""
    if folder != used and status.st_mode & stat.S_ISVTX and _is_closed(used):
        return ""
    return f"{folder} can be written to by other users (chmod go-w, or 700 below a shared folder)"


def _is_closed(folder: Path) -> bool:
    """True if only this user can open the folder, or it does not exist yet."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return True
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    while not os.path.lexists(folder):
        folder = folder.parent
    return folder


def why_no_room(folder: Path, needed: int, remedy: str = _REMEDY) -> str:
    """The error if `needed` bytes do not fit into a folder, absent or not, with the remedy; ""."""
    folder = Path(os.path.abspath(folder))
    nearest = _nearest(folder)
    try:
        free = shutil.disk_usage(nearest).free
    except OSError as error:
        return _not_writable(folder, error.strerror, remedy)
    if not os.access(nearest, os.W_OK) or not nearest.is_dir():
        return _not_writable(folder, "not a writable folder", remedy)
    if free >= needed:
        return ""
    return (
        f"{folder} has {_size(free)} free, and {_size(needed)} are needed: free some, or {remedy}"
    )


def why_not_stored(error: OSError, folder: Path, needed: int) -> str:
    """The message of a failed write, with the remedy."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    reason = why_no_room(folder, needed) if is_full else ""
    return reason or _not_writable(folder, error.strerror, _REMEDY)


def _not_writable(folder: Path, reason: str | None, remedy: str) -> str:
    return f"{folder} cannot be written to ({reason or 'no reason was given'}): {remedy}"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB"


def make_folders(folder: Path) -> None:
    """Like `mkdir -p`, with mode 700 for each new folder. Raises OSError."""
    for each in reversed((folder, *folder.parents)):
        if not os.path.lexists(each):
            each.mkdir(_PRIVATE, exist_ok=True)
