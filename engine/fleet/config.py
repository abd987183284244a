"""Reads fleet.toml: the models of a fleet and their engines. Every error is one line that names the
file, the field and the accepted values.

    [fleet]
    port = 8000

    [models.small]
    replicas = 2
    settings = { model = "smollm2-135m" }

    [models.large]
    urls = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import quote

from pydantic import ValidationError

from jitney.engine.common.cache_folder import cache_dir
from jitney.engine.common.errors import ConfigError, unknown_word
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.common.text_file import read_toml
from jitney.engine.config import ResolvedConfig, Section, ServerSection, settings
from jitney.engine.fleet.compositions.composed import COMPOSED_KINDS, ComposedModels
from jitney.engine.fleet.launchers.engine_process import (
    LOCALHOST,
    ReplicaHost,
    check_environ,
    engine_config,
)
from jitney.engine.fleet.sections import FleetSection, ReplicasSection

#: Fields of [fleet] that are the same as in [server] of one engine, and are documented there.
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
    "answer_limit",
    "key_batches",
    "batch_lines",
    "webhook_prefixes",
    "webhook_secret_file",
    "key_jobs",
)
#: The fields that environment variables may set.
_KEYS = ("api_keys", "admin_keys")
_MEASURED = "measured_sizes"
#: Suffix of a model's name in the name of its candidate's engines.
_OF_CANDIDATE = ".candidate"
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
#: `kind` of a model -> class of its section. A new kind needs a section, a line here and a line in
#: `engine.fleet.build`.
_KINDS: dict[str, type[Section]] = {"replicas": ReplicasSection, **COMPOSED_KINDS}


class _FleetArm(NamedTuple):
    """Interchangeable engines: a model's own, or its candidate's."""

    #: The model's name in requests.
    model: str
    section: ReplicasSection


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The contents of a fleet.toml."""

    #: The file; paths in it are relative to its folder.
    file: Path
    #: Settings of the endpoint, as for one engine.
    server: ServerSection
    fleet: FleetSection
    #: The model's name in requests -> its section, one of `_KINDS`.
    models: Mapping[str, Section]
    #: Names of adapters -> the model whose engines hold them.
    adapters: Mapping[str, str] = MappingProxyType({})

    def path(self, name: str) -> Path:
        """The path of a file that fleet.toml names."""
        return self.file.parent / Path(name).expanduser()

    @classmethod
    def read(
        cls,
        file: str | Path,
        environ: JsonObject | None = None,
        flags: JsonObject | None = None,
    ) -> FleetConfig:
        """Read a fleet.toml.

        environ: may hold JITNEY_API_KEYS and JITNEY_ADMIN_KEYS. flags: fields of [fleet] that
        override the file. Raises ConfigError.
        """
        tables = read_toml(file)
        for name, table in tables.items():
            if name not in ("fleet", "models") or not isinstance(table, dict):
                known = ["[fleet]", "[models.NAME]"]
                raise ConfigError(f"{file}: {unknown_word(f'[{name}]', known)}")
        fields = _keys_of(environ or {}) | tables.get("fleet", {}) | dict(flags or {})
        own = {name: value for name, value in fields.items() if name not in _AS_OF_A_SERVER}
        served = {name: value for name, value in fields.items() if name in _AS_OF_A_SERVER}
        names = [*FleetSection.model_fields, *_AS_OF_A_SERVER]
        models = _models(file, tables.get("models", {}))
        if any(isinstance(each, ReplicasSection) and each.replicas for each in models.values()):
            check_environ(environ or {})
        return cls(
            Path(file).absolute(),
            _checked(file, "fleet", ServerSection, served, names),
            _checked(file, "fleet", FleetSection, own, names),
            models,
            _adapters(file, models),
        )

    @property
    def arms(self) -> dict[str, _FleetArm]:
        """Groups of interchangeable engines by name; a candidate's name ends in `.candidate`."""
        arms: dict[str, _FleetArm] = {}
        for name, section in self.models.items():
            if not isinstance(section, ReplicasSection):
                continue
            arms[name] = _FleetArm(name, section)
            if section.candidate is not None:
                arms[_candidate_arm(name)] = _FleetArm(name, section.candidate)
        return arms

    def arms_of(self, model: str) -> list[str]:
        """Names of a model's arms: its own, then its candidate's if it has one."""
        return [name for name, arm in self.arms.items() if arm.model == model]

    def engine_arguments(
        self,
        model: str,
        section: ReplicasSection,
        name: str,
        number: int,
        port: int,
        host: str = LOCALHOST,
        place: ReplicaHost | None = None,
    ) -> list[str]:
        """Arguments of `jitney serve` for the n-th process of a model. name: the engine's name.
        place: the process's host of a replica on several hosts.
        """
        words = ["serve"]
        if section.config:
            words += ["--config", str(self.path(section.config))]
        for setting, value in section.settings.items():
            words += _flag(setting, value)
        if not self._says_who_sizes(section):
            # Engines that start at the same time would disturb each other's measurements.
            words += _flag(_MEASURED, value=False)
        if section.devices:
            words += ["--device", section.devices[number]]
        if place is not None:
            words += ["--coordinator", place.coordinator, "--host-id", str(place.host_id)]
        # A fleet sends an engine no files, but two engines must not share a folder.
        words += ["--data-dir", str(cache_dir() / "fleet" / quote(name, safe=""))]
        words += ["--host", host, "--port", str(port), "--served-model-name", model]
        return [*words, "--drain-s", str(self.server.drain_s), "--insecure"]

    def _says_who_sizes(self, section: ReplicasSection) -> bool:
        """Whether the settings say if engines of this model measure their step times."""
        file = self.path(section.config) if section.config else None
        origins = ResolvedConfig.load(file, flags=section.checked_settings).origins
        return _MEASURED in origins or settings()[_MEASURED].env in os.environ

    @property
    def data_dir(self) -> Path:
        """The folder for files, batches and jobs; not shared with another fleet or an engine."""
        if self.server.data_dir:
            return self.path(self.server.data_dir)
        return cache_dir() / "fleet-data"


