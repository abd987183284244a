"""Whether a run's queue grew from its first request to its last, so that its waits say how long the
run was.

A server that is offered more than it can serve makes every request wait longer than the one before
it: twice the run gives twice the p99. Such a p99 is no property of the server, and a report has to
say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from jitney.engine.common.request_record import RequestRecord

#: With fewer requests nothing is said.
_FEWEST = 20
_PARTS = 4
#: The queue grew if the trend of the waits over the run is more than their mean (a queue that grows
#: evenly from nothing has twice its mean, a level one nothing) ...
_LEAST_TREND = 1.0
#: ... the last part's mean wait is at least this share of the time in which requests came ...
_LEAST_WAIT = 0.03
#: ... and at least this share of them still waited when the last one came.
_LEAST_WAITING = 0.05


class QueueGrowth(msgspec.Struct, frozen=True):
    """How an open loop's queue went."""

    #: It grew for the whole run, so that p99 is the length of the run.
    grew: bool
    #: Requests that came a second.
    offered_req_s: float
    #: Requests without a first token when the last one came.
    waiting_at_end: int
    #: Mean wait for the first token, in seconds, in each quarter of the time in which requests
    #: came; None where nobody came.
    wait_s: tuple[float | None, ...]

    @classmethod
    def of(cls, requests: Iterable[RequestRecord]) -> QueueGrowth | None:
        """Of a run whose requests came at times of their own; None if it is too short to tell.

        Whoever never got a token counts as waiting until it ended, unless it was refused.
        """
        came, began = [], []
        for request in requests:
            waited_until = request.first_token
            if waited_until is None and request.finish == "timeout":
                waited_until = request.end
            if waited_until is not None:
                came.append(request.arrival)
                began.append(waited_until)
        return _backlog(came, began)

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


def _backlog(
    came: Sequence[float] | np.ndarray, began: Sequence[float] | np.ndarray
) -> QueueGrowth | None:
    """As `QueueGrowth.of`, from when each request came and when its first token did [n] s, in any
    order.

    The numbers above were chosen on simulated queues of 8 and 32 servers: at 85 % load at most 2 %
    of runs of 256 requests are said to grow, at 130 % load at least 85 %; just above 100 % only
    long runs show it.
    """
    if len(came) < _FEWEST:
        return None
    arrivals = np.asarray(came, np.float64)
    starts = np.asarray(began, np.float64)
    order = np.argsort(arrivals, kind="stable")
    since = arrivals[order] - arrivals[order[0]]
    waits = (starts - arrivals)[order]
    window = float(since[-1])
    if window <= 0:
        return None
    means = _means(since / window, waits)
    waiting = int((starts > arrivals.max()).sum())
    return QueueGrowth(
        grew=_grew(since, waits, means, waiting / len(waits)),
        offered_req_s=(len(waits) - 1) / window,
        waiting_at_end=waiting,
        wait_s=means,
    )


def _means(at: np.ndarray, waits: np.ndarray) -> tuple[float | None, ...]:
    """The mean wait of each part of the run; at: shares of it [n] at which requests came."""
    part = np.minimum((at * _PARTS).astype(np.int64), _PARTS - 1)
    means: list[float | None] = [None] * _PARTS
    for number in np.unique(part).tolist():
        means[number] = float(waits[part == number].mean())
    return tuple(means)


def _grew(
    since: np.ndarray, waits: np.ndarray, means: Sequence[float | None], share_waiting: float
) -> bool:
    if None in means or share_waiting < _LEAST_WAITING:
        return False
    quarters = np.array(means, np.float64)
    if np.any(np.diff(quarters) <= 0):
        return False
    window = float(since[-1])
    return bool(_is_steep(since, waits) and quarters[-1] > _LEAST_WAIT * window)


def _is_steep(since: np.ndarray, waits: np.ndarray) -> bool:
    """Whether waits rise enough over the run."""
    slope = np.polyfit(since, waits, 1)[0]
    return slope * since[-1] > _LEAST_TREND * waits.mean()
