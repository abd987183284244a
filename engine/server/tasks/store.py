"""The SQLite file of files, batches, lines and jobs. Every function here, in `batch_rows` and
`job_rows` blocks: it runs in the one thread that owns the store. Writes survive a kill; work in
progress is repeated.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from dataclasses import fields
from typing import Any

import msgspec
import orjson

from jitney.engine.common.database import Database
from jitney.engine.common.errors import RequestError
from jitney.engine.config import ServerSection
from jitney.engine.server.http.errors import HttpError
from jitney.engine.server.tasks.records import Batch, Job, StoredFile, Task

type Record = StoredFile | Batch | Job

_FIRST_TABLES = """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    name TEXT NOT NULL,
    size INTEGER NOT NULL,
    created_at INTEGER NOT NULL
);
CREATE INDEX files_by_owner ON files (owner, number);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    metadata TEXT NOT NULL,
    webhook_url TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    status TEXT NOT NULL,
    times TEXT NOT NULL,
    output_file_id TEXT,
    error_file_id TEXT,
    faults TEXT NOT NULL,
    total INTEGER NOT NULL,
    completed INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    told_at REAL
);
CREATE INDEX batches_by_owner ON batches (owner, number);
CREATE INDEX batches_to_tell ON batches (told_at) WHERE told_at IS NOT NULL;
CREATE TABLE lines (
    batch_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    start INTEGER NOT NULL,
    size INTEGER NOT NULL,
    outcome INTEGER,
    answer BLOB,
    PRIMARY KEY (batch_id, number),
    UNIQUE (batch_id, custom_id)
);
CREATE INDEX open_lines ON lines (batch_id, number) WHERE outcome IS NULL;
"""
_JOBS = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    metadata TEXT NOT NULL,
    webhook_url TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    status TEXT NOT NULL,
    times TEXT NOT NULL,
    body BLOB NOT NULL,
    answer BLOB,
    repeat_key TEXT,
    digest TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    told_at REAL,
    UNIQUE (owner, repeat_key)
);
CREATE INDEX jobs_by_owner ON jobs (owner, number);
CREATE INDEX jobs_to_tell ON jobs (told_at) WHERE told_at IS NOT NULL;
"""
_ANSWER_BYTES = """
ALTER TABLE batches ADD COLUMN answer_bytes INTEGER NOT NULL DEFAULT 0;
UPDATE batches SET answer_bytes = (
    SELECT COALESCE(SUM(LENGTH(answer)), 0) FROM lines WHERE batch_id = batches.id
);
"""
#: Bytes of a job, as SQL.
_JOB_BYTES = "LENGTH(body) + COALESCE(LENGTH(answer), 0)"
#: Bytes stored for an owner: files, answers of open batches, and jobs.
_KEPT_BYTES = f"""
SELECT COALESCE(SUM(size), 0) FROM (
    SELECT SUM(size) AS size FROM files WHERE owner = :owner
    UNION ALL SELECT SUM(answer_bytes) FROM batches WHERE owner = :owner
    UNION ALL SELECT SUM({_JOB_BYTES}) FROM jobs WHERE owner = :owner
)
"""
_ENDED = ", ".join(f"'{status}'" for status in Task.ENDED)
#: Tasks that are not over, as SQL.
OPEN = f"status NOT IN ({_ENDED})"
#: Tasks that may be deleted, as SQL: ended ones without a pending webhook message.
_FORGETTABLE = f"status IN ({_ENDED}) AND told_at IS NULL"
#: Columns that are JSON.
_JSON = {"metadata", "times", "faults"}


class StorageFull(HttpError):
    """A key is at its limit of files or of stored bytes."""

    def __init__(self, reason: str, param: str | None = None):
        super().__init__(400, f"{reason}; delete some files", code="storage_full", param=param)


