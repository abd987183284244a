"""The table of jobs. Its methods block: they run on the one thread that owns the store
(`engine.server.tasks.batches.keeper`).

A job ends once: what is over changes no more. One that was being computed when the process was
killed is computed again.
"""

from __future__ import annotations

import sqlite3

import orjson

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.server.http.errors import HttpError
from jitney.engine.server.tasks.batches.rows import OwnedTable
from jitney.engine.server.tasks.batches.store import JOB_BYTES, BatchStore
from jitney.engine.server.tasks.batches.webhooks import Deliveries
from jitney.engine.server.tasks.jobs.records import Job, JobRequest

#: Columns that are fields of `Job` as they are.
_PLAIN = (
    "id",
    "owner",
    "endpoint",
    "webhook_url",
    "created_at",
    "expires_at",
    "status",
    "answer",
)
#: All that a `Job` is made of, without what may be long and is not in it.
_COLUMNS = ", ".join((*_PLAIN, "metadata", "times"))
#: The same without its answer.
_SUMMARY = _COLUMNS.replace("answer", "NULL AS answer")


class _JobTable(Deliveries):
    """Every method is one transaction."""

    def add(
        self,
        store: BatchStore,
        job: Job,
        asked: JobRequest,
        *,
        most_open: int,
        keep: int,
        most_bytes: int,
    ) -> Job:
        """Keep a new job, unless its owner has one that is called so: the job that is kept. Of the
        owner's jobs that are over, the newest `keep` stay. Raises RequestError for an owner with
        `most_open` jobs under way, StorageFull where it would have more than `most_bytes`, and
        HttpError 409 where the one that is called so was asked for with other words.
        """
        with store.transaction():
            known = self._find_repeated(store, job.owner, asked)
            if known is not None:
                return known
            self._check_room(store, job.owner, most_open)
            self._rows(store).forget_ended(job.owner, keep)
            self._make_room(store, job.owner, len(asked.body), most_bytes)
            self._insert(store, job, asked)
            return job

    def _make_room(self, store: BatchStore, owner: str, size: int, most_bytes: int) -> None:
        """Forget the oldest of an owner's jobs that are over until so many more bytes fit. Raises
        StorageFull, and forgets none, where that is not enough.
        """
        query = f"""SELECT number, {JOB_BYTES} FROM jobs
            WHERE owner = ? AND {OwnedTable.FORGETTABLE} ORDER BY number"""
        missing = store.n_bytes(owner) + size - most_bytes
        forgotten: list[tuple[int]] = []
        if missing > 0:
            for number, n_bytes in store.db.execute(query, (owner,)).fetchall():
                if missing > 0:
                    forgotten.append((number,))
                    missing -= n_bytes
        if missing > 0:
            store.check_bytes(owner, most_bytes, size)
        store.db.executemany("DELETE FROM jobs WHERE number = ?", forgotten)

    def _check_room(self, store: BatchStore, owner: str, most_open: int) -> None:
        if self._rows(store).n_open(owner) >= most_open:
            raise RequestError(
                f"one key may have {most_open} jobs under way (key_jobs)",
                code="rate_limit",
                retry_after=5.0,
            )

    def _insert(self, store: BatchStore, job: Job, asked: JobRequest) -> None:
        columns = {name: getattr(job, name) for name in _PLAIN}
        columns |= {
            "metadata": orjson.dumps(job.metadata),
            "times": orjson.dumps(job.times),
            "body": asked.body,
            "repeat_key": asked.repeat_key,
            "digest": asked.digest,
        }
        self._rows(store).insert(columns)

    def _find_repeated(self, store: BatchStore, owner: str, asked: JobRequest) -> Job | None:
        """The job that an owner called so. Raises HttpError 409."""
        if asked.repeat_key is None:
            return None
        query = f"SELECT {_COLUMNS}, digest FROM jobs WHERE owner = ? AND repeat_key = ?"
        row = store.db.execute(query, (owner, asked.repeat_key)).fetchone()
        if row is None:
            return None
        if row["digest"] != asked.digest:
            raise HttpError(
                409,
                f"job {row['id']} has this Idempotency-Key, and asks for something else",
                code="idempotency_key_used",
                param=asked.REPEAT_HEADER,
            )
        return _job_of(row)

    def find(self, store: BatchStore, id: str, owner: str) -> Job | None:
        """The job of that id, if it is this owner's."""
        query = f"SELECT {_COLUMNS} FROM jobs WHERE id = ? AND owner = ?"
        row = store.db.execute(query, (id, owner)).fetchone()
        return None if row is None else _job_of(row)

    def page(
        self, store: BatchStore, owner: str, *, after: str, limit: int
    ) -> tuple[list[Job], bool]:
        """At most so many of an owner's jobs, those behind `after`, the newest first, and whether
        there are more. None with its answer: together they may be longer than the memory.
        """
        page, more = self._rows(store).page(owner, after=after, limit=limit, columns=_SUMMARY)
        return [_job_of(row) for row in page], more

    def unfinished(self, store: BatchStore) -> list[Job]:
        """The jobs that are not over, the oldest first."""
        query = f"SELECT {_SUMMARY} FROM jobs WHERE {OwnedTable.OPEN} ORDER BY number"
        return [_job_of(row) for row in store.db.execute(query)]

    def begin(
        self, store: BatchStore, id: str, now: int, most_bytes: int | None = None
    ) -> bytes | None:
        """A job is taken up, again perhaps: the body of its request; None if it is over. Raises
        StorageFull where no answer has room in `most_bytes` of its owner's.
        """
        with store.transaction():
            row = store.db.execute("SELECT * FROM jobs WHERE id = ?", (id,)).fetchone()
            if row is None or row["status"] in OwnedTable.ENDED:
                return None
            if most_bytes is not None:
                self._make_room(store, row["owner"], 1, most_bytes)
            self._rows(store).set_status(row, "in_progress", now)
            return row["body"]

    def finish(
        self,
        store: BatchStore,
        id: str,
        status: str,
        answer: bytes | None,
        now: int,
        most_bytes: int | None = None,
    ) -> bool:
        """A job is over; its request is forgotten. False if it was over already. Raises StorageFull
        where its answer has no room in `most_bytes` of its owner's.
        """
        with store.transaction():
            query = "SELECT id, owner, webhook_url, status, times FROM jobs WHERE id = ?"
            row = store.db.execute(query, (id,)).fetchone()
            if row is None or row["status"] in OwnedTable.ENDED:
                return False
            store.db.execute("UPDATE jobs SET body = x'' WHERE id = ?", (id,))
            if answer is not None and most_bytes is not None:
                self._make_room(store, row["owner"], len(answer), most_bytes)
            store.db.execute("UPDATE jobs SET answer = ? WHERE id = ?", (answer, id))
            self._rows(store).set_status(row, status, now)
            return True

    def _rows(self, store: BatchStore) -> OwnedTable:
        return OwnedTable(store.db, self._table)


def _job_of(row: sqlite3.Row) -> Job:
    return Job(
        **{name: row[name] for name in _PLAIN},
        metadata=orjson.loads(row["metadata"]),
        times=orjson.loads(row["times"]),
    )


def _told_of(row: sqlite3.Row) -> JsonDict:
    """What the end of a job is told with."""
    job = _job_of(row)
    return {"metadata": job.metadata or None, "response": job.response}


#: Also of the ends that have to be told.
JOBS = _JobTable("jobs", _told_of, "answer")
