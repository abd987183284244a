"""Detects a queue that grew for the whole run, whose waits only depend on the length of the run.

If more requests are offered than a server can serve, every request waits longer than the one before
it: a run of twice the length has twice the p99. Reports must state this.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from jitney.engine.common.request_record import RequestRecord

#: Least requests of a run that is judged.
_FEWEST = 20
_PARTS = 4
#: The queue grew if the mean wait rises from each quarter of the run to the next, the last mean is
#: at least this many times the first, and at least this share of the requests waited when the last
#: one came. Among simulated queues of 8 servers with 256 requests, this holds for 3 % of the runs
#: at 85 % load, and for 86 % at 130 % load.
_LEAST_RISE, _LEAST_WAITING = 3.0, 0.05


class QueueGrowth(msgspec.Struct, frozen=True):
    """Growth of the queue in an open loop."""

    #: Whether it grew for the whole run, so that p99 is the length of the run.
    grew: bool
    #: Arriving requests a second.
    offered_req_s: float
    #: Requests without a first token when the last one came.
    waiting_at_end: int
    #: Mean wait for the first token, in seconds, in each quarter of the arrival time; None for a
    #: quarter without requests.
    wait_s: tuple[float | None, ...]

    @classmethod
    def of(cls, requests: Iterable[RequestRecord]) -> QueueGrowth | None:
        """The growth in an open loop's run; None if the run is too short.

        A request that timed out counts as waiting until its timeout; refused ones do not count.
        """
        times = []
        for request in requests:
            began = request.end if request.finish == "timeout" else None
            began = request.first_token if request.first_token is not None else began
            if began is not None:
                times.append((request.arrival, began))
        if len(times) < _FEWEST:
            return None
        arrivals, starts = np.array(sorted(times)).T
        window = float(arrivals[-1] - arrivals[0])
        if window <= 0:
            return None
        quarters = np.minimum((arrivals - arrivals[0]) / window * _PARTS, _PARTS - 1).astype(int)
        waits = [_mean((starts - arrivals)[quarters == part]) for part in range(_PARTS)]
        waiting = int((starts > arrivals[-1]).sum())
        return cls(
            grew=waiting >= _LEAST_WAITING * len(times) and _rises(waits),
            offered_req_s=(len(times) - 1) / window,
            waiting_at_end=waiting,
            wait_s=tuple(waits),
        )

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


def _mean(waits: np.ndarray) -> float | None:
    return float(waits.mean()) if len(waits) else None


def _rises(waits: list[float | None]) -> bool:
    present = [wait for wait in waits if wait is not None]
    return (
        len(present) == _PARTS
        and bool(np.all(np.diff(present) > 0))
        and present[-1] > _LEAST_RISE * present[0]
    )
