"""How to install one of our extras beside what is installed: `jitney` is on no package index, so it
comes from a clone or from a wheel.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import msgspec

_NAME = "jitney"


class _Origin(msgspec.Struct):
    """What pip and uv write down of where an installation came from (PEP 610, direct_url.json)."""

    url: str
    #: {"editable": true} of an editable one; None: it did not come from a folder.
    dir_info: dict[str, bool] | None = None


def how_to_install(extra: str, *others: str) -> str:
    """What to type to have an extra, without paths of this machine. others: that would do too."""
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
    """Where the installed package came from; None where nobody wrote it down, as in a folder that
    is merely on Python's path.
    """
    for installed in importlib.metadata.distributions(name=_NAME):
        written = installed.read_text("direct_url.json")
        if written:
            return msgspec.json.decode(written, type=_Origin)
    return None
