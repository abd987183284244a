"""The live feed's format: server-sent events with JSON data. This module defines the fields of all
events.

Times are seconds of the server's time.monotonic(): the page shows differences of them, or adds
`unix_time - t` of "hello". Arrays of many small numbers are base64 of uint8.

Events: "hello", "key_frame", "delta", "events", "note" (`Note`) and "bye". Key frames and deltas
have an id; a viewer that comes back sends the last one as Last-Event-ID.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Required, SupportsFloat, TypedDict, Unpack

import msgspec

from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.common.messages import SequenceEvent
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.row_kinds import ROW_KIND_TABLE, RowKind

#: Version of the events: incremented with every incompatible change.
_FEED_VERSION = 4
#: A seat's or a page's state is its place in these.
SEAT_STATES = ("free", "prefill", "decode", "held")
PAGE_STATES = ("free", "held", "shared", "cached")
#: A seat's numbers, in the order in which a delta's row carries them. index: which of its request's
#: sequences sits there; the others are tokens; n_computed: positions whose KV is known.
SEAT_NUMBERS = ("index", "n_prompt", "n_computed", "n_output", "max_tokens")
#: One row of "events": what happened at t, in or before step `step` (`messages.SequenceEvent`).
#: reason of "queued": the client's x-request-id.
_EVENT_COLUMNS = (
    "t",
    "step",
    "event",
    "request",
    "index",
    "seat",
    "n_prompt",
    "n_output",
    "reason",
)
#: Milliseconds after which a page reconnects.
_RETRY_MS = 1000


class _Terms(TypedDict):
    """The part of `FeedStart` that a feed's owner decides."""

    run: str  # id of the server's run
    t: float
    unix_time: float  # seconds since 1970 at t
    hz: float  # frames a second, at most
    key_frame_s: float  # seconds from one key frame to the next
    needs_key: bool  # requests need an API key
    shows_text: bool  # prompts and answers are shown
    role: str  # "admin" or "user", who sees of others' requests only occupied seats
    history_h: float  # hours that /history goes back; 0: there is none


class FeedStart(_Terms):
    """The first event of a feed; sent again when another engine runs."""

    version: int  # _FEED_VERSION
    seat_states: tuple[str, ...]  # SEAT_STATES
    page_states: tuple[str, ...]  # PAGE_STATES
    seat_numbers: tuple[str, ...]  # SEAT_NUMBERS
    event_columns: tuple[str, ...]  # _EVENT_COLUMNS
    row_kinds: list[RowKind]  # useful ones first
    info: JsonDict | None  # `common.engine_info.EngineInfo.flat`; null while no engine runs


class SeatLists(TypedDict):
    """All S seats; each list has an entry a seat."""

    state: str  # base64 of uint8[S]: the place in SEAT_STATES
    request: list[str | None]  # the request id, null for a free seat
    index: list[int]  # this and the next four: SEAT_NUMBERS
    n_prompt: list[int]
    n_computed: list[int]
    n_output: list[int]
    max_tokens: list[int]
    pages: list[int]  # KV pages that the sequence holds


class PageMap(TypedDict):
    """The pool without its trash page."""

    per_cell: int  # pages that one cell stands for, the last one for what is left
    cells: str  # base64 of uint8[C]: the place in PAGE_STATES that most pages of a cell have
    counts: dict[str, int]  # pages by state, exact
    windows: dict[int, dict[str, int]]  # the same of layers with pages of their own, by window


class PageChanges(TypedDict):
    """Differences between two `PageMap`s."""

    runs: list[list[int]]  # [first cell, cells, state]
    counts: dict[str, int]  # all of them
    windows: dict[int, dict[str, int]]  # all of them


class _CanaryCounts(TypedDict):
    checked: int  # sequences computed again with the reference kernels
    mismatched: int  # of them, those with other results


class Metrics(TypedDict):
    """Gauges, and totals since the server's start. Viewers use differences of totals, so a lost
    frame loses nothing.
    """

    seats_busy: int  # gauge, as of the newest step's plan
    waiting: int  # gauge: sequences without a seat
    waiting_tokens: int  # gauge: their prompt tokens
    predicted_wait_s: float  # gauge: of a new request
    pages_used: int  # gauge
    steps: dict[str, int]  # decode and mixed
    rows: dict[str, int]  # by `ROW_KINDS`
    preemptions: int
    canary: _CanaryCounts
    compiles: int  # steps that had to compile a program
    nan_rows: int  # rows whose logits were not finite
    restarts: int  # of the engine process
    boarded: int  # sequences that got their first seat
    cached_tokens: int  # prompt tokens found in the prefix cache
    finished: dict[str, int]  # sequences by why they ended
    rejected: dict[str, int]  # refused requests by error code
    step_s: float  # seconds of all steps, gaps included
    gap_s: float  # of them, idle time of the device
    longest_step_s: float | None  # of the steps since the frame before; null for none
    latency: JsonDict  # wait, ttft, itl -> {p50, p95, p99} of the last seconds, or null
    device: JsonDict  # `engine.common.device_use.DeviceUse`; empty before it was looked at


