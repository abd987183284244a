"""A snapshot of the engine: seats, KV pages, totals. One snapshot makes a key frame
of the feed, and two of them a delta (`jitney.dashboard.sse` explains both).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from jitney.dashboard.sse import (
    PAGE_STATES,
    SEAT_NUMBERS,
    SEAT_STATES,
    Delta,
    KeyFrame,
    Metrics,
    Note,
    PageChanges,
    PageMap,
    SeatLists,
    changed,
)
from jitney.dashboard.view import View
from jitney.engine.common.engine_info import Seat
from jitney.engine.common.history import History
from jitney.engine.common.messages import SeatMap
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.requests import JsonDict
from jitney.engine.server import EngineClient

_FREE, _PREFILL, _DECODE, _HELD = range(len(SEAT_STATES))
_INDEX, _N_PROMPT, _N_COMPUTED, _N_OUTPUT, _MAX_TOKENS = range(len(SEAT_NUMBERS))
#: Most cells of the page map; a larger pool shows several pages in one cell.
_MAX_PAGE_CELLS = 8192


@dataclass(slots=True)
class _SeatColumns:
    """All S seats."""

    #: uint8[S]: the place in SEAT_STATES.
    state: np.ndarray
    #: S request ids, None for a free seat.
    requests: list[str | None]
    #: int64[len(SEAT_NUMBERS), S].
    numbers: np.ndarray

    def after(self, steps: int) -> _SeatColumns:
        """The seats `steps` steps later if nothing happens: each that decodes has a token
        more per step.
        """
        numbers = self.numbers.copy()
        decoding = self.state == _DECODE
        numbers[_N_OUTPUT, decoding] += steps
        n_tokens = numbers[_N_PROMPT, decoding] + numbers[_N_OUTPUT, decoding]
        numbers[_N_COMPUTED, decoding] = n_tokens - 1
        return _SeatColumns(self.state, self.requests, numbers)

    def changed(self, now: _SeatColumns) -> np.ndarray:
        """Seats, ascending, that are different in `now`."""
        differ = (self.state != now.state) | (self.numbers != now.numbers).any(axis=0)
        pairs = zip(self.requests, now.requests, strict=True)
        differ |= np.fromiter((a != b for a, b in pairs), bool, len(differ))
        return np.flatnonzero(differ)

    def rows(self, seats: np.ndarray) -> list[list[Any]]:
        """[seat, state, request, *numbers] of these seats."""
        numbers = self.numbers[:, seats].T.tolist()
        states = self.state[seats].tolist()
        columns = zip(seats.tolist(), states, numbers, strict=True)
        return [[seat, state, self.requests[seat], *row] for seat, state, row in columns]


@dataclass(slots=True)
class PageCells:
    """The pool without its trash page (page 0), which never holds anything."""

    #: Pages that one cell stands for, the last one for what is left.
    per_cell: int
    #: uint8[C]: the place in PAGE_STATES that most pages of a cell have.
    cells: np.ndarray
    #: Pages in each state, exact.
    counts: dict[str, int]
    #: The same of layers with pages of their own, by window.
    windows: dict[int, dict[str, int]] = field(default_factory=dict[int, dict[str, int]])

    @classmethod
    def of(cls, seat_map: SeatMap) -> PageCells:
        states = np.frombuffer(seat_map.page_states, np.uint8)[1:]
        counts = np.bincount(states, minlength=len(PAGE_STATES))
        per_cell = max(1, -(-len(states) // _MAX_PAGE_CELLS))
        cells = states
        if per_cell > 1:
            cells = _commonest(states, per_cell)
        windows = {window: _by_state(own) for window, own in sorted(seat_map.window_pages.items())}
        return cls(per_cell, cells, _by_state(counts.tolist()), windows)

    def shown(self) -> PageMap:
        cells = _base64(self.cells.tobytes())
        return {
            "per_cell": self.per_cell,
            "cells": cells,
            "counts": self.counts,
            "windows": self.windows,
        }


def _by_state(counts: Iterable[int]) -> dict[str, int]:
    """Numbers of pages in the order of PAGE_STATES."""
    return dict(zip(PAGE_STATES, counts, strict=True))


@dataclass(slots=True)
class Recent:
    """Figures of the last seconds, which are computed less often than snapshots."""

    #: See `Latencies.summary`.
    latency: JsonDict = field(default_factory=dict)
    #: See `engine.common.device_use.DeviceUse`.
    device: JsonDict = field(default_factory=dict)


@dataclass(slots=True)
class Snapshot:
    """The engine at one moment; the fields are those of `sse.KeyFrame`."""

    #: Seconds, monotonic.
    t: float
    step: int
    state: str
    last_step_age_s: float
    metrics: Metrics
    progress: JsonDict | None = None
    #: None: there is no engine.
    seats: _SeatColumns | None = None
    #: None: not known.
    pages: PageCells | None = None
    n_events: int = 0
    histograms: JsonDict | None = None
    notes: list[Note] = field(default_factory=list)
    outages: list[JsonDict] = field(default_factory=list)

    @classmethod
    def of(cls, client: EngineClient, records: np.ndarray, recent: Recent, now: float) -> Snapshot:
        """The engine's current state without seats, pages and histograms. records: the steps since
        the snapshot before; now: time.monotonic().
        """
        history = client.history
        snapshot = cls(
            t=now,
            step=history.records.last_step,
            state=client.state,
            last_step_age_s=round(client.last_step_age(), 1),
            metrics=_metrics(client, records, recent),
            n_events=history.events.n,
            outages=msgspec.to_builtins(list(history.incidents.outages)),
        )
        if client.state in ("loading", "restarting"):
            snapshot.progress = msgspec.to_builtins(client.progress)
        return snapshot

    def key_frame(self, page_size: int, view: View | None = None) -> KeyFrame:
        """The key frame for a view. page_size: tokens of a KV page; view: None for everything."""
        seats = self.seats
        pages = self.pages
        return {
            "t": round(self.t, 4),
            "step": self.step,
            "state": self.state,
            "last_step_age_s": self.last_step_age_s,
            "progress": self.progress,
            "seats": None if seats is None else _seat_lists(_shown(seats, view), page_size),
            "pages": None if pages is None else pages.shown(),
            "metrics": self.metrics,
            "histograms": self.histograms,
            "notes": self.notes,
            "outages": self.outages,
            "n_events": self.n_events,
        }

    def follows(self, before: Snapshot | None) -> bool:
        """Whether it can be sent as a delta: with the same seats and cells."""
        if before is None or self.step < before.step:
            return False
        return _sizes(before) == _sizes(self)

    def delta(self, before: Snapshot) -> Delta:
        """Changes since `before`, the snapshot before this one."""
        changes: Delta = {"t": round(self.t, 4), "step": self.step, "n_events": self.n_events}
        _add_state(changes, before, self)
        seats = _seat_changes(before, self)
        if seats:
            changes["seats"] = seats
        if before.pages is not None and self.pages is not None:
            pages = _page_changes(before.pages, self.pages)
            if pages is not None:
                changes["pages"] = pages
        metrics = changed(before.metrics, self.metrics)
        if metrics:
            changes["metrics"] = metrics
        return changes


def _shown(seats: _SeatColumns, view: View | None) -> _SeatColumns:
    """The seats as a viewer may see them."""
    if view is None or view.identity.is_admin:
        return seats
    requests = list(seats.requests)
    numbers = seats.numbers.copy()
    for seat, request in enumerate(seats.requests):
        if not view.shows(request, int(numbers[_INDEX, seat])):
            requests[seat] = None
            numbers[:, seat] = 0
    return _SeatColumns(seats.state, requests, numbers)


def seat_columns(history: History) -> _SeatColumns:
    """Occupants of the seats by the history."""
    n = len(history.seats)
    state = [_FREE] * n
    numbers = [(0, 0, 0, 0, 0)] * n
    requests: list[str | None] = [None] * n
    for seat, request in enumerate(history.seats):
        if request is not None:
            requests[seat] = request.request_id
            state[seat], numbers[seat] = _seat_of(request)
    for seat in history.held_seats:
        state[seat] = _HELD
    by_number = np.array(numbers, np.int64).reshape(n, len(SEAT_NUMBERS)).T.copy()
    return _SeatColumns(np.array(state, np.uint8), requests, by_number)


def _seat_of(request: RequestRecord) -> tuple[int, tuple[int, int, int, int, int]]:
    """The state of its seat, and its SEAT_NUMBERS."""
    n_prompt, n_output = request.n_prompt, request.n_output
    state, n_computed = _DECODE, n_prompt + n_output - 1
    if request.stays[-1].first_token is None:
        state, n_computed = _PREFILL, request.n_computed
    return state, (request.index, n_prompt, n_computed, n_output, request.max_tokens)


def _commonest(states: np.ndarray, width: int) -> np.ndarray:
    """uint8[ceil(N / width)]: the commonest state of each group of `width`; of equals, the
    lowest.
    """
    starts = np.arange(0, len(states), width)
    votes = [
        np.add.reduceat(states == code, starts, dtype=np.int64) for code in range(len(PAGE_STATES))
    ]
    return np.argmax(votes, axis=0).astype(np.uint8)


def _page_runs(before: np.ndarray, now: np.ndarray) -> list[list[int]]:
    """[first, count, state] of each run of cells that are alike in `now` and different from
    `before`.
    """
    places = np.flatnonzero(before != now)
    if not len(places):
        return []
    states = now[places]
    breaks = (np.diff(places) != 1) | (np.diff(states.astype(np.int16)) != 0)
    starts = np.flatnonzero(np.r_[True, breaks])
    counts = np.diff(np.r_[starts, len(places)])
    return np.stack((places[starts], counts, states[starts]), axis=1).tolist()


def _metrics(client: EngineClient, records: np.ndarray, recent: Recent) -> Metrics:
    """The engine's numbers now. records: the steps since the snapshot before."""
    counters = client.counters
    history = client.history
    step_s = sum(histogram.total for histogram in counters.step_seconds.values())
    return {
        "seats_busy": counters.gauge("seats_busy"),
        "waiting": counters.waiting,
        "waiting_tokens": counters.waiting_tokens,
        "predicted_wait_s": round(counters.predicted_wait, 3),
        "pages_used": counters.gauge("pages_used"),
        "steps": dict(counters.steps),
        "rows": dict(counters.rows),
        "preemptions": counters.preemptions,
        "canary": {
            "checked": counters.canary_checked,
            "mismatched": counters.canary_mismatched,
        },
        "compiles": counters.compiles,
        "nan_rows": counters.nan_rows,
        "restarts": counters.engine_restarts,
        "boarded": history.boarded,
        "cached_tokens": history.cached_tokens,
        "finished": dict(history.finished),
        "rejected": dict(history.incidents.rejected),
        "step_s": round(step_s, 6),
        "gap_s": round(counters.host_gap_seconds.total, 6),
        "longest_step_s": _longest_step(records),
        "latency": recent.latency,
        "device": recent.device,
    }


