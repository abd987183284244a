"""Fast tokenizers from a model folder, or of `tiny-random`. Imports no jax."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonValue
from jitney.engine.core.weights.checkpoints.files import MAX_TOKENIZER_BYTES, read_json, safe_file
from jitney.engine.core.weights.checkpoints.sources import ModelSource

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer
    from transformers import PreTrainedTokenizerFast

#: Most pieces of a post-processor; models have up to about twenty.
_MOST_PIECES = 256
#: Folder of named chat templates in a model folder.
_MORE_TEMPLATES = "additional_chat_templates"
_TINY_SPECIALS = ("<|unk|>", "<|bos|>", "<|im_start|>", "<|im_end|>")
_TINY_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass
class FastTokenizer:
    """A Rust tokenizer, and further facts from the model's files."""

    rust: RustTokenizer
    #: By name, such as "bos_token".
    special_tokens: dict[str, str]
    #: The chat template, or all by name if there are several.
    chat_template: str | dict[str, str] | None = None

    @classmethod
    def made(
        cls,
        rust: RustTokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | dict[str, str] | None,
    ) -> FastTokenizer:
        """A tokenizer built here; the texts of special tokens in a prompt become these tokens."""
        from tokenizers import AddedToken

        added = {token.content for token in rust.get_added_tokens_decoder().values()}
        missing = [text for text in special_tokens.values() if text not in added]
        rust.add_special_tokens([AddedToken(text, special=True) for text in missing])
        return cls(rust, dict(special_tokens), chat_template)

    def as_transformers(self) -> PreTrainedTokenizerFast:
        """transformers' wrapper of a copy."""
        own = _fast_class()
        return own(
            tokenizer_object=self.rust, chat_template=self.chat_template, **self.special_tokens
        )


def fast_tokenizer(source: ModelSource) -> FastTokenizer:
    """The tokenizer of a model. Raises ModelError."""
    match source.kind:
        case "tiny":
            return _tiny_fast()
        case "gguf":
            from jitney.engine.core.text.gguf_tokenizers import fast_from_gguf

            return fast_from_gguf(source.path)
        case "hf":
            return _fast_from_folder(Path(source.path))


def _fast_class() -> type[PreTrainedTokenizerFast]:
    """transformers' wrapper of a Rust tokenizer, without its PyTorch warning. Only folders need it:
    importing it takes a second and a half of CPU time.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast


def byte_characters() -> dict[int, str]:
    """GPT-2's map of bytes to characters: printable ones to themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    spelling = dict(zip(printable, map(chr, printable), strict=True))
    spelling |= dict(zip(others, map(chr, range(256, 512)), strict=False))
    return spelling


def _fast_from_folder(folder: Path) -> FastTokenizer:
    """The tokenizer of tokenizer.json and the other files of its folder. Raises ModelError.

    Always of the generic class: the class in tokenizer_config.json would rebuild parts from its
    defaults, and custom code is never run.
    """
    path = safe_file(folder, "tokenizer.json", missing_ok=True)
    if path is None:
        raise ModelError(
            "the model folder has no tokenizer.json; save it with transformers' fast tokenizer"
        )
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ModelError(f"tokenizer.json is larger than {MAX_TOKENIZER_BYTES >> 20} MiB")
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        read_json(folder, name, missing_ok=True)
    safe_file(folder, "chat_template.jinja", missing_ok=True)
    for file in (folder / _MORE_TEMPLATES).glob("*.jinja"):
        safe_file(folder / _MORE_TEMPLATES, file.name)
    try:
        fast: Any = _fast_class().from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # from OSError to the Rust parser's bare Exception
        raise ModelError(f"the model's tokenizer cannot be read: {reason_of(error)}") from error
    _check_post_processor(fast.backend_tokenizer)
    named = {name: str(token) for name, token in fast.special_tokens_map.items()}
    return FastTokenizer(fast.backend_tokenizer, named, fast.chat_template)


def _check_post_processor(rust: RustTokenizer) -> None:
    """Raise ModelError if the post-processor has far more pieces than any model's."""
    if rust.post_processor is None:
        return
    pieces = _count_pieces(json.loads(rust.post_processor.__getstate__()))
    if pieces > _MOST_PIECES:
        raise ModelError(
            f"tokenizer.json: post_processor has {pieces:,} pieces, at most {_MOST_PIECES} are "
            "allowed; replace the file by the model's original"
        )


def _count_pieces(value: JsonValue) -> int:
    """Total length of all lists in a JSON value: processors, template parts and their tokens."""
    inside = [*value.values()] if isinstance(value, dict) else value
    if not isinstance(inside, list):
        return 0
    return (len(value) if isinstance(value, list) else 0) + sum(map(_count_pieces, inside))


def reason_of(error: Exception) -> str:
    """An error's text in one line."""
    return " ".join(str(error).split())[:200]


def _tiny_fast() -> FastTokenizer:
    """A tokenizer of 256 bytes, 4 special tokens and 252 pairs of letters."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as RustTokenizer

    pairs = list(itertools.product("etaoinshrdlucm", "etaoinshrdlucmgpyk"))
    tokens = [character for _, character in sorted(byte_characters().items())]
    tokens += _TINY_SPECIALS
    tokens += map("".join, pairs)
    rust = RustTokenizer(models.BPE(vocab=ids_of(tokens), merges=pairs))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True, normalized=False) for token in _TINY_SPECIALS]
    rust.add_special_tokens(specials)
    named = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "unk_token": "<|unk|>"}
    return FastTokenizer.made(rust, named, _TINY_TEMPLATE)


def ids_of(tokens: list[str]) -> dict[str, int]:
    return dict(zip(tokens, range(len(tokens)), strict=True))
