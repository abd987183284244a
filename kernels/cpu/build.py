"""Compiles the CPU kernels: `python -m jitney.kernels.cpu.build [LEVEL ...]`, by default for this
CPU.

The C++ sources in `native/` become a shared library per instruction set level,
`native/build/LEVEL.so`. The compiler is $CXX, c++, g++, clang++, or that of `pip install ziglang`.
The sources need only jaxlib's header xla/ffi/api/ffi.h. This module imports only the standard
library, so that the package's build can run it before anything is installed.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

_NATIVE = Path(__file__).parent / "native"
_BUILT = _NATIVE / "build"
#: No -ffast-math, to keep NaN and infinity. No contraction: only explicit operations are fused, so
#: that all compilers give the same results.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-w",
)
#: On ARM, GCC would load all operands of a tile first, and lack registers for the sums. Clang
#: ignores the flag.
_ARM_FLAGS = ("-fno-schedule-insns",)
#: Linked statically, a library runs beside any loaded version of the compiler's runtime.
_STATIC = ("-static-libstdc++", "-static-libgcc")
#: Marks the digest of the sources in a library.
_MARK = "jitney kernel sources "


class BuildError(RuntimeError):
    """The kernels cannot be compiled here."""

    #: Advice for a machine without a compiler.
    advice = (
        "install g++ or clang++, or pip install ziglang, then run: "
        "python -m jitney.kernels.cpu.build"
    )


@dataclass(frozen=True)
class Level:
    """Instruction sets that a library is compiled for."""

    name: str
    march: str  # as GCC and Clang name the CPU
    features: tuple[str, ...]  # compiler features that `march` does not include
    needs: frozenset[str]  # flags of /proc/cpuinfo
    machine: str = "x86_64"
    #: Whether its kernels were compared with the reference's speed on such a CPU; if not, the first
    #: start of a server measures them.
    measured: bool = True

    @classmethod
    def of_machine(cls) -> list[Level]:
        """The levels of this kind of machine, highest first. Raises BuildError without any."""
        machine = _MACHINES.get(platform.machine())
        if platform.system() != "Linux" or machine is None:
            raise BuildError(
                f"they are for Linux on x86-64 and on 64-bit ARM; this is {platform.system()} on "
                f"{platform.machine()}"
            )
        return [level for level in _LEVELS if level.machine == machine]

    @classmethod
    def here(cls) -> list[Level]:
        """The levels that this CPU supports, highest first. Raises BuildError without any."""
        flags = _cpu_flags()
        of_machine = cls.of_machine()
        levels = [level for level in of_machine if level.needs <= flags]
        if not levels:
            raise BuildError(f"this CPU lacks {', '.join(sorted(of_machine[-1].needs - flags))}")
        return levels

    @staticmethod
    def is_measured(name: str) -> bool:
        """Whether the kernels of the level with this name were measured."""
        return any(level.measured for level in _LEVELS if level.name == name)

    @property
    def library(self) -> Path:
        """Path of the library."""
        return _BUILT / f"{self.name}.so"

    @property
    def is_current(self) -> bool:
        """Whether the library exists and was made of the present sources."""
        try:
            return f"{_MARK}{_digest()}".encode() in self.library.read_bytes()
        except OSError:
            return False

    @property
    def leaves_amx(self) -> bool:
        """Whether this CPU has AMX and the level does not use it."""
        return "amx_bf16" in _cpu_flags() - self.needs

    def flags(self, command: Sequence[str]) -> list[str]:
        """The compiler's flags for the level."""
        on_arm = self.machine == "aarch64"
        if "ziglang" in command or Path(command[0]).name == "zig":
            cpu = _zig_arm(self.march) if on_arm else self.march.replace("-", "_")
            return [f"-mcpu={'+'.join([cpu, *self.features])}"]
        if on_arm:
            return [f"-march={'+'.join([self.march, *self.features])}", *_ARM_FLAGS]
        return [f"-march={self.march}", *(f"-m{feature}" for feature in self.features)]

    def compile(self, target: Path, command: Sequence[str], extra: Sequence[str] = ()) -> None:
        """Compile the library to `target`. Raises BuildError. extra: more flags."""
        compiling = [*_compiling(self, command), *extra]
        with tempfile.TemporaryDirectory() as folder:
            halves = _halves(Path(folder))
            objects = [str(half.with_suffix(".o")) for half in halves]

            def compile_one(source: Path, made: str) -> None:
                _run([*compiling, "-c", str(source), "-o", made])

            with ThreadPoolExecutor(len(halves)) as pool:
                list(pool.map(compile_one, halves, objects))
            linked = Path(folder) / target.name
            _link([*command, "-shared", "-s", "-pthread", *extra, *objects, "-o", str(linked)])
            _move(linked, target)


