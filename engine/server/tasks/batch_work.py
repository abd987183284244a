"""The work on one batch: read its lines, answer them, write its files. May restart at any time."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

import orjson

from jitney.engine.server.http.routing import RouteTable
from jitney.engine.server.http.server_context import ServerContext
from jitney.engine.server.tasks import batch_rows
from jitney.engine.server.tasks.concurrency import ConcurrencyLimit
from jitney.engine.server.tasks.execution import LineExecutor, Reply
from jitney.engine.server.tasks.keeper import StoreKeeper
from jitney.engine.server.tasks.lines import MOST_FAULTS, LineReader, LineRequest
from jitney.engine.server.tasks.new_file import NewFile
from jitney.engine.server.tasks.records import (
    AnsweredLine,
    Batch,
    Fault,
    Line,
    LineOutcome,
    StoredFile,
)
from jitney.engine.server.tasks.store import StorageFull, TaskStore

#: Lines of a batch that are taken from the store at once.
_GROUP = 64
#: Lines that are written at once.
_WRITTEN = 32
#: The error of lines that were never answered, by how their batch ended.
_NEVER_ANSWERED = {
    "expired": ("batch_expired", "the completion window was over before this request was answered"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
}


class BatchWork:
    """Works on batches. Attempts of lines share one `ConcurrencyLimit` over all batches."""

    def __init__(self, context: ServerContext, table: RouteTable, keeper: StoreKeeper):
        self._context = context
        self._keeper = keeper
        self._executor = LineExecutor(context, table, background=True)
        self._limit = ConcurrencyLimit(context)

    async def run(self, id: str) -> None:
        """Process one batch to its end."""
        batch = await self._keeper.do(TaskStore.find, Batch, id)
        if batch is not None and batch.status == "validating":
            await self._validate(batch)
            batch = await self._keeper.do(TaskStore.find, Batch, id)
        if batch is not None and batch.status == "in_progress":
            await self._answer_all(batch)
            batch = await self._keeper.do(TaskStore.find, Batch, id)
        if batch is not None and not batch.is_over:
            await self._finish(batch)

    async def _validate(self, batch: Batch) -> None:
        faults = await self._read_lines(batch)
        now = int(time.time())
        if faults:
            await self._keeper.do(batch_rows.fail, batch.id, faults[:MOST_FAULTS], now)
        else:
            await self._keeper.do(batch_rows.start, batch.id, now)

    async def _read_lines(self, batch: Batch) -> list[Fault]:
        """Store the position of each line of the file; returns the file's faults."""
        server = self._context.settings.server
        await self._keeper.do(batch_rows.begin_lines, batch.id)
        path = self._keeper.path(batch.input_file_id)
        try:
            # If the limit is not known yet, it is checked when a line is answered.
            most_bytes = self._context.body_limit or server.file_limit
            reader = await asyncio.to_thread(LineReader, path, most_bytes)
        except FileNotFoundError:
            return [Fault("missing_file", "the bytes of the batch's file are not there any more")]
        faults: list[Fault] = []
        total, done = 0, False
        try:
            while not done and len(faults) < MOST_FAULTS and total <= server.batch_lines:
                group = await self._keeper.on_disk(reader.next_group)
                duplicates = await self._keeper.do(batch_rows.add_lines, batch.id, group.lines)
                faults += group.faults + [line.duplicate() for line in duplicates]
                total += len(group.lines)
                done = group.done
        finally:
            reader.close()
        if total > server.batch_lines:
            message = f"the file has more than {server.batch_lines} lines (batch_lines)"
            faults.append(Fault("too_many_lines", message))
        if not total and not faults:
            faults.append(Fault("empty_file", "the file has no lines"))
        return sorted(faults, key=lambda fault: fault.line or 0)

    async def _answer_all(self, batch: Batch) -> None:
        """Answer the lines without answers, until the batch's window ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, batch.expires_at - time.time())):
                await self._feed(batch)
        now = int(time.time())
        await self._keeper.do(batch_rows.move, batch.id, ("in_progress",), "finalizing", now)

    async def _feed(self, batch: Batch) -> None:
        """Start lines in order, at most one per seat at a time."""
        begun = ConcurrencyLimit(self._context)
        after = 0
        async with asyncio.TaskGroup() as group:
            while lines := await self._keeper.do(batch_rows.open_lines, batch.id, after, _GROUP):
                after = lines[-1].number
                for line in lines:
                    await begun.acquire(batch.owner)
                    task = group.create_task(self._answer(batch, line))
                    task.add_done_callback(lambda _: begun.release(batch.owner))

    async def _answer(self, batch: Batch, line: Line) -> None:
        read, slot = partial(self._read, batch, line), partial(self._limit.slot, batch.owner)
        reply = await self._executor.answer(read, batch.owner, batch.endpoint, slot)
        try:
            await self._keep(batch, line, reply, self._context.settings.server.key_file_bytes)
        except StorageFull as full:
            refused = Reply.of_error(full, reply.request_id, batch.endpoint)
            await self._keep(batch, line, refused, None)

    async def _read(self, batch: Batch, line: Line) -> LineRequest:
        """The request of a line. Raises StorageFull if there is no room for an answer."""
        most_bytes = self._context.settings.server.key_file_bytes
        await self._keeper.do(TaskStore.check_bytes, batch.owner, most_bytes)
        raw = await self._keeper.on_disk(line.read, self._keeper.path(batch.input_file_id))
        return await asyncio.to_thread(LineRequest.read, raw, batch.endpoint)

    async def _keep(self, batch: Batch, line: Line, reply: Reply, most_bytes: int | None) -> None:
        text = reply.line(line.custom_id)
        outcome, number = reply.outcome, line.number
        await self._keeper.do(batch_rows.answer, batch, number, outcome, text, most_bytes)

    async def _finish(self, batch: Batch) -> None:
        """Write the files of a batch and end it. Lines without answers get an error (window
        over).
        """
        status = "completed"
        if batch.status == "cancelling":
            status = "cancelled"
        elif await self._keeper.do(batch_rows.open_lines, batch.id, 0, 1):
            status = "expired"
        output, errors = self._keeper.new_file(), self._keeper.new_file()

        def write(file: NewFile, lines: Iterable[bytes]) -> None:
            for line in lines:
                file.write(line + b"\n")

        def end(file: NewFile, kind: str) -> StoredFile | None:
            name = f"{batch.id}_{kind}.jsonl"
            return file.end(batch.owner, "batch_output", name) if file.size else None

        try:
            after = 0
            while lines := await self._keeper.do(batch_rows.answers, batch.id, after, _WRITTEN):
                after = lines[-1].number
                good = [line.answer for line in lines if line.outcome is LineOutcome.COMPLETED]
                await self._keeper.on_disk(write, output, good)
                await self._keeper.on_disk(write, errors, _error_lines(lines, status))
            answered = await self._keeper.on_disk(end, output, "output")
            refused = await self._keeper.on_disk(end, errors, "error")
        except BaseException:
            output.drop()
            errors.drop()
            raise
        now = int(time.time())
        await self._keeper.do(batch_rows.finish, batch.id, status, answered, refused, now)


def _error_lines(lines: list[AnsweredLine], status: str) -> Iterable[bytes]:
    """The lines of the error file. status: final status of the batch."""
    for line in lines:
        if line.outcome is LineOutcome.FAILED:
            yield line.answer
        elif line.outcome is None:
            code, message = _NEVER_ANSWERED[status]
            yield orjson.dumps(
                {
                    "id": f"batch_req_{uuid.uuid4().hex}",
                    "custom_id": line.custom_id,
                    "response": None,
                    "error": {"code": code, "message": message},
                }
            )
