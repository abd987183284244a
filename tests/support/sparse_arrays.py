"""Arrays as large as on a device, of which only the touched memory pages use memory."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np

#: Least number of elements for which a 32-bit index overflows.
TOO_MANY = 1 << 31
#: Linux's flag to reserve no memory for the array, for Python versions without the constant.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def sparse(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of zeros that uses memory only for touched pages."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype).reshape(shape)


def large_pool(page: int, n_kv: int, dim: int, dtype: Any) -> np.ndarray:
    """A KV pool [N, page, 2K, D] whose last 64 pages lie beyond 2**31 elements."""
    pages = TOO_MANY // (page * 2 * n_kv * dim) + 64
    return sparse((pages, page, 2 * n_kv, dim), dtype)
