"""The pages that sequences hold: taken at boarding, one more at a time while they decode, given
back behind a window and at the end. The scheduler knows no other way to a page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.page_keys import keys_of
from jitney.engine.core.scheduler.prompt_scores import PromptScores
from jitney.engine.core.scheduler.sequence import Sequence


class PageTables:
    """Fills `Sequence.pages` from a pool, and shares pages between prompts that start alike.

    window: positions that the model's layers see at most, 0 for all. A page holds the positions of
    all layers, so all must have a window, and the largest counts.
    """

    def __init__(self, pool: PagePool, window: int = 0):
        self.pool = pool
        self.window = window
        #: Pages that a decoding sequence holds at most: with a window one is begun, one not yet
        #: dropped.
        self.most_each = pool.pages_for(window) + 2 if window else sys.maxsize
        #: Pages that the sequences in seats hold together if each gets as long as it may, by
        #: whether they are in the background.
        self.most_held = {False: 0, True: 0}
        self._scores = PromptScores(pool.page_size)

    def found(self, seq: Sequence) -> int:
        """Tokens of a waiting sequence that are found in pages now."""
        return self.pool.count(self._shareable_keys(seq)) * self.pool.page_size

    def _shareable_keys(self, seq: Sequence) -> list[bytes]:
        """Keys of the pages a boarding sequence may share: full ones, and never the last token's,
        whose logits are needed.
        """
        if not seq.shares:
            return []
        page_size = self.pool.page_size
        return keys_of(seq, page_size, (len(seq.tokens) - 1) // page_size)

    def publish(self, seq: Sequence, *, ended: bool = False) -> None:
        """Let later prompts find every full page of a seated sequence whose tokens are known and
        whose rows are launched.

        Prompts as soon as they are computed, outputs when the sequence leaves its seat: naming a
        page takes a hash, and many at once take less time than one in each step. ended: it will not
        come back, so pages that only itself may find are not published.
        """
        if not seq.shares:
            return
        known = min(seq.scheduled, len(seq.tokens))
        if ended and seq.own_pages:
            known = min(known, seq.own_pages.start)
        full = known // self.pool.page_size
        if full <= seq.published:
            return
        keys = keys_of(seq, self.pool.page_size, full)
        tenant = seq.request.tenant
        for i in range(max(seq.published, seq.dropped), full):
            self.pool.publish(seq.pages[i], keys[i], tenant)
        seq.published = full

    def most_of(self, seq: Sequence) -> int:
        """Pages that a sequence holds at once if it gets as long as it may; its last token needs no
        position.
        """
        pages_for = self.pool.pages_for
        most = pages_for(seq.limit - 1)
        if self.window:  # it boards with pages for all it has
            most = min(most, max(pages_for(len(seq.tokens)), self.most_each))
        return most

    def missing(self, seq: Sequence, n_seated: int) -> int:
        """Pages that a sequence lacks to board, with one kept free for each seated one."""
        return self.pool.pages_for(len(seq.tokens)) + n_seated - self.pool.available

    def take(self, seq: Sequence, n_seated: int, lasts: Callable[[int], bool]) -> int | None:
        """Pages for all known tokens of a boarding sequence, as many as possible shared.

        n_seated: sequences in seats, each of which is left one page to grow into. lasts: from the
        number of fresh pages to whether the pool would last to the end of all answers. -> prompt
        tokens found for the first time; None where there are too few pages.
        """
        pool = self.pool
        keys = self._shareable_keys(seq)
        if seq.must_score:
            self._find_scores(seq, keys)
            # The row before the first missing score brings it: its whole page must be computed.
            keys = keys[: seq.scored // pool.page_size]
        if seq.request.pooling == "mean":
            keys = []  # every row is part of the vector, from the first on
        shared = pool.match(keys)
        fresh = pool.pages_for(len(seq.tokens)) - len(shared)
        if fresh + n_seated > pool.available or not lasts(fresh):
            pool.release(shared)
            return None
        seq.pages = shared + (pool.allocate(fresh) or [])
        seq.published = seq.shared = len(shared)
        seq.scheduled = start = len(shared) * pool.page_size
        seq.most_pages = self.most_of(seq)
        self.most_held[seq.background] += seq.most_pages
        found = max(0, min(start, seq.n_prompt) - seq.computed_high)
        seq.cached_tokens += found
        return found

    def grow(self, sequences: list[Sequence]) -> None:
        """One more page for each; there must be as many."""
        pages = self.pool.allocate(len(sequences)) or []
        for seq, page in zip(sequences, pages, strict=True):
            seq.pages.append(page)

    def drop_behind(self, seq: Sequence) -> bool:
        """With a window: give back the pages behind the window of a sequence's next row; True if
        there were any. Their rows stay in the prefix index until the room is needed.
        """
        behind = (seq.scheduled - self.window + 1) // self.pool.page_size
        if behind <= seq.dropped:
            return False
        self.publish(seq)
        self.pool.release(seq.pages[seq.dropped : behind])
        seq.pages[seq.dropped : behind] = [0] * (behind - seq.dropped)
        seq.dropped = behind
        return True

    def give_back(self, seq: Sequence, *, ended: bool) -> None:
        """All pages of a sequence that leaves its seat. ended: it does not come back."""
        if self.pool.retain:
            self.publish(seq, ended=ended)
        self.pool.release(seq.pages)
        self.most_held[seq.background] -= seq.most_pages
        seq.pages = []
        seq.published = seq.shared = seq.dropped = 0

    def withdraw(self, seq: Sequence) -> None:
        """Let no prompt find any page that may hold, or have caused, a row that was not finite.

        By name, because the sequence may no longer hold the pages: it was preempted, aborted, past
        its deadline, or its last token was in flight when it left its seat.
        """
        self.pool.withdraw(seq.keys)
        self._scores.drop(seq.keys)
        seq.shares = False

    def forget(self) -> None:
        """Let no later prompt find what was computed for an earlier one."""
        self.pool.clear()
        self._scores.clear()

    def keep_scores(self, seq: Sequence, new: int) -> None:
        """The last `new` of a prompt's log-probabilities have come: later prompts find them."""
        if seq.shares and self.pool.retain:
            self._scores.keep(seq.keys, seq.prompt_logprobs, new)

    def _find_scores(self, seq: Sequence, keys: list[bytes]) -> None:
        """Take over the log-probabilities known for the first pages of a scored prompt that boards
        for the first time.
        """
        most = seq.request.sampling.prompt_logprobs
        if seq.scored or most is None:
            return
        found = self._scores.find(keys, most)
        if found:
            seq.prompt_logprobs = found
            seq.scored = len(found) - 1

    def claims(self, seated: list[Sequence], unseated: Iterable[Sequence]) -> dict[str, bool]:
        """What must hold, and whether it does; raises RuntimeError where the pool itself is not
        accounted for.
        """
        self.pool.check(seq.pages for seq in seated)
        most = {False: 0, True: 0}
        for seq in seated:
            most[seq.background] += seq.most_pages
        return {
            "only seated sequences hold pages": not any(
                seq.pages or seq.seated for seq in unseated
            ),
            "pages that may be held are counted": most == self.most_held,
            "pages behind the window are the trash page, and no others": all(
                not any(seq.pages[: seq.dropped]) and all(seq.pages[seq.dropped :])
                for seq in seated
            ),
        }
