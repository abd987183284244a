"""Settings and environment variables of engine processes that a fleet starts."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jitney.engine.common.child_process import ADMIN_KEYS, API_KEYS
from jitney.engine.common.errors import ConfigError, unknown_word
from jitney.engine.common.requests import JsonObject
from jitney.engine.common.text_file import read_toml
from jitney.engine.config import Config, ResolvedConfig, settings
from jitney.engine.fleet.sections import ReplicasSection

#: Python module that runs `jitney serve` with its arguments, and ends with the fleet.
ENGINE_MODULE = "jitney.engine.cli.fleet_engine"
LOCALHOST = "127.0.0.1"
#: Environment variable of an engine with its adapters, which a reload can change, unlike flags.
ADAPTERS = "JITNEY_ADAPTERS"
_ADAPTERS = "adapters"
#: Settings of an engine that its fleet sets.
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
#: Settings of an engine on several hosts that its fleet sets: otherwise all processes would have
#: the same coordinator and the same host id, and would wait for the other hosts for ever.
_OF_ONE_HOST = ("coordinator", "host_id")
#: End of an error message with the advice.
_START_BY_HAND = (
    "is the fleet's to decide; leave it out. An engine over hosts that the fleet does not start "
    "is one of urls"
)
#: Settings for the number of a replica's processes, which the fleet needs before they start.
_OF_HOSTS = ("n_hosts", "data_parallel")
#: Limits of an API key over all engines together, which are set in [fleet].
_KEY_LIMITS = ("key_max_concurrent", "key_tokens_per_minute")


class ReplicaHost(NamedTuple):
    """One host of a replica on several hosts."""

    #: HOST:PORT of the first host, to which the others connect.
    coordinator: str
    host_id: int


def check_environ(environ: JsonObject) -> None:
    """Check the environment, which started engines inherit. Raises ConfigError."""
    inherited = {name: each.env for name, each in settings().items() if each.env in environ}
    _check_hosts(inherited)


def _check_hosts(given: Mapping[str, str]) -> None:
    """Refuse what all processes of a replica would share. given: setting -> where it stands. Raises
    ConfigError.
    """
    for setting, where in given.items():
        if setting in _OF_ONE_HOST:
            raise ConfigError(f"{where}: {setting} {_START_BY_HAND}")
        if setting in _OF_HOSTS:
            raise ConfigError(
                f"{where}: {setting} says how many processes a replica is: give it in settings of "
                "its model"
            )


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
    config_file = Path(file).parent / Path(section.config).expanduser() if section.config else None
    try:
        if config_file is not None:
            engine_table = read_toml(config_file).get("engine", {})
            _check_hosts(dict.fromkeys(engine_table, str(config_file)))
        config = ResolvedConfig.load(config_file, flags=section.checked_settings).config
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    for setting in _KEY_LIMITS:
        if getattr(config.server, setting):
            raise ConfigError(
                f"{where}: {setting} would hold for each engine alone; give it in [fleet], where "
                "it holds for all of them together"
            )
    return config


def adapters_environ(section: ReplicasSection) -> dict[str, str]:
    adapters = section.settings.get(_ADAPTERS)
    if adapters is None:
        return {}
    return {ADAPTERS: ",".join(adapters) if isinstance(adapters, list) else str(adapters)}


def without_adapters(section: ReplicasSection) -> ReplicasSection:
    settings = {name: value for name, value in section.settings.items() if name != _ADAPTERS}
    return section.model_copy(update={"settings": settings, _ADAPTERS: ()})


def engine_keys(admins: Sequence[str]) -> tuple[str, dict[str, str]]:
    """(a new key that the fleet sends to engines, the engines' environment variables for keys).
    admins: the fleet's administrators' keys, which engines accept too. Users reach engines only
    through the fleet, which sends their tenant (`engine.server.http.tenants`), so engines do not
    accept users' keys.
    """
    own = secrets.token_urlsafe(32)
    return own, keys_environ(admins, own)


def tell(process: asyncio.subprocess.Process, environ: Mapping[str, str | None]) -> None:
    """Make an engine's process set environment variables; a value of None removes one."""
    if process.returncode is None and process.stdin is not None:
        process.stdin.write(json.dumps(environ).encode() + b"\n")


def keys_environ(admins: Sequence[str], own: str) -> dict[str, str]:
    """Environment variables with an engine's keys. own: the key that the fleet sends."""
    return {API_KEYS: "", ADMIN_KEYS: ",".join([*admins, own])}
