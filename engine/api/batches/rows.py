"""What tables have in common whose rows belong to somebody and come to an end: those of batches and
of jobs. Every function blocks, and is a part of its caller's transaction.

`db` gives rows by name; `table` is a name of ours, never one that a client has sent.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import orjson

from jitney.engine.api.batches.records import ENDED

_ENDED = ", ".join(f"'{status}'" for status in ENDED)
#: Rows that are not over.
OPEN = f"status NOT IN ({_ENDED})"


def insert(db: sqlite3.Connection, table: str, columns: dict[str, Any]) -> None:
    names = ", ".join(columns)
    marks = ", ".join("?" * len(columns))
    db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(columns.values()))


def n_open(db: sqlite3.Connection, table: str, owner: str) -> int:
    """How many of an owner's rows are not over."""
    query = f"SELECT COUNT(*) FROM {table} WHERE owner = ? AND {OPEN}"
    return db.execute(query, (owner,)).fetchone()[0]


def set_status(db: sqlite3.Connection, table: str, row: sqlite3.Row, status: str, now: int) -> None:
    """A row reaches a state. The end of one with a URL is to be told from now on."""
    times = orjson.loads(row["times"]) | {status: now}
    db.execute(
        f"UPDATE {table} SET status = ?, times = ? WHERE id = ?",
        (status, orjson.dumps(times), row["id"]),
    )
    if status in ENDED and row["webhook_url"]:
        db.execute(f"UPDATE {table} SET told_at = ? WHERE id = ?", (now, row["id"]))


def forget_ended(db: sqlite3.Connection, table: str, owner: str, keep: int) -> None:
    """Of an owner's rows that are over, and told, keep the newest."""
    query = f"""DELETE FROM {table} WHERE number IN (
        SELECT number FROM {table} WHERE owner = ? AND status IN ({_ENDED}) AND told_at IS NULL
        ORDER BY number DESC LIMIT -1 OFFSET ?)"""
    db.execute(query, (owner, keep))


def page(
    db: sqlite3.Connection,
    table: str,
    owner: str,
    *,
    after: str,
    limit: int,
    newest_first: bool = True,
    columns: str = "*",
    condition: str = "TRUE",
    values: Sequence[Any] = (),
) -> tuple[list[sqlite3.Row], bool]:
    """One page of an owner's rows, those behind the one with the id `after`, and whether there are
    more. An `after` that the owner does not have is no place: the page is empty.

    condition, with values for its marks: which rows are meant.
    """
    sign, order = ("<", "DESC") if newest_first else (">", "ASC")
    behind, place = "TRUE", []
    if after:
        behind = f"number {sign} (SELECT number FROM {table} WHERE id = ? AND owner = ?)"
        place = [after, owner]
    query = f"""SELECT {columns} FROM {table} WHERE owner = ? AND {behind} AND {condition}
        ORDER BY number {order} LIMIT ?"""
    rows = db.execute(query, [owner, *place, *values, limit + 1]).fetchall()
    return rows[:limit], len(rows) > limit
