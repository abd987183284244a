"""What a measurement leaves on disk for the simulator and for later: recordings, and step records
in one .npz.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.trace import TraceLine
from jitney.engine.lab.bench.offline import OfflineRun, PolicyRuns
from jitney.engine.lab.simulation.accuracy import RunNote

_TIMES_DTYPE = np.dtype(
    [
        ("request", "i8"),
        ("n_prompt", "i4"),
        ("n_output", "i4"),
        ("arrival", "f8"),
        ("boarded", "f8"),
        ("first_token", "f8"),
        ("finished", "f8"),
    ]
)
_STAYS_DTYPE = np.dtype(
    [("seat", "i4"), ("request", "i8"), ("start", "f8"), ("first_token", "f8"), ("end", "f8")]
)
#: Fields of a request that a recording has too.
_MEASURED = ("n_prompt", "n_output", "tenant", "queue_s", "ttft_s", "e2e_s", "finish")


def write_recording(path: str | Path, requests: Iterable[RequestRecord], started: float) -> None:
    """One line per request, with what was measured, as `jitney serve --record` writes it; times
    since `started`. ConfigError if the file cannot be written.
    """
    lines = [_trace_line(request, started) for request in requests]
    with _config_errors(path):
        Path(path).write_bytes(msgspec.json.Encoder().encode_lines(lines))


@contextmanager
def _config_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def _trace_line(request: RequestRecord, started: float) -> TraceLine:
    measured = {name: getattr(request, name) for name in _MEASURED}
    return TraceLine(at=max(0.0, request.arrival - started), **measured)


def write_records(path: str | Path, runs: PolicyRuns) -> None:
    """An .npz with records_<name> (STEP_DTYPE), times_<name>, stays_<name> (seconds since the run's
    start, NaN: never) and note_<name> (`accuracy.RunNote` as JSON) for each run.

    ConfigError if the file cannot be written.
    """
    arrays: dict[str, Any] = {}
    for name, run in runs.items():
        arrays |= _arrays_of(name, run)
    with _config_errors(path), open(path, "wb") as file:  # a name without .npz stays as it is
        np.savez_compressed(file, **arrays)


def _arrays_of(name: str, run: OfflineRun) -> dict[str, np.ndarray]:
    note = RunNote(run.shape, run.concurrency)
    return {
        f"records_{name}": run.records,
        f"times_{name}": _times_array(run),
        f"stays_{name}": _stays_array(run),
        f"note_{name}": np.array(msgspec.json.encode(note).decode()),
    }


def _times_array(run: OfflineRun) -> np.ndarray:
    """[requests] TIMES_DTYPE, seconds since the run's start."""
    columns = {name: _column(run.requests, name) for name in ("n_prompt", "n_output")}
    columns["request"] = _column(run.requests, "number")
    return _array(_TIMES_DTYPE, columns, run.requests, run.started)


def _stays_array(run: OfflineRun) -> np.ndarray:
    """[stays] STAYS_DTYPE, seconds since the run's start."""
    stays = [stay for _, stay in run.stays]
    numbers = [request.number for request, _ in run.stays]
    columns = {"request": numbers, "seat": _column(stays, "seat")}
    return _array(_STAYS_DTYPE, columns, stays, run.started)


def _array(
    dtype: np.dtype, columns: dict[str, list[Any]], items: Sequence[object], started: float
) -> np.ndarray:
    """One row for each of the items: these columns, and the times that the items have."""
    array = np.empty(len(items), dtype)
    for name in dtype.names or ():
        array[name] = columns[name] if name in columns else _since(started, items, name)
    return array


def _column(items: Sequence[object], name: str) -> list[Any]:
    return [getattr(item, name) for item in items]


def _since(started: float, items: Sequence[object], name: str) -> np.ndarray:
    """Seconds since `started` [n] f8 of that field; NaN for None."""
    return np.array(_column(items, name), np.float64) - started
