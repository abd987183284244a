"""A store of compiled programs on disk, under Jitney's own key. A start that finds its programs
there traces and lowers nothing; jax's own folder of compiled programs needs the lowered program
first.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import platform
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from jitney.engine.common.machine import cpu_features, own_processors
from jitney.engine.core.executor.compilations import compilations

_log = logging.getLogger("jitney.core")

#: Subfolder of jax's folder for the stored programs.
_FOLDER = "kept"
#: Packages that trace or compile programs.
_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes", "triton", "jax-triton")
#: Prefixes of environment variables that may change a program.
_VARIABLES = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "CUDA_", "NVIDIA_", "TRITON_", "TF_")
#: Folders of the code that makes programs: all their files count, also native sources and tables.
_ENGINE, _KERNELS = Path(__file__).parents[2], Path(__file__).parents[3] / "kernels"
#: Subfolders of the engine that count.
_SOURCES = ("common", "config", "core")
#: Number of keys whose programs stay on disk; for the default model on a CPU each has 5 to 7 MB.
_MOST_KEYS = 32
#: An object's address in its repr.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
#: Bytes of the digest at the start of a file.
_DIGEST = 32


class Lowered(Protocol):
    """A program that can be compiled, such as `jax.stages.Lowered`."""

    @property
    def out_info(self) -> Any: ...

    def compile(self, compiler_options: Any = None, /) -> jax.stages.Compiled: ...


@dataclass(frozen=True)
class KeptPrograms:
    """The stored programs of one runner, by name."""

    #: Folder of this key's programs.
    folder: Path
    #: The device that runs them.
    device: Any
    #: Whether new programs are written.
    writes: bool = True

    @classmethod
    def of(
        cls, programs: Path, device: Any, facts: Iterable[object], *, writes: bool = True
    ) -> KeptPrograms:
        """The store for these facts, below the folder `programs`.

        facts: everything that the programs depend on beside the machine and Jitney's own code:
        model, shapes, kernels and settings, each with a complete repr.
        """
        digest = hashlib.sha256()
        for fact in (*_machine(device), _code(), *facts):
            digest.update(_ADDRESS.sub("", repr(fact)).encode() + b"\0")
        store = cls(programs / _FOLDER / digest.hexdigest()[:32], device, writes)
        if writes:
            store._renew()
        return store

    def _renew(self) -> None:
        """Make the folder the newest one, and remove the oldest beyond `_MOST_KEYS`."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.utime(self.folder)
            folders = sorted(self.folder.parent.iterdir(), key=lambda each: each.stat().st_mtime)
        except OSError as error:
            _log.debug("%s cannot be written: %s", self.folder, error)
            return
        for old in folders[:-_MOST_KEYS]:
            shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Remove all stored programs, because one of them does not run."""
        _log.warning("the programs in %s do not run, and are removed", self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    def lowered(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> Lowered:
        """The stored program of this name, or a newly lowered one that is stored when compiled."""
        file = self.folder / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.program"

        def new() -> _NewProgram:
            return _NewProgram(lower(), file if self.writes else None, self.device.platform)

        stored = _read(file)
        return new() if stored is None else _KeptProgram(stored, new, self.device)


@dataclass(frozen=True)
class _Stored:
    """The contents of a stored program's file."""

    #: Shapes of the results.
    out_info: Any
    #: The result of jax's `serialize`.
    executable: tuple[bytes, Any, Any]


@dataclass(frozen=True)
class _NewProgram:
    """A program that was not stored before."""

    lowered: jax.stages.Lowered
    #: File to write it to; None: it is not stored.
    file: Path | None
    platform: str

    @property
    def out_info(self) -> Any:
        return self.lowered.out_info

    def compile(self, compiler_options: Any = None, /) -> jax.stages.Compiled:
        program = self.lowered.compile(compiler_options)
        # If jax read a program from its own folder, XLA:CPU serialises it without some functions.
        is_whole = self.platform != "cpu" or compilations.was_made
        if self.file is not None and is_whole:
            _write(self.file, _shapes_of(self.out_info), program)
        return program


@dataclass(frozen=True)
class _KeptProgram:
    """A stored program; it is lowered and compiled again if the file cannot be loaded."""

    stored: _Stored
    #: Lowers the program again.
    new: Callable[[], _NewProgram]
    device: Any

    @property
    def out_info(self) -> Any:
        return self.stored.out_info

    def compile(self, compiler_options: Any = None, /) -> jax.stages.Compiled:
        try:
            program = deserialize_and_load(
                *self.stored.executable, self.device.client, [self.device]
            )
        except Exception as error:  # the runtime may raise any error for a file
            _log.warning("a kept program cannot be loaded, and is compiled: %s", error)
            return self.new().compile(compiler_options)
        compilations.note_read()
        return program


def _read(file: Path) -> _Stored | None:
    """The contents of a file; None if it is absent or damaged."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
        _log.warning("%s is damaged, and is written anew", file)
        return None
    # Only this user can write to the folder: `open_compilation_cache`.
    return pickle.loads(data[_DIGEST:])


def _write(file: Path, out_info: Any, program: jax.stages.Compiled) -> None:
    """Store a program, if that is possible."""
    try:
        data = pickle.dumps(_Stored(out_info, serialize(program)))
    except Exception as error:  # jax raises many kinds of errors if it cannot serialise
        _log.debug("%s is not kept: %s", file.stem, error)
        return
    # Replaced atomically, so that a concurrent process reads the whole file or nothing.
    new = file.with_suffix(f".{os.getpid()}")
    try:
        new.write_bytes(hashlib.sha256(data).digest() + data)
        new.replace(file)
    except OSError as error:
        _log.warning("a compiled program is not kept: %s", error)


def _shapes_of(outputs: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outputs)


def _machine(device: Any) -> tuple[object, ...]:
    """Facts about the machine that determine XLA's code for a program and where it runs."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    flags = {
        name: value
        for name, value in jax.config.values.items()
        if "cache" not in name and "log" not in name
    }
    memory = device.memory_stats() or {}
    return (
        platform.python_version(),
        [(package, _version_of(package)) for package in _PACKAGES],
        sorted(environment.items()),
        sorted(flags.items()),
        (platform.machine(), cpu_features(), len(own_processors())),
        (device.platform, device.device_kind, device.id, len(jax.devices())),
        (device.client.platform_version, memory.get("bytes_limit")),
    )


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@cache
def _code() -> str:
    """Digest of the code that makes programs."""
    digest = hashlib.sha256()
    for folder in (*[_ENGINE / name for name in _SOURCES], _KERNELS):
        for file in sorted(folder.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(folder)).encode() + b"\0")
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
