"""Handlers and routes of batches and jobs. Tasks of other keys are 404."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from jitney.engine.common.errors import RequestError
from jitney.engine.server.chat.schema import checked
from jitney.engine.server.http.answers import ResponseModel
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.jsonio import json_answer
from jitney.engine.server.http.queries import PageQuery, listed, read_query
from jitney.engine.server.http.routing import HttpRoute
from jitney.engine.server.http.server_context import ServerContext
from jitney.engine.server.http.streaming import StreamingWriter
from jitney.engine.server.tasks import batch_rows, job_rows
from jitney.engine.server.tasks.file_routes import FILE_ROUTES
from jitney.engine.server.tasks.forms import (
    BatchAnswer,
    BatchBody,
    BatchList,
    JobAnswer,
    JobBody,
    JobList,
    JobSummary,
    window_s,
)
from jitney.engine.server.tasks.records import Batch, Job, Task, new_id
from jitney.engine.server.tasks.service import InternalRequests
from jitney.engine.server.tasks.store import TaskStore
from jitney.engine.server.tasks.webhook_targets import check_webhook_url

_MOST_KEY_CHARS = 255


async def _create_batch(server: ServerContext, request: Request) -> Response:
    body = await _body(server, request, BatchBody)
    tasks = InternalRequests.of(server)
    tasks.check_endpoint(body.endpoint)
    keeper, runner = await tasks.keeper(), await tasks.runner()
    server.check_background()
    limits = server.settings.server
    check_webhook_url(limits.webhook_prefixes, body.webhook_url, "metadata.webhook_url")
    created_at = int(time.time())
    batch = Batch(
        id=new_id(Batch.ID_PREFIX),
        owner=Context.of(request).tenant,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        metadata=body.metadata or {},
        webhook_url=body.webhook_url,
        created_at=created_at,
        expires_at=created_at + window_s(body.completion_window),
    )
    await keeper.do(batch_rows.add, batch, limits)
    runner.begin(batch)
    return json_answer(batch.shown(BatchAnswer))


async def _create_job(server: ServerContext, request: Request) -> Response:
    body = await _body(server, request, JobBody)
    tasks = InternalRequests.of(server)
    tasks.check_endpoint(body.endpoint)
    if body.body.get("stream"):
        raise RequestError("a job has no stream; see /v1/jobs/{job_id}/events", param="body.stream")
    keeper, runner = await tasks.keeper(), await tasks.runner()
    url, limits = body.webhook_url or "", server.settings.server
    check_webhook_url(limits.webhook_prefixes, url, "webhook_url")
    created_at = int(time.time())
    job = Job(
        id=new_id("job_"),
        owner=Context.of(request).tenant,
        endpoint=body.endpoint,
        metadata=body.metadata or {},
        webhook_url=url,
        created_at=created_at,
        expires_at=created_at + window_s(body.window),
    )
    stored = await keeper.do(
        job_rows.add,
        job,
        limits,
        body=orjson.dumps(body.body),
        repeat_key=_repeat_key(request),
        digest=_digest(body),
    )
    if stored is job:
        runner.begin(job)
    return json_answer(stored.shown(JobAnswer), {"location": f"/v1/jobs/{stored.id}"}, status=202)


async def _body[B: BaseModel](server: ServerContext, request: Request, kind: type[B]) -> B:
    """The validated body of a request; undeclared fields are noted as ignored."""
    raw = await server.json_body(request)
    body = checked(kind, raw)
    ignored = [name for name in raw if name not in kind.model_fields]
    Context.of(request).notes.ignored.extend(ignored)
    return body


def _repeat_key(request: Request) -> str | None:
    """The request's idempotency key: a repeated request returns the job of the first."""
    key = request.headers.get(job_rows.REPEAT_HEADER)
    if key is not None and not 0 < len(key) <= _MOST_KEY_CHARS:
        raise RequestError(
            f"Idempotency-Key must have 1 to {_MOST_KEY_CHARS} characters",
            param=job_rows.REPEAT_HEADER,
        )
    return key


