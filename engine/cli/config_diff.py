"""`jitney config diff`: how the settings of two files or running servers differ."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from jitney.engine.cli.config_show import NO_DIGEST
from jitney.engine.cli.config_sources import settings_of
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.terminal import console
from jitney.engine.config import (
    KEY_FLAG,
    Command,
    ConfigReport,
    Difference,
    Flag,
    FlagGroup,
    SettingValue,
    short,
)

_A = Flag("a", {"metavar": "A", "help": "a TOML file, or the URL of a running server"})
_B = Flag("b", {"metavar": "B", "help": "the other one"})
_JSON = Flag.switch("--json", "print one JSON object")
_COUNTED = Flag.switch("--counted", "leave out settings that are no part of the digest")
_COMMAND = Command(
    "config diff",
    "How the settings of two files or running servers differ, defaults filled in. Exit status 1 if "
    "they do.",
    [FlagGroup([_A, _B, _COUNTED, _JSON, KEY_FLAG])],
    usage="jitney config diff A B [FLAG ...]",
)


def run(arguments: Sequence[str]) -> int:
    """Print what differs. Exit status: 0 nothing, 1 something, in settings, model or version."""
    args = _COMMAND.parse(arguments)
    key = args.engine_key()
    a, b = settings_of(args.a, key), settings_of(args.b, key)
    found = list(a.differences(b))
    if args.counted:
        found = [difference for difference in found if difference.counted]
    if args.json:
        print(json.dumps(_as_json(a, b, found), indent=2))
    else:
        _print((args.a, args.b), (a, b), found)
    return int(bool(found) or _others_differ(a, b))


def _others_differ(a: ConfigReport, b: ConfigReport) -> bool:
    """The version, or what the digests say: files of the model may differ behind one name. A digest
    that is not known says nothing.
    """
    known = a.config_digest and b.config_digest
    return a.version != b.version or bool(known and a.config_digest != b.config_digest)


def _as_json(a: ConfigReport, b: ConfigReport, found: list[Difference]) -> JsonDict:
    return {
        "a": {"version": a.version, "config_digest": a.config_digest},
        "b": {"version": b.version, "config_digest": b.config_digest},
        "differences": [
            {"counted": difference.counted} | msgspec.to_builtins(difference)
            for difference in found
        ],
    }


def _print(
    places: tuple[str, str], reports: tuple[ConfigReport, ConfigReport], found: list[Difference]
) -> None:

    shown = console(highlight=False)
    for letter, place, report in zip("AB", places, reports, strict=True):
        digest = short(report.config_digest) or NO_DIGEST
        line = f"{letter}: {place}, Jitney {report.version}, configuration {digest}"
        shown.print(line, markup=False, soft_wrap=True)
    if found:
        shown.print(_table(found))
    elif _others_differ(*reports):
        shown.print("The settings are the same; the files of the model or the version differ.")
    else:
        shown.print("They do not differ.")


def _table(found: list[Difference]):
    from rich.markup import escape
    from rich.table import Table

    table = Table("setting", "A", "from", "B", "from", "digest", box=None, pad_edge=False)
    for difference in found:
        part = "" if difference.counted else "no part"
        cells = (_name(difference), *_cells(difference.a), *_cells(difference.b), part)
        table.add_row(*map(escape, cells))
    return table


def _name(difference: Difference) -> str:
    known = difference.a or difference.b
    assert known is not None
    return f"[{known.section}] {known.key}"


def _cells(setting: SettingValue | None) -> tuple[str, str]:
    """Value and origin."""
    if setting is None:
        return "not known there", ""
    return json.dumps(setting.value), setting.origin
