"""What a measurement leaves on disk for the simulator and for later: recordings, and step records
in one .npz.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from jitney.engine.bench.offline import OfflineRun
from jitney.engine.errors import ConfigError
from jitney.engine.simulation.accuracy import RunNote
from jitney.engine.simulation.workload import TraceLine
from jitney.engine.telemetry.summary import RequestTimes

TIMES_DTYPE = np.dtype(
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
RIDES_DTYPE = np.dtype(
    [("seat", "i4"), ("request", "i8"), ("start", "f8"), ("first_token", "f8"), ("end", "f8")]
)


def write_recording(path: str | Path, times: Iterable[RequestTimes], started: float) -> None:
    """One line per request, with what was measured, as `jitney serve --record` writes it; times
    since `started`. ConfigError if the file cannot be written.
    """
    lines = [_trace_line(request, started) for request in times]
    try:
        Path(path).write_bytes(msgspec.json.Encoder().encode_lines(lines))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def _trace_line(times: RequestTimes, started: float) -> TraceLine:
    return TraceLine(
        at=max(0.0, times.arrival - started),
        n_prompt=times.n_prompt,
        n_output=times.n_output,
        tenant=times.tenant,
        queue_s=times.queue_s,
        ttft_s=times.ttft_s,
        e2e_s=times.e2e_s,
        finish=times.finish,
    )


def write_records(path: str | Path, runs: Mapping[str, OfflineRun]) -> None:
    """An .npz with records_<name> (STEP_DTYPE), times_<name>, rides_<name> (seconds since the run's
    start, NaN: never) and note_<name> (`accuracy.RunNote` as JSON) for each run.

    ConfigError if the file cannot be written.
    """
    arrays = {}
    for name, run in runs.items():
        note = RunNote(run.shape, run.concurrency)
        arrays[f"records_{name}"] = run.records
        arrays[f"times_{name}"] = _times_array(run)
        arrays[f"rides_{name}"] = _rides_array(run)
        arrays[f"note_{name}"] = np.array(msgspec.json.encode(note).decode())
    try:
        with open(path, "wb") as file:  # a name without .npz stays as it is
            np.savez_compressed(file, **arrays)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def _times_array(run: OfflineRun) -> np.ndarray:
    """[requests] TIMES_DTYPE, seconds since the run's start."""
    array = np.empty(len(run.times), TIMES_DTYPE)
    for name in ("request", "n_prompt", "n_output"):
        array[name] = [getattr(times, name) for times in run.times]
    for name in ("arrival", "boarded", "first_token", "finished"):
        array[name] = _since(run.started, [getattr(times, name) for times in run.times])
    return array


def _rides_array(run: OfflineRun) -> np.ndarray:
    """[rides] RIDES_DTYPE, seconds since the run's start."""
    array = np.empty(len(run.rides), RIDES_DTYPE)
    for name in ("seat", "request"):
        array[name] = [getattr(ride, name) for ride in run.rides]
    for name in ("start", "first_token", "end"):
        array[name] = _since(run.started, [getattr(ride, name) for ride in run.rides])
    return array


def _since(started: float, times: list[float | None]) -> np.ndarray:
    """Seconds since `started` [n] f8; NaN for None."""
    return np.array(times, np.float64) - started
