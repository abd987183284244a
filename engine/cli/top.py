"""`jitney top`: the page's twin in a terminal, over the same feed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from jitney.engine.cli.flags import KEY_FLAG, Command, Flag, FlagGroup

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
_URL = Flag.of("url", "the engine", _DEFAULT_URL, nargs="?", metavar="URL")
_FLAGS = (_URL, Flag.switch("--once", "print one picture and leave"), KEY_FLAG)
_COMMAND = Command(
    "top",
    "Watch an engine's seats in the terminal, here or over ssh.",
    [FlagGroup(_FLAGS)],
    usage="jitney top [URL] [FLAG ...]",
)


def run(arguments: Sequence[str]) -> int:
    """Watch until interrupted; exit status 0. With --once: 0 after one picture."""
    args = _COMMAND.parse(arguments)
    show = _once if args.once else _watch
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(show(args.url, args.engine_key()))
    return 0


async def _once(url: str, key: str) -> None:
    """One picture, after a moment in which rates can be known. Raises Unreachable."""
    from rich.console import Console

    watched = _Watched(url, key)
    try:
        await _until_known(watched)
    finally:
        await watched.engine.close()
    Console(highlight=False).print(watched.picture())


async def _until_known(watched: _Watched) -> None:
    """Take in frames until rates are known, or the feed ends."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None) as limit:
            async for now in watched.frames():
                if watched.replica.t and limit.when() is None:
                    limit.reschedule(now + _RATES_S)


async def _watch(url: str, key: str) -> None:
    """Pictures for ever; an engine that goes away is waited for. Raises Unreachable if it was never
    there.
    """
    from rich.live import Live

    watched = _Watched(url, key)
    live = Live(auto_refresh=False, screen=sys.stdout.isatty())
    try:
        while True:
            trouble = await _draw_feed(watched, live)
            live.update(watched.picture(trouble), refresh=True)
            await asyncio.sleep(_RETRY_S)
    finally:
        live.stop()
        await watched.engine.close()


async def _draw_feed(watched: _Watched, live: Live) -> str:
    """Until the feed ends; why it did. Raises Unreachable if it never began."""
    from jitney.dashboard.remote import Unreachable

    try:
        await _draw_frames(watched, live)
    except Unreachable as error:
        if watched.replica.hello is None:
            raise
        return str(error)
    return "the feed ended; connecting again"


async def _draw_frames(watched: _Watched, live: Live) -> None:
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
        from jitney.dashboard.replica import ReplicaView
        from jitney.engine.cli.topview import Rates

        self.engine = RemoteEngine(url, key)
        self.replica = ReplicaView()
        self.rates = Rates()

    def picture(self, trouble: str = "") -> Group:
        from jitney.engine.cli.topview import picture

        return picture(self.replica, self.rates, self.engine.url, trouble)

    async def frames(self) -> AsyncIterator[float]:
        """Keep `replica` and `rates` up to date; yields the time (loop seconds) of each frame."""
        async for event in self.engine.feed():
            if self._is_frame(event):
                self.rates.add(self.replica)
                yield asyncio.get_running_loop().time()

    def _is_frame(self, event: bytes) -> bool:
        """Take in an event; True for one that shows the engine as it is now."""
        from jitney.dashboard.sse import decode

        name, data = decode(event)
        self.replica.apply(name, data)
        return name in ("key_frame", "delta")
