"""Reads API keys and other secrets from files that no other user may read."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from jitney.engine.common.errors import ConfigError


def read_key_file(path: str, setting: str = "key file") -> str:
    """The first key of a file; "" if the setting names no file. Raises ConfigError."""
    keys = read_keys(setting, path)
    return keys[0] if keys else ""


def read_keys(setting: str, path: str) -> list[str]:
    """The keys of a file, one a line; [] without a file. Raises ConfigError, showing no key."""
    if not path:
        return []
    lines = [line.strip() for line in _private_text(setting, Path(path)).splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{setting} {path} holds no key")
    return keys


def _private_text(setting: str, file: Path) -> str:
    """The text of a file. Raises ConfigError if other users may read it."""
    try:
        if is_open(file.stat()):
            raise ConfigError(f"{file} is open to other users of this machine: chmod 600 {file}")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{setting} {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{setting} {file} is not text") from None


def is_open(status: os.stat_result) -> bool:
    """Whether users beside the owner may use a file. The group may read a file of root's: so root
    gives a service its secrets, in volumes of Kubernetes, too.
    """
    shared = stat.S_IRWXG | stat.S_IRWXO
    if status.st_uid == 0:
        shared &= ~stat.S_IRGRP
    return bool(status.st_mode & shared)


def digest_key(key: str) -> str:
    """A key as it is stored and compared: SHA-256, hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()
