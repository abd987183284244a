"""A prediction beside what was measured: the same figures of both, how far they lie apart, and how
to say so.

A step table that was fitted to a run predicts that run well: that is no more than a check of the
scheduler. What the simulator is for is the run of another policy, whose steps it has not seen:
`cross_errors`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jitney.engine.errors import ConfigError
from jitney.engine.simulation.run_log import Ride
from jitney.engine.simulation.simulator import EngineShape, Run, simulate
from jitney.engine.simulation.step_table import StepTable, StepTimes
from jitney.engine.simulation.workload import Arrival, TraceLine
from jitney.engine.telemetry.summary import RequestTimes, seated, summarise

#: Figures worth comparing: where they stand in `figures.summarise`, and whether they are seconds.
COMPARED = {
    "output_tok_s": ("output_tok_s",),
    "req_s": ("req_s",),
    "ttft_p50_s": ("ttft_s", "p50"),
    "ttft_p99_s": ("ttft_s", "p99"),
    "itl_p50_s": ("itl_s", "p50"),
    "itl_p99_s": ("itl_s", "p99"),
    "e2e_p50_s": ("e2e_s", "p50"),
    "e2e_p99_s": ("e2e_s", "p99"),
    "queue_p50_s": ("queue_s", "p50"),
    "queue_p99_s": ("queue_s", "p99"),
    "padding_share": ("padding_share",),
    "seat_fill": ("seat_fill",),
    "kv_use": ("kv_use",),
    "goodput_req_s": ("goodput_req_s",),
    "cost_per_million_tokens": ("cost_per_million_tokens",),
}


def figure(figures: Mapping[str, Any], name: str) -> float | None:
    """One of COMPARED out of a run's figures, None if that is not known."""
    value: Any = figures
    for key in COMPARED[name]:
        value = None if value is None else value.get(key)
    return value


def errors(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, float]:
    """Relative error, predicted / measured - 1, of each figure that both know and that was not
    0.
    """
    pairs = {name: (figure(predicted, name), figure(measured, name)) for name in COMPARED}
    return {
        name: ours / theirs - 1
        for name, (ours, theirs) in pairs.items()
        if ours is not None and theirs
    }


def measured_times(lines: Sequence[TraceLine]) -> list[RequestTimes]:
    """What a recording says of its requests; lines that carry no measurement are left out."""
    return [
        RequestTimes(
            number,
            line.tenant,
            line.n_prompt,
            line.n_output,
            line.at,
            _after(line.at, line.queue_s),
            _after(line.at, line.ttft_s),
            line.at + line.e2e_s,
            line.finish or "length",
        )
        for number, line in enumerate(lines)
        if line.e2e_s is not None
    ]


def _after(start: float, seconds: float | None) -> float | None:
    return None if seconds is None else start + seconds


