"""Computes how many KV pages fit in the measured free memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.machine import available_host_bytes
from jitney.engine.config import EngineSection
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.page_tables import least_window_pages, pages_per_window
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig

if TYPE_CHECKING:
    from jitney.engine.core.distributed.link import Hosts
    from jitney.engine.core.executor.program import StateSizes

GIB = 1 << 30
#: Share of a GPU's memory that jax may take (its default is 0.75). The rest is for the driver, for
#: CUDA graphs and for communication. The planner uses the same share.
_GPU_SHARE = 0.92
#: Environment variables from which jax reads that share; the second name is the old one.
_SHARE_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
#: On a CPU, which runs other programs too, the pool gets this share of the free memory, and at most
#: this number of bytes.
_CPU_SHARE, _CPU_MOST = 0.25, GIB
#: The largest share of the KV memory for cached prefixes in a group of layers with a window.
_SPARE_SHARE = 0.125
#: Fewest tokens between the checkpoints of a long prompt's recurrent state, and the largest share
#: of the memory beside the slots of seats that checkpoints take.
_CHECKPOINT_TOKENS, _CHECKPOINT_SHARE = 2048, 0.25
#: Share of a device's memory left free for fragmentation and for growth of the runtime.
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
    layers = map(model.of_layer, range(model.n_layers))
    dense = max((own.intermediate_size for own in layers if own.experts is None), default=0)
    layer = rows * (10 * dense + 4 * model.hidden_size)
    if model.experts is not None:
        rows *= model.experts.engines
        places = model.experts.block_rows(rows) * model.experts.most_blocks(rows)
        mixture = places * (6 * model.hidden_size + 2 * model.intermediate_size)
        mixture += rows * (12 * model.hidden_size + 16 * model.experts.n_experts)
        layer = max(layer, mixture)
    layer += rows * 6 * model.n_layers * model.layer_input_size
    logits = 4 * buckets.seats * model.vocab_size * 4
    return max(layer, logits) * 5 // 4


def claim_memory(environ: MutableMapping[str, str], share: float = 0.0) -> None:
    """Set the share of a GPU's memory that jax takes; call it before jax looks for devices. share:
    of the settings; 0: the default.
    """
    if share:
        for name in _SHARE_NAMES:
            environ.pop(name, None)
        environ[_SHARE_NAMES[0]] = str(share)
    elif not any(environ.get(name) for name in _SHARE_NAMES):
        environ[_SHARE_NAMES[0]] = str(_GPU_SHARE)


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Turn the runtime's out-of-memory error into a ConfigError that says what to do."""
    try:
        yield
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            f"the device's memory is full, {what}: another process may hold some of it (set "
            "memory_gib to less), or the model is too large (weights int8 or int4, tensor_parallel)"
        ) from error


class PoolSizes(NamedTuple):
    """Sizes of the pools for KV pages and recurrent state."""

    #: Pages of each cache group, the trash page included; one number if all layers share a pool.
    pages: tuple[int, ...]
    #: Slots for recurrent layers' state beside one for each seat.
    checkpoints: int = 0


def state_slots(seats: int, drafts: int, checkpoints: int) -> int:
    """Number of slots for recurrent layers' state: one for each seat and for each of its drafts in
    a step, and those for checkpoints.
    """
    return seats * (1 + drafts) + checkpoints


