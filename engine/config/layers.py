"""Reads the configuration (defaults < preset < TOML < environment < flags) and writes TOML. Every
error is one line that names the place of the bad value and what is accepted there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Never, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from jitney.engine.common.errors import (
    ConfigError,
    did_you_mean,
    shortened,
    unknown_word,
)
from jitney.engine.common.text_file import read_toml
from jitney.engine.config.schema import Config, Section

_ENV_PREFIX = "JITNEY_"
#: Variables with the prefix that are not settings.
_ENV_OTHER = ("JITNEY_CACHE", "JITNEY_ENGINE_KEY")
#: Words for true and false in flags and the environment.
_BOOLEANS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
#: Words of error messages for the text of each type.
_EXPECTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple: "values separated by commas",
}
NOTHING: Mapping[str, Never] = MappingProxyType({})
#: Types of settings.
type _Parsed = bool | int | float | str | tuple[str, ...] | tuple[int, ...]
#: Origin of values that a preset filled in.
_FROM_PRESET = "--for"
#: Origin of the order on a server with API keys where no layer gives one.
_FROM_KEYS = "default with API keys"


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of the configuration: its section and key, and its flat name, variable and flag."""

    section: str
    key: str
    field: FieldInfo

    @property
    def name(self) -> str:
        return str(self._extra.get("name", self.key))

    @property
    def secret(self) -> bool:
        """True for values that are neither flags nor printed."""
        return bool(self._extra.get("secret"))

    @property
    def several(self) -> bool:
        """True for lists whose values may follow the flag as separate words."""
        return bool(self._extra.get("several"))

    @property
    def env(self) -> str:
        return _ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def kind(self) -> type:
        """bool, int, float, str or tuple."""
        return type(self.field.default)

    @property
    def choices(self) -> tuple[str, ...]:
        """The accepted words of a Literal field, else ()."""
        annotation = self.field.annotation
        if self.kind is str and get_origin(annotation) is Literal:
            return get_args(annotation)
        return ()

    @property
    def _extra(self) -> Mapping[str, object]:
        extra = self.field.json_schema_extra
        if isinstance(extra, dict):
            return extra
        return NOTHING

    def parse(self, text: str, where: str) -> _Parsed:
        """The value of a flag's or variable's text. Raises ConfigError, naming `where`."""
        try:
            return self._parsed(text)
        except (KeyError, ValueError):
            expected = _EXPECTED[self.kind]
            words = _BOOLEANS if self.kind is bool else ()
            hint = did_you_mean(text.strip().lower(), words)
            raise ConfigError(f"{where}: must be {expected}, not {shortened(text)}{hint}") from None

    def _parsed(self, text: str) -> _Parsed:
        if self.kind is bool:
            return _BOOLEANS[text.strip().lower()]
        if self.kind is tuple:
            return self._parse_list(text)
        return self.kind(text)

    def _parse_list(self, text: str) -> tuple[str, ...] | tuple[int, ...]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        if "str" in str(self.field.annotation):
            return tuple(words)
        return tuple(map(int, words))


@cache
def settings() -> dict[str, Setting]:
    """All settings by flat name, in the order of the schema."""
    table: dict[str, Setting] = {}
    for section, info in Config.model_fields.items():
        assert isinstance(info.annotation, type) and issubclass(info.annotation, Section)
        for key, field in info.annotation.model_fields.items():
            setting = Setting(section, key, field)
            table[setting.name] = setting
    return table


