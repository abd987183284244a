"""Tokens that end a turn by their text: a table of families, GGUF files and folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from gguf_files import close, open_writer
from hypothesis import given
from hypothesis import strategies as st

from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.gguf import GGUFFile
from jitney.engine.core.weights.checkpoints.gguf_config import _turn_ends
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.checkpoints.turn_ends import turn_ends

CHATML = "{{ '<|im_start|>' + role + '\n' + content + '<|im_end|>\n' }}"
QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|fim_prefix|>"]
LLAMA3 = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
]
LLAMA2 = ["<unk>", "<s>", "</s>"]
GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
HARMONY = [
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
]


class Case(NamedTuple):
    """The control tokens of a vocabulary, and what ends a turn of its model."""

    special: Sequence[str]
    #: Ends that its files name.
    named: Sequence[str]
    #: Those that are found beside them.
    found: Sequence[str] = ()
    template: str = ""
    #: Tokens that are matched whole but are no control tokens.
    others: Sequence[str] = ()


CASES = {
    # As they are published, with what a GGUF file (one end) or a folder (all) names.
    "SmolLM2": Case(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"], ["<|im_end|>"]),
    "Qwen2.5 and 3": Case(QWEN, ["<|im_end|>"], template=CHATML),
    "Qwen2.5 and 3, folder": Case(QWEN, ["<|im_end|>", "<|endoftext|>"], template=CHATML),
    "Llama 2, Mistral": Case(LLAMA2, ["</s>"], template="{{ '[INST] ' + content + '</s>' }}"),
    "Llama 3.1, folder": Case(LLAMA3, ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]),
    "Gemma, folder": Case(GEMMA, ["<eos>", "<end_of_turn>"]),
    "DeepSeek LLM": Case(
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"], ["<｜end▁of▁sentence｜>"]
    ),
    "DeepSeek Coder": Case(["<｜end▁of▁sentence｜>", "<|EOT|>"], ["<|EOT|>"]),
    # Files that name another end than that of a turn.
    "Qwen's base": Case(QWEN, ["<|endoftext|>"], ["<|im_end|>"]),
    "Llama 3.1": Case(LLAMA3, ["<|eot_id|>"], ["<|eom_id|>"]),
    "Llama 3, first files": Case(LLAMA3, ["<|end_of_text|>"], ["<|eom_id|>", "<|eot_id|>"]),
    "Gemma": Case(GEMMA, ["<eos>"], ["<end_of_turn>"]),
    "ChatML on Mistral": Case([*LLAMA2, "<|im_start|>", "<|im_end|>"], ["</s>"], ["<|im_end|>"]),
    "Phi-like": Case(["<|endoftext|>", "<|end|>", "<|user|>"], ["<|endoftext|>"], ["<|end|>"]),
    # In harmony's format <|end|> ends a message of an answer, not the answer.
    "harmony": Case(HARMONY, ["<|return|>"], ["<|call|>"], template="<|end|>"),
    # Documents' ends: where nothing else is known, or where the template writes them.
    "no end named": Case(QWEN[:2], [], ["<|endoftext|>"]),
    "an unknown end": Case(["<|endoftext|>", "#"], ["#"], ["<|endoftext|>"]),
    "written after a turn": Case(
        QWEN, ["<|im_end|>"], ["<|endoftext|>"], template="{{ content + '<|endoftext|>' }}"
    ),
    # Tokens that are no control tokens end a turn only where the template writes them.
    "user-defined": Case(LLAMA2, ["</s>"], ["<|im_end|>"], CHATML, ["<|im_end|>"]),
    "user-defined, not written": Case(LLAMA2, ["</s>"], others=["<|im_end|>"]),
}


@pytest.mark.parametrize("name", CASES)
def test_ends_of_families(name: str):
    case = CASES[name]
    ids = {text: id for id, text in enumerate([*case.special, *case.others])}
    special = {text: ids[text] for text in case.special}
    others = {text: ids[text] for text in case.others}
    named = {ids[text] for text in case.named}
    found = turn_ends(special, others, case.template, named)
    assert {*found} - named == {ids[text] for text in case.found}


def test_a_gguf_file_ends_a_turn_by_the_text(tmp_path: Path):
    """Only by control tokens, and by user-defined ones that the template writes."""
    path = tmp_path / "m.gguf"
    writer = open_writer(path, "llama", layers=1, size=8, inner=8, heads=1, kv_heads=1)
    writer.add_token_list(["a", "<|eot_id|>", "</s>", "<|im_end|>", "<|end|>", "<EOT>"])
    writer.add_token_types([1, 1, 3, 4, 4, 3])
    writer.add_chat_template(CHATML)
    close(writer)
    config = tiny_config()
    metadata = GGUFFile(path).metadata
    assert metadata["tokenizer.ggml.eos_token_id"] == 2
    assert _turn_ends(metadata, config) == [3, 5]
    del metadata["tokenizer.chat_template"]
    assert _turn_ends(metadata, config) == [5]


@given(
    tokens=st.none() | st.lists(st.sampled_from(["<|im_end|>", "</s>", 1, None, ["a"]])),
    kinds=st.none() | st.lists(st.sampled_from([3, 4, 1, "3", None, [3]])),
    template=st.sampled_from([None, CHATML, 7]),
)
def test_any_vocabulary_of_a_gguf_file_has_ends_within_the_model(tokens, kinds, template):
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.chat_template": template,
    }
    for id in _turn_ends(metadata, tiny_config()):
        assert tokens[id] in ("<|im_end|>", "</s>") and kinds[id] in (3, 4)


@pytest.mark.parametrize(
    ("template", "special", "ends"),
    [
        ("", True, (2, 9)),
        ("", False, (2,)),
        (CHATML, False, (2, 9)),
        (
            [{"name": "default", "template": "x"}, {"name": "tool_use", "template": CHATML}],
            False,
            (2, 9),
        ),
        ([1, {"name": "default"}], False, (2,)),
    ],
)
def test_a_folder_ends_a_turn_by_the_text(tmp_path: Path, template, special: bool, ends: tuple):
    sizes = dict(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(intermediate_size=128, max_position_embeddings=64, eos_token_id=2)
    config = {"architectures": ["LlamaForCausalLM"], **sizes}
    added = [{"content": "</s>", "id": 2, "special": True}]
    added += [{"content": "<|im_end|>", "id": 9, "special": special}]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert ModelSource.resolve(str(tmp_path)).config.eos_ids == ends
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert ModelSource.resolve(str(tmp_path)).config.eos_ids == (2, 9)
