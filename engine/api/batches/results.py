"""The files that a batch leaves: its answers, and what went wrong."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Iterable
from typing import BinaryIO

import orjson

from jitney.engine.api.batches.keeper import StoreKeeper
from jitney.engine.api.batches.records import (
    AnsweredLine,
    Batch,
    LineOutcome,
    StoredFile,
    new_id,
)
from jitney.engine.api.batches.store import BatchStore

#: Lines that are written at once.
_GROUP = 32
#: What is said of lines that were never answered, by how their batch ended.
_NEVER = {
    "expired": ("batch_expired", "the completion window was over before this request was answered"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
}


async def finish(keeper: StoreKeeper, batch: Batch, status: str) -> None:
    """Write a batch's files and end it with this status. May be begun again at any time: what is
    half written belongs to nobody.
    """
    output = _ResultFile(keeper, batch, "output")
    errors = _ResultFile(keeper, batch, "error")
    try:
        after = 0
        while lines := await keeper.do(BatchStore.answers, batch.id, after, _GROUP):
            after = lines[-1].number
            good = [line.answer for line in lines if line.outcome is LineOutcome.COMPLETED]
            await asyncio.to_thread(output.write, good)
            await asyncio.to_thread(errors.write, _bad(lines, status))
        answered = await asyncio.to_thread(output.end)
        refused = await asyncio.to_thread(errors.end)
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
        _settle(self._file)
        self._part.rename(self._path)
        now = int(time.time())
        return StoredFile(self._id, self._owner, "batch_output", self._name, self._size, now)

    def drop(self) -> None:
        """It is not wanted."""
        if self._file is not None:
            self._file.close()
            self._part.unlink(missing_ok=True)


def _settle(file: BinaryIO) -> None:
    """Have it on the disk, and close it."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
