"""Sizes that a machine's own steps asked for, and how long those took, kept in the cache folder
between starts. Jax-free.

Sizes are a layer between the defaults and what a file, the environment or a flag says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import msgspec

from jitney.engine.common.requests import JsonDict
from jitney.engine.config.cache_folder import keep, kept_file
from jitney.engine.config.layers import Layered, settings
from jitney.engine.config.presets import SIZES, runs_on_device
from jitney.engine.config.schema import Config

#: Where a value comes from that was chosen by measuring.
_FROM_MEASURED = "measured here"
#: What stands for the sizes where all came out as their defaults.
_USUAL = "the usual ones"
#: Settings that are chosen so.
_MEASURED = {
    "max_seats",
    "token_budget",
    "seat_buckets",
    "token_buckets",
    "threads",
    "product_rows",
    "kernels",
}
#: Settings that the time of a step depends on, beside the sizes.
_MATTER = (
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


#: Of one such setting.
type Value = int | str | tuple[int, ...]


class KeptSizes(msgspec.Struct, frozen=True):
    """What was chosen, and when."""

    #: Settings by flat name.
    values: dict[str, Value]
    #: The day, such as "2026-11-23".
    measured: str

    @classmethod
    def read(cls, config: Config, machine: str) -> KeptSizes | None:
        """What was kept for this model on this machine; None if nothing was, or nothing that can be
        read. machine: its processor, and what of it may be used.
        """
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            kept = msgspec.json.decode(_path(config, machine).read_bytes(), type=cls)
            if set(kept.values) <= _MEASURED:
                return kept
        return None

    @property
    def flags(self) -> str:
        """As they would be given on the command line; words where none need be."""
        flags = [f"{settings()[name].flag} {_text(value)}" for name, value in self.values.items()]
        return " ".join(flags) or _USUAL

    def __str__(self) -> str:
        """In one line, as the flags that would set them."""
        return f"sizes by this machine's steps, timed on {self.measured}: {self.flags}"

    @classmethod
    def are_for(cls, layered: Layered) -> bool:
        """Whether an engine with these settings takes its sizes from what this machine measures:
        one on a CPU alone, to which nobody has given any of them, and whose measurements can be
        kept.
        """
        engine = layered.config.engine
        return (
            engine.measured_sizes
            and engine.compilation_cache
            and engine.n_hosts == engine.tensor_parallel == 1
            and not SIZES & set(layered.origins)
            and not runs_on_device(engine.platform)
        )

    def applied_to(self, layered: Layered) -> Layered:
        """With the sizes that were measured. Raises ConfigError."""
        return layered.with_values(self.values, _FROM_MEASURED)

    def keep(self, config: Config, machine: str) -> str:
        """Keep them for the next start. Returns why they cannot be kept, or an empty text."""
        return keep(self, _path(config, machine))


class KeptTimes(msgspec.Struct):
    """How long steps took here, each kept as soon as it was timed."""

    #: Seconds of a step, by what ran it and its size.
    steps: dict[str, float] = {}
    #: What was timed of an engine with some sizes, once that was complete, by those sizes.
    engines: dict[str, JsonDict] = {}
    #: Seconds that timing has taken so far, over all starts.
    spent_s: float = 0.0

    @classmethod
    def read(cls, config: Config, machine: str) -> KeptTimes:
        """What was kept, as `KeptSizes.read`; nothing if that cannot be read."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(cls._file(config, machine).read_bytes(), type=cls)
        return cls()

    def keep(self, config: Config, machine: str) -> str:
        """See `KeptSizes.keep`."""
        return keep(self, self._file(config, machine))

    @staticmethod
    def _file(config: Config, machine: str) -> Path:
        return _path(config, machine).with_suffix(".times.json")


def _text(value: Value) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def _path(config: Config, machine: str) -> Path:
    return kept_file("sizes", _facts(config, machine))


def _facts(config: Config, machine: str) -> Mapping[str, object]:
    """All that the times of steps depend on: the machine, the program, the model and its
    settings.
    """
    given = config.model.model_dump() | config.engine.model_dump()
    return {
        "machine": machine,
        "versions": [version("jitney"), version("jax")],
        "model": [config.model.id, config.model.revision],
        **{name: given[name] for name in _MATTER},
    }
