"""Incidents of an engine, recorded whether or not the page is watched, and kept for a day."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import orjson

from jitney.dashboard.notes import Notes, make_note
from jitney.dashboard.snapshot import Recent, Snapshot
from jitney.dashboard.sse import Note
from jitney.engine.common.errors import ConfigError
from jitney.engine.server import (
    Database,
    DatabaseKeeper,
    EngineClient,
    HttpError,
    StoreUnavailable,
)

_log = logging.getLogger("jitney.dashboard")

#: Seconds between two looks at the engine.
_LOOK_S = 1.0
#: Seconds that incidents are kept; the most of one kind; most letters of a message.
_KEEP_S, _MOST_OF_KIND, _MOST_LETTERS = 86400.0, 400, 1000
#: Larger than every id.
_NEWEST = 2**62
#: The folder in `data_dir`.
_FOLDER = "incidents"
#: Every kind of incident, by the code of its note, and the change that makes it rarer or shorter.
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
    "sleep": "Nothing, if it was meant; POST /wake_up wakes the engine.",
    "drain": "Nothing, if it was meant; a longer drain_s lets long answers end.",
}
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
    """One incident as the page gets it."""

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
    #: Of its kind, see `KINDS`.
    advice: str


class IncidentTable(Database):
    """The table of incidents."""

    VERSIONS = (_TABLES,)

    def check(self) -> None:
        self.page(1, _NEWEST, 0.0)

    def put(self, rows: Sequence[dict[str, Any]], now: float) -> None:
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


def _incident(row: dict[str, Any]) -> KeptIncident:
    row["hit"] = orjson.loads(row["hit"])
    return msgspec.convert(row | {"advice": KINDS.get(row["code"], "")}, KeptIncident)


class _Keeper(DatabaseKeeper[IncidentTable]):
    """The table on the disk."""

    DATABASE = "incidents.sqlite3"
    CONTENTS = "incidents"

    def open_database(self) -> IncidentTable:
        return IncidentTable(self.folder / self.DATABASE)


class _MemoryKeeper(_Keeper):
    """The table of a server that has no folder: it ends with the server."""

    def open_database(self) -> IncidentTable:
        return IncidentTable(Path(":memory:"))


async def _open(data_dir: Path | None) -> _Keeper:
    if data_dir is not None:
        try:
            return await _Keeper.open(data_dir / _FOLDER)
        except (ConfigError, OSError) as error:
            _log.warning("incidents are kept until the server ends only: %s", error)
    return _MemoryKeeper(Path())


class IncidentLog:
    """Looks at an engine once a second while `at_work`, and keeps the incidents. data_dir: of the
    server; None: they are kept in memory.
    """

    def __init__(self, client: EngineClient, data_dir: Path | None):
        self._client = client
        self._data_dir = data_dir
        self._opening: asyncio.Task[_Keeper] | None = None
        self._notes = Notes()
        #: In the names of this server's incidents.
        self._run = uuid.uuid4().hex
        self._last_step = -1
        #: When the engine was first seen asleep, monotonic; the drain was noted.
        self._asleep_at: float | None = None
        self._told_drain = False
        #: Rows that could not be written yet, by name.
        self._unwritten: dict[str, dict[str, Any]] = {}

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Incidents are recorded as long as the block runs."""
        self._opening = asyncio.create_task(_open(self._data_dir))
        recording = asyncio.create_task(self._record())
        try:
            yield
        finally:
            recording.cancel()
            await asyncio.gather(recording, return_exceptions=True)
            keeper = await self._opening
            with contextlib.suppress(StoreUnavailable):
                await self._look(keeper)  # how it ended
            await keeper.close()
            self._opening = None

    async def page(self, limit: int, before: int = _NEWEST) -> list[KeptIncident]:
        """See `IncidentTable.page`, of the last day. Raises HttpError 503 while the disk fails, and
        404 while nothing is recorded.
        """
        if self._opening is None:
            raise HttpError(404, "this page records no incidents", code="not_found")
        keeper = await asyncio.shield(self._opening)
        return await keeper.do(IncidentTable.page, limit, before, time.time() - _KEEP_S)

    async def _record(self) -> None:
        """Look until cancelled, or until a look fails, which is logged."""
        assert self._opening is not None
        try:
            keeper = await asyncio.shield(self._opening)
            while True:
                with contextlib.suppress(StoreUnavailable):  # it was logged; written when possible
                    await self._look(keeper)
                await asyncio.sleep(_LOOK_S)
        except Exception:
            _log.exception("incidents are not recorded any more")

    async def _look(self, keeper: _Keeper) -> None:
        """Record incidents since the look before. Raises StoreUnavailable."""
        now, wall = time.monotonic(), time.time()
        for note in self._new_notes(now):
            row = self._row(note, wall - now)
            self._unwritten[row["name"]] = row
        if not self._unwritten:
            return
        rows = list(self._unwritten.values())[-_MOST_OF_KIND:]
        try:
            await keeper.do(IncidentTable.put, rows, wall)
        except StoreUnavailable:
            self._unwritten = {row["name"]: row for row in rows}
            raise
        self._unwritten.clear()

    def _new_notes(self, now: float) -> Iterable[Note]:
        history = self._client.history
        records = history.records.since(self._last_step)
        if len(records):
            self._last_step = int(records[-1]["step"])
        notes = self._notes.compare(Snapshot.of(self._client, records, Recent(), now), records)
        if history.incidents.drain is not None:  # the end of the core is part of the server's
            notes = [note for note in notes if note["code"] != "dead"]
        return [*notes, *self._sleep_notes(now), *self._drain_notes()]

    def _sleep_notes(self, now: float) -> Iterable[Note]:
        """The engine fell asleep, or was woken."""
        asleep, began = self._client.state == "sleeping", self._asleep_at
        if asleep and began is None:
            self._asleep_at = now
            yield make_note(now, "info", "sleep", "the engine was sent to sleep")
        elif not asleep and began is not None:
            self._asleep_at = None
            message = f"the engine slept for {now - began:.0f} s"
            yield make_note(began, "info", "sleep", message, silence_s=now - began)

    def _drain_notes(self) -> Iterable[Note]:
        """The server was told to stop."""
        drain = self._client.history.incidents.drain
        if drain is not None and not self._told_drain:
            self._told_drain = True
            t, n_open = drain
            message = f"the server was told to stop; open sequences: {n_open}"
            yield make_note(t, "info", "drain", message, {"open": n_open})

    def _row(self, note: Note, offset: float) -> dict[str, Any]:
        """A note as a row. offset: of the time of day from the monotonic clock, seconds."""
        message = note["message"][:_MOST_LETTERS]
        return {
            **note,
            "name": f"{self._run} {note['code']} {note['t']}",
            "message": message.encode(errors="replace").decode(),  # SQLite refuses surrogates
            "t": round(note["t"] + offset, 3),
            "hit": orjson.dumps(note["hit"]).decode(),
        }
