"""The longest text that a token stands for: no text has fewer tokens than that says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jitney.engine.core.text.fast_tokenizers import byte_characters
from jitney.engine.core.text.token_lengths import longest_token

#: Letters and the accents that are composed with them, runs that are tokens, and what none is.
_TEXTS = st.text(st.sampled_from("ae -\u0301\u0308\u0345ΐᾂ中\N{PILE OF POO}"), max_size=200)
_RUN = "-" * 64


def byte_level(*, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """GPT-2's kind: all bytes, and runs of dashes as one token."""
    pieces = [_RUN[: 1 << power] for power in range(1, 7)]
    vocabulary = [*byte_characters().values(), *pieces]
    merges = [(piece[: len(piece) // 2], piece[: len(piece) // 2]) for piece in pieces]
    model = models.BPE({text: id for id, text in enumerate(vocabulary)}, merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def with_fallback(*, lost: bool = False) -> Tokenizer:
    """SentencePiece's kind: characters, and bytes for the others. lost: one of these is missing."""
    tokens = ["<unk>", "▁", "a", "e", "-", "▁▁"]
    tokens += [f"<0x{byte:02X}>" for byte in range(256) if not lost or byte != 0xCC]
    model = models.BPE(
        {text: id for id, text in enumerate(tokens)},
        [("▁", "▁")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.NFC()]
    )
    return tokenizer


BOUNDED = {
    "bytes": byte_level(),
    "composed bytes": byte_level(normalizer=normalizers.NFC()),
    "compatible bytes": byte_level(normalizer=normalizers.NFKC()),
    "lower case": byte_level(normalizer=normalizers.Lowercase()),
    "fallback": with_fallback(),
}


@pytest.mark.parametrize("kind", BOUNDED)
@given(text=_TEXTS)
@settings(max_examples=150, deadline=None)
def test_no_text_has_fewer_tokens(kind: str, text: str):
    tokenizer = BOUNDED[kind]
    longest = longest_token(tokenizer)
    assert longest is not None
    assert len(tokenizer.encode(text).ids) >= math.ceil(len(text) / longest)


def test_it_is_as_long_as_the_vocabularys_longest_entry():
    assert longest_token(byte_level()) == len(_RUN)
    assert len(byte_level().encode(_RUN * 5).ids) == 5, "the bound is reached"
    assert longest_token(byte_level(normalizer=normalizers.NFC())) == 96


def added(**sides: bool) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<mark>", special=True, **sides)])
    return tokenizer


def removing() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("-", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (byte_level(normalizer=normalizers.Replace("-", "")), "-"),
        (byte_level(normalizer=normalizers.Strip()), " "),
        (byte_level(normalizer=normalizers.BertNormalizer()), "\0"),
        (byte_level(normalizer=normalizers.Sequence([normalizers.StripAccents()])), "\u0301"),
        (removing(), "-"),
        (with_fallback(lost=True), "\u0301"),
        (added(rstrip=True), " "),
        (added(lstrip=True), " "),
        (Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")), "a"),
        (Tokenizer(models.Unigram([("<unk>", 0.0)], 0)), "a"),
    ],
    ids=lambda value: "" if isinstance(value, Tokenizer) else ascii(value),
)
def test_where_characters_are_lost_there_is_no_bound(tokenizer: Tokenizer, text: str):
    """As a text shows that becomes a token or two however long it is."""
    assert longest_token(tokenizer) is None
    for mark in ("", "<mark>"):
        whole = tokenizer.encode(mark + text * 5000 + mark).ids
        if len(whole) <= 3:
            return
    raise AssertionError("the text is as long as its tokens")


def test_one_token_for_each_unknown_character_is_a_bound():
    model = models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>")
    assert longest_token(Tokenizer(model)) == len("<unk>")
    assert len(Tokenizer(model).encode("xyz").ids) == 3
