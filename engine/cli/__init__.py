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
            "send traffic to an OpenAI-compatible endpoint, ours or another's, and time it",
        ),
        "policies": (
            "engine.lab:bench_policies",
            "static, dynamic and continuous batching on the same requests, in this process",
        ),
        "sweep": (
            "engine.lab:bench_sweep",
            "throughput and latency over concurrency, rate or load, with the knee marked",
        ),
        "peers": (
            "engine.lab:bench_peers",
            "this engine and others in turn on this machine, over HTTP, with one client",
        ),
        "step": (
            "engine.lab:bench_step",
            "time of one step by rows, seats and context: the simulator's table",
        ),
        "sizes": (
            "engine.lab:bench_sizes",
            "steps of growing sizes on this CPU, and the sizes that serve chooses by them",
        ),
        "device": (
            "engine.lab:bench_device",
            "kernels, steps and engine on this accelerator, each beside its floor",
        ),
    },
)
_FLEET = Commands(
    "jitney fleet",
    "Several engines behind one endpoint.",
    {
        "serve": (
            "engine.fleet:fleet_serve",
            "start the engines of a fleet.toml and answer for all of them",
        ),
    },
)
_CASCADE = Commands(
    "jitney cascade",
    "A small model that asks a large one where it is not sure.",
    {
        "tune": (
            "engine.lab:cascade_tune",
            "find the threshold: cost against agreement, over requests of yours",
        )
    },
)
_CONFIG = Commands(
    "jitney config",
    "What an engine is set to, here or elsewhere.",
    {
        "show": (
            "engine.cli.config_show:run",
            "every setting of a file or of a running server, and where its value came from",
        ),
        "diff": (
            "engine.cli.config_diff:run",
            "how the settings of two files or running servers differ",
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
        "fleet": ("", "serve several engines, and models made of models, behind one endpoint"),
        "generate": ("engine.cli.generate:run", "complete prompts offline and print the texts"),
        "batch": (
            "engine.cli.batch:run",
            "answer a file of requests without a server, and go on where it stopped",
        ),
        "chat": ("engine.cli.chat:run", "talk to a model in the terminal"),
        "bench": ("", "measure throughput and latency: over HTTP, policy by policy, step by step"),
        "simulate": (
            "engine.lab:simulate",
            "predict what an engine does with given traffic, policy by policy",
        ),
        "cascade": ("", "a small model that asks a large one: find the threshold"),
        "plan": (
            "engine.lab:plan",
            "size a deployment: memory, batch size, cost, replicas, buckets",
        ),
        "dashboard": (
            "dashboard:dashboard_command",
            "the page for one or several engines elsewhere",
        ),
        "top": ("dashboard:top_command", "watch an engine's seats in the terminal"),
        "diagnose": (
            "engine.cli.diagnose:run",
            "say why a running server is slow, and the one thing to change",
        ),
        "config": ("", "settings in force, and how those of two files or servers differ"),
        "doctor": (
            "engine.cli.doctor:run",
            "say what this machine has and whether Jitney runs on it",
        ),
    },
    groups={"bench": _BENCH, "fleet": _FLEET, "cascade": _CASCADE, "config": _CONFIG},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The `jitney` program. Exit status: 0 done, 1 failed, 2 wrong usage or configuration, 130
    interrupted.
    """
    try:
        return _COMMANDS.run(sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        return _complain(error, 2)
    except JitneyError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader of our output left; complaining about it while exiting would be noise
        sys.stderr.close()
        return 1


def _complain(error: Exception, status: int) -> int:
    from jitney.engine.common.terminal import visible

    print(visible(f"jitney: {error}"), file=sys.stderr)
    return status
