"""The history of hours: an engine's figures in bins of ten seconds, and the records of ended
requests. Stored on disk, over restarts, without prompts and answers.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from jitney.dashboard.disk_log import DiskLog, LogKeeper
from jitney.dashboard.timeline import Window
from jitney.engine.common.database import Database, StoreUnavailable
from jitney.engine.common.request_record import RequestRecord, SeatStay
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.slices import TimeSlices
from jitney.engine.server import EngineClient, Identity

#: Length of a bin in seconds, and delay after its end before it is written, since its last step is
#: reported a little later.
_BIN_S, _SLACK_S = 10.0, 1.0
#: Most requests that are stored in all, and per write (the newest).
_MOST_REQUESTS, _MOST_OF_LOOK = 50_000, 2000
#: Most requests in an answer about seats.
_MOST_SEATED = 5000
#: Most bins that are held in memory while the disk fails.
_MOST_UNWRITTEN = 360
#: Requests that are encoded between two pauses.
_ENCODED = 16
#: Columns of bins by how bins are merged: summed; maximum (null: unknown); mean over their steps.
_SUMS = (
    "seconds",
    "steps",
    "step_s",
    "gap_s",
    "floor_s",
    "boarded",
    "finished",
    "preempted",
    "compiled",
    "cached_tokens",
    "refused",
    "rows_prefill",
    "rows_decode",
    "rows_accepted",
    "rows_padding",
    "rows_recomputed",
    "rows_past_end",
    "rows_cancelled",
    "rows_rejected",
)
_HIGHEST = (
    "longest_step_s",
    "waiting",
    "pages_used",
    "wait_p50",
    "wait_p95",
    "wait_p99",
    "ttft_p50",
    "ttft_p95",
    "ttft_p99",
    "itl_p50",
    "itl_p95",
    "itl_p99",
)
_MEAN = "seats_busy"
_COLUMNS = (*_SUMS, *_HIGHEST, _MEAN)
_ROWS = "rows_"
#: t: begin of a bin, and end of a request, seconds since 1970. words: what a search looks at, lower
#: case. shift: what turns a record's times into seconds since 1970.
_TABLES = f"""
CREATE TABLE bins (t REAL PRIMARY KEY, {", ".join(f"{name} REAL" for name in _COLUMNS)});
CREATE TABLE requests (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    t REAL NOT NULL,
    name TEXT NOT NULL,
    place INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    refused INTEGER NOT NULL,
    words TEXT NOT NULL,
    adapter TEXT NOT NULL,
    shift REAL NOT NULL,
    record BLOB NOT NULL
);
CREATE INDEX requests_by_name ON requests (name, place);
CREATE INDEX requests_by_time ON requests (t);
"""
#: When a request first boarded, seconds since 1970; null: never. 0: written before this was kept.
_BEGAN = "ALTER TABLE requests ADD COLUMN began REAL DEFAULT 0;"
_PUT_BIN = f"""
INSERT OR REPLACE INTO bins (t, {", ".join(_COLUMNS)})
VALUES (:t, {", ".join(f":{name}" for name in _COLUMNS)})
"""
_PUT_REQUEST = """
INSERT INTO requests (t, name, place, tenant, refused, words, adapter, shift, record, began)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_FORGET_MOST = "DELETE FROM requests WHERE number <= (SELECT MAX(number) FROM requests) - ?"
#: Bins in equal parts of a time; SQLite adds them up without the interpreter.
_MERGED = f"""
SELECT CAST((t + :half - :start) / :width AS INTEGER) AS place,
    {", ".join(f"SUM({name}) AS {name}" for name in _SUMS)},
    {", ".join(f"MAX({name}) AS {name}" for name in _HIGHEST)},
    SUM({_MEAN} * steps) / NULLIF(SUM(steps), 0) AS {_MEAN}
FROM bins WHERE t + :half >= :start AND t + :half < :end GROUP BY place ORDER BY place
"""
_FIND = """
SELECT number, t, adapter, shift, record FROM requests
WHERE number < :before AND t < :until AND (:refused IS NULL OR refused = :refused)
    AND (:tenant IS NULL OR tenant = :tenant) AND (:search = '' OR INSTR(words, :search))
ORDER BY number DESC LIMIT :limit
"""
#: Requests that may have been seated between two times.
_SEATED = """
SELECT number, t, adapter, shift, record FROM requests WHERE t > ? AND began < ?
ORDER BY t DESC LIMIT ?
"""
#: Time from which on all requests are stored.
_KEPT_FROM = """
SELECT CASE WHEN COUNT(*) < ? THEN (SELECT MIN(t) FROM bins) ELSE MIN(t) END FROM requests
"""
#: A request's values, in the order of `_PUT_REQUEST`.
type _Row = tuple[Any, ...]

