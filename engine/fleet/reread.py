"""Reads a running fleet's configuration files again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.key_file import read_key_file
from jitney.engine.config import Section
from jitney.engine.fleet.build import FleetParts
from jitney.engine.fleet.config import FleetConfig
from jitney.engine.fleet.launchers.engine_process import without_adapters
from jitney.engine.fleet.sections import ReplicasSection
from jitney.engine.server import AdapterNews, FreshSettings

_ENGINE_KEY_FILE = "engine_key_file"


@dataclass(eq=False)
class FleetReader:
    """Reads a fleet's files for a `Reloader`."""

    #: The configuration with which the fleet was started.
    config: FleetConfig
    #: Reads the fleet's file again; blocks. Raises ConfigError.
    read: Callable[[], FleetConfig]
    parts: FleetParts
    #: Makes engines serve the adapters of a new file; None: adapters change only at a start.
    take_adapters: Callable[[FleetConfig], Awaitable[AdapterNews]] | None = None

    def __call__(self) -> FreshSettings:
        """Read the current settings. Raises ConfigError. Blocks."""
        fresh = self.read()
        key = engine_key(fresh)
        if bool(key) != bool(self.parts.key):
            raise ConfigError(
                f"{_ENGINE_KEY_FILE}: engines get a key of the fleet's, or lose it, at a start only"
            )
        news = "none"
        if key:
            news = "unchanged" if key == self.parts.key else "replaced"
        settings = FreshSettings.of(
            fresh.server,
            self._values(self.config),
            self._values(fresh),
            engine_key=news,
            use_engine_key=partial(self.parts.use_key, key),
        )
        if self.take_adapters is None:
            return settings
        return replace(settings, take_adapters=partial(self.take_adapters, fresh))

    def _values(self, config: FleetConfig) -> dict[str, object]:
        """The fleet's settings by name, without the engines' key file and without adapters that
        can change while it runs.
        """
        models = config.models
        if self.take_adapters is not None:
            models = {name: _without_live_adapters(section) for name, section in models.items()}
        own: dict[str, object] = {**dict(config.server), **dict(config.fleet), "models": models}
        del own[_ENGINE_KEY_FILE]
        return own


def engine_key(config: FleetConfig) -> str:
    """Read the API key for engines of `urls`; empty: the client's own key is passed on. Raises
    ConfigError. Blocks.
    """
    key_file = config.fleet.engine_key_file
    if not key_file:
        return ""
    return read_key_file(str(config.path(key_file)), _ENGINE_KEY_FILE)


def _without_live_adapters(section: Section) -> Section:
    """A model's settings without adapters, unless its replicas have several hosts: those change
    adapters only at a start.
    """
    if not isinstance(section, ReplicasSection) or section.n_hosts > 1:
        return section
    return without_adapters(section)
