"""The sizes of a server on a CPU, by what this machine's steps take: those kept from an earlier
start, or measured behind this one for the next.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from jitney.engine.common.errors import ConfigError, JitneyError
from jitney.engine.common.machine import processor_name
from jitney.engine.config import MeasuredTimes, ResolvedConfig, TunedSizes
from jitney.engine.core import available_host_bytes, processors_here

if TYPE_CHECKING:
    from jitney.engine.server import ProcessClient

_log = logging.getLogger("jitney")

#: Free memory that timing wants, in weights of the model: it loads them once more.
_MEMORY = 3
#: Seconds until steps are timed again beside which other programs worked; twice as many each time,
#: up to the second.
_FIRST_REST_S, _LONGEST_REST_S = 60.0, 600.0


@dataclass(frozen=True, slots=True)
class ServerSizes:
    """The sizes of a server with these settings."""

    resolved: ResolvedConfig

    @property
    def machine(self) -> str:
        """The processor, and which of its cores may be used. Raises ConfigError."""
        return f"{processor_name()}, {processors_here(self.resolved.config.engine.threads)}"

    def kept(self) -> TunedSizes | None:
        """Sizes that were measured here before, if the server goes by them."""
        if not TunedSizes.are_for(self.resolved):
            return None
        kept = TunedSizes.read(self.resolved.config, self.machine)
        return kept if kept is not None and self._can_have(kept) else None

    def _can_have(self, sizes: TunedSizes) -> bool:
        """Whether an engine can have them; else the file is not what was written."""
        try:
            sizes.applied_to(self.resolved)
        except ConfigError:
            return False
        return True

    async def time_behind(self, client: ProcessClient) -> TunedSizes | None:
        """Time steps while the engine that serves has nothing to do, and keep what is chosen for
        the next start. None, and one line in the log, if that cannot be done.
        """
        # Of later starts none needs what measures.
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
                found = await sizes_here(config, timing.time_steps)
                break
            except OtherPrograms as error:
                _log.info("%s; that is done in %.0f s", error, rest_s)
                await asyncio.sleep(rest_s)
                rest_s = min(2 * rest_s, _LONGEST_REST_S)
            except (JitneyError, OSError) as error:
                _log.warning("sizes stay the usual ones: %s", error)
                return None
        sizes = TunedSizes(found.values, date.today().isoformat())
        reason = self.keep(sizes)
        if reason:
            _log.warning("sizes are measured anew at every start: %s", reason)
            return None
        _log.info("the next start takes %s", sizes)
        return sizes

    def keep(self, sizes: TunedSizes) -> str:
        """Have later starts take them. Why that cannot be; empty if it can."""
        return sizes.keep(self.resolved.config, self.machine)

    def as_served(self) -> ResolvedConfig:
        """As a server started now has its settings: with the sizes kept here, if there are any."""
        kept = self.kept()
        return self.resolved if kept is None else kept.applied_to(self.resolved)