_decode = msgspec.msgpack.Decoder(RequestRecord).decode
_encode = msgspec.msgpack.Encoder().encode


class _KeptRequest(NamedTuple):
    """The stored record of an ended request."""

    #: Larger for those that ended later, also over restarts.
    number: int
    #: Its times are seconds since 1970, but see `by_clock`.
    record: RequestRecord
    #: Name of its adapter; empty: none.
    adapter: str

    def by_clock(self, offset: float) -> _KeptRequest:
        """The request with times of another clock. offset: time since 1970 minus that clock."""
        return self._replace(record=_shifted(self.record, -offset))


class Search(NamedTuple):
    """A search for stored requests."""

    #: At most so many, of those with a number below `before` that ended before `until`, seconds
    #: since 1970.
    limit: int
    before: int
    until: float
    #: Only refused requests, or only others; None: all.
    refused: bool | None
    #: A part of the request's id, x-request-id, user or error code, lower case.
    words: str
    #: The viewer.
    identity: Identity


class HistoryTables(Database):
    """Bins and requests."""

    VERSIONS = (_TABLES, _BEGAN)

    def check(self) -> None:
        self.value("SELECT MAX(t) FROM bins")
        self.value("SELECT MAX(record) FROM requests WHERE number = 0")

    def put(self, bins: Sequence[JsonDict], requests: Sequence[_Row], oldest: float) -> None:
        """Add bins (`_COLUMNS` and t) and requests; forget what is older than `oldest`, seconds
        since 1970, or too much.
        """
        with self.transaction():
            self.db.executemany(_PUT_BIN, bins)
            self.db.executemany(_PUT_REQUEST, requests)
            for table in ("bins", "requests"):
                self.db.execute(f"DELETE FROM {table} WHERE t < ?", (oldest,))
            self.db.execute(_FORGET_MOST, (_MOST_REQUESTS,))

    def merged(self, start: float, end: float, parts: int) -> list[dict[str, Any]]:
        """The bins between two times, seconds since 1970, in `parts` equal parts: `_COLUMNS` and
        the place of each part that is known, in order.
        """
        width = (end - start) / parts
        values = {"start": start, "end": end, "width": width, "half": _BIN_S / 2}
        return [dict(row) for row in self.db.execute(_MERGED, values)]

    def find(self, search: Search) -> list[_KeptRequest]:
        """The newest of those that a search finds, newest first. Raises ValueError for what was
        not written here.
        """
        identity = search.identity
        values = search._asdict() | {
            "search": search.words,
            "tenant": None if identity.is_admin else identity.tenant,
        }
        del values["identity"], values["words"]
        return [_stored_request(row) for row in self.db.execute(_FIND, values)]

    def seated(self, start: float, end: float) -> tuple[list[_KeptRequest], float]:
        """Requests that may have been seated between two times, seconds since 1970: the newest
        `_MOST_SEATED` by their end; and the time from which on the list is complete.
        """
        rows = self.db.execute(_SEATED, (start, end, _MOST_SEATED)).fetchall()
        kept_from = self.value(_KEPT_FROM, _MOST_REQUESTS)
        kept_from = math.inf if kept_from is None else kept_from
        if len(rows) == _MOST_SEATED:
            kept_from = max(kept_from, rows[-1]["t"])
        return [_stored_request(row) for row in rows], kept_from

    def named(self, name: str, place: int) -> _KeptRequest | None:
        """One sequence of a request."""
        query = """SELECT number, t, adapter, shift, record FROM requests
            WHERE name = ? AND place = ? ORDER BY number DESC LIMIT 1"""
        row = self.db.execute(query, (name, place)).fetchone()
        return None if row is None else _stored_request(row)


