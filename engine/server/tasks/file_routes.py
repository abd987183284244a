"""Handlers and routes of files. Files of other keys are 404."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Literal

from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from jitney.engine.common.database import StoreUnavailable
from jitney.engine.common.errors import RequestError
from jitney.engine.server.http.access import client_of
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.errors import HttpError
from jitney.engine.server.http.jsonio import json_answer
from jitney.engine.server.http.queries import listed, read_query
from jitney.engine.server.http.routing import HttpRoute
from jitney.engine.server.http.server_context import ServerContext
from jitney.engine.server.http.streaming import StreamingResponse
from jitney.engine.server.tasks.forms import FileAnswer, FileDeleted, FileForm, FileList
from jitney.engine.server.tasks.keeper import StoreKeeper
from jitney.engine.server.tasks.records import StoredFile
from jitney.engine.server.tasks.service import InternalRequests
from jitney.engine.server.tasks.store import TaskStore
from jitney.engine.server.tasks.upload import Upload

_BLOCK = 1 << 16
_MOST_LISTED = 10_000


class _FileQuery(BaseModel):
    """A page of files: those after the id `after`."""

    after: str = ""
    limit: Annotated[int, Field(ge=1, le=_MOST_LISTED)] = _MOST_LISTED
    order: Literal["asc", "desc"] = "desc"
    purpose: Literal["batch", "batch_output"] | None = None


async def _upload_file(server: ServerContext, request: Request) -> Response:
    tasks = InternalRequests.of(server)
    keeper = await tasks.keeper()
    context = Context.of(request)
    limits = server.settings.server
    await keeper.do(TaskStore.check_room, context.tenant, limits)
    new = keeper.new_file()
    async with tasks.uploading(client_of(request.scope)):
        try:
            upload = Upload(request, limits.file_limit)
            async for block in upload.blocks():
                await keeper.on_disk(new.write, block)
            _check_purpose(upload)
            await keeper.do(TaskStore.check_room, context.tenant, limits, upload.size)
            file = await keeper.on_disk(new.end, context.tenant, "batch", upload.name)
        except ClientDisconnect:
            context.left = True
            raise HttpError(400, "the client left before its file was there", close=True) from None
        finally:
            new.drop()
    try:
        await keeper.do(TaskStore.insert, file)
    except StoreUnavailable:
        # After the record: if the client has left, the file may have been stored all the same.
        keeper.path(file.id).unlink(missing_ok=True)
        raise
    context.notes.ignored.extend(name for name in upload.fields if name != "purpose")
    return json_answer(file.shown())


def _check_purpose(upload: Upload) -> None:
    if any(name.startswith("expires_after") for name in upload.fields):
        raise RequestError(
            "files stay until they are deleted; expires_after is not supported here",
            code="unsupported_parameter",
            param="expires_after",
        )
    if upload.fields.get("purpose") != "batch":
        raise RequestError('purpose must be "batch"', param="purpose")


async def _list_files(server: ServerContext, request: Request) -> Response:
    keeper = await InternalRequests.of(server).keeper()
    query = read_query(request, _FileQuery)
    columns = {} if query.purpose is None else {"purpose": query.purpose}
    files, more = await keeper.do(
        TaskStore.page,
        StoredFile,
        Context.of(request).tenant,
        after=query.after,
        limit=query.limit,
        newest_first=query.order == "desc",
        **columns,
    )
    return json_answer(listed([file.shown() for file in files], more=more))


async def _show_file(server: ServerContext, request: Request) -> Response:
    return json_answer((await _file(server, request)).shown())


async def _file_content(server: ServerContext, request: Request) -> ASGIApp:
    file = await _file(server, request)
    headers = {"content-type": "application/octet-stream", "x-content-type-options": "nosniff"}
    keeper = await InternalRequests.of(server).keeper()
    return StreamingResponse(_blocks(keeper, file.id), headers)


async def _blocks(keeper: StoreKeeper, file_id: str) -> AsyncGenerator[bytes]:
    """The bytes of a file in blocks, read on demand."""
    file = await keeper.on_disk(keeper.path(file_id).open, "rb")
    try:
        while block := await keeper.on_disk(file.read, _BLOCK):
            yield block
    finally:
        file.close()


async def _delete_file(server: ServerContext, request: Request) -> Response:
    keeper = await InternalRequests.of(server).keeper()
    file = await _file(server, request)
    needed_by = await keeper.do(TaskStore.delete_file, file)
    if needed_by:
        raise HttpError(400, f"batch {needed_by} still reads this file", code="file_in_use")
    await keeper.on_disk(keeper.path(file.id).unlink, missing_ok=True)
    return json_answer({"id": file.id, "object": "file", "deleted": True})


async def _file(server: ServerContext, request: Request) -> StoredFile:
    return await InternalRequests.of(server).find_or_404(request, StoredFile)


FILE_ROUTES = (
    HttpRoute(
        "POST /v1/files",
        _upload_file,
        "upload a file of requests",
        uploads=True,
        body=FileForm,
        answer=FileAnswer,
    ),
    HttpRoute(
        "GET /v1/files",
        _list_files,
        "your files",
        query=_FileQuery,
        answer=FileList,
    ),
    HttpRoute(
        "GET /v1/files/{file_id}",
        _show_file,
        "what is known of a file",
        answer=FileAnswer,
    ),
    HttpRoute(
        "DELETE /v1/files/{file_id}",
        _delete_file,
        "delete a file",
        answer=FileDeleted,
    ),
    HttpRoute(
        "GET /v1/files/{file_id}/content",
        _file_content,
        "the bytes of a file",
        media_type="application/octet-stream",
    ),
)
