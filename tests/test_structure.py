"""The houses of the code, what they import from each other, and what the distribution carries."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from msgspec import Struct
from pydantic import BaseModel

from jitney.kernels.cpu import build

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "kernels", "dashboard")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

#: The houses from the lowest to the highest: a house imports from those before it alone, and only
#: what their `__init__` offers. Two are open: kernels, whose interface is its modules, and common.
HOUSES = ("kernels", "common", "config", "core", "server", "dashboard", "fleet", "lab", "cli")
OPEN_HOUSES = {"kernels", "common"}
#: Names of one house that another imports, together: a larger number wants a reason.
MOST_CROSSING_NAMES = 167
#: The only packages and modules that may import jax or flax when they are loaded.
DEVICE_ROOMS = (
    "jitney.kernels",
    "jitney.engine.core.models",
    "jitney.engine.core.weights",
    "jitney.engine.core.executor",
    "jitney.engine.core.build",
    "jitney.engine.core.describe",
    "jitney.engine.core.jax_start",
    "jitney.engine.core.measuring.random_engine",
    "jitney.engine.core.setup",
    "jitney.engine.lab.device",
)
#: Modules of these rooms that the host half needs all the same.
HOST_MODULES = (
    "jitney.engine.core.executor.memory",
    "jitney.engine.core.weights.checkpoints",
    "jitney.engine.lab.device.run",
)
ACCELERATOR = {"jax", "jaxlib", "flax", "jax_triton"}
WEB = {"starlette", "uvicorn", "h11", "httpx", "openai", "prometheus_client"}
#: Fetches the default model, as a client and when asked.
FETCHER = {"jitney.engine.core.weights.checkpoints.package_index": {"httpx"}}


def within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def house(module: str) -> str:
    """The house that a module belongs to; "" for the library's face, `jitney.engine`."""
    _, top, *rest = module.split(".")
    return (rest[0] if rest else "") if top == "engine" else top


def face(name: str) -> str:
    """The package of a house."""
    return f"jitney.{name}" if name in PACKAGES else f"jitney.engine.{name}"


def source_files() -> dict[str, Path]:
    """Module name -> file, for all of ours."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    names = {
        file: ".".join(("jitney", *file.relative_to(ROOT).with_suffix("").parts)) for file in files
    }
    return {name.removesuffix(".__init__"): file for file, name in names.items()}


def nodes(tree: ast.AST, *, at_load: bool, types: bool = False) -> Iterator[ast.AST]:
    """All nodes; with at_load outside functions only. types: also those in TYPE_CHECKING blocks."""
    for node in ast.iter_child_nodes(tree):
        if not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if at_load and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield node
        yield from nodes(node, at_load=at_load, types=types)


@functools.cache
def offered(package: str) -> dict[str, str]:
    """What a house offers: name -> the module that it is from."""
    stub = FILES[package].with_suffix(".pyi")
    found: dict[str, str] = {}
    for node in ast.parse(stub.read_text()).body if stub.exists() else ():
        assert isinstance(node, ast.ImportFrom) and node.level == 1, f"{stub} only imports"
        found |= {alias.name: f"{package}.{node.module}" for alias in node.names}
    return found


@functools.cache
def imported_names(
    module: str, *, at_load: bool = False, types: bool = False
) -> frozenset[tuple[str, str]]:
    """(module, name) for each import; name is "" where a module itself is imported."""
    found: set[tuple[str, str]] = set()
    for node in nodes(ast.parse(FILES[module].read_text()), at_load=at_load, types=types):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            base = node.module or ""
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found.add((name, "") if name in FILES else (base, alias.name))
    return frozenset(found)


@functools.cache
def imports(module: str, *, at_load: bool) -> frozenset[str]:
    """Modules that `module` imports: behind a house's face, the one that the name is from."""
    names = imported_names(module, at_load=at_load)
    return frozenset(
        offered(source).get(name, source) if source in FILES else source for source, name in names
    )


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
#: Run by the table of commands, which has their names as text.
RUN_BY_NAME = set(re.findall(r'"[\w.]+:(\w+)"', FILES["jitney.engine.cli"].read_text()))
MODULES = sorted(FILES)
HOST_HALF = [name for name in MODULES if name in HOST_MODULES or not within(name, DEVICE_ROOMS)]


