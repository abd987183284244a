"""`jitney compile`: compiles an engine's steps into the cache folder, and prints their memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from jitney.engine.common.cache_folder import compilation_cache_dir
from jitney.engine.common.errors import ConfigError
from jitney.engine.common.terminal import say
from jitney.engine.config import Command
from jitney.engine.core import load_llm, placed
from jitney.engine.lab import ServerSizes

_COMMAND = Command(
    "compile",
    "Compile an engine's steps into the cache folder, where `jitney serve` with the same settings "
    "finds them, and print their memory. `--load-format dummy` needs no weights.",
    (),
    sections=("model", "engine"),
    leave_out=Command.ONLY_SERVED,
)


def run(arguments: Sequence[str]) -> int:
    """Compile; exit status 0. Raises JitneyError."""
    args = _COMMAND.parse(arguments)
    resolved = args.load_layers()
    resolved = replace(resolved, config=placed(resolved.config, os.environ))
    if not resolved.config.engine.compilation_cache:
        raise ConfigError("compilation_cache is off: nothing that is compiled would be kept")
    sizes = ServerSizes(resolved).kept()
    if sizes is not None:
        say(str(sizes))
        resolved = sizes.applied_to(resolved)
    llm = load_llm(resolved.config)
    memory, seconds = llm.program_memory(), llm.info.kernels.compile_seconds
    llm.close()
    for line in memory.table():
        print(line)
    print(f"{memory}\n{seconds:.1f} s; kept in {compilation_cache_dir()}")
    return 0
