"""The lines of the table of routes that are about jobs."""

from __future__ import annotations

from jitney.engine.api.jobs import forms, handlers
from jitney.engine.api.routing import HttpRoute

_GET = ("GET",)
_POST = ("POST",)

JOB_ROUTES = (
    HttpRoute(
        "/v1/jobs",
        _POST,
        handlers.create_job,
        "answer one request later",
        body=forms.JobBody,
        answer=forms.JobAnswer,
        status=202,
    ),
    HttpRoute(
        "/v1/jobs",
        _GET,
        handlers.list_jobs,
        "your jobs",
        query=forms.JobQuery,
        answer=forms.JobList,
    ),
    HttpRoute(
        "/v1/jobs/{job_id}",
        _GET,
        handlers.show_job,
        "how far a job is, and its answer",
        answer=forms.JobAnswer,
    ),
    HttpRoute(
        "/v1/jobs/{job_id}/events",
        _GET,
        handlers.job_events,
        "a job at each change, as server-sent events",
        media_type="text/event-stream",
    ),
    HttpRoute(
        "/v1/jobs/{job_id}/cancel",
        _POST,
        handlers.cancel_job,
        "cancel a job",
        answer=forms.JobAnswer,
    ),
)
