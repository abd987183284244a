"""The parsed flags of a command, with checks and conversions that all commands share."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Self

from jitney.engine.common.errors import ConfigError, did_you_mean
from jitney.engine.common.platforms import runs_on_device
from jitney.engine.common.requests import JsonDict, JsonObject
from jitney.engine.config.layers import ResolvedConfig, settings
from jitney.engine.config.presets import preset
from jitney.engine.config.schema import Config

if TYPE_CHECKING:
    from jitney.engine.common.summary import Slo


class Arguments(Namespace):
    """The values of a command's flags, by name."""

    #: Environment variable with the API key for an engine elsewhere.
    key_variable: ClassVar = "JITNEY_ENGINE_KEY"

    def changed(self, **changes: Any) -> Self:
        """The same arguments with some of them changed."""
        return type(self)(**(vars(self) | changes))

    def load_config(self) -> Config:
        """The configuration from the file, the environment and the flags. Raises ConfigError."""
        return self.load_layers().config

    def load_layers(self) -> ResolvedConfig:
        """The configuration as `load_config`, with the origin of each value."""
        flags = {name: value for name, value in vars(self).items() if name in settings()}
        if self.model_word is not None:
            flags.setdefault("model", self.model_word)
        resolved = ResolvedConfig.load(self.config, os.environ, flags)
        goal = getattr(self, "goal", None)
        if goal is None:
            return resolved
        # Commands that plan for another machine set `on_device`.
        on_device = getattr(self, "on_device", None)
        if on_device is None:
            on_device = runs_on_device(resolved.config.engine.platform)
        filled = preset(goal, resolved.origins, on_device=on_device)
        return ResolvedConfig.load(self.config, os.environ, flags, filled)

    def engine_key(self) -> str:
        """The API key for an engine elsewhere (file or environment), or "". Raises ConfigError."""
        from jitney.engine.common.key_file import read_key_file

        if self.key_file:
            return read_key_file(self.key_file)
        return os.environ.get(self.key_variable, "")

    @staticmethod
    def flag_of(name: str) -> str:
        """The flag of an attribute."""
        return f"--{name.replace('_', '-')}"

    def words_of(self, name: str, default: str = "") -> list[str]:
        """The flag's words, separated by commas, without repeats."""
        words = dict.fromkeys(map(str.strip, (getattr(self, name) or default).split(",")))
        words.pop("", None)
        return list(words)

    def names_of(self, name: str, choices: Collection[str]) -> list[str]:
        """`words_of`; raises ConfigError if one is not in `known` or there are none."""
        names = self.words_of(name)
        unknown = ", ".join(word for word in names if word not in choices)
        if unknown or not names:
            what = unknown or "nothing"
            hint = did_you_mean(unknown, choices)
            raise ConfigError(f"{self.flag_of(name)}: {what} is none of {', '.join(choices)}{hint}")
        return names

    def numbers_of[N: (int, float)](self, name: str, kind: type[N], default: str = "") -> list[N]:
        """The flag's positive numbers, separated by commas, without repeats. Raises ConfigError."""
        with suppress(ValueError):
            numbers = list(dict.fromkeys(map(kind, self.words_of(name, default))))
            if numbers and 0 < min(numbers) <= max(numbers) < float("inf"):
                return numbers
        what = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{self.flag_of(name)}: must be positive {what} separated by commas")

    def slo(self) -> Slo | None:
        """The service level that the flags set; None if they set none."""
        from jitney.engine.common.summary import Slo

        slo = Slo(_as_seconds(self.slo_ttft_ms), _as_seconds(self.slo_itl_ms))
        return None if slo == Slo() else slo

    def figure_options(self) -> JsonDict:
        """Arguments of `summary.summarise`."""
        return {"slo": self.slo(), "price_per_hour": self.price_per_hour}

    def write_report(self, report: JsonObject) -> bool:
        """Write the report as --json asks; False: to stdout, so no tables. Raises ConfigError."""
        from jitney.engine.common.text_file import write_text

        if self.json == "-":
            print(json.dumps(report, indent=1))
        elif self.json:
            write_text("--json", self.json, json.dumps(report, indent=1) + "\n")
        return self.json != "-"


def _as_seconds(milliseconds: float | None) -> float | None:
    if milliseconds is None:
        return None
    return milliseconds / 1e3
