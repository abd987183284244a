"""Simulates the engine: production code on a virtual clock (`engine.core.measuring.virtual`).

A step table gives the device's time of a step, and measurements give the host's time; production
code decides everything else. The tokens that the recorded engine found in its prefix cache
(`Arrival.n_cached`) count as found again under all policies.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from functools import partial

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.history import RequestRecords
from jitney.engine.common.requests import EngineRequest
from jitney.engine.common.trace import Arrival
from jitney.engine.core import EngineShape, StepTimes, VirtualDevice
from jitney.engine.lab.simulation.drive import Offer, drive
from jitney.engine.lab.simulation.engine_run import EngineRun


def simulate(
    arrivals: Sequence[Arrival],
    engine: EngineShape,
    table: StepTimes,
    *,
    concurrency: int | None = None,
    seed: int = 0,
) -> EngineRun:
    """Run the arrivals (ascending in time) through the engine, as fast as Python can.

    concurrency: open requests of a closed loop, in which a request comes when fewer are open,
    regardless of its time. seed: for the scatter of step times, if the table has any. Requests that
    the engine refuses end with finish "error". Raises ConfigError if there is nothing to simulate.
    """
    if not arrivals:
        raise ConfigError("there is no request to simulate")
    history = RequestRecords(keep_times=True)
    device = VirtualDevice(table, seed)
    device.clock.now = started = arrivals[0].at
    core = device.new_core(engine, _hits_of(arrivals))
    offer = Offer(
        [arrival.at for arrival in arrivals], partial(_request_at, arrivals), concurrency or 0
    )
    with no_collection():
        log = drive(core, device.clock, offer, history, device.reported)
    core.check()
    return EngineRun(list(history.oldest()), log.records, engine, started, concurrency or 0)


def predict(
    run: EngineRun, table: StepTimes, *, concurrency: int | None = None, seed: int = 0
) -> EngineRun:
    """Simulate the requests of a run on its own engine. concurrency: None: that of the run."""
    n_open = run.concurrency if concurrency is None else concurrency
    return simulate(run.arrivals, run.shape, table, concurrency=n_open or None, seed=seed)


def _hits_of(arrivals: Sequence[Arrival]) -> dict[str, int]:
    """Request id -> cached prompt tokens, for requests that found any."""
    hits = {str(number): arrival.n_cached for number, arrival in enumerate(arrivals)}
    return {name: n_cached for name, n_cached in hits.items() if n_cached}


def _request_at(arrivals: Sequence[Arrival], number: int, at: float) -> EngineRequest:
    arrival = arrivals[number]
    return arrival.request(str(number), [0] * arrival.n_prompt, at)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection inside, which would take a tenth of the time: a run creates
    millions of objects that stay alive, and no cycles.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
