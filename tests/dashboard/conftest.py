"""A scripted engine for the page: a test sets who sits where and adds step records; the page must
show just that.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from api_fakes import FakeClient
from page_browser import ARGUMENTS, CHROMIUM, watched

from jitney.engine.common.engine_info import Seat
from jitney.engine.common.messages import PromptChunk, SeatMap, SequenceEvent, StepReport
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.records import ROW_KINDS, STEP_DTYPE
from jitney.engine.common.requests import EngineRequest, SamplingParams

#: A request id that would be seen at once if it were taken for markup.
MARKUP = "<img src=x onerror=alert(1)>"
#: Rows of every scripted step; they close.
ROWS = dict.fromkeys(ROW_KINDS, 1) | {"prefill": 20, "decode": 2, "padding": 5}


class StageClient(FakeClient):
    """Four seats, ten pages. asked: how often somebody wanted the seats or the pages.

    What a test says of a seat reaches the history as the core's own reports would bring it.
    """

    def __init__(self, **info: Any):
        super().__init__(**({"seats": 4, "pages": 10, "model": "scripted"} | info))
        self._seats = [
            Seat(seat=seat, state="free")
            for seat in range(self.info.sizes.seats if self.info else 4)
        ]
        self.states = bytes(11)
        self.windows: dict[int, list[int]] = {}
        self.kept: list[np.void] = []
        self.asked = 0

    async def seat_map(self) -> SeatMap:
        self.asked += 1
        return SeatMap(0, self.seats, self.states, self.windows)

    @property
    def seats(self) -> list[Seat]:
        return self._seats

    @seats.setter
    def seats(self, seats: list[Seat]) -> None:
        self._seats = list(seats)
        for seat in seats:
            self._apply(seat)

    def seat(self, number: int, state: str, request_id: str, **numbers: int) -> None:
        blank = Seat(seat=number, state=state, request_id=request_id)
        self._seats[number] = msgspec.structs.replace(blank, **numbers)
        self._apply(self._seats[number])

    def _apply(self, seat: Seat) -> None:
        """Have the history's seat be as the seat says."""
        there, now = self.history.seats[seat.seat], time.monotonic()
        if there is not None and (there.request_id, there.index) != (seat.request_id, seat.index):
            self.history.take(
                StepReport(
                    [
                        SequenceOutput(
                            request_id=there.request_id, index=there.index, finish="length"
                        )
                    ]
                )
            )
        if seat.request_id is None:
            return
        request = self.history.find(seat.request_id, seat.index)
        if request is None:
            sampling = SamplingParams(max_tokens=seat.max_tokens or 16, n=seat.index + 1)
            self.history.submit(
                EngineRequest(
                    id=seat.request_id, prompt=[1] * seat.n_prompt, sampling=sampling, arrival=now
                )
            )
            request = self.history.find(seat.request_id, seat.index)
        assert request is not None
        life = (
            []
            if request.seat == seat.seat
            else [
                SequenceEvent(
                    "seated",
                    seat.request_id,
                    seat.index,
                    seat.seat,
                    self.history.records.last_step,
                    now,
                    0,
                    0,
                )
            ]
        )
        self.history.take(StepReport([], events=life))
        rows = (
            [PromptChunk(seat.request_id, seat.index, 0, seat.n_computed, 0)]
            if seat.state == "prefill"
            else []
        )
        tokens = [1] * (seat.n_output - request.n_output)
        outputs = (
            [SequenceOutput(request_id=seat.request_id, index=seat.index, tokens=tokens)]
            if tokens
            else []
        )
        self.history.take(StepReport(outputs, chunks=rows))

    def step(self, **fields: float) -> np.void:
        """One more step record, as the core would send it."""
        record = np.zeros(1, STEP_DTYPE)
        given = {
            "step": len(self.kept),
            "bucket_tokens": 32,
            "mixed": 1,
            "seats": 4,
            "pages": 10,
            "device_s": 0.02,
            "gap_s": 0.001,
            **ROWS,
        } | fields
        for name, value in given.items():
            record[name] = value
        taken = self.history.take(StepReport([], record.tobytes()))
        assert taken is not None
        self.kept.append(taken)
        self.counters.observe_step(taken)
        return taken


@pytest.fixture
def client() -> StageClient:
    """Full: two seats generate, one reads its prompt, one is free; two sequences wait."""
    client = StageClient()
    client.seat(0, "decode", "req-a", n_prompt=5, n_computed=12, n_output=8, max_tokens=16, pages=1)
    client.seat(1, "prefill", "req-b", index=1, n_prompt=40, n_computed=10, max_tokens=9, pages=3)
    client.seat(3, "decode", MARKUP, n_prompt=7, n_computed=9, n_output=3, max_tokens=4, pages=1)
    client.states = bytes([0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 0])
    for _ in range(3):
        client.step(waiting=2, waiting_tokens=64, seats_busy=3, pages_used=6)
    return client


@pytest.fixture
def other() -> StageClient:
    """Another engine, empty: six seats under the static policy."""
    return StageClient(seats=6, policy="static", model="other")


@pytest.fixture(scope="module")
def chromium():
    """A browser for the tests of one file; they are left out where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not shutil.which(CHROMIUM):
        pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=ARGUMENTS, env={**os.environ}
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium):
    """A page whose console and requests are kept, see `page_browser.watched`."""
    seen = watched(chromium)
    yield seen
    seen.context.close()


@pytest.fixture
def axe() -> Any:
    """axe-core, which runs in any page."""
    return pytest.importorskip("axe_playwright_python.sync_playwright").Axe()


@pytest.fixture
def open_to_axe(chromium):
    """As `open_page`; the page's policy lets axe-core's script in."""
    seen = watched(chromium, bypass_csp=True)
    yield seen
    seen.context.close()