@dataclass(frozen=True)
class PoolShares:
    """Divides the memory for KV pages and recurrent state between a model's cache groups and its
    recurrent layers.

    The groups after the first get the pages that they need with all seats taken, and with a prefix
    cache as much again for windows of cached prefixes, up to an eighth of the memory. The first
    group gets the rest. If a group would have as many pages as the first one, windows save nothing,
    and all layers share one page table.

    Recurrent layers have a slot for each seat and for each of its drafts. With a prefix cache there
    are further slots for checkpoints: as many as the tokens of all pages need
    (`checkpoint_tokens`), and two for each seat, up to a quarter of the memory then left.
    """

    #: For each group, positions that its layers see (0: all), and bytes of a page in all of them.
    windows: tuple[int, ...]
    page_bytes: tuple[float, ...]
    page_size: int
    seats: int
    token_budget: int
    context_length: int
    prefix_cache: bool = False
    #: Bytes of a slot of recurrent layers' state; 0: no recurrent layers.
    slot_bytes: float = 0
    #: The most drafts of a sequence in a step; each one's state has a slot of its own.
    drafts: int = 0

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        page_bytes: tuple[float, ...],
        settings: EngineSection,
        context_length: int,
    ) -> PoolShares:
        """The shares for an engine with these settings."""
        return cls(
            windows=tuple(group.window for group in model.cache_groups),
            page_bytes=page_bytes,
            page_size=settings.page_size,
            seats=settings.max_seats,
            token_budget=settings.token_budget,
            context_length=context_length,
            prefix_cache=settings.prefix_cache,
            slot_bytes=model.slot_bytes,
            drafts=settings.most_drafts,
        )

    @property
    def whole_page_bytes(self) -> float:
        """Bytes of a page in all layers."""
        return sum(self.page_bytes)

    def bytes_of(self, pools: PoolSizes) -> float:
        """Bytes of pools of these sizes; a single number counts pages in all layers."""
        if len(pools.pages) == 1:
            return pools.pages[0] * self.whole_page_bytes
        return math.sumprod(pools.pages, self.page_bytes)

    def state_bytes(self, checkpoints: int = 0) -> float:
        """Bytes of recurrent layers' slots for all seats and `checkpoints` checkpoints."""
        return state_slots(self.seats, self.drafts, checkpoints) * self.slot_bytes

    @property
    def checkpoint_tokens(self) -> int:
        """Tokens between the checkpoints of a long prompt: at least as many as have keys and values
        of the size of a checkpoint.
        """
        equal = int(self.slot_bytes / self.whole_page_bytes * self.page_size)
        return -(-max(_CHECKPOINT_TOKENS, equal) // self.page_size) * self.page_size

    def fit(self, limit_bytes: float, useful: int = sys.maxsize) -> PoolSizes:
        """The pools that fit in `limit_bytes`. useful: number of pages with which every seat can
        hold a whole context.
        """
        limit_bytes -= self.state_bytes()
        pages = int(min(limit_bytes // self.whole_page_bytes, useful))
        checkpoints = self._checkpoints(pages, _CHECKPOINT_SHARE * limit_bytes)
        limit_bytes -= checkpoints * self.slot_bytes
        for spare_share in self._spare_shares:
            others = self._others(spare_share * limit_bytes)
            left = limit_bytes - math.sumprod(others, self.page_bytes[1:])
            first = min(int(left // self.page_bytes[0]), useful)
            if max(others, default=first) < first:
                return PoolSizes((first, *others), checkpoints)
        return PoolSizes((min(int(limit_bytes // self.whole_page_bytes), useful),), checkpoints)

    def counted(self, pages: int) -> PoolSizes:
        """The pools whose first group has `pages` pages."""
        others_share = _CHECKPOINT_SHARE / (1 - _CHECKPOINT_SHARE)
        checkpoints = self._checkpoints(pages, others_share * pages * self.whole_page_bytes)
        for spare_share in self._spare_shares:
            others = self._others(spare_share * pages * self.page_bytes[0])
            if max(others, default=pages) < pages:
                return PoolSizes((pages, *others), checkpoints)
        return PoolSizes((pages,), checkpoints)

    def _checkpoints(self, pages: int, most_bytes: float) -> int:
        """Number of slots for checkpoints beside `pages` pages, within `most_bytes` bytes."""
        if not self.slot_bytes or not self.prefix_cache:
            return 0
        useful = 2 * self.seats + pages * self.page_size // self.checkpoint_tokens
        return max(0, min(useful, int(most_bytes // self.slot_bytes)))

    @property
    def _spare_shares(self) -> tuple[float, ...]:
        """Shares of the memory for windows of cached prefixes, in the order of trying."""
        return (_SPARE_SHARE, 0.0) if self.prefix_cache else (0.0,)

    def _others(self, spare_bytes: float) -> tuple[int, ...]:
        """Pages of each group but the first. spare_bytes: the most for cached prefixes in each."""
        pages = []
        for window, page_bytes in zip(self.windows[1:], self.page_bytes[1:], strict=True):
            least = least_window_pages(
                window,
                page_size=self.page_size,
                seats=self.seats,
                token_budget=self.token_budget,
                context_length=self.context_length,
            )
            spare = self.seats * pages_per_window(window, self.page_size)
            pages.append(least + min(spare, int(spare_bytes // page_bytes)))
        return tuple(pages)


@dataclass(frozen=True)
class PoolRoom:
    """Computes the pools that fit on the devices of all hosts."""

    settings: EngineSection
    sizes: StateSizes
    #: jax's devices of this host.
    devices: Sequence[Any]
    #: Division of the memory on one device.
    shares: PoolShares
    #: The other hosts, whose pools have the same size; None if there are none.
    hosts: Hosts | None

    @property
    def on_cpu(self) -> bool:
        return self.devices[0].platform == "cpu"

    def pools(self, temp_bytes: int) -> PoolSizes:
        """The pools (`PoolShares.fit`), equal on each device of each host. On a
        CPU temporaries are not subtracted: the pool's limit is only a share of the free memory.
        Raises ConfigError when not even two fit.
        """
        if self.settings.pages:
            return self.shares.counted(self._agreed("pages", self.settings.pages))
        useful = sys.maxsize
        if self.on_cpu:
            temp_bytes = 0
            useful = self.sizes.seats * self.sizes.pages_per_seat + 1
        limit = self._agreed("bytes for KV pages", self._limit(temp_bytes))
        fit = self.shares.fit(limit, useful)
        if fit.pages[0] < 2:
            left = max(0, limit - self.shares.state_bytes()) / GIB
            raise ConfigError(
                f"no memory left for KV pages ({left:.2g} GiB, and a page takes "
                f"{self.shares.whole_page_bytes / GIB:.2g}): use a smaller model, fewer seats or "
                "more memory"
            )
        return fit

    def _agreed(self, what: str, own: int) -> int:
        """The smallest of all hosts' numbers."""
        return own if self.hosts is None else self.hosts.least(what, own)

    def _limit(self, temp_bytes: int) -> int:
        """Bytes that the pools may take on each device."""
        if self.settings.memory_gib:
            return int(self.settings.memory_gib * GIB)
        share = self.settings.memory_share
        return min([_free_bytes(device, temp_bytes, share) for device in self.devices])


def _free_bytes(device: Any, temp_bytes: int, share: float = 0.0) -> int:
    """Bytes for the KV pool on a device that holds the weights, with temp_bytes for steps. share:
    share of the memory in the settings; 0: none.
    """
    if device.platform == "cpu":
        return _pool_bytes(share)
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigError(
            f"{device.device_kind} does not say how much memory it has: set pages or memory_gib"
        )
    limit = stats["bytes_limit"]
    if share and device.platform == "tpu":  # on a GPU jax's limit includes it, see `claim_memory`
        limit = int(share * limit)
    reserve = int(_DEVICE_RESERVE * limit)
    return limit - stats["bytes_in_use"] - temp_bytes - reserve


def _pool_bytes(share: float) -> int:
    free = available_host_bytes()
    if share:
        return int(share * free)
    return min(int(_CPU_SHARE * free), _CPU_MOST)
