"""Writes the tables of the documentation's pages from the JSON files beside this one.

python docs/benchmarks/tables.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import device_tables
import model_families

from jitney.engine.lab.bench.peers import markdown

HERE = Path(__file__).parent
DOCS, DEVICE = HERE.parent, HERE / "device_h200.json"
PAGES = (
    DOCS / "measurements.md",
    DOCS / "devices.md",
    DOCS / "models.md",
    DOCS.parent / "README.md",
)
#: `<!-- FILE.json VIEW -->`, the table, `<!-- end -->`; VIEW: one of `device_tables.VIEWS`.
_TABLE = re.compile(r"(<!-- (\w+\.json)(?: (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """The page with every marked table filled from its file."""
    return _TABLE.sub(lambda found: f"{found[1]}{_table(found[2], found[3])}{found[4]}", page)


def _table(name: str, view: str | None) -> str:
    """The table of a file between empty lines. view: for a device's file; the other files are
    model_families.json and those of `jitney bench peers --json`.
    """
    content = json.loads((HERE / name).read_text())
    if view is not None:
        lines = device_tables.VIEWS[view](content)
    elif name == model_families.FILE.name:
        lines = model_families.table(content)
    else:
        return f"\n{markdown(content)}\n"
    return "\n".join(["", *lines, "", ""])


def written() -> dict[Path, str]:
    """The new content of every page with tables from files."""
    pages = {page: filled(page.read_text()) for page in PAGES}
    pages[DEVICE.with_suffix(".md")] = device_tables.page(json.loads(DEVICE.read_text()))
    return pages


if __name__ == "__main__":
    for page, text in written().items():
        page.write_text(text)
