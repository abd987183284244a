"""Bounds the text length of a token, to refuse texts too long for a context before tokenizing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jitney.engine.common.requests import JsonDict
from jitney.engine.core.text.fast_tokenizers import byte_characters

#: Normalizers and pre-tokenizers that never shorten a text.
_KEEPING = frozenset(
    {
        "ByteLevel",
        "Digits",
        "FixedLength",
        "Lowercase",
        "Metaspace",
        "NFD",
        "NFKD",
        "Prepend",
        "UnicodeScripts",
    }
)
#: Pre-tokenizers that shorten a text only if they remove separators.
_SPLITTING = frozenset({"Punctuation", "Split"})
#: Normalizers that compose characters, such as a letter and its accents.
_COMPOSING = frozenset({"NFC", "NFKC"})
#: At most four characters compose to one (U+1F82), and at most three to two bytes (U+0390).
_COMPOSED_CHARACTERS, _COMPOSED_BYTES = 4.0, 1.5
#: Bytes that never occur in UTF-8.
_NEVER = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})


def longest_token(tokenizer: Any) -> int | None:
    """Most characters that become one token of a `tokenizers.Tokenizer`; None: unbounded, since it
    drops blanks, accents or unknown characters.
    """
    parts = [*_parts(tokenizer.normalizer), *_parts(tokenizer.pre_tokenizer)]
    is_byte_level = any(part["type"] == "ByteLevel" for part in parts)
    if not all(_keeps(part) for part in parts) or not _knows_all(tokenizer, is_byte_level):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # such a token includes any number of adjacent blanks
    # A byte-level token has one character per byte, so at least one per character of its text.
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
    if any(part["type"] in _COMPOSING for part in parts):
        longest *= _COMPOSED_BYTES if is_byte_level else _COMPOSED_CHARACTERS
    return int(longest)


def _parts(component: Any) -> Iterator[JsonDict]:
    """The JSON of a normalizer or pre-tokenizer, with sequences flattened."""
    if component is None:
        return
    todo: list[JsonDict] = [json.loads(component.__getstate__())]
    while todo:
        part = todo.pop()
        if part["type"] == "Sequence":
            todo += part.get("normalizers", []) + part.get("pretokenizers", [])
        else:
            yield part


def _keeps(part: JsonDict) -> bool:
    """Whether it never shortens a text, except by composing characters."""
    kind = part["type"]
    if kind == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(pattern) <= len(part["content"])
    if kind in _SPLITTING:
        return part["behavior"] != "Removed"
    return kind in _KEEPING or kind in _COMPOSING


def _knows_all(tokenizer: Any, is_byte_level: bool) -> bool:
    """Whether every character becomes at least one token."""
    model = tokenizer.model
    if type(model).__name__ != "BPE":
        return False  # an unknown token may stand for a word or a run of characters
    byte_tokens = byte_characters()
    if not is_byte_level and model.byte_fallback:
        byte_tokens = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    if is_byte_level or model.byte_fallback:
        texts = [text for byte, text in byte_tokens.items() if byte not in _NEVER]
        if all(tokenizer.token_to_id(text) is not None for text in texts):
            return True
    unknown = model.unk_token
    has_unknown = unknown is not None and tokenizer.token_to_id(unknown) is not None
    return has_unknown and not model.fuse_unk
