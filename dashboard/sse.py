"""What the page is told, as bytes: server-sent events and the JSON of step records. No clock, no
tasks, no web.

Times are seconds of the server's time.monotonic(); the page only ever shows differences of them, or
adds `wall - t`.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np

from jitney.dashboard.snapshot import (
    PAGE_STATES,
    SEAT_NUMBERS,
    SEAT_STATES,
    Look,
    PageCells,
    SeatColumns,
    page_runs,
)
from jitney.engine.messages import Life
from jitney.engine.records import ROW_KINDS, STEP_DTYPE
from jitney.engine.telemetry.row_kinds import ROW_KIND_TABLE
from jitney.engine.types import EngineInfo, Seat

VERSION = 2
#: Numbers of a seat as the key frame carries them, each a list with one entry a seat.
SEAT_COLUMNS = (*SEAT_NUMBERS, "pages")
LIFE_COLUMNS = ("t", "step", "ev", "request", "index", "seat", "n_in", "n_out", "reason")
#: Most step records in one answer.
MAX_RECORDS = 4096
#: Milliseconds after which a page whose feed has ended asks again.
RETRY_MS = 1000

_SEAT_CODES = {name: code for code, name in enumerate(SEAT_STATES)}


def event(name: str, data: Any, id: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\nid: {id}\n" if id else f"event: {name}\n"
    return head.encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"


def hello(
    info: EngineInfo | None,
    *,
    run: str,
    hz: float,
    key_s: float,
    keys: bool,
    text: bool,
    t: float,
    wall: float,
) -> bytes:
    """The first event of a feed, and again whenever what runs has changed.

    keys: requests need an API key. text: prompts and answers are shown. wall: unix seconds at t.
    """
    return event(
        "hello",
        {
            "v": VERSION,
            "run": run,
            "t": round(t, 4),
            "wall": round(wall, 3),
            "hz": hz,
            "key_s": key_s,
            "keys": keys,
            "text": text,
            "states": SEAT_STATES,
            "page_states": PAGE_STATES,
            "seat_columns": SEAT_COLUMNS,
            "life_columns": LIFE_COLUMNS,
            "row_kinds": list(ROW_KIND_TABLE.values()),
            "info": None if info is None else msgspec.to_builtins(info),
        },
    )


def bye(reason: str) -> bytes:
    """The last event of a feed that ends on purpose."""
    return event("bye", {"reason": reason, "retry_ms": RETRY_MS})


def life(events: list[Life], first: int) -> bytes:
    """What happened to sequences; first: the number of the first of these events, counted since the
    server's start.
    """
    return event(
        "life",
        {
            "first": first,
            "events": [
                [
                    round(e.t, 4),
                    e.step,
                    e.event,
                    e.request_id,
                    e.index,
                    e.seat,
                    e.n_in,
                    e.n_out,
                    e.reason,
                ]
                for e in events
            ],
        },
    )


def key(look: Look, page_size: int, id: str) -> bytes:
    """Everything the page shows; a page that missed frames needs none of them."""
    return event(
        "key",
        {
            "t": round(look.t, 4),
            "step": look.step,
            "state": look.state,
            "age": look.age,
            "progress": look.progress,
            "seats": None if look.seats is None else columns(look.seats, page_size),
            "pages": None if look.pages is None else pages(look.pages),
            "s": look.scalars,
            "hist": look.hist,
            "notes": look.notes,
            "life": look.n_life,
        },
        id,
    )


def columns(seats: SeatColumns, page_size: int) -> dict[str, Any]:
    """state: base64 of uint8[S]; request: id or null; and SEAT_COLUMNS as lists of S numbers."""
    held = -(-(seats.numbers[1] + seats.numbers[3]) // max(1, page_size))
    numbers = {name: row.tolist() for name, row in zip(SEAT_NUMBERS, seats.numbers, strict=True)}
    return {
        "state": base64.b64encode(seats.state.tobytes()).decode(),
        "request": seats.requests,
        **numbers,
        "pages": held.tolist(),
    }


def seats(seats: list[Seat]) -> dict[str, Any]:
    """The core's own answer, in the form of `columns`."""
    states = bytes(_SEAT_CODES[seat.state] for seat in seats)
    return {
        "state": base64.b64encode(states).decode(),
        "request": [seat.request_id for seat in seats],
        **{name: [getattr(seat, name) for seat in seats] for name in SEAT_COLUMNS},
    }


def pages(cells: PageCells) -> dict[str, Any]:
    """per_cell, counts, and the cells in base64 (see `PageCells`)."""
    return {
        "per_cell": cells.per_cell,
        "cells": base64.b64encode(cells.cells.tobytes()).decode(),
        "counts": cells.counts,
    }


def delta(before: Look, now: Look) -> dict[str, Any]:
    """What changed since `before`, which had the same number of seats; always t, step and life.

    Seats that are not named have gone on as `SeatColumns.after` says.
    """
    found: dict[str, Any] = {"t": round(now.t, 4), "step": now.step, "life": now.n_life}
    for name in ("state", "age", "progress"):
        if getattr(before, name) != getattr(now, name):
            found[name] = getattr(now, name)
    if before.seats is not None and now.seats is not None:
        expected = before.seats.after(now.step - before.step)
        if len(changed := expected.changed(now.seats)):
            found["seats"] = now.seats.rows(changed)
    if (
        before.pages is not None
        and now.pages is not None
        and (runs := page_runs(before.pages.cells, now.pages.cells))
    ):
        found["pages"] = {"runs": runs, "counts": now.pages.counts}
    elif before.pages and now.pages and before.pages.counts != now.pages.counts:
        found["pages"] = {"runs": [], "counts": now.pages.counts}
    if changes := {
        name: value for name, value in now.scalars.items() if before.scalars.get(name) != value
    }:
        found["s"] = changes
    return found


def follows(before: Look | None, now: Look) -> bool:
    """True if `now` can be told as a delta."""
    if (
        before is None
        or (before.seats is None) != (now.seats is None)
        or (before.pages is None) != (now.pages is None)
    ):
        return False
    same_seats = (
        before.seats is None or now.seats is None or len(before.seats.state) == len(now.seats.state)
    )
    same_cells = (
        before.pages is None or now.pages is None or len(before.pages.cells) == len(now.pages.cells)
    )
    return same_seats and same_cells and now.step >= before.step


def quiet(found: dict[str, Any]) -> bool:
    """True for a delta that says nothing but the time."""
    return found.keys() <= {"t", "step", "life", "age"}


def record_columns(records: np.ndarray, ready: np.ndarray, now: float) -> dict[str, Any]:
    """The newest MAX_RECORDS of `records`: one list per field of STEP_DTYPE, seconds to the
    microsecond.

    ready: when each step was done. left_out: how many older ones were asked for and are not here.
    """
    kept = records[-MAX_RECORDS:]
    columns = {name: _column(kept[name]) for name in STEP_DTYPE.names or ()}
    return {
        "t": round(now, 4),
        "row_kinds": ROW_KINDS,
        "left_out": len(records) - len(kept),
        "columns": columns | {"ready": _column(ready[-MAX_RECORDS:])},
    }


def _column(values: np.ndarray) -> list[Any]:
    return (
        np.round(values.astype(np.float64), 6).tolist()
        if values.dtype.kind == "f"
        else values.tolist()
    )
