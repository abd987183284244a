"""`jitney top`: the page's twin in a terminal, over the same feed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from jitney.engine.cli.flags import Parser
from jitney.engine.cli.keys import add_key_flag, engine_key

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

_DEFAULT_URL = "http://127.0.0.1:8000"
#: Seconds between two drawings.
_DRAW_S = 0.25
#: Seconds between two attempts to connect.
_RETRY_S = 2.0
#: Seconds that --once waits until rates are known.
_RATES_S = 1.2


def run(arguments: Sequence[str]) -> int:
    """Watch until interrupted; exit status 0. With --once: 0 after one picture."""
    args = _parse(arguments)
    key = engine_key(args)
    shows = _once(args.url, key) if args.once else watch(args.url, key)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(shows)
    return 0


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = Parser("top", "Watch an engine's seats in the terminal, here or over ssh.")
    parser.usage = "jitney top [URL] [FLAG ...]"
    parser.add_argument(
        "url", nargs="?", metavar="URL", default=_DEFAULT_URL, help=f"the engine [{_DEFAULT_URL}]"
    )
    parser.add_argument("--once", action="store_true", help="print one picture and leave")
    add_key_flag(parser)
    return parser.parse(arguments)


async def _once(url: str, key: str) -> None:
    """One picture, after a moment in which rates can be known. Raises Unreachable."""
    from rich.console import Console

    watched = _Watched(url, key)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                async for now in watched.frames():
                    if watched.replica.t and limit.when() is None:
                        limit.reschedule(now + _RATES_S)
    finally:
        await watched.engine.close()
    Console(highlight=False).print(watched.picture())


async def watch(url: str, key: str) -> None:
    """Pictures for ever; an engine that goes away is waited for. Raises Unreachable if it was never
    there.
    """
    from rich.live import Live

    from jitney.dashboard.remote import Unreachable

    watched = _Watched(url, key)
    live = Live(auto_refresh=False, screen=sys.stdout.isatty())
    try:
        while True:
            trouble = "the feed ended; connecting again"
            try:
                await _draw_feed(watched, live)
            except Unreachable as error:
                if watched.replica.hello is None:
                    raise
                trouble = str(error)
            live.update(watched.picture(trouble), refresh=True)
            await asyncio.sleep(_RETRY_S)
    finally:
        live.stop()
        await watched.engine.close()


async def _draw_feed(watched: _Watched, live: Live) -> None:
    drawn = 0.0
    async for now in watched.frames():
        live.start()
        if now - drawn >= _DRAW_S:
            drawn = now
            live.update(watched.picture(), refresh=True)


class _Watched:
    """An engine, and what its feed has said so far."""

    def __init__(self, url: str, key: str):
        from jitney.dashboard.remote import RemoteEngine
        from jitney.dashboard.replica import Replica
        from jitney.engine.cli.topview import Rates

        self.engine = RemoteEngine(url, key)
        self.replica = Replica()
        self.rates = Rates()

    def picture(self, trouble: str = "") -> Group:
        from jitney.engine.cli.topview import picture

        return picture(self.replica, self.rates, self.engine.url, trouble)

    async def frames(self) -> AsyncIterator[float]:
        """Keep `replica` and `rates` up to date; yields the time (loop seconds) of each frame."""
        from jitney.dashboard.sse import decode

        loop = asyncio.get_running_loop()
        async for event in self.engine.feed():
            name, data = decode(event)
            self.replica.apply(name, data)
            if name in ("key_frame", "delta"):
                self.rates.add(self.replica)
                yield loop.time()
