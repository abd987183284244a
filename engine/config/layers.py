"""Reading the configuration: defaults < TOML file < JITNEY_* environment < flags, and writing it
back as TOML.

Every error is one line that says where the bad value stands and what is accepted there.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Never, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from jitney.engine.common.errors import ConfigError, did_you_mean
from jitney.engine.config.schema import Config, Section

_ENV_PREFIX = "JITNEY_"
#: Names with the prefix that are not settings of one run.
_ENV_OTHER = ("JITNEY_CACHE", "JITNEY_ENGINE_KEY")
#: How flags and the environment write true and false.
_BOOLEANS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
#: What a text must be, by the type that it stands for.
_EXPECTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple: "values separated by commas",
}
NOTHING: Mapping[str, Never] = MappingProxyType({})
#: What a setting can be.
type _Parsed = bool | int | float | str | tuple[str, ...] | tuple[int, ...]
#: Where a value comes from that a preset filled in.
_FROM_PRESET = "--for"
#: Where an order comes from that is not given, on a server with API keys.
_FROM_KEYS = "default with API keys"


@dataclass(frozen=True, slots=True)
class Setting:
    """One field: its place in the file, and its flat name in flags and the environment."""

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
        """True for lists whose values may follow the flag as words of their own."""
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
        """The value that `text` (from a flag or the environment) stands for; ConfigError if it
        stands for none.
        """
        try:
            return self._parsed(text)
        except (KeyError, ValueError):
            expected = _EXPECTED[self.kind]
            words = _BOOLEANS if self.kind is bool else ()
            hint = did_you_mean(text.strip().lower(), words)
            raise ConfigError(f"{where}: must be {expected}, not {_short(text)}{hint}") from None

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
    """All settings by flat name, in the order of the description."""
    return {setting.name: setting for setting in _described()}


def _described() -> Iterator[Setting]:
    for section, info in Config.model_fields.items():
        for key, field in _section_class(info).model_fields.items():
            yield Setting(section, key, field)


def _settings_of(section: str) -> list[Setting]:
    return [setting for setting in settings().values() if setting.section == section]


def _section_class(info: FieldInfo) -> type[Section]:
    assert isinstance(info.annotation, type) and issubclass(info.annotation, Section)
    return info.annotation


@dataclass(frozen=True, slots=True)
class Layered:
    """A configuration, and which layer each of its values is from."""

    config: Config
    #: Flat name -> where the value stands ("run.toml: [engine] max_seats", "JITNEY_MAX_SEATS",
    #: "--max-seats"); what is absent has its default, which for `order` hangs on the keys.
    origins: Mapping[str, str]

    @classmethod
    def load(
        cls,
        file: str | Path | None = None,
        environ: Mapping[str, str] = NOTHING,
        flags: Mapping[str, object] = NOTHING,
        preset: Mapping[str, object] = NOTHING,
    ) -> Layered:
        """The frozen description from all layers, and where each value came from.

        flags: flat name -> value of the field's own type, or text to be parsed. preset: flat name
        -> value, of settings that no other layer has (`config.presets`). Raises ConfigError, naming
        the place.
        """
        values: dict[str, dict[str, object]] = {name: {} for name in Config.model_fields}
        origins: dict[str, str] = {}
        layers = (
            *_from_preset(preset),
            *_from_file(file),
            *_from_environ(environ),
            *_from_flags(flags),
        )
        for setting, value, where in layers:
            values[setting.section][setting.key] = value
            origins[setting.name] = where
        return _validated(values, origins)._with_default_order()

    def _with_default_order(self) -> Layered:
        """With the order fair where it is not given and the server has keys: no client's load may
        hold up those of the other keys.
        """
        if "order" in self.origins or not self.config.server.has_keys:
            return self
        engine = self.config.engine.model_copy(update={"order": "fair"})
        config = self.config.model_copy(update={"engine": engine})
        return Layered(config, {**self.origins, "order": _FROM_KEYS})

    @property
    def from_preset(self) -> list[str]:
        """Flat names of the settings that a preset filled in."""
        return [name for name, origin in self.origins.items() if origin == _FROM_PRESET]

    def with_values(self, values: Mapping[str, object], where: str) -> Layered:
        """And these, by flat name. where: they come from. Raises ConfigError."""
        tables = self.config.model_dump()
        for name, value in values.items():
            setting = settings()[name]
            tables[setting.section][setting.key] = value
        return _validated(tables, {**self.origins, **dict.fromkeys(values, where)})

    def to_toml(self, *, comments: bool = True) -> str:
        """The configuration as TOML that `load` reads back to an equal one; secrets are left out
        and counted.
        """
        blocks = []
        for section in Config.model_fields:
            lines = [f"[{section}]"]
            for setting in _settings_of(section):
                if comments:
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


def load_config(
    file: str | Path | None = None,
    environ: Mapping[str, str] = NOTHING,
    flags: Mapping[str, object] = NOTHING,
) -> Config:
    """As `Layered.load`, without where each value came from."""
    return Layered.load(file, environ, flags).config


def _validated(values: Mapping[str, Mapping[str, object]], origins: Mapping[str, str]) -> Layered:
    """values: by section and key. Raises ConfigError."""
    try:
        return Layered(Config.model_validate(values), origins)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins)) from None


def _from_preset(preset: Mapping[str, object]) -> Iterator[tuple[Setting, object, str]]:
    for name, value in preset.items():
        yield settings()[name], value, _FROM_PRESET


def _from_file(file: str | Path | None) -> Iterator[tuple[Setting, object, str]]:
    if file is None:
        return
    for section, table in read_toml(file).items():
        if section not in Config.model_fields or not isinstance(table, dict):
            sections = [f"[{name}]" for name in Config.model_fields]
            raise ConfigError(f"{file}: {unknown_word(f'[{section}]', sections)}")
        known = {setting.key: setting for setting in _settings_of(section)}
        for key, value in table.items():
            if key not in known:
                raise ConfigError(f"{file}: [{section}] {unknown_word(key, list(known))}")
            yield known[key], value, f"{file}: [{section}] {key}"


def read_toml(file: str | Path) -> dict[str, Any]:
    """The tables of a file. Raises ConfigError."""
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not TOML: {error}") from None


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


def unknown_word(name: str, known: list[str]) -> str:
    """The complaint about a name that is none of those known, with the one that was meant."""
    hint = did_you_mean(name, known) or f"; known: {', '.join(known)}"
    return f"{_short(name)} is unknown{hint}"


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    """All complaints in one line, each with the place the value came from."""
    places = {(setting.section, setting.key): setting.name for setting in settings().values()}
    lines = []
    for item in error.errors(include_url=False):
        section, *rest = map(str, item["loc"])
        where = f"[{section}]"
        message = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        if rest:
            where = origins.get(places.get((section, rest[0]), ""), rest[0])
            if item["type"] != "value_error":
                message += f", not {_short(repr(item['input']))}"
            if item["type"] == "literal_error":
                setting = settings()[places[section, rest[0]]]
                message += did_you_mean(str(item["input"]), setting.choices)
        lines.append(f"{where}: {message}")
    return "; ".join(lines)


def _short(text: str) -> str:
    if len(text) <= 60:
        return text
    return text[:57] + "..."


def _toml_line(setting: Setting, value: _Parsed) -> str:
    if setting.secret:
        n_set = len(value) if isinstance(value, tuple) else 1
        return f"# {setting.key}: {n_set} set, not shown"
    return f"{setting.key} = {_toml_value(value)}"


def _toml_value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    # JSON's strings, numbers and booleans are also TOML's, except that JSON leaves DEL unescaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
