"""Tokens that end a model's turn, found by their text; jax-free.

Files often name only the token that ends a document; an answer to a chat ends with another one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

#: Texts of tokens that end a turn, in every family that has them (llama.cpp, src/llama-vocab.cpp,
#: and DeepSeek-Coder's).
_TURN_ENDS = frozenset(
    (
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_turn|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<|EOT|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
    )
)
#: Texts of tokens that end a document, and a turn if the model has no token for that.
_DOCUMENT_ENDS = frozenset(
    ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>")
)
#: In OpenAI's harmony format these end a turn; `<|end|>` only ends one of its messages.
_HARMONY_ENDS = frozenset(("<|return|>", "<|call|>"))


def turn_ends(
    special: Mapping[str, int], others: Mapping[str, int], template: str, named: Collection[int]
) -> list[int]:
    """Ids of the tokens that end a turn by their text.

    special: control tokens by text. others: tokens matched whole, which count only if the chat
    template writes them. named: ends that files name; if these and the texts hold no known end,
    tokens that end a document count.
    """
    texts = _TURN_ENDS
    if not _HARMONY_ENDS.isdisjoint(special):
        texts = texts - {"<|end|>"} | _HARMONY_ENDS
    written = [text for text in texts | _DOCUMENT_ENDS if text in template]
    every = {**others, **special}
    ids = {special[text] for text in texts if text in special}
    ids |= {every[text] for text in written if text in every}
    documents = {id for text, id in special.items() if text in _DOCUMENT_ENDS}
    if not ids and documents.isdisjoint(named):
        ids = documents
    return sorted(ids)
