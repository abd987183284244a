"""`jitney fleet`: several engines behind one endpoint."""

from __future__ import annotations

from jitney.engine.cli.dispatch import Commands

run = Commands(
    "jitney fleet",
    "Several engines behind one endpoint.",
    {
        "serve": "start the engines of a fleet.toml and answer for all of them",
    },
    prefix="fleet_",
).run
