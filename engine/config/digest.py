"""The digest of a configuration, its report (GET /config), and differences between reports. Engines
of one digest give the same answers at the same speed on equal machines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from jitney.engine.common.requests import JsonDict
from jitney.engine.config.layers import ResolvedConfig, Setting, settings, values
from jitney.engine.config.schema import Config

#: Settings, by flat name, that are not part of the digest.
_LEFT_OUT = frozenset(
    (
        # covered by the model's identity
        "model",
        "revision",
        "adapters",
        # choice of devices and hosts, and what only the start uses
        "device",
        "coordinator",
        "host_id",
        "compilation_cache",
        # the chosen sizes count, not how they were chosen
        "measured_sizes",
        # addresses and access
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
        "served_model_name",
        # storage for clients, and webhooks
        "data_dir",
        "history_hours",
        "file_limit",
        "key_files",
        "key_file_bytes",
        "answer_limit",
        "key_batches",
        "key_jobs",
        "batch_lines",
        "webhook_prefixes",
        "webhook_secret_file",
        "responses_kept",
        "responses_bytes",
        "responses_ttl_s",
        # reporting
        "metrics_compat",
        "dashboard_show_text",
        "log_level",
        "record",
        # start and end
        "keep_alive_s",
        "drain_s",
        "heartbeat_s",
        "start_timeout_s",
        "max_restarts",
    )
)
#: Settings that may name a file, whose contents count; values that name none.
_FILES = ("chat_template", "generation_config")
_NO_FILE = ("", "auto", "none")
#: Origin of a default value.
_DEFAULT = "default"


def _is_counted(setting: Setting) -> bool:
    return setting.name not in _LEFT_OUT


def configuration_digest(config: Config, *, model: str) -> str:
    """SHA-256 of a configuration and Jitney's version, 64 hex digits. model: its identity."""
    facts = {"jitney": version("jitney"), "model": model, "settings": _counted(config)}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _counted(config: Config) -> JsonDict:
    """Values of the digest's settings, by flat name."""
    return {
        name: _identity(settings()[name], value)
        for name, value in values(config).items()
        if _is_counted(settings()[name])
    }


def _identity(setting: Setting, value: object) -> object:
    """A setting's value, or the hash of the file that it names."""
    if setting.name not in _FILES or value in _NO_FILE:
        return value
    file = Path(str(value)).expanduser()
    if not file.is_file():
        return value
    return hashlib.sha256(file.read_bytes()).hexdigest()


class SettingValue(msgspec.Struct, frozen=True):
    """A setting's value in force."""

    #: Table and key in a TOML file.
    section: str
    key: str
    #: JSON value; for secrets only their number.
    value: Any
    #: "default", or the place in a file, the environment or the flags.
    origin: str
    #: True if it is part of the digest.
    counted: bool

    @property
    def place(self) -> str:
        """Table and key as people write them."""
        return f"[{self.section}] {self.key}"

    @property
    def row(self) -> tuple[str, ...]:
        """Columns of a table of settings: place, value, origin, whether it counts."""
        return self.place, *_cells(self), _digest_column(self.counted)


class ConfigReport(msgspec.Struct, frozen=True, kw_only=True):
    """Response of GET /config, and the resolved settings of a file."""

    #: Version of Jitney.
    version: str
    #: `configuration_digest`; "" if the model is not on this machine.
    config_digest: str
    #: Settings by flat name.
    settings: dict[str, SettingValue]

    @classmethod
    def of(cls, resolved: ResolvedConfig, *, config_digest: str = "") -> ConfigReport:
        """The report of a configuration."""
        values = {name: _value_of(resolved, setting) for name, setting in settings().items()}
        return cls(version=version("jitney"), config_digest=config_digest, settings=values)

    def differences(self, other: ConfigReport) -> Iterator[Difference]:
        """Settings whose values differ, in the order of the schema, whatever their origins."""
        for name in dict.fromkeys((*self.settings, *other.settings)):
            ours, theirs = self.settings.get(name), other.settings.get(name)
            if ours is None or theirs is None or ours.value != theirs.value:
                yield Difference(name, ours, theirs)


class Difference(msgspec.Struct, frozen=True):
    """A setting whose values differ in two reports; None: the report lacks it."""

    name: str
    a: SettingValue | None
    b: SettingValue | None

    @property
    def counted(self) -> bool:
        """True if it makes the digests differ."""
        return any(value is not None and value.counted for value in (self.a, self.b))

    @property
    def row(self) -> tuple[str, ...]:
        """Columns of a table of differences: place, value and origin of both, whether it counts."""
        setting = self.a or self.b
        assert setting is not None
        return setting.place, *_cells(self.a), *_cells(self.b), _digest_column(self.counted)


def _cells(setting: SettingValue | None) -> tuple[str, str]:
    """Value and origin."""
    if setting is None:
        return "unknown there", ""
    return json.dumps(setting.value), setting.origin


def _digest_column(counted: bool) -> str:
    return "" if counted else "not counted"


def _value_of(resolved: ResolvedConfig, setting: Setting) -> SettingValue:
    value = getattr(getattr(resolved.config, setting.section), setting.key)
    if setting.secret:
        value = f"{len(value)} set, not shown"
    if isinstance(value, tuple):
        value = list(value)
    return SettingValue(
        section=setting.section,
        key=setting.key,
        value=value,
        origin=resolved.origins.get(setting.name, _DEFAULT),
        counted=_is_counted(setting),
    )
