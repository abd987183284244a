"""The routes of jobs, and their lines of the table. What belongs to another key is not there."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from jitney.engine.common.errors import RequestError
from jitney.engine.server.chat.schema import checked
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.disconnect import until_disconnect
from jitney.engine.server.http.errors import HttpError
from jitney.engine.server.http.jsonio import json_answer, read_object
from jitney.engine.server.http.queries import PageQuery, listed, read_query
from jitney.engine.server.http.routing import HttpRoute
from jitney.engine.server.http.streaming import StreamingWriter
from jitney.engine.server.tasks.batches.forms import window_s
from jitney.engine.server.tasks.batches.host import RequestHost
from jitney.engine.server.tasks.batches.keeper import StoreKeeper
from jitney.engine.server.tasks.batches.records import new_id
from jitney.engine.server.tasks.batches.webhooks import check_webhook_url
from jitney.engine.server.tasks.jobs.forms import JobAnswer, JobBody, JobList
from jitney.engine.server.tasks.jobs.records import Job, JobRequest
from jitney.engine.server.tasks.jobs.service import Jobs
from jitney.engine.server.tasks.jobs.table import JOBS

_GET = ("GET",)
_POST = ("POST",)
#: Jobs that are over and are remembered, of one key.
_KEPT_JOBS = 1000
_MOST_KEY_CHARS = 255


async def _create_job(host: RequestHost, request: Request) -> Response:
    jobs = _jobs(host)
    raw = await host.slices.result(read_object(await request.body()))
    body = checked(JobBody, raw)
    jobs.executor.route(body.endpoint, param="endpoint")
    if body.body.get("stream"):
        raise RequestError("a job has no stream; see /v1/jobs/{job_id}/events", param="body.stream")
    keeper, runner = await jobs.keeper(), await jobs.runner()
    context = Context.of(request.scope)
    job = _new_job(host, body, context.tenant)
    asked = JobRequest(orjson.dumps(body.body), _repeat_key(request), _digest(body))
    context.notes.ignored.extend(name for name in raw if name not in JobBody.model_fields)
    server = host.settings.server
    kept = await keeper.do(
        JOBS.add,
        job,
        asked,
        most_open=server.key_jobs,
        keep=_KEPT_JOBS,
        most_bytes=server.key_file_bytes,
    )
    if kept is job:
        runner.begin(job)
    return _accepted(kept)


def _new_job(host: RequestHost, body: JobBody, owner: str) -> Job:
    created_at = int(time.time())
    url = body.webhook_url or ""
    check_webhook_url(host.settings.server.webhook_prefixes, url, "webhook_url")
    return Job(
        id=new_id("job_"),
        owner=owner,
        endpoint=body.endpoint,
        metadata=body.metadata or {},
        webhook_url=url,
        created_at=created_at,
        expires_at=created_at + window_s(body.window),
    )


def _repeat_key(request: Request) -> str | None:
    """What the client calls this request, so that it may send it again without doing it again."""
    key = request.headers.get(JobRequest.REPEAT_HEADER)
    if key is not None and not 0 < len(key) <= _MOST_KEY_CHARS:
        raise RequestError(
            f"Idempotency-Key must have 1 to {_MOST_KEY_CHARS} characters",
            param=JobRequest.REPEAT_HEADER,
        )
    return key


def _digest(body: JobBody) -> str:
    text = orjson.dumps(body.model_dump(), option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(text).hexdigest()


def _accepted(job: Job) -> Response:
    where = {"location": f"/v1/jobs/{job.id}"}
    return json_answer(job.shown(), where, status=202)


async def _list_jobs(host: RequestHost, request: Request) -> Response:
    keeper = await _jobs(host).keeper()
    query = read_query(request, PageQuery)
    owner = Context.of(request.scope).tenant
    jobs, more = await keeper.do(JOBS.page, owner, after=query.after, limit=query.limit)
    return json_answer(listed([job.summary() for job in jobs], more=more))


async def _show_job(host: RequestHost, request: Request) -> Response:
    keeper = await _jobs(host).keeper()
    return json_answer((await _job(keeper, request)).shown())


async def _cancel_job(host: RequestHost, request: Request) -> Response:
    jobs = _jobs(host)
    keeper, runner = await jobs.keeper(), await jobs.runner()
    job = await _job(keeper, request)
    await runner.cancel(job.id)
    job = await _job(keeper, request)
    if job.status != "cancelled":
        raise HttpError(
            400, f"job {job.id} is {job.status} and cannot be cancelled", code="job_ended"
        )
    return json_answer(job.shown())


async def _job_events(host: RequestHost, request: Request) -> ASGIApp:
    jobs = _jobs(host)
    await jobs.runner()  # what raises is an answer of its own: none has begun yet
    await _job(await jobs.keeper(), request)
    return _EventAnswer(_events(jobs, request, host.settings.comment_s))


async def _events(jobs: Jobs, request: Request, comment_s: float) -> AsyncGenerator[bytes]:
    """The job now and at each change to its end, and comments where nothing changes for long."""
    keeper, runner = await jobs.keeper(), await jobs.runner()
    status = ""
    while not runner.is_stopped:
        changed = runner.changed(request.path_params["job_id"])
        job = await _job(keeper, request)
        if job.status != status:
            status = job.status
            yield b"event: job.%s\ndata: %s\n\n" % (status.encode(), orjson.dumps(job.shown()))
        if job.is_over:
            return
        try:
            async with asyncio.timeout(comment_s):
                await changed.wait()
        except TimeoutError:
            yield b": still here\n\n"


@dataclass(frozen=True, slots=True)
class _EventAnswer:
    """Events, each sent when it is there, as an ASGI application."""

    events: AsyncGenerator[bytes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Until the last one is out, or the client has left."""
        await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        parts = StreamingWriter(send)
        await parts.begin(StreamingWriter.EVENT_STREAM)
        async with aclosing(self.events) as events:
            async for event in events:
                await parts.write(event)
        await parts.end()


async def _job(keeper: StoreKeeper, request: Request) -> Job:
    return await keeper.find_or_404(request, "job", JOBS.find)


def _jobs(host: RequestHost) -> Jobs:
    assert host.own_requests is not None  # the application has made them
    return host.own_requests.jobs


JOB_ROUTES = (
    HttpRoute(
        "/v1/jobs",
        _POST,
        _create_job,
        "answer one request later",
        body=JobBody,
        answer=JobAnswer,
        status=202,
    ),
    HttpRoute(
        "/v1/jobs",
        _GET,
        _list_jobs,
        "your jobs",
        query=PageQuery,
        answer=JobList,
    ),
    HttpRoute(
        "/v1/jobs/{job_id}",
        _GET,
        _show_job,
        "how far a job is, and its answer",
        answer=JobAnswer,
    ),
    HttpRoute(
        "/v1/jobs/{job_id}/events",
        _GET,
        _job_events,
        "a job at each change, as server-sent events",
        media_type="text/event-stream",
    ),
    HttpRoute(
        "/v1/jobs/{job_id}/cancel",
        _POST,
        _cancel_job,
        "cancel a job",
        answer=JobAnswer,
    ),
)
