"""Folders of tiny encoders whose numbers transformers computed: weights that are drawn anew, and
tokenizers of words.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from places import DATA
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

REFERENCE: dict[str, Any] = json.loads((DATA / "reference_encoders.json").read_text())
#: The script that made them; `tests/support` is on the path.
SCRIPT = importlib.import_module("make_reference_encoders")
#: Each architecture's special tokens: what begins a text, what ends it, and its template of pairs.
_SPECIALS = {
    "Bert": ("[CLS]", "[SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "XLMRoberta": ("<s>", "</s>", "<s> $A </s> </s> $B </s>"),
}


def tensors_of(architecture: str) -> dict[str, np.ndarray]:
    """The weights that transformers had."""
    shapes = REFERENCE[architecture]["shapes"]
    return {name: SCRIPT.random_tensor(name, tuple(shape)) for name, shape in shapes.items()}


def tokenizer_of(architecture: str) -> Tokenizer:
    """Token i is the word t<i>, but for those that begin and end a text."""
    is_bert = architecture.startswith("Bert")
    first, separator, pair = _SPECIALS["Bert" if is_bert else "XLMRoberta"]
    tokens = SCRIPT.BERT_TOKENS if is_bert else SCRIPT.XLM_TOKENS
    words = {f"t{id}": id for id in range(SCRIPT.SIZES["vocab_size"])}
    special = {first: tokens["first"], separator: tokens["separator"]}
    words = {word: id for word, id in words.items() if id not in special.values()} | special
    made = Tokenizer(WordLevel(words, unk_token="t5"))
    made.pre_tokenizer = WhitespaceSplit()
    made.add_special_tokens([AddedToken(text, special=True) for text in special])
    made.post_processor = TemplateProcessing(
        single=f"{first} $A {separator}", pair=pair, special_tokens=list(special.items())
    )
    return made


def write_encoder(
    folder: Path,
    architecture: str,
    *,
    pooling: str | None = None,
    extra: dict[str, np.ndarray] | None = None,
    **config: Any,
) -> Path:
    """A folder as published models have it. pooling: cls or mean, as sentence-transformers says
    it; None: it is no such folder. extra: tensors beside the model's own. config: what its
    config.json says otherwise.
    """
    folder.mkdir(exist_ok=True)
    save_file(tensors_of(architecture) | (extra or {}), folder / "model.safetensors")
    settings = REFERENCE[architecture]["config"] | config
    (folder / "config.json").write_text(json.dumps(settings))
    tokenizer = tokenizer_of(architecture)
    # Published tokenizers cut and fill texts up unless they are told not to.
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    if pooling is not None:
        write_pooling(
            folder,
            {
                "pooling_mode_cls_token": pooling == "cls",
                "pooling_mode_mean_tokens": pooling == "mean",
            },
        )
    return folder


def write_pooling(folder: Path, config: dict[str, Any], *more: str) -> None:
    """modules.json and what it names. more: classes of further modules."""
    kinds = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling"]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": "1_Pooling" if number == 1 else "",
            "type": kind,
        }
        for number, kind in enumerate([*kinds, *more])
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