def _longest_step(records: np.ndarray) -> float | None:
    if not len(records):
        return None
    return round(float((records["device_s"] + records["gap_s"]).max()), 6)


def _seat_lists(seats: _SeatColumns, page_size: int) -> SeatLists:
    n_tokens = seats.numbers[_N_PROMPT] + seats.numbers[_N_OUTPUT]
    pages = -(-n_tokens // max(1, page_size))
    return _lists(seats.state.tobytes(), seats.requests, seats.numbers.tolist(), pages.tolist())


def core_seat_lists(seats: list[Seat]) -> SeatLists:
    """The core's own answer, in the same form."""
    states = bytes(SEAT_STATES.index(seat.state) for seat in seats)
    requests = [seat.request_id for seat in seats]
    numbers = [[getattr(seat, name) for seat in seats] for name in SEAT_NUMBERS]
    return _lists(states, requests, numbers, [seat.pages for seat in seats])


def _lists(
    states: bytes, requests: list[str | None], numbers: list[list[int]], pages: list[int]
) -> SeatLists:
    """numbers: by SEAT_NUMBERS."""
    return {
        "state": _base64(states),
        "request": requests,
        "index": numbers[_INDEX],
        "n_prompt": numbers[_N_PROMPT],
        "n_computed": numbers[_N_COMPUTED],
        "n_output": numbers[_N_OUTPUT],
        "max_tokens": numbers[_MAX_TOKENS],
        "pages": pages,
    }


def _base64(array: bytes) -> str:
    return base64.b64encode(array).decode()


def _sizes(snapshot: Snapshot) -> tuple[int, int]:
    """Numbers of seats and cells; -1 if unknown."""
    n_seats = n_cells = -1
    if snapshot.seats is not None:
        n_seats = len(snapshot.seats.state)
    if snapshot.pages is not None:
        n_cells = len(snapshot.pages.cells)
    return n_seats, n_cells


def _add_state(changes: Delta, before: Snapshot, now: Snapshot) -> None:
    """Add the fields that are sent completely when they change."""
    if before.state != now.state:
        changes["state"] = now.state
    if before.last_step_age_s != now.last_step_age_s:
        changes["last_step_age_s"] = now.last_step_age_s
    if before.progress != now.progress:
        changes["progress"] = now.progress
    if before.outages != now.outages:
        changes["outages"] = now.outages


def _seat_changes(before: Snapshot, now: Snapshot) -> list[list[Any]]:
    if before.seats is None or now.seats is None:
        return []
    expected = before.seats.after(now.step - before.step)
    return now.seats.rows(expected.changed(now.seats))


def _page_changes(before: PageCells, now: PageCells) -> PageChanges | None:
    """Changes of the page map, or None. Pages may change without a change of cells."""
    runs = _page_runs(before.cells, now.cells)
    if not runs and (before.counts, before.windows) == (now.counts, now.windows):
        return None
    return {"runs": runs, "counts": now.counts, "windows": now.windows}
