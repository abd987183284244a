"""Server settings for tests, by the field names of the settings and of [server]."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from jitney.engine.config.schema import ServerSection
from jitney.engine.server.http.settings import ServerSettings

#: Flags of `jitney serve` for a small engine that starts fast.
SMALL_ENGINE = (
    *("tiny-random", "--platform", "cpu"),
    *("--max-seats", "4", "--seat-buckets", "4"),
    *("--token-budget", "64", "--token-buckets", "64"),
    *("--pages", "256"),
)
_OWN = {field.name for field in fields(ServerSettings)} - {"server"}


def server_settings(**given: Any) -> ServerSettings:
    """The defaults with these values changed, which are not checked: tests use smaller values."""
    own = {name: value for name, value in given.items() if name in _OWN}
    section = {name: value for name, value in given.items() if name not in _OWN}
    unknown = section.keys() - ServerSection.model_fields.keys()
    if unknown:
        raise TypeError(f"no settings of a server: {', '.join(sorted(unknown))}")
    return ServerSettings(server=ServerSection().model_copy(update=section), **own)
