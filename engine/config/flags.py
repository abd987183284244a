"""Flags made from the configuration's own fields, so that help, file and environment never
disagree.
"""

from __future__ import annotations

import argparse
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from jitney.engine.common.errors import did_you_mean
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.common.terminal import visible
from jitney.engine.config.arguments import Arguments
from jitney.engine.config.layers import NOTHING, Setting, settings
from jitney.engine.config.presets import GOALS
from jitney.engine.config.schema import Config

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

#: Seconds between two lines of progress.
_REPORT_S = 10.0
#: What help calls the values of a setting.
_METAVARS = {int: "N", float: "X", str: "TEXT", tuple: "A,B,..."}
#: Defaults that help says nothing of.
_NO_DEFAULT = (None, "", (), [])


#: Settings whose flags the short help shows: what most people set, and little else.
_USUAL = frozenset(
    (
        *("model", "revision", "dtype", "weights", "context", "adapters"),
        *("max_seats", "pages", "memory_gib", "kv_dtype", "policy", "order", "tensor_parallel"),
        *("platform", "threads", "max_waiting_requests", "max_predicted_wait_s"),
        *("generation_config", "default_temperature"),
        *("host", "port", "api_key_file", "admin_key_file", "served_model_name", "insecure"),
        *("ssl_certfile", "ssl_keyfile", "allowed_hosts", "cors_origins", "drain_s", "log_level"),
    )
)


class _Parser(argparse.ArgumentParser):
    """argparse without guessing at abbreviations, which suggests the flag or the value that was
    meant, and whose short help leaves out settings that are rarely changed.
    """

    def __init__(self, command: str, description: str, usage: str | None = None):
        super().__init__(
            prog=f"jitney {command}",
            usage=usage or f"jitney {command} [MODEL] [FLAG ...]",
            description=description,
            allow_abbrev=False,
        )
        #: Flags that only the long help shows.
        self.rare: list[argparse.Action] = []

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """The short help, which names the long one."""
        if self.rare:
            for action in self.rare:
                action.help = argparse.SUPPRESS
            self.epilog = f"{self.prog} --help-all lists {len(self.rare)} more flags."
        super().print_help(file)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(str(value), map(str, action.choices or ()))
            raise

    def parse[A: Arguments](self, arguments: Sequence[str], kind: type[A]) -> A:
        """The parsed flags; an unknown one ends the program with status 2 and a suggestion."""
        args, unknown = self.parse_known_args([_dashed(word) for word in arguments], kind())
        if unknown:
            word = unknown[0].partition("=")[0]
            self.error(f"{word} is unknown{did_you_mean(word, self._option_string_actions)}")
        return args


def _dashed(word: str) -> str:
    """A flag written with underscores, as `--max_seats`, with dashes."""
    if not word.startswith("--"):
        return word
    flag, mark, value = word.partition("=")
    return flag.replace("_", "-") + mark + value


class Flag(NamedTuple):
    """One flag of a command: its name, or its names between spaces, and argparse's own options for
    it.
    """

    name: str
    options: JsonDict

    @classmethod
    def of(cls, name: str, text: str, default: Any = None, **options: Any) -> Flag:
        """A flag whose default stands in brackets behind its text."""
        if default not in _NO_DEFAULT:
            text += f" [{_shown(default)}]"
        return cls(name, {"help": text, "default": default, **options})

    @classmethod
    def whole(cls, name: str, text: str, default: int | None = None) -> Flag:
        return cls.of(name, text, default, type=int, metavar="N")

    @classmethod
    def number(cls, name: str, text: str, default: float | None = None, metavar: str = "X") -> Flag:
        return cls.of(name, text, default, type=float, metavar=metavar)

    @classmethod
    def switch(cls, name: str, text: str) -> Flag:
        return cls(name, {"help": text, "action": "store_true"})


def _shown(default: object) -> str:
    """A default as help shows it."""
    if isinstance(default, float):
        return f"{default:g}"
    return str(default).lower()


def _add_flags(parser: _Parser, flags: Iterable[Flag], title: str = "") -> None:
    """Add flags to a parser; title: of the group that help shows them in."""
    group = parser.add_argument_group(title) if title else parser
    for flag in flags:
        group.add_argument(*flag.name.split(), **flag.options)