def _flag(name: str, value: object) -> list[str]:
    flag = settings()[name].flag
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [flag, ",".join(map(str, value))]
    return [flag, str(value)]


def _candidate_arm(model: str) -> str:
    return model + _OF_CANDIDATE


def _adapters(file: str | Path, models: Mapping[str, Section]) -> dict[str, str]:
    """See `FleetConfig.adapters`."""
    adapters: dict[str, str] = {}
    for name, section in models.items():
        if not isinstance(section, ReplicasSection):
            continue
        own: Iterable[str] = section.adapters
        if section.replicas:
            own = engine_config(file, name, section).model.adapter_folders
        for adapter in own:
            if adapter in models or adapter in adapters:
                raise ConfigError(f"{file}: [models.{name}] adapters: two are called {adapter!r}")
            adapters[adapter] = name
    return adapters


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
    try:
        ComposedModels.check(models)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    return models


def _check_candidates(file: str | Path, models: Mapping[str, Section]) -> None:
    """Check that no model has the name of a candidate's engines. Raises ConfigError."""
    for name, section in models.items():
        if not isinstance(section, ReplicasSection) or section.candidate is None:
            continue
        arm = _candidate_arm(name)
        if arm in models:
            raise ConfigError(
                f"{file}: [models.{arm}]: engines of the candidate of {name!r} are called so; "
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
    """Check the settings of engines that are started here. Raises ConfigError."""
    if section.replicas:
        engine_config(file, name, section)
    if section.candidate is not None:
        _check_settings(file, _candidate_arm(name), section.candidate)


def _checked[S: Section](
    file: str | Path, where: str, kind: type[S], fields: JsonDict, names: list[str]
) -> S:
    """Validate a table. names: its fields, to suggest one for a typo. Raises ConfigError."""
    for name in fields:
        if name not in names:
            raise ConfigError(f"{file}: [{where}] {unknown_word(name, names)}")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"{file}: [{where}] {_complaint(error)}") from None


def _complaint(error: ValidationError) -> str:
    item = error.errors(include_url=False)[0]
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    place = ".".join(map(str, item["loc"]))
    if not place:
        return message
    given = "" if item["type"] == "value_error" else f", not {str(item['input'])[:60]!r}"
    return f"{place}: {message}{given}"
