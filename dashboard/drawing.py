"""Drawing a report in a process of its own: plotly is half a second of pure Python, which as a
thread would take the event loop's interpreter all that time.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Generator

from jitney.dashboard.report import ReportData
from jitney.engine.errors import RequestError
from jitney.engine.process.children import end_child, start_child

#: Seconds after which a drawing is given up.
_LONGEST_S = 60.0
#: Reports that may wait for the one that is being drawn.
_MOST_WAITING = 4
_BLOCK = 1 << 16


class Drawings:
    """Draws one report at a time."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self._open = 0

    async def draw(self, snapshot: ReportData) -> bytes:
        """The report's HTML. Raises RequestError busy if too many wait."""
        if self._open > _MOST_WAITING:
            raise RequestError("other reports are being drawn; ask again in a moment", code="busy")
        self._open += 1
        try:
            async with self._one:
                return await _drawn(pickle.dumps(snapshot))
        finally:
            self._open -= 1


async def _drawn(snapshot: bytes) -> bytes:
    process = await start_child("jitney.dashboard.report_worker")
    try:
        async with asyncio.timeout(_LONGEST_S):
            page, _ = await process.communicate(snapshot)
    except TimeoutError:
        raise RequestError("the report took too long to draw", code="busy") from None
    finally:
        await end_child(process)
    if process.returncode != 0:
        raise RuntimeError(f"drawing a report ended with status {process.returncode}")
    return page


def blocks_of(page: bytes) -> Generator[bytes, None, None]:
    """Pieces of a text that is there already."""
    for start in range(0, len(page), _BLOCK):
        yield page[start : start + _BLOCK]
