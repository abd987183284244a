"""Fast tokenizers from a model folder, from GGUF metadata, or of `tiny-random`. Imports no jax."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonObject, JsonValue
from jitney.engine.core.text.gguf_words import Words, words_of
from jitney.engine.core.weights.checkpoints.files import MAX_TOKENIZER_BYTES, read_json, safe_file
from jitney.engine.core.weights.checkpoints.gguf import GGUFFile
from jitney.engine.core.weights.checkpoints.gguf_config import CONTROL, USER_DEFINED
from jitney.engine.core.weights.checkpoints.sources import ModelSource

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer
    from transformers import PreTrainedTokenizerFast

#: GGUF's token type of the unknown token.
_UNKNOWN = 2
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
            return _fast_from_gguf(GGUFFile(source.path).metadata)
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
        raise ModelError(f"the model's tokenizer cannot be read: {_reason(error)}") from error
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


def _reason(error: Exception) -> str:
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
    rust = RustTokenizer(models.BPE(vocab=_ids(tokens), merges=pairs))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True, normalized=False) for token in _TINY_SPECIALS]
    rust.add_special_tokens(specials)
    named = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "unk_token": "<|unk|>"}
    return FastTokenizer.made(rust, named, _TINY_TEMPLATE)


def _ids(tokens: list[str]) -> dict[str, int]:
    return dict(zip(tokens, range(len(tokens)), strict=True))


def _fast_from_gguf(metadata: JsonObject) -> FastTokenizer:
    """The tokenizer that GGUF key-values describe. Raises ModelError for unknown kinds."""
    tokens = _tokens_of(metadata)
    try:
        rust = _full_rust(metadata, tokens)
        named = _named_tokens(metadata, len(tokens))
    except ModelError:
        raise
    except Exception as error:  # the Rust constructors raise bare Exceptions
        raise ModelError(f"GGUF: the tokenizer cannot be built: {_reason(error)}") from error
    special_tokens = {f"{name}_token": tokens[id] for name, id in named.items()}
    return FastTokenizer.made(rust, special_tokens, _gguf_templates(metadata))


def _gguf_templates(metadata: JsonObject) -> str | dict[str, str] | None:
    """The chat template, or all by name if there are several."""
    keys = {name: f"tokenizer.chat_template.{name}" for name in _gguf_template_names(metadata)}
    keys["default"] = "tokenizer.chat_template"
    texts = {name: metadata.get(key) for name, key in keys.items()}
    templates = {name: text for name, text in texts.items() if isinstance(text, str)}
    return templates.get("default") if len(templates) < 2 else templates


def _gguf_template_names(metadata: JsonObject) -> list[str]:
    """Names of the templates besides the default one."""
    names = metadata.get("tokenizer.chat_templates")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _full_rust(metadata: JsonObject, tokens: list[str]) -> RustTokenizer:
    rust, add_bos = _gguf_rust(metadata, tokens)
    _add_special_tokens(rust, metadata, tokens)
    _add_template(rust, metadata, tokens, add_bos)
    return rust


def _tokens_of(metadata: JsonObject) -> list[str]:
    """The vocabulary, by id."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens or not isinstance(tokens, list) or set(map(type, tokens)) != {str}:
        raise ModelError("GGUF: tokenizer.ggml.tokens must be a list of strings")
    if len(set(tokens)) != len(tokens):
        raise ModelError("GGUF: tokenizer.ggml.tokens holds a token twice")
    return tokens


def _gguf_rust(metadata: JsonObject, tokens: list[str]) -> tuple[RustTokenizer, bool]:
    """(tokenizer without special tokens, whether texts begin with BOS by default)."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        words = words_of(metadata)
        return _byte_level_bpe(metadata, tokens, words), words.begins
    if kind == "llama":
        return _sentencepiece_bpe(metadata, tokens, _merges_by_score(metadata, tokens)), True
    if kind == "gemma4":
        return _sentencepiece_bpe(metadata, tokens, _merges(metadata)), True
    raise ModelError(
        f"GGUF: tokenizer.ggml.model {str(kind)[:40]!r} is not supported; known: gpt2, llama, "
        "gemma4"
    )


def _byte_level_bpe(metadata: JsonObject, tokens: list[str], words: Words) -> RustTokenizer:
    """GPT-2 style BPE over bytes."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, normalizers

    rust = RustTokenizer(
        models.BPE(vocab=_ids(tokens), merges=_merges(metadata), ignore_merges=words.whole_words)
    )
    rust.pre_tokenizer = words.splitter()
    if words.compose:
        rust.normalizer = normalizers.NFC()
    rust.decoder = decoders.ByteLevel()
    return rust


