"""The longest text that one token can stand for, so that texts too long for a context are refused
without tokenising them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jitney.engine.common.requests import JsonDict
from jitney.engine.core.text.fast_tokenizers import byte_characters

#: Normalizers and pre-tokenizers that make no text shorter.
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
#: Pre-tokenizers that make none shorter unless they remove what they split by.
_SPLITTING = frozenset({"Punctuation", "Split"})
#: Normalizers that make one character of several, as of a letter and its accents.
_COMPOSING = frozenset({"NFC", "NFKC"})
#: Composed, at most four characters are one (U+1F82), and at most three are two bytes (U+0390).
_COMPOSED_CHARACTERS, _COMPOSED_BYTES = 4.0, 1.5
#: Bytes that UTF-8 never has.
_NEVER = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})


def longest_token(tokenizer: Any) -> int | None:
    """Most characters of a text that become one token of a `tokenizers.Tokenizer`. None: any
    number, since it leaves out blanks, accents or unknown characters.
    """
    parts = [*_parts(tokenizer.normalizer), *_parts(tokenizer.pre_tokenizer)]
    is_byte_level = any(part["type"] == "ByteLevel" for part in parts)
    if not all(_keeps(part) for part in parts) or not _knows_all(tokenizer, is_byte_level):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # such a token takes the blanks beside it along
    # In a byte-level vocabulary a token has as many characters as bytes: no fewer than it means.
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
    if any(part["type"] in _COMPOSING for part in parts):
        longest *= _COMPOSED_BYTES if is_byte_level else _COMPOSED_CHARACTERS
    return int(longest)


def _parts(component: Any) -> Iterator[JsonDict]:
    """A normalizer or pre-tokenizer in its JSON form, a sequence by its members."""
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
    """Whether no text gets shorter by it, but for composing characters."""
    kind = part["type"]
    if kind == "Replace":
        replaced = part["pattern"].get("String")
        return replaced is not None and len(replaced) <= len(part["content"])
    if kind in _SPLITTING:
        return part["behavior"] != "Removed"
    return kind in _KEEPING or kind in _COMPOSING


def _knows_all(tokenizer: Any, is_byte_level: bool) -> bool:
    """Whether every character is at least one token."""
    model = tokenizer.model
    if type(model).__name__ != "BPE":
        return False  # one unknown token stands for a whole word, or for a run of characters
    spelled = byte_characters()
    if not is_byte_level and model.byte_fallback:
        spelled = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    if is_byte_level or model.byte_fallback:
        texts = [text for byte, text in spelled.items() if byte not in _NEVER]
        if all(tokenizer.token_to_id(text) is not None for text in texts):
            return True
    unknown = model.unk_token
    is_known = unknown is not None and tokenizer.token_to_id(unknown) is not None
    return is_known and not model.fuse_unk
