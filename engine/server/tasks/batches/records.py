"""What the store keeps: files, batches and their lines. Plain data; times: seconds since 1970."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.tasks.batches.rows import OwnedTable

#: States of a batch whose time an answer tells, beside the times of coming and expiring.
_TIMED = (
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a client's, or one with a batch's answers. Its bytes lie under its id."""

    id: str
    #: Whose it is: the digest of the key that it came with.
    owner: str
    #: "batch", or "batch_output" for answers.
    purpose: str
    #: As the client called it; never a path.
    name: str
    #: Bytes.
    size: int
    #: Seconds since 1970.
    created_at: int

    def shown(self) -> JsonDict:
        """As clients see it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_at,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "expires_at": None,
        }


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a batch's file cannot be worked on."""

    #: As in OpenAI's errors of batches.
    code: str
    message: str
    #: Of the file, counted from 1; None where it is not about one line.
    line: int | None = None

    def shown(self) -> JsonDict:
        """As clients see it."""
        return {"code": self.code, "message": self.message, "param": None, "line": self.line}


@dataclass(slots=True)
class Batch:
    """One batch. Its state and the times of its changes are the store's to write."""

    id: str
    #: As of a file.
    owner: str
    #: The route that its lines name.
    endpoint: str
    #: Whose lines are asked.
    input_file_id: str
    #: As the client wrote it, such as "24h".
    completion_window: str
    #: The client's own notes, given back with it.
    metadata: dict[str, str]
    #: Where its end is told; empty: nowhere.
    webhook_url: str
    #: This and all times: seconds since 1970.
    created_at: int
    #: Lines that were not asked by then are not any more.
    expires_at: int
    #: As OpenAI names them: validating, in_progress, finalizing and cancelling, then one of
    #: `OwnedTable.ENDED`.
    status: str = "validating"
    #: When each other state was reached.
    times: dict[str, int] = field(default_factory=dict[str, int])
    #: Files of the lines answered with a 200, and of the other ones; None while there are none.
    output_file_id: str | None = None
    error_file_id: str | None = None
    #: What is wrong with its input file.
    faults: list[Fault] = field(default_factory=list[Fault])
    #: Lines in all, those answered with a 200, and the other ones.
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def is_over(self) -> bool:
        return self.status in OwnedTable.ENDED

    def shown(self) -> JsonDict:
        """As clients see it."""
        faults = [fault.shown() for fault in self.faults]
        shown: JsonDict = {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": faults} if faults else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": self.metadata or None,
        }
        for status in _TIMED:
            shown[f"{status}_at"] = self.times.get(status)
        return shown


class LineOutcome(IntEnum):
    """What became of a line."""

    COMPLETED = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a batch's file: where it lies, in bytes, and what it calls itself."""

    #: Of the file, counted from 1.
    number: int
    #: What the client calls it, unique in its file.
    custom_id: str
    #: Its first byte in the file, and how many it has.
    start: int
    size: int

    def read(self, path: Path) -> bytes:
        """Its bytes in the file. Blocks."""
        with path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.size)


@dataclass(frozen=True, slots=True)
class AnsweredLine:
    """A line at the end of its batch; without outcome and answer if it never had one."""

    number: int
    custom_id: str
    outcome: LineOutcome | None
    #: Its line of the output file or of the error file.
    answer: bytes


def new_id(kind: str) -> str:
    """An id that nobody can guess: "file-...", "batch_..." or "job_..."."""
    return kind + uuid.uuid4().hex
