"""Reports that come faster than they are read leave the event loop to others, too."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from jitney.engine import messages
from jitney.engine.config.schema import Config
from jitney.engine.process.supervisor import ProcessClient


def test_others_run_between_two_reports():
    async def turns_during(n_reports: int) -> int:
        client = ProcessClient(Config())
        left = n_reports
        turns = 0

        async def receive() -> messages.Tick:
            nonlocal left
            left -= 1
            if left < 0:
                await asyncio.Event().wait()
            return messages.Tick(waiting=0)

        link: Any = SimpleNamespace(receive=receive, kill=lambda: None)
        reading = asyncio.create_task(client._read(link))
        while left >= 0:
            await asyncio.sleep(0)
            turns += 1
        reading.cancel()
        return turns

    assert asyncio.run(turns_during(500)) >= 500
