"""fleet.toml: which models a fleet serves, and by which engines. Every error is one line that names
the file, the field and what is accepted there.

    [fleet]
    port = 8000

    [models.small]
    replicas = 2
    settings = { model = "smollm2-135m" }

    [models.large]
    urls = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from pydantic import ValidationError

from jitney.engine.config.layers import load_config, read_toml, settings, unknown_word
from jitney.engine.config.schema import Config, Section, ServerSection, cache_dir
from jitney.engine.errors import ConfigError
from jitney.engine.fleet.composed import COMPOSED_KINDS, check_parts, composed_of
from jitney.engine.fleet.sections import FleetSection, ReplicasSection
from jitney.engine.types import JsonDict, JsonObject

#: Fields of [fleet] that are those of a server's [server]: there they are described.
_AS_OF_A_SERVER = (
    "host",
    "port",
    "api_key_file",
    "api_keys",
    "admin_key_file",
    "admin_keys",
    "insecure",
    "allowed_hosts",
    "ssl_certfile",
    "ssl_keyfile",
    "root_path",
    "trusted_proxies",
    "cors_origins",
    "body_limit",
    "key_max_concurrent",
    "key_tokens_per_minute",
    "read_timeout_s",
    "write_timeout_s",
    "keep_alive_s",
    "max_connections",
    "log_level",
    "drain_s",
    "data_dir",
    "file_limit",
    "key_files",
    "key_file_bytes",
    "key_batches",
    "batch_lines",
    "webhook_prefixes",
    "webhook_secret_file",
    "key_jobs",
)
#: Of these, what the environment may give.
_KEYS = ("api_keys", "admin_keys")
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
#: Stands for the address that host 0 of a replica gets when it starts.
_SOME_COORDINATOR = "127.0.0.1:1"
#: What stands behind a model's name in that of its candidate's engines.
_OF_CANDIDATE = ".candidate"
#: Limits of a key that hold for all engines together, in [fleet].
_KEY_LIMITS = ("key_max_concurrent", "key_tokens_per_minute")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
#: What a model can be, by its `kind`. A new kind is a section, its line here and its line in
#: `engine.fleet.build`.
_KINDS: dict[str, type[Section]] = {"replicas": ReplicasSection, **COMPOSED_KINDS}


class _FleetArm(NamedTuple):
    """Engines that answer alike: a model's own, or its candidate's."""

    #: What requests call the model.
    model: str
    section: ReplicasSection


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """A fleet.toml that has been read."""

    #: Paths in it are relative to its folder.
    file: Path
    #: The endpoint, as that of one engine.
    server: ServerSection
    fleet: FleetSection
    #: By the names that requests call them; each is one of `_KINDS`.
    models: Mapping[str, Section]
    #: Names of adapters -> the model whose engines hold them.
    adapters: Mapping[str, str] = MappingProxyType({})

    def path(self, name: str) -> Path:
        """A file that it names."""
        return self.file.parent / Path(name).expanduser()

    @property
    def arms(self) -> dict[str, _FleetArm]:
        """What engines stand behind, by its name: a model's is the model's own, a candidate's has
        `.candidate` behind that.
        """
        found: dict[str, _FleetArm] = {}
        for name, section in self.models.items():
            if not isinstance(section, ReplicasSection):
                continue
            found[name] = _FleetArm(name, section)
            if section.candidate is not None:
                found[candidate_arm(name)] = _FleetArm(name, section.candidate)
        return found

    @property
    def data_dir(self) -> Path:
        """Where files, batches and jobs are kept: one fleet's alone, and no engine's."""
        if self.server.data_dir:
            return self.path(self.server.data_dir)
        return cache_dir() / "fleet-data"


def candidate_arm(model: str) -> str:
    """What a model's candidate is called among `FleetConfig.arms`."""
    return model + _OF_CANDIDATE


def read_fleet(
    file: str | Path, environ: JsonObject | None = None, flags: JsonObject | None = None
) -> FleetConfig:
    """Read a fleet.toml.

    environ: may hold JITNEY_API_KEYS and JITNEY_ADMIN_KEYS. flags: fields of [fleet] that stand
    above the file. Raises ConfigError.
    """
    tables = read_toml(file)
    for name, table in tables.items():
        if name not in ("fleet", "models") or not isinstance(table, dict):
            raise ConfigError(f"{file}: {unknown_word(f'[{name}]', ['[fleet]', '[models.NAME]'])}")
    fields = _keys_of(environ or {}) | tables.get("fleet", {}) | dict(flags or {})
    own = {name: value for name, value in fields.items() if name not in _AS_OF_A_SERVER}
    served = {name: value for name, value in fields.items() if name in _AS_OF_A_SERVER}
    names = [*FleetSection.model_fields, *_AS_OF_A_SERVER]
    models = _models(file, tables.get("models", {}))
    _check_environ(environ or {}, models)
    return FleetConfig(
        Path(file).absolute(),
        _checked(file, "fleet", ServerSection, served, names),
        _checked(file, "fleet", FleetSection, own, names),
        models,
        _adapters(file, models),
    )


