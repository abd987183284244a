"""Chooses the sizes of a server on a CPU from this machine's step times: sizes stored by an earlier
start, or measured in the background of this one for the next.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from jitney.engine.common.errors import ConfigError, JitneyError
from jitney.engine.common.machine import available_host_bytes, processor_name
from jitney.engine.config import ResolvedConfig
from jitney.engine.core import processors_here
from jitney.engine.lab.tuned_sizes import MeasuredTimes, TunedSizes

if TYPE_CHECKING:
    from jitney.engine.server import ProcessClient

_log = logging.getLogger("jitney")

#: Free memory that timing needs, as a multiple of the model's weights, which it loads again.
_MEMORY = 3
#: First and longest wait before steps are timed again after other programs disturbed it, seconds;
#: the wait doubles each time.
_FIRST_REST_S, _LONGEST_REST_S = 60.0, 600.0


@dataclass(frozen=True, slots=True)
class ServerSizes:
    """The sizes of a server with these settings."""

    resolved: ResolvedConfig

    @property
    def machine(self) -> str:
        """The processor's name and the cores that may be used. Raises ConfigError."""
        return f"{processor_name()}, {processors_here(self.resolved.config.engine.threads)}"

    @property
    def used(self) -> bool:
        """Whether the server takes measured sizes."""
        return TunedSizes.are_for(self.resolved)

    def kept(self) -> TunedSizes | None:
        """Sizes that were measured on this machine before; None if the server does not use them."""
        if not self.used:
            return None
        sizes = TunedSizes.read(self.resolved.config, self.machine)
        if sizes is not None:
            try:
                sizes.applied_to(self.resolved)
            except ConfigError:  # the file was changed
                return None
        return sizes

    async def time_behind(self, client: ProcessClient) -> TunedSizes | None:
        """Time steps while the serving engine is idle, and store the chosen sizes for the next
        start. Returns None after one line in the log if that fails.
        """
        # Imported here, since later starts do not measure.
        from jitney.engine.lab.bench.sizes import OtherPrograms, sizes_here
        from jitney.engine.lab.bench.timing_behind import TimingBehind

        config, machine = self.resolved.config, self.machine
        info = client.info
        if info is None or available_host_bytes() < _MEMORY * info.model.weight_bytes:
            _log.warning("sizes stay the usual ones: no memory is left for a second engine to time")
            return None
        times = MeasuredTimes.read(config, machine)
        timing = TimingBehind(times, lambda: times.keep(config, machine))
        client.on_busy = timing.hold
        rest_s = _FIRST_REST_S
        while True:
            try:
                chosen = await sizes_here(config, timing.time_steps)
                break
            except OtherPrograms as error:
                _log.info("%s; that is done in %.0f s", error, rest_s)
                await asyncio.sleep(rest_s)
                rest_s = min(2 * rest_s, _LONGEST_REST_S)
            except (JitneyError, OSError) as error:
                _log.warning("sizes stay the usual ones: %s", error)
                return None
        sizes = TunedSizes(chosen.values, date.today().isoformat())
        reason = sizes.keep(config, machine)
        if reason:
            _log.warning("sizes are measured anew at every start: %s", reason)
            return None
        _log.info("the next start takes %s", sizes)
        return sizes

    def as_served(self) -> ResolvedConfig:
        """The settings of a server that starts now: with stored sizes, if there are any."""
        sizes = self.kept()
        return self.resolved if sizes is None else sizes.applied_to(self.resolved)
