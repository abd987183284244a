"""A run of an engine: its requests and steps, its figures, and its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.summary import summarise
from jitney.engine.common.trace import Arrival
from jitney.engine.core import EngineShape


def span(requests: Sequence[RequestRecord]) -> float:
    """Seconds from the first arrival to the last end."""
    first = min(request.arrival for request in requests)
    return max(request.end for request in requests) - first


@contextmanager
def file_errors(path: str | Path) -> Iterator[None]:
    """Raise ConfigError instead of OSError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


class _RunNote(msgspec.Struct, frozen=True):
    shape: EngineShape
    requests: list[RequestRecord]
    #: As in `EngineRun`.
    started: float
    concurrency: int


@dataclass(frozen=True, slots=True)
class EngineRun:
    """A run of an engine in this process, or of a simulated one."""

    #: Requests by arrival, with their stays; times in seconds of one clock.
    requests: list[RequestRecord]
    #: [steps] STEP_DTYPE.
    records: np.ndarray
    #: The engine that ran.
    shape: EngineShape
    #: Clock time of the run's start, from which arrival times count.
    started: float = 0.0
    #: Open requests of a closed loop; 0: an open loop.
    concurrency: int = 0

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last end."""
        return span(self.requests)

    @property
    def arrivals(self) -> list[Arrival]:
        """The requests as arrivals by time; the first is at 0."""
        requests = sorted(self.requests, key=lambda request: request.arrival)
        first = requests[0].arrival
        return [Arrival(each.arrival - first, each.n_prompt, each.n_output) for each in requests]

    def figures(self, **options: Any) -> JsonDict:
        """The figures of `summary.summarise`. options: its slo and price_per_hour."""
        return summarise(
            self.requests,
            records=self.records,
            seats=self.shape.limits.max_seats,
            seconds=self.seconds,
            **options,
        )

    @classmethod
    def write_all(cls, path: str | Path, runs: Mapping[str, EngineRun]) -> None:
        """Write an .npz with records_<name> and note_<name> (JSON) of each run. Raises
        ConfigError.
        """
        arrays: dict[str, np.ndarray] = {}
        for name, run in runs.items():
            requests = [msgspec.structs.replace(each, tokens=None) for each in run.requests]
            note = _RunNote(run.shape, requests, run.started, run.concurrency)
            arrays[f"records_{name}"] = run.records
            arrays[f"note_{name}"] = np.array(msgspec.json.encode(note).decode())
        with file_errors(path), open(path, "wb") as file:  # numpy would add .npz to a path
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def read_all(cls, path: str | Path) -> dict[str, EngineRun]:
        """Read the runs that `write_all` wrote, by name. Raises ConfigError if there are none."""
        see = "(see jitney bench policies --records)"
        try:
            with np.load(path, allow_pickle=False) as arrays:
                names = [key.removeprefix("note_") for key in arrays if key.startswith("note_")]
                runs = {name: _read_run(arrays, name) for name in names}
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror or 'cannot be read as an .npz file'}"
            ) from None
        except (ValueError, KeyError, msgspec.DecodeError) as error:
            raise ConfigError(f"{path}: holds no runs of this version {see}: {error}") from None
        if not runs:
            raise ConfigError(f"{path}: holds no runs of this version {see}")
        return runs


def _read_run(arrays: Mapping[str, np.ndarray], name: str) -> EngineRun:
    note = msgspec.json.decode(str(arrays[f"note_{name}"]), type=_RunNote)
    records = arrays[f"records_{name}"]
    return EngineRun(note.requests, records, note.shape, note.started, note.concurrency)
