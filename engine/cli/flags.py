"""Flags made from the configuration's own fields, so that help, file and environment never
disagree.
"""

from __future__ import annotations

import argparse
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from jitney.engine.cli.dispatch import suggestion
from jitney.engine.config.layers import Setting, load_config, settings
from jitney.engine.config.schema import Config
from jitney.engine.types import JsonDict

#: What help calls the values of a setting.
_METAVARS = {int: "N", float: "X", str: "TEXT", tuple: "A,B,..."}
#: Defaults that help says nothing of.
_NO_DEFAULT = (None, "", (), [])


class Parser(argparse.ArgumentParser):
    """argparse without guessing at abbreviations, which suggests the flag that was meant."""

    def __init__(self, command: str, description: str):
        super().__init__(
            prog=f"jitney {command}",
            usage=f"jitney {command} [MODEL] [FLAG ...]",
            description=description,
            allow_abbrev=False,
        )

    def parse(self, arguments: Sequence[str]) -> Namespace:
        """The parsed flags; an unknown one ends the program with status 2 and a suggestion."""
        args, unknown = self.parse_known_args([_dashed(word) for word in arguments])
        if unknown:
            word = unknown[0].partition("=")[0]
            self.error(f"{word} is unknown{suggestion(word, self._option_string_actions)}")
        return args


def _dashed(word: str) -> str:
    """A flag written with underscores, as `--max_seats`, with dashes."""
    if not word.startswith("--"):
        return word
    flag, mark, value = word.partition("=")
    return flag.replace("_", "-") + mark + value


class Flags:
    """Adds flags to one group of a parser's help; a flag's default stands in brackets behind its
    text.
    """

    def __init__(self, parser: argparse.ArgumentParser, title: str = ""):
        self._group = parser.add_argument_group(title) if title else parser

    def add(self, flag: str, text: str, default: Any = None, **options: Any) -> None:
        """options: argparse's own."""
        if default not in _NO_DEFAULT:
            shown = f"{default:g}" if isinstance(default, float) else str(default).lower()
            text += f" [{shown}]"
        self._group.add_argument(flag, default=default, help=text, **options)

    def whole(self, flag: str, text: str, default: int | None = None) -> None:
        self.add(flag, text, default, type=int, metavar="N")

    def number(self, flag: str, text: str, default: float | None = None) -> None:
        self.add(flag, text, default, type=float, metavar="X")

    def switch(self, flag: str, text: str) -> None:
        self._group.add_argument(flag, action="store_true", help=text)


def add_settings(
    parser: Parser,
    sections: Sequence[str] = tuple(Config.model_fields),
    leave_out: Sequence[str] = (),
) -> None:
    """Add --config and one flag for each setting of `sections`; absent flags leave no trace in the
    namespace.

    leave_out: names of settings that mean nothing to this command.
    """
    parser.add_argument("model_word", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument(
        "--config", metavar="FILE", help="read settings from a TOML file; flags override them"
    )
    for section in sections:
        group = parser.add_argument_group(f"[{section}]")
        for setting in settings().values():
            is_shown = not setting.secret and setting.name not in leave_out
            if setting.section == section and is_shown:
                _add(group, setting)


def _add(group: argparse._ArgumentGroup, setting: Setting) -> None:
    default = setting.field.default
    text = str(setting.field.description)
    if default not in _NO_DEFAULT:
        text += f" [{str(default).lower()}]"
    options: JsonDict = {"action": argparse.BooleanOptionalAction}
    if setting.kind is not bool:
        choices = "|".join(filter(None, setting.choices))
        options = {"metavar": choices or _METAVARS[setting.kind]}
    if setting.several:
        options |= {"nargs": "+", "action": _Joined}
    group.add_argument(
        setting.flag,
        dest=setting.name,
        default=argparse.SUPPRESS,
        help=text.replace("%", "%%"),  # argparse formats help with %
        **options,
    )


class _Joined(argparse.Action):
    """Several words after one flag are one list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, ",".join(values or ()))


def config_from(args: Namespace) -> Config:
    """The configuration from the file, the environment and the flags. Raises ConfigError."""
    flags = {name: value for name, value in vars(args).items() if name in settings()}
    if args.model_word is not None:
        flags.setdefault("model", args.model_word)
    return load_config(args.config, os.environ, flags)


def interactive() -> bool:
    """True when a person watches standard error."""
    return sys.stderr.isatty()


def say(message: str) -> None:
    """A line of progress, on standard error and at once."""
    print(message, file=sys.stderr, flush=True)
