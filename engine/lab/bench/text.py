"""Prompts made of common words, which differ from their first words on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jitney.engine.common.trace import Arrival

_ADJECTIVES, _NOUNS, _VERBS = (
    words.split()
    for words in (
        "old quiet bright narrow patient heavy early distant gentle broken hidden open careful "
        "golden silent proud simple strange warm empty green clever",
        "river letter garden teacher window market engine forest sailor bridge story winter "
        "station machine harbour village doctor mountain kitchen library road answer question "
        "captain season table island driver painting tower meadow clock",
        "follows remembers repairs crosses watches carries describes finds leaves opens explains "
        "measures visits builds paints answers forgets studies changes keeps",
    )
)
_PLACES = ("near", "behind", "under", "beside", "above", "across from", "far from", "in front of")
_ENDS = (
    "every morning",
    "before the rain",
    "without a word",
    "in the evening",
    "for many years",
    "once again",
    "at the same time",
    "as if nothing had happened",
    "while the others sleep",
    "after a long day",
)
#: Last numbers of the seeds of a conversation's text and of the system prompt, so that no other
#: text has the same seed.
_CONVERSATION, _SYSTEM = 2, 3
#: Most words of a sentence.
_LONGEST_SENTENCE = 18


def _sentence(rng: np.random.Generator) -> list[str]:

    def pick(words: Sequence[str]) -> str:
        return words[int(rng.integers(len(words)))]

    text = (
        f"The {pick(_ADJECTIVES)} {pick(_NOUNS)} {pick(_VERBS)} the {pick(_ADJECTIVES)} "
        f"{pick(_NOUNS)} {pick(_PLACES)} a {pick(_NOUNS)} {pick(_ENDS)}."
    )
    return text.split()


def prose(words: int, seed: int | Sequence[int]) -> str:
    """Exactly `words` words (at least one) of text; the same seed gives the same text."""
    rng = np.random.default_rng(seed)
    text: list[str] = []
    while len(text) < words:
        text += _sentence(rng)
    return " ".join(text[: max(1, words)])


def _prompt_ids(
    encode: Callable[[str], list[int]], n_tokens: int, seed: int | Sequence[int]
) -> list[int]:
    """Text of exactly n_tokens tokens, as ids [n_tokens]; encode: as for `arrival_ids`."""
    ids: list[int] = []
    words = n_tokens
    while len(ids) < n_tokens:
        words += n_tokens // 4 + _LONGEST_SENTENCE
        ids = encode(prose(words, seed))
    return ids[:n_tokens]


def arrival_prose(arrival: Arrival, n_words: Callable[[int], int], number: int, seed: int) -> str:
    """The prompt of request `number`. n_words: tokens -> words. Prompts of one conversation have
    the same prefix.
    """
    text_words = n_words(arrival.n_prompt)
    if not arrival.conversation:
        return prose(text_words, [seed, number])
    words = []
    if arrival.n_shared:
        words = prose(n_words(arrival.n_shared), [seed, 0, _SYSTEM]).split()
    own = text_words - len(words)
    if own >= 1:
        words.append(prose(own, [seed, arrival.conversation, _CONVERSATION]))
    return " ".join(words)


def arrival_ids(
    encode: Callable[[str], list[int]], arrival: Arrival, number: int, seed: int
) -> list[int]:
    """The prompt of request `number` as ids of exactly its length. encode: text -> ids, at least a
    quarter of a token per word. Prompts of one conversation have the same prefix.
    """
    if not arrival.conversation:
        return _prompt_ids(encode, arrival.n_prompt, [seed, number])
    shared = _prompt_ids(encode, arrival.n_shared, [seed, 0, _SYSTEM])
    own = arrival.n_prompt - len(shared)
    return shared + _prompt_ids(encode, own, [seed, arrival.conversation, _CONVERSATION])
