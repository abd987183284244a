"""What clients send to the routes of jobs, and what they get."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from jitney.engine.common.requests import JsonDict
from jitney.engine.server.chat.schema import Metadata
from jitney.engine.server.http.answers import ResponseModel
from jitney.engine.server.tasks.batches.forms import check_window


class JobBody(BaseModel):
    """POST /v1/jobs."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    #: The route that answers it.
    endpoint: Annotated[str, Field(min_length=1, max_length=256)]
    #: What that route takes, without `stream`.
    body: JsonDict
    #: How long it may take, such as "30m".
    window: Annotated[str, AfterValidator(check_window)] = "24h"
    #: Where its end is told, if the server allows it.
    webhook_url: Annotated[str, Field(max_length=2048)] | None = None
    metadata: Metadata | None = None


class JobResponse(ResponseModel):
    """What the route answered, as HTTP would have."""

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


class JobList(ResponseModel):
    """GET /v1/jobs."""

    object: Literal["list"]
    data: list[JobSummary]
    first_id: str | None
    last_id: str | None
    has_more: bool