def top(modules: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def crossings() -> Iterator[tuple[str, str, str]]:
    """(importing module, imported module, name) between two houses."""
    for module in MODULES:
        for source, name in imported_names(module, types=True):
            if source.startswith("jitney.") and house(source) != house(module):
                yield module, source, name


def test_a_house_imports_from_lower_houses():
    order = ("", *HOUSES)
    climbing = [
        f"{module} imports {source}"
        for module, source, _ in crossings()
        if house(module) and order.index(house(source)) > order.index(house(module))
    ]
    assert not climbing


def test_a_house_imports_what_another_offers():
    inside = [
        f"{module} imports {source}, {name}"
        for module, source, name in crossings()
        if house(source) not in OPEN_HOUSES and house(source) and source != face(house(source))
    ]
    assert not inside


def test_a_house_does_not_import_its_own_face():
    """Its modules import each other, so that the face has no part in their order."""
    turned = [
        f"{module} imports {source}, {name}"
        for module in MODULES
        for source, name in imported_names(module, at_load=False)
        if source in FILES and offered(source) and house(source) == house(module)
    ]
    assert not turned


def test_few_names_cross_houses():
    crossing = Counter(
        (house(source), name or source)
        for source, name in {
            (source, name) for _, source, name in crossings() if house(source) != "common"
        }
    )
    by_house = Counter(house for house, _ in crossing)
    print(f"{len(crossing)} names cross houses: {dict(by_house)}")
    assert len(crossing) <= MOST_CROSSING_NAMES


@pytest.mark.parametrize("package", [face(name) for name in HOUSES if name not in OPEN_HOUSES])
def test_what_a_house_offers_is_there_and_used(package: str):
    if not offered(package):
        return  # the command line: nobody imports it
    offers = offered(package)
    for name, module in offers.items():
        assert name in defined_names(FILES[module]), f"{module} has no {name}"
        assert f"{package}.{name}" not in FILES, f"{name} would hide a module"
    used = {name for _, source, name in crossings() if source == package}
    assert set(offers) <= used | RUN_BY_NAME


def test_the_host_half_never_loads_jax():
    loading = [module for module in HOST_HALF if top(closure(module)) & ACCELERATOR]
    assert HOST_HALF and not loading


def test_the_engine_knows_no_web():
    engine = [name for name in MODULES if house(name) in ("common", "config", "core")]
    importing = [
        module
        for module in engine
        if top(imports(module, at_load=False)) & WEB - FETCHER.get(module, set())
        or top(imports(module, at_load=True)) & WEB
    ]
    assert engine and not importing


def test_the_lists_name_modules_that_exist():
    named = (*map(face, HOUSES), *DEVICE_ROOMS, *HOST_MODULES)
    assert not [room for room in named if not any(within(name, (room,)) for name in MODULES)]


def test_the_package_list_is_the_folders():
    folders = {
        ".".join(("jitney", *folder.relative_to(ROOT).parts))
        for package in PACKAGES
        for folder in (ROOT / package, *(ROOT / package).rglob("*"))
        if folder.is_dir() and any(folder.glob("*.py"))
    }
    # "jitney" itself holds __main__.py alone.
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders | {"jitney"}
    assert not (ROOT / "kernels" / "__init__.py").exists(), (
        "it would shadow the package that transformers probes for"
    )


def python(code: str, *flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *flags, "-c", code],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_api_process_runs_without_jax(tmp_path: Path):
    done = python(
        "import jitney.engine.server.app, jitney.engine.server.process.process_client, "
        "jitney.engine.core.text.tokenizer, sys\n"
        "import jitney.engine.cli.serve\n"
        "print(sorted({'jax', 'flax', 'torch'} & set(sys.modules)))",
        "-P",
        cwd=tmp_path,
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_no_bare_name_is_importable(tmp_path: Path, name: str):
    done = python(f"import importlib.util; print(importlib.util.find_spec('{name}'))", cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("None\n", 0), done.stderr


@pytest.mark.parametrize(
    "installed", [False, True], ids=["alone", "beside the kernels distribution"]
)
def test_transformers_works_from_the_repository_root(tmp_path: Path, installed: bool):
    """From here `kernels/` is visible as a namespace package: transformers must take that for
    absent, and the real package of that name must still win over it."""
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    if installed:
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "__init__.py").write_text("")
        (info := tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info").mkdir()
        (info / "METADATA").write_text(f"Name: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    done = python(
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "import importlib.util\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "from transformers import AutoTokenizer, PreTrainedTokenizerFast\n"
        "print(importlib.util.find_spec('kernels').origin, is_kernels_available(),"
        " callable(AutoTokenizer.from_pretrained))",
        cwd=ROOT,
    )
    origin = tmp_path / "kernels" / "__init__.py" if installed else None
    assert done.stdout == f"{origin} {installed} True\n", done.stderr


#: Makes the file that it is told to make, whatever of.
NO_COMPILER = """#!/bin/sh
while [ $# -gt 1 ]; do
  if [ "$1" = -o ]; then echo nothing > "$2"; fi
  shift
done
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy: building in place would leave folders behind, and would pick up
    old ones. Its kernels are empty, since compiling them takes minutes and is tested elsewhere.
    """
    copy = tmp_path_factory.mktemp("source")
    for name in (*PACKAGES, "__main__.py", "pyproject.toml", "README.md", "LICENSE"):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, copy / name, ignore=shutil.ignore_patterns("build"))
        else:
            shutil.copy(path, copy)
    compiler = copy / "no-compiler"
    compiler.write_text(NO_COMPILER)
    compiler.chmod(0o700)
    subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            "dist",
            ".",
        ],
        cwd=copy,
        env=os.environ | {"CXX": str(compiler)},
        check=True,
        capture_output=True,
        timeout=600,
    )
    (built,) = (copy / "dist").glob("jitney-*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_carries_what_runs_and_only_jitney(wheel: zipfile.ZipFile):
    """Sources, the stubs without which a house offers nothing, the page's files, what kernels read,
    and that the packages are typed.
    """
    carried = set(wheel.namelist())
    stubs = [file for package in PACKAGES for file in (ROOT / package).rglob("*.pyi")]
    page = [
        file
        for file in (ROOT / "dashboard").rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc")
    ]
    files = [*FILES.values(), *stubs, *page]
    expected = {f"jitney/{file.relative_to(ROOT)}" for file in files}
    expected |= {f"jitney/{package}/py.typed" for package in PACKAGES}
    read = {"jitney/kernels/prompt_choices.json", "jitney/kernels/flashinfer_gpu/views.cc"}
    assert len(stubs) == 6
    assert not (expected | read | {"jitney/__main__.py"}) - carried
    info = f"jitney-{PROJECT['project']['version']}.dist-info"
    assert {name.partition("/")[0] for name in carried} == {"jitney", info}
    assert not [
        name for name in carried if "__pycache__" in name or name.startswith("jitney/tests")
    ]


@pytest.mark.skipif(platform.system() != "Linux", reason="no kernels for it")
def test_the_wheel_carries_a_library_for_every_level(wheel: zipfile.ZipFile):
    """Of this kind of machine."""
    libraries = {name for name in wheel.namelist() if name.endswith(".so")}
    assert libraries == {
        f"jitney/kernels/cpu/native/build/{level.name}.so" for level in build.Level.of_machine()
    }


def test_the_wheel_installs_the_program(wheel: zipfile.ZipFile):
    (entry,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "jitney = jitney.engine.cli:main" in wheel.read(entry).decode()


#: Found by these names: how a wheel is built (PEP 517).
FOUND_BY_NAME = {
    "build_wheel",
    "build_editable",
    "get_requires_for_build_wheel",
    "get_requires_for_build_editable",
}


def test_a_name_that_only_its_own_file_uses_begins_with_an_underscore():
    """So that a reader sees what a file is for. Not those that the OpenAPI document shows."""
    others = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "docs").rglob("*.py")]
    uses = Counter[str]()
    for file in [*FILES.values(), *others]:
        uses.update(set(re.findall(r"\w+", file.read_text())))
    alone = [
        f"{module}.{name}"
        for module, file in FILES.items()
        for node in ast.parse(file.read_text()).body
        for name in names_of(node)
        if uses[name] == 1 and not name.startswith("_") and not is_shown(module, name)
    ]
    assert not [name for name in alone if name.rpartition(".")[2] not in FOUND_BY_NAME]


