"""A tokenizer of 40 tokens for the fake device, and its text."""

from __future__ import annotations

from functools import cache

from fakes import EOS, VOCAB
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

#: By token id; token 0 ends a text.
CHARACTERS = 'abcdefghijklmnopqrstu0123456789{}[]":,-'
END = "<end>"


@cache
def tokenizer_json() -> str:
    """As the `tokenizers` library writes it."""
    assert (0, 1 + len(CHARACTERS)) == (EOS, VOCAB)
    vocabulary = {END: 0} | {character: id for id, character in enumerate(CHARACTERS, 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return tokenizer.to_str()


def text_of(tokens: list[int]) -> str:
    """The text of output tokens, without the one that ends it."""
    return "".join(CHARACTERS[token - 1] for token in tokens if token != EOS)
