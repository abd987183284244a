"""`jitney serve` with an engine that certain tokens break: for `faults.py`.

    python docs/benchmarks/faulty_server.py serve --model tiny-random [...]

The token NAN in a prompt makes the numbers of that sequence's rows infinite, as a broken weight
would: its embedding is not a number. A step that has a sequence with the token POISON in its prompt
raises. The model's embeddings must be separate from its head (`tiny-random` has such).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jitney.engine import cli
from jitney.engine.common.engine_info import EngineInfo
from jitney.engine.common.messages import Progress
from jitney.engine.config.schema import Config
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.server.process import process_client

#: Tokens that no other request contains.
NAN, POISON = 500, 501


class _FaultyClient(process_client.ProcessClient):
    """An engine client whose cores are made by `build` below."""

    def __init__(self, config: Config, **rest: Any):
        super().__init__(config, builder="faulty_server:build", **rest)


def build(
    config: Config, source: ModelSource, progress: Callable[[Progress], None]
) -> tuple[EngineCore, EngineInfo]:
    """Build an engine with both faults; runs in the core's process."""
    from jitney.engine.core import build as building

    load_model = building.load_model

    def load_broken(*args: Any, **options: Any) -> Any:
        model: Any = load_model(*args, **options)
        model.embed[...] = model.embed[...].at[NAN].set(float("nan"))
        return model

    building.load_model = load_broken
    core, info = building.build_engine(config, source, progress)
    _poison(core)
    return core, info


def _poison(core: EngineCore) -> None:
    """Make steps with POISON fail."""
    launch = core.runner.launch

    def launch_or_fail(batch: Any) -> Any:
        for chunk in batch.plan.chunks:
            if POISON in chunk.seq.tokens[: chunk.seq.n_prompt]:
                raise RuntimeError("asked to fail")
        return launch(batch)

    core.runner.launch = launch_or_fail


def main() -> int:
    """Run the command line of `jitney` with cores that can be broken."""
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        folder for folder in (here, os.environ.get("PYTHONPATH")) if folder
    )
    process_client.ProcessClient = _FaultyClient
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
