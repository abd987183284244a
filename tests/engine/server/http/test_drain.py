"""How a server that was told to stop ends, while somebody asks on."""

from __future__ import annotations

import asyncio
from signal import SIGTERM
from types import SimpleNamespace
from typing import Any

import pytest

from jitney.engine.cli.serve import _Server
from jitney.engine.config import Config, ServerSection
from jitney.engine.fleet.command import _Serving
from jitney.engine.server.http.http_server import HttpServer
from jitney.engine.server.http.open_requests import OpenRequests
from jitney.engine.server.http.settings import ServerSettings


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


async def _at_once() -> None:
    """It has no other engines to wait for."""


def server_of(kind: type[Any], asked: Asked) -> Any:
    """As much of a server as a drain touches."""
    server = object.__new__(kind)
    server.config = Config(server=ServerSection(drain_s=0.05))
    server.http = HttpServer(server.config.server, ServerSettings())
    web: Any = SimpleNamespace(force_exit=False)
    server.http.web = web
    server.client = SimpleNamespace(
        drain=lambda: None, kill=lambda: None, drained_together=_at_once
    )
    server.engines = SimpleNamespace(kill=lambda: None)
    server.app = SimpleNamespace(state=SimpleNamespace(service=asked))
    server.fleet = asked
    return server


@pytest.mark.parametrize("kind", [_Server, _Serving])
async def test_who_asks_after_the_last_answer_does_not_make_the_end_a_failure(kind: type[Any]):
    asked = Asked(drains=True)
    assert await server_of(kind, asked)._drain() == 0
    assert asked.open._count


@pytest.mark.parametrize("kind", [_Server, _Serving])
async def test_an_answer_that_takes_too_long_does(kind: type[Any]):
    assert await server_of(kind, Asked(drains=False))._drain() == 1


@pytest.mark.parametrize("kind", [_Server, _Serving])
async def test_a_second_signal_is_the_status(kind: type[Any]):
    server = server_of(kind, Asked(drains=False))
    server.http.signals.put_nowait(15)
    assert await server._drain() == 128 + 15
    assert server.http.web.force_exit


@pytest.mark.parametrize(
    ("numbers", "others_before", "heard"),
    [
        ([SIGTERM], None, [SIGTERM]),
        ([SIGTERM, SIGTERM], None, [SIGTERM, SIGTERM]),
        ([], 0, [SIGTERM]),
        # It gets the signal that the other one got, a moment later; a second one is one.
        ([SIGTERM], 0, [SIGTERM]),
        ([SIGTERM, SIGTERM], 0, [SIGTERM, SIGTERM]),
        # The others are told to end because this one was.
        ([SIGTERM], 1, [SIGTERM]),
        ([SIGTERM, SIGTERM], 1, [SIGTERM, SIGTERM]),
    ],
)
async def test_an_engine_that_shares_experts_stops_with_the_others(
    numbers: list[int], others_before: int | None, heard: list[int]
):
    """others_before: the signal before which another engine began to drain; None: never."""
    others = asyncio.Event()
    server = object.__new__(_Server)
    server.http = HttpServer(ServerSection(), ServerSettings())
    server._signalled = server._ends_with_others = False
    client: Any = SimpleNamespace(until_others_drain=others.wait)
    server.client = client
    listening = asyncio.create_task(server._stop_with_others())
    for place, number in enumerate([*numbers, 0]):
        if place == others_before:
            others.set()
            await listening
        if number:
            server._take_signal(number)
    listening.cancel()
    assert [server.http.signals.get_nowait() for _ in range(server.http.signals.qsize())] == heard
