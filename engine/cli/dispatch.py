"""Runs the command that a command line names; imports only that command's module."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jitney.engine.common.errors import did_you_mean


@dataclass(frozen=True, slots=True)
class Commands:
    """The commands of a program or of a group."""

    #: Words before the command, such as "jitney bench".
    program: str
    description: str
    #: Command -> ("package:function" below jitney, "" for a group; help text). The function takes
    #: the arguments and returns the exit status.
    table: Mapping[str, tuple[str, str]]
    #: Commands with subcommands.
    groups: Mapping[str, Commands] = field(default_factory=dict)

    def run(self, words: Sequence[str]) -> int:
        """Run the command that the first word names; returns its exit status.

        Exits with status 2 and one line if there is no such command.
        """
        command = self._parse(words[:1])
        if command in self.groups:
            return self.groups[command].run(words[1:])
        return self.function(command)(words[1:])

    def function(self, command: str) -> Callable[[Sequence[str]], int]:
        """The function that runs a command. Imports its module."""
        package, _, name = self.table[command][0].partition(":")
        return getattr(importlib.import_module(f"jitney.{package}"), name)

    def _parse(self, words: Sequence[str]) -> str:
        parser = self._make_parser()
        args = parser.parse_args(words)
        if args.version:
            from importlib.metadata import version

            print(f"jitney {version('jitney')}")
            parser.exit(0)
        if args.command is None:
            parser.print_help()
            parser.exit(2)
        if args.command not in self.table:
            parser.error(f"no command {args.command!r}{did_you_mean(args.command, self.table)}")
        return args.command

    def _make_parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=self.program,
            description=self.description,
            usage=f"{self.program} [-h] [--version] COMMAND ...",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=self._list(),
        )
        parser.add_argument("--version", action="store_true", help="print the version and exit")
        parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
        return parser

    def _list(self) -> str:
        lines = [f"  {command:<10}{text}" for command, (_, text) in self.table.items()]
        hint = f"`{self.program} COMMAND --help` lists the command's flags."
        return "\n".join(["commands:", *lines, "", hint])
