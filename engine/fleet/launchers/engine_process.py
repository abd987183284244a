"""Settings and environment of the engine processes that a fleet starts."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonObject
from jitney.engine.config import Config, load_config, read_toml, settings, unknown_word
from jitney.engine.fleet.sections import ReplicasSection

#: Runs `jitney serve` with its arguments, until the fleet is gone.
ENGINE_MODULE = "jitney.engine.cli.fleet_engine"
LOCALHOST = "127.0.0.1"
#: In the environment of an engine: the keys that it accepts.
ADMIN_KEYS = "JITNEY_ADMIN_KEYS"
#: And its adapters, where settings of its model name some: what its flags say stays as it is.
ADAPTERS = "JITNEY_ADAPTERS"
_ADAPTERS = "adapters"
#: Settings of an engine that its fleet decides.
_DECIDED = (
    "host",
    "port",
    "served_model_name",
    "device",
    "data_dir",
    "drain_s",
    "api_key_file",
    "admin_key_file",
    "ssl_certfile",
    "ssl_keyfile",
    "root_path",
)
#: Settings of one engine over several hosts that its fleet decides: else all engines would have the
#: same coordinator and be the same host, and each would wait for the others for ever.
_OF_ONE_HOST = ("coordinator", "host_id")
#: What to do instead.
_START_BY_HAND = (
    "is the fleet's to decide; leave it out. An engine over hosts that the fleet does not start "
    "is one of urls"
)
#: Settings that say how many processes a replica is; the fleet has to know before they start.
_OF_HOSTS = ("n_hosts", "data_parallel")
#: Limits of a key that hold for all engines together, in [fleet].
_KEY_LIMITS = ("key_max_concurrent", "key_tokens_per_minute")


class ReplicaHost(NamedTuple):
    """Which of the hosts of a replica a process is."""

    #: HOST:PORT of the first one, where the others find it.
    coordinator: str
    host_id: int


def check_environ(environ: JsonObject) -> None:
    """Engines that are started inherit it. Raises ConfigError."""
    for setting in _OF_ONE_HOST:
        name = settings()[setting].env
        if name in environ:
            raise ConfigError(f"{name}: {setting} {_START_BY_HAND}")
    for setting in _OF_HOSTS:
        name = settings()[setting].env
        if name in environ:
            raise ConfigError(f"{name}: {_give_in_settings(setting)}")


def _give_in_settings(setting: str) -> str:
    return f"{setting} says how many processes a replica is: give it in settings of its model"


def engine_config(file: str | Path, name: str, section: ReplicasSection) -> Config:
    """The settings of a model's started engines. Raises ConfigError."""
    where = f"{file}: [models.{name}] settings"
    for setting in section.settings:
        if setting in _DECIDED:
            raise ConfigError(f"{where}: {setting} is the fleet's to decide; leave it out")
        if setting in _OF_ONE_HOST:
            raise ConfigError(f"{where}: {setting} {_START_BY_HAND}")
        if setting not in settings():
            raise ConfigError(f"{where}: {unknown_word(setting, list(settings()))}")
        if settings()[setting].secret:
            raise ConfigError(f"{where}: {setting} is given to the fleet, in [fleet]; leave it out")
    given = Path(file).parent / Path(section.config).expanduser() if section.config else None
    try:
        if given is not None:
            _check_hosts_of_file(given)
        config = load_config(given, flags=section.checked_settings)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    for setting in _KEY_LIMITS:
        if getattr(config.server, setting):
            raise ConfigError(
                f"{where}: {setting} would hold for each engine alone; give it in [fleet], where "
                "it holds for all of them together"
            )
    return config


def _check_hosts_of_file(file: Path) -> None:
    """Raises ConfigError for what its engines cannot all have of one file."""
    told = read_toml(file).get("engine", {})
    for setting in _OF_ONE_HOST:
        if setting in told:
            raise ConfigError(f"{file}: {setting} {_START_BY_HAND}")
    for setting in _OF_HOSTS:
        if setting in told:
            raise ConfigError(f"{file}: {_give_in_settings(setting)}")


def adapters_environ(section: ReplicasSection) -> dict[str, str]:
    """Environment variables of an engine's adapters."""
    adapters = section.settings.get(_ADAPTERS)
    if adapters is None:
        return {}
    return {ADAPTERS: ",".join(adapters) if isinstance(adapters, list) else str(adapters)}


def without_adapters(section: ReplicasSection) -> ReplicasSection:
    """A section of which its adapters are known otherwise."""
    settings = {name: value for name, value in section.settings.items() if name != _ADAPTERS}
    return section.model_copy(update={"settings": settings, _ADAPTERS: ()})


def engine_keys(admins: Sequence[str]) -> tuple[str, dict[str, str]]:
    """(a new key that engines are asked with, what their environment says of keys). admins: keys
    of the fleet's administrators, which engines accept too. Users reach engines through the fleet
    alone, which names them (`engine.server.http.tenants`): their keys in our own environment are
    not for engines.
    """
    own = secrets.token_urlsafe(32)
    return own, keys_environ(admins, own)


def tell(process: asyncio.subprocess.Process, environ: Mapping[str, str | None]) -> None:
    """Have an engine's process set variables of its environment; None: remove one."""
    if process.returncode is None and process.stdin is not None:
        process.stdin.write(json.dumps(environ).encode() + b"\n")


def keys_environ(admins: Sequence[str], own: str) -> dict[str, str]:
    """Environment variables of an engine's keys. own: the key that the fleet uses."""
    return {"JITNEY_API_KEYS": "", ADMIN_KEYS: ",".join([*admins, own])}
