"""Ends that have to be told to a URL, as rows of a table of the store: what is due, and how often
it was tried.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from jitney.engine.api.batches.store import BatchStore, batch_of
from jitney.engine.types import JsonDict


@dataclass(frozen=True, slots=True)
class Event:
    """What is told."""

    #: The same at every try, so that the other side knows it again.
    id: str
    #: Such as "batch.completed".
    type: str
    #: Seconds since 1970.
    created_at: int
    data: JsonDict

    @classmethod
    def of_end(
        cls, id: str, status: str, times: dict[str, int], more: JsonDict | None = None
    ) -> Event:
        """The end of a batch or of a job.

        id: "batch_..." or "job_...", and the event's own begins with "evt_".
        times: when each state was reached.
        more: what is told beside the id.
        """
        kind, _, rest = id.partition("_")
        return cls(f"evt_{rest}", f"{kind}.{status}", times[status], {"id": id} | (more or {}))

    def text(self) -> bytes:
        return orjson.dumps(
            {
                "object": "event",
                "id": self.id,
                "type": self.type,
                "created_at": self.created_at,
                "data": self.data,
            }
        )


@dataclass(frozen=True, slots=True)
class Delivery:
    """An event that has to be told to a URL."""

    #: Of the row.
    id: str
    url: str
    event: Event
    #: How often it was tried already.
    attempts: int


class Deliveries:
    """The rows of one table that have a `told_at`: when the next try is due. Every method blocks,
    and runs on the store's thread.
    """

    def __init__(self, table: str, event_of: Callable[[sqlite3.Row], Event]):
        """event_of: what is told of a row that is over."""
        self._table = table
        self._event_of = event_of

    def next_at(self, store: BatchStore) -> float | None:
        """When the next one is due; None if none is."""
        [at] = store.db.execute(f"SELECT MIN(told_at) FROM {self._table}").fetchone()
        return at

    def due(self, store: BatchStore, now: float, limit: int) -> list[Delivery]:
        """Those that are to be told by now, at most so many."""
        query = f"SELECT * FROM {self._table} WHERE told_at <= ? ORDER BY told_at LIMIT ?"
        return [self._delivery(row) for row in store.db.execute(query, (now, limit))]

    def _delivery(self, row: sqlite3.Row) -> Delivery:
        return Delivery(row["id"], row["webhook_url"], self._event_of(row), row["attempts"])

    def tried(self, store: BatchStore, id: str, again_at: float | None) -> None:
        """An event was told, or is to be told again then."""
        query = f"UPDATE {self._table} SET attempts = attempts + 1, told_at = ? WHERE id = ?"
        store.db.execute(query, (again_at, id))


def _batch_event(row: sqlite3.Row) -> Event:
    batch = batch_of(row)
    return Event.of_end(batch.id, batch.status, batch.times)


BATCH_ENDS = Deliveries("batches", _batch_event)
