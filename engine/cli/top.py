"""`jitney top`: the page's twin in a terminal, over the same feed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from jitney.engine.cli.flags import Parser
from jitney.engine.cli.keys import add_key_flag, engine_key

if TYPE_CHECKING:
    from jitney.dashboard.remote import RemoteEngine
    from jitney.dashboard.replica import Replica
    from jitney.engine.cli.topview import Rates

DEFAULT_URL = "http://127.0.0.1:8000"
#: Seconds between two drawings, between two attempts to connect, and that --once waits to know
#: rates.
DRAW_S, RETRY_S, RATES_S = 0.25, 2.0, 1.2


def run(arguments: Sequence[str]) -> int:
    """Watch until interrupted; exit status 0. With --once: 0 after one picture."""
    args = parse(arguments)
    engine = args.url, engine_key(args)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(once(*engine) if args.once else watch(*engine))
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("top", "Watch an engine's seats in the terminal, here or over ssh.")
    parser.usage = "jitney top [URL] [FLAG ...]"
    parser.add_argument(
        "url", nargs="?", metavar="URL", default=DEFAULT_URL, help=f"the engine [{DEFAULT_URL}]"
    )
    parser.add_argument("--once", action="store_true", help="print one picture and leave")
    add_key_flag(parser)
    return parser.parse(arguments)


async def once(url: str, key: str) -> None:
    """One picture, after a moment in which rates can be args. Raises Unreachable."""
    from rich.console import Console

    from jitney.dashboard.remote import RemoteEngine
    from jitney.dashboard.replica import Replica
    from jitney.engine.cli.topview import Rates, picture

    engine, replica, rates = RemoteEngine(url, key), Replica(), Rates()
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                async for _ in changes(engine, replica, rates):
                    if replica.t and limit.when() is None:
                        limit.reschedule(asyncio.get_running_loop().time() + RATES_S)
    finally:
        await engine.close()
    Console(highlight=False).print(picture(replica, rates, engine.url))


async def watch(url: str, key: str) -> None:
    """Pictures for ever; an engine that goes away is waited for. Raises Unreachable if it was never
    there.
    """
    from rich.live import Live

    from jitney.dashboard.remote import RemoteEngine, Unreachable
    from jitney.dashboard.replica import Replica
    from jitney.engine.cli.topview import Rates, picture

    engine, replica, rates = RemoteEngine(url, key), Replica(), Rates()
    live = Live(auto_refresh=False, screen=sys.stdout.isatty())
    trouble, drawn = "", 0.0
    try:
        while True:
            try:
                async for now in changes(engine, replica, rates):
                    trouble = ""
                    live.start()
                    if now - drawn >= DRAW_S:
                        drawn = now
                        live.update(picture(replica, rates, engine.url), refresh=True)
            except Unreachable as error:
                if replica.hello is None:
                    raise
                trouble = str(error)
            trouble = trouble or "the feed ended; connecting again"
            live.update(picture(replica, rates, engine.url, trouble), refresh=True)
            await asyncio.sleep(RETRY_S)
    finally:
        live.stop()
        await engine.close()


async def changes(engine: RemoteEngine, replica: Replica, rates: Rates) -> AsyncIterator[float]:
    """Keep `replica` and `rates` up to date; yields the time (loop seconds) of each frame."""
    from jitney.dashboard.replica import EventReader

    reader, loop = EventReader(), asyncio.get_running_loop()
    async for part in engine.feed():
        for name, data in reader.feed(part):
            replica.apply(name, data)
            if name in ("key_frame", "delta"):
                rates.add(replica)
                yield loop.time()
