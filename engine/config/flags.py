"""Commands and their flags; flags of settings are made from the configuration's fields."""

from __future__ import annotations

import argparse
import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from jitney.engine.common.errors import ConfigError, did_you_mean
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.config.arguments import Arguments
from jitney.engine.config.layers import NOTHING, Setting, settings
from jitney.engine.config.presets import GOALS
from jitney.engine.config.schema import Config

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

#: Placeholders of values in the help.
_METAVARS = {int: "N", float: "X", str: "TEXT", tuple: "A,B,..."}
#: Defaults that the help does not show.
_NO_DEFAULT = (None, "", (), [])
#: Settings whose flags the short help shows: those most often set.
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
    """argparse without abbreviations, with "did you mean" hints and a short help."""

    def __init__(self, command: str, description: str, usage: str | None = None):
        super().__init__(
            prog=f"jitney {command}",
            usage=usage or f"jitney {command} [MODEL] [FLAG ...]",
            description=description,
            allow_abbrev=False,
        )
        #: Flags that only --help-all shows.
        self.rare: list[argparse.Action] = []

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the short help, which mentions --help-all."""
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
        """The parsed flags; exits with status 2 and a suggestion at an unknown one."""
        args, unknown = self.parse_known_args([_dashed(word) for word in arguments], kind())
        if unknown:
            word = unknown[0].partition("=")[0]
            self.error(f"{word} is unknown{did_you_mean(word, self._option_string_actions)}")
        return args


def _dashed(word: str) -> str:
    """Replace underscores in a flag, as in `--max_seats`, by dashes."""
    if not word.startswith("--"):
        return word
    flag, mark, value = word.partition("=")
    return flag.replace("_", "-") + mark + value


class Flag(NamedTuple):
    """A flag of a command: its names, separated by spaces, and options for argparse."""

    name: str
    options: JsonDict

    @classmethod
    def of(cls, name: str, text: str, default: Any = None, **options: Any) -> Flag:
        """A flag whose help ends with its default in brackets."""
        if default not in _NO_DEFAULT:
            text += f" [{_shown(default)}]"
        return cls(name, {"help": text, "default": default, **options})

    @classmethod
    def whole(
        cls, name: str, text: str, default: int | None = None, *, least: float = -math.inf
    ) -> Flag:
        return cls.of(name, text, default, type=_from_least(int, name, least), metavar="N")

    @classmethod
    def number(
        cls,
        name: str,
        text: str,
        default: float | None = None,
        metavar: str = "X",
        *,
        least: float = -math.inf,
    ) -> Flag:
        kind = _from_least(float, name, least)
        return cls.of(name, text, default, type=kind, metavar=metavar)

    @classmethod
    def output(cls, name: str, text: str, metavar: str = "FILE") -> Flag:
        """The name of a file that is written, in a folder that is there."""

        def checked(file: str) -> str:
            if file != "-" and not Path(file).resolve().parent.is_dir():
                raise ConfigError(f"{name} {file}: there is no such folder")
            return file

        return cls.of(name, text, type=checked, metavar=metavar)

    @classmethod
    def switch(cls, name: str, text: str) -> Flag:
        return cls(name, {"help": text, "action": "store_true"})


def _from_least[N: (int, float)](kind: type[N], name: str, least: float) -> Callable[[str], N]:
    """Reads a number. Raises ConfigError for one below `least`, and for infinity."""

    def read(text: str) -> N:
        value = kind(text)
        if least > -math.inf and not least <= value < math.inf:
            raise ConfigError(f"{name} must be at least {least:g}, not {value:g}")
        return value

    read.__name__ = kind.__name__  # argparse says "invalid int value"
    return read


def _shown(default: object) -> str:
    if isinstance(default, float):
        return f"{default:g}"
    return str(default).lower()


def _add_flags(parser: _Parser, flags: Iterable[Flag], title: str = "") -> None:
    """Add flags to a parser; title: heading of their group in the help."""
    group = parser.add_argument_group(title) if title else parser
    for flag in flags:
        group.add_argument(*flag.name.split(), **flag.options)


class FlagGroup(NamedTuple):
    """Flags that the help shows together."""

    flags: Sequence[Flag]
    #: Heading; "": none, shown with --help.
    title: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """A command's name, help text and flags."""

    #: Settings of [engine] that only a server uses.
    ONLY_SERVED: ClassVar = ("measured_sizes",)
    ALL_SECTIONS: ClassVar = tuple(Config.model_fields)

    name: str
    about: str
    groups: Sequence[FlagGroup] = ()
    #: Sections whose settings are flags of the command, and names of settings left out.
    sections: Sequence[str] = ()
    leave_out: Sequence[str] = ()
    #: Attributes of the parsed arguments that no flag of this command sets.
    constants: JsonObject = NOTHING
    #: Usage line; None: the default one.
    usage: str | None = None

    def parse(self, arguments: Sequence[str]) -> Arguments:
        """The parsed flags; exits with status 2 and a suggestion at an unknown one."""
        return self.parse_as(Arguments, arguments)

    def parse_as[A: Arguments](self, kind: type[A], arguments: Sequence[str]) -> A:
        """The parsed flags as `kind`, which reads this command's own flags."""
        return self.parser().parse(arguments, kind)

    def parser(self) -> _Parser:
        parser = _Parser(self.name, self.about, self.usage)
        for group in self.groups:
            _add_flags(parser, group.flags, group.title)
        if self.sections:
            _add_settings(parser, self.sections, self.leave_out)
        parser.set_defaults(**self.constants)
        return parser


#: Flag of commands that have all settings of the presets.
FOR = Flag.of(
    "--for",
    "fill in settings that are not given and print them: latency: few seats and short waits; "
    "throughput: many seats and long waits; balanced: in between",
    dest="goal",
    choices=GOALS,
)
#: Flag of commands that send requests to a running engine.
KEY_FLAG = Flag.of(
    "--key-file",
    "file whose first line is the engine's API key, readable by its owner only (or set "
    f"{Arguments.key_variable})",
    "",
    metavar="FILE",
)


class _HelpAll(argparse.Action):
    """Print the help with all flags."""

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
    """Add --config and flags of `sections` but `leave_out`; absent ones leave no attribute."""
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
    """argparse's options for a setting's type."""
    if setting.kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    choices = "|".join(filter(None, setting.choices))
    values: JsonDict = {"metavar": choices or _METAVARS[setting.kind]}
    if setting.several:
        values |= {"nargs": "+", "action": _Joined}
    return values


class _Joined(argparse.Action):
    """Join several words after a flag into one list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, ",".join(values or ()))
