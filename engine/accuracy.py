"""A prediction beside what was measured: the same figures of both, and how far they lie apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jitney.engine.admission import SchedulerLimits
from jitney.engine.errors import ConfigError
from jitney.engine.figures import RequestTimes, summarise
from jitney.engine.workload import Arrival, TraceLine

#: Figures worth comparing: where they stand in `figures.summarise`, and whether they are seconds.
COMPARED = {
    "output_tok_s": ("output_tok_s",), "req_s": ("req_s",),
    "ttft_p50_s": ("ttft_s", "p50"), "ttft_p99_s": ("ttft_s", "p99"),
    "itl_p50_s": ("itl_s", "p50"), "itl_p99_s": ("itl_s", "p99"),
    "e2e_p50_s": ("e2e_s", "p50"), "e2e_p99_s": ("e2e_s", "p99"),
    "queue_p50_s": ("queue_s", "p50"), "queue_p99_s": ("queue_s", "p99"),
    "padding_share": ("padding_share",), "seat_fill": ("seat_fill",), "kv_use": ("kv_use",),
    "goodput_req_s": ("goodput_req_s",), "cost_per_million_tokens": ("cost_per_million_tokens",),
}


def figure(figures: Mapping[str, Any], name: str) -> float | None:
    """One of COMPARED out of a run's figures, None if that is not known."""
    value: Any = figures
    for key in COMPARED[name]:
        value = None if value is None else value.get(key)
    return value


def errors(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, float]:
    """Relative error, predicted / measured - 1, of each figure that both know and that was not 0."""
    pairs = {name: (figure(predicted, name), figure(measured, name)) for name in COMPARED}
    return {name: ours / theirs - 1 for name, (ours, theirs) in pairs.items() if ours is not None and theirs}


def measured_times(lines: Sequence[TraceLine]) -> list[RequestTimes]:
    """What a recording says of its requests; lines that carry no measurement are left out."""
    return [RequestTimes(number, line.tenant, line.n_prompt, line.n_output, line.at, _after(line.at, line.queue_s),
                         _after(line.at, line.ttft_s), line.at + line.e2e_s, line.finish or "length")
            for number, line in enumerate(lines) if line.e2e_s is not None]


def _after(start: float, seconds: float | None) -> float | None:
    return None if seconds is None else start + seconds


def measured_figures(lines: Sequence[TraceLine], **options: Any) -> dict[str, Any] | None:
    """The figures of a recording, from its first arrival to its last end; None if it was not measured.

    options: slo and price_per_hour of `figures.summarise`.
    """
    times = measured_times(lines)
    if not times:
        return None
    return summarise(times, records=None, seats=0, seconds=span(times), **options)


def span(times: Iterable[RequestTimes]) -> float:
    """Seconds from the first arrival to the last end."""
    ends = [(t.arrival, t.finished) for t in times]
    return max(end for _, end in ends) - min(start for start, _ in ends)


class MeasuredRun(NamedTuple):
    """One run as `jitney bench policies --records` keeps it. times: seconds since its start. records: STEP_DTYPE."""

    times: list[RequestTimes]
    records: np.ndarray
    limits: SchedulerLimits

    @property
    def arrivals(self) -> list[Arrival]:
        return sorted((Arrival(max(0.0, t.arrival), t.n_prompt, t.n_output) for t in self.times), key=lambda a: a.at)

    def figures(self, **options: Any) -> dict[str, Any]:
        """The figures of the run, from its first arrival to its last end; options as for `figures.summarise`."""
        return summarise(self.times, records=self.records, seats=self.limits.max_seats, seconds=span(self.times),
                         **options)


def read_runs(path: str | Path) -> dict[str, MeasuredRun]:
    """The runs in an .npz file, by name. Raises ConfigError if it holds none."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = [name.removeprefix("times_") for name in arrays.files if name.startswith("times_")]
            runs = {name: MeasuredRun(_times_of(arrays[f"times_{name}"]), arrays[f"records_{name}"],
                                      msgspec.json.decode(str(arrays[f"limits_{name}"]), type=SchedulerLimits))
                    for name in names}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or 'cannot be read as an .npz file'}") from None
    except (ValueError, KeyError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: holds no runs of this version (see jitney bench policies --records): "
                          f"{error}") from None
    if not runs:
        raise ConfigError(f"{path}: holds no runs (see jitney bench policies --records)")
    return runs


def _times_of(rows: np.ndarray) -> list[RequestTimes]:
    columns = (rows[name].tolist() for name in ("request", "n_prompt", "n_output", "arrival", "boarded", "first_token",
                                                "finished"))
    return [RequestTimes(request, "", n_prompt, n_output, arrival, _known(boarded), _known(first), finished, "length")
            for request, n_prompt, n_output, arrival, boarded, first, finished in zip(*columns, strict=True)]


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value
