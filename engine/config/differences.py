"""A configuration as others are told of it, and how two of them differ, setting by setting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from jitney.engine.config.digest import is_counted
from jitney.engine.config.layers import Layered, Setting, settings

#: Where a value is from that no layer names.
_DEFAULT = "default"


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


class Difference(msgspec.Struct, frozen=True):
    """A setting that two configurations do not share; None: that one does not know it."""

    name: str
    a: SettingValue | None
    b: SettingValue | None

    @property
    def counted(self) -> bool:
        """True if it makes the digests differ."""
        return any(value is not None and value.counted for value in (self.a, self.b))


def report_of(layered: Layered, *, version: str, config_digest: str = "") -> ConfigReport:
    """All settings with their values; secrets are counted, not told."""
    values = {name: _value_of(layered, setting) for name, setting in settings().items()}
    return ConfigReport(version=version, config_digest=config_digest, settings=values)


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
        counted=is_counted(setting),
    )


def differences(a: ConfigReport, b: ConfigReport) -> Iterator[Difference]:
    """Settings whose values differ, in the order of the description; where they came from does not
    matter.
    """
    for name in dict.fromkeys((*a.settings, *b.settings)):
        ours, theirs = a.settings.get(name), b.settings.get(name)
        if ours is None or theirs is None or ours.value != theirs.value:
            yield Difference(name, ours, theirs)
