"""What a fleet starts an engine's process with: its arguments, and the keys in its environment."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from jitney.engine.config.layers import Layered, settings
from jitney.engine.config.schema import cache_dir
from jitney.engine.fleet.config import FleetConfig, checked_settings
from jitney.engine.fleet.sections import ReplicasSection

#: Runs `jitney serve` with its arguments, until the fleet is gone.
ENGINE_MODULE = "jitney.engine.cli.fleet_engine"
LOCALHOST = "127.0.0.1"
_MEASURED = "measured_sizes"


class ReplicaHost(NamedTuple):
    """Which of the hosts of a replica a process is."""

    #: HOST:PORT of the first one, where the others find it.
    coordinator: str
    host_id: int


def engine_arguments(
    config: FleetConfig,
    model: str,
    section: ReplicasSection,
    name: str,
    number: int,
    port: int,
    host: str = LOCALHOST,
    place: ReplicaHost | None = None,
) -> list[str]:
    """What `jitney serve` is given for the n-th process of a model. name: the engine's own. place:
    where it is one of several hosts.
    """
    words = ["serve"]
    if section.config:
        words += ["--config", str(config.path(section.config))]
    for setting, value in section.settings.items():
        words += _flag(setting, value)
    if not _says_who_sizes(config, section):
        # Engines that start beside each other would time each other's steps.
        words += _flag(_MEASURED, value=False)
    if section.devices:
        words += ["--device", section.devices[number]]
    if place is not None:
        words += ["--coordinator", place.coordinator, "--host-id", str(place.host_id)]
    words += ["--data-dir", str(_data_dir(name))]
    words += ["--host", host, "--port", str(port), "--served-model-name", model]
    return [*words, "--drain-s", str(config.server.drain_s), "--insecure"]


def _says_who_sizes(config: FleetConfig, section: ReplicasSection) -> bool:
    """Whether it is given that engines of this model measure, or that they do not."""
    file = config.path(section.config) if section.config else None
    given = Layered.load(file, flags=checked_settings(section)).origins
    return _MEASURED in given or settings()[_MEASURED].env in os.environ


def _data_dir(name: str) -> Path:
    """Where an engine keeps files, though a fleet sends it none: two may not share a folder."""
    return cache_dir() / "fleet" / quote(name, safe="")


def _flag(name: str, value: object) -> list[str]:
    """A setting as a flag."""
    flag = settings()[name].flag
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [flag, ",".join(map(str, value))]
    return [flag, str(value)]


def engine_keys(users: Sequence[str], admins: Sequence[str]) -> tuple[str, dict[str, str]]:
    """(the key that engines are watched with, what their environment says of keys). Without keys
    of clients there are none: engines listen to this machine alone.
    """
    if not users and not admins:
        return "", {}
    own = secrets.token_urlsafe(32)
    return own, {
        "JITNEY_API_KEYS": ",".join(users),
        "JITNEY_ADMIN_KEYS": ",".join([*admins, own]),
    }
