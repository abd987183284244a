"""Secrets that are read from files which nobody else may read."""

from __future__ import annotations

from jitney.engine.server import _keys_in


def read_key_file(path: str, setting: str = "key file") -> str:
    """The first key of a file; empty if there is none in the settings. setting: what names it.
    Raises ConfigError.
    """
    keys = _keys_in(setting, path)
    return keys[0] if keys else ""
