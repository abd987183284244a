"""Drawing a report in a process of its own: plotly is half a second of pure Python, which as a
thread would take the event loop's interpreter all that time.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys

from jitney.dashboard.report import ReportData
from jitney.engine.common.child_process import end_child, start_child
from jitney.engine.common.errors import RequestError

#: Seconds after which a drawing is given up.
_LONGEST_S = 60.0
#: Reports that may wait for the one that is being drawn.
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
    os.nice(5)  # requests go first
    data: ReportData = pickle.load(sys.stdin.buffer)  # our parent's own
    sys.stdout.buffer.write(data.drawn().encode())


if __name__ == "__main__":
    _main()
