"""The cache folder: why nothing can be stored there, files of what was measured here, and the
folder of compiled programs, which are machine code that is loaded and run, so that it is used only
where nobody else can have put anything into it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from jitney.engine.config.schema import EngineSection, cache_dir, compilation_cache_dir

_log = logging.getLogger("jitney")

_PRIVATE = 0o700
#: Bytes that a file of what was measured has at most.
_FILE_BYTES = 1 << 14
_REMEDY = "name another folder in JITNEY_CACHE"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def open_compilation_cache(engine: EngineSection) -> Path | None:
    """The folder to keep compiled programs in, made if there is none. None if the settings want
    none, or others could write to it, of which one line in the log tells.
    """
    if not engine.compilation_cache:
        return None
    folder = compilation_cache_dir()
    reason = make_private(folder)
    if reason:
        _log.warning(
            "COMPILED PROGRAMS ARE NOT KEPT, and every start compiles anew: %s; name another "
            "folder in JITNEY_CACHE, or turn compilation_cache off",
            reason,
        )
        return None
    return folder


def kept_file(room: str, facts: Mapping[str, object]) -> Path:
    """The file of a folder in the cache folder that holds what was measured under these facts;
    under others it is another file.
    """
    text = json.dumps(facts, sort_keys=True)
    return cache_dir() / room / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def keep(contents: msgspec.Struct, path: Path) -> str:
    """Write such a file anew. Returns why that cannot be, or an empty text."""
    reason = make_private(path.parent)
    if reason:
        return reason
    # Another process that starts beside us reads the old file or the new one.
    new = path.with_suffix(".new")
    try:
        new.write_bytes(msgspec.json.encode(contents) + b"\n")
        new.replace(path)
    except OSError as error:
        return why_not_stored(error, path.parent, _FILE_BYTES)
    return ""


def make_private(folder: Path) -> str:
    """Make `folder`, for us alone, unless it is there. Returns why it must not be trusted, or an
    empty text.
    """
    # Without "..", which means another folder once a link is followed.
    folder = Path(os.path.abspath(folder))
    try:
        # Looked at before anything is made: not even a folder of ours belongs in somebody else's.
        reason = _why_others_write(_nearest(folder), folder)
        if not reason:
            make_folders(folder)
            reason = _why_unsafe(folder)
    except OSError as error:
        return f"{folder} cannot be used: {error.strerror}"
    return reason


def _why_unsafe(folder: Path) -> str:
    """Why somebody else may have written into an existing folder, or an empty text.

    It and all folders above it must belong to us or to root and be writable by nobody else. A
    folder like /tmp, where all may write and each may remove only its own, is safe only above a
    folder that is ours and closed to all others. Raises OSError.
    """
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        return f"{folder} is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is not a folder"
    return _why_others_write(folder, folder)


def _why_others_write(folder: Path, used: Path) -> str:
    """Of an existing folder and those above it, by its name and by where links lead. used: the one
    that programs are to be kept in.
    """
    real = folder.resolve()
    for place in dict.fromkeys((*folder.parents, folder, *real.parents, real)):
        reason = _why_others_write_here(place, used)
        if reason:
            return reason
    return ""


def _why_others_write_here(place: Path, used: Path) -> str:
    """Of one folder, or a link to one, whatever stands above it."""
    status = place.lstat()
    if status.st_uid not in (os.geteuid(), 0):
        return f"{place} belongs to another user (number {status.st_uid})"
    if stat.S_ISLNK(status.st_mode) or not status.st_mode & _WRITABLE_BY_OTHERS:
        return ""
    if place != used and status.st_mode & stat.S_ISVTX and _is_closed(used):
        return ""
    return f"{place} can be written to by other users (chmod go-w, or 700 below a shared folder)"


def _is_closed(folder: Path) -> bool:
    """Ours, and closed to all others; a folder that is yet to be made will be."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return True
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    while not os.path.lexists(folder):
        folder = folder.parent
    return folder


def why_no_room(folder: Path, needed: int, remedy: str = _REMEDY) -> str:
    """Why so many bytes cannot be written into a folder, or the one that it will be made in: path,
    sizes and what to do; an empty text where they can.
    """
    folder = Path(os.path.abspath(folder))
    nearest = _nearest(folder)
    try:
        free = shutil.disk_usage(nearest).free
    except OSError as error:
        return _not_writable(folder, error.strerror, remedy)
    if not os.access(nearest, os.W_OK) or not nearest.is_dir():
        return _not_writable(folder, "no folder that we may write to", remedy)
    if free >= needed:
        return ""
    sizes = f"has {_size(free)} free, and {_size(needed)} are needed"
    return f"{folder} {sizes}: free some, or {remedy}"


def why_not_stored(error: OSError, folder: Path, needed: int) -> str:
    """The same once it was tried."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    reason = why_no_room(folder, needed) if is_full else ""
    return reason or _not_writable(folder, error.strerror, _REMEDY)


def _not_writable(folder: Path, reason: str | None, remedy: str) -> str:
    return f"{folder} cannot be written to ({reason or 'no reason was given'}): {remedy}"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB"


def make_folders(folder: Path) -> None:
    """Like `mkdir -p`, with each new folder for us alone. Raises OSError."""
    for place in reversed((folder, *folder.parents)):
        if not os.path.lexists(place):
            place.mkdir(_PRIVATE, exist_ok=True)
