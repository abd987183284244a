"""The committed logits of tiny models, and the script that made them, which draws the same random
tensors again for the tests.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from places import DATA as FOLDER
from places import SUPPORT
from safetensors.flax import save_file  # the numpy version does not support fp8
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

DATA = json.loads((FOLDER / "reference_logits.json").read_text())
#: Settings of an engine that cuts prompts into chunks, which cross pages.
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_seats": 4,
    "seat_buckets": [4],
    "token_budget": 16,
    "token_buckets": [16],
    "page_size": 8,
    "pages": 120,
    "context": 0,
}


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location(
        "make_reference_logits", SUPPORT / "make_reference_logits.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()


def as_stored(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors as the script saves them: those with block scales in fp8, times 64."""
    in_fp8 = {name for name in tensors if f"{name}_scale_inv" in tensors}
    return {
        name: (64 * tensor).astype(ml_dtypes.float8_e4m3fn) if name in in_fp8 else tensor
        for name, tensor in tensors.items()
    }


def weights_of(case: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a case, drawn as the script draws them."""
    spread = case.get("embed_spread", 1.0)
    shapes = case["shapes"].items()
    return {name: SCRIPT.random_tensor(name, tuple(shape), spread) for name, shape in shapes}


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> str:
    """A model folder of these tensors; token i is the word t<i>."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")  # pyright: ignore[reportArgumentType]
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"t{i}": i for i in range(SCRIPT.VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))
    return str(folder)
