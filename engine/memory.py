"""How many KV pages fit: measured on the machine, not guessed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jitney.engine.errors import ConfigError

GIB = 1 << 30
#: On a CPU the pool shares the machine with everything else: a quarter of what is free, and no more than this.
CPU_SHARE, CPU_MOST = 0.25, GIB
#: On a device, left free for fragments and for the runtime's own growth.
DEVICE_RESERVE = 0.04


def free_bytes(device: Any, temp_bytes: int) -> int:
    """Bytes the KV pool may take on a jax device whose weights are loaded and whose steps need temp_bytes."""
    if device.platform == "cpu":
        return min(int(CPU_SHARE * available_host_bytes()), CPU_MOST)
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigError(f"{device.device_kind} does not say how much memory it has: set pages or memory_gib")
    reserve = int(DEVICE_RESERVE * stats["bytes_limit"])
    return stats["bytes_limit"] - stats["bytes_in_use"] - temp_bytes - reserve


def available_host_bytes() -> int:
    """MemAvailable of /proc/meminfo; 4 GiB where there is none (not Linux)."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 4 * GIB
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 4 * GIB


def page_count(*, wanted: int, limit_bytes: int, page_bytes: int, useful: int) -> int:
    """Pages of the pool, the trash page included.

    wanted: an explicit number (0: none given). useful: pages beyond which every seat could hold a whole context; more
    would only serve the prefix cache, so a CPU pool stops there. Raises ConfigError when not even two pages fit.
    """
    if wanted:
        return wanted
    fit = min(limit_bytes // page_bytes, useful)
    if fit < 2:
        raise ConfigError(f"no memory left for KV pages ({max(limit_bytes, 0) / GIB:.2f} GiB free): use a smaller "
                          "model, fewer seats or more memory")
    return int(fit)
