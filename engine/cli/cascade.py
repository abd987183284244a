"""`jitney cascade`: models that ask a larger one where they are not sure."""

from __future__ import annotations

from jitney.engine.cli.dispatch import Commands

run = Commands(
    "jitney cascade",
    "A small model that asks a large one where it is not sure.",
    {"tune": "find the threshold: cost against agreement, over requests of yours"},
    prefix="cascade_",
).run
