"""The sizes of a server on a CPU, by what this machine's steps take: those kept from an earlier
start, or measured now.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import date

from jitney.engine.cli.display import Display
from jitney.engine.config.kept_sizes import (
    KeptSizes,
    Value,
    are_measured,
)
from jitney.engine.config.layers import Layered, settings
from jitney.engine.config.schema import Config
from jitney.engine.errors import ConfigError, JitneyError
from jitney.engine.executor.threads import processors_here
from jitney.engine.machine import processor_name
from jitney.engine.messages import Progress

_log = logging.getLogger("jitney")

#: Where all came out as their defaults.
USUAL = "the usual ones"
_MEASURING = "once, to choose sizes by them; --no-measured-sizes takes the usual ones"


def machine(config: Config) -> str:
    """What computes here: the processor, and what of it may be used. Raises ConfigError."""
    return f"{processor_name()}, {processors_here(config.engine.threads)}"


def kept_for(layered: Layered) -> KeptSizes | None:
    """What was measured here before, if a server with these settings goes by it."""
    if not are_measured(layered):
        return None
    kept = KeptSizes.read(layered.config, machine(layered.config))
    return kept if kept is not None and _fit(layered, kept) else None


def _fit(layered: Layered, sizes: KeptSizes) -> bool:
    """Whether an engine can have them; else the file is not what was written."""
    try:
        sizes.applied_to(layered)
    except ConfigError:
        return False
    return True


async def measured_for(layered: Layered, display: Display) -> KeptSizes | None:
    """Measure now and keep it. None, and one line in the log, if that cannot be done."""
    # Of later starts none needs what measures.
    from jitney.engine.bench.sizes import sizes_here

    display.progress(Progress("sizes", 0, 1, _MEASURING))
    try:
        found = await sizes_here(layered.config)
    except (JitneyError, OSError) as error:
        _log.warning("sizes are the usual ones: %s", error)
        return None
    display.progress(Progress("sizes", 1, 1))
    sizes = KeptSizes(found.values, date.today().isoformat())
    reason = sizes.keep(layered.config, machine(layered.config))
    if reason:
        _log.warning("sizes are measured anew at every start: %s", reason)
    return sizes


def as_served(layered: Layered) -> Layered:
    """As a server started now has its settings: with the sizes kept here, if there are any."""
    kept = kept_for(layered)
    return layered if kept is None else kept.applied_to(layered)


def described(sizes: KeptSizes) -> str:
    """In one line, as the flags that would set them."""
    words = as_flags(sizes.values) or USUAL
    return f"sizes by this machine's steps, timed on {sizes.measured}: {words}"


def as_flags(values: Mapping[str, Value]) -> str:
    """As they would be given on the command line."""
    return " ".join(f"{settings()[name].flag} {_text(value)}" for name, value in values.items())


def _text(value: Value) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)
