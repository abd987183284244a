"""What clients send to the routes of files and batches, and what they get."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from jitney.engine.server.chat.schema import Metadata
from jitney.engine.server.http.answers import ResponseModel

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])\Z")
_LONGEST_WINDOW_S = 7 * 86400


def window_s(text: str) -> int:
    """Seconds of a completion window such as "24h". Raises ValueError."""
    found = _WINDOW.match(text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= _LONGEST_WINDOW_S:
        raise ValueError("must be a number with s, m, h or d behind it, at most 7d, such as 24h")
    return seconds


def check_window(text: str) -> str:
    """Raise ValueError unless it is a completion window."""
    window_s(text)
    return text


class BatchBody(BaseModel):
    """POST /v1/batches. metadata.webhook_url: where the end is told, if the server allows it."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    input_file_id: Annotated[str, Field(min_length=1, max_length=128)]
    #: The route that every line names.
    endpoint: Annotated[str, Field(min_length=1, max_length=256)]
    completion_window: Annotated[str, AfterValidator(check_window)]
    metadata: Metadata | None = None
    #: Not supported: files stay until they are deleted.
    output_expires_after: None = None

    @property
    def webhook_url(self) -> str:
        """Where the end is told; empty: nowhere."""
        return (self.metadata or {}).get("webhook_url", "")


class FileForm(BaseModel):
    """POST /v1/files, as multipart/form-data."""

    #: JSON Lines, in UTF-8.
    file: Annotated[str, Field(json_schema_extra={"format": "binary"})]
    purpose: Literal["batch"]


class FileAnswer(ResponseModel):
    """A file, without its bytes."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    expires_at: None


class FileList(ResponseModel):
    """GET /v1/files."""

    object: Literal["list"]
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(ResponseModel):
    """DELETE /v1/files/{file_id}."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchFault(ResponseModel):
    """Why a batch's file cannot be worked on; line: counted from 1."""

    code: str
    message: str
    param: None
    line: int | None


class BatchFaults(ResponseModel):
    """At most ten of them."""

    object: Literal["list"]
    data: list[BatchFault]


class RequestCounts(ResponseModel):
    """Lines in all, those answered with a 200, and those with anything else."""

    total: int
    completed: int
    failed: int


class BatchAnswer(ResponseModel):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(ResponseModel):
    """GET /v1/batches."""

    object: Literal["list"]
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool
