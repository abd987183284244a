"""Writes files that flags name."""

from __future__ import annotations

from pathlib import Path

from jitney.engine.common.errors import ConfigError


def write_text(flag: str, path: str | Path, text: str) -> None:
    """Write a text file. Raises ConfigError, naming the flag."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from None
