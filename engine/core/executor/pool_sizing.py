"""Makes the step programs with the configured KV pools, or with those that fit the free memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jitney.engine.config import EngineSection
from jitney.engine.core.executor.memory import GIB, PoolRoom, PoolShares, PoolSizes
from jitney.engine.core.executor.program import StateSizes
from jitney.engine.core.executor.step_programs import StepPrograms

if TYPE_CHECKING:
    from jitney.engine.core.distributed.link import Hosts

_log = logging.getLogger("jitney.core")

#: A pool of at least this share of what fits is accepted, without compiling the largest step again.
_ENOUGH = 0.97


def sized_programs(
    settings: EngineSection,
    sizes: StateSizes,
    devices: Sequence[Any],
    *,
    shares: PoolShares,
    temp_bytes: int,
    make: Callable[[PoolSizes], StepPrograms],
    hosts: Hosts | None = None,
) -> StepPrograms:
    """Programs for as many KV pages as configured, or as fit in the free memory; logs the number.

    devices: of this host. shares: division of the memory on one device. temp_bytes: expected bytes
    of temporaries of the largest step. make: makes the programs for pools of some sizes. hosts: the
    other hosts, whose pools have the same size.
    """
    room = PoolRoom(settings, sizes, devices, shares, hosts)
    programs = make(pools := room.pools(temp_bytes))
    if not (room.on_cpu or settings.pages or settings.memory_gib):
        # A step's temporaries are known only after compiling it for a pool of the likely size.
        fit = room.pools(programs.largest_temp_bytes())
        if not _ENOUGH * fit.pages[0] <= pools.pages[0] <= fit.pages[0]:
            programs = make(pools := fit)
    _log_pool(pools, sizes, shares, len(devices))
    if shares.slot_bytes:
        _log_state(pools, shares)
    return programs


def _log_state(pools: PoolSizes, shares: PoolShares) -> None:
    _log.info(
        "recurrent layers keep %.2f GiB on each device, %.3g MiB for each of %d seats, %d drafts "
        "of each, and %d checkpoints; long prompts have one every %d tokens",
        shares.state_bytes(pools.checkpoints) / GIB,
        shares.slot_bytes / (1 << 20),
        shares.seats,
        shares.drafts,
        pools.checkpoints,
        shares.checkpoint_tokens,
    )
    if shares.prefix_cache and not pools.checkpoints:
        _log.warning(
            "there is no prefix cache: no checkpoint of %.3g MiB fits beside the seats; give more "
            "memory or pages, or fewer seats (max_seats)",
            shares.slot_bytes / (1 << 20),
        )


def _log_pool(pools: PoolSizes, sizes: StateSizes, shares: PoolShares, n_devices: int) -> None:
    group_pages = pools.pages
    n_pages = group_pages[0]
    tokens = (n_pages - 1) * sizes.page_size
    devices = ""
    if n_devices > 1:
        devices = f" on each of {n_devices} devices"
    _log.info(
        "KV pool: %d pages of %d tokens = %d tokens in %.2f GiB%s; %.3g times the whole context "
        "(%d), or %d tokens for each of %d seats",
        n_pages - 1,
        sizes.page_size,
        tokens,
        shares.bytes_of(pools) / GIB,
        devices,
        tokens / sizes.context_length,
        sizes.context_length,
        tokens // sizes.seats,
        sizes.seats,
    )
    for window, own, page_bytes in zip(
        shares.windows[1:], group_pages[1:], shares.page_bytes[1:], strict=False
    ):
        _log.info(
            "of these, layers with a window of %d tokens have %d pages in %.2f GiB",
            window,
            own - 1,
            own * page_bytes / GIB,
        )
    if len(group_pages) < len(shares.windows):
        _log.info(
            "layers with a window keep pages of all positions: windows of %d seats would take as "
            "many; give more memory, or fewer seats (max_seats)",
            sizes.seats,
        )
    if tokens < sizes.context_length:
        _log.warning(
            "no sequence can have the whole context of %d tokens: the KV pool holds %d; give more "
            "(pages, memory_gib), or a smaller context",
            sizes.context_length,
            tokens,
        )
