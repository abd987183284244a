"""The rows of jobs; see `engine.server.tasks.store`. A job ends once."""

from __future__ import annotations

from jitney.engine.config import ServerSection
from jitney.engine.server.http.errors import HttpError
from jitney.engine.server.tasks.records import Job
from jitney.engine.server.tasks.store import OPEN, TaskStore

#: The header with the client's key of a request, which makes repeats safe.
REPEAT_HEADER = "idempotency-key"
#: Most ended jobs per key that stay listed.
_KEPT_JOBS = 1000
_UNFINISHED = ("queued", "in_progress")


def add(
    store: TaskStore,
    job: Job,
    server: ServerSection,
    *,
    body: bytes,
    repeat_key: str | None,
    digest: str,
) -> Job:
    """Store a new job, or return the earlier one with the same `repeat_key`. Raises RequestError
    (too many), StorageFull, HttpError 409 (the earlier one differs). body: JSON; repeat_key: the
    client's idempotency key or None; digest: of the whole request.
    """
    with store.transaction():
        query = "SELECT id, digest FROM jobs WHERE owner = ? AND repeat_key = ?"
        row = store.db.execute(query, (job.owner, repeat_key)).fetchone()
        earlier = store.find(Job, row["id"]) if row is not None else None
        if row is not None and earlier is not None:
            if row["digest"] == digest:
                return earlier
            message = f"job {earlier.id} has this Idempotency-Key, and asks for something else"
            raise HttpError(409, message, code="idempotency_key_used", param=REPEAT_HEADER)
        store.check_open(job, server.key_jobs, "key_jobs", 5.0)
        store.forget_ended(Job, job.owner, _KEPT_JOBS)
        store.make_room(job.owner, len(body), server.key_file_bytes)
        store.insert(job, body=body, repeat_key=repeat_key, digest=digest)
        return job


def begin(store: TaskStore, id: str, now: int, most_bytes: int | None = None) -> bytes | None:
    """Mark a job as in progress; returns its body, or None if it is over. Raises StorageFull."""
    with store.transaction():
        query = "SELECT owner, status, body FROM jobs WHERE id = ?"
        row = store.db.execute(query, (id,)).fetchone()
        if row is None or row["status"] in Job.ENDED:
            return None
        if most_bytes is not None:
            store.make_room(row["owner"], 1, most_bytes)
        store.move(Job, id, ("queued",), "in_progress", now)
        return row["body"]


def finish(
    store: TaskStore,
    id: str,
    status: str,
    answer: bytes | None,
    now: int,
    most_bytes: int | None = None,
) -> bool:
    """End a job and delete its request; False if it was over. Raises StorageFull."""
    with store.transaction():
        owner = store.value("SELECT owner FROM jobs WHERE id = ?", id)
        query = f"UPDATE jobs SET body = x'' WHERE id = ? AND {OPEN}"
        if not store.db.execute(query, (id,)).rowcount:
            return False
        if answer is not None and most_bytes is not None:
            store.make_room(owner, len(answer), most_bytes)
        return store.move(Job, id, _UNFINISHED, status, now, answer=answer)
