"""The garbage collector of a server: what lives for ever is put aside, and full collections come by
the clock.
"""

from __future__ import annotations

import asyncio
import gc

from jitney.engine.cli import serve


def test_full_collections_come_by_the_clock(monkeypatch):
    monkeypatch.setattr(serve, "_COLLECT_S", 0.001)
    full = 0

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal full
        full += phase == "start" and info["generation"] == 2

    async def for_a_while() -> None:
        collecting = asyncio.create_task(serve._collect_regularly())
        while full < 3:
            await asyncio.sleep(0.001)
        collecting.cancel()

    thresholds = gc.get_threshold()
    serve._freeze_objects()
    gc.callbacks.append(count)
    try:
        assert gc.get_freeze_count() > 10_000
        objects = [[number] for number in range(300_000)]  # by their number it would be due
        assert len(objects) == 300_000 and full == 0
        asyncio.run(asyncio.wait_for(for_a_while(), 120))
    finally:
        gc.callbacks.remove(count)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
