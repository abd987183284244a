"""Files that a flag asks to be written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jitney.engine.common.errors import ConfigError

if TYPE_CHECKING:
    pass


def write_text(flag: str, path: str | Path, text: str) -> None:
    """ConfigError, naming the flag, if it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from None