def _stored_request(row: Any) -> _KeptRequest:
    record = _shifted(_decode(row["record"]), row["shift"])
    return _KeptRequest(row["number"], record, row["adapter"])


def _shifted(record: RequestRecord, by: float) -> RequestRecord:
    """The record with later times."""

    def later(t: float | None) -> float | None:
        return None if t is None else t + by

    stays = [
        msgspec.structs.replace(
            stay, start=stay.start + by, first_token=later(stay.first_token), end=later(stay.end)
        )
        for stay in record.stays
    ]
    return msgspec.structs.replace(
        record,
        arrival=record.arrival + by,
        boarded=later(record.boarded),
        first_token=later(record.first_token),
        finished=later(record.finished),
        stays=stays,
    )


class _Keeper(LogKeeper[HistoryTables]):
    DATABASE = "history.sqlite3"
    CONTENTS = "history"
    TABLES = HistoryTables


class HistoryLog(DiskLog[HistoryTables]):
    """Records the history of hours. hours: its length; 0: nothing is recorded."""

    FOLDER = "history"
    PAUSE_S = _BIN_S
    KEEPER = _Keeper

    def __init__(self, client: EngineClient, data_dir: Path | None, hours: float):
        super().__init__(client, data_dir)
        self.hours = hours
        self._slices = TimeSlices()
        #: Monotonic time up to which bins exist.
        self._made_to = time.monotonic()
        #: Rows not written yet, and `_ended`: records without rows, added by the engine's history.
        self._bins: deque[JsonDict] = deque(maxlen=_MOST_UNWRITTEN)
        self._rows: deque[_Row] = deque(maxlen=_MOST_OF_LOOK)
        self._ended: deque[RequestRecord] = deque(maxlen=_MOST_OF_LOOK)
        if hours:
            client.history.listeners.append(self._ended.append)

    async def look(self, keeper: LogKeeper[HistoryTables]) -> None:
        wall = time.time()
        offset = wall - time.monotonic()
        await self._slices.result(self._make_bin(offset))
        await self._slices.result(self._make_rows(offset))
        bins, rows = list(self._bins), list(self._rows)
        self._bins.clear()
        self._rows.clear()
        try:
            # Not cancelled with this call: the write must complete.
            await keeper.do(HistoryTables.put, bins, rows, wall - 3600 * self.hours)
        except StoreUnavailable:
            self._bins.extend(bins)
            self._rows.extend(rows)
            raise

    def _make_bin(self, offset: float) -> Generator[None, None, None]:
        """Add a bin of the time since the last one."""
        start, end = self._made_to, time.monotonic() - _SLACK_S
        if end <= start:
            return
        window = Window.shown(self.client.history, start, end, end, self.client.info)
        columns = yield from window.binned(1)
        values = {name: column[0] for name, column in columns.items() if isinstance(column, list)}
        values |= {_ROWS + kind: column[0] for kind, column in columns["rows"].items()}
        values |= {"t": window.start + offset, "seconds": columns["width"]}
        # Only now: a call that is cancelled before leaves the bin to the next one.
        self._made_to = end
        self._bins.append(dict.fromkeys(_COLUMNS) | values)

    def _make_rows(self, offset: float) -> Generator[None, None, None]:
        while self._ended:
            for _ in range(min(_ENCODED, len(self._ended))):
                self._rows.append(self._row(self._ended.popleft(), offset))
            yield

    def _row(self, record: RequestRecord, offset: float) -> _Row:
        lean = msgspec.structs.replace(
            record,
            client_id=_text(record.client_id),
            user=_text(record.user),
            message=_text(record.message),
            chunks=[],
            tokens=None,
            token_times=None,
        )
        words = "\n".join((lean.request_id, lean.client_id, lean.user, lean.code))
        return (
            (lean.finished or 0.0) + offset,
            lean.request_id,
            lean.index,
            lean.tenant,
            lean.refused,
            words.lower(),
            self.client.history.adapter_of(lean),
            offset,
            _encode(lean),
            None if lean.boarded is None else lean.boarded + offset,
        )

    @property
    def is_kept(self) -> bool:
        """Whether a history of hours is available now."""
        return bool(self.hours) and self.is_at_work

    async def older(
        self, limit: int, before: int, refused: bool | None, words: str, identity: Identity
    ) -> tuple[list[_KeptRequest], int | None]:
        """Requests that the engine's own history has let go of, newest first, see `Search`; and the
        number to go on from, None at the end. Their times are those of the monotonic clock.
        """
        history, offset = self.client.history, time.time() - time.monotonic()
        until = history.oldest_end + offset
        shown: list[_KeptRequest] = []
        while True:
            search = Search(limit - len(shown) + 1, before, until, refused, words, identity)
            rows = await self.ask(HistoryTables.find, search)
            has_more = len(rows) == search.limit
            for one in rows[: search.limit - 1]:
                before = one.number
                # The system clock differs from when a request was written: `until` is not exact.
                if history.find(one.record.request_id, one.record.index) is None:
                    shown.append(one.by_clock(offset))
            if not has_more or len(shown) == limit:
                return shown, before if has_more else None

    async def named(self, name: str, place: int) -> _KeptRequest | None:
        """One sequence of a request, with times of the monotonic clock."""
        stored = await self.ask(HistoryTables.named, name, place)
        return None if stored is None else stored.by_clock(time.time() - time.monotonic())

    async def stays(self, start: float, end: float) -> tuple[list[SeatStay], float]:
        """The stays in seats between two times, monotonic, of requests that have ended, by their
        beginning; and from when on all are known. Raises HttpError 404 and 503 as `bins` does.
        """
        offset = time.time() - time.monotonic()
        stored, kept_from = await self.ask(HistoryTables.seated, start + offset, end + offset)
        records = [one.by_clock(offset).record for one in stored]
        stays = [stay for record in records for stay in record.stays_within(start, end)]
        stays.sort(key=lambda pair: pair[1].start)
        return stays, min(end, kept_from - offset)

    async def bins(self, start: float, end: float, parts: int) -> JsonDict:
        """The history between two times, monotonic, in at most `parts` equal parts, none shorter
        than a bin: columns as `Window.binned` has them, of the parts that are known, and the
        `seconds` of each that are. Raises HttpError 404 where no history is kept, and 503 while the
        disk fails.
        """
        offset = time.time() - time.monotonic()
        start = max(start, time.monotonic() - 3600 * self.hours)
        end = max(end, start + _BIN_S)
        parts = max(1, min(parts, int((end - start) / _BIN_S)))
        rows = await self.ask(HistoryTables.merged, start + offset, end + offset, parts)
        width = (end - start) / parts
        columns = {name: [part[name] for part in rows] for name in (*_SUMS, *_HIGHEST, _MEAN)}
        kinds = [name for name in columns if name.startswith(_ROWS)]
        return {
            "t": [round(start + width * part["place"], 3) for part in rows],
            "width": round(width, 6),
            "rows": {name.removeprefix(_ROWS): columns.pop(name) for name in kinds},
            **columns,
        }


def _text(words: str) -> str:
    """Words without surrogates, which are no UTF-8."""
    return words.encode(errors="replace").decode()