#: Name of a machine in the operating system -> its name here.
_MACHINES = {"x86_64": "x86_64", "AMD64": "x86_64", "aarch64": "aarch64"}
_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
_AMX = frozenset(("amx_tile", "amx_bf16", "amx_int8"))
#: Linux's system call on x86-64, its operation, and the register state to enable.
_ARCH_PRCTL, _ASK_PERMISSION, _TILE_DATA = 158, 0x1023, 18
#: Highest first, for each machine.
_LEVELS = (
    Level(
        "amx",
        "x86-64-v4",
        ("avx512bf16", "avx512vnni", "amx-tile", "amx-bf16", "amx-int8"),
        _BF16 | _AMX,
    ),
    Level(
        "avx512_bf16",
        "x86-64-v4",
        ("avx512bf16", "avx512vnni"),
        _BF16,
    ),
    Level("avx512_vnni", "x86-64-v4", ("avx512vnni",), _V4 | {"avx512_vnni"}),
    Level("avx512", "x86-64-v4", (), _V4),
    Level("avx_vnni", "x86-64-v3", ("avxvnni",), _V3 | {"avx_vnni"}),
    Level("avx2", "x86-64-v3", (), _V3),
    Level(
        "neon_mmla",
        "armv8.2-a",
        ("bf16", "i8mm"),
        frozenset(("asimd", "bf16", "i8mm")),
        "aarch64",
        measured=False,
    ),
    Level("neon", "armv8-a", (), frozenset(("asimd",)), "aarch64", measured=False),
)


def _cpu_flags() -> frozenset[str]:
    """The usable CPU flags of /proc/cpuinfo; empty without the file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        if line.startswith(("flags", "Features")):
            flags = frozenset(line.partition(":")[2].split())
            if flags & _AMX and not _may_use_amx():
                flags -= _AMX
            return flags
    return frozenset()


@cache
def _may_use_amx() -> bool:
    """Ask the system for permission to use AMX registers (8 KB per thread); False if refused.
    Without permission AMX instructions raise SIGILL.
    """
    ask = ctypes.CDLL(None).syscall
    return ask(_ARCH_PRCTL, _ASK_PERMISSION, _TILE_DATA) == 0


def _sources() -> list[Path]:
    return sorted(_NATIVE.glob("*.cc"))


def _digest() -> str:
    """Digest of the sources and the compiler flags."""
    compiled_as = [_FLAGS, _ARM_FLAGS, *((level.march, level.features) for level in _LEVELS)]
    made_of = blake2b(repr(compiled_as).encode(), digest_size=16)
    for source in [*sorted(_NATIVE.glob("*.h")), *_sources()]:
        made_of.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return made_of.hexdigest()


def _compilers() -> Iterator[list[str]]:
    """Commands of the available C++ compilers, $CXX first."""
    compiler = os.environ.get("CXX")
    commands = [compiler] if compiler else ["c++", "g++", "clang++"]
    for command in commands:
        words = shlex.split(command)
        if shutil.which(words[0]):
            yield words
    if importlib.util.find_spec("ziglang") is not None:
        yield [sys.executable, "-m", "ziglang", "c++"]


def compiler() -> list[str]:
    """The first available compiler. Raises BuildError without one."""
    for command in _compilers():
        return command
    raise BuildError(f"there is no C++ compiler: {BuildError.advice}")


def _headers() -> Path:
    """Folder of jaxlib's headers. Raises BuildError if it is not installed."""
    package = importlib.util.find_spec("jaxlib")
    if package is not None:
        for folder in package.submodule_search_locations or ():
            include = Path(folder) / "include"
            if (include / "xla" / "ffi" / "api" / "ffi.h").is_file():
                return include
    raise BuildError("jaxlib's headers are not installed here")


