"""Files, batches and lines in an SQLite file, where jobs lie too
(`engine.server.tasks.jobs.table`). Every method is one transaction, and blocks: it runs on the one
thread that owns the store (`engine.server.tasks.batches.keeper`).

A line gets its answer once: writing it changes only a line that has none. What is written is there
after the process was killed; a line that was being computed then is computed again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

import orjson

from jitney.engine.common.errors import ConfigError
from jitney.engine.config import ServerSection
from jitney.engine.server.http.errors import HttpError
from jitney.engine.server.tasks.batches.records import (
    AnsweredLine,
    Batch,
    Fault,
    Line,
    LineOutcome,
    StoredFile,
)
from jitney.engine.server.tasks.batches.rows import OwnedTable, while_short

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
#: What each version of the tables adds to the one before.
_VERSIONS = (_FIRST_TABLES, _JOBS, _ANSWER_BYTES)
#: Bytes of a job, as SQL.
JOB_BYTES = "LENGTH(body) + COALESCE(LENGTH(answer), 0)"
#: Columns of `batches` that are fields of `Batch` as they are.
_PLAIN = (
    "id",
    "owner",
    "endpoint",
    "input_file_id",
    "completion_window",
    "webhook_url",
    "created_at",
    "expires_at",
    "status",
    "output_file_id",
    "error_file_id",
    "total",
    "completed",
    "failed",
)
_FILE_FIELDS = ("id", "owner", "purpose", "name", "size", "created_at")


class StoreUnavailable(HttpError):
    """The store cannot be read or written now: the disk is full, or what lies on it is damaged."""

    def __init__(self) -> None:
        super().__init__(
            503,
            "files, batches and jobs cannot be read or written now; the server's log says why",
            code="store_unavailable",
            headers={"retry-after": "10"},
        )


class StorageFull(HttpError):
    """A key has as many files, or as many bytes of what is kept, as it may have."""

    def __init__(self, reason: str, param: str | None = None):
        super().__init__(400, f"{reason}; delete some files", code="storage_full", param=param)


class BatchStore:
    """The tables. Raises ConfigError for a file that a newer version has written, and
    sqlite3.Error.
    """

    def __init__(self, path: Path):
        self.db = sqlite3.connect(path, isolation_level=None)
        try:
            self.db.row_factory = sqlite3.Row
            self.db.execute("PRAGMA journal_mode = WAL")
            self.db.execute("PRAGMA synchronous = NORMAL")
            self._make_tables(path)
        except BaseException:
            self.db.close()
            raise
        self._files = OwnedTable(self.db, "files")
        self._batches = OwnedTable(self.db, "batches")

    def _make_tables(self, path: Path) -> None:
        [version] = self.db.execute("PRAGMA user_version").fetchone()
        if version > len(_VERSIONS):
            raise ConfigError(f"{path} was written by a newer version of Jitney")
        for number, tables in enumerate(_VERSIONS[version:], version + 1):
            self.db.executescript(f"BEGIN; {tables} PRAGMA user_version = {number}; COMMIT;")
        if _columns_of(self.db) != _all_columns():
            raise sqlite3.OperationalError("its tables are not those of its version")

    def close(self) -> None:
        self.db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it is written, or nothing."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.db.execute("COMMIT")
        except BaseException:
            if self.db.in_transaction:  # after some errors, a full disk, nothing is left to undo
                self.db.execute("ROLLBACK")
            raise

    # Files.

    def check_room(self, owner: str, server: ServerSection, size: int = 0) -> None:
        """Raise StorageFull if an owner has as many files as it may have, or no room for one of
        this size.
        """
        query = "SELECT COUNT(*) FROM files WHERE owner = ?"
        [count] = self.db.execute(query, (owner,)).fetchone()
        if count >= server.key_files:
            raise StorageFull(f"one key may have {server.key_files} files (key_files)", "file")
        self.check_bytes(owner, server.key_file_bytes, size, "file")

    def check_bytes(self, owner: str, most: int, size: int = 0, param: str | None = None) -> None:
        """Raise StorageFull, blaming a field, if an owner has no room for so many bytes more."""
        taken = self.n_bytes(owner)
        if taken + size > most or taken >= most:
            raise StorageFull(
                f"one key's files, jobs and answers may have {most} bytes (key_file_bytes)", param
            )

    def n_bytes(self, owner: str) -> int:
        """Bytes that are kept for an owner: of files, of answers of batches that are not over, and
        of jobs.
        """
        sums = (
            "SELECT SUM(size) AS size FROM files WHERE owner = :owner",
            "SELECT SUM(answer_bytes) FROM batches WHERE owner = :owner",
            f"SELECT SUM({JOB_BYTES}) FROM jobs WHERE owner = :owner",
        )
        query = f"SELECT COALESCE(SUM(size), 0) FROM ({' UNION ALL '.join(sums)})"
        return self.db.execute(query, {"owner": owner}).fetchone()[0]

    def add_file(self, file: StoredFile) -> None:
        self._files.insert({name: getattr(file, name) for name in _FILE_FIELDS})

    def file(self, id: str, owner: str) -> StoredFile | None:
        """The file of that id, if it is this owner's."""
        query = "SELECT * FROM files WHERE id = ? AND owner = ?"
        row = self.db.execute(query, (id, owner)).fetchone()
        return None if row is None else _file_of(row)

    def files(
        self, owner: str, *, after: str, limit: int, purpose: str, newest_first: bool
    ) -> tuple[list[StoredFile], bool]:
        """At most so many of an owner's files, those behind `after`, and whether there are more.
        purpose: only of this one; empty for all.
        """
        page, more = self._files.page(
            owner,
            after=after,
            limit=limit,
            newest_first=newest_first,
            condition="purpose = ?" if purpose else "TRUE",
            values=[purpose] if purpose else [],
        )
        return [_file_of(row) for row in page], more

    def file_ids(self) -> set[str]:
        """Of all files, whoever has them."""
        return {row["id"] for row in self.db.execute("SELECT id FROM files")}

    def delete_file(self, id: str, owner: str) -> str:
        """Forget a file, unless a batch still needs it: the id of that batch, else nothing."""
        with self.transaction():
            query = f"""SELECT id FROM batches WHERE input_file_id = ? AND owner = ?
                AND {OwnedTable.OPEN}"""
            row = self.db.execute(query, (id, owner)).fetchone()
            if row is not None:
                return row["id"]
            self.db.execute("DELETE FROM files WHERE id = ? AND owner = ?", (id, owner))
            return ""

    # Batches.

    def open_batches(self, owner: str) -> int:
        """How many of an owner's batches are not over."""
        return self._batches.n_open(owner)

    def add_batch(self, batch: Batch) -> None:
        columns = {name: getattr(batch, name) for name in _PLAIN}
        columns |= {
            "metadata": orjson.dumps(batch.metadata),
            "times": orjson.dumps(batch.times),
            "faults": orjson.dumps(batch.faults),
        }
        self._batches.insert(columns)

    def forget_ended(self, owner: str, keep: int) -> None:
        """Of an owner's batches that are over, and told, keep the newest."""
        self._batches.forget_ended(owner, keep)

    def batch(self, id: str, owner: str | None = None) -> Batch | None:
        """The batch of that id, if it is this owner's; None: whoever has it."""
        row = self.db.execute("SELECT * FROM batches WHERE id = ?", (id,)).fetchone()
        if row is None or owner not in (None, row["owner"]):
            return None
        return _batch_of(row)

    def batches(self, owner: str, *, after: str, limit: int) -> tuple[list[Batch], bool]:
        """As `files`, the newest first."""
        page, more = self._batches.page(owner, after=after, limit=limit)
        return [_batch_of(row) for row in page], more

    def unfinished(self) -> list[str]:
        """Ids of the batches that are not over, the oldest first."""
        query = f"SELECT id FROM batches WHERE {OwnedTable.OPEN} ORDER BY number"
        return [row["id"] for row in self.db.execute(query)]

    def move(self, id: str, sources: Iterable[str], status: str, now: int) -> bool:
        """A batch that is in one of these states goes to another one; False if it was in none of
        them.
        """
        with self.transaction():
            row = self.db.execute("SELECT * FROM batches WHERE id = ?", (id,)).fetchone()
            if row is None or row["status"] not in tuple(sources):
                return False
            self._batches.set_status(row, status, now)
            return True

    def fail(self, id: str, faults: list[Fault], now: int) -> bool:
        """A batch whose file cannot be worked on; False if it is not being validated any more."""
        with self.transaction():
            row = self.db.execute("SELECT * FROM batches WHERE id = ?", (id,)).fetchone()
            if row is None or row["status"] != "validating":
                return False
            self.db.execute(
                "UPDATE batches SET faults = ? WHERE id = ?", (orjson.dumps(faults), id)
            )
            self._forget_lines(id)
            self._batches.set_status(row, "failed", now)
            return True

    def finish(
        self, id: str, status: str, output: StoredFile | None, errors: StoredFile | None, now: int
    ) -> None:
        """A batch is over: its answers are in these files, and its lines are forgotten. Nothing
        changes where it is not known any more: the store was damaged, and another one begun.
        """
        with self.transaction():
            row = self.db.execute("SELECT * FROM batches WHERE id = ?", (id,)).fetchone()
            if row is None:
                return
            for name, file in (("output_file_id", output), ("error_file_id", errors)):
                if file is not None:
                    self.add_file(file)
                    query = f"UPDATE batches SET {name} = ? WHERE id = ?"
                    self.db.execute(query, (file.id, id))
            self._forget_lines(id)
            self._batches.set_status(row, status, now)

    # Lines.

    def begin_lines(self, id: str) -> None:
        """Forget the lines of a batch whose file is about to be read, again perhaps."""
        with self.transaction():
            self._forget_lines(id)

    def _forget_lines(self, id: str) -> None:
        self.db.execute("DELETE FROM lines WHERE batch_id = ?", (id,))
        self.db.execute("UPDATE batches SET answer_bytes = 0 WHERE id = ?", (id,))

    def add_lines(self, id: str, lines: list[Line]) -> list[Line]:
        """Add lines; returns those whose custom_id the batch has already."""
        doubles: list[Line] = []
        query = """INSERT OR IGNORE INTO lines (batch_id, number, custom_id, start, size)
            VALUES (?, ?, ?, ?, ?)"""
        with self.transaction():
            for line in lines:
                values = (id, line.number, line.custom_id, line.start, line.size)
                if not self.db.execute(query, values).rowcount:
                    doubles.append(line)
        return doubles

    def start(self, id: str, now: int) -> bool:
        """The file of a batch is sound: its lines are to be answered. False if it is not being
        validated any more.
        """
        with self.transaction():
            row = self.db.execute("SELECT * FROM batches WHERE id = ?", (id,)).fetchone()
            if row is None or row["status"] != "validating":
                return False
            query = "SELECT COUNT(*) FROM lines WHERE batch_id = ?"
            [total] = self.db.execute(query, (id,)).fetchone()
            self.db.execute("UPDATE batches SET total = ? WHERE id = ?", (total, id))
            self._batches.set_status(row, "in_progress", now)
            return True

    def open_lines(self, id: str, after: int, limit: int) -> list[Line]:
        """Lines without an answer that come after one of the file."""
        query = """SELECT number, custom_id, start, size FROM lines
            WHERE batch_id = ? AND outcome IS NULL AND number > ? ORDER BY number LIMIT ?"""
        return [Line(*row) for row in self.db.execute(query, (id, after, limit))]

    def answer(
        self,
        id: str,
        number: int,
        outcome: LineOutcome,
        answer: bytes,
        most_bytes: int | None = None,
    ) -> bool:
        """Keep a line's answer; False if it has one, or its batch is over. Raises StorageFull where
        its owner would then have more than `most_bytes`.
        """
        count = "completed" if outcome is LineOutcome.COMPLETED else "failed"
        query = """UPDATE lines SET outcome = ?, answer = ?
            WHERE batch_id = ? AND number = ? AND outcome IS NULL"""
        with self.transaction():
            if not self.db.execute(query, (int(outcome), answer, id, number)).rowcount:
                return False
            if most_bytes is not None:
                query = "SELECT owner FROM batches WHERE id = ?"
                [owner] = self.db.execute(query, (id,)).fetchone()
                self.check_bytes(owner, most_bytes, len(answer))
            query = f"""UPDATE batches
                SET {count} = {count} + 1, answer_bytes = answer_bytes + ? WHERE id = ?"""
            self.db.execute(query, (len(answer), id))
            return True

    def answers(self, id: str, after: int, limit: int) -> list[AnsweredLine]:
        """Lines of a batch that come after one of the file: at least one if there is any, at most
        so many, and fewer where they are long.
        """
        query = """SELECT number, custom_id, outcome, answer FROM lines
            WHERE batch_id = ? AND number > ? ORDER BY number LIMIT ?"""
        rows = self.db.execute(query, (id, after, limit))
        return [_answered(row) for row in while_short(rows, "answer")]


@cache
def _all_columns() -> set[tuple[str, str]]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript("".join(_VERSIONS))
        return _columns_of(db)


def _columns_of(db: sqlite3.Connection) -> set[tuple[str, str]]:
    """Tables and their columns."""
    query = """SELECT tables.name, columns.name
        FROM sqlite_master AS tables, pragma_table_info(tables.name) AS columns"""
    return {(table, column) for table, column in db.execute(query)}


def _file_of(row: sqlite3.Row) -> StoredFile:
    return StoredFile(**{name: row[name] for name in _FILE_FIELDS})


def _batch_of(row: sqlite3.Row) -> Batch:
    """A row of the table of batches."""
    return Batch(
        **{name: row[name] for name in _PLAIN},
        metadata=orjson.loads(row["metadata"]),
        times=orjson.loads(row["times"]),
        faults=[Fault(**fault) for fault in orjson.loads(row["faults"])],
    )


def _answered(row: sqlite3.Row) -> AnsweredLine:
    outcome = None if row["outcome"] is None else LineOutcome(row["outcome"])
    return AnsweredLine(row["number"], row["custom_id"], outcome, row["answer"] or b"")
