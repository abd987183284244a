"""What `make` installs for which target, and which Python it takes; nothing is installed here."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
#: A Python that passes the Makefile's look at it, and makes an environment that has only a name.
GOOD = """#!/bin/sh
if [ "$2" = venv ]; then mkdir -p "$3/bin"; echo "$0" > "$3/bin/python"; exit 0; fi
exec {python} "$@"
"""
#: One that is too old, as the path's `python3` often is.
OLD = "#!/bin/sh\nexit 1\n"
#: uv, which is asked last.
UV = '#!/bin/sh\nmkdir -p .venv/bin; echo "uv $*" > .venv/bin/python\n'

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(folder: Path, *words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """make in a copy of the Makefile alone, with the tools it needs and what `path` holds; HOME is
    empty.
    """
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("bash", "sh", "mkdir", "touch", "sed", "rm", "ln", "find"):
        found = shutil.which(name)
        assert found is not None
        if not (tools / name).exists():
            (tools / name).symlink_to(found)
    (folder / "home").mkdir(exist_ok=True)
    for name in ("Makefile", "pyproject.toml"):
        if not (folder / name).exists():
            shutil.copy(ROOT / name, folder / name)
    program = shutil.which("make")
    assert program is not None
    return subprocess.run(
        [program, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": f"{path or folder / 'bin'}:{tools}", "HOME": str(folder / "home")},
    )


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text.format(python=sys.executable))
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("words", "installed"),
    [
        (("serve",), '"."'),
        (("serve", "EXTRA=cuda12"), '".[cuda12]"'),
        (("test",), '".[dev]"'),
        (("lint",), '".[dev]"'),
        (("docs",), '".[dev]"'),
    ],
)
def test_serving_installs_what_serving_needs(
    tmp_path: Path, words: tuple[str, ...], installed: str
):
    program(tmp_path / "bin", "python3.12", GOOD)
    said = make(tmp_path, "-n", *words)
    lines = [line for line in said.stdout.splitlines() if "pip install" in line]
    assert lines == [
        f".venv/bin/python -m pip install --quiet --no-compile --editable {installed}"
    ], said


def test_what_only_tests_need_is_in_no_other_extra():
    assert EXTRAS["dev"] == ["jitney[test,lint,docs]"]
    served = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {line.partition(">")[0].partition("[")[0] for line in served}
    tools = {
        "triton",
        "playwright",
        "pyright",
        "ruff",
        "pytest",
        "openai",
        "hypothesis",
        "zensical",
    }
    assert not names & tools


@pytest.mark.parametrize("name", ["python3.13", "python3.12", "python3"])
def test_a_python_on_the_path_is_taken_if_it_works(tmp_path: Path, name: str):
    program(tmp_path / "bin", "python3", OLD)
    program(tmp_path / "bin", name, GOOD)
    done = make(tmp_path, ".venv/bin/python")
    assert done.returncode == 0 and done.stdout.startswith("using "), done
    assert (tmp_path / ".venv" / "bin" / "python").read_text().strip().endswith(f"/{name}")


def test_then_pyenvs_then_uvs(tmp_path: Path):
    program(tmp_path / "bin", "python3", OLD)
    program(
        tmp_path / "bin", "python3.13", OLD
    )  # a version manager's stand-in for a Python that is not chosen
    program(tmp_path / "bin", "uv", UV)
    assert make(tmp_path, ".venv/bin/python").returncode == 0
    assert (
        tmp_path / ".venv" / "bin" / "python"
    ).read_text() == "uv venv --seed --python 3.12 .venv\n"
    shutil.rmtree(tmp_path / ".venv")
    program(tmp_path / "home" / ".pyenv" / "versions" / "3.12.9" / "bin", "python", GOOD)
    assert make(tmp_path, ".venv/bin/python").returncode == 0
    assert ".pyenv/versions/3.12.9" in (tmp_path / ".venv" / "bin" / "python").read_text()


def test_without_any_it_says_what_to_install(tmp_path: Path):
    program(tmp_path / "bin", "python3", OLD)
    done = make(tmp_path, "serve")
    assert done.returncode == 2 and not (tmp_path / ".venv").exists()
    assert done.stderr.splitlines()[0] == (
        "Jitney needs Python 3.12 or newer with venv: apt install python3.12-venv, or install uv, "
        "then run make again."
    )
