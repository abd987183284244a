"""Answers a file of requests without a server, by the same routes. Can be continued."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import orjson

from jitney.engine.common.errors import ConfigError
from jitney.engine.server.http.routes import ROUTES
from jitney.engine.server.http.routing import RouteTable
from jitney.engine.server.http.server_context import ServerContext
from jitney.engine.server.tasks.execution import LineExecutor
from jitney.engine.server.tasks.lines import MOST_FAULTS, LineReader, LineRequest
from jitney.engine.server.tasks.records import Fault, Line, LineOutcome


class _Counts(NamedTuple):
    """The progress of a run."""

    #: Lines of the file; lines with an answer so far; errors among these.
    total: int
    answered: int
    failed: int


def _lines_of(path: Path, most_bytes: int) -> list[Line]:
    """A file's lines. most_bytes: of a body. Raises ConfigError that names invalid lines."""
    try:
        reader = LineReader(path, most_bytes)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    lines: dict[str, Line] = {}
    faults: list[Fault] = []
    done = False
    while not done and len(faults) < MOST_FAULTS:
        group = reader.next_group()
        faults += group.faults
        faults += [line.duplicate() for line in group.lines if not _is_new(line, lines)]
        done = group.done
    reader.close()
    if faults:
        messages = "; ".join(fault.message for fault in faults[:MOST_FAULTS])
        raise ConfigError(f"{path}: {messages}")
    if not lines:
        raise ConfigError(f"{path} has no lines")
    return list(lines.values())


def _is_new(line: Line, lines: dict[str, Line]) -> bool:
    """Add a line to `lines`; False if an earlier one has its custom_id."""
    return lines.setdefault(line.custom_id, line) is line


def _answered_in(path: Path) -> dict[str, bool]:
    """custom_id -> whether its answer is an error. Removes an incomplete last line. Raises
    ConfigError.
    """
    if not path.exists():
        return {}
    answered: dict[str, bool] = {}
    size = 0
    with path.open("rb+") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            try:
                answer = orjson.loads(raw)
                is_error = answer["response"]["status_code"] != 200
                answered[str(answer["custom_id"])] = is_error
            except (orjson.JSONDecodeError, KeyError, TypeError):
                message = f"{path} is there and is no file of answers; it is not written to"
                raise ConfigError(message) from None
            size += len(raw)
        file.truncate(size)
    return answered


class OfflineBatch:
    """Answers the lines of a file that have no answer yet."""

    def __init__(self, path: Path, out: Path, most_bytes: int):
        """most_bytes: of a body. Raises ConfigError for invalid lines, or if `out` answers
        others.
        """
        lines = _lines_of(path, most_bytes)
        self._path = path
        self._out = out
        answered = _answered_in(out)
        if answered.keys() - {line.custom_id for line in lines}:
            raise ConfigError(f"{out} has answers to other lines than those of {path}")
        self._open = [line for line in lines if line.custom_id not in answered]
        self._total = len(lines)
        self._answered = len(answered)
        self._failed = sum(answered.values())

    @property
    def counts(self) -> _Counts:
        return _Counts(self._total, self._answered, self._failed)

    async def run(
        self, server: ServerContext, in_flight: int, on_answer: Callable[[_Counts], None]
    ) -> None:
        """Answer every line by the server's routes, `in_flight` at a time."""
        executor = LineExecutor(server, RouteTable(ROUTES), background=False)
        slots = asyncio.Semaphore(in_flight)
        with self._out.open("ab", buffering=0) as out:
            async with asyncio.TaskGroup() as group:
                for line in self._open:
                    await slots.acquire()
                    task = group.create_task(self._answer(line, executor, out, on_answer))
                    task.add_done_callback(lambda _: slots.release())

    async def _answer(
        self,
        line: Line,
        executor: LineExecutor,
        out: BinaryIO,
        on_answer: Callable[[_Counts], None],
    ) -> None:
        reply = await executor.answer(partial(self._read, line), owner="")
        out.write(reply.line(line.custom_id) + b"\n")
        self._answered += 1
        self._failed += reply.outcome is LineOutcome.FAILED
        on_answer(self.counts)

    async def _read(self, line: Line) -> LineRequest:
        raw = await asyncio.to_thread(line.read, self._path)
        return await asyncio.to_thread(LineRequest.read, raw, endpoint="")
