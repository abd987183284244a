"""Log-probabilities of prompt tokens, stored by the keys of their pages, so that a prefix is scored
only once.

A page's key identifies its tokens and all tokens before them (`engine.core.scheduler.page_keys`),
and so the log-probability of each of its tokens. A prompt with the same start takes them from here.
It is computed from the last page with stored scores on, whose last row scores the next token.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from jitney.engine.common.outputs import TokenLogprobs

#: The most bytes stored. With 20 alternatives a token takes 164 bytes, so 400,000 tokens fit.
_KEPT_BYTES = 64 << 20


class _PageScores(NamedTuple):
    """The scores of one page: P tokens with K alternatives each. logprobs is NaN for the first
    token of a text, which has no log-probability.
    """

    logprobs: np.ndarray  # float32 [P]
    top_ids: np.ndarray  # int32 [P, K]
    top_logprobs: np.ndarray  # float32 [P, K]

    @property
    def nbytes(self) -> int:
        return self.logprobs.nbytes + self.top_ids.nbytes + self.top_logprobs.nbytes

    @property
    def alternatives(self) -> int:
        return self.top_ids.shape[1]


class PromptScores:
    """An LRU store of page scores, with at most `most_bytes` bytes."""

    def __init__(self, page_size: int, most_bytes: int = _KEPT_BYTES):
        self.page_size, self.most_bytes = page_size, most_bytes
        self.kept_bytes = 0
        self._pages: OrderedDict[bytes, _PageScores] = OrderedDict()

    def find(self, keys: list[bytes], alternatives: int) -> list[TokenLogprobs | None]:
        """Entries of the prompt's tokens, in order, up to the first page without stored scores or
        with fewer than `alternatives` alternatives.
        """
        entries: list[TokenLogprobs | None] = []
        for key in keys:
            page = self._pages.get(key)
            if page is None or page.alternatives < alternatives:
                break
            self._pages.move_to_end(key)
            entries += _unpacked(page, alternatives)
        return entries

    def keep(self, keys: list[bytes], entries: list[TokenLogprobs | None], new: int) -> None:
        """Store the pages that the last `new` of a prompt's entries completed."""
        size = self.page_size
        whole = min(len(entries) // size, len(keys))
        for number in range((len(entries) - new) // size, whole):
            self._put(keys[number], _packed(entries[number * size : (number + 1) * size]))

    def clear(self) -> None:
        """Forget everything."""
        self._pages.clear()
        self.kept_bytes = 0

    def drop(self, keys: list[bytes]) -> None:
        """Drop the scores of the pages with these keys, because they cannot be trusted."""
        for key in keys:
            self._remove(key)

    def _put(self, key: bytes, page: _PageScores) -> None:
        stored = self._pages.get(key)
        if stored is not None and stored.alternatives >= page.alternatives:
            return
        self._remove(key)
        self._pages[key] = page
        self.kept_bytes += page.nbytes
        while self.kept_bytes > self.most_bytes:
            self._remove(next(iter(self._pages)))

    def _remove(self, key: bytes) -> None:
        page = self._pages.pop(key, None)
        if page is not None:
            self.kept_bytes -= page.nbytes


def _packed(entries: list[TokenLogprobs | None]) -> _PageScores:
    """Pack the entries of a page's tokens; None stands for the first token of a text."""
    scored = [entry for entry in entries if entry is not None]
    missing = len(entries) - len(scored)
    width = 0
    if scored:
        width = len(scored[0].top_ids)
    logprobs = np.full(len(entries), np.nan, np.float32)
    top_ids = np.zeros((len(entries), width), np.int32)
    top_logprobs = np.zeros((len(entries), width), np.float32)
    logprobs[missing:] = [entry.logprob for entry in scored]
    top_ids[missing:] = [entry.top_ids for entry in scored]
    top_logprobs[missing:] = [entry.top_logprobs for entry in scored]
    return _PageScores(logprobs, top_ids, top_logprobs)


def _unpacked(page: _PageScores, alternatives: int) -> list[TokenLogprobs | None]:
    """Unpack one entry per token of a page, with `alternatives` alternatives."""
    ids = page.top_ids[:, :alternatives].tolist()
    tops = page.top_logprobs[:, :alternatives].tolist()
    return [
        None if np.isnan(logprob) else TokenLogprobs(logprob, *best)
        for logprob, *best in zip(page.logprobs.tolist(), ids, tops, strict=True)
    ]