class FlagGroup(NamedTuple):
    """Flags that help shows together."""

    flags: Sequence[Flag]
    #: "": they stand with those that every command has.
    title: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """What a command is called, what its help says, and its flags."""

    #: Settings of [engine] that only a server goes by.
    ONLY_SERVED: ClassVar = ("measured_sizes",)
    ALL_SECTIONS: ClassVar = tuple(Config.model_fields)

    name: str
    about: str
    groups: Sequence[FlagGroup] = ()
    #: Sections of the configuration whose settings are flags too, and the names of those that mean
    #: nothing here.
    sections: Sequence[str] = ()
    leave_out: Sequence[str] = ()
    #: Attributes of the parsed arguments that no flag of this command sets.
    constants: JsonObject = NOTHING
    #: Where it is not the usual one.
    usage: str | None = None

    def parse(self, arguments: Sequence[str]) -> Arguments:
        """The parsed flags; an unknown one ends the program with status 2 and a suggestion."""
        return self.parse_as(Arguments, arguments)

    def parse_as[A: Arguments](self, kind: type[A], arguments: Sequence[str]) -> A:
        """As `parse`, for a command with flags that `kind` reads."""
        return self.parser().parse(arguments, kind)

    def parser(self) -> _Parser:
        parser = _Parser(self.name, self.about, self.usage)
        for group in self.groups:
            _add_flags(parser, group.flags, group.title)
        if self.sections:
            _add_settings(parser, self.sections, self.leave_out)
        parser.set_defaults(**self.constants)
        return parser


#: Of commands that have all the settings it fills in.
FOR = Flag.of(
    "--for",
    "fill in the settings that are not given: latency few seats and short waits, throughput many "
    "and long ones, balanced between; what it set is printed",
    dest="goal",
    choices=GOALS,
)
#: Of commands that ask an engine elsewhere.
KEY_FLAG = Flag.of(
    "--key-file",
    "file whose first line is the engine's API key, readable by its owner only (or set "
    f"{Arguments.key_variable})",
    "",
    metavar="FILE",
)


class _HelpAll(argparse.Action):
    """Print the help with every flag in it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        argparse.ArgumentParser.print_help(parser)
        parser.exit()


_HELP_ALL = Flag(
    "--help-all",
    {"action": _HelpAll, "nargs": 0, "help": "show every flag and exit", "dest": argparse.SUPPRESS},
)
_ANY_SETTINGS = (
    Flag("model_word", {"nargs": "?", "metavar": "MODEL", "help": "the same as --model"}),
    Flag.of("--config", "read settings from a TOML file; flags override them", metavar="FILE"),
)


def _add_settings(
    parser: _Parser,
    sections: Sequence[str] = Command.ALL_SECTIONS,
    leave_out: Sequence[str] = (),
) -> None:
    """Add --config and one flag for each setting of `sections`; absent flags leave no trace in the
    namespace.

    leave_out: names of settings that mean nothing to this command.
    """
    _add_flags(parser, (_HELP_ALL, *_ANY_SETTINGS))
    for section in sections:
        _add_section(parser, section, leave_out)


def _add_section(parser: _Parser, section: str, leave_out: Sequence[str]) -> None:
    group = parser.add_argument_group(f"[{section}]")
    for setting in settings().values():
        is_shown = not setting.secret and setting.name not in leave_out
        if setting.section == section and is_shown:
            action = _add(group, setting)
            if setting.name not in _USUAL:
                parser.rare.append(action)


def _add(group: argparse._ArgumentGroup, setting: Setting) -> argparse.Action:
    return group.add_argument(
        setting.flag,
        dest=setting.name,
        default=argparse.SUPPRESS,
        help=_help_of(setting),
        **_values_of(setting),
    )


def _help_of(setting: Setting) -> str:
    text = str(setting.field.description)
    default = setting.field.default
    if default not in _NO_DEFAULT:
        text += f" [{str(default).lower()}]"
    return text.replace("%", "%%")  # argparse formats help with %


def _values_of(setting: Setting) -> JsonDict:
    """argparse's options for what a setting can be."""
    if setting.kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    choices = "|".join(filter(None, setting.choices))
    values: JsonDict = {"metavar": choices or _METAVARS[setting.kind]}
    if setting.several:
        values |= {"nargs": "+", "action": _Joined}
    return values


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


def say(message: str) -> None:
    """A line of progress, on standard error and at once."""
    print(visible(message), file=sys.stderr, flush=True)


def progress_reporter(what: str) -> Callable[[int, int], None]:
    """Says every _REPORT_S seconds how many are done, of how many of what."""
    reported_at = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at >= _REPORT_S:
            reported_at = time.monotonic()
            say(f"{done} of {total} {what}")

    return report
