"""The table of jobs. Every function is one transaction, and blocks: it runs on the one thread that
owns the store (`engine.api.batches.keeper`).

A job ends once: what is over changes no more. One that was being computed when the process was
killed is computed again.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import orjson

from jitney.engine.api.batches.deliveries import Deliveries, Event
from jitney.engine.api.batches.store import Store
from jitney.engine.api.jobs.records import ENDED, Asked, Job, Repeated

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
_ENDED = ", ".join(f"'{status}'" for status in ENDED)


def n_open(store: Store, owner: str) -> int:
    """How many of an owner's jobs are not over."""
    query = f"SELECT COUNT(*) FROM jobs WHERE owner = ? AND status NOT IN ({_ENDED})"
    return store.db.execute(query, (owner,)).fetchone()[0]


def add(store: Store, job: Job, asked: Asked) -> Repeated | None:
    """Keep a new job, unless its owner has one that is called so: that one is returned."""
    with store.transaction():
        known = find_repeated(store, job.owner, asked.repeat_key)
        if known is None:
            _insert(store, job, asked)
        return known


def _insert(store: Store, job: Job, asked: Asked) -> None:
    columns = {name: getattr(job, name) for name in _PLAIN}
    columns |= {
        "metadata": orjson.dumps(job.metadata),
        "times": orjson.dumps(job.times),
        "body": asked.body,
        "repeat_key": asked.repeat_key,
        "digest": asked.digest,
    }
    names = ", ".join(columns)
    marks = ", ".join("?" * len(columns))
    store.db.execute(f"INSERT INTO jobs ({names}) VALUES ({marks})", list(columns.values()))


def find_repeated(store: Store, owner: str, repeat_key: str | None) -> Repeated | None:
    """The job that an owner called so."""
    query = "SELECT * FROM jobs WHERE owner = ? AND repeat_key = ?"
    row = store.db.execute(query, (owner, repeat_key)).fetchone()
    return None if row is None else Repeated(_job_of(row), row["digest"])


def find(store: Store, id: str, owner: str) -> Job | None:
    """The job of that id, if it is this owner's."""
    query = "SELECT * FROM jobs WHERE id = ? AND owner = ?"
    row = store.db.execute(query, (id, owner)).fetchone()
    return None if row is None else _job_of(row)


def page(store: Store, owner: str, *, after: str, limit: int) -> tuple[list[Job], bool]:
    """At most so many of an owner's jobs, those behind `after`, the newest first, and whether there
    are more.
    """
    rows, more = store.page("jobs", owner, after, limit, True, "", [])
    return [_job_of(row) for row in rows], more


def unfinished(store: Store) -> list[Job]:
    """The jobs that are not over, the oldest first."""
    query = f"SELECT * FROM jobs WHERE status NOT IN ({_ENDED}) ORDER BY number"
    return [_job_of(row) for row in store.db.execute(query)]


def begin(store: Store, id: str, now: int) -> bytes | None:
    """A job is taken up, again perhaps: the body of its request; None if it is over."""
    with store.transaction():
        row = store.db.execute("SELECT * FROM jobs WHERE id = ?", (id,)).fetchone()
        if row is None or row["status"] in ENDED:
            return None
        _set_status(store, row, "in_progress", now)
        return row["body"]


def finish(store: Store, id: str, status: str, answer: bytes | None, now: int) -> bool:
    """A job is over; its request is forgotten. False if it was over already."""
    with store.transaction():
        row = store.db.execute("SELECT * FROM jobs WHERE id = ?", (id,)).fetchone()
        if row is None or row["status"] in ENDED:
            return False
        query = "UPDATE jobs SET answer = ?, body = x'', told_at = ? WHERE id = ?"
        store.db.execute(query, (answer, now if row["webhook_url"] else None, id))
        _set_status(store, row, status, now)
        return True


def _set_status(store: Store, row: sqlite3.Row, status: str, now: int) -> None:
    times = orjson.loads(row["times"]) | {status: now}
    store.db.execute(
        "UPDATE jobs SET status = ?, times = ? WHERE id = ?",
        (status, orjson.dumps(times), row["id"]),
    )


def forget_ended(store: Store, owner: str, keep: int) -> None:
    """Of an owner's jobs that are over, and told, keep the newest."""
    query = f"""DELETE FROM jobs WHERE number IN (
        SELECT number FROM jobs WHERE owner = ? AND status IN ({_ENDED}) AND told_at IS NULL
        ORDER BY number DESC LIMIT -1 OFFSET ?)"""
    store.db.execute(query, (owner, keep))


def response_of(job: Job) -> Any:
    """The answer as a part of a larger JSON text; None if there is none."""
    return None if job.answer is None else orjson.Fragment(job.answer)


def _job_of(row: sqlite3.Row) -> Job:
    return Job(
        **{name: row[name] for name in _PLAIN},
        metadata=orjson.loads(row["metadata"]),
        times=orjson.loads(row["times"]),
    )


def _job_event(row: sqlite3.Row) -> Event:
    """The end of a job, with its answer."""
    job = _job_of(row)
    return Event(
        job.id.replace("job_", "evt_"),
        f"job.{job.status}",
        job.times[job.status],
        {"id": job.id, "metadata": job.metadata or None, "response": response_of(job)},
    )


JOB_ENDS = Deliveries("jobs", _job_event)
