"""What the page is told, as bytes: server-sent events and the JSON of step records. No clock, no tasks, no web.

Times are seconds of the server's time.monotonic(); the page only ever shows differences of them.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np

from jitney.engine.client import EngineClient
from jitney.engine.ledger import ROW_KINDS, STEP_DTYPE
from jitney.engine.types import EngineInfo, Slot
from jitney.engine.wire import Slots

VERSION = 1
#: A seat's or a page's state is its place in these.
SEAT_STATES = ("free", "prefill", "decode")
PAGE_STATES = ("free", "held", "shared", "cached")
#: Numbers of a seat as the key frame carries them, each a list with one entry a seat.
SEAT_COLUMNS = ("index", "n_prompt", "n_computed", "n_output", "max_tokens", "pages")
#: Most cells of the page map; a larger pool shows several pages in one cell.
MAX_PAGE_CELLS = 8192
#: Most step records in one answer.
MAX_RECORDS = 4096
#: Milliseconds after which a page whose feed has ended asks again.
RETRY_MS = 1000

_SEAT_CODES = {name: code for code, name in enumerate(SEAT_STATES)}


def event(name: str, data: Any, number: int | None = None) -> bytes:
    """One server-sent event; `number` becomes its id."""
    head = f"event: {name}\n" if number is None else f"event: {name}\nid: {number}\n"
    return head.encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"


def hello(info: EngineInfo | None, run: str, hz: float, keys: bool) -> bytes:
    """The first event of a feed, and again whenever what runs has changed. keys: requests need an API key."""
    return event("hello", {
        "v": VERSION, "run": run, "hz": hz, "keys": keys, "states": SEAT_STATES, "page_states": PAGE_STATES,
        "seat_columns": SEAT_COLUMNS, "info": None if info is None else msgspec.to_builtins(info)})


def bye(reason: str) -> bytes:
    """The last event of a feed that ends on purpose."""
    return event("bye", {"reason": reason, "retry_ms": RETRY_MS})


def key_frame(client: EngineClient, slots: Slots | None, records: np.ndarray, now: float, number: int) -> bytes:
    """Everything the page shows, as of `now`; a page that missed frames needs none of them.

    slots None: the engine did not answer in time, and "seats" and "pages" are null. records: the steps since the frame
    before.
    """
    progress = client.progress if client.state == "loading" else None
    return event("key", {
        "t": round(now, 4), "step": client.counters.gauge("step") if client.counters.last is not None else -1,
        "state": client.state, "age": round(client.last_step_age(), 2),
        "progress": None if progress is None else msgspec.to_builtins(progress),
        "seats": None if slots is None else seats(slots.slots),
        "pages": None if slots is None or not slots.page_states else pages(slots.page_states),
        "s": scalars(client, records)}, number)


def seats(slots: list[Slot]) -> dict[str, Any]:
    """state: base64 of uint8[S]; request: id or null; and SEAT_COLUMNS as lists of S numbers."""
    states = bytes(_SEAT_CODES[slot.state] for slot in slots)
    return {"state": base64.b64encode(states).decode(), "request": [slot.request_id for slot in slots],
            **{name: [getattr(slot, name) for slot in slots] for name in SEAT_COLUMNS}}


def pages(page_states: bytes) -> dict[str, Any]:
    """The pool without its trash page (page 0), which never holds anything.

    cells: base64 of uint8; each stands for `per_cell` pages in a row (the last for what is left) and shows the state
    most of them have. counts: pages in each state, exact.
    """
    states = np.frombuffer(page_states, np.uint8)[1:]
    counts = np.bincount(states, minlength=len(PAGE_STATES))
    per_cell = max(1, -(-len(states) // MAX_PAGE_CELLS))
    cells = states if per_cell == 1 else _commonest(states, per_cell)
    return {"per_cell": per_cell, "cells": base64.b64encode(cells.tobytes()).decode(),
            "counts": dict(zip(PAGE_STATES, counts.tolist(), strict=True))}


def _commonest(states: np.ndarray, width: int) -> np.ndarray:
    """uint8[ceil(N / width)]: the commonest state of each group of `width`; of equals, the lowest."""
    starts = np.arange(0, len(states), width)
    votes = [np.add.reduceat(states == code, starts, dtype=np.int64) for code in range(len(PAGE_STATES))]
    return np.argmax(votes, axis=0).astype(np.uint8)


def scalars(client: EngineClient, records: np.ndarray) -> dict[str, Any]:
    """Gauges, and totals since the server's start (the page takes differences, so a lost frame loses nothing).

    step_s: seconds of all steps, gaps included; gap_s: of the gaps alone. worst_s: the longest of `records`.
    """
    counters = client.counters
    spans = records["device_s"] + records["gap_s"]
    return {
        "seats_busy": counters.gauge("seats_busy"), "waiting": counters.waiting,
        "waiting_tokens": counters.waiting_tokens, "pages_used": counters.gauge("pages_used"),
        "steps": counters.steps, "rows": counters.rows, "preemptions": counters.preemptions,
        "compiles": counters.compiles, "nan_rows": counters.nan_rows, "restarts": counters.engine_restarts,
        "step_s": round(sum(histogram.total for histogram in counters.step_seconds.values()), 6),
        "gap_s": round(counters.host_gap_seconds.total, 6),
        "worst_s": round(float(spans.max()), 6) if len(spans) else None}


def record_columns(records: np.ndarray, now: float) -> bytes:
    """JSON of the newest MAX_RECORDS of `records`: one list per field of STEP_DTYPE, seconds to the microsecond.

    left_out: how many older ones were asked for and are not here.
    """
    kept = records[-MAX_RECORDS:]
    columns = {name: _column(kept[name]) for name in STEP_DTYPE.names or ()}
    return msgspec.json.encode({"t": round(now, 4), "row_kinds": ROW_KINDS, "left_out": len(records) - len(kept),
                                "columns": columns})


def _column(values: np.ndarray) -> list[Any]:
    return np.round(values.astype(np.float64), 6).tolist() if values.dtype.kind == "f" else values.tolist()
