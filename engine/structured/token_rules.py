"""Which tokens a request may choose from, whatever its grammar says: those it allows
(`allowed_token_ids`), without those that would complete a word it bans (`bad_words`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jitney.engine.scheduler.plan import mask_words
from jitney.engine.types import SamplingParams


class _Inner(Protocol):
    """The matcher of a grammar."""

    @property
    def complete(self) -> bool: ...

    @property
    def may_end(self) -> bool: ...

    def take(self, tokens: list[int], start: int) -> None: ...

    def fill(self, masks: np.ndarray, row: int) -> None: ...


class TokenRules:
    """What the sequences of one request share."""

    def __init__(self, params: SamplingParams, vocab_size: int):
        may_come = np.zeros(32 * mask_words(vocab_size), bool)
        if params.allowed_token_ids:
            may_come[list(params.allowed_token_ids)] = True
        else:
            may_come[:vocab_size] = True
        #: uint32 [ceil(V / 32)]: tokens that may ever come.
        self.base = np.packbits(may_come, bitorder="little").view(np.uint32)
        #: Banned words of several tokens, by the last token before the one that completes them.
        self.by_token: dict[int, list[tuple[int, ...]]] = {}
        for banned in params.banned_sequences:
            if len(banned) == 1:
                clear(self.base, banned[0])
            else:
                self.by_token.setdefault(banned[-2], []).append(banned)
        #: Output tokens that have to be remembered.
        self.memory = max([len(banned) - 1 for banned in params.banned_sequences], default=0)


@dataclass(eq=False, slots=True)
class RuledMatcher:
    """Where one sequence stands (`engine.scheduler.sequence.Matcher`)."""

    _rules: TokenRules
    #: Of its grammar; None: it has none.
    _inner: _Inner | None
    #: The last output tokens.
    _tail: tuple[int, ...] = ()

    @property
    def complete(self) -> bool:
        return self._inner is not None and self._inner.complete

    @property
    def may_end(self) -> bool:
        """See `matchers.GrammarMatcher.may_end`."""
        return self._inner is None or self._inner.may_end

    def take(self, tokens: list[int], start: int) -> None:
        if self._inner is not None:
            self._inner.take(tokens, start)
        self._tail = tuple(tokens[max(start, len(tokens) - self._rules.memory) :])

    def fill(self, masks: np.ndarray, row: int) -> None:
        """Write which tokens may come next into a row of int32 [n, words]."""
        allowed = self._rules.base.copy()
        for banned in self._rules.by_token.get(self._tail[-1] if self._tail else -1, ()):
            if self._tail[1 - len(banned) :] == banned[:-1]:
                clear(allowed, banned[-1])
        if self._inner is None:
            masks[row] = allowed.view(np.int32)
        else:
            self._inner.fill(masks, row)
            masks[row] &= allowed.view(np.int32)


def clear(mask: np.ndarray, token: int) -> None:
    """Take a token out of a mask, uint32 [ceil(V / 32)]."""
    mask[token // 32] &= ~np.uint32(1 << (token % 32))
