"""The routes of files and batches, and their lines of the table. What belongs to another key is
not there.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Annotated, Literal

from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from jitney.engine.common.errors import RequestError
from jitney.engine.config import ServerSection
from jitney.engine.server.chat.schema import checked
from jitney.engine.server.http.access import client_of
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.errors import HttpError, echo
from jitney.engine.server.http.jsonio import json_answer, read_object
from jitney.engine.server.http.queries import PageQuery, listed, read_query
from jitney.engine.server.http.routing import HttpRoute
from jitney.engine.server.http.streaming import StreamedAnswer
from jitney.engine.server.tasks.batches.forms import (
    BatchAnswer,
    BatchBody,
    BatchList,
    FileAnswer,
    FileDeleted,
    FileForm,
    FileList,
    window_s,
)
from jitney.engine.server.tasks.batches.host import RequestHost
from jitney.engine.server.tasks.batches.keeper import StoreKeeper
from jitney.engine.server.tasks.batches.records import Batch, StoredFile, new_id
from jitney.engine.server.tasks.batches.service import Batches
from jitney.engine.server.tasks.batches.store import BatchStore, StoreUnavailable
from jitney.engine.server.tasks.batches.upload import Upload
from jitney.engine.server.tasks.batches.webhooks import check_webhook_url

_GET = ("GET",)
_POST = ("POST",)
_DELETE = ("DELETE",)
_BLOCK = 1 << 16
#: Batches that are over and are remembered, of one key.
_KEPT_BATCHES = 1000
_MOST_LISTED = 10_000


class _FileQuery(BaseModel):
    """Which files are listed: those behind `after`."""

    after: str = ""
    limit: Annotated[int, Field(ge=1, le=_MOST_LISTED)] = _MOST_LISTED
    order: Literal["asc", "desc"] = "desc"
    purpose: Literal["batch", "batch_output"] | None = None


async def _upload_file(host: RequestHost, request: Request) -> Response:
    batches = _batches(host)
    keeper = await batches.keeper()
    owner = Context.of(request.scope).tenant
    await keeper.do(BatchStore.check_room, owner, host.settings.server)
    id = new_id("file-")
    async with batches.uploading(client_of(request.scope)):
        upload = await _received(request, keeper, id, host.settings.server.file_limit)
        try:
            _check_purpose(upload)
            await keeper.do(BatchStore.check_room, owner, host.settings.server, upload.size)
            file = StoredFile(id, owner, "batch", upload.name, upload.size, int(time.time()))
            await keeper.on_disk(keeper.part(id).rename, keeper.path(id))
            await keeper.do(BatchStore.add_file, file)
        except StoreUnavailable:
            # Only then: where the client has left, the file may be written down all the same.
            keeper.path(id).unlink(missing_ok=True)
            keeper.part(id).unlink(missing_ok=True)
            raise
        except BaseException:
            keeper.part(id).unlink(missing_ok=True)
            raise
    notes = Context.of(request.scope).notes
    notes.ignored.extend(name for name in upload.fields if name != "purpose")
    return json_answer(file.shown())


async def _received(request: Request, keeper: StoreKeeper, id: str, limit: int) -> Upload:
    try:
        return await Upload.receive(request, keeper, keeper.part(id), limit)
    except ClientDisconnect:
        Context.of(request.scope).left = True
        raise HttpError(400, "the client left before its file was there", close=True) from None


def _check_purpose(upload: Upload) -> None:
    for name in upload.fields:
        if name.startswith("expires_after"):
            raise RequestError(
                "files stay until they are deleted; expires_after is not supported here",
                code="unsupported_parameter",
                param="expires_after",
            )
    if upload.fields.get("purpose") != "batch":
        raise RequestError('purpose must be "batch"', param="purpose")


async def _list_files(host: RequestHost, request: Request) -> Response:
    keeper = await _batches(host).keeper()
    query = read_query(request, _FileQuery)
    files, more = await keeper.do(
        BatchStore.files,
        Context.of(request.scope).tenant,
        after=query.after,
        limit=query.limit,
        purpose=query.purpose or "",
        newest_first=query.order == "desc",
    )
    return json_answer(listed([file.shown() for file in files], more=more))


async def _show_file(host: RequestHost, request: Request) -> Response:
    keeper = await _batches(host).keeper()
    return json_answer((await _file(keeper, request)).shown())


async def _file_content(host: RequestHost, request: Request) -> ASGIApp:
    keeper = await _batches(host).keeper()
    file = await _file(keeper, request)
    headers = {"content-type": "application/octet-stream", "x-content-type-options": "nosniff"}
    return StreamedAnswer(_blocks_of(keeper, file.id), headers)


async def _blocks_of(keeper: StoreKeeper, file_id: str) -> AsyncGenerator[bytes]:
    """The bytes of a file, as fast as they are taken."""
    file = await keeper.on_disk(keeper.path(file_id).open, "rb")
    try:
        while block := await keeper.on_disk(file.read, _BLOCK):
            yield block
    finally:
        file.close()


async def _delete_file(host: RequestHost, request: Request) -> Response:
    keeper = await _batches(host).keeper()
    file = await _file(keeper, request)
    needed_by = await keeper.do(BatchStore.delete_file, file.id, file.owner)
    if needed_by:
        raise HttpError(400, f"batch {needed_by} still reads this file", code="file_in_use")
    await keeper.on_disk(keeper.path(file.id).unlink, missing_ok=True)
    return json_answer({"id": file.id, "object": "file", "deleted": True})


async def _file(keeper: StoreKeeper, request: Request) -> StoredFile:
    return await keeper.find_or_404(request, "file", BatchStore.file)


async def _create_batch(host: RequestHost, request: Request) -> Response:
    batches = _batches(host)
    raw = await host.slices.result(read_object(await request.body()))
    body = checked(BatchBody, raw)
    batches.executor.route(body.endpoint, param="endpoint")
    keeper, runner = await batches.keeper(), await batches.runner()
    context = Context.of(request.scope)
    batch = _new_batch(host, body, context.tenant)
    await _check_batch(keeper, host.settings.server, batch)
    await keeper.do(BatchStore.forget_ended, batch.owner, _KEPT_BATCHES)
    await keeper.do(BatchStore.add_batch, batch)
    runner.begin(batch.id)
    context.notes.ignored.extend(name for name in raw if name not in BatchBody.model_fields)
    return json_answer(batch.shown())


def _new_batch(host: RequestHost, body: BatchBody, owner: str) -> Batch:
    host.check_background()
    created_at = int(time.time())
    prefixes = host.settings.server.webhook_prefixes
    check_webhook_url(prefixes, body.webhook_url, "metadata.webhook_url")
    return Batch(
        id=new_id("batch_"),
        owner=owner,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        metadata=body.metadata or {},
        webhook_url=body.webhook_url,
        created_at=created_at,
        expires_at=created_at + window_s(body.completion_window),
    )


async def _check_batch(keeper: StoreKeeper, server: ServerSection, batch: Batch) -> None:
    """Raise HttpError or RequestError if its file is not there, or its key has too many."""
    file = await keeper.do(BatchStore.file, batch.input_file_id, batch.owner)
    if file is None:
        id = echo(batch.input_file_id)
        raise HttpError(404, f"no file {id}", code="not_found", param="input_file_id")
    if file.purpose != "batch":
        raise RequestError('the file\'s purpose must be "batch"', param="input_file_id")
    await keeper.do(BatchStore.check_room, batch.owner, server)
    if await keeper.do(BatchStore.open_batches, batch.owner) >= server.key_batches:
        raise RequestError(
            f"one key may have {server.key_batches} batches under way (key_batches)",
            code="rate_limit",
            retry_after=60.0,
        )


async def _list_batches(host: RequestHost, request: Request) -> Response:
    keeper = await _batches(host).keeper()
    query = read_query(request, PageQuery)
    owner = Context.of(request.scope).tenant
    batches, more = await keeper.do(BatchStore.batches, owner, after=query.after, limit=query.limit)
    return json_answer(listed([batch.shown() for batch in batches], more=more))


async def _show_batch(host: RequestHost, request: Request) -> Response:
    keeper = await _batches(host).keeper()
    return json_answer((await _batch(keeper, request)).shown())


async def _cancel_batch(host: RequestHost, request: Request) -> Response:
    batches = _batches(host)
    keeper, runner = await batches.keeper(), await batches.runner()
    batch = await _batch(keeper, request)
    await runner.cancel(batch.id)
    batch = await _batch(keeper, request)
    if not batch.status.startswith("cancel"):
        raise HttpError(
            400, f"batch {batch.id} is {batch.status} and cannot be cancelled", code="batch_ended"
        )
    return json_answer(batch.shown())


async def _batch(keeper: StoreKeeper, request: Request) -> Batch:
    return await keeper.find_or_404(request, "batch", BatchStore.batch)


def _batches(host: RequestHost) -> Batches:
    assert host.own_requests is not None  # the application has made them
    return host.own_requests.batches


BATCH_ROUTES = (
    HttpRoute(
        "/v1/files",
        _POST,
        _upload_file,
        "upload a file of requests",
        uploads=True,
        body=FileForm,
        answer=FileAnswer,
    ),
    HttpRoute(
        "/v1/files",
        _GET,
        _list_files,
        "your files",
        query=_FileQuery,
        answer=FileList,
    ),
    HttpRoute(
        "/v1/files/{file_id}",
        _GET,
        _show_file,
        "what is known of a file",
        answer=FileAnswer,
    ),
    HttpRoute(
        "/v1/files/{file_id}",
        _DELETE,
        _delete_file,
        "delete a file",
        answer=FileDeleted,
    ),
    HttpRoute(
        "/v1/files/{file_id}/content",
        _GET,
        _file_content,
        "the bytes of a file",
        media_type="application/octet-stream",
    ),
    HttpRoute(
        "/v1/batches",
        _POST,
        _create_batch,
        "answer a file of requests in the background",
        body=BatchBody,
        answer=BatchAnswer,
    ),
    HttpRoute(
        "/v1/batches",
        _GET,
        _list_batches,
        "your batches",
        query=PageQuery,
        answer=BatchList,
    ),
    HttpRoute(
        "/v1/batches/{batch_id}",
        _GET,
        _show_batch,
        "how far a batch is",
        answer=BatchAnswer,
    ),
    HttpRoute(
        "/v1/batches/{batch_id}/cancel",
        _POST,
        _cancel_batch,
        "cancel a batch",
        answer=BatchAnswer,
    ),
)
