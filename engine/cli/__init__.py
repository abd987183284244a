"""The command line: the table of commands. A command's module is imported only when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jitney.engine.cli.dispatch import Commands
from jitney.engine.common.errors import ConfigError, JitneyError

_BENCH = Commands(
    "jitney bench",
    "Measure an engine.",
    {
        "serve": (
            "engine.lab:bench_serve",
            "send traffic to an OpenAI-compatible endpoint and time it",
        ),
        "policies": (
            "engine.lab:bench_policies",
            "compare static, dynamic and continuous batching on the same requests, in this process",
        ),
        "sweep": (
            "engine.lab:bench_sweep",
            "measure throughput and latency over concurrency, rate or load, and find the knee",
        ),
        "peers": (
            "engine.lab:bench_peers",
            "compare this engine with others on this machine, over HTTP, with one client",
        ),
        "step": (
            "engine.lab:bench_step",
            "time a step by rows, seats and context: the simulator's table",
        ),
        "sizes": (
            "engine.lab:bench_sizes",
            "time steps of growing sizes on this CPU, and choose the sizes for serve",
        ),
        "device": (
            "engine.lab:bench_device",
            "time kernels, steps and engine on this accelerator, each beside its lower bound",
        ),
    },
)
_FLEET = Commands(
    "jitney fleet",
    "Serve several engines behind one endpoint.",
    {
        "serve": (
            "engine.fleet:fleet_serve",
            "start the engines of a fleet.toml and route requests to them",
        ),
    },
)
_CASCADE = Commands(
    "jitney cascade",
    "A small model that passes requests to a large one where it is not sure.",
    {
        "tune": (
            "engine.fleet:cascade_tune",
            "find the threshold: cost against agreement, over your requests",
        )
    },
)
_CONFIG = Commands(
    "jitney config",
    "Print and compare settings of files and running servers.",
    {
        "show": (
            "engine.cli.config_command:show",
            "print every setting of a file or a running server, and where its value came from",
        ),
        "diff": (
            "engine.cli.config_command:diff",
            "print how the settings of two files or running servers differ",
        ),
    },
)
_COMMANDS = Commands(
    "jitney",
    "In-flight batching for large language models in JAX.",
    {
        "serve": (
            "engine.cli.serve:run",
            "serve a model over HTTP (OpenAI-compatible), with in-flight batching",
        ),
        "fleet": ("", "serve several engines and compositions of models behind one endpoint"),
        "compile": (
            "engine.cli.compile:run",
            "compile an engine's steps into the cache folder, and print their memory",
        ),
        "generate": ("engine.cli.generate:run", "complete prompts offline and print the texts"),
        "batch": (
            "engine.cli.batch:run",
            "answer a file of requests without a server, and continue where it stopped",
        ),
        "chat": ("engine.cli.chat:run", "chat with a model in the terminal"),
        "bench": ("", "measure throughput and latency: over HTTP, by policy, by step"),
        "simulate": (
            "engine.lab:simulate",
            "simulate an engine under given traffic, for each policy",
        ),
        "cascade": ("", "tune a cascade of a small and a large model"),
        "plan": (
            "engine.lab:plan",
            "size a deployment: memory, batch size, cost, replicas, buckets",
        ),
        "dashboard": (
            "dashboard:dashboard_command",
            "show the page for one or several running engines",
        ),
        "top": ("dashboard:top_command", "watch an engine's seats in the terminal"),
        "diagnose": (
            "engine.cli.diagnose:run",
            "find out why a running server is slow, and what to change",
        ),
        "config": ("", "print and compare settings of files and running servers"),
        "doctor": (
            "engine.cli.doctor:run",
            "check whether Jitney runs on this machine",
        ),
    },
    groups={"bench": _BENCH, "fleet": _FLEET, "cascade": _CASCADE, "config": _CONFIG},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The `jitney` program. Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        return _COMMANDS.run(sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        return _complain(error, 2)
    except JitneyError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output is gone; silence also the error that Python prints at exit.
        sys.stderr.close()
        return 1


def _complain(error: Exception, status: int) -> int:
    from jitney.engine.common.terminal import visible

    print(visible(f"jitney: {error}"), file=sys.stderr)
    return status