def _check_environ(environ: JsonObject, models: Mapping[str, Section]) -> None:
    """Engines that are started inherit it. Raises ConfigError."""
    if not any(isinstance(each, ReplicasSection) and each.replicas for each in models.values()):
        return
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


def _adapters(file: str | Path, models: Mapping[str, Section]) -> dict[str, str]:
    """See `FleetConfig.adapters`."""
    found: dict[str, str] = {}
    for name, section in models.items():
        if not isinstance(section, ReplicasSection):
            continue
        own: Iterable[str] = section.adapters
        if section.replicas:
            own = engine_config(file, name, section).model.adapter_folders
        for adapter in own:
            if adapter in models or adapter in found:
                raise ConfigError(f"{file}: [models.{name}] adapters: two are called {adapter!r}")
            found[adapter] = name
    return found


def _keys_of(environ: JsonObject) -> JsonDict:
    described = {name: settings()[name] for name in _KEYS}
    return {
        name: setting.parse(environ[setting.env], setting.env)
        for name, setting in described.items()
        if setting.env in environ
    }


def _models(file: str | Path, tables: JsonDict) -> dict[str, Section]:
    if not tables:
        raise ConfigError(f"{file}: no model: add a table [models.NAME] with replicas or urls")
    models = {name: _model(file, name, table) for name, table in tables.items()}
    _check_candidates(file, models)
    composed = composed_of(models)
    try:
        check_parts(composed, [name for name in models if name not in composed])
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    return models


def _check_candidates(file: str | Path, models: Mapping[str, Section]) -> None:
    """Their engines are called as no model is. Raises ConfigError."""
    for name, section in models.items():
        if not isinstance(section, ReplicasSection) or section.candidate is None:
            continue
        taken = candidate_arm(name)
        if taken in models:
            raise ConfigError(
                f"{file}: [models.{taken}]: engines of the candidate of {name!r} are called so; "
                "give this model another name"
            )


def _model(file: str | Path, name: str, table: object) -> Section:
    where = f"models.{name}"
    if not _MODEL_NAME.fullmatch(name):
        raise ConfigError(
            f"{file}: [{where}]: a model's name has 1 to 128 characters of A-Z, a-z, 0-9 and "
            "._:/@+-"
        )
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: [{where}] must be a table")
    kind = table.get("kind", "replicas")
    if kind not in _KINDS:
        raise ConfigError(f"{file}: [{where}] kind: {unknown_word(str(kind), list(_KINDS))}")
    section = _checked(file, where, _KINDS[kind], table, list(_KINDS[kind].model_fields))
    if isinstance(section, ReplicasSection):
        _check_settings(file, name, section)
    return section


def _check_settings(file: str | Path, name: str, section: ReplicasSection) -> None:
    """Of engines that are started here. Raises ConfigError."""
    if section.replicas:
        engine_config(file, name, section)
    if section.candidate is not None:
        _check_settings(file, candidate_arm(name), section.candidate)


def _checked[S: Section](
    file: str | Path, where: str, kind: type[S], fields: JsonDict, names: list[str]
) -> S:
    """One table. names: the fields that it may have, for who misspells one. Raises ConfigError."""
    for name in fields:
        if name not in names:
            raise ConfigError(f"{file}: [{where}] {unknown_word(name, names)}")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"{file}: [{where}] {_complaint(error)}") from None


def _complaint(error: ValidationError) -> str:
    """What is wrong with the first wrong field, and what it was."""
    item = error.errors(include_url=False)[0]
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    place = ".".join(map(str, item["loc"]))
    if not place:
        return message
    given = "" if item["type"] == "value_error" else f", not {str(item['input'])[:60]!r}"
    return f"{place}: {message}{given}"


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
        config = load_config(given, flags=checked_settings(section))
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


def checked_settings(section: ReplicasSection) -> JsonDict:
    """The settings of started engines as those of a first host, which can be checked before it has
    an address.
    """
    if section.n_hosts == 1:
        return section.settings
    return section.settings | {"coordinator": _SOME_COORDINATOR}
