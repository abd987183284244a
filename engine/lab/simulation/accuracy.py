"""A prediction beside what was measured: the same figures of both, how far they lie apart, and how
to say so.

A step table that was fitted to a run predicts that run well: that is no more than a check of the
scheduler. What the simulator is for is the run of another policy, whose steps it has not seen:
`cross_errors`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.request_record import RequestRecord, Stay
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.common.summary import summarise
from jitney.engine.common.trace import Arrival, TraceLine
from jitney.engine.lab.simulation.engine_shape import EngineShape
from jitney.engine.lab.simulation.simulator import SimulatedRun, simulate, span
from jitney.engine.lab.simulation.step_table import StepTable, StepTimes


class _Compared(NamedTuple):
    """Where a figure stands in `figures.summarise`."""

    name: str
    #: Of a spread of seconds; "" where there is no such spread.
    quantile: str = ""

    def of(self, figures: JsonObject) -> float | None:
        """The figure out of a run's, None if it is not known."""
        value = figures.get(self.name)
        if value is None or not self.quantile:
            return value
        return value.get(self.quantile)


#: Figures worth comparing.
COMPARED = {
    "output_tok_s": _Compared("output_tok_s"),
    "req_s": _Compared("req_s"),
    "ttft_p50_s": _Compared("ttft_s", "p50"),
    "ttft_p99_s": _Compared("ttft_s", "p99"),
    "itl_p50_s": _Compared("itl_s", "p50"),
    "itl_p99_s": _Compared("itl_s", "p99"),
    "e2e_p50_s": _Compared("e2e_s", "p50"),
    "e2e_p99_s": _Compared("e2e_s", "p99"),
    "queue_p50_s": _Compared("queue_s", "p50"),
    "queue_p99_s": _Compared("queue_s", "p99"),
    "padding_share": _Compared("padding_share"),
    "seat_fill": _Compared("seat_fill"),
    "kv_use": _Compared("kv_use"),
    "goodput_req_s": _Compared("goodput_req_s"),
    "cost_per_million_tokens": _Compared("cost_per_million_tokens"),
}


def errors(predicted: JsonObject, measured: JsonObject) -> dict[str, float]:
    """Relative error, predicted / measured - 1, of each figure that both know and that was not
    0.
    """
    off = {name: _error(each.of(predicted), each.of(measured)) for name, each in COMPARED.items()}
    return {name: error for name, error in off.items() if error is not None}


def _error(predicted: float | None, measured: float | None) -> float | None:
    if predicted is None or not measured:
        return None
    return predicted / measured - 1


class EngineName(NamedTuple):
    """A model, and what it runs on, in words."""

    model: str
    device: str

    def __str__(self) -> str:
        return f"{self.model} on {self.device}"

    def is_like(self, other: EngineName) -> bool:
        """Whether both may be the same: "h100" is a name of an "NVIDIA H100 80GB HBM3", and who
        does not name a model may mean any.
        """
        pairs = [(ours.lower(), theirs.lower()) for ours, theirs in zip(self, other, strict=True)]
        return all(ours in theirs or theirs in ours for ours, theirs in pairs)


@dataclass(frozen=True, slots=True)
class Recording:
    """Requests that an engine was once sent, and what was measured of them."""

    requests: Sequence[RequestRecord]
    #: What answered them; None: the recording does not say.
    engine: EngineName | None = None

    @classmethod
    def of(cls, lines: Sequence[TraceLine]) -> Recording:
        """What a trace says of its requests; lines that carry no measurement are left out."""
        numbered = enumerate(lines)
        requests = [_measured_request(*each) for each in numbered if each[1].e2e_s is not None]
        engines = (EngineName(line.model, line.device) for line in lines if line.device)
        return cls(requests, next(engines, None))

    def figures(self, **options: Any) -> JsonDict | None:
        """From the first arrival to the last end; None if nothing was measured.

        options: slo and price_per_hour of `figures.summarise`.
        """
        if not self.requests:
            return None
        return summarise(self.requests, records=None, seconds=span(self.requests), **options)

    def clients(self) -> int:
        """How many sent these requests, each the next one when its last had ended; 0 if they came
        by themselves.

        Such traffic waits for the engine. Replayed at its recorded times it would not: a slower
        policy would meet more requests than its clients could send, a faster one fewer.
        """
        if any(map(_was_refused, self.requests)):
            return 0  # such clients come again, at their own times
        by_arrival = sorted(self.requests, key=_arrival_of)
        clients = _most_open(_moments(by_arrival))
        if len(by_arrival) < 3 * clients or not _mostly_busy(by_arrival, clients):
            return 0
        return clients if _mostly_following(by_arrival, clients) else 0


