"""The page tables of sequences. Sequences take pages when they board and as they decode, in cache
groups with a window with each chunk; they give them back behind the window and at their end. The
slots of recurrent layers are managed here too: the scheduler takes pages and slots in no other way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.page_keys import keys_of
from jitney.engine.core.scheduler.plan import Chunk
from jitney.engine.core.scheduler.prompt_scores import PromptScores
from jitney.engine.core.scheduler.sequence import Sequence, WindowPages
from jitney.engine.core.scheduler.state_slots import StateTables


def pages_per_window(window: int, page_size: int) -> int:
    """The most pages that a sequence holds between two steps in a cache group with a window: those
    of the window, a partly filled one, and one that is not dropped yet.
    """
    return -(-window // page_size) + 2


def least_window_pages(
    window: int, *, page_size: int, seats: int, token_budget: int, context_length: int
) -> int:
    """Pages, including the trash page, with which a cache group with a window never runs short
    beside a group that sees all positions: those of every seat, and those of one step's rows.
    """
    each = min(pages_per_window(window, page_size), -(-context_length // page_size))
    return seats * each + -(-token_budget // page_size) + 1


class _GroupPages:
    """The pool of one cache group. In its methods, `held` is the pages of a sequence in it."""

    def __init__(self, pool: PagePool, window: int):
        """window: positions that the group's layers see, 0 for all."""
        self.pool = pool
        self.window = window

    def first_seen(self, position: int) -> int:
        """The first page that the row at a position reads."""
        if not self.window:
            return 0
        return max(0, position - self.window + 1) // self.pool.page_size

    def servable(self, keys: list[bytes], most: int) -> int:
        """The longest prefix of at most `most` pages, in pages, whose next row finds all pages that
        it reads.
        """
        if not self.window:
            return self.pool.count(keys[:most])
        end = at = most
        while at > self.first_seen(end * self.pool.page_size):
            at -= 1
            if not self.pool.has(keys[at]):
                end = at
        return end

    def match(self, keys: list[bytes]) -> list[int]:
        """Take references to the pages of a prefix; pages that no later row reads are 0."""
        first = self.first_seen(len(keys) * self.pool.page_size)
        return [0] * first + self.pool.match(keys[first:])

    def board(self, keys: list[bytes], ends: set[int]) -> WindowPages:
        """The pages of a boarding sequence that found this prefix. ends: numbers of pages after
        which other prompts are likely to differ from its own.
        """
        page_size = self.pool.page_size
        first = self.first_seen(len(keys) * page_size)
        # One page more: the last page of a prompt that consists of full pages is computed again.
        branches = [(self.first_seen((end - 1) * page_size), end) for end in ends]
        return WindowPages(self.match(keys), first, len(keys), branches)

    def extend(self, held: WindowPages, positions: int) -> None:
        """Take the pages that are missing for `positions` positions; the pool is large enough."""
        lacking = self.pool.pages_for(positions) - len(held.pages)
        if lacking > 0:
            pages = self.pool.allocate(lacking)
            if pages is None:
                raise RuntimeError(
                    f"the pages of the layers with a window of {self.window} are out"
                )
            held.pages += pages

    def publish(self, seq: Sequence, held: Sequence | WindowPages, *, ended: bool = False) -> None:
        """Publish every full page of a seated sequence whose tokens are known and whose rows are
        launched, so that later prompts find it.

        Prompts are published as soon as they are computed, outputs when the sequence leaves its
        seat: a page's name takes a hash, and hashing many at once takes less time than one in each
        step. ended: the sequence has ended, so pages that only it may find are not published.
        """
        if not seq.shares:
            return
        n_known = min(seq.scheduled, len(seq.tokens))
        if ended and seq.own_pages:
            n_known = min(n_known, seq.own_pages.start)
        full = n_known // self.pool.page_size
        if full <= held.published:
            return
        keys = keys_of(seq, self.pool.page_size, full)
        tenant = seq.request.tenant
        for i in range(max(held.published, held.dropped), full):
            self.pool.publish(held.pages[i], keys[i], tenant)
        held.published = full

    def drop_behind(self, seq: Sequence, held: Sequence | WindowPages) -> bool:
        """Give back the pages behind the window of a sequence's next row; True if there were any.
        They stay in the prefix index until their room is needed.
        """
        behind = self.first_seen(seq.scheduled)
        if behind <= held.dropped:
            return False
        self.publish(seq, held)
        self._release(held, range(held.dropped, behind))
        held.pages[held.dropped : behind] = [0] * (behind - held.dropped)
        held.dropped = behind
        return True

    def _release(self, held: Sequence | WindowPages, dropped: range) -> None:
        """Give back pages behind the window. Pages before a likely branch are evicted last;
        otherwise a long prompt would flush the windows of all cached prefixes.
        """
        if not isinstance(held, WindowPages):
            self.pool.release(held.pages[dropped.start : dropped.stop])
            return
        branch_pages, others = list[int](), list[int]()
        for number in dropped:
            is_kept = any([first <= number < end for first, end in held.branches])
            (branch_pages if is_kept else others).append(held.pages[number])
        self.pool.release(others, evict_first=True)
        self.pool.release(branch_pages)


