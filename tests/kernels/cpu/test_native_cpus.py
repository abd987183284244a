"""The CPU kernels compiled for other CPUs, and run against float64 where this one can: no machine
but this is needed.

The suite does it for the least instruction set level (`test_native` has the one that this CPU is
served at); `JITNEY_TEST_COMPILE=1` for all and for every CPU named here, and once more with the
compiler's address and undefined behaviour checks.
`make test-arm` does it for ARM, on an emulated CPU.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import native_checks
import pytest

from jitney.kernels.cpu import build, library

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

WHOLE = os.environ.get("JITNEY_TEST_COMPILE") == "1"
#: A Python of an ARM machine that an emulator runs, with jax: `tests/support/emulated_arm.sh`.
ARM_PYTHON = os.environ.get("JITNEY_ARM_PYTHON", "")
#: Where it finds jitney.
TYPING = Path(__file__).parents[3] / "build" / "typing"
#: As GCC and Clang name them; the first three have no AVX-512.
CPUS = [
    "haswell",
    "znver2",
    "znver3",
    "alderlake",
    "skylake-avx512",
    "cascadelake",
    "icelake-server",
    "rocketlake",
    "tigerlake",
    "cooperlake",
    "sapphirerapids",
    "znver4",
    "znver5",
]
#: Macros of instruction sets that a compiler may choose by itself, and their flag in /proc/cpuinfo
#: if named otherwise.
CHOSEN = re.compile(
    r"__(AVX\w*|AMX\w*|FMA|FMA4|BMI2?|F16C|LZCNT|MOVBE|ADX|GFNI|VAES|VPCLMULQDQ|XOP)__"
)
FLAG = {
    "bmi": "bmi1",
    "lzcnt": "abm",
    "avx512vp2intersect": "avx512_vp2intersect",
    "avx512bf16": "avx512_bf16",
    "avxvnni": "avx_vnni",
    "avx512vnni": "avx512_vnni",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512bitalg": "avx512_bitalg",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512fp16": "avx512_fp16",
}


def compiler() -> list[str]:
    command = next(build._compilers(), None)
    if command is None:
        pytest.skip("no C++ compiler")
    return command


def compiler_for(level: build.Level) -> list[str]:
    """A compiler that makes libraries of a level, also one of another machine's."""
    if level.machine == "x86_64":
        return compiler()
    cross = f"{level.machine}-linux-gnu-g++"
    if shutil.which(cross):
        return [cross]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++", "-target", f"{level.machine}-linux-gnu"]
    pytest.skip(f"neither {cross} nor ziglang")


