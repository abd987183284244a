"""What tables have in common whose rows belong to somebody and come to an end."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

_ENDED = ("completed", "failed", "expired", "cancelled")
_LISTED = ", ".join(f"'{status}'" for status in _ENDED)
#: Bytes of answers that are in memory at once.
_READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class OwnedTable:
    """A table whose rows belong to somebody and come to an end: that of batches, or of jobs. Every
    method blocks, and is a part of its caller's transaction.
    """

    #: Rows in these states are over, and change no more.
    ENDED: ClassVar[tuple[str, ...]] = _ENDED
    #: Which rows are not over, for a query.
    OPEN: ClassVar[str] = f"status NOT IN ({_LISTED})"
    #: Which rows may be forgotten: they are over, and nobody has to be told of it.
    FORGETTABLE: ClassVar[str] = f"status IN ({_LISTED}) AND told_at IS NULL"

    #: It gives rows by name.
    db: sqlite3.Connection
    #: A name of ours, never one that a client has sent.
    name: str

    def insert(self, columns: dict[str, Any]) -> None:
        names = ", ".join(columns)
        marks = ", ".join("?" * len(columns))
        query = f"INSERT INTO {self.name} ({names}) VALUES ({marks})"
        self.db.execute(query, list(columns.values()))

    def n_open(self, owner: str) -> int:
        """How many of an owner's rows are not over."""
        query = f"SELECT COUNT(*) FROM {self.name} WHERE owner = ? AND {self.OPEN}"
        return self.db.execute(query, (owner,)).fetchone()[0]

    def set_status(self, row: sqlite3.Row, status: str, now: int) -> None:
        """A row reaches a state. The end of one with a URL is to be told from now on."""
        times = orjson.loads(row["times"]) | {status: now}
        self.db.execute(
            f"UPDATE {self.name} SET status = ?, times = ? WHERE id = ?",
            (status, orjson.dumps(times), row["id"]),
        )
        if status in self.ENDED and row["webhook_url"]:
            self.db.execute(f"UPDATE {self.name} SET told_at = ? WHERE id = ?", (now, row["id"]))

    def forget_ended(self, owner: str, keep: int) -> None:
        """Of an owner's rows that are over, and told, keep the newest."""
        query = f"""DELETE FROM {self.name} WHERE number IN (
            SELECT number FROM {self.name}
            WHERE owner = ? AND {self.FORGETTABLE}
            ORDER BY number DESC LIMIT -1 OFFSET ?)"""
        self.db.execute(query, (owner, keep))

    def page(
        self,
        owner: str,
        *,
        after: str,
        limit: int,
        newest_first: bool = True,
        columns: str = "*",
        condition: str = "TRUE",
        values: Sequence[Any] = (),
    ) -> tuple[list[sqlite3.Row], bool]:
        """One page of an owner's rows, those behind the one with the id `after`, and whether there
        are more. An `after` that the owner does not have is no place: the page is empty.

        condition, with values for its marks: which rows are meant.
        """
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        behind, place = "TRUE", []
        if after:
            behind = f"number {sign} (SELECT number FROM {self.name} WHERE id = ? AND owner = ?)"
            place = [after, owner]
        query = f"""SELECT {columns} FROM {self.name}
            WHERE owner = ? AND {behind} AND {condition} ORDER BY number {order} LIMIT ?"""
        rows = self.db.execute(query, [owner, *place, *values, limit + 1]).fetchall()
        return rows[:limit], len(rows) > limit


def while_short(rows: sqlite3.Cursor, column: str) -> Iterator[sqlite3.Row]:
    """The first row, and more until what they have in a column, long answers, is enough to hold in
    memory at once.
    """
    taken = 0
    for row in rows:
        yield row
        taken += len(row[column] or b"")
        if taken >= _READ_BYTES:
            return
