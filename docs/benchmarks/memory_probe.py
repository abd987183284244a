"""Records the memory of a running process by cause, from inside it: `soak.py --serve` starts this
probe in the server's process and in its core.

A thread forks every LOOK_S, and the fork counts and writes the process's memory, so that counting
does not change the figures. Each look is a file `NAME-NUMBER.json` in the folder MEMORY_LOOKS.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
import traceback
import tracemalloc
from collections import Counter, OrderedDict, deque
from functools import _lru_cache_wrapper
from pathlib import Path
from typing import Any

#: Seconds between two looks; allocations are traced from the look TRACED_FROM on.
LOOK_S, TRACED_FROM = 300.0, 2
#: Most types and most allocating lines stored for a look, the largest first.
_MOST = 400
#: Containers with fewer entries are left out, and arrays of fewer bytes.
_FEW, _LARGE = 100, 1 << 20
_NAMES = {"serve": "server", "jitney.engine.core.process": "core"}
#: The fields of glibc's `struct mallinfo2`.
_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, bytes and counts."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


def resident_bytes() -> dict[str, int]:
    """This process's resident memory, by kind: RssAnon, RssFile, RssShmem, VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    names = ("VmRSS", "RssAnon", "RssFile", "RssShmem")
    return {name: 1024 * int(fields[name].split()[0]) for name in names}


def _containers(objects: list[Any]) -> dict[str, tuple[int, int]]:
    """(entries, most entries or 0 without a bound of its own) of functions with a cache, deques,
    ordered dicts and LRU caches.
    """
    sizes: dict[str, tuple[int, int]] = {}
    for one in objects:
        # Not isinstance: weak proxies of deleted objects raise.
        if type(one) is _lru_cache_wrapper:
            info = one.cache_info()
            size, most = info.currsize, info.maxsize or 0
            owner = getattr(one, "__qualname__", "")
        elif type(one) in (deque, OrderedDict):
            size, most = len(one), getattr(one, "maxlen", 0) or 0
            owners = {type(other).__qualname__ for other in gc.get_referrers(one)}
            owner = ", ".join(sorted(owners - {"list", "frame"}))
        elif type(one).__qualname__ == "LruCache":
            size, most, owner = one._size, one._most, ""
        else:
            continue
        if size >= _FEW:
            sizes[f"{type(one).__qualname__} {owner} {len(sizes)}"] = (size, most)
    return sizes


def _resident(array: Any) -> int:
    """Bytes of an array's pages in memory: of an array of zeros only those already written to."""
    page = os.sysconf("SC_PAGE_SIZE")
    start = array.ctypes.data // page * page
    pages = -(-(array.ctypes.data + array.nbytes - start) // page)
    in_memory = (ctypes.c_ubyte * pages)()
    ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * page), in_memory)
    return page * sum(one & 1 for one in in_memory)


def _arrays(objects: list[Any]) -> dict[str, tuple[int, int]]:
    """(bytes in memory, all bytes) of numpy's large arrays, which the garbage collector does not
    track itself.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return {}
    owners: dict[int, tuple[str, Any]] = {}
    for one in objects:
        for other in gc.get_referents(one):
            if type(other) is numpy.ndarray and other.base is None and other.nbytes >= _LARGE:
                owners.setdefault(id(other), (type(one).__qualname__, other))
    return {
        f"array of {owner} {number}": (_resident(array), array.nbytes)
        for number, (owner, array) in enumerate(owners.values())
    }


def _write_look(file: Path, look: dict[str, Any]) -> None:
    """In a fork: add the figures that take long to count, and write the look."""
    libc = ctypes.CDLL(None)
    # Close the parent's sockets, which would stay open as long as this process has them.
    os.closerange(3, 4096)
    before = resident_bytes()["RssAnon"]
    libc.malloc_trim(0)
    look["trimmed"] = before - resident_bytes()["RssAnon"]
    if tracemalloc.is_tracing():
        traces = tracemalloc.take_snapshot().statistics("lineno")[:_MOST]
        look["lines"] = {str(one.traceback): (one.size, one.count) for one in traces}
    gc.unfreeze()  # the parent froze the objects from its start
    objects = gc.get_objects()
    look["containers"] = _containers(objects) | _arrays(objects)
    look["types"] = dict(
        Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in objects).most_common(
            _MOST
        )
    )
    file.with_suffix(".part").write_text(json.dumps(look))
    file.with_suffix(".part").rename(file)


def _look_again_and_again(name: str, folder: Path, began: float) -> None:
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallInfo
    number = 0
    while True:
        time.sleep(max(0.0, began + (number + 1) * LOOK_S - time.monotonic()))
        number += 1
        info = libc.mallinfo2()
        look = {
            "seconds": time.monotonic() - began,
            **resident_bytes(),
            # Bytes in use and free, of the allocator's arenas and of its own mappings.
            "malloc_used": info.uordblks + info.hblkhd,
            "malloc_free": info.fordblks,
            "python_blocks": sys.getallocatedblocks(),
            "traced": tracemalloc.get_traced_memory()[0],
            "tracing": tracemalloc.get_tracemalloc_memory(),
        }
        child = os.fork()
        if child == 0:
            try:
                _write_look(folder / f"{name}-{number:03}.json", look)
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        if number == TRACED_FROM:
            tracemalloc.start(1)


def start() -> None:
    """Start the probe if this process is one of those to watch."""
    folder = os.environ.get("MEMORY_LOOKS")
    names = [name for word, name in _NAMES.items() if word in sys.orig_argv]
    if folder and names:
        threading.Thread(
            target=_look_again_and_again,
            args=(names[0], Path(folder), time.monotonic()),
            daemon=True,
            name="memory-probe",
        ).start()
