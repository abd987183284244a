"""`jitney serve` on an engine's hosts other than the first: only the core process, no HTTP."""

from __future__ import annotations

import asyncio
import logging
import signal

from jitney.engine.common.display import Display, make_display
from jitney.engine.common.tasks import until
from jitney.engine.common.terminal import visible
from jitney.engine.config import Config
from jitney.engine.server import Equipment

_log = logging.getLogger("jitney")


def follow(config: Config) -> int:
    """Follow the first host until a signal or its end; exit status 0.

    Raises JitneyError if this host cannot start or loses the first one.
    """
    display = make_display(config.server.log_level)
    return asyncio.run(_follow(config, display))


async def _follow(config: Config, display: Display) -> int:
    """See `follow`."""
    equipment = Equipment(config, display)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await until(stop.wait(), _until_dismissed(equipment))
        return 0
    finally:
        display.close()
        await equipment.client.close()


async def _until_dismissed(equipment: Equipment) -> None:
    """Return when the first host ends cleanly; raise if it is lost."""
    client, engine = equipment.client, equipment.config.engine
    await equipment.find_model()
    await client.start()
    info = await client.wait_ready()
    equipment.display.close()
    line = (
        f"Host {engine.host_id} of {engine.n_hosts} follows {engine.coordinator}: "
        f"{info.model.name}, {info.kernels.label} kernels on {info.device.name}"
    )
    print(visible(line), flush=True)
    await client.until("dead")
    if client.dismissed:
        _log.info("%s", client.failure)
        return
    await client.wait_ready()  # raises the reason