def level_of(cpu: str) -> build.Level:
    """What a compiler makes of a CPU's name, as a level."""
    level = build.Level(cpu, cpu, (), frozenset())
    done = subprocess.run(
        [
            *compiler(),
            *level.flags(compiler()),
            "-dM",
            "-E",
            "-x",
            "c++",
            "/dev/null",
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"this compiler does not know {cpu}")
    macros = [found.group(1).lower() for found in CHOSEN.finditer(done.stdout)]
    return build.Level(cpu, cpu, (), frozenset(FLAG.get(name, name) for name in macros))


#: The levels that this CPU runs, and the others.
RUN = [level for level in build._LEVELS if level.needs <= build._cpu_flags()]
#: What these two have, the named CPUs and the other levels have.
CONTAINED = {"avx512", "avx512_vnni"}
NOT_RUN = [level for level in build._LEVELS if level not in RUN and level.name not in CONTAINED]


@pytest.fixture(scope="module", params=RUN if WHOLE else RUN[-1:], ids=lambda level: level.name)
def shipped(request) -> Iterator[library._Library]:
    """One of the libraries that ship, compiled if it is not there yet."""
    level = request.param
    compiler_for(level)
    (path,) = build.build([level])
    # What was compiled for one library would be called again for the next.
    jax.clear_caches()
    yield native_checks.use(path, f"checked_{level.name}")
    jax.clear_caches()


@pytest.mark.parametrize("level", NOT_RUN, ids=lambda level: level.name)
def test_the_sources_of_a_level_that_this_cpu_does_not_run_are_valid(level, tmp_path):
    compiling = build._compiling(level, compiler_for(level))
    for half in build._halves(tmp_path):
        build._run([*compiling, "-fsyntax-only", str(half)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "heads", native_checks.LAYOUTS, ids=lambda heads: "-".join(map(str, heads))
)
def test_attention_of_every_level_matches_float64(shipped, monkeypatch, heads, dtype):
    monkeypatch.setattr(library, "load", lambda: shipped)
    native_checks.check_attention(heads, dtype)
    native_checks.check_attention(heads, dtype, window=24)
    native_checks.check_attention(heads, dtype, softcap=5.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_odd_pages_and_heads_of_every_level_match_float64(shipped, monkeypatch, dtype):
    """Pages that no span of keys divides, and a head that is no whole number of pairs of
    vectors.
    """
    monkeypatch.setattr(library, "load", lambda: shipped)
    native_checks.check_attention((9, 3, 64), dtype, page=8)
    native_checks.check_attention((6, 2, 80), dtype, window=40, page=24)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_and_norms_of_every_level_match_float64(shipped, monkeypatch, dtype):
    monkeypatch.setattr(library, "load", lambda: shipped)
    native_checks.check_rest(dtype)


@pytest.mark.skipif(not WHOLE, reason="half a minute a CPU: JITNEY_TEST_COMPILE=1")
@pytest.mark.parametrize("cpu", CPUS)
def test_kernels_compiled_for_a_named_cpu_match_float64(cpu, tmp_path):
    level = level_of(cpu)
    path = tmp_path / f"{cpu}.so"
    level.compile(path, compiler())
    missing = level.needs - build._cpu_flags()
    if missing:
        pytest.skip(f"compiled; this CPU cannot run it, it lacks {', '.join(sorted(missing))}")
    checked(path, cpu)


@pytest.mark.skipif(not WHOLE, reason="a minute: JITNEY_TEST_COMPILE=1")
def test_kernels_touch_no_memory_but_their_own(tmp_path):
    """Under the address and undefined behaviour sanitizers; a report ends the process."""
    command = compiler()
    level = build.Level.here()[0]
    path = tmp_path / "sanitized.so"
    flags = [
        "-fsanitize=address,undefined",
        "-fno-sanitize=vptr",
        "-fno-sanitize-recover=all",
        "-shared-libasan",
    ]
    if "clang" not in command[0]:
        flags.pop()
    level.compile(path, command, flags)
    # The C++ library too: the checks look for its exceptions when they start, and XLA raises some.
    runtime = [
        subprocess.run(
            [*command, f"-print-file-name={name}"], capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    checked(
        path,
        "sanitized",
        LD_PRELOAD=":".join(runtime),
        ASAN_OPTIONS="detect_leaks=0",
    )


@pytest.mark.skipif(not ARM_PYTHON, reason="an emulated Python on ARM: make test-arm")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "level",
    [one for one in build._LEVELS if one.machine == "aarch64"],
    ids=lambda level: level.name,
)
def test_kernels_for_arm_match_float64_on_an_emulated_cpu(level, tmp_path):
    """On one that has just the instructions of the level."""
    path = tmp_path / f"{level.name}.so"
    level.compile(path, compiler_for(level))
    cpu = "max" if "i8mm" in level.needs else "cortex-a72"
    checked(path, level.name, [*shlex.split(ARM_PYTHON)], QEMU_CPU=cpu, PYTHONPATH=str(TYPING))


def checked(
    path: Path, name: str, python: Sequence[str] = (sys.executable,), **environment: str
) -> None:
    """Every check, in a process of its own."""
    here = Path(native_checks.__file__)
    done = subprocess.run(
        [*python, here, path, name],
        text=True,
        capture_output=True,
        timeout=3500,
        cwd=here.parent,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == f"{name}: right\n"
