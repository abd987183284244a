"""Whether a run's queue grew from its first request to its last, so that its waits say how long the
run was.

A server that is offered more than it can serve makes every request wait longer than the one before
it: twice the run gives twice the p99. Such a p99 is no property of the server, and a report has to
say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from jitney.engine.telemetry.request_record import RequestRecord

#: With fewer requests nothing is said.
FEWEST = 20
_PARTS = 4
#: The queue grew if the trend of the waits over the run is more than their mean (a queue that grows
#: evenly from nothing has twice its mean, a level one nothing) ...
_LEAST_TREND = 1.0
#: ... the last part's mean wait is at least this share of the time in which requests came ...
_LEAST_WAIT = 0.03
#: ... and at least this share of them still waited when the last one came.
_LEAST_WAITING = 0.05


class Backlog(msgspec.Struct, frozen=True):
    """How an open loop's queue went.

    grew: it grew for the whole run, so that p99 is the length of the run. offered_req_s: requests
    that came a second. waiting_at_end: requests without a first token when the last one came.
    wait_s: mean wait for the first token, in seconds, in each quarter of the time in which requests
    came; None where nobody came.
    """

    grew: bool
    offered_req_s: float
    waiting_at_end: int
    wait_s: tuple[float | None, ...]

    def __str__(self) -> str:
        if not self.grew:
            return (
                f"the queue did not grow: {self.waiting_at_end} waited when the last request came"
            )
        first, last = self.wait_s[0], self.wait_s[-1]
        return (
            f"the queue grew for the whole run, from {first:.2f} to {last:.2f} s of waiting, and "
            f"{self.waiting_at_end} waited when the last request came: p99 is the length of the run"
        )


def backlog_of(requests: Iterable[RequestRecord]) -> Backlog | None:
    """The backlog of a run whose requests came at times of their own; None if it is too short to
    tell.

    Whoever never got a token counts as waiting until it ended, unless it was refused.
    """
    waits = [
        (request.arrival, request.end if request.first_token is None else request.first_token)
        for request in requests
        if request.first_token is not None or request.finish == "timeout"
    ]
    return backlog([came for came, _ in waits], [began for _, began in waits])


def backlog(
    came: Sequence[float] | np.ndarray, began: Sequence[float] | np.ndarray
) -> Backlog | None:
    """As `backlog_of`, from when each request came and when its first token did [n] s, in any
    order.

    The numbers above were chosen on simulated queues of 8 and 32 servers: at 85 % load at most 2 %
    of runs of 256 requests are said to grow, at 130 % load at least 85 %; just above 100 % only
    long runs show it.
    """
    if len(came) < FEWEST:
        return None
    arrivals = np.asarray(came, np.float64)
    starts = np.asarray(began, np.float64)
    order = np.argsort(arrivals, kind="stable")
    since = arrivals[order] - arrivals[order[0]]
    waits = (starts - arrivals)[order]
    window = float(since[-1])
    if window <= 0:
        return None
    part = np.minimum((since / window * _PARTS).astype(np.int64), _PARTS - 1)
    means = tuple(_mean(waits[part == number]) for number in range(_PARTS))
    waiting = int((starts > arrivals.max()).sum())
    return Backlog(
        grew=_grew(since, waits, means, waiting / len(waits)),
        offered_req_s=(len(waits) - 1) / window,
        waiting_at_end=waiting,
        wait_s=means,
    )


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _grew(
    since: np.ndarray, waits: np.ndarray, means: Sequence[float | None], share_waiting: float
) -> bool:
    known = [mean for mean in means if mean is not None]
    if len(known) < _PARTS or share_waiting < _LEAST_WAITING:
        return False
    if any(later <= earlier for earlier, later in pairwise(known)):
        return False
    window = float(since[-1])
    slope = float(np.polyfit(since, waits, 1)[0])
    return slope * window > _LEAST_TREND * float(waits.mean()) and known[-1] > _LEAST_WAIT * window
