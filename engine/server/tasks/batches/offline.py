"""A file of requests answered without a server: the same lines by the same routes, written to a
file as they come, and gone on with where an earlier run stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import orjson

from jitney.engine.common.errors import ConfigError
from jitney.engine.server.tasks.batches.execution import LineExecutor
from jitney.engine.server.tasks.batches.lines import LineReader
from jitney.engine.server.tasks.batches.records import Fault, Line, LineOutcome

#: Faults of a file that are told.
_MOST_FAULTS = 10


class _Counts(NamedTuple):
    """How far a run is."""

    #: Lines of the file; those that have an answer by now, and how many of these are errors.
    total: int
    answered: int
    failed: int


def _lines_of(path: Path, most_bytes: int) -> list[Line]:
    """The lines of a file of requests. Raises ConfigError, which names those that are none.
    most_bytes: of a request's body.
    """
    try:
        reader = LineReader(path, most_bytes)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    lines: list[Line] = []
    faults: list[Fault] = []
    done = False
    while not done and len(faults) < _MOST_FAULTS:
        group = reader.next_group()
        lines += group.lines
        faults += group.faults
        done = group.done
    reader.close()
    seen: set[str] = set()
    for line in lines:
        if line.custom_id in seen:
            message = f"line {line.number} has the custom_id of a line before it"
            faults.append(Fault("duplicate_custom_id", message, line.number))
        seen.add(line.custom_id)
    if faults:
        told = "; ".join(fault.message for fault in faults[:_MOST_FAULTS])
        raise ConfigError(f"{path}: {told}")
    if not lines:
        raise ConfigError(f"{path} has no lines")
    return lines


def _answered_in(path: Path) -> dict[str, bool]:
    """The custom_ids that a file of answers has, and whether each is an error; a line that was half
    written is cut off. Raises ConfigError for a file that is none.
    """
    if not path.exists():
        return {}
    found: dict[str, bool] = {}
    whole = 0
    with path.open("rb+") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            custom_id, is_error = _answered(path, raw)
            found[custom_id] = is_error
            whole += len(raw)
        file.truncate(whole)
    return found


def _answered(path: Path, raw: bytes) -> tuple[str, bool]:
    try:
        answer = orjson.loads(raw)
        return str(answer["custom_id"]), answer["response"]["status_code"] != 200
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise ConfigError(
            f"{path} is there and is no file of answers; it is not written to"
        ) from None


class OfflineBatch:
    """Answers the lines of a file that have no answer yet."""

    def __init__(self, path: Path, out: Path, most_bytes: int):
        """most_bytes: of a request's body. Raises ConfigError, which names the lines that are no
        requests, or if `out` has answers to other lines.
        """
        lines = _lines_of(path, most_bytes)
        self._path = path
        self._out = out
        answered = _answered_in(out)
        strangers = answered.keys() - {line.custom_id for line in lines}
        if strangers:
            raise ConfigError(f"{out} has answers to other lines than those of {path}")
        self._open = [line for line in lines if line.custom_id not in answered]
        self._total = len(lines)
        self._answered = len(answered)
        self._failed = sum(answered.values())

    @property
    def counts(self) -> _Counts:
        return _Counts(self._total, self._answered, self._failed)

    async def run(
        self, executor: LineExecutor, in_flight: int, on_answer: Callable[[_Counts], None]
    ) -> None:
        """Until every line has its answer; so many at a time."""
        places = asyncio.Semaphore(in_flight)
        with self._out.open("ab", buffering=0) as out:
            async with asyncio.TaskGroup() as group:
                for line in self._open:
                    await places.acquire()
                    task = group.create_task(self._answer(line, executor, out, on_answer))
                    task.add_done_callback(lambda _: places.release())

    async def _answer(
        self,
        line: Line,
        executor: LineExecutor,
        out: BinaryIO,
        on_answer: Callable[[_Counts], None],
    ) -> None:
        raw = await asyncio.to_thread(line.read, self._path)
        answer = await executor.answer(raw, line.custom_id, endpoint="", owner="")
        out.write(answer.text + b"\n")
        self._answered += 1
        self._failed += answer.outcome is LineOutcome.FAILED
        on_answer(self.counts)
