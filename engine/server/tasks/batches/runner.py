"""Works on batches from their first look to their end, when it writes the files that they leave;
goes on after a restart where it was.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from typing import BinaryIO

import orjson

from jitney.engine.server.tasks.batches.execution import LineAnswer, LineExecutor, Reply
from jitney.engine.server.tasks.batches.host import RequestHost
from jitney.engine.server.tasks.batches.keeper import StoreKeeper
from jitney.engine.server.tasks.batches.lines import LineReader
from jitney.engine.server.tasks.batches.places import Places
from jitney.engine.server.tasks.batches.records import (
    AnsweredLine,
    Batch,
    Fault,
    Line,
    LineOutcome,
    StoredFile,
    new_id,
)
from jitney.engine.server.tasks.batches.store import BatchStore, StorageFull
from jitney.engine.server.tasks.batches.tasks import Tasks

#: Lines of a batch that are taken from the store at once.
_GROUP = 64
#: Faults of a file that are told.
_MOST_FAULTS = 10
#: Lines that are written at once.
_WRITTEN = 32
#: States in which a batch can be cancelled.
_CANCELLABLE = ("validating", "in_progress")
#: What is said of lines that were never answered, by how their batch ended.
_NEVER = {
    "expired": ("batch_expired", "the completion window was over before this request was answered"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
}


class BatchRunner:
    """A task for each batch that is not over. All lives on one event loop.

    Lines in flight have places of their own (`Places`), over all batches. One that is refused for
    the moment leaves its place while it waits: at a fleet, others may be for another model.
    """

    def __init__(
        self,
        host: RequestHost,
        keeper: StoreKeeper,
        executor: LineExecutor,
        on_end: Callable[[], None],
    ):
        """on_end is called when a batch is over."""
        self._host = host
        self._keeper = keeper
        self._executor = executor
        self._on_end = on_end
        self._tasks = Tasks(self._forget)
        #: Set for a batch that is to be cancelled.
        self._cancels: dict[str, asyncio.Event] = {}
        self._places = Places(host)

    async def start(self) -> None:
        """Go on with what an earlier process has left."""
        for id in await self._keeper.do(BatchStore.unfinished):
            self.begin(id)

    def begin(self, id: str) -> None:
        """Work on a batch."""
        self._cancels.setdefault(id, asyncio.Event())
        self._tasks.begin(id, partial(self._work, id))

    def _forget(self, id: str) -> None:
        del self._cancels[id]

    async def cancel(self, id: str) -> bool:
        """Give up the lines of a batch that have no answer; its files are still written. False if
        it was over, or being finished.
        """
        now = int(time.time())
        if not await self._keeper.do(BatchStore.move, id, _CANCELLABLE, "cancelling", now):
            return False
        if id in self._cancels:
            self._cancels[id].set()
        return True

    async def cancel_of(self, owners: Collection[str]) -> int:
        """Cancel the batches of these keys. -> how many."""
        cancelled = 0
        for id in await self._keeper.do(BatchStore.unfinished):
            batch = await self._keeper.do(BatchStore.batch, id)
            if batch is not None and batch.owner in owners:
                cancelled += await self.cancel(id)
        return cancelled

    def stop(self) -> None:
        """Give up the lines in flight; the next start goes on with them."""
        self._tasks.stop()

    async def stopped(self) -> None:
        """Wait until nothing runs any more, after `stop`."""
        await self._tasks.stopped()

    async def _work(self, id: str) -> None:
        """One batch to its end."""
        batch = await self._keeper.do(BatchStore.batch, id)
        if batch is not None and batch.status == "validating":
            await self._validate(batch)
            batch = await self._keeper.do(BatchStore.batch, id)
        if batch is not None and batch.status == "in_progress":
            await self._answer_all(batch)
        await self._end(id)
        self._on_end()

    async def _validate(self, batch: Batch) -> None:
        faults = await self._read_lines(batch)
        now = int(time.time())
        if faults:
            await self._keeper.do(BatchStore.fail, batch.id, faults[:_MOST_FAULTS], now)
        else:
            await self._keeper.do(BatchStore.start, batch.id, now)

    async def _read_lines(self, batch: Batch) -> list[Fault]:
        """Write down where each line of the file lies; what is wrong with it."""
        server = self._host.settings.server
        await self._keeper.do(BatchStore.begin_lines, batch.id)
        path = self._keeper.path(batch.input_file_id)
        try:
            # Where the limit is not known yet, each line is held to it when it is answered.
            most_bytes = self._host.body_limit or server.file_limit
            reader = await asyncio.to_thread(LineReader, path, most_bytes)
        except FileNotFoundError:
            return [Fault("missing_file", "the bytes of the batch's file are not there any more")]
        faults: list[Fault] = []
        total, done = 0, False
        try:
            while not done and len(faults) < _MOST_FAULTS and total <= server.batch_lines:
                if self._cancels[batch.id].is_set():
                    return []
                group = await self._keeper.on_disk(reader.next_group)
                doubles = await self._keeper.do(BatchStore.add_lines, batch.id, group.lines)
                faults += group.faults + [_double(line) for line in doubles]
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
        """Answer every line that has no answer, unless the batch is cancelled or its time is up."""
        feeding = asyncio.create_task(self._feed(batch))
        cancelled = asyncio.create_task(self._cancels[batch.id].wait())
        left = max(0.0, batch.expires_at - time.time())
        try:
            await asyncio.wait(
                (feeding, cancelled), timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            if feeding.done():
                feeding.result()
        finally:
            cancelled.cancel()
            feeding.cancel()
            await asyncio.gather(feeding, cancelled, return_exceptions=True)
        await self._keeper.do(
            BatchStore.move, batch.id, ("in_progress",), "finalizing", int(time.time())
        )

    async def _feed(self, batch: Batch) -> None:
        """Take up the lines in their order, no more at a time than there are places at all."""
        taken_up = Places(self._host)
        after = 0
        async with asyncio.TaskGroup() as group:
            while lines := await self._keeper.do(BatchStore.open_lines, batch.id, after, _GROUP):
                after = lines[-1].number
                for line in lines:
                    await taken_up.acquire(batch.owner)
                    task = group.create_task(self._answer(batch, line))
                    task.add_done_callback(lambda _: taken_up.release(batch.owner))

    async def _answer(self, batch: Batch, line: Line) -> None:
        path = self._keeper.path(batch.input_file_id)
        raw = await self._keeper.on_disk(line.read, path)
        turn = partial(self._places.taken, batch.owner)
        most = self._host.settings.server.key_file_bytes
        try:
            await self._keeper.do(BatchStore.check_bytes, batch.owner, most)
            answer = await self._executor.answer(
                raw, line.custom_id, batch.endpoint, batch.owner, turn
            )
            await self._keep(batch, line, answer, most)
        except StorageFull as full:
            request_id = uuid.uuid4().hex
            reply = Reply.of_error(full, request_id, batch.endpoint)
            await self._keep(batch, line, LineAnswer.of(line.custom_id, request_id, reply))

    async def _keep(
        self, batch: Batch, line: Line, answer: LineAnswer, most_bytes: int | None = None
    ) -> None:
        """See `BatchStore.answer`."""
        outcome, text = answer.outcome, answer.text
        await self._keeper.do(BatchStore.answer, batch.id, line.number, outcome, text, most_bytes)

    async def _end(self, id: str) -> None:
        """Write the files of a batch that is not worked on any more. A line without an answer means
        that its time was up.
        """
        batch = await self._keeper.do(BatchStore.batch, id)
        if batch is None or batch.is_over:
            return
        status = "completed"
        if batch.status == "cancelling":
            status = "cancelled"
        elif await self._keeper.do(BatchStore.open_lines, id, 0, 1):
            status = "expired"
        await _finish(self._keeper, batch, status)


def _double(line: Line) -> Fault:
    message = f"line {line.number} has the custom_id of a line before it"
    return Fault("duplicate_custom_id", message, line.number)


async def _finish(keeper: StoreKeeper, batch: Batch, status: str) -> None:
    """Write a batch's files and end it with this status. May be begun again at any time: what is
    half written belongs to nobody.
    """
    output = _ResultFile(keeper, batch, "output")
    errors = _ResultFile(keeper, batch, "error")
    try:
        after = 0
        while lines := await keeper.do(BatchStore.answers, batch.id, after, _WRITTEN):
            after = lines[-1].number
            good = [line.answer for line in lines if line.outcome is LineOutcome.COMPLETED]
            await keeper.on_disk(output.write, good)
            await keeper.on_disk(errors.write, _bad(lines, status))
        answered = await keeper.on_disk(output.end)
        refused = await keeper.on_disk(errors.end)
    except BaseException:
        output.drop()
        errors.drop()
        raise
    await keeper.do(BatchStore.finish, batch.id, status, answered, refused, int(time.time()))


def _bad(lines: list[AnsweredLine], status: str) -> Iterable[bytes]:
    for line in lines:
        if line.outcome is LineOutcome.FAILED:
            yield line.answer
        elif line.outcome is None:
            yield _unanswered(line.custom_id, *_NEVER[status])


def _unanswered(custom_id: str, code: str, message: str) -> bytes:
    """The line of the error file for one that was never answered."""
    return orjson.dumps(
        {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": None,
            "error": {"code": code, "message": message},
        }
    )


class _ResultFile:
    """One of the two; there is none if it would be empty. All of it blocks."""

    def __init__(self, keeper: StoreKeeper, batch: Batch, kind: str):
        self._id = new_id("file-")
        self._path = keeper.path(self._id)
        self._part = keeper.part(self._id)
        self._owner = batch.owner
        self._name = f"{batch.id}_{kind}.jsonl"
        self._file: BinaryIO | None = None
        self._size = 0

    def write(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            if self._file is None:
                self._file = self._part.open("wb")
            self._size += self._file.write(line + b"\n")

    def end(self) -> StoredFile | None:
        """The file, whole."""
        if self._file is None:
            return None
        StoreKeeper.settle(self._file)
        self._part.rename(self._path)
        now = int(time.time())
        return StoredFile(self._id, self._owner, "batch_output", self._name, self._size, now)

    def drop(self) -> None:
        """It is not wanted."""
        if self._file is not None:
            with suppress(OSError):  # what is left in its buffer may have no room
                self._file.close()
            self._part.unlink(missing_ok=True)
