"""The rooms of the code base and the doors between them: who may import whom, and what the distribution carries."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.utils.import_utils import KERNELS_MIN_VERSION

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "kernels", "dashboard")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

#: Modules by floor; each may import its own floor and those below. What is not named here is the engine's host half.
FLOORS = {
    "jitney.kernels": 0,
    "jitney.engine.models.layers": 2, "jitney.engine.models.llama": 2, "jitney.engine.models.schemes": 2,
    "jitney.engine.models.calibration": 2, "jitney.engine.weights.load": 2, "jitney.engine.weights.packed": 2,
    "jitney.engine.weights.quantised_folder": 2, "jitney.engine.weights.quantising": 2,
    "jitney.engine.batch": 2, "jitney.engine.sampling": 2, "jitney.engine.runner": 2,
    "jitney.engine.sharding": 2, "jitney.engine.program": 2,
    "jitney.engine.proving": 2, "jitney.engine.canary": 3,
    "jitney.engine.core": 3, "jitney.engine.build": 3, "jitney.engine.simulator": 3,
    "jitney.engine.replay": 3, "jitney.engine.accuracy": 3,
    "jitney.engine.client": 4, "jitney.engine.process": 4, "jitney.engine.process_link": 4,
    "jitney.engine.process_client": 4, "jitney.engine.recording": 4,
    "jitney.engine.llm": 5, "jitney.engine.api": 5, "jitney.dashboard": 5, "jitney.engine.bench": 6,
    "jitney.engine.cli": 7,
}
HOST_FLOOR = 1
#: `from jitney.engine import LLM` fetches it from above, when it is asked for.
SHOP_WINDOW = {"jitney.engine": {"jitney.engine.llm"}}
#: The only modules that may import jax or flax when they are loaded.
DEVICE = ("jitney.kernels", "jitney.engine.models.layers", "jitney.engine.models.llama",
          "jitney.engine.models.schemes", "jitney.engine.models.calibration", "jitney.engine.weights.load",
          "jitney.engine.weights.packed", "jitney.engine.weights.quantised_folder", "jitney.engine.weights.quantising",
          "jitney.engine.batch", "jitney.engine.sampling", "jitney.engine.runner", "jitney.engine.build",
          "jitney.engine.sharding", "jitney.engine.program", "jitney.engine.proving",
          "jitney.engine.bench.device_timing", "jitney.engine.bench.device_kernels",
          "jitney.engine.bench.device_products", "jitney.engine.bench.device_steps", "jitney.engine.bench.device_loop")
ACCELERATOR = {"jax", "jaxlib", "flax", "jax_triton"}
WEB = {"starlette", "uvicorn", "h11", "httpx", "openai", "prometheus_client"}
WEB_ROOMS = ("jitney.engine.api", "jitney.engine.bench", "jitney.engine.cli", "jitney.dashboard")
#: Fetches the default model, as a client and when asked.
FETCHER = {"jitney.engine.weights.package_index": {"httpx"}}


def within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def floor(module: str) -> int:
    return next((level for room, level in FLOORS.items() if within(module, (room,))), HOST_FLOOR)


def source_files() -> dict[str, Path]:
    """Module name -> file, for all of ours."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    names = {file: ".".join(("jitney", *file.relative_to(ROOT).with_suffix("").parts)) for file in files}
    return {name.removesuffix(".__init__"): file for file, name in names.items()}


