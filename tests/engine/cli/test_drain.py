"""How a server that was told to stop ends, while somebody asks on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from jitney.engine.api.open_requests import OpenRequests
from jitney.engine.cli.fleet_serve import _Serving
from jitney.engine.cli.serve import _Server


class Asked:
    """A service, or a fleet, of which somebody asks something more as soon as it is drained."""

    def __init__(self, drains: bool):
        self.open = OpenRequests()
        self.one_more = self.open.one()
        if not drains:
            self.one_more.__enter__()

    def begin_drain(self) -> None:
        pass

    async def drained(self) -> None:
        await self.open.until_idle()
        self.one_more.__enter__()


def server_of(kind: type[Any], asked: Asked) -> Any:
    """As much of a server as a drain touches."""
    server = object.__new__(kind)
    server.config = SimpleNamespace(server=SimpleNamespace(drain_s=0.05))
    server.signals = asyncio.Queue()
    server.web = SimpleNamespace(force_exit=False)
    server.connections = SimpleNamespace(hurry=lambda: None)
    server.client = SimpleNamespace(drain=lambda: None, kill=lambda: None)
    server.engines = SimpleNamespace(kill=lambda: None)
    server.app = SimpleNamespace(state=SimpleNamespace(service=asked))
    server.fleet = asked
    return server


@pytest.mark.parametrize("kind", [_Server, _Serving])
def test_who_asks_after_the_last_answer_does_not_make_the_end_a_failure(kind: type[Any]):
    async def drain() -> int:
        asked = Asked(drains=True)
        status = await server_of(kind, asked)._drain()
        assert asked.open._count
        return status

    assert asyncio.run(drain()) == 0


@pytest.mark.parametrize("kind", [_Server, _Serving])
def test_an_answer_that_takes_too_long_does(kind: type[Any]):
    async def drain() -> int:
        return await server_of(kind, Asked(drains=False))._drain()

    assert asyncio.run(drain()) == 1


@pytest.mark.parametrize("kind", [_Server, _Serving])
def test_a_second_signal_is_the_status(kind: type[Any]):
    async def drain() -> int:
        server = server_of(kind, Asked(drains=False))
        server.signals.put_nowait(15)
        status = await server._drain()
        assert server.web.force_exit
        return status

    assert asyncio.run(drain()) == 128 + 15
