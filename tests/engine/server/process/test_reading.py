"""What the server takes out of the core's reports; those that come faster than they are read leave
the event loop to others, too.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec

from jitney.engine.common import messages
from jitney.engine.config.schema import Config
from jitney.engine.server.process.process_client import ProcessClient


def test_others_run_between_two_reports():
    async def turns_during(n_reports: int) -> int:
        client = ProcessClient(Config())
        left = n_reports
        turns = 0

        async def receive() -> messages.Heartbeat:
            nonlocal left
            left -= 1
            if left < 0:
                await asyncio.Event().wait()
            return messages.Heartbeat(waiting=0)

        link: Any = SimpleNamespace(receive=receive, kill=lambda: None)
        reading = asyncio.create_task(client._read(link))
        while left >= 0:
            await asyncio.sleep(0)
            turns += 1
        reading.cancel()
        return turns

    assert asyncio.run(turns_during(500)) >= 500


def test_the_predicted_wait_is_the_newest_that_was_said():
    client = ProcessClient(Config())
    link: Any = SimpleNamespace(learned=True)
    waits = []
    for message in (
        messages.StepReport([], predicted_wait=3.5),
        messages.StepReport([]),
        messages.StepReport([], predicted_wait=0.0),
        messages.StepReport([], predicted_wait=2.0),
        messages.Heartbeat(waiting=0),
    ):
        client._take(link, msgspec.msgpack.decode(messages.encode(message), type=messages.FromCore))
        waits.append(client.counters.predicted_wait)
    assert waits == [3.5, 3.5, 0.0, 2.0, 0.0], "an idle engine has room at once"
