"""Prompts that read like text: sentences made of common words, no two prompts alike from their
first words on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jitney.engine.simulation.workload import Arrival

ADJECTIVES = (
    "old",
    "quiet",
    "bright",
    "narrow",
    "patient",
    "heavy",
    "early",
    "distant",
    "gentle",
    "broken",
    "hidden",
    "open",
    "careful",
    "golden",
    "silent",
    "proud",
    "simple",
    "strange",
    "warm",
    "empty",
    "green",
    "clever",
)
NOUNS = (
    "river",
    "letter",
    "garden",
    "teacher",
    "window",
    "market",
    "engine",
    "forest",
    "sailor",
    "bridge",
    "story",
    "winter",
    "station",
    "machine",
    "harbour",
    "village",
    "doctor",
    "mountain",
    "kitchen",
    "library",
    "road",
    "answer",
    "question",
    "captain",
    "season",
    "table",
    "island",
    "driver",
    "painting",
    "tower",
    "meadow",
    "clock",
)
VERBS = (
    "follows",
    "remembers",
    "repairs",
    "crosses",
    "watches",
    "carries",
    "describes",
    "finds",
    "leaves",
    "opens",
    "explains",
    "measures",
    "visits",
    "builds",
    "paints",
    "answers",
    "forgets",
    "studies",
    "changes",
    "keeps",
)
PLACES = ("near", "behind", "under", "beside", "above", "across from", "far from", "in front of")
ENDS = (
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
#: Last words of the seeds of a conversation's text and of the system prompt, so that no other text
#: has the same seed.
CONVERSATION, SYSTEM = 2, 3
#: No sentence has more words than this.
LONGEST_SENTENCE = 18


def sentence(rng: np.random.Generator) -> str:
    """One sentence of 9 to 18 words."""

    def pick(words: Sequence[str]) -> str:
        return words[int(rng.integers(len(words)))]

    return (
        f"The {pick(ADJECTIVES)} {pick(NOUNS)} {pick(VERBS)} the {pick(ADJECTIVES)} {pick(NOUNS)} "
        f"{pick(PLACES)} a {pick(NOUNS)} {pick(ENDS)}."
    )


def prose(words: int, seed: int | Sequence[int]) -> str:
    """Exactly `words` words (at least one) of text; the same seed gives the same text."""
    rng = np.random.default_rng(seed)
    found: list[str] = []
    while len(found) < words:
        found += sentence(rng).split()
    return " ".join(found[: max(1, words)])


def prompt_ids(
    encode: Callable[[str], list[int]], n_tokens: int, seed: int | Sequence[int]
) -> list[int]:
    """Text of exactly n_tokens tokens, as ids [n_tokens]; encode: text -> ids, at least a quarter
    of a token a word.
    """
    ids: list[int] = []
    words = n_tokens
    while len(ids) < n_tokens:
        words += n_tokens // 4 + LONGEST_SENTENCE
        ids = encode(prose(words, seed))
    return ids[:n_tokens]


def arrival_prose(arrival: Arrival, n_words: Callable[[int], int], number: int, seed: int) -> str:
    """The prompt of request `number`; n_words: words of so many tokens. Prompts of one conversation
    begin alike.
    """
    if not arrival.conversation:
        return prose(n_words(arrival.n_prompt), [seed, number])
    shared = prose(n_words(arrival.n_shared), [seed, 0, SYSTEM]) if arrival.n_shared else ""
    words = n_words(arrival.n_prompt) - len(shared.split())
    if words < 1:
        return shared
    return f"{shared} {prose(words, [seed, arrival.conversation, CONVERSATION])}".lstrip()


def arrival_ids(
    encode: Callable[[str], list[int]], arrival: Arrival, number: int, seed: int
) -> list[int]:
    """The same as ids [n_prompt], exactly as long as wanted."""
    if not arrival.conversation:
        return prompt_ids(encode, arrival.n_prompt, [seed, number])
    shared = prompt_ids(encode, arrival.n_shared, [seed, 0, SYSTEM]) if arrival.n_shared else []
    own = arrival.n_prompt - len(shared)
    return shared + (
        prompt_ids(encode, own, [seed, arrival.conversation, CONVERSATION]) if own else []
    )