def nodes(tree: ast.AST, *, at_load: bool) -> Iterator[ast.AST]:
    """All nodes outside TYPE_CHECKING blocks; with at_load, also outside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if at_load and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield node
        yield from nodes(node, at_load=at_load)


def imports(module: str, *, at_load: bool) -> set[str]:
    """Modules that `module` imports; `from package import submodule` counts as the submodule."""
    found = set()
    for node in nodes(ast.parse(FILES[module].read_text()), at_load=at_load):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            base = node.module or ""
            found |= {name if (name := f"{base}.{alias.name}") in FILES else base for alias in node.names}
    return found


def closure(module: str) -> set[str]:
    """Everything that loading `module` loads, the packages above each module included."""
    seen, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in FILES:
            todo += imports(name, at_load=True)
        if "." in name:
            todo.append(name.rpartition(".")[0])
    return seen


FILES = source_files()
MODULES = sorted(FILES)


def top(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str):
    ours = {name for name in imports(module, at_load=False) if name.startswith("jitney.")}
    climbing = {name for name in ours if floor(name) > floor(module)} - SHOP_WINDOW.get(module, set())
    assert not climbing, f"{module} (floor {floor(module)}) imports {climbing} from above"
    assert not top(imports(module, at_load=False)) & set(PACKAGES), "imports start with jitney."


@pytest.mark.parametrize("module", [name for name in MODULES if not within(name, DEVICE)])
def test_the_host_half_never_loads_jax(module: str):
    assert not top(closure(module)) & ACCELERATOR


@pytest.mark.parametrize("module", [name for name in MODULES if not within(name, WEB_ROOMS)])
def test_the_engine_knows_no_web(module: str):
    assert not top(imports(module, at_load=False)) & WEB - FETCHER.get(module, set())
    assert not top(imports(module, at_load=True)) & WEB


def test_kernels_import_jax_and_nothing_of_ours():
    for module in MODULES:
        if within(module, ("jitney.kernels",)):
            ours = {name for name in imports(module, at_load=False) if name.startswith("jitney.")}
            assert all(within(name, ("jitney.kernels",)) for name in ours)


def test_the_floors_name_modules_that_exist():
    assert not [room for room in (*FLOORS, *DEVICE) if not any(within(name, (room,)) for name in MODULES)]


def test_the_package_list_is_the_folders():
    folders = {".".join(("jitney", *folder.relative_to(ROOT).parts))
               for package in PACKAGES for folder in (ROOT / package, *(ROOT / package).rglob("*"))
               if folder.is_dir() and any(folder.glob("*.py"))}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would shadow the package that transformers probes for"


def python(code: str, *flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([sys.executable, *flags, "-c", code], cwd=cwd, env=environ, capture_output=True, text=True,
                          timeout=120, check=False)


def test_the_api_process_runs_without_jax(tmp_path: Path):
    done = python("import jitney.engine.api.app, jitney.engine.process_client, jitney.engine.tokenizer, sys\n"
                  "import jitney.engine.cli.serve\n"
                  "print(sorted({'jax', 'flax', 'torch'} & set(sys.modules)))", "-P", cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_no_bare_name_is_importable(tmp_path: Path, name: str):
    done = python(f"import importlib.util; print(importlib.util.find_spec('{name}'))", cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("None\n", 0), done.stderr


@pytest.mark.parametrize("installed", [False, True], ids=["alone", "beside the kernels distribution"])
def test_transformers_works_from_the_repository_root(tmp_path: Path, installed: bool):
    """From here `kernels/` is visible as a namespace package: transformers must take that for absent, and the real
    package of that name must still win over it."""
    if installed:
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "__init__.py").write_text("")
        (info := tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info").mkdir()
        (info / "METADATA").write_text(f"Name: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    done = python(f"import sys; sys.path.append({str(tmp_path)!r})\n"
                  "import importlib.util\n"
                  "from transformers.utils.import_utils import is_kernels_available\n"
                  "from transformers import AutoTokenizer, PreTrainedTokenizerFast\n"
                  "print(importlib.util.find_spec('kernels').origin, is_kernels_available(),"
                  " callable(AutoTokenizer.from_pretrained))", cwd=ROOT)
    origin = tmp_path / "kernels" / "__init__.py" if installed else None
    assert done.stdout == f"{origin} {installed} True\n", done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy: building in place would leave folders behind, and would pick up old ones."""
    copy = tmp_path_factory.mktemp("source")
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        path = ROOT / name
        shutil.copytree(path, copy / name) if path.is_dir() else shutil.copy(path, copy)
    # Kernels that are not compiled yet take their minutes.
    subprocess.run([sys.executable, "-P", "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
                    "--wheel-dir", "dist", "."], cwd=copy, check=True, capture_output=True, timeout=600)
    (built,) = (copy / "dist").glob("jitney-*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_carries_every_source_file_and_only_jitney(wheel: zipfile.ZipFile):
    carried = set(wheel.namelist())
    expected = {f"jitney/{file.relative_to(ROOT)}" for file in FILES.values()}
    assert not expected - carried
    info = f"jitney-{PROJECT['project']['version']}.dist-info"
    assert {name.partition("/")[0] for name in carried} == {"jitney", info}
    assert not [name for name in carried if "__pycache__" in name or name.startswith("jitney/tests")]


def test_the_wheel_carries_the_page(wheel: zipfile.ZipFile):
    assets = {f"jitney/{file.relative_to(ROOT)}" for file in (ROOT / "dashboard").rglob("*")
              if file.is_file() and file.suffix not in (".py", ".pyc")}
    assert not assets - set(wheel.namelist())


def test_the_wheel_installs_the_program(wheel: zipfile.ZipFile):
    (entry,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "jitney = jitney.engine.cli:main" in wheel.read(entry).decode()