def _settings_of(section: str) -> list[Setting]:
    return [setting for setting in settings().values() if setting.section == section]


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A configuration and the layer that each value is from."""

    config: Config
    #: Flat name -> place of the value ("run.toml: [engine] max_seats"); defaults are absent.
    origins: Mapping[str, str]

    @classmethod
    def load(
        cls,
        file: str | Path | None = None,
        environ: Mapping[str, str] = NOTHING,
        flags: Mapping[str, object] = NOTHING,
        preset: Mapping[str, object] = NOTHING,
    ) -> ResolvedConfig:
        """The configuration of all layers. flags: name -> value or text; preset: name -> value.
        Raises ConfigError, naming the place of the error.
        """
        values: dict[str, dict[str, object]] = {name: {} for name in Config.model_fields}
        origins: dict[str, str] = {}
        layers = (
            *((settings()[name], value, _FROM_PRESET) for name, value in preset.items()),
            *_from_file(file),
            *_from_environ(environ),
            *_from_flags(flags),
        )
        for setting, value, where in layers:
            values[setting.section][setting.key] = value
            origins[setting.name] = where
        return _validated(values, origins)._with_default_order()

    def _with_default_order(self) -> ResolvedConfig:
        """Use the fair order if none is given and there are keys: no key's load delays others."""
        if "order" in self.origins or not self.config.server.has_keys:
            return self
        engine = self.config.engine.model_copy(update={"order": "fair"})
        config = self.config.model_copy(update={"engine": engine})
        return ResolvedConfig(config, {**self.origins, "order": _FROM_KEYS})

    @property
    def preset_flags(self) -> list[str]:
        """The settings that a preset filled in, as flags with their values."""
        names = [name for name, origin in self.origins.items() if origin == _FROM_PRESET]
        return [f"{settings()[name].flag} {self.values[name]}" for name in names]

    @property
    def values(self) -> dict[str, object]:
        """All settings by flat name."""
        return values(self.config)

    def with_values(self, values: Mapping[str, object], where: str) -> ResolvedConfig:
        """Add values by flat name; where: their origin. Raises ConfigError."""
        tables = self.config.model_dump()
        for name, value in values.items():
            setting = settings()[name]
            tables[setting.section][setting.key] = value
        return _validated(tables, {**self.origins, **dict.fromkeys(values, where)})

    def to_toml(self) -> str:
        """The configuration as TOML that `load` reads back to an equal one, without secrets."""
        blocks = []
        for section in Config.model_fields:
            lines = [f"[{section}]"]
            for setting in _settings_of(section):
                lines.append(f"# {setting.field.description}")
                value = getattr(getattr(self.config, section), setting.key)
                lines.append(_toml_line(setting, value))
            blocks.append("\n".join(lines))
        return "\n\n".join(blocks) + "\n"


def values(config: Config) -> dict[str, object]:
    """All settings by flat name."""
    return {
        name: getattr(getattr(config, setting.section), setting.key)
        for name, setting in settings().items()
    }


def _validated(
    values: Mapping[str, Mapping[str, object]], origins: Mapping[str, str]
) -> ResolvedConfig:
    """values: by section and key. Raises ConfigError."""
    try:
        return ResolvedConfig(Config.model_validate(values), origins)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins)) from None


def _from_file(file: str | Path | None) -> Iterator[tuple[Setting, object, str]]:
    if file is None:
        return
    for section, table in read_toml(file).items():
        if section not in Config.model_fields or not isinstance(table, dict):
            sections = [f"[{name}]" for name in Config.model_fields]
            raise ConfigError(f"{file}: {unknown_word(f'[{section}]', sections)}")
        settings = {setting.key: setting for setting in _settings_of(section)}
        for key, value in table.items():
            if key not in settings:
                raise ConfigError(f"{file}: [{section}] {unknown_word(key, list(settings))}")
            yield settings[key], value, f"{file}: [{section}] {key}"


def _from_environ(environ: Mapping[str, str]) -> Iterator[tuple[Setting, object, str]]:
    by_env = {setting.env: setting for setting in settings().values()}
    for name, text in environ.items():
        if name.startswith(_ENV_PREFIX) and name not in _ENV_OTHER:
            if name not in by_env:
                raise ConfigError(f"environment: {unknown_word(name, list(by_env))}")
            yield by_env[name], by_env[name].parse(text, name), name


def _from_flags(flags: Mapping[str, object]) -> Iterator[tuple[Setting, object, str]]:
    for name, value in flags.items():
        setting = settings().get(name)
        if setting is None:
            raise ConfigError(unknown_word(name, list(settings())))
        if isinstance(value, str):
            value = setting.parse(value, setting.flag)
        yield setting, value, setting.flag


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    """All errors in one line, each with the place of its value."""
    places = {(setting.section, setting.key): setting.name for setting in settings().values()}
    lines = []
    for item in error.errors(include_url=False):
        section, *rest = map(str, item["loc"])
        where = f"[{section}]"
        message = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        if rest:
            where = origins.get(places.get((section, rest[0]), ""), rest[0])
            if item["type"] != "value_error":
                message += f", not {shortened(repr(item['input']))}"
            if item["type"] == "literal_error":
                setting = settings()[places[section, rest[0]]]
                message += did_you_mean(str(item["input"]), setting.choices)
        lines.append(f"{where}: {message}")
    return "; ".join(lines)


def _toml_line(setting: Setting, value: _Parsed) -> str:
    if setting.secret:
        n_set = len(value) if isinstance(value, tuple) else 1
        return f"# {setting.key}: {n_set} set, not shown"
    return f"{setting.key} = {_toml_value(value)}"


def _toml_value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    # JSON's strings, numbers and booleans are valid TOML, except that JSON leaves DEL unescaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
