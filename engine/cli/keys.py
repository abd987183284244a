"""The API key with which a command asks an engine elsewhere: from the environment or a file, never
a flag's value.
"""

from __future__ import annotations

import argparse
import os

from jitney.engine.cli.flags import Flag
from jitney.engine.cli.listen import read_key_file

_VARIABLE = "JITNEY_ENGINE_KEY"


KEY_FLAG = Flag(
    "--key-file",
    {
        "metavar": "FILE",
        "default": "",
        "help": "file whose first line is the engine's API key, readable by its owner only (or set "
        f"{_VARIABLE})",
    },
)


def engine_key(args: argparse.Namespace) -> str:
    """The key, empty if none was given. Raises ConfigError, never showing a key."""
    if args.key_file:
        return read_key_file(args.key_file)
    return os.environ.get(_VARIABLE, "")
