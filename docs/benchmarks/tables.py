"""Writes the tables of docs/measurements.md anew from the JSON beside this file.

python docs/benchmarks/tables.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from jitney.engine.lab.bench.peers import PeerReport

HERE = Path(__file__).parent
PAGE = HERE.parent / "measurements.md"
#: `<!-- FILE.json -->`, the table, `<!-- end -->`.
_TABLE = re.compile(r"(<!-- (\w+\.json) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """The page with every table between its marks as its file has it."""
    return _TABLE.sub(lambda found: f"{found[1]}{_table(found[2])}{found[3]}", page)


def _table(name: str) -> str:
    """The table of a file that `jitney bench peers --json` wrote, with an empty line around it."""
    report = PeerReport(json.loads((HERE / name).read_text()))
    return f"\n{report.markdown()}\n"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
