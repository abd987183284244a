"""Records of the store: files, batches with their lines, and jobs. Times are seconds since 1970."""

from __future__ import annotations

import uuid
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import ClassVar

import orjson

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.http.answers import ResponseModel


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A client's file, or a batch's output file. The id is the name of the file on disk."""

    TABLE: ClassVar[str] = "files"
    KIND: ClassVar[str] = "file"

    id: str
    #: Digest of its owner's key.
    owner: str
    #: "batch", or "batch_output" for answers.
    purpose: str
    #: The client's name for it; never used as a path.
    name: str
    #: Bytes.
    size: int
    created_at: int

    def shown(self) -> JsonDict:
        """The file as clients see it."""
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
    """A fault of a batch's file."""

    #: A code of OpenAI's batch errors.
    code: str
    message: str
    #: Line of the file, counted from 1; None: it concerns the whole file.
    line: int | None = None

    def shown(self) -> JsonDict:
        return {"code": self.code, "message": self.message, "param": None, "line": self.line}


@dataclass(slots=True)
class Task:
    """A batch or a job. Only the store writes its status and times."""

    TABLE: ClassVar[str]
    KIND: ClassVar[str]
    #: Final states.
    ENDED: ClassVar[tuple[str, ...]] = ("completed", "failed", "expired", "cancelled")

    id: str
    #: Digest of its owner's key.
    owner: str
    #: The route that answers its requests.
    endpoint: str
    #: The client's metadata, returned with it.
    metadata: dict[str, str]
    #: URL that receives a message at its end; empty: none.
    webhook_url: str
    created_at: int
    #: Deadline: requests without an answer by then get none.
    expires_at: int
    status: str
    #: Time of each state after the first.
    times: dict[str, int] = field(default_factory=dict[str, int])
    #: Number of attempts to send the message about its end.
    attempts: int = 0

    @property
    def is_over(self) -> bool:
        return self.status in self.ENDED

    def shown(self, response: type[ResponseModel]) -> JsonDict:
        """A model's fields: `{status}_at` from `times`, others attributes, null where empty."""
        values: JsonDict = {f"{status}_at": time for status, time in self.times.items()}
        values["object"] = self.KIND
        return {
            name: values.get(name) or getattr(self, name, None) or None
            for name in response.__struct_fields__
        }

    def event_data(self) -> JsonDict:
        """The data of the webhook message about its end."""
        return {"id": self.id}


@dataclass(slots=True)
class Batch(Task):
    """A file of requests. Its states are those of OpenAI: validating, in_progress, finalizing and
    cancelling, then one of `ENDED`.
    """

    TABLE = "batches"
    KIND = "batch"
    ID_PREFIX: ClassVar[str] = "batch_"

    status: str = "validating"
    _: KW_ONLY
    input_file_id: str
    #: As the client wrote it, such as "24h".
    completion_window: str
    #: Ids of the output and error files; None if there are none.
    output_file_id: str | None = None
    error_file_id: str | None = None
    #: Faults of its input file.
    faults: list[Fault] = field(default_factory=list[Fault])
    #: Lines in all, those answered with a 200, and those with anything else.
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def errors(self) -> JsonDict | None:
        """Its faults in the response's form."""
        faults = [fault.shown() for fault in self.faults]
        return {"object": "list", "data": faults} if faults else None

    @property
    def request_counts(self) -> JsonDict:
        return {"total": self.total, "completed": self.completed, "failed": self.failed}


@dataclass(slots=True)
class Job(Task):
    """A single request, without its body: queued, in_progress, then one of `ENDED`."""

    TABLE = "jobs"
    KIND = "job"

    status: str = "queued"
    _: KW_ONLY
    #: The answer, if there is one: JSON of an object with status_code, request_id and body.
    answer: bytes | None = None

    @property
    def response(self) -> orjson.Fragment | None:
        """The answer as a part of a larger JSON text."""
        return None if self.answer is None else orjson.Fragment(self.answer)

    def event_data(self) -> JsonDict:
        metadata = self.metadata or None
        return {"id": self.id, "metadata": metadata, "response": self.response}


class LineOutcome(IntEnum):
    """Outcome of a line: answered with a 200, or with another status."""

    COMPLETED = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a batch's file: its position in bytes, and its custom_id."""

    #: Counted from 1.
    number: int
    #: Unique in its file.
    custom_id: str
    start: int
    size: int

    def read(self, path: Path) -> bytes:
        """Read the line's bytes from the file. Blocks."""
        with path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.size)

    def duplicate(self) -> Fault:
        """The fault of a line whose custom_id occurred before."""
        message = f"line {self.number} has the custom_id of a line before it"
        return Fault("duplicate_custom_id", message, self.number)


@dataclass(frozen=True, slots=True)
class AnsweredLine:
    """A line at the end of its batch; outcome and answer are empty if it was not answered."""

    number: int
    custom_id: str
    outcome: LineOutcome | None
    #: Its line of the output file or of the error file.
    answer: bytes


def new_id(prefix: str) -> str:
    """A random id with a prefix: "file-...", "batch_..." or "job_..."."""
    return prefix + uuid.uuid4().hex
