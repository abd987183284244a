"""Recorded traces: requests that an engine received, with their measured times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.summary import summarise
from jitney.engine.common.trace import TraceLine
from jitney.engine.lab.simulation.engine_run import file_errors, span

#: Closed-loop traffic: least share of arrivals that follow an end; within this share of a median
#: request's time, or within this number of seconds if that is longer.
_MOSTLY, _FOLLOWS_SHARE, _FOLLOWS_S = 0.9, 0.1, 0.05


class EngineName(NamedTuple):
    """A model's name and the name of its device."""

    model: str
    device: str

    def __str__(self) -> str:
        return f"{self.model} on {self.device}"

    def is_like(self, other: EngineName) -> bool:
        """Whether both may be the same: "h100" matches "NVIDIA H100 80GB HBM3", and an empty name
        matches any.
        """
        pairs = [(ours.lower(), theirs.lower()) for ours, theirs in zip(self, other, strict=True)]
        return all(ours in theirs or theirs in ours for ours, theirs in pairs)


@dataclass(frozen=True, slots=True)
class Recording:
    """Requests that an engine received, with their measured times."""

    requests: Sequence[RequestRecord]
    #: The engine that answered them; None: unknown.
    engine: EngineName | None = None

    @classmethod
    def of(cls, lines: Sequence[TraceLine]) -> Recording:
        """The recording in a trace; lines without a measurement are left out."""
        numbered = enumerate(lines)
        requests = [_measured_request(*each) for each in numbered if each[1].e2e_s is not None]
        engines = (EngineName(line.model, line.device) for line in lines if line.device)
        return cls(requests, next(engines, None))

    def figures(self, **options: Any) -> JsonDict | None:
        """Figures from first arrival to last end; None if empty. options: those of `summarise`."""
        if not self.requests:
            return None
        return summarise(self.requests, records=None, seconds=span(self.requests), **options)

    def clients(self) -> int:
        """Number of clients of a closed loop, each of which sends its next request when the last
        one has ended; 0 if the requests came in an open loop.

        A closed loop waits for the engine: if its requests were replayed at their recorded times, a
        slower policy would get more requests than such clients send.
        """
        if any(each.first_token is None and each.finish == "error" for each in self.requests):
            return 0  # clients of refused requests retry at their own times
        by_arrival = sorted(self.requests, key=lambda request: request.arrival)
        clients = _most_open(by_arrival)
        later = by_arrival[clients:]
        if len(by_arrival) < 3 * clients or not later:
            return 0
        usual = float(np.median([request.end - request.arrival for request in by_arrival]))
        soon = max(_FOLLOWS_S, _FOLLOWS_SHARE * usual)
        following = _count_following(later, sorted(request.end for request in by_arrival), soon)
        return clients if following >= _MOSTLY * len(later) else 0


def _measured_request(number: int, line: TraceLine) -> RequestRecord:
    def after(seconds: float | None) -> float | None:
        return None if seconds is None else line.at + seconds

    return RequestRecord(
        number=number,
        tenant=line.tenant,
        n_prompt=line.n_prompt,
        n_output=line.n_output,
        arrival=line.at,
        boarded=after(line.queue_s),
        first_token=after(line.ttft_s),
        finished=after(line.e2e_s),
        finish=line.finish or "length",
    )


def _most_open(requests: Iterable[RequestRecord]) -> int:
    """Most requests that are open at the same time."""
    moments = []
    for request in requests:
        moments += [(request.arrival, 1), (request.end, -1)]
    changes = [change for _, change in sorted(moments)]
    return int(np.max(np.cumsum(changes), initial=0))


def _count_following(requests: Iterable[RequestRecord], ends: Sequence[float], soon: float) -> int:
    """Number of requests that come within `soon` seconds after an end, with at most one request per
    end. requests: by arrival; ends: ascending.
    """
    count = place = 0
    for request in requests:
        while place < len(ends) and ends[place] < request.arrival - soon:
            place += 1
        if place < len(ends) and ends[place] <= request.arrival:
            count += 1
            place += 1
    return count


def write_recording(path: str | Path, requests: Iterable[RequestRecord], started: float) -> None:
    """Write one line per request with its measured times, like `jitney serve --record`; times since
    `started`. Raises ConfigError if the file cannot be written.
    """
    lines = []
    for request in requests:
        measured = {name: getattr(request, name) for name in _MEASURED}
        lines.append(TraceLine(at=max(0.0, request.arrival - started), **measured))
    with file_errors(path):
        Path(path).write_bytes(msgspec.json.Encoder().encode_lines(lines))


#: Fields of a request that are written to a trace.
_MEASURED = ("n_prompt", "n_output", "tenant", "queue_s", "ttft_s", "e2e_s", "finish")
