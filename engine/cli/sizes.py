"""The sizes of a server on a CPU, by what this machine's steps take: those kept from an earlier
start, or measured now.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import date

from jitney.engine.cli.display import Display
from jitney.engine.config.kept_sizes import KeptSizes
from jitney.engine.config.layers import Layered
from jitney.engine.errors import ConfigError, JitneyError
from jitney.engine.executor.threads import processors_here
from jitney.engine.machine import processor_name
from jitney.engine.messages import Progress

_log = logging.getLogger("jitney")

_MEASURING = "once, to choose sizes by them; --no-measured-sizes takes the usual ones"


@dataclass(frozen=True, slots=True)
class ServerSizes:
    """The sizes of a server with these settings."""

    layered: Layered

    @property
    def machine(self) -> str:
        """What computes here: the processor, and what of it may be used. Raises ConfigError."""
        return f"{processor_name()}, {processors_here(self.layered.config.engine.threads)}"

    def kept(self) -> KeptSizes | None:
        """What was measured here before, if the server goes by it."""
        if not KeptSizes.are_for(self.layered):
            return None
        kept = KeptSizes.read(self.layered.config, self.machine)
        return kept if kept is not None and self._can_have(kept) else None

    def _can_have(self, sizes: KeptSizes) -> bool:
        """Whether an engine can have them; else the file is not what was written."""
        try:
            sizes.applied_to(self.layered)
        except ConfigError:
            return False
        return True

    async def measured(self, display: Display) -> KeptSizes | None:
        """Measure now and keep it. None, and one line in the log, if that cannot be done."""
        # Of later starts none needs what measures.
        from jitney.engine.bench.sizes import sizes_here

        display.progress(Progress("sizes", 0, 1, _MEASURING))
        try:
            found = await sizes_here(self.layered.config)
        except (JitneyError, OSError) as error:
            _log.warning("sizes are the usual ones: %s", error)
            return None
        display.progress(Progress("sizes", 1, 1))
        sizes = KeptSizes(found.values, date.today().isoformat())
        reason = self.keep(sizes)
        if reason:
            _log.warning("sizes are measured anew at every start: %s", reason)
        return sizes

    def keep(self, sizes: KeptSizes) -> str:
        """Have later starts take them. Why that cannot be; empty if it can."""
        return sizes.keep(self.layered.config, self.machine)

    def as_served(self) -> Layered:
        """As a server started now has its settings: with the sizes kept here, if there are any."""
        kept = self.kept()
        return self.layered if kept is None else kept.applied_to(self.layered)
