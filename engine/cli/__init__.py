"""The command line. Each command is a module with `run(arguments) -> exit status`, imported only
when asked for.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence

from jitney.engine.errors import ConfigError, JitneyError

COMMANDS = {
    "serve": "serve a model over HTTP (OpenAI-compatible), with in-flight batching",
    "generate": "complete prompts offline and print the texts",
    "chat": "talk to a model in the terminal",
    "bench": "measure throughput and latency: over HTTP, policy by policy, step by step",
    "simulate": "predict what an engine does with given traffic, policy by policy",
    "plan": "size a deployment: memory, batch size, cost, replicas, buckets",
    "dashboard": "the page for one or several engines elsewhere",
    "top": "watch an engine's seats in the terminal",
    "doctor": "say what this machine has and whether Jitney runs on it",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The `jitney` program. Exit status: 0 done, 1 failed, 2 wrong usage or configuration, 130
    interrupted.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    command, rest = _parse(words)
    try:
        return importlib.import_module(f"jitney.engine.cli.{command}").run(rest)
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


def _parse(words: list[str]) -> tuple[str, list[str]]:
    lines = [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="jitney",
        description="In-flight batching for large language models in JAX.",
        usage="jitney [-h] [--version] COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(
            ["commands:", *lines, "", "`jitney COMMAND --help` lists the command's flags."]
        ),
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=argparse.SUPPRESS)
    split = next((at for at, word in enumerate(words) if not word.startswith("-")), len(words) - 1)
    args = parser.parse_args(words[: split + 1])
    if args.version:
        print(f"jitney {version()}")
        raise SystemExit(0)
    if args.command is None:
        parser.print_help()
        raise SystemExit(2)
    if args.command not in COMMANDS:
        close = difflib.get_close_matches(args.command, COMMANDS, n=1)
        parser.error(
            f"no command {args.command!r}" + (f"; did you mean {close[0]}?" if close else "")
        )
    return args.command, words[split + 1 :]


def version() -> str:
    """The version of the installed distribution."""
    from importlib.metadata import version

    return version("jitney")


def _complain(error: Exception, status: int) -> int:
    print(f"jitney: {error}", file=sys.stderr)
    return status
