"""One look at the engine: who sits where, the pages, the totals. What changed between two looks is
what the feed sends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jitney.engine.process.client import EngineClient
from jitney.engine.telemetry.history import History

#: A seat's or a page's state is its place in these.
SEAT_STATES = ("free", "prefill", "decode", "held")
PAGE_STATES = ("free", "held", "shared", "cached")
FREE, PREFILL, DECODE, HELD = range(4)
#: Numbers of a seat that change, in this order; SeatColumns.numbers has one row for each.
SEAT_NUMBERS = ("index", "n_prompt", "n_computed", "n_output", "max_tokens")
#: Most cells of the page map; a larger pool shows several pages in one cell.
MAX_PAGE_CELLS = 8192


@dataclass(slots=True)
class SeatColumns:
    """All seats. state: uint8[S]; requests: S ids or None; numbers: int64[len(SEAT_NUMBERS), S]."""

    state: np.ndarray
    requests: list[str | None]
    numbers: np.ndarray

    def after(self, steps: int) -> SeatColumns:
        """What the seats are `steps` steps later if nothing happens: each that decodes has a token
        more per step.
        """
        numbers = self.numbers.copy()
        decoding = self.state == DECODE
        numbers[3, decoding] += steps
        numbers[2, decoding] = numbers[1, decoding] + numbers[3, decoding] - 1
        return SeatColumns(self.state, self.requests, numbers)

    def changed(self, now: SeatColumns) -> np.ndarray:
        """Seats, ascending, that are different in `now`."""
        differ = (self.state != now.state) | (self.numbers != now.numbers).any(axis=0)
        differ |= np.fromiter(
            (a != b for a, b in zip(self.requests, now.requests, strict=True)), bool, len(differ)
        )
        return np.flatnonzero(differ)

    def rows(self, seats: np.ndarray) -> list[list[Any]]:
        """[seat, state, request, *numbers] of these seats."""
        numbers = self.numbers[:, seats].T.tolist()
        return [
            [seat, state, self.requests[seat], *row]
            for seat, state, row in zip(
                seats.tolist(), self.state[seats].tolist(), numbers, strict=True
            )
        ]


@dataclass(slots=True)
class PageCells:
    """The pool without its trash page (page 0), which never holds anything.

    cells: uint8[C], each for `per_cell` pages in a row (the last for what is left), the state most
    of them have. counts: pages in each state, exact.
    """

    per_cell: int
    cells: np.ndarray
    counts: dict[str, int]


@dataclass(slots=True)
class Look:
    """The engine at time t (seconds, monotonic). seats None: there is no engine; pages None: not
    known.
    """

    t: float
    step: int
    state: str
    age: float
    progress: Any
    seats: SeatColumns | None
    pages: PageCells | None
    scalars: dict[str, Any]
    n_life: int = 0
    hist: dict[str, Any] | None = None
    notes: list[dict[str, Any]] = field(default_factory=list)


def seat_columns(history: History) -> SeatColumns:
    """Who sits where, as the history knows it."""
    n = len(history.seats)
    state, numbers = [FREE] * n, [(0, 0, 0, 0, 0)] * n
    requests: list[str | None] = [None] * n
    for seat, request in enumerate(history.seats):
        if request is None:
            continue
        if request.stays[-1].first_token is not None:
            state[seat], computed = DECODE, request.n_prompt + request.n_output - 1
        else:
            state[seat], computed = PREFILL, request.n_computed
        requests[seat] = request.request_id
        numbers[seat] = (
            request.index,
            request.n_prompt,
            computed,
            request.n_output,
            request.max_tokens,
        )
    for seat in history.held:
        state[seat] = HELD
    return SeatColumns(
        np.array(state, np.uint8), requests, np.array(numbers, np.int64).reshape(n, 5).T.copy()
    )


def page_cells(page_states: bytes) -> PageCells:
    """The page map of `engine.messages.SeatMap.page_states`."""
    states = np.frombuffer(page_states, np.uint8)[1:]
    counts = np.bincount(states, minlength=len(PAGE_STATES))
    per_cell = max(1, -(-len(states) // MAX_PAGE_CELLS))
    cells = states if per_cell == 1 else _commonest(states, per_cell)
    return PageCells(per_cell, cells, dict(zip(PAGE_STATES, counts.tolist(), strict=True)))


def _commonest(states: np.ndarray, width: int) -> np.ndarray:
    """uint8[ceil(N / width)]: the commonest state of each group of `width`; of equals, the
    lowest.
    """
    starts = np.arange(0, len(states), width)
    votes = [
        np.add.reduceat(states == code, starts, dtype=np.int64) for code in range(len(PAGE_STATES))
    ]
    return np.argmax(votes, axis=0).astype(np.uint8)


def page_runs(before: np.ndarray, now: np.ndarray) -> list[list[int]]:
    """[first, count, state] of each run of cells that are alike in `now` and different from
    `before`.
    """
    at = np.flatnonzero(before != now)
    if not len(at):
        return []
    states = now[at]
    starts = np.flatnonzero(
        np.r_[True, (np.diff(at) != 1) | (np.diff(states.astype(np.int16)) != 0)]
    )
    counts = np.diff(np.r_[starts, len(at)])
    return np.stack((at[starts], counts, states[starts]), axis=1).tolist()


def scalars(client: EngineClient, records: np.ndarray) -> dict[str, Any]:
    """Gauges, and totals since the server's start (who shows them takes differences, so a lost
    frame loses nothing).

    step_s: seconds of all steps, gaps included; gap_s: of the gaps alone. worst_s: the longest of
    `records`. canary: sequences computed again with the reference, and those of them that were
    wrong.
    """
    counters, history = client.counters, client.history
    spans = records["device_s"] + records["gap_s"]
    return {
        "seats_busy": counters.gauge("seats_busy"),
        "waiting": counters.waiting,
        "waiting_tokens": counters.waiting_tokens,
        "pages_used": counters.gauge("pages_used"),
        "steps": dict(counters.steps),
        "rows": dict(counters.rows),
        "preemptions": counters.preemptions,
        "canary": [counters.canary_checked, counters.canary_mismatched],
        "compiles": counters.compiles,
        "nan_rows": counters.nan_rows,
        "restarts": counters.engine_restarts,
        "boarded": history.boarded,
        "cached_tokens": history.cached_tokens,
        "finished": dict(history.finished),
        "rejected": dict(history.rejected),
        "step_s": round(sum(histogram.total for histogram in counters.step_seconds.values()), 6),
        "gap_s": round(counters.host_gap_seconds.total, 6),
        "worst_s": round(float(spans.max()), 6) if len(spans) else None,
    }
