"""Token ids of the beginning of a text."""

from __future__ import annotations

from typing import Protocol


class _Encoder(Protocol):
    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...


def first_tokens(tokenizer: _Encoder, text: str, most: int) -> list[int]:
    """The ids of a text, at most `most`, with the special tokens that its model puts around a text:
    what is left out is the end of the text itself. Raises RequestError.
    """
    ids = tokenizer.encode(text)
    if len(ids) <= most:
        return ids
    own = tokenizer.encode(text, add_special_tokens=False)
    n_special = len(ids) - len(own)
    start = next((at for at in range(n_special + 1) if ids[at : at + len(own)] == own), 0)
    kept = own[: max(0, most - n_special)]
    return ids[:start] + kept + ids[start + len(own) :]
