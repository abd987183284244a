"""Fast tokenizers from the metadata of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonObject
from jitney.engine.core.text.fast_tokenizers import (
    FastTokenizer,
    ids_of,
    reason_of,
)
from jitney.engine.core.text.gguf_words import Words, words_of
from jitney.engine.core.weights.checkpoints.gguf import GGUFFile
from jitney.engine.core.weights.checkpoints.gguf_config import CONTROL, USER_DEFINED

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

#: GGUF's token type of the unknown token.
_UNKNOWN = 2


def fast_from_gguf(path: str) -> FastTokenizer:
    """The tokenizer in a file. Raises ModelError."""
    return _fast_from_gguf(GGUFFile(path).metadata)


def _fast_from_gguf(metadata: JsonObject) -> FastTokenizer:
    """The tokenizer that GGUF key-values describe. Raises ModelError for unknown kinds."""
    tokens = _tokens_of(metadata)
    try:
        rust, add_bos = _gguf_rust(metadata, tokens)
        _add_special_tokens(rust, metadata, tokens)
        _add_template(rust, metadata, tokens, add_bos)
        named = _named_tokens(metadata, len(tokens))
    except ModelError:
        raise
    except Exception as error:  # the Rust constructors raise bare Exceptions
        raise ModelError(f"GGUF: the tokenizer cannot be built: {reason_of(error)}") from error
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
        models.BPE(vocab=ids_of(tokens), merges=_merges(metadata), ignore_merges=words.whole_words)
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
        vocab=ids_of(tokens),
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
    scores, vocab = metadata.get("tokenizer.ggml.scores"), ids_of(tokens)
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

    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ModelError("GGUF: tokenizer.ggml.token_type must give each token a type")
    control, shown = [], []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_UNKNOWN, CONTROL):
            control.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            shown.append(AddedToken(token, normalized=False))
    rust.add_special_tokens(control)
    rust.add_tokens(shown)


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
