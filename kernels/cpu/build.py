"""Compiles the CPU kernels: `python -m jitney.kernels.cpu.build [LEVEL ...]`, for this CPU if no
level is named.

The C++ sources in `native/` become one shared library for each instruction set level,
`native/build/LEVEL.so`, with whatever compiler is there: $CXX, c++, g++, clang++, or the one that
`pip install ziglang` brings. They need jaxlib's own header xla/ffi/api/ffi.h and nothing else. This
module imports nothing but the standard library, so that the package's build can run it before
anything is installed.
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
#: No -ffast-math: NaN and infinity behave. No contraction: sums are fused where the source says so,
#: in every compiler.
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
#: On ARM GCC would load all that a tile multiplies before it multiplies, and then lack registers
#: for sums. Clang takes the flag and ignores it.
_ARM_FLAGS = ("-fno-schedule-insns",)
#: Without the compiler's own runtime libraries a library runs beside whatever versions of them are
#: loaded already.
_STATIC = ("-static-libstdc++", "-static-libgcc")
#: What a library holds beside the digest of the sources it was made of.
_MARK = "jitney kernel sources "


class BuildError(RuntimeError):
    """The kernels cannot be compiled here."""

    #: What to do where a compiler is missing.
    advice = (
        "install g++ or clang++, or pip install ziglang, then run: "
        "python -m jitney.kernels.cpu.build"
    )


@dataclass(frozen=True)
class Level:
    """Instruction sets that a library is compiled for."""

    name: str
    march: str  # as GCC and Clang name the CPU
    features: tuple[str, ...]  # that the CPU's name does not include
    needs: frozenset[str]  # flags of /proc/cpuinfo
    machine: str = "x86_64"
    #: Whether its kernels were measured beside the reference on such a CPU; where not, the first
    #: start of a server does.
    measured: bool = True

    @classmethod
    def of_machine(cls) -> list[Level]:
        """The levels that CPUs of this kind may run, greatest first. Raises BuildError if there
        are none.
        """
        machine = _MACHINES.get(platform.machine())
        if platform.system() != "Linux" or machine is None:
            raise BuildError(
                f"they are for Linux on x86-64 and on 64-bit ARM; this is {platform.system()} on "
                f"{platform.machine()}"
            )
        return [level for level in _LEVELS if level.machine == machine]

    @classmethod
    def here(cls) -> list[Level]:
        """The levels that this CPU runs, greatest first. Raises BuildError with the reason if
        there is none.
        """
        flags = _cpu_flags()
        of_machine = cls.of_machine()
        levels = [level for level in of_machine if level.needs <= flags]
        if not levels:
            raise BuildError(f"this CPU lacks {', '.join(sorted(of_machine[-1].needs - flags))}")
        return levels

    @staticmethod
    def is_measured(name: str) -> bool:
        """Whether the kernels of a level, by its name, were measured on such a CPU."""
        return any(level.measured for level in _LEVELS if level.name == name)

    @property
    def library(self) -> Path:
        """Where its library belongs."""
        return _BUILT / f"{self.name}.so"

    @property
    def is_current(self) -> bool:
        """Whether its library is there and made of the sources that lie here."""
        try:
            return f"{_MARK}{_digest()}".encode() in self.library.read_bytes()
        except OSError:
            return False

    @property
    def leaves_amx(self) -> bool:
        """Whether this CPU multiplies with AMX, and the level does not."""
        return "amx_bf16" in _cpu_flags() - self.needs

    def flags(self, command: Sequence[str]) -> list[str]:
        """The level, as this compiler names it."""
        on_arm = self.machine == "aarch64"
        if "ziglang" in command or Path(command[0]).name == "zig":
            cpu = _zig_arm(self.march) if on_arm else self.march.replace("-", "_")
            return [f"-mcpu={'+'.join([cpu, *self.features])}"]
        if on_arm:
            return [f"-march={'+'.join([self.march, *self.features])}", *_ARM_FLAGS]
        return [f"-march={self.march}", *(f"-m{feature}" for feature in self.features)]

    def compile(self, target: Path, command: Sequence[str], extra: Sequence[str] = ()) -> None:
        """Make `target`, its library, with a compiler; BuildError if it cannot. extra: more
        flags.
        """
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


#: What systems call the machines that levels are for.
_MACHINES = {"x86_64": "x86_64", "AMD64": "x86_64", "aarch64": "aarch64"}
_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
_AMX = frozenset(("amx_tile", "amx_bf16", "amx_int8"))
#: Linux's system call on x86-64, what is asked of it, and for which part of the registers.
_ARCH_PRCTL, _ASK_PERMISSION, _TILE_DATA = 158, 0x1023, 18
#: Greatest first, of each machine.
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
    """What this CPU can do and its system lets it, as /proc/cpuinfo names it; empty where there is
    no such file.
    """
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
    """Whether the system lets this process use AMX's registers, of which it saves 8 KB a thread:
    it is asked here, and who does not ask gets SIGILL.
    """
    ask = ctypes.CDLL(None).syscall
    return ask(_ARCH_PRCTL, _ASK_PERMISSION, _TILE_DATA) == 0


def _sources() -> list[Path]:
    return sorted(_NATIVE.glob("*.cc"))


def _digest() -> str:
    """Of the sources that lie here, and of how they are compiled."""
    compiled_as = [_FLAGS, _ARM_FLAGS, *((level.march, level.features) for level in _LEVELS)]
    made_of = blake2b(repr(compiled_as).encode(), digest_size=16)
    for source in [*sorted(_NATIVE.glob("*.h")), *_sources()]:
        made_of.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return made_of.hexdigest()


def _compilers() -> Iterator[list[str]]:
    """Commands of the C++ compilers that are there, the one asked for first."""
    wanted = os.environ.get("CXX")
    commands = [wanted] if wanted else ["c++", "g++", "clang++"]
    for command in commands:
        words = shlex.split(command)
        if shutil.which(words[0]):
            yield words
    if importlib.util.find_spec("ziglang") is not None:
        yield [sys.executable, "-m", "ziglang", "c++"]


def compiler() -> list[str]:
    """The first of them; BuildError if there is none."""
    for command in _compilers():
        return command
    raise BuildError(f"there is no C++ compiler: {BuildError.advice}")


def _headers() -> Path:
    """jaxlib's own headers; BuildError if it is not installed."""
    found = importlib.util.find_spec("jaxlib")
    if found is not None:
        for folder in found.submodule_search_locations or ():
            include = Path(folder) / "include"
            if (include / "xla" / "ffi" / "api" / "ffi.h").is_file():
                return include
    raise BuildError("jaxlib's headers are not installed here")


