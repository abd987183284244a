"""Incidents of an engine, recorded whether or not the page is watched, and kept for a day."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson

from jitney.dashboard.disk_log import DiskLog, LogKeeper
from jitney.dashboard.notes import Notes
from jitney.dashboard.sse import Note
from jitney.engine.common.database import Database

#: Seconds that incidents are stored; most of one kind; most characters of a message.
_KEEP_S, _MOST_OF_KIND, _MOST_LETTERS = 86400.0, 400, 1000
#: Larger than every id.
_NEWEST = 2**62
#: Kind of incident (the code of its note) -> the change that makes it rarer or shorter.
KINDS = {
    "outage": "If it happens again, look for the cause in the server's log; a killed process often "
    "means too little memory: lower memory_share or max_seats.",
    "dead": "Read the reason in the server's log, then start the server again under a process "
    "manager that restarts it.",
    "refusals": "Add an engine behind a fleet, or let more requests wait (max_waiting_requests, "
    "max_predicted_wait_s); clients should honour Retry-After.",
    "preemption_storm": "Lower max_seats, shorten contexts, or give the KV cache more memory "
    "(memory_share).",
    "compile": "Run `jitney compile MODEL` before a start, so that every step is in the cache.",
    "nan": "Run `jitney doctor` and check the model's files; if one request causes it, look at "
    "its adapter.",
    "canary": "Run `jitney doctor`; until it is clean, serve with --kernels reference.",
    "kernels_out": "Run `jitney doctor` and report its output; the reference kernels serve until "
    "then.",
    "disk_full": "Free space on the disk, or move data_dir and record to another one.",
    "store": "Look for the cause in the server's log; free space, or move data_dir to another "
    "disk. A damaged store lies beside the new one.",
    "webhook": "Look at the receiver: it should answer 2xx within ten seconds; the server's log "
    "names the batch or job.",
    "sleep": "Nothing, if it was meant; POST /wake_up wakes the engine.",
    "drain": "Nothing, if it was meant; a longer drain_s lets long answers end.",
}
#: Values by column.
type _Row = dict[str, Any]

_TABLES = """
CREATE TABLE incidents (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    code TEXT NOT NULL,
    level TEXT NOT NULL,
    message TEXT NOT NULL,
    t REAL NOT NULL,
    hit TEXT NOT NULL,
    silence_s REAL
);
CREATE INDEX incidents_by_code ON incidents (code, number);
CREATE INDEX incidents_by_time ON incidents (t);
"""
#: A renewed incident keeps its number and its time.
_PUT = """
INSERT INTO incidents (name, code, level, message, t, hit, silence_s)
VALUES (:name, :code, :level, :message, :t, :hit, :silence_s)
ON CONFLICT (name) DO UPDATE
SET message = excluded.message, hit = excluded.hit, silence_s = excluded.silence_s
"""
_FORGET_MOST = """
DELETE FROM incidents WHERE number IN (
    SELECT number FROM incidents WHERE code = ? ORDER BY number DESC LIMIT -1 OFFSET ?
)
"""


class KeptIncident(msgspec.Struct):
    """One incident, in the page's form."""

    #: Larger for newer ones, also over restarts of the server.
    id: int
    code: str
    level: str
    message: str
    #: When it began, seconds since 1970.
    t: float
    #: Names of units to counts.
    hit: dict[str, int]
    #: Seconds in which clients had no token; None: not known, or none.
    silence_s: float | None
    #: The advice for its kind, see `KINDS`.
    advice: str


class IncidentTable(Database):
    """The table of incidents."""

    VERSIONS = (_TABLES,)

    def check(self) -> None:
        self.page(1, _NEWEST, 0.0)

    def put(self, rows: Sequence[_Row], now: float) -> None:
        """Add incidents, or renew those of the same name; forget what is too old or too much. now:
        seconds since 1970.
        """
        with self.transaction():
            self.db.executemany(_PUT, rows)
            self.db.execute("DELETE FROM incidents WHERE t < ?", (now - _KEEP_S,))
            for code in {row["code"] for row in rows}:
                self.db.execute(_FORGET_MOST, (code, _MOST_OF_KIND))

    def page(self, limit: int, before: int, since: float) -> list[KeptIncident]:
        """The newest `limit` incidents that began after `since`, of those with an id below
        `before`, newest first. Raises ValueError for what was not written here.
        """
        query = """SELECT number AS id, code, level, message, t, hit, silence_s FROM incidents
            WHERE t >= ? AND number < ? ORDER BY number DESC LIMIT ?"""
        return [_incident(dict(row)) for row in self.db.execute(query, (since, before, limit))]


def _incident(row: _Row) -> KeptIncident:
    row["hit"] = orjson.loads(row["hit"])
    return msgspec.convert(row | {"advice": KINDS.get(row["code"], "")}, KeptIncident)


class _Keeper(LogKeeper[IncidentTable]):
    DATABASE = "incidents.sqlite3"
    CONTENTS = "incidents"
    TABLES = IncidentTable


class IncidentLog(DiskLog[IncidentTable]):
    """Records the incidents of a day. notes: of the engine."""

    FOLDER = "incidents"
    PAUSE_S = 1.0
    KEEPER = _Keeper

    def __init__(self, notes: Notes, data_dir: Path | None):
        super().__init__(notes.client, data_dir)
        self._notes = notes
        self._n_notes = 0
        #: Prefix of the names of this server's incidents.
        self._run = uuid.uuid4().hex
        #: Rows that could not be written yet, by name.
        self._unwritten: dict[str, _Row] = {}

    async def page(self, limit: int, before: int = _NEWEST) -> list[KeptIncident]:
        """See `IncidentTable.page`, of the last day. Raises HttpError 503 while the disk fails, and
        404 while nothing is recorded.
        """
        return await self.ask(IncidentTable.page, limit, before, time.time() - _KEEP_S)

    async def look(self, keeper: LogKeeper[IncidentTable]) -> None:
        now, wall = time.monotonic(), time.time()
        self._notes.look(now)
        for note in self._notes.since(self._n_notes):
            row = self._row(note, wall - now)
            self._unwritten[row["name"]] = row
        self._n_notes = self._notes.n
        if not self._unwritten:
            return
        rows = list(self._unwritten.values())[-_MOST_OF_KIND:]
        self._unwritten = {row["name"]: row for row in rows}
        await keeper.do(IncidentTable.put, rows, wall)
        self._unwritten.clear()

    def _row(self, note: Note, offset: float) -> _Row:
        """A note as a row. offset: of the time of day from the monotonic clock, seconds."""
        message = note["message"][:_MOST_LETTERS]
        return {
            **note,
            "name": f"{self._run} {note['code']} {note['t']}",
            "message": message.encode(errors="replace").decode(),  # SQLite refuses surrogates
            "t": round(note["t"] + offset, 3),
            "hit": orjson.dumps(note["hit"]).decode(),
        }
