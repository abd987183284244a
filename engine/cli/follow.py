"""`jitney serve` on an engine's hosts other than the first: only the core process, no HTTP."""

from __future__ import annotations

import asyncio
import logging
import signal

from jitney.engine.common.display import Display, make_display
from jitney.engine.common.terminal import visible
from jitney.engine.config import Config
from jitney.engine.server import Equipment, ProcessClient

_log = logging.getLogger("jitney")


def follow(config: Config) -> int:
    """Follow the first host until a signal or its end; exit status 0.

    Raises JitneyError if this host cannot start or loses the first one.
    """
    display = make_display(config.server.log_level)
    return asyncio.run(_Followed(config, display).run())


class _Followed:
    def __init__(self, config: Config, display: Display):
        self._config = config
        self._display = display
        self._client = ProcessClient(config, on_progress=display.progress)

    async def run(self) -> int:
        """See `follow`."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        following = asyncio.create_task(self._follow())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((following, stopping), return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()  # the reason, as an exception
            return 0
        finally:
            for task in (following, stopping):
                task.cancel()
            self._display.close()
            await self._client.close()

    async def _follow(self) -> None:
        """Return when the first host ends cleanly; raise if it is lost."""
        await Equipment(self._config, self._client, self._display).find_model()
        await self._client.start()
        info = await self._client.wait_ready()
        self._display.close()
        engine = self._config.engine
        line = (
            f"Host {engine.host_id} of {engine.n_hosts} follows {engine.coordinator}: "
            f"{info.model.name}, {info.kernels.label} kernels on {info.device.name}"
        )
        print(visible(line), flush=True)
        await self._client.until("dead")
        if self._client.dismissed:
            _log.info("%s", self._client.failure)
            return
        await self._client.wait_ready()  # raises the reason
