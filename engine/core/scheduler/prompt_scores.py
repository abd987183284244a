"""Log-probabilities of prompt tokens, kept by the names of their pages, so that a prefix is scored
once.

A page's name stands for its tokens and for all before them (`engine.core.scheduler.kv_pages`), and
so for the log-probability of each of its tokens given those before it. A prompt that starts
alike takes them from here; it is computed from the last page of which they are known, whose last
row scores the first token behind it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from jitney.engine.common.outputs import TokenLogprobs

#: Bytes kept in all: with 20 alternatives a token takes 164, so 400,000 tokens.
_KEPT_BYTES = 64 << 20


class _PageScores(NamedTuple):
    """One page of P tokens with K alternatives each. logprobs is NaN for the first token of a text,
    which has none.
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
    """Scores of pages; the longest unused are forgotten once there are
    `most_bytes`.
    """

    def __init__(self, page_size: int, most_bytes: int = _KEPT_BYTES):
        self.page_size, self.most_bytes = page_size, most_bytes
        self.kept_bytes = 0
        self._pages: OrderedDict[bytes, _PageScores] = OrderedDict()

    def find(self, keys: list[bytes], alternatives: int) -> list[TokenLogprobs | None]:
        """Entries of the prompt's tokens, in order, as far as whole pages are known with so many
        alternatives.
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
        """Keep the pages that the last `new` of a prompt's entries made whole."""
        size = self.page_size
        whole = min(len(entries) // size, len(keys))
        for number in range((len(entries) - new) // size, whole):
            self._put(keys[number], _packed(entries[number * size : (number + 1) * size]))

    def clear(self) -> None:
        """Forget everything."""
        self._pages.clear()
        self.kept_bytes = 0

    def drop(self, keys: list[bytes]) -> None:
        """Forget the pages of these names: what was computed with them is not to be trusted."""
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
    """The entries of a page's tokens; None stands for the first token of a text."""
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
    """One entry per token of a page, with so many alternatives."""
    ids = page.top_ids[:, :alternatives].tolist()
    tops = page.top_logprobs[:, :alternatives].tolist()
    return [
        None if np.isnan(logprob) else TokenLogprobs(logprob, *best)
        for logprob, *best in zip(page.logprobs.tolist(), ids, tops, strict=True)
    ]
