"""Drawing of reports in a child process: plotly runs half a second of pure Python, which in a
thread would block the event loop (GIL).
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys

from jitney.dashboard.report import ReportData
from jitney.engine.common.child_process import end_child, start_child
from jitney.engine.common.errors import RequestError

#: Time limit of a drawing in seconds.
_LONGEST_S = 60.0
#: Most reports that wait to be drawn.
_MOST_WAITING = 4


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
    process = await start_child("jitney.dashboard.drawing")
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


def _main() -> None:
    """The process that draws one report: its data from standard input, its HTML to standard
    output.
    """
    os.nice(5)  # requests have priority
    data: ReportData = pickle.load(sys.stdin.buffer)  # trusted: written by the parent
    sys.stdout.buffer.write(data.drawn().encode())


if __name__ == "__main__":
    _main()
