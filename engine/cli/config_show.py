"""`jitney config show`: every setting, and where its value came from."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from jitney.engine.cli.config_sources import settings_here, settings_of
from jitney.engine.common.terminal import console
from jitney.engine.config import KEY_FLAG, Command, ConfigReport, Flag, FlagGroup

_PLACE = Flag.of(
    "place",
    "a TOML file, beside the environment; or the URL of a running server; nothing: the environment",
    None,
    nargs="?",
    metavar="FILE|URL",
)
_JSON = Flag.switch("--json", "print one JSON object")
_COMMAND = Command(
    "config show",
    "Every setting of a file or of a running server, and where its value came from.",
    [FlagGroup([_PLACE, _JSON, KEY_FLAG])],
    usage="jitney config show [FILE|URL] [FLAG ...]",
)
#: What is said where there is no digest.
NO_DIGEST = "not known before the model is here"


def run(arguments: Sequence[str]) -> int:
    """Print the settings; exit status 0."""
    args = _COMMAND.parse(arguments)
    if args.place is not None and "://" in args.place:
        report = settings_of(args.place, args.engine_key())
    else:
        report = settings_here(args.place)
    if args.json:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        _print(report)
    return 0


def _print(report: ConfigReport) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table("setting", "value", "from", "digest", box=None, pad_edge=False)
    for setting in report.settings.values():
        name = f"[{setting.section}] {setting.key}"
        part = "" if setting.counted else "no part"
        cells = (name, json.dumps(setting.value), setting.origin, part)
        table.add_row(*map(escape, cells))
    shown = console(highlight=False)
    digest = report.config_digest or NO_DIGEST
    shown.print(f"Jitney {report.version}, configuration {digest}", markup=False, soft_wrap=True)
    shown.print(table)
