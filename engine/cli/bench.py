"""`jitney bench`: measure. Each kind is a module `bench_<kind>` here, with `run(arguments) -> exit
status`.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
from collections.abc import Sequence

KINDS = {
    "serve": "send traffic to an OpenAI-compatible endpoint, ours or another's, and time it",
    "policies": "static, dynamic and continuous batching on the same requests, in this process",
    "sweep": "throughput and latency over concurrency, rate or load, with the knee marked",
    "peers": "this engine and others in turn on this machine, over HTTP, with one client",
    "step": "time of one step by rows, seats and context: the simulator's table",
    "device": "kernels, steps and engine on this accelerator, each beside its floor",
}


def run(arguments: Sequence[str]) -> int:
    """Hand over to the kind of measurement that the first word names."""
    lines = [f"  {name:<10}{text}" for name, text in KINDS.items()]
    parser = argparse.ArgumentParser(
        prog="jitney bench",
        description="Measure an engine.",
        usage="jitney bench KIND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(
            ["kinds:", *lines, "", "`jitney bench KIND --help` lists the kind's flags."]
        ),
    )
    parser.add_argument("kind", nargs="?", metavar="KIND", help=argparse.SUPPRESS)
    kind = parser.parse_args(arguments[:1]).kind
    if kind is None:
        parser.print_help()
        return 2
    if kind not in KINDS:
        close = difflib.get_close_matches(kind, KINDS, n=1)
        parser.error(f"no kind {kind!r}" + (f"; did you mean {close[0]}?" if close else ""))
    return importlib.import_module(f"jitney.engine.cli.bench_{kind}").run(arguments[1:])
