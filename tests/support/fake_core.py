"""The engine's own scheduler on a fake device, in a separate process:
`ProcessClient(builder="fake_core:build")`.
"""

from __future__ import annotations

import time

from fakes import FakeRunner, make_core
from process_core import INFO

SEATS, PAGES, PAGE_SIZE, CONTEXT = 4, 33, 4, 64


class SlowRunner(FakeRunner):
    """A runner whose steps take a few milliseconds, so that a test can interrupt one."""

    def fetch(self, launched):
        time.sleep(0.004)
        return super().fetch(launched)


def build(config, source, progress):
    core = make_core(
        seats=SEATS,
        pages=PAGES,
        page_size=PAGE_SIZE,
        context=CONTEXT,
        share_outputs=False,
        device=SlowRunner,
        clock=time.monotonic,  # pyright: ignore[reportArgumentType]
    )
    return core, INFO
