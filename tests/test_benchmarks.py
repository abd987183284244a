"""The scripts in docs/benchmarks: what they import is there.

Nobody runs most of them for months, and each would take minutes; a name that moved is found here.
"""

from __future__ import annotations

import ast
import importlib
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"<!-- (\w+\.json)")
SCRIPTS = sorted((ROOT / "docs" / "benchmarks").glob("*.py"))


def imports(script: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of all that a script imports, also inside its functions; no name: the module
    itself.
    """
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.module or "", alias.name


def has(module: str, name: str) -> bool:
    """Whether `from module import name` works."""
    try:
        found = importlib.import_module(module)
        if name and not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


def defined(script: Path) -> set[str]:
    """Names that a script has, read and not run."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_what_a_script_imports_is_there(script: Path):
    beside = {other.stem: other for other in SCRIPTS}
    missing = []
    for module, name in imports(script):
        if module in beside:
            there = not name or name in defined(beside[module])
        elif module.startswith("jitney."):
            there = has(module, name)
        else:
            there = True  # other people's, of which some are for GPUs alone
        if not there:
            missing.append(f"from {module} import {name}")
    assert missing == []


def test_the_parts_of_the_http_cost_are_files_that_are_there():
    parts = runpy.run_path(str(ROOT / "docs" / "benchmarks" / "http_cost.py"))["PARTS"]
    ours = [place for places in parts.values() for place in places if place.startswith("engine/")]
    assert len(ours) > 5
    assert [place for place in ours if not (ROOT / place).exists()] == []


def test_the_page_of_compiled_programs_is_what_its_json_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JITNEY_COMPILED", raising=False)
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "benchmarks"))
    script = runpy.run_path(str(ROOT / "docs" / "benchmarks" / "compiled_programs.py"))
    page = (ROOT / "docs" / "benchmarks" / "compiled_programs.md").read_text()
    assert script["table"](script["kept_facts"]()) == page


def test_the_pages_are_what_their_files_say(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "benchmarks"))
    script = runpy.run_path(str(ROOT / "docs" / "benchmarks" / "tables.py"))
    assert {page: page.read_text() for page in script["written"]()} == script["written"]()
    shown = {name for page in script["PAGES"] for name in MARK.findall(page.read_text())}
    files = {file.name for file in script["HERE"].glob("over_http*.json")}
    assert shown == files | {"device_h200.json", "model_families.json"}