def _zig_arm(march: str) -> str:
    """An architecture of ARM's, armv8.2-a, as a CPU of zig's: generic+v8_2a."""
    version = march.removeprefix("arm").replace(".", "_").replace("-", "")
    return f"generic+{version}"


def _run(command: Sequence[str]) -> None:
    """Run a compiler; BuildError with the line that says what is wrong if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = _first_error(done.stderr) or done.returncode
        raise BuildError(f"{shlex.join(command[:3])} ... failed: {reason}")


def _first_error(text: str) -> str:
    """The first line that speaks of an error, else the last one."""
    lines = text.splitlines() or [""]
    for line in lines:
        if "error" in line:
            return line
    return lines[-1]


def _halves(folder: Path) -> list[Path]:
    """Two files in a folder that include all sources, about as much each: jaxlib's header, which
    every source reads, takes a compiler 2 seconds.
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
    """The command that compiles for a level, before the names of files."""
    stated = f'-DJITNEY_SOURCES="{_MARK}{_digest()}"'
    machine = level.flags(command)
    return [*command, *_FLAGS, *machine, "-isystem", str(_headers()), stated]


def _link(command: Sequence[str]) -> None:
    try:
        _run([*command, *_STATIC])
    except BuildError:  # some systems have no static ones
        _run(command)


def _move(made: Path, target: Path) -> None:
    """Whole at once, also from another file system."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(made, beside)
    os.replace(beside, target)


@contextmanager
def _alone() -> Iterator[None]:
    """Nobody else compiles into the same folder meanwhile."""
    _BUILT.mkdir(parents=True, exist_ok=True)
    with open(_BUILT / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(levels: Iterable[Level]) -> list[Path]:
    """Compile what is not current of these levels; their libraries. Raises BuildError with the
    reason if it cannot.
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
    """The command line; ends with the reason if the kernels cannot be compiled."""
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
        wanted = [levels[name] for name in args.levels] or Level.here()[:1]
        for path in build(wanted):
            print(path)
    except BuildError as error:
        sys.exit(f"the CPU kernels are not built: {error}")


if __name__ == "__main__":
    _main()