def measured_figures(lines: Sequence[TraceLine], **options: Any) -> dict[str, Any] | None:
    """The figures of a recording, from its first arrival to its last end; None if it was not
    measured.

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


class RunNote(msgspec.Struct, frozen=True):
    """What ran: the engine, and how many requests a closed loop kept open (0: they came at their
    own times).
    """

    shape: EngineShape
    concurrency: int = 0


class MeasuredRun(NamedTuple):
    """One run as `jitney bench policies --records` keeps it.

    times, rides: seconds of one clock. records: [steps] STEP_DTYPE.
    """

    times: list[RequestTimes]
    records: np.ndarray
    rides: list[Ride]
    note: RunNote

    @property
    def arrivals(self) -> list[Arrival]:
        """What came, ascending in time; the first at 0."""
        first = min(t.arrival for t in self.times)
        coming = [Arrival(t.arrival - first, t.n_prompt, t.n_output) for t in self.times]
        return sorted(coming, key=lambda arrival: arrival.at)

    def figures(self, **options: Any) -> dict[str, Any]:
        """The figures of the run, from its first arrival to its last end; options as for
        `figures.summarise`.
        """
        return summarise(
            self.times,
            records=self.records,
            seats=self.note.shape.limits.max_seats,
            seconds=span(self.times),
            seated_s=seated(self.rides),
            **options,
        )

    def predicted(self, table: StepTimes, *, concurrency: int | None = None, seed: int = 0) -> Run:
        """The same requests on the same engine, simulated; concurrency: None takes the run's
        own.
        """
        open_at_once = self.note.concurrency if concurrency is None else concurrency
        return simulate(
            self.arrivals, self.note.shape, table, concurrency=open_at_once or None, seed=seed
        )


def cross_errors(
    runs: Mapping[str, MeasuredRun], seed: int = 0
) -> dict[str, dict[str, dict[str, float]]]:
    """{learned from: {predicted: `errors`}}, for every pair of runs: step times from the one, the
    other predicted.
    """
    measured = {name: run.figures() for name, run in runs.items()}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for source, run in runs.items():
        table = StepTable.from_records(run.records)
        found[source] = {}
        for name, other in runs.items():
            figures = other.predicted(table, seed=seed).figures()
            found[source][name] = errors(figures, measured[name])
    return found


def speed_error(off: Mapping[str, float]) -> float | None:
    """How far a prediction is off in speed, out of its `errors`; None if nothing is known of it.

    The greater of the errors of throughput and of the time between tokens: where an engine is not
    full, its throughput is that of the traffic, and predicting it says nothing.
    """
    known = [abs(off[name]) for name in ("output_tok_s", "itl_p50_s") if name in off]
    return max(known) if known else None


def verdict(output_tok_s: Mapping[str, float], off: Mapping[str, float | None]) -> str:
    """Who makes most tokens and how many times those of the slowest, with the error of saying so.

    output_tok_s: of each policy, predicted. off: `speed_error` of each policy, as far as it was
    measured.
    """
    if len(output_tok_s) < 2:
        return ""
    best = max(output_tok_s, key=lambda name: output_tok_s[name])
    worst = min(output_tok_s, key=lambda name: output_tok_s[name])
    if output_tok_s[worst] <= 0:
        return f"By simulation {worst} makes no token here."
    gain = f"{best} makes {output_tok_s[best] / output_tok_s[worst]:.2f}x the tokens of {worst}"
    if best == worst:
        return "By simulation all make the same tokens a second."
    known = {name: error for name in (best, worst) if (error := off.get(name)) is not None}
    if not known:
        return f"By simulation {gain}; error unknown: neither was measured."
    spread = f"±{max(1, round(100 * sum(known.values())))} %"
    if len(known) == 2:
        return f"By simulation {gain}, {spread}."
    (sure,) = known
    unsure = worst if sure == best else best
    return (
        f"By simulation {gain}, {spread} for {sure}, error unknown "
        f"for {unsure}, which was not measured."
    )


#: Of closed-loop traffic: shares of the time in which all its requests are open, and of arrivals
#: that follow an end.
MOSTLY = 0.9
#: Within which share of a median request, and at least how many seconds, an arrival follows an end.
FOLLOWS_SHARE, FOLLOWS_S = 0.1, 0.05


def closed_concurrency(times: Sequence[RequestTimes]) -> int | None:
    """How many clients sent these requests, each the next one when its last had ended; None if they
    came by themselves.

    Such traffic waits for the engine. Replayed at its recorded times it would not: a slower policy
    would meet more requests than its clients could send, a faster one fewer.
    """
    ended = sorted(times, key=lambda t: t.arrival)
    if any(t.first_token is None and t.finish == "error" for t in ended):
        return None  # clients that are refused come again, at their own times
    moments = sorted([(t.arrival, 1) for t in ended] + [(t.finished, -1) for t in ended])
    clients, open_now = 0, 0
    for _, change in moments:
        open_now += change
        clients = max(clients, open_now)
    if len(ended) < 3 * clients:
        return None
    later = ended[clients:]
    if time_average(moments, ended[clients - 1].arrival, later[-1].arrival) < MOSTLY * clients:
        return None
    soon = max(FOLLOWS_S, FOLLOWS_SHARE * float(np.median([t.e2e_s for t in ended])))
    return (
        clients
        if following(later, [t.finished for t in ended], soon) >= MOSTLY * len(later)
        else None
    )


def time_average(moments: Sequence[tuple[float, int]], start: float, end: float) -> float:
    """The mean from `start` to `end` of a number that changes at given moments, ascending."""
    number, at, total = 0, start, 0.0
    for moment, change in moments:
        until = min(max(moment, start), end)
        total += number * (until - at)
        number, at = number + change, until
    return total / (end - start) if end > start else 0.0


def following(later: Sequence[RequestTimes], ends: Iterable[float], soon: float) -> int:
    """How many of the requests, by arrival, come within `soon` seconds after an end that no other
    one follows.
    """
    waiting, count = iter(sorted(ends)), 0
    end = next(waiting, None)
    for times in later:
        while end is not None and end < times.arrival - soon:
            end = next(waiting, None)
        if end is not None and end <= times.arrival:
            count += 1
            end = next(waiting, None)
    return count


def read_runs(path: str | Path) -> dict[str, MeasuredRun]:
    """The runs in an .npz file, by name. Raises ConfigError if it holds none."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = [
                name.removeprefix("times_") for name in arrays.files if name.startswith("times_")
            ]
            runs = {name: _run_of(arrays, name) for name in names}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or 'cannot be read as an .npz file'}") from None
    except (ValueError, KeyError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path}: holds no runs of this version (see jitney bench policies --records): {error}"
        ) from None
    if not runs:
        raise ConfigError(f"{path}: holds no runs (see jitney bench policies --records)")
    return runs


def _run_of(arrays: Mapping[str, np.ndarray], name: str) -> MeasuredRun:
    note = msgspec.json.decode(str(arrays[f"note_{name}"]), type=RunNote)
    rides = [
        Ride(seat, request, start, _known(first), end)
        for seat, request, start, first, end in arrays[f"rides_{name}"].tolist()
    ]
    return MeasuredRun(_times_of(arrays[f"times_{name}"]), arrays[f"records_{name}"], rides, note)


def _times_of(rows: np.ndarray) -> list[RequestTimes]:
    columns = (
        rows[name].tolist()
        for name in (
            "request",
            "n_prompt",
            "n_output",
            "arrival",
            "boarded",
            "first_token",
            "finished",
        )
    )
    return [
        RequestTimes(
            request,
            "",
            n_prompt,
            n_output,
            arrival,
            _known(boarded),
            _known(first),
            finished,
            "length",
        )
        for request, n_prompt, n_output, arrival, boarded, first, finished in zip(
            *columns, strict=True
        )
    ]


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value