_NO_WINDOWS: Mapping[int, PagePool] = MappingProxyType({})


class PageTables:
    """Fills `Sequence.pages` and `Sequence.windows` from the pools of a model's cache groups, and
    `Sequence.state` from the slots of its recurrent layers. Prompts with the same start share them.

    pool, window: of the first cache group, which policies and predictions use; window 0: its layers
    see all positions. windows: the pools of the other groups by window. These take pages as rows
    are planned, and have enough (`least_window_pages`). state: slots of recurrent layers, or None.
    """

    def __init__(
        self,
        pool: PagePool,
        window: int = 0,
        windows: Mapping[int, PagePool] = _NO_WINDOWS,
        state: StateTables | None = None,
    ):
        """pool, window: of the model's first cache group; window 0: its layers see all positions.
        windows: the pools of the other groups by window. state: the slots of recurrent layers; None
        without such layers.
        """
        self.pool, self.window, self.windows, self.state = pool, window, windows, state
        #: Whether some layers have a window.
        self.has_window = window > 0 or len(windows) > 0
        #: Whether prompt chunks take pages or slots as they are planned (`cover`).
        self.covers_chunks = self.has_window or state is not None
        #: The most pages that a decoding sequence holds.
        self.most_each = pages_per_window(window, pool.page_size) if window else sys.maxsize
        #: Pages that all seated sequences hold together at their full lengths, by whether they are
        #: in the background.
        self.most_held = {False: 0, True: 0}
        self._first = _GroupPages(pool, window)
        self._windows = [_GroupPages(own, size) for size, own in windows.items()]
        self._groups = [self._first, *self._windows]
        self._scores = PromptScores(pool.page_size)

    def renewed(self) -> PageTables:
        """New tables over the same pages, none of which is in use or kept."""
        windows = {window: pool.renewed() for window, pool in self.windows.items()}
        return PageTables(
            self.pool.renewed(), self.window, windows, self.state and self.state.renewed()
        )

    def _held(self, seq: Sequence) -> Iterator[tuple[_GroupPages, Sequence | WindowPages]]:
        """Each cache group, with the pages that a seated sequence holds in it."""
        return zip(self._groups, (seq, *seq.windows), strict=True)

    def found(self, seq: Sequence) -> int:
        """Number of tokens of a waiting sequence that are found in pages now."""
        return self._servable(self._shareable_keys(seq)) * self.pool.page_size

    def _shareable_keys(self, seq: Sequence) -> list[bytes]:
        """Keys of the pages that a boarding sequence may share: full pages, without the last
        token's, whose logits are needed.
        """
        if not seq.shares:
            return []
        page_size = self.pool.page_size
        return keys_of(seq, page_size, (len(seq.tokens) - 1) // page_size)

    def finds_pages_of(self, chunks: Iterable[Chunk], seq: Sequence) -> bool:
        """Whether a waiting sequence may find pages that these prompt chunks fill."""
        keys = self._shareable_keys(seq)
        firsts = [(chunk.seq, chunk.start // self.pool.page_size + 1) for chunk in chunks]
        return any(
            [
                keys[number - 1 : number] == keys_of(other, self.pool.page_size, number)[-1:]
                for other, number in firsts
                if number <= min(len(keys), len(other.tokens) // self.pool.page_size)
            ]
        )

    def _servable(self, keys: list[bytes]) -> int:
        """Pages of the longest prefix that all groups can serve and that has a checkpoint of the
        recurrent layers' state, if there are such layers.
        """
        length = len(keys)
        while True:
            before = length
            for group in self._groups:
                length = group.servable(keys, length)
            if self.state is not None:
                length = self.state.servable(keys, length)
            if length == before or not self.covers_chunks:
                return length

    def most_of(self, seq: Sequence) -> int:
        """The most pages that a sequence can hold at once, at its full length. Its last token needs
        no position.
        """
        pages_for = self.pool.pages_for
        most = pages_for(seq.limit - 1)
        if self._first.window:  # a sequence boards with pages for all its known tokens
            most = min(most, max(pages_for(len(seq.tokens)), self.most_each))
        return most

    def missing(self, seq: Sequence, n_seated: int) -> int:
        """Number of pages that a sequence lacks to board, with one free page left for each seated
        sequence.
        """
        return self.pool.pages_for(len(seq.tokens)) + n_seated - self.pool.available

    def take(self, seq: Sequence, n_seated: int, lasts: Callable[[int], bool]) -> int | None:
        """Take pages for all known tokens of a boarding sequence, sharing as many as possible.

        n_seated: number of seated sequences; one free page is left for each. lasts: tells for a
        number of fresh pages whether the pool would last to the end of all answers. -> number of
        prompt tokens found for the first time; None if there are too few pages.
        """
        pool = self.pool
        keys = self._shareable_keys(seq)
        if seq.must_score:
            self._find_scores(seq, keys)
            # The row before the first missing score returns it: its whole page must be computed.
            keys = keys[: seq.scored // pool.page_size]
        if seq.request.pooling == "mean":
            keys = []  # every row is part of the vector, so all must be computed
        branch, ends = 0, set[int]()
        if self.covers_chunks:
            branch = self._first.servable(keys, len(keys))
            keys = keys[: self._servable(keys)]
            ends = {seq.n_prompt // pool.page_size, branch, len(keys)}
        shared = self._first.match(keys)
        fresh = pool.pages_for(len(seq.tokens)) - len(shared)
        if fresh + n_seated > pool.available or not lasts(fresh):
            pool.release(shared)
            return None
        seq.pages = shared + (pool.allocate(fresh) or [])
        seq.published = seq.shared = len(shared)
        seq.dropped = self._first.first_seen(len(shared) * pool.page_size)
        seq.windows = tuple([group.board(keys, ends) for group in self._windows])
        if self.state is not None:
            self.state.board(seq, keys, branch)
        seq.scheduled = start = len(shared) * pool.page_size
        seq.most_pages = self.most_of(seq)
        self.most_held[seq.background] += seq.most_pages
        newly_found = max(0, min(start, seq.n_prompt) - seq.computed_high)
        seq.cached_tokens += newly_found
        return newly_found

    def skip(self, seq: Sequence, start: int) -> None:
        """Mark the rows before `start` of a boarding sequence as computed, without found pages."""
        seq.scheduled = start
        for group, held in zip(self._windows, seq.windows, strict=True):
            held.dropped = held.published = group.first_seen(start)
            held.pages = [0] * held.dropped

    def grow(self, sequences: list[Sequence]) -> None:
        """Give each sequence one more page of each group; the first group must have enough."""
        pages = self.pool.allocate(len(sequences)) or []
        for seq, page in zip(sequences, pages, strict=True):
            seq.pages.append(page)
        if self._windows:
            for seq in sequences:
                self._extend(seq, len(seq.pages) * self.pool.page_size)
        if self.state is not None:
            for seq in sequences:
                self.state.turn(seq)

    def cover(self, seq: Sequence, start: int) -> None:
        """Take the missing pages of groups with a window for the rows [start, scheduled), and slots
        for checkpoints within these rows.
        """
        self._extend(seq, seq.scheduled)
        if self.state is not None:
            self.state.cover(seq, start)

    def settle(self) -> None:
        """Note that all planned steps are launched, see `StateTables.settle`."""
        if self.state is not None:
            self.state.settle()

    def _extend(self, seq: Sequence, positions: int) -> None:
        for group, held in zip(self._windows, seq.windows, strict=True):
            group.extend(held, positions)

    def drop_behind(self, seq: Sequence) -> bool:
        """Give back the pages behind the windows of a sequence's next row; True if there were
        any.
        """
        dropped = [group.drop_behind(seq, held) for group, held in self._held(seq)]
        return any(dropped)

    def publish(self, seq: Sequence) -> None:
        """Publish the pages of a seated sequence, see `_GroupPages.publish`."""
        self._first.publish(seq, seq)
        for group, held in zip(self._windows, seq.windows, strict=True):
            group.publish(seq, held)
        if self.state is not None:
            self.state.publish(seq)

    def give_back(self, seq: Sequence, *, ended: bool) -> None:
        """Give back all pages and slots of a sequence that leaves its seat. ended: it has ended."""
        for group, held in self._held(seq):
            if group.pool.retain:
                group.publish(seq, held, ended=ended)
            group.pool.release(held.pages)
        if self.state is not None:
            self.state.give_back(seq)
        self.most_held[seq.background] -= seq.most_pages
        seq.pages = []
        seq.windows = ()
        seq.published = seq.shared = seq.dropped = 0

    def withdraw(self, seq: Sequence) -> None:
        """Withdraw all pages that may hold, or have caused, a row that was not finite.

        The pages are found by name, because the sequence may no longer hold them: it was preempted,
        aborted, past its deadline, or its last token was in flight when it left its seat.
        """
        for pool in self._pools:
            pool.withdraw(seq.keys)
        self._scores.drop(seq.keys)
        seq.shares = False

    def forget(self) -> None:
        """Drop the prefix cache: all cached pages, checkpoints and log-probabilities."""
        self.clear()
        self._scores.clear()

    def clear(self) -> None:
        """Withdraw all pages and checkpoints, whose contents are lost."""
        for pool in self._pools:
            pool.clear()

    @property
    def _pools(self) -> list[PagePool]:
        """The pools of all cache groups and of recurrent layers."""
        pools = [group.pool for group in self._groups]
        return pools if self.state is None else [*pools, self.state.pool]

    def keep_scores(self, seq: Sequence, new: int) -> None:
        """Store the last `new` of a prompt's log-probabilities for later prompts."""
        if seq.shares and self.pool.retain:
            self._scores.keep(seq.keys, seq.prompt_logprobs, new)

    def _find_scores(self, seq: Sequence, keys: list[bytes]) -> None:
        """Copy the stored log-probabilities of the first pages to a scored prompt that boards for
        the first time.
        """
        most = seq.request.sampling.prompt_logprobs
        if seq.scored or most is None:
            return
        entries = self._scores.find(keys, most)
        if entries:
            seq.prompt_logprobs = entries
            seq.scored = len(entries) - 1

    def claims(self, seated: list[Sequence], unseated: Iterable[Sequence]) -> dict[str, bool]:
        """Check the invariants. Returns whether each one holds, by its description; raises
        RuntimeError if a pool's own accounts are wrong.
        """
        for number, group in enumerate(self._groups):
            group.pool.check((seq, *seq.windows)[number].pages for seq in seated)
        most = {False: 0, True: 0}
        for seq in seated:
            most[seq.background] += seq.most_pages
        tables = [held for seq in seated for held in (seq, *seq.windows)]
        of_state = {} if self.state is None else self.state.claims(seated)
        return of_state | {
            "only seated sequences hold pages": not any(
                seq.pages or seq.windows or seq.state or seq.seated for seq in unseated
            ),
            "pages that may be held are counted": most == self.most_held,
            "pages behind the window are the trash page, and no others": all(
                not any(held.pages[: held.dropped]) and all(held.pages[held.dropped :])
                for held in tables
            ),
            "rows that are scheduled have pages": all(
                len(held.pages) * self.pool.page_size >= seq.scheduled
                for seq in seated
                for held in seq.windows
            ),
        }