class TaskStore(Database):
    """The tables, and operations common to them: each row belongs to an owner."""

    VERSIONS = (_FIRST_TABLES, _JOBS, _ANSWER_BYTES)

    def check(self) -> None:
        self.unfinished()

    # Rows of any table.

    def insert(self, record: Record, **columns: Any) -> None:
        """Add a record, with further columns that are not its fields."""
        columns |= {field.name: getattr(record, field.name) for field in fields(record)}
        columns = {name: _column(value) for name, value in columns.items()}
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        query = f"INSERT INTO {record.TABLE} ({names}) VALUES ({marks})"
        self.db.execute(query, list(columns.values()))

    def find[R: Record](self, kind: type[R], id: str, owner: str | None = None) -> R | None:
        """The record with that id, if it belongs to this owner (None: to any)."""
        query = f"SELECT {_names(kind)} FROM {kind.TABLE} WHERE id = ? AND owner = IFNULL(?, owner)"
        row = self.db.execute(query, (id, owner)).fetchone()
        return None if row is None else _record(kind, row)

    def page[R: Record](
        self,
        kind: type[R],
        owner: str | None,
        *,
        after: str = "",
        limit: int,
        newest_first: bool = True,
        **columns: Any,
    ) -> tuple[list[R], bool]:
        """A page of an owner's records (None: any owner) after the id `after`, and whether more
        follow; empty for an unknown id. columns: values of the rows. Jobs are read without their
        answers, which may exceed the memory.
        """
        values = {"owner": owner, "after": after, "limit": limit + 1} | columns
        belongs = "TRUE" if owner is None else "owner = :owner"
        conditions = [belongs, *(f"{name} = :{name}" for name in columns)]
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        if after:
            last = f"SELECT number FROM {kind.TABLE} WHERE id = :after AND {belongs}"
            conditions.append(f"number {sign} ({last})")
        query = f"""SELECT {_short_names(kind)} FROM {kind.TABLE}
            WHERE {" AND ".join(conditions)} ORDER BY number {order} LIMIT :limit"""
        rows = self.db.execute(query, values).fetchall()
        return [_record(kind, row) for row in rows[:limit]], len(rows) > limit

    # Files.

    def check_room(self, owner: str, server: ServerSection, size: int = 0) -> None:
        """Raise StorageFull if an owner has too many files, or no room for this size."""
        count = self.value("SELECT COUNT(*) FROM files WHERE owner = ?", owner)
        if count >= server.key_files:
            raise StorageFull(f"one key may have {server.key_files} files (key_files)", "file")
        self.check_bytes(owner, server.key_file_bytes, size, "file")

    def check_bytes(self, owner: str, most: int, size: int = 0, param: str | None = None) -> None:
        """Raise StorageFull, blaming a field, if an owner has no room for `size` more bytes."""
        n_bytes = self.n_bytes(owner)
        if n_bytes + size > most or n_bytes >= most:
            raise StorageFull(
                f"one key's files, jobs and answers may have {most} bytes (key_file_bytes)", param
            )

    def n_bytes(self, owner: str) -> int:
        return self.db.execute(_KEPT_BYTES, {"owner": owner}).fetchone()[0]

    def file_ids(self) -> set[str]:
        return {row["id"] for row in self.db.execute("SELECT id FROM files")}

    def delete_file(self, file: StoredFile) -> str:
        """Delete a file's record. If an open batch needs it, returns that batch's id instead."""
        with self.transaction():
            query = f"SELECT id FROM batches WHERE input_file_id = ? AND owner = ? AND {OPEN}"
            batch_id = self.value(query, file.id, file.owner)
            if batch_id is None:
                self.db.execute("DELETE FROM files WHERE id = ?", (file.id,))
            return batch_id or ""

    # Batches and jobs.

    def unfinished(self) -> list[Task]:
        """Open batches and jobs, the oldest of each first; jobs without their answers."""
        tasks: list[Task] = []
        for kind in (Batch, Job):
            query = f"SELECT {_short_names(kind)} FROM {kind.TABLE} WHERE {OPEN} ORDER BY number"
            tasks += [_record(kind, row) for row in self.db.execute(query)]
        return tasks

    def check_open(self, task: Task, most: int, setting: str, retry_after: float) -> None:
        """Raise RequestError if the task's owner has `most` open tasks of its kind."""
        query = f"SELECT COUNT(*) FROM {task.TABLE} WHERE owner = ? AND {OPEN}"
        if self.value(query, task.owner) >= most:
            raise RequestError(
                f"one key may have {most} {task.TABLE} under way ({setting})",
                code="rate_limit",
                retry_after=retry_after,
            )

    def move(
        self,
        kind: type[Task],
        id: str,
        sources: Collection[str],
        status: str,
        now: int,
        **columns: Any,
    ) -> bool:
        """Change a task's status from one of `sources`, and other columns. False if it has another
        status, or is unknown (in a new store after damage). The end of a task with a URL makes its
        webhook message due. Part of the caller's transaction.
        """
        query = f"SELECT status, times, webhook_url FROM {kind.TABLE} WHERE id = ?"
        row = self.db.execute(query, (id,)).fetchone()
        if row is None or row["status"] not in sources:
            return False
        columns |= {"status": status, "times": orjson.loads(row["times"]) | {status: now}}
        if status in kind.ENDED and row["webhook_url"]:
            columns["told_at"] = now
        changes = ", ".join(f"{name} = ?" for name in columns)
        values = [_column(value) for value in columns.values()]
        self.db.execute(f"UPDATE {kind.TABLE} SET {changes} WHERE id = ?", [*values, id])
        return True

    def forget_ended(self, kind: type[Task], owner: str, keep: int) -> None:
        """Delete an owner's ended tasks without pending webhooks, except the newest `keep`."""
        query = f"""DELETE FROM {kind.TABLE} WHERE number IN (
            SELECT number FROM {kind.TABLE}
            WHERE owner = ? AND {_FORGETTABLE}
            ORDER BY number DESC LIMIT -1 OFFSET ?)"""
        self.db.execute(query, (owner, keep))

    def make_room(self, owner: str, size: int, most_bytes: int) -> None:
        """Delete an owner's oldest ended jobs until `size` fits. If it cannot fit, delete none and
        raise StorageFull.
        """
        missing = self.n_bytes(owner) + size - most_bytes
        if missing <= 0:
            return
        query = f"""SELECT number, {_JOB_BYTES} FROM jobs
            WHERE owner = ? AND {_FORGETTABLE} ORDER BY number"""
        forgotten: list[tuple[int]] = []
        for number, n_bytes in self.db.execute(query, (owner,)).fetchall():
            if missing > 0:
                forgotten.append((number,))
                missing -= n_bytes
        if missing > 0:
            self.check_bytes(owner, most_bytes, size)
        self.db.executemany("DELETE FROM jobs WHERE number = ?", forgotten)


def _names(kind: type[Record]) -> str:
    return ", ".join(field.name for field in fields(kind))


def _short_names(kind: type[Record]) -> str:
    return _names(kind).replace("answer", "NULL AS answer")


def _column(value: object) -> object:
    """A field's value as its column has it."""
    return orjson.dumps(value) if isinstance(value, dict | list) else value


def _record[R: Record](kind: type[R], row: sqlite3.Row) -> R:
    """A row as a record. Raises ValueError for invalid data."""
    values = {field.name: row[field.name] for field in fields(kind)}
    values |= {name: orjson.loads(values[name]) for name in _JSON & values.keys()}
    return msgspec.convert(values, kind)
