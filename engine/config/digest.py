"""One name for a running configuration, the digest of all that decides its answers and its speed;
and the configuration as others are told of it, and how two of them differ. Jax-free.

Two engines with the same digest answer alike and as fast, on machines that are alike; two with
different ones may not. Where an engine listens, who may reach it, where it keeps files and what it
tells of itself is no part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from jitney.engine.common.requests import JsonDict
from jitney.engine.config.layers import Layered, Setting, settings, values
from jitney.engine.config.schema import Config

#: Characters of a digest that are enough for people to tell configurations apart.
_SHORT = 12
#: Settings, by flat name, that are no part of a digest.
_LEFT_OUT = frozenset(
    (
        # the model's identity stands for them
        "model",
        "revision",
        "adapters",
        # which of a machine's devices, which of several hosts, and what only the start has from
        "device",
        "coordinator",
        "host_id",
        "compilation_cache",
        # the sizes that were chosen count, not by whom
        "measured_sizes",
        # where it listens, and who may reach it
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
        # what it keeps for clients, and whom it tells
        "data_dir",
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
        # what it tells of itself
        "metrics_compat",
        "dashboard_show_text",
        "log_level",
        "record",
        # when it comes and goes
        "keep_alive_s",
        "drain_s",
        "heartbeat_s",
        "start_timeout_s",
        "max_restarts",
    )
)
#: Settings that may name a file: what stands in it counts, not where it lies. And what they say
#: where they name none.
_FILES = ("chat_template", "generation_config")
_NO_FILE = ("", "auto", "none")
#: Where a value is from that no layer names.
_DEFAULT = "default"


def _is_counted(setting: Setting) -> bool:
    """True for settings that are part of a digest."""
    return setting.name not in _LEFT_OUT


def configuration_digest(config: Config, *, model: str, version: str) -> str:
    """SHA-256, 64 hexadecimal digits. model: the model's identity
    (`ModelSource.identity`). version: of Jitney.
    """
    facts = {"jitney": version, "model": model, "settings": _counted(config)}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def short(digest: str) -> str:
    """As people read it; empty where there is none."""
    return digest[:_SHORT]


def _counted(config: Config) -> JsonDict:
    """Values by flat name."""
    return {
        name: _identity(settings()[name], value)
        for name, value in values(config).items()
        if _is_counted(settings()[name])
    }


def _identity(setting: Setting, value: object) -> object:
    """The value, or of one that names a file what stands in it."""
    if setting.name not in _FILES or value in _NO_FILE:
        return value
    file = Path(str(value)).expanduser()
    if not file.is_file():
        return value
    return hashlib.sha256(file.read_bytes()).hexdigest()


class SettingValue(msgspec.Struct, frozen=True):
    """One setting as it is in force."""

    #: As in a TOML file: its table, and its key there.
    section: str
    key: str
    #: As JSON has it; of secrets how many there are.
    value: Any
    #: The layer: "default", or where it stands in a file, the environment or the flags.
    origin: str
    #: It is part of the digest.
    counted: bool


class ConfigReport(msgspec.Struct, frozen=True, kw_only=True):
    """GET /config, and what a file comes to."""

    #: Of Jitney.
    version: str
    #: Of `jitney.engine.config.digest`; empty where it is not known: the model is not here yet.
    config_digest: str
    #: By flat name.
    settings: dict[str, SettingValue]

    @classmethod
    def of(cls, layered: Layered, *, version: str, config_digest: str = "") -> ConfigReport:
        """All settings with their values; secrets are counted, not told."""
        values = {name: _value_of(layered, setting) for name, setting in settings().items()}
        return cls(version=version, config_digest=config_digest, settings=values)

    def differences(self, other: ConfigReport) -> Iterator[Difference]:
        """Settings whose values differ, in the order of the description; where they came from does
        not matter.
        """
        for name in dict.fromkeys((*self.settings, *other.settings)):
            ours, theirs = self.settings.get(name), other.settings.get(name)
            if ours is None or theirs is None or ours.value != theirs.value:
                yield Difference(name, ours, theirs)


class Difference(msgspec.Struct, frozen=True):
    """A setting that two configurations do not share; None: that one does not know it."""

    name: str
    a: SettingValue | None
    b: SettingValue | None

    @property
    def counted(self) -> bool:
        """True if it makes the digests differ."""
        return any(value is not None and value.counted for value in (self.a, self.b))


def _value_of(layered: Layered, setting: Setting) -> SettingValue:
    value = getattr(getattr(layered.config, setting.section), setting.key)
    if setting.secret:
        value = f"{len(value)} set, not shown"
    if isinstance(value, tuple):
        value = list(value)
    return SettingValue(
        section=setting.section,
        key=setting.key,
        value=value,
        origin=layered.origins.get(setting.name, _DEFAULT),
        counted=_is_counted(setting),
    )
