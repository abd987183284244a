"""The page's list of batches, jobs, files and adapters: of all keys for administrators, of its own
for a user.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from jitney.dashboard.tenants import label_of
from jitney.engine.common.history import History
from jitney.engine.common.requests import JsonDict
from jitney.engine.server import HttpError, Identity, InternalRequests

#: Most batches, jobs and files that are listed, each.
_MOST = 100


class WorkList:
    """Stored work of a server. tasks: its batches, jobs and files; None: the page has no server, or
    it does not exist yet.
    """

    def __init__(self, tasks: Callable[[], InternalRequests | None]):
        self._tasks = tasks

    async def listing(self, identity: Identity) -> JsonDict:
        """The newest batches, jobs and files that a viewer may see. Times are seconds since 1970.
        Raises StoreUnavailable.
        """
        now = time.time()
        tasks = self._tasks()
        newest = await tasks.newest(_owner(identity), _MOST) if tasks is not None else {}
        return {
            "t": now,
            "batches": [_batch(batch, identity, now) for batch in newest.get("batches", ())],
            "jobs": [_task(job, identity) for job in newest.get("jobs", ())],
            "files": [_file(file, identity) for file in newest.get("files", ())],
        }

    async def cancel(self, id: str, identity: Identity) -> None:
        """Cancel a batch or job. Raises HttpError 404 for one that they may not see, 400 for one
        that has ended.
        """
        tasks = self._tasks()
        if tasks is None:
            raise HttpError(404, "this page has no batches and no jobs", code="not_found")
        await tasks.cancel_by_id(id, _owner(identity))


def adapters(history: History, names: dict[str, int], identity: Identity) -> list[JsonDict]:
    """The served adapters with the sequences that a viewer may see: how many use each now, and in
    the last minutes.

    names: adapter -> number.
    """
    rows = {number: {"name": name, "open": 0, "ended": 0} for name, number in names.items()}
    for record in history.oldest():
        row = rows.get(record.adapter)
        if row is not None and identity.may_see(record.tenant):
            row["open" if record.finished is None else "ended"] += 1
    return list(rows.values())


def _owner(identity: Identity) -> str | None:
    """The owner whose work they see; None: that of all."""
    return None if identity.is_admin else identity.tenant


def _task(task: Any, identity: Identity) -> JsonDict:
    """The row of a batch or job."""
    ended_at = task.times.get(task.status) if task.is_over else None
    return {
        "id": task.id,
        "owner": label_of(task.owner),
        "own": task.owner == identity.tenant,
        "endpoint": task.endpoint,
        "status": task.status,
        "open": not task.is_over and task.status not in ("cancelling", "finalizing"),
        "created_at": task.created_at,
        "expires_at": task.expires_at,
        "ended_at": ended_at,
    }


def _batch(batch: Any, identity: Identity, now: float) -> JsonDict:
    """left_s: seconds until its last line is answered at the pace so far; None: not known."""
    done = batch.completed + batch.failed
    began = batch.times.get("in_progress")
    left_s = None
    if batch.status == "in_progress" and began is not None and done:
        left_s = round((now - began) / done * (batch.total - done), 1)
    return _task(batch, identity) | {
        "total": batch.total,
        "completed": batch.completed,
        "failed": batch.failed,
        "left_s": left_s,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "fault": batch.faults[0].message if batch.faults else "",
    }


def _file(file: Any, identity: Identity) -> JsonDict:
    return {
        "id": file.id,
        "owner": label_of(file.owner),
        "own": file.owner == identity.tenant,
        "name": file.name,
        "purpose": file.purpose,
        "bytes": file.size,
        "created_at": file.created_at,
    }