def _zig_arm(march: str) -> str:
    """zig's CPU for an ARM architecture: armv8.2-a -> generic+v8_2a."""
    version = march.removeprefix("arm").replace(".", "_").replace("-", "")
    return f"generic+{version}"


def _run(command: Sequence[str]) -> None:
    """Run a compiler. Raises BuildError with its first error."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = _first_error(done.stderr) or done.returncode
        raise BuildError(f"{shlex.join(command[:3])} ... failed: {reason}")


def _first_error(text: str) -> str:
    """The first line with an error, else the last line."""
    lines = text.splitlines() or [""]
    for line in lines:
        if "error" in line:
            return line
    return lines[-1]


def _halves(folder: Path) -> list[Path]:
    """Write two files that include all sources, about half each: jaxlib's header, which every
    source includes, takes 2 seconds to compile.
    """
    parts: list[list[Path]] = [[], []]
    for source in sorted(_sources(), key=lambda path: -path.stat().st_size):
        min(parts, key=lambda part: sum(path.stat().st_size for path in part)).append(source)
    halves = []
    for number, part in enumerate(parts):
        half = folder / f"half_{number}.cc"
        half.write_text("".join(f'#include "{source}"\n' for source in part))
        halves.append(half)
    return halves


def _compiling(level: Level, command: Sequence[str]) -> list[str]:
    """The compiler command for a level, without file names."""
    stated = f'-DJITNEY_SOURCES="{_MARK}{_digest()}"'
    machine = level.flags(command)
    return [*command, *_FLAGS, *machine, "-isystem", str(_headers()), stated]


def _link(command: Sequence[str]) -> None:
    try:
        _run([*command, *_STATIC])
    except BuildError:  # some systems lack the static libraries
        _run(command)


def _move(made: Path, target: Path) -> None:
    """Move a file atomically, also from another file system."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(made, beside)
    os.replace(beside, target)


@contextmanager
def _alone() -> Iterator[None]:
    """Lock the folder against other compilations."""
    _BUILT.mkdir(parents=True, exist_ok=True)
    with open(_BUILT / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(levels: Iterable[Level]) -> list[Path]:
    """Compile the levels whose libraries are not current; returns all libraries. Raises
    BuildError.
    """
    made = []
    try:
        with _alone():
            for level in levels:
                if not level.is_current:
                    level.compile(level.library, compiler())
                made.append(level.library)
    except OSError as error:
        raise BuildError(f"{error.strerror}: {error.filename}") from error
    return made


def _main(arguments: Sequence[str] | None = None) -> None:
    """The command line; exits with the reason if the kernels cannot be compiled."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    levels = {level.name: level for level in _LEVELS}
    parser.add_argument(
        "levels",
        nargs="*",
        metavar="LEVEL",
        choices=[*levels, []],
        help=f"{', '.join(levels)}; this CPU's if none is named",
    )
    args = parser.parse_args(arguments)
    try:
        chosen = [levels[name] for name in args.levels] or Level.here()[:1]
        for path in build(chosen):
            print(path)
    except BuildError as error:
        sys.exit(f"the CPU kernels are not built: {error}")


if __name__ == "__main__":
    _main()