def _merges(metadata: JsonObject) -> list[tuple[str, str]]:
    """Pairs of tokens, those first that merge first."""
    pairs = [merge.partition(" ") for merge in metadata.get("tokenizer.ggml.merges", [])]
    return [(left, right) for left, _, right in pairs]


def _sentencepiece_bpe(
    metadata: JsonObject, tokens: list[str], merges: list[tuple[str, str]]
) -> RustTokenizer:
    """SentencePiece BPE with byte fallback."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import models

    unknown = _named_tokens(metadata, len(tokens)).get("unk", 0)
    model = models.BPE(
        vocab=_ids(tokens),
        merges=merges,
        fuse_unk=True,
        unk_token=tokens[unknown],
        byte_fallback=True,
    )
    rust = RustTokenizer(model)
    _mark_spaces(rust, prefix=metadata.get("tokenizer.ggml.add_space_prefix", True))
    return rust


def _mark_spaces(rust: RustTokenizer, *, prefix: bool) -> None:
    """Mark spaces as SentencePiece does. prefix: add one before a text."""
    from tokenizers import decoders, normalizers

    before: list[Any] = [normalizers.Replace(" ", "▁")]
    after: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        before.insert(0, normalizers.Prepend("▁"))
        after.append(decoders.Strip(" ", 1, 0))
    rust.normalizer = normalizers.Sequence(before)
    rust.decoder = decoders.Sequence(after)


def _merges_by_score(metadata: JsonObject, tokens: list[str]) -> list[tuple[str, str]]:
    """All pairs of tokens that join to a third, best-scored result first, then by left token."""
    scores, vocab = metadata.get("tokenizer.ggml.scores"), _ids(tokens)
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError("GGUF: tokenizer.ggml.scores must give each token a score")
    pairs = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                pairs.append((-score, vocab[token], vocab[left], left, right))
    return [(left, right) for *_, left, right in sorted(pairs)]


def _named_tokens(metadata: JsonObject, size: int) -> dict[str, int]:
    """Ids of bos, eos, unk and pad, if present. Raises ModelError if outside the vocabulary."""
    named = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        id = _token_id(metadata, f"tokenizer.ggml.{key}_token_id", size)
        if id is not None:
            named[name] = id
    return named


def _token_id(metadata: JsonObject, key: str, size: int) -> int | None:
    id = metadata.get(key)
    if id is not None and (type(id) is not int or not 0 <= id < size):
        raise ModelError(f"GGUF: {key} lies outside the vocabulary of {size}")
    return id


def _add_special_tokens(rust: RustTokenizer, metadata: JsonObject, tokens: list[str]) -> None:
    """Make control tokens special, and match user-defined ones before all else."""
    from tokenizers import AddedToken

    control, shown = [], []
    for token, kind in zip(tokens, _token_kinds(metadata, len(tokens)), strict=True):
        if kind in (_UNKNOWN, CONTROL):
            control.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            shown.append(AddedToken(token, normalized=False))
    rust.add_special_tokens(control)
    rust.add_tokens(shown)


def _token_kinds(metadata: JsonObject, size: int) -> list[Any]:
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != size:
        raise ModelError("GGUF: tokenizer.ggml.token_type must give each token a type")
    return kinds


def _add_template(
    rust: RustTokenizer, metadata: JsonObject, tokens: list[str], add_bos: bool
) -> None:
    """Add BOS before and EOS after a text if the file, or its kind's default, says so."""
    from tokenizers.processors import TemplateProcessing

    named = _named_tokens(metadata, len(tokens))
    bos, eos = named.get("bos"), named.get("eos")
    single = ["$A"]
    special: dict[str, int] = {}
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", add_bos):
        single.insert(0, tokens[bos])
        special[tokens[bos]] = bos
    if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False):
        single.append(tokens[eos])
        special[tokens[eos]] = eos
    if special:
        rust.post_processor = TemplateProcessing(
            single=single, special_tokens=list(special.items())
        )