def _measured_request(number: int, line: TraceLine) -> RequestRecord:
    return RequestRecord(
        number=number,
        tenant=line.tenant,
        n_prompt=line.n_prompt,
        n_output=line.n_output,
        arrival=line.at,
        boarded=_after(line.at, line.queue_s),
        first_token=_after(line.at, line.ttft_s),
        finished=_after(line.at, line.e2e_s),
        finish=line.finish or "length",
    )


def _after(start: float, seconds: float | None) -> float | None:
    if seconds is None:
        return None
    return start + seconds


class RunNote(msgspec.Struct, frozen=True):
    """What ran: the engine, and how many requests a closed loop kept open (0: they came at their
    own times).
    """

    shape: EngineShape
    concurrency: int = 0


#: Where runs come from.
_SEE = "(see jitney bench policies --records)"


class MeasuredRun(NamedTuple):
    """One run as `jitney bench policies --records` keeps it."""

    #: With their stays; seconds of one clock.
    requests: list[RequestRecord]
    #: [steps] STEP_DTYPE.
    records: np.ndarray
    note: RunNote

    @classmethod
    def read_all(cls, path: str | Path) -> dict[str, MeasuredRun]:
        """The runs in an .npz file, by name. Raises ConfigError if it holds none."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                runs = _runs_in(arrays)
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror or 'cannot be read as an .npz file'}"
            ) from None
        except (ValueError, KeyError, msgspec.DecodeError) as error:
            raise ConfigError(f"{path}: holds no runs of this version {_SEE}: {error}") from None
        if not runs:
            raise ConfigError(f"{path}: holds no runs {_SEE}")
        return runs

    @property
    def arrivals(self) -> list[Arrival]:
        """What came, ascending in time; the first at 0."""
        requests = sorted(self.requests, key=_arrival_of)
        first = requests[0].arrival
        return [Arrival(each.arrival - first, each.n_prompt, each.n_output) for each in requests]

    def figures(self, **options: Any) -> JsonDict:
        """The figures of the run, from its first arrival to its last end; options as for
        `figures.summarise`.
        """
        return summarise(
            self.requests,
            records=self.records,
            seats=self.note.shape.limits.max_seats,
            seconds=span(self.requests),
            **options,
        )

    def predicted(
        self, table: StepTimes, *, concurrency: int | None = None, seed: int = 0
    ) -> SimulatedRun:
        """The same requests on the same engine, simulated; concurrency: None takes the run's
        own.
        """
        shape, own = self.note.shape, self.note.concurrency
        n_open = own if concurrency is None else concurrency
        return simulate(self.arrivals, shape, table, concurrency=n_open or None, seed=seed)


#: Of runs by name: {learned from: {predicted: `errors`}}.
_CrossErrors = dict[str, dict[str, dict[str, float]]]


def cross_errors(runs: Mapping[str, MeasuredRun], seed: int = 0) -> _CrossErrors:
    """Step times learned from the one run, the other predicted, for every pair."""
    measured = {name: run.figures() for name, run in runs.items()}
    found: _CrossErrors = {}
    for source, run in runs.items():
        table = StepTable.from_records(run.records)
        predicted = {name: other.predicted(table, seed=seed) for name, other in runs.items()}
        found[source] = {name: errors(predicted[name].figures(), measured[name]) for name in runs}
    return found


#: Of closed-loop traffic: shares of the time in which all its requests are open, and of arrivals
#: that follow an end.
_MOSTLY = 0.9
#: Within which share of a median request, and at least how many seconds, an arrival follows an end.
_FOLLOWS_SHARE, _FOLLOWS_S = 0.1, 0.05


_arrival_of = attrgetter("arrival")


def _was_refused(request: RequestRecord) -> bool:
    return request.first_token is None and request.finish == "error"


def _mostly_busy(by_arrival: Sequence[RequestRecord], clients: int) -> bool:
    """Whether about so many requests were open all the time."""
    start, end = by_arrival[clients - 1].arrival, by_arrival[-1].arrival
    return _time_average(_moments(by_arrival), start, end) >= _MOSTLY * clients


def _mostly_following(by_arrival: Sequence[RequestRecord], clients: int) -> bool:
    """Whether nearly every request but the first ones came soon after the end of another."""
    later = by_arrival[clients:]
    ends = [request.end for request in by_arrival]
    return _following(later, ends, _soon(by_arrival)) >= _MOSTLY * len(later)


def _soon(requests: Sequence[RequestRecord]) -> float:
    """Seconds within which one request follows another."""
    usual = np.median([request.end - request.arrival for request in requests])
    return max(_FOLLOWS_S, _FOLLOWS_SHARE * float(usual))


def _moments(requests: Iterable[RequestRecord]) -> list[tuple[float, int]]:
    """(time, change of the number of open requests), ascending."""
    moments = []
    for request in requests:
        moments += [(request.arrival, 1), (request.end, -1)]
    return sorted(moments)


def _most_open(moments: Iterable[tuple[float, int]]) -> int:
    return max(itertools.accumulate((change for _, change in moments), initial=0))


def _time_average(moments: Sequence[tuple[float, int]], start: float, end: float) -> float:
    """The mean from `start` to `end` of a number that changes at given moments, ascending."""
    if end <= start:
        return 0.0
    number, at, total = 0, start, 0.0
    for moment, change in moments:
        until = min(max(moment, start), end)
        total += number * (until - at)
        number, at = number + change, until
    return total / (end - start)


def _following(later: Sequence[RequestRecord], ends: Iterable[float], soon: float) -> int:
    """How many of the requests, by arrival, come within `soon` seconds after an end that no other
    one follows.
    """
    waiting, count = iter(sorted(ends)), 0
    end = next(waiting, None)
    for request in later:
        while end is not None and end < request.arrival - soon:
            end = next(waiting, None)
        if end is not None and end <= request.arrival:
            count += 1
            end = next(waiting, None)
    return count


def _runs_in(arrays: Mapping[str, np.ndarray]) -> dict[str, MeasuredRun]:
    times = [key for key in arrays if key.startswith("times_")]
    names = [key.removeprefix("times_") for key in times]
    return {name: _run_of(arrays, name) for name in names}


def _run_of(arrays: Mapping[str, np.ndarray], name: str) -> MeasuredRun:
    note = msgspec.json.decode(str(arrays[f"note_{name}"]), type=RunNote)
    requests = {row["request"]: _request_of(row) for row in _rows(arrays[f"times_{name}"])}
    for row in _rows(arrays[f"stays_{name}"]):
        requests[row["request"]].stays.append(_stay_of(row))
    return MeasuredRun(list(requests.values()), arrays[f"records_{name}"], note)


def _stay_of(row: JsonObject) -> Stay:
    return Stay(row["seat"], -1, row["start"], _known(row["first_token"]), end=row["end"])


def _rows(array: np.ndarray) -> list[JsonDict]:
    """The values of each item by name."""
    names = array.dtype.names or ()
    return [dict(zip(names, values, strict=True)) for values in array.tolist()]


def _request_of(row: JsonObject) -> RequestRecord:
    times: JsonDict = {name: _known(row[name]) for name in ("boarded", "first_token")}
    same = {name: row[name] for name in _SAME}
    return RequestRecord(number=row["request"], finish="length", **same, **times)


#: Columns that are fields of a request.
_SAME = ("n_prompt", "n_output", "arrival", "finished")


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value
