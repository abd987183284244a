"""Writes the tables of the documentation's pages anew from the JSON beside this file.

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
    """The page with every table between its marks as its file has it."""
    return _TABLE.sub(lambda found: f"{found[1]}{_table(found[2], found[3])}{found[4]}", page)


def _table(name: str, view: str | None) -> str:
    """The table of a file with an empty line around it. view: of a device's file; others are
    model_families.json and what `jitney bench peers --json` wrote.
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
    """All pages that are written from files, as they should be."""
    pages = {page: filled(page.read_text()) for page in PAGES}
    pages[DEVICE.with_suffix(".md")] = device_tables.page(json.loads(DEVICE.read_text()))
    return pages


if __name__ == "__main__":
    for page, text in written().items():
        page.write_text(text)
