"""`jitney config`: what an engine is set to."""

from __future__ import annotations

from jitney.engine.cli.dispatch import Commands

run = Commands(
    "jitney config",
    "What an engine is set to, here or elsewhere.",
    {
        "show": "every setting of a file or of a running server, and where its value came from",
        "diff": "how the settings of two files or running servers differ",
    },
    prefix="config_",
).run
