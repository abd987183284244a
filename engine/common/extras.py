"""Commands that install an extra; `jitney` is on no package index, only in a clone or wheel."""

from __future__ import annotations

import importlib.metadata
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import msgspec

_NAME = "jitney"


class _Origin(msgspec.Struct):
    """Origin of an installation as pip and uv record it (PEP 610, direct_url.json)."""

    url: str
    #: {"editable": true} for an editable one; None: not installed from a folder.
    dir_info: dict[str, bool] | None = None


def how_to_install(extra: str, *others: str) -> str:
    """The command that installs an extra, without local paths. others: alternative extras."""
    origin = _origin()
    words = "".join(f" (or {other})" for other in others)
    clone = f'".[{extra}]"{words} in the clone'
    if origin is None:
        return f'pip install -e {clone}, or pip install "{_NAME}-VERSION.whl[{extra}]"{words}'
    if origin.dir_info is None:
        return f'pip install "{_file_name(origin.url)}[{extra}]"{words} with that wheel'
    return f"pip install {'-e ' if origin.dir_info.get('editable') else ''}{clone}"


def _file_name(url: str) -> str:
    return PurePosixPath(unquote(urlsplit(url).path)).name


def _origin() -> _Origin | None:
    """Origin of the installed package; None if not recorded, as for a folder on Python's path."""
    for installed in importlib.metadata.distributions(name=_NAME):
        record = installed.read_text("direct_url.json")
        if record:
            return msgspec.json.decode(record, type=_Origin)
    return None
