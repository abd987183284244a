"""How many KV pages fit: measured on the machine, not guessed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitney.engine.common.errors import ConfigError
from jitney.engine.config import EngineSection
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig

if TYPE_CHECKING:
    from jitney.engine.core.distributed.link import Hosts
    from jitney.engine.core.executor.program import StateSizes

GIB = 1 << 30
#: Share of a GPU's memory that jax may take, 0.75 if nobody says so: what is left is for the
#: driver, for CUDA graphs and for communication. The planner counts on the same share.
_GPU_SHARE = 0.92
#: Where jax reads that share from; the second name is its old one.
_SHARE_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
#: On a CPU the pool shares the machine with everything else: a quarter of what is free, and no more
#: than this.
_CPU_SHARE, _CPU_MOST = 0.25, GIB
#: What is taken to be free where the system does not say (not Linux).
_UNKNOWN = 4 * GIB
#: On a device, left free for fragments and for the runtime's own growth.
_DEVICE_RESERVE = 0.04


def likely_temp_bytes(model: ModelConfig, buckets: Buckets) -> int:
    """Expected temporaries of the largest step on each GPU or TPU, with a quarter added. model: one
    device's.

    As compiled at Llama-3.1-8B's shapes: a layer's activations at the widest point of its
    feed-forward (H100: 78 MiB of 512 rows, 1248 of 8192), or three to four times the logits (H100:
    94 MiB of 64 rows, 377 of 256; v6e: 130 of 64). Of a mixture: rows and products of all blocks
    (Qwen3-30B-A3B, 512 rows: H100 117 MiB, v7x over 8 devices 183).
    """
    rows = buckets.token_budget
    if model.experts is None:
        layer = rows * (10 * model.intermediate_size + 4 * model.hidden_size)
    else:
        rows *= model.experts.engines
        places = model.experts.block_rows(rows) * model.experts.most_blocks(rows)
        layer = places * (6 * model.hidden_size + 2 * model.intermediate_size)
        layer += rows * (12 * model.hidden_size + 16 * model.experts.n_experts)
    logits = 4 * buckets.seats * model.vocab_size * 4
    return max(layer, logits) * 5 // 4


def claim_memory(environ: MutableMapping[str, str], share: float = 0.0) -> None:
    """Have jax take its share of a GPU, before it looks for devices. share: the settings', or 0."""
    if share:
        for name in _SHARE_NAMES:
            environ.pop(name, None)
        environ[_SHARE_NAMES[0]] = str(share)
    elif not any(environ.get(name) for name in _SHARE_NAMES):
        environ[_SHARE_NAMES[0]] = str(_GPU_SHARE)


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Turns the runtime's account of a full memory into a ConfigError that says what to do."""
    try:
        yield
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            f"the device's memory is full, {what}: another process may hold some of it (set "
            "memory_gib to less), or the model is too large (weights int8 or int4, tensor_parallel)"
        ) from error


@dataclass(frozen=True)
class PoolRoom:
    """How many KV pages there is room for."""

    settings: EngineSection
    sizes: StateSizes
    #: jax's, of this host.
    devices: Sequence[Any]
    #: Of a page of all layers, on one device; and of what recurrent layers keep of all seats.
    page_bytes: int
    seat_bytes: int
    #: The others, whose pools are as large; None if there are none.
    hosts: Hosts | None

    @property
    def on_cpu(self) -> bool:
        return self.devices[0].platform == "cpu"

    def pages(self, temp_bytes: int) -> int:
        """As many on each device of each host; a CPU's temporaries lie beside its pool's limit."""
        useful = sys.maxsize
        if self.on_cpu:
            temp_bytes = 0
            useful = self.sizes.seats * self.sizes.pages_per_seat + 1
        own = _page_count(
            wanted=self.settings.pages,
            limit_bytes=self._limit(temp_bytes),
            page_bytes=self.page_bytes,
            useful=useful,
        )
        if self.hosts is None:
            return own
        return self.hosts.least("pages", own)

    def _limit(self, temp_bytes: int) -> int:
        """Bytes that the pool may take on each device, beside what recurrent layers keep; 0 where
        its pages are counted.
        """
        if self.settings.pages:
            return 0
        if self.settings.memory_gib:
            return int(self.settings.memory_gib * GIB) - self.seat_bytes
        share = self.settings.memory_share
        free = min([_free_bytes(device, temp_bytes, share) for device in self.devices])
        return free - self.seat_bytes


def _free_bytes(device: Any, temp_bytes: int, share: float = 0.0) -> int:
    """Bytes for the KV pool on a device with weights and steps that need temp_bytes. share: of the
    memory by the settings; 0: none.
    """
    if device.platform == "cpu":
        return _pool_bytes(share)
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigError(
            f"{device.device_kind} does not say how much memory it has: set pages or memory_gib"
        )
    limit = stats["bytes_limit"]
    if share and device.platform == "tpu":  # of a GPU it is jax's own limit, see `claim_memory`
        limit = int(share * limit)
    reserve = int(_DEVICE_RESERVE * limit)
    return limit - stats["bytes_in_use"] - temp_bytes - reserve


def _pool_bytes(share: float) -> int:
    free = available_host_bytes()
    if share:
        return int(share * free)
    return min(int(_CPU_SHARE * free), _CPU_MOST)


def available_host_bytes() -> int:
    """Memory of this machine that is free: MemAvailable of /proc/meminfo."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return _UNKNOWN
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    if found is None:
        return _UNKNOWN
    return int(found[1]) * 1024


def _page_count(*, wanted: int, limit_bytes: int, page_bytes: int, useful: int) -> int:
    """Pages of the pool, the trash page included; ConfigError when not even two fit.

    wanted: an explicit number, or 0. useful: pages with which every seat holds a whole context.
    """
    if wanted:
        return wanted
    fit = min(limit_bytes // page_bytes, useful)
    if fit < 2:
        raise ConfigError(
            f"no memory left for KV pages ({max(limit_bytes, 0) / GIB:.2g} GiB, and a page takes "
            f"{page_bytes / GIB:.2g}): use a smaller model, fewer seats or more memory"
        )
    return int(fit)