class KeyFrame(TypedDict):
    """The complete state of the page, which makes earlier frames unnecessary."""

    t: float
    step: int  # the newest step that is done
    state: str  # "loading", "ready", "sleeping", "restarting", "draining" or "dead"
    last_step_age_s: float  # seconds since the core's last message
    progress: JsonDict | None  # while it loads: stage, done, total
    seats: SeatLists | None  # null: there is no engine
    pages: PageMap | None  # null: not known
    metrics: Metrics
    histograms: JsonDict | None  # wait, ttft, itl -> {bounds (seconds), counts}
    notes: list[Note]  # the newest, oldest first
    outages: list[JsonDict]  # `incidents._Outage`, oldest first
    n_events: int  # events of sequences since the server's start


class Delta(TypedDict, total=False):
    """Changes since the key frame or delta before. Seats that are not listed have advanced: each
    decoding one has one more token per step.
    """

    t: Required[float]
    step: Required[int]
    n_events: Required[int]
    state: str
    last_step_age_s: float
    progress: JsonDict | None
    outages: list[JsonDict]
    seats: list[list[Any]]  # [seat, state, request, *SEAT_NUMBERS]
    pages: PageChanges
    metrics: JsonDict  # the fields of `Metrics` that have changed


class _Events(TypedDict):
    """Events of sequences since the frame before."""

    first: int  # number of the first of them, counted since the server's start
    events: list[list[str | float]]  # _EVENT_COLUMNS


class Note(TypedDict):
    """A message about the engine. A note with the code and time of an earlier one replaces it: the
    condition goes on.
    """

    level: str  # "info", "warn" or "error"
    code: str  # a key of `incident_log.KINDS`
    message: str
    t: float  # when it began
    hit: dict[str, int]  # unit -> number of affected ones
    silence_s: float | None  # seconds in which clients had no token; null: not known, or none


def with_note(notes: Sequence[Note], note: Note, most: int) -> list[Note]:
    """The notes with this one added or replaced; the newest `most` of them."""
    what = note["code"], note["t"]
    if what in [(one["code"], one["t"]) for one in notes]:
        return [note if (one["code"], one["t"]) == what else one for one in notes]
    return [*notes, note][-most:]


def changed(before: Mapping[str, object], now: Mapping[str, object]) -> JsonDict:
    """The fields of `now` with another value than before."""
    return {name: value for name, value in now.items() if before.get(name) != value}


class _Bye(TypedDict):
    """The last event of a feed that ends on purpose."""

    reason: str
    retry_ms: int  # milliseconds after which to reconnect


def tenth_ms(value: SupportsFloat | None) -> float | None:
    """Seconds to a tenth of a millisecond."""
    return None if value is None else round(float(value), 4)


def encode(name: str, data: object, id: str = "") -> bytes:
    """One server-sent event."""
    id_line = f"id: {id}\n" if id else ""
    head = f"event: {name}\n{id_line}data: "
    return head.encode() + msgspec.json.encode(data) + b"\n\n"


def decode(event: bytes) -> tuple[str, Any]:
    """(name, data) of one event."""
    fields = dict(line.split(b": ", 1) for line in event.strip().split(b"\n"))
    return fields[b"event"].decode(), msgspec.json.decode(fields[b"data"])


def hello(info: EngineInfo | None, **terms: Unpack[_Terms]) -> bytes:
    """A feed's first event."""
    data: FeedStart = {
        "version": _FEED_VERSION,
        **terms,
        "seat_states": SEAT_STATES,
        "page_states": PAGE_STATES,
        "seat_numbers": SEAT_NUMBERS,
        "event_columns": _EVENT_COLUMNS,
        "row_kinds": list(ROW_KIND_TABLE.values()),
        "info": None if info is None else info.flat(),
    }
    return encode("hello", data)


def bye(reason: str) -> bytes:
    """A feed's last event."""
    data: _Bye = {"reason": reason, "retry_ms": _RETRY_MS}
    return encode("bye", data)


def events(happened: list[SequenceEvent], first: int) -> bytes:
    """The event with these sequence events. first: the number of the first one."""
    data: _Events = {"first": first, "events": [_event_row(event) for event in happened]}
    return encode("events", data)


def _event_row(event: SequenceEvent) -> list[str | float]:
    return [round(event.t, 4), *_EVENT_FIELDS(event)]


_EVENT_FIELDS = attrgetter(
    "step", "event", "request_id", "index", "seat", "n_in", "n_out", "reason"
)
