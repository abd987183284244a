"""Tokenizer files that break the library which reads them: the server says which file it is, and
goes on living to say it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grammars import tokenizer_json

from jitney.engine.common.errors import ModelError
from jitney.engine.core.text.tokenizer import Tokenizer
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.server import equipment

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 0,
}
#: Each makes a thousand of one.
REPLACE = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 1000}


def endless_normalizer(tokenizer: dict[str, Any]) -> None:
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [REPLACE] * 5}


def endless_decoder(tokenizer: dict[str, Any]) -> None:
    decoders = [tokenizer["decoder"], *[REPLACE] * 5]
    tokenizer["decoder"] = {"type": "Sequence", "decoders": decoders}


def broken_charsmap(tokenizer: dict[str, Any]) -> None:
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "/////wEAAAA="}
    tokenizer["normalizer"] = charsmap


def many_added_tokens(tokenizer: dict[str, Any]) -> None:
    """Which take 17 s of processor time."""
    like = tokenizer["added_tokens"][0] | {"special": False}
    tokenizer["added_tokens"] += [
        like | {"id": 100 + number, "content": f"<added {number}>"} for number in range(200_000)
    ]


def model(folder: Path, change: Callable[[dict[str, Any]], None]) -> ModelSource:
    """A model folder without weights, whose tokenizer is changed."""
    tokenizer = json.loads(tokenizer_json())
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return ModelSource.resolve(str(folder))


def test_a_good_tokenizer_is_used(tmp_path: Path):
    source = model(tmp_path, lambda _: None)
    asyncio.run(equipment._try_tokenizer(source))
    assert Tokenizer.load(source).encode("a")


@pytest.mark.parametrize(
    "change", [endless_normalizer, endless_decoder, broken_charsmap, many_added_tokens]
)
def test_one_that_takes_too_much_or_breaks_the_library_is_an_error_of_its_file(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(equipment, "_TRIAL_CPU_S", 2)
    monkeypatch.setattr(equipment, "_TRIAL_GIB", 1)
    with pytest.raises(ModelError, match=str(tmp_path / "tokenizer.json")):
        asyncio.run(equipment._try_tokenizer(model(tmp_path, change)))


def test_one_that_waits_for_ever_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(equipment, "_TRIAL_S", 0.0)
    with pytest.raises(ModelError, match=str(tmp_path / "tokenizer.json")):
        asyncio.run(equipment._try_tokenizer(model(tmp_path, lambda _: None)))


def test_an_error_that_can_be_told_is_left_to_who_reads_the_file_next(tmp_path: Path):
    source = model(tmp_path, lambda _: None)
    (tmp_path / "tokenizer.json").write_text("{")
    asyncio.run(equipment._try_tokenizer(source))
    with pytest.raises(ModelError, match="tokenizer cannot be read"):
        Tokenizer.load(source)
