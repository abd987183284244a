"""Reads and writes files that users name."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from jitney.engine.common.errors import ConfigError


def write_text(flag: str, path: str | Path, text: str) -> None:
    """Write a text file. Raises ConfigError, naming the flag."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from None


def read_toml(file: str | Path) -> dict[str, Any]:
    """The tables of a file. Raises ConfigError."""
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not TOML: {error}") from None
