"""What a measurement leaves on disk for the simulator and for later: recordings, and step records
in one .npz.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from jitney.engine.bench.offline import Measured
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
    since `started`.
    """
    lines = (
        TraceLine(
            at=max(0.0, t.arrival - started),
            n_prompt=t.n_prompt,
            n_output=t.n_output,
            tenant=t.tenant,
            queue_s=t.queue_s,
            ttft_s=t.ttft_s,
            e2e_s=t.e2e_s,
            finish=t.finish,
        )
        for t in times
    )
    try:
        Path(path).write_bytes(msgspec.json.Encoder().encode_lines(lines))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def write_records(path: str | Path, runs: Mapping[str, Measured]) -> None:
    """An .npz with records_<name> (STEP_DTYPE), times_<name>, rides_<name> (seconds since the run's
    start, NaN: never) and note_<name> (`accuracy.RunNote` as JSON) for each run."""
    arrays = {}
    for name, run in runs.items():
        note = RunNote(run.shape, run.concurrency)
        arrays |= {
            f"records_{name}": run.records,
            f"times_{name}": times_array(run),
            f"rides_{name}": rides_array(run),
            f"note_{name}": np.array(msgspec.json.encode(note).decode()),
        }
    try:
        with open(path, "wb") as file:  # a name without .npz stays as it is
            np.savez_compressed(file, **arrays)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def times_array(run: Measured) -> np.ndarray:
    """[requests] TIMES_DTYPE, seconds since the run's start."""
    return np.array(
        [
            (
                t.request,
                t.n_prompt,
                t.n_output,
                t.arrival - run.started,
                _since(t.boarded, run.started),
                _since(t.first_token, run.started),
                t.finished - run.started,
            )
            for t in run.times
        ],
        TIMES_DTYPE,
    )


def rides_array(run: Measured) -> np.ndarray:
    """[rides] RIDES_DTYPE, seconds since the run's start."""
    return np.array(
        [
            (
                r.seat,
                r.request,
                r.start - run.started,
                _since(r.first_token, run.started),
                r.end - run.started,
            )
            for r in run.rides
        ],
        RIDES_DTYPE,
    )


def _since(at: float | None, started: float) -> float:
    return float("nan") if at is None else at - started
