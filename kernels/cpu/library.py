"""The compiled kernels of this CPU: choice of the library, and names of its custom calls."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax

from jitney.kernels.cpu import build
from jitney.kernels.cpu.build import BuildError, Level

_log = logging.getLogger(__name__)

#: The handlers that every library exports, each as `jitney_NAME`.
_HANDLERS = (
    "attention",
    "delta_net",
    "int8_panels",
    "mxfp4_panels",
    "norm_sum",
    "panels",
    "product",
    "project",
    "recur",
    "rms_norm",
    "rotate_and_write",
)


class NoLibrary(RuntimeError):
    """No compiled kernels can run here; the message gives the reason and says what to install."""


class _PanelLayout(NamedTuple):
    """The layout of weights in panels for a library."""

    #: Adjacent inputs of a column that are stored together, in bfloat16 (0: no panels) and in int8.
    bfloat16: int
    int8: int
    #: Most columns of a panel.
    columns: int


@dataclass(frozen=True)
class _Library:
    """A loaded library, its handlers registered with XLA."""

    #: The instructions it was compiled for, a name of `build.LEVELS`.
    level: str
    layout: _PanelLayout
    #: Whether XLA uses AMX and these kernels do not, since their compiler is too old.
    leaves_amx: bool = False
    #: Part of a step -> seconds spent in its calls since loading. Parallel calls add up to more
    #: than the elapsed time.
    part_seconds: Callable[[], dict[str, float]] = dict

    @property
    def multiplies_pairs(self) -> bool:
        """Whether one instruction multiplies two or more neighbouring bfloat16 of a row."""
        return self.layout.bfloat16 > 0

    def target(self, handler: str) -> str:
        """The custom call's name for one of `_HANDLERS`. It includes the level, so that programs of
        different levels are never confused.
        """
        return f"jitney_{handler}_{self.level}"

    @property
    def packs(self) -> bool:
        """Whether weights are packed for these kernels, which then multiply any number of rows.

        False if only XLA uses AMX, which is 1.5 to 5 times as fast from 16 rows on: then the row
        count decides.
        """
        return self.multiplies_pairs and not self.leaves_amx


@cache
def load() -> _Library:
    """The library for this CPU, compiled first if it is missing or outdated.

    Raises NoLibrary.
    """
    try:
        levels = Level.here()
    except BuildError as error:
        raise NoLibrary(str(error)) from error
    return _opened(_available(levels))


def _available(levels: Sequence[Level]) -> Level:
    """The highest of these levels whose library is current or can be compiled: an old compiler may
    support only some levels. Raises NoLibrary with the failure of the highest level.
    """
    first = levels[0]
    reason = ""
    for level in levels:
        error = _compiled(level)
        reason = reason or error
        if not error:
            if level is not first:
                _log.warning("kernels for %s instead of %s: %s", level.name, first.name, reason)
            return level
    raise NoLibrary(_why_none(first, reason))


def _compiled(level: Level) -> str:
    """Compile a level if it is not current. Returns the reason of a failure, or ""."""
    if level.is_current:
        return ""
    try:
        build.compiler()
        _log.warning("compiling the CPU kernels (%s), once", level.name)
        build.build([level])
    except BuildError as error:
        return str(error)
    return ""


def _why_none(level: Level, reason: str) -> str:
    state = "is made of other sources" if level.library.exists() else "is not built"
    if BuildError.advice not in reason:
        reason += f"; {BuildError.advice}"
    return f"their library {state}, and {reason}"


def _opened(level: Level) -> _Library:
    """The library of a level, with its handlers registered. Raises NoLibrary if this system or this
    jaxlib cannot load it.
    """
    try:
        return _register(level.library, level.name, level.leaves_amx)
    except (OSError, AttributeError, RuntimeError, ValueError) as error:
        raise NoLibrary(f"their library cannot be loaded: {error}") from error


def _register(path: Path, level: str, leaves_amx: bool = False) -> _Library:
    """The library in a file. Registers its handlers with XLA under names that include the level."""
    code = ctypes.CDLL(str(path))
    numbers = (ctypes.c_int * len(_PanelLayout._fields)).in_dll(code, "jitney_panel_layout")
    library = _Library(level, _PanelLayout(*numbers), leaves_amx, _clock_of(code))
    for handler in _HANDLERS:
        capsule = jax.ffi.pycapsule(getattr(code, f"jitney_{handler}"))
        jax.ffi.register_ffi_target(library.target(handler), capsule, platform="cpu")
    return library


def _clock_of(code: ctypes.CDLL) -> Callable[[], dict[str, float]]:
    """A function that reads the library's seconds for each part of a step."""
    first = ctypes.c_char.in_dll(code, "jitney_part_names")
    names = ctypes.string_at(ctypes.addressof(first)).decode().split(",")
    read = code.jitney_part_times
    read.restype = None

    def seconds() -> dict[str, float]:
        numbers = (ctypes.c_double * len(names))()
        read(numbers)
        return dict(zip(names, numbers, strict=True))

    return seconds