def is_shown(module: str, name: str) -> bool:
    """Whether it is a class whose name stands in the OpenAPI document."""
    defined = getattr(importlib.import_module(module), name)
    return isinstance(defined, type) and issubclass(defined, BaseModel | Struct)


#: Of names on the pages, those that are Python's and pytest's.
NAMES_OF_OTHERS = {"Any", "tmp_path", "__init__"}


#: Pages for newcomers, whose files and names must exist.
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    *(f"docs/contributing/{page.name}" for page in (ROOT / "docs" / "contributing").glob("*.md")),
)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_for_newcomers_names_what_exists(page: str):
    """Links and files; and of what is in backquotes, what has a capital or an underscore."""
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\((?!http)([^)#]+)", text)
    quoted = set(re.findall(r"`([^`\s]+)`", text))
    files = [name for name in quoted if "/" in name and not name.startswith("/")]
    dotted = {name.removesuffix(".py") for name in quoted if re.fullmatch(r"\w[\w.]+", name)}
    words = {word for name in dotted for word in name.split(".") if re.search("[A-Z_]", word)}
    assert links or files
    assert not [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    assert not [file for file in files if not list(ROOT.glob(file))]
    assert words <= all_names() | NAMES_OF_OTHERS


@functools.cache
def all_names() -> frozenset[str]:
    """What the modules of the product and of the tests are called, and what they define."""
    files = [*FILES.values(), *(ROOT / "tests").rglob("*.py")]
    return frozenset[str]().union({file.stem for file in files}, *map(defined_names, files))


def test_the_architecture_page_answers_with_names_that_its_files_define():
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert len(re.findall(r"`(?:engine|kernels|dashboard)/[\w/]*", page)) > 100
    answers = page.partition("## Where is ...?")[2].strip().splitlines()[2:]
    assert len(answers) > 50
    for row in answers:
        _, _, where, what, _ = row.split("|")
        files = re.findall(r"`([^`]+)`", where)
        names = re.findall(r"`([^`]+)`", what)
        assert files and names, row
        defined = set[str]().union(*(defined_names(ROOT / file) for file in files))
        assert set(names) <= defined, f"{files} have no {set(names) - defined}"


def test_what_docstrings_and_comments_refer_to_exists():
    """Of names in backquotes, those that begin with a package: a module, or what one defines."""
    stale = [
        f"{module} refers to {name}"
        for module, file in FILES.items()
        for name in re.findall(r"`(?:jitney\.)?((?:\w+\.)+\w+)`", file.read_text())
        if name.partition(".")[0] in PACKAGES and not refers(f"jitney.{name}")
    ]
    assert not stale


def refers(name: str) -> bool:
    """Whether a dotted name is a module, or defined in the module that it begins with."""
    module = max((each for each in MODULES if within(name, (each,))), key=len, default="")
    rest = name.removeprefix(module).removeprefix(".")
    if not rest:
        return True
    return module in FILES and rest in defined_names(FILES[module])


def defined_names(file: Path) -> set[str]:
    """What a module defines: its names, and those in its classes alone and behind the class."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        own = names_of(node)
        names |= own
        if isinstance(node, ast.ClassDef):
            members = set[str]().union(*map(names_of, node.body))
            names |= members | {f"{node.name}.{member}" for member in members}
    return names


def names_of(node: ast.stmt) -> set[str]:
    """The names that a statement gives to what it defines."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.TypeAlias(name=ast.Name(id=name)):
            return {name}
        case _:
            return set()
