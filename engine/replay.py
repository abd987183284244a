"""Traffic again, under other policies: the policy lab's process, `python -P -m jitney.engine.replay`.

One `Job` comes in, lines of JSON go out. It runs at the lowest priority, so that the engine it shares the machine with
does not notice.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import msgspec
import numpy as np

from jitney.engine.config import EngineSection
from jitney.engine.errors import JitneyError
from jitney.engine.figures import RequestTimes, summarise
from jitney.engine.simulator import EngineShape, Run, simulate, weighted_spread
from jitney.engine.steptable import StepTable
from jitney.engine.workload import Arrival

NICENESS = 15
#: Most rides told of one policy.
MAX_RIDES = 20_000


class Served(msgspec.Struct, frozen=True, array_like=True):
    """A request as it was served, see `figures.RequestTimes`."""

    request: int
    n_prompt: int
    n_output: int
    arrival: float
    boarded: float | None
    first_token: float | None
    finished: float
    finish: str

    @property
    def times(self) -> RequestTimes:
        return RequestTimes(self.request, "", self.n_prompt, self.n_output, self.arrival, self.boarded,
                            self.first_token, self.finished, self.finish)


class Job(msgspec.Struct, frozen=True):
    """What to replay and how. settings: [engine] of the configuration; pages: in use by sequences at most, without the
    trash page. records: a .npy file of step records to learn step times from. times: the same requests as they were
    served, over `seconds`, whose own steps are `window` (.npy)."""

    arrivals: list[Arrival]
    settings: dict[str, Any]
    policies: list[str]
    context_length: int
    pages: int
    records: bytes
    times: list[Served]
    seconds: float
    window: bytes
    seats: int
    price_per_hour: float | None = None


def main() -> int:
    """Exit status 0 with a last line {"result": ...} or {"error": ...}."""
    os.nice(NICENESS)
    try:
        tell(result=work(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)))
    except JitneyError as error:
        tell(error=str(error))
    return 0


def tell(**news: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(news) + b"\n")
    sys.stdout.buffer.flush()


def work(job: Job) -> dict[str, Any]:
    """Simulate each policy; says how far it has come."""
    table = StepTable.from_records(array(job.records))
    policies = {}
    for number, policy in enumerate(job.policies):
        tell(progress=number / len(job.policies))
        settings = EngineSection.model_validate(job.settings | {"policy": policy}, strict=False)
        shape = EngineShape.of(settings, context_length=job.context_length, pages=job.pages + 1)
        policies[policy] = told(simulate(job.arrivals, shape, table), job.price_per_hour)
    measured = summarise([served.times for served in job.times], records=array(job.window), seats=job.seats,
                         seconds=job.seconds, price_per_hour=job.price_per_hour)
    return {"policies": policies, "measured": measured | {"itl_s": measured_gaps(array(job.window))}}


def told(run: Run, price_per_hour: float | None) -> dict[str, Any]:
    """Figures and rides of a run, times from its beginning."""
    first = min(times.arrival for times in run.times)
    rides = run.rides[:MAX_RIDES]
    return {"figures": run.figures(price_per_hour=price_per_hour), "seats": run.seats, "seconds": run.seconds,
            "rides_left_out": len(run.rides) - len(rides), "rides": {
                "seat": [ride.seat for ride in rides], "request": [ride.request for ride in rides],
                "from": [round(ride.start - first, 4) for ride in rides],
                "first_token": [None if ride.first_token is None else round(ride.first_token - first, 4)
                                for ride in rides],
                "to": [round(ride.end - first, 4) for ride in rides]}}


def measured_gaps(records: np.ndarray) -> dict[str, float] | None:
    """Time between tokens: of the steps, as often as they had decode rows."""
    decode = records["decode"].astype(np.int64)
    spans = records["device_s"].astype(np.float64) + records["gap_s"]
    return weighted_spread(spans[decode > 0], decode[decode > 0])


def array(file: bytes) -> np.ndarray:
    return np.load(io.BytesIO(file), allow_pickle=False)


if __name__ == "__main__":
    sys.exit(main())
