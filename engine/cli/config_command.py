"""`jitney config show` and `jitney config diff`: settings of files and running servers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from jitney.engine.cli.asking import Refused, ask
from jitney.engine.common.engine_info import short_digest
from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonDict
from jitney.engine.common.terminal import console
from jitney.engine.config import (
    KEY_FLAG,
    Command,
    Config,
    ConfigReport,
    Flag,
    FlagGroup,
    ResolvedConfig,
    configuration_digest,
)
from jitney.engine.core import ModelSource
from jitney.engine.lab import ServerSizes

_NO_SETTINGS = "it does not report its settings; is this a Jitney engine of this version?"
#: Shown in place of an unknown digest.
_NO_DIGEST = "unknown until the model is on this machine"
_JSON = Flag.switch("--json", "print one JSON object")
_SOURCE = Flag.of(
    "source",
    "a TOML file, applied over the environment; the URL of a running server; or nothing: the "
    "environment alone",
    None,
    nargs="?",
    metavar="FILE|URL",
)
_SHOW = Command(
    "config show",
    "Print every setting of a file or of a running server, and where its value came from.",
    [FlagGroup([_SOURCE, _JSON, KEY_FLAG])],
    usage="jitney config show [FILE|URL] [FLAG ...]",
)
_A = Flag("a", {"metavar": "A", "help": "a TOML file, or the URL of a running server"})
_B = Flag("b", {"metavar": "B", "help": "another file or URL"})
_COUNTED = Flag.switch("--counted", "leave out settings that are not part of the digest")
_DIFF = Command(
    "config diff",
    "Print how the settings of two files or running servers differ, defaults included. Exit status "
    "1 if they do.",
    [FlagGroup([_A, _B, _COUNTED, _JSON, KEY_FLAG])],
    usage="jitney config diff A B [FLAG ...]",
)


def show(arguments: Sequence[str]) -> int:
    """Print the settings; exit status 0."""
    args = _SHOW.parse(arguments)
    if args.source is not None and "://" in args.source:
        report = settings_of(args.source, args.engine_key())
    else:
        report = _report(ServerSizes(ResolvedConfig.load(args.source, os.environ)).as_served())
    if args.json:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
        return 0
    digest = report.config_digest or _NO_DIGEST
    _print_line(f"Jitney {report.version}, configuration {digest}")
    rows = (setting.row for setting in report.settings.values())
    _print_table(("setting", "value", "from", "digest"), rows)
    return 0


def diff(arguments: Sequence[str]) -> int:
    """Print differences; exit status 1 if settings, model or version differ, else 0."""
    args = _DIFF.parse(arguments)
    key = args.engine_key()
    a, b = settings_of(args.a, key), settings_of(args.b, key)
    differences = [each for each in a.differences(b) if each.counted or not args.counted]
    if args.json:
        listed = [{"counted": each.counted} | msgspec.to_builtins(each) for each in differences]
        print(json.dumps({"a": _head(a), "b": _head(b), "differences": listed}, indent=2))
    else:
        rows = [each.row for each in differences]
        _print_differences((args.a, args.b), (a, b), rows)
    return int(bool(differences) or _others_differ(a, b))


def settings_of(source: str, key: str) -> ConfigReport:
    """The settings of a file alone, or of the server at a URL.

    key: an administrator's, "" if none is needed. Raises ConfigError and Refused.
    """
    if "://" not in source:
        return _report(ResolvedConfig.load(source))
    try:
        response = ask(source, "/config", key, {404: _NO_SETTINGS})
        return msgspec.json.decode(response, type=ConfigReport)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise Refused(f"{source}: {_NO_SETTINGS}") from None


def digest_here(config: Config) -> str:
    """The digest of an engine with this configuration; "" if its files are not here."""
    try:
        source = ModelSource.local(config.model.id)
    except ModelError:
        return ""
    adapters = config.model.adapter_folders
    if source is None or not all(
        Path(folder).expanduser().is_dir() for folder in adapters.values()
    ):
        return ""
    identity = source.identity(adapters)
    return configuration_digest(config, model=identity)


def _report(resolved: ResolvedConfig) -> ConfigReport:
    digest = digest_here(resolved.config)
    return ConfigReport.of(resolved, config_digest=digest)


def _others_differ(a: ConfigReport, b: ConfigReport) -> bool:
    """Whether versions or known digests differ, the latter also by the model's files."""
    digests = a.config_digest, b.config_digest
    return a.version != b.version or (all(digests) and digests[0] != digests[1])


def _head(report: ConfigReport) -> JsonDict:
    return {"version": report.version, "config_digest": report.config_digest}


def _print_differences(
    sources: tuple[str, str],
    reports: tuple[ConfigReport, ConfigReport],
    differences: Sequence[Sequence[str]],
) -> None:
    for letter, source, report in zip("AB", sources, reports, strict=True):
        digest = short_digest(report.config_digest) or _NO_DIGEST
        _print_line(f"{letter}: {source}, Jitney {report.version}, configuration {digest}")
    if differences:
        _print_table(("setting", "A", "from", "B", "from", "digest"), differences)
    elif _others_differ(*reports):
        _print_line("The settings are the same; the files of the model or the version differ.")
    else:
        _print_line("They do not differ.")


def _print_line(line: str) -> None:
    console(highlight=False).print(line, markup=False, soft_wrap=True)


def _print_table(headings: Iterable[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(*headings, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(escape, row))
    console(highlight=False).print(table)