def _digest(body: JobBody) -> str:
    text = orjson.dumps(body.model_dump(), option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(text).hexdigest()


@dataclass(frozen=True, slots=True)
class _Handlers:
    """The handlers that batches and jobs share."""

    kind: type[Batch | Job]
    #: Response models of a task, and of a task in a list.
    answer: type[ResponseModel]
    item: type[ResponseModel]

    async def list(self, server: ServerContext, request: Request) -> Response:
        keeper = await InternalRequests.of(server).keeper()
        query = read_query(request, PageQuery)
        owner = Context.of(request).tenant
        tasks, more = await keeper.do(
            TaskStore.page, self.kind, owner, after=query.after, limit=query.limit
        )
        return json_answer(listed([task.shown(self.item) for task in tasks], more=more))

    async def show(self, server: ServerContext, request: Request) -> Response:
        return json_answer((await self.find(server, request)).shown(self.answer))

    async def cancel(self, server: ServerContext, request: Request) -> Response:
        task = await self.find(server, request)
        task = await InternalRequests.of(server).cancelled(task)
        return json_answer(task.shown(self.answer))

    async def find(self, server: ServerContext, request: Request) -> Task:
        """The task of the path's id. Raises HttpError 404."""
        return await InternalRequests.of(server).find_or_404(request, self.kind)


_BATCHES = _Handlers(Batch, BatchAnswer, BatchAnswer)
_JOBS = _Handlers(Job, JobAnswer, JobSummary)


async def _job_events(server: ServerContext, request: Request) -> Response:
    await _JOBS.find(server, request)  # raises before the stream begins
    return StreamingResponse(_events(server, request), headers=StreamingWriter.EVENT_STREAM)


async def _events(server: ServerContext, request: Request) -> AsyncGenerator[bytes]:
    """The job now and at each change up to its end; comments in between as keep-alive."""
    runner = await InternalRequests.of(server).runner()
    status = ""
    while not runner.is_stopped:
        changed = runner.changed(request.path_params["job_id"])
        job = await _JOBS.find(server, request)
        if job.status != status:
            status = job.status
            data = orjson.dumps(job.shown(JobAnswer))
            yield b"event: job.%s\ndata: %s\n\n" % (status.encode(), data)
        if job.is_over:
            return
        try:
            async with asyncio.timeout(server.settings.comment_s):
                await changed.wait()
        except TimeoutError:
            yield b": still here\n\n"


TASK_ROUTES = (
    *FILE_ROUTES,
    HttpRoute(
        "POST /v1/batches",
        _create_batch,
        "answer a file of requests in the background",
        body=BatchBody,
        answer=BatchAnswer,
    ),
    HttpRoute(
        "GET /v1/batches",
        _BATCHES.list,
        "your batches",
        query=PageQuery,
        answer=BatchList,
    ),
    HttpRoute(
        "GET /v1/batches/{batch_id}",
        _BATCHES.show,
        "how far a batch is",
        answer=BatchAnswer,
    ),
    HttpRoute(
        "POST /v1/batches/{batch_id}/cancel",
        _BATCHES.cancel,
        "cancel a batch",
        answer=BatchAnswer,
    ),
    HttpRoute(
        "POST /v1/jobs",
        _create_job,
        "answer one request later",
        body=JobBody,
        answer=JobAnswer,
        status=202,
    ),
    HttpRoute(
        "GET /v1/jobs",
        _JOBS.list,
        "your jobs",
        query=PageQuery,
        answer=JobList,
    ),
    HttpRoute(
        "GET /v1/jobs/{job_id}",
        _JOBS.show,
        "how far a job is, and its answer",
        answer=JobAnswer,
    ),
    HttpRoute(
        "GET /v1/jobs/{job_id}/events",
        _job_events,
        "a job at each change, as server-sent events",
        media_type="text/event-stream",
    ),
    HttpRoute(
        "POST /v1/jobs/{job_id}/cancel",
        _JOBS.cancel,
        "cancel a job",
        answer=JobAnswer,
    ),
)
