"""Sizes chosen from measured step times, kept in the cache folder. They override the defaults, and
yield to a file, the environment or a flag. Imports no jax.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import msgspec

from jitney.engine.common.cache_folder import keep, kept_file
from jitney.engine.common.platforms import runs_on_device
from jitney.engine.common.requests import JsonDict
from jitney.engine.config import SIZES, Config, ResolvedConfig, settings

#: Origin of measured values.
_FROM_MEASURED = "measured here"
#: Shown where all sizes are the defaults.
_USUAL = "the usual ones"
#: Settings that are chosen by measuring.
_MEASURED = {
    "max_seats",
    "token_budget",
    "seat_buckets",
    "token_buckets",
    "threads",
    "product_rows",
    "kernels",
}
#: Settings, besides the sizes, that step times depend on.
_TIMED_SETTINGS = (
    "dtype",
    "weights",
    "context",
    "page_size",
    "pages",
    "memory_gib",
    "memory_share",
    "kernels",
    "kv_dtype",
    "threads",
    "product_rows",
)

#: Value of a measured setting.
type SizeValue = int | str | tuple[int, ...]


class TunedSizes(msgspec.Struct, frozen=True):
    """Measured settings and the day of the measurement."""

    #: Values by flat name.
    values: dict[str, SizeValue]
    #: Day, such as "2026-11-23".
    measured: str

    @classmethod
    def read(cls, config: Config, machine: str) -> TunedSizes | None:
        """The sizes kept for this model on this machine (processor and cores); None: no file."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            sizes = msgspec.json.decode(_path(config, machine).read_bytes(), type=cls)
            if set(sizes.values) <= _MEASURED:
                return sizes
        return None

    @property
    def flags(self) -> str:
        """The flags that set these sizes; "the usual ones" if they are the defaults."""
        flags = [f"{settings()[name].flag} {_text(value)}" for name, value in self.values.items()]
        return " ".join(flags) or _USUAL

    def __str__(self) -> str:
        return f"sizes by this machine's steps, timed on {self.measured}: {self.flags}"

    @classmethod
    def are_for(cls, resolved: ResolvedConfig) -> bool:
        """Whether an engine uses measured sizes: on one CPU, with no size given and a cache."""
        engine = resolved.config.engine
        return (
            engine.measured_sizes
            and engine.compilation_cache
            and engine.n_hosts == engine.tensor_parallel == 1
            and not SIZES & set(resolved.origins)
            and not runs_on_device(engine.platform)
        )

    def applied_to(self, resolved: ResolvedConfig) -> ResolvedConfig:
        """The configuration with these sizes. Raises ConfigError."""
        return resolved.with_values(self.values, _FROM_MEASURED)

    def keep(self, config: Config, machine: str) -> str:
        """Keep the sizes for the next start. Returns why they cannot be kept, or ""."""
        return keep(self, _path(config, machine))


class MeasuredTimes(msgspec.Struct):
    """Step times of this machine, each stored as soon as it is measured."""

    #: Seconds of a step, by its program and size.
    steps: dict[str, float] = {}
    #: Complete measurements of an engine, by its sizes.
    engines: dict[str, JsonDict] = {}
    #: Seconds spent on timing so far, over all starts.
    spent_s: float = 0.0

    @classmethod
    def read(cls, config: Config, machine: str) -> MeasuredTimes:
        """The times kept for this model on this machine; empty without a readable file."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(cls._file(config, machine).read_bytes(), type=cls)
        return cls()

    def keep(self, config: Config, machine: str) -> str:
        return keep(self, self._file(config, machine))

    @staticmethod
    def _file(config: Config, machine: str) -> Path:
        return _path(config, machine).with_suffix(".times.json")


def _text(value: SizeValue) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def _path(config: Config, machine: str) -> Path:
    return kept_file("sizes", _facts(config, machine))


def _facts(config: Config, machine: str) -> Mapping[str, object]:
    """Everything that step times depend on: machine, versions, model and settings."""
    settings_here = config.model.model_dump() | config.engine.model_dump()
    return {
        "machine": machine,
        "versions": [version("jitney"), version("jax")],
        "model": [config.model.id, config.model.revision],
        **{name: settings_here[name] for name in _TIMED_SETTINGS},
    }
