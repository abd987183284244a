"""Work that is cancelled when its client leaves or the server stops."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from jitney.engine.common.tasks import until

if TYPE_CHECKING:
    from starlette.types import Receive


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, cancelling it if the client leaves first (True). Raises its errors. Starlette
    notices that only in some responses, and never while a request waits.
    """
    return await until(_disconnected(receive), work)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
