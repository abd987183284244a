"""Folders of the tiny encoders whose reference numbers transformers computed: weights drawn again
from their names, and tokenizers of words.
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
#: The script that made the reference numbers; `tests/support` is on the path.
SCRIPT = importlib.import_module("make_reference_encoders")
#: Architecture -> its special tokens: first token, last token, and template of pairs.
_SPECIALS = {
    "Bert": ("[CLS]", "[SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "XLMRoberta": ("<s>", "</s>", "<s> $A </s> </s> $B </s>"),
}


def tensors_of(architecture: str) -> dict[str, np.ndarray]:
    """The weights of the transformers model."""
    shapes = REFERENCE[architecture]["shapes"]
    return {name: SCRIPT.random_tensor(name, tuple(shape)) for name, shape in shapes.items()}


def tokenizer_of(architecture: str) -> Tokenizer:
    """A tokenizer in which token i is the word t<i>, except for the ends of a text."""
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
    """Write a folder with the files of published models. pooling: cls or mean, in the files of
    sentence-transformers; None: without these files. extra: tensors beside the model's own. config:
    entries of config.json that differ.
    """
    folder.mkdir(exist_ok=True)
    save_file(tensors_of(architecture) | (extra or {}), folder / "model.safetensors")
    settings = REFERENCE[architecture]["config"] | config
    (folder / "config.json").write_text(json.dumps(settings))
    tokenizer = tokenizer_of(architecture)
    # Published tokenizers truncate and pad texts by default.
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
    """Write modules.json and the files that it names. more: classes of further modules."""
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
