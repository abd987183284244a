"""Arrays as large as a device's, of which only the pages that are touched take memory."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np

#: Elements from which a 32-bit index fails.
TOO_MANY = 1 << 31
#: Linux's number, for Pythons that do not name it: nothing is set aside for the array.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def sparse(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype).reshape(shape)


def large_pool(page: int, n_kv: int, dim: int, dtype: Any) -> np.ndarray:
    """A KV pool [N, page, 2K, D] whose last 64 pages lie beyond 2**31 elements."""
    pages = TOO_MANY // (page * 2 * n_kv * dim) + 64
    return sparse((pages, page, 2 * n_kv, dim), dtype)
