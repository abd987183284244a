"""A scripted engine for the page: a test sets who sits where and adds step records; the page must show just that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from api_fakes import FakeClient

from jitney.engine.ledger import STEP_DTYPE
from jitney.engine.types import Slot
from jitney.engine.wire import Slots

#: A request id that would be seen at once if it were taken for markup.
MARKUP = "<img src=x onerror=alert(1)>"
#: Rows of every scripted step; they close.
ROWS = {"prefill": 20, "decode": 3, "padding": 6, "recomputed": 1, "past_end": 1, "cancelled": 1}


class StageClient(FakeClient):
    """Four seats, ten pages. asked: how often somebody wanted the slots."""

    def __init__(self, **info: Any):
        super().__init__(**({"seats": 4, "pages": 10, "model": "scripted"} | info))
        self.seats = [Slot(seat=seat, state="free") for seat in range(4)]
        self.page_states = bytes(11)
        self.kept: list[np.void] = []
        self.asked = 0

    async def slots(self) -> Slots:
        self.asked += 1
        return Slots(0, self.seats, self.page_states)

    def seat(self, number: int, state: str, request_id: str, **numbers: int) -> None:
        self.seats = [*self.seats]
        self.seats[number] = Slot(seat=number, state=state, request_id=request_id, **numbers)

    def step(self, **fields: float) -> np.void:
        """One more step record, as the core would send it."""
        record = np.zeros(1, STEP_DTYPE)
        given = {"step": len(self.kept), "bucket_tokens": 32, "mixed": 1, "seats": 4, "pages": 10, "device_s": 0.02,
                 "gap_s": 0.001, **ROWS} | fields
        for name, value in given.items():
            record[name] = value
        self.kept.append(record[0])
        self.counters.observe_step(record[0])
        return record[0]

    def records(self, after_step: int) -> np.ndarray:
        return np.array([record for record in self.kept if record["step"] > after_step], STEP_DTYPE)


@pytest.fixture
def client() -> StageClient:
    """Full: two seats generate, one reads its prompt, one is free; two sequences wait."""
    client = StageClient()
    client.seat(0, "decode", "req-a", n_prompt=5, n_computed=12, n_output=8, max_tokens=16, pages=2)
    client.seat(1, "prefill", "req-b", index=1, n_prompt=40, n_computed=10, max_tokens=9, pages=3)
    client.seat(3, "decode", MARKUP, n_prompt=7, n_computed=9, n_output=3, max_tokens=4, pages=1)
    client.page_states = bytes([0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 0])
    for _ in range(3):
        client.step(waiting=2, waiting_tokens=64, seats_busy=3, pages_used=6)
    return client
