"""Which compiled kernels serve: by the CPU, by what is compiled, and by what can be. Nothing is
compiled here.
"""

import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jitney.kernels import reference
from jitney.kernels.cpu import build, library, products
from jitney.kernels.interface import KernelError
from jitney.kernels.select import select

OURS = products.up_to(products.USUAL_ROWS)
CPU_FLAGS = build._cpu_flags


@pytest.fixture(autouse=True)
def afresh(monkeypatch, tmp_path):
    """No library is loaded yet, none is compiled, and this is a Linux machine that runs every
    level.
    """
    monkeypatch.setattr(build, "_BUILT", tmp_path)
    monkeypatch.setattr(build, "_cpu_flags", lambda: frozenset(build._LEVELS[0].needs))
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "_compilers", lambda: iter(()))
    load = library.load
    load.cache_clear()
    yield
    load.cache_clear()


def lay(level: build.Level, digest: str) -> None:
    """A file that says which sources it was made of."""
    level.library.write_bytes(b"code " + f"{build._MARK}{digest}".encode() + b" code")


@pytest.mark.parametrize("allowed", [True, False])
def test_amx_is_what_the_system_allows(monkeypatch, allowed):
    flags = " ".join(sorted(build._LEVELS[0].needs))
    monkeypatch.setattr(build, "_cpu_flags", CPU_FLAGS)
    monkeypatch.setattr(build.Path, "read_text", lambda *_: f"flags\t\t: {flags}\n")
    monkeypatch.setattr(build, "_may_use_amx", lambda: allowed)
    assert build.Level.here()[0].name == ("amx" if allowed else "avx512_bf16")


def test_without_a_compiler_the_reference_serves_and_one_line_says_what_to_install(caplog):
    with caplog.at_level(logging.WARNING):
        assert select("cpu").name == "reference"
    told = [record.getMessage() for record in caplog.records if "reference" in record.getMessage()]
    assert len(told) == 1
    assert "is not built" in told[0] and build.BuildError.advice in told[0]
    with pytest.raises(KernelError, match="pip install ziglang"):
        select("cpu", "native")


def test_a_cpu_below_avx2_gets_the_reference(monkeypatch, caplog):
    monkeypatch.setattr(build, "_cpu_flags", lambda: build._V3 - {"avx2", "fma"})
    assert select("cpu").name == "reference"
    assert "this CPU lacks avx2, fma" in caplog.text


def test_a_machine_that_no_level_is_for_gets_the_reference(monkeypatch, caplog):
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    assert select("cpu").name == "reference"
    assert "for Linux on x86-64 and on 64-bit ARM; this is Linux on riscv64" in caplog.text


@pytest.mark.parametrize(
    ("features", "levels"),
    [
        ("fp asimd evtstrm aes crc32 atomics", ["neon"]),
        ("fp asimd asimddp i8mm bf16", ["neon_mmla", "neon"]),
    ],
)
def test_an_arm_cpu_has_the_levels_of_its_features(monkeypatch, features, levels):
    monkeypatch.setattr(build, "_cpu_flags", CPU_FLAGS)
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    text = f"processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: {features}\n"
    monkeypatch.setattr(build.Path, "read_text", lambda *_: text)
    assert [level.name for level in build.Level.here()] == levels


def test_a_library_of_other_sources_is_not_used(caplog):
    lay(build._LEVELS[0], "0" * 32)
    assert select("cpu").name == "reference"
    assert "is made of other sources" in caplog.text


def test_a_library_of_other_sources_is_compiled_again(monkeypatch):
    lay(build._LEVELS[0], "0" * 32)
    monkeypatch.setattr(build, "_compilers", lambda: iter([["a-compiler"]]))
    compiled = []

    def compile_level(level, target, command):
        compiled.append((level.name, command))
        lay(level, build._digest())

    monkeypatch.setattr(build.Level, "compile", compile_level)
    assert library._available(build._LEVELS) == build._LEVELS[0]
    assert library._available(build._LEVELS) == build._LEVELS[0]
    assert compiled == [(build._LEVELS[0].name, ["a-compiler"])]


def test_a_lesser_level_serves_where_the_best_one_does_not_compile(caplog):
    lay(build._LEVELS[1], build._digest())
    assert library._available(build._LEVELS) == build._LEVELS[1]
    lesser = build._LEVELS[1].name
    assert f"kernels for {lesser} instead of amx: there is no C++ compiler" in caplog.text


def test_a_level_that_the_compiler_does_not_know_leaves_the_next_one(monkeypatch, caplog):
    compiled = []

    def compile_level(level, target, command):
        compiled.append(level.name)
        if level is not build._LEVELS[2]:
            raise build.BuildError(f"unknown option of {level.name}")
        lay(level, build._digest())

    monkeypatch.setattr(build, "_compilers", lambda: iter([["an-old-compiler"]]))
    monkeypatch.setattr(build.Level, "compile", compile_level)
    assert library._available(build._LEVELS) == build._LEVELS[2]
    assert compiled == [level.name for level in build._LEVELS[:3]]
    told = "kernels for avx512_vnni instead of amx: unknown option of amx"
    assert told in caplog.text


def test_a_file_that_is_no_library_is_refused(caplog):
    lay(build._LEVELS[0], build._digest())
    assert select("cpu").name == "reference"
    assert "cannot be loaded" in caplog.text


def test_where_only_xla_has_amx_weights_stay_and_row_counts_choose(monkeypatch):
    """It multiplies 16 rows and more 1.5 to 5 times as fast as kernels without."""
    amx = library._Library("avx512_bf16", library._PanelLayout(2, 4, 96), leaves_amx=True)
    monkeypatch.setattr(library, "load", lambda: amx)
    w = jnp.ones((64, 96), jnp.bfloat16)
    assert products.pack(w) is w
    for rows, ours in ((8, True), (9, False), (16, False)):
        x = jnp.ones((rows, 64), jnp.bfloat16)
        assert ("jitney_product" in jax.jit(OURS.matmul).lower(x, w).as_text()) == ours
        assert ("jitney_project" in jax.jit(OURS.project).lower(x, w.T).as_text()) == ours
    packed = replace(amx, leaves_amx=False)
    monkeypatch.setattr(library, "load", lambda: packed)
    assert products.pack(w).shape == (1, 32, 96, 2)


def test_the_reference_is_always_there():
    assert select("cpu", "reference").matmul is reference.matmul


def alone(folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """The build as a program, from a copy that has compiled nothing."""
    source = Path(build.__file__).parent
    shutil.copytree(source / "native", folder / "native", ignore=shutil.ignore_patterns("build"))
    shutil.copy(source / "build.py", folder)
    code = "import build; print(build._digest()); build._main([])"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=60,
    )


@pytest.mark.skipif(
    build.importlib.util.find_spec("ziglang") is not None, reason="there is a compiler"
)
def test_a_build_without_a_compiler_says_so_and_sources_are_the_same_in_every_process(tmp_path):
    done = alone(tmp_path, PATH="/nonexistent", CXX="", PYTHONHASHSEED="7")
    assert done.returncode == 1
    assert done.stdout == f"{build._digest()}\n"
    assert done.stderr.startswith("the CPU kernels are not built: ")
    assert len(done.stderr.splitlines()) == 1
