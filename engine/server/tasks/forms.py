"""The bodies of requests and responses of the routes of files, batches and jobs."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.chat.schema import Metadata
from jitney.engine.server.http.answers import ResponseModel

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])\Z")
_LONGEST_WINDOW_S = 7 * 86400


def window_s(text: str) -> int:
    """Seconds of a completion window such as "24h". Raises ValueError."""
    match = _WINDOW.match(text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST_WINDOW_S:
        raise ValueError("must be a number with s, m, h or d behind it, at most 7d, such as 24h")
    return seconds


def _check_window(text: str) -> str:
    window_s(text)
    return text


#: Time limit of a batch or a job, such as "24h".
_Window = Annotated[str, AfterValidator(_check_window)]
#: Path of the route that answers it.
_Endpoint = Annotated[str, Field(min_length=1, max_length=256)]


class BatchBody(BaseModel):
    """POST /v1/batches. metadata.webhook_url: receives a message at the end, if allowed."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    input_file_id: Annotated[str, Field(min_length=1, max_length=128)]
    endpoint: _Endpoint
    completion_window: _Window
    metadata: Metadata | None = None
    #: Not supported: files stay until they are deleted.
    output_expires_after: None = None

    @property
    def webhook_url(self) -> str:
        """URL that receives a message at the end; empty: none."""
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


class _Page(ResponseModel):
    object: Literal["list"]
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(_Page):
    """GET /v1/files."""

    data: list[FileAnswer]


class FileDeleted(ResponseModel):
    """DELETE /v1/files/{file_id}."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchFault(ResponseModel):
    """A fault of a batch's file; line: counted from 1."""

    code: str
    message: str
    param: None
    line: int | None


class BatchFaults(ResponseModel):
    """A list of at most ten faults."""

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


class BatchList(_Page):
    """GET /v1/batches."""

    data: list[BatchAnswer]


class JobBody(BaseModel):
    """POST /v1/jobs."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    endpoint: _Endpoint
    #: Body of a request to the endpoint, without `stream`.
    body: JsonDict
    window: _Window = "24h"
    #: URL that receives a message at the end, if allowed.
    webhook_url: Annotated[str, Field(max_length=2048)] | None = None
    metadata: Metadata | None = None


class JobResponse(ResponseModel):
    """The route's answer, as over HTTP."""

    status_code: int
    request_id: str
    body: JsonDict


class JobSummary(ResponseModel):
    """A job in a list: without its answer."""

    id: str
    object: Literal["job"]
    endpoint: str
    status: Literal["queued", "in_progress", "completed", "failed", "cancelled", "expired"]
    created_at: int
    in_progress_at: int | None
    completed_at: int | None
    failed_at: int | None
    cancelled_at: int | None
    expired_at: int | None
    expires_at: int
    webhook_url: str | None
    metadata: dict[str, str] | None


class JobAnswer(JobSummary):
    """A job."""

    response: JobResponse | None


class JobList(_Page):
    """GET /v1/jobs."""

    data: list[JobSummary]
