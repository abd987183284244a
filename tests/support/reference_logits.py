"""The committed logits of tiny models, and the script that made them, whose random tensors the
tests make again.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any

from places import DATA as FOLDER
from places import SUPPORT

DATA = json.loads((FOLDER / "reference_logits.json").read_text())


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location(
        "make_reference_logits", SUPPORT / "make_reference_logits.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()
