"""Slots for the state of recurrent layers: the slots that each sequence reads and writes, and the
checkpoints from which later prompts continue.

Attention reuses an earlier prompt's prefix page by page; a recurrent layer has one state after the
whole prefix, and only where a checkpoint was made. A checkpoint needs no copy: the step goes on in
another slot.
"""

from __future__ import annotations

from collections import Counter

from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.page_keys import keys_of
from jitney.engine.core.scheduler.sequence import HeldSlots, Sequence

#: Fewest pages between two checkpoints: recomputing fewer rows costs less than a slot.
_LEAST_GAIN = 4
#: The most checkpoints within the rows of one sequence in a step.
MOST_SAVES = 2


class StateTables:
    """Fills `Sequence.state` from a pool of slots.

    pool: each of its pages is a slot, published under the key of the last page of the prefix whose
    state it holds. Every seated sequence has one slot of its own; the slots beyond `seats` hold
    checkpoints.
    """

    def __init__(self, pool: PagePool, seats: int, every: int = 0, *, turns: bool = True):
        """every: pages between the checkpoints within a long prompt; 0: no such checkpoints. turns:
        whether answers leave checkpoints. They cannot with drafts, because the host then does not
        know in which step a page becomes full.
        """
        self.pool = pool
        #: Number of slots for checkpoints, and pages between those of a long prompt.
        self.spare = pool.capacity - seats
        self.every = every
        self._turns = turns
        self._n_seated = 0
        # Sequences that write another slot than they read, or that hold slots until a step has run.
        self._unsettled: dict[Sequence, None] = {}

    @classmethod
    def without_checkpoints(cls, seats: int, page_size: int) -> StateTables:
        """Tables with one slot for each seat and no checkpoints."""
        return cls(PagePool(seats + 1, page_size, retain=False), seats)

    def renewed(self) -> StateTables:
        """New tables of the same size, with all slots free."""
        seats = self.pool.capacity - self.spare
        return StateTables(self.pool.renewed(), seats, self.every, turns=self._turns)

    def servable(self, keys: list[bytes], most: int) -> int:
        """The longest prefix of at most `most` pages, in pages, that has a checkpoint."""
        if not self._n_free(self.spare):
            return 0
        has = self.pool.has
        return next((end for end in range(most, 0, -1) if has(keys[end - 1])), 0)

    def _n_free(self, most: int) -> int:
        """Number of slots that checkpoints may still take, of at most `most`."""
        return max(0, most - (self.pool.used - self._n_seated))

    def board(self, seq: Sequence, keys: list[bytes], branch: int) -> None:
        """Give a slot to a boarding sequence that found this prefix. branch: number of pages after
        which other prompts are likely to differ too.
        """
        checkpoints = self.pool.match(keys[-1:])
        own = self._allocate()
        reads = checkpoints[0] if checkpoints else own
        self._n_seated += 1
        seq.state = HeldSlots(own, reads, own, branch=branch, saved=len(keys))
        if checkpoints:
            self._pass(seq, seq.state, checkpoints, len(keys) * self.pool.page_size)

    def _allocate(self) -> int:
        (slot,) = self.pool.allocate(1) or [0]
        if not slot:
            raise RuntimeError("a sequence with a seat has no slot for its state")
        return slot

    def _pass(self, seq: Sequence, held: HeldSlots, slots: list[int], start: int) -> None:
        """Hold these slots until the rows from `start` on have been launched."""
        held.passing += slots
        held.at = start
        self._unsettled[seq] = None

    def cover(self, seq: Sequence, start: int) -> None:
        """Choose the checkpoints within the rows [start, scheduled) that a step is to compute."""
        held, page_size = _held(seq), self.pool.page_size
        saves = self._saves(seq, held, start) if seq.shares else []
        if not saves:
            return
        held.saved = saves[-1][0]
        self._pass(seq, held, [slot for _, slot in saves], start)
        if held.saved * page_size == seq.scheduled:
            held.writes = saves.pop()[1]
        held.saves = saves

    def _saves(self, seq: Sequence, held: HeldSlots, start: int) -> list[tuple[int, int]]:
        """(pages, slot) of each new checkpoint: at the end of the prompt, where other prompts
        branch off, and every `every` pages.
        """
        page_size, last = self.pool.page_size, (len(seq.tokens) - 1) // self.pool.page_size
        most = min(seq.scheduled // page_size, last)
        ends = [last, held.branch]
        if self.every:
            ends.append(most - most % self.every)
        least = max(start // page_size + 1, held.saved + _LEAST_GAIN)
        room = min(MOST_SAVES, self._n_free(self.spare))
        saves = list[tuple[int, int]]()
        for end in [end for end in ends if least <= end <= most]:
            is_saved = self.pool.has(keys_of(seq, page_size, end)[-1])
            near = any([abs(end - other) < _LEAST_GAIN for other, _ in saves])
            if not (is_saved or near) and len(saves) < room:
                saves.append((end, self._allocate()))
        return sorted(saves)

    def turn(self, seq: Sequence) -> None:
        """Switch a decoding sequence, whose state is at the end of a page, to another slot. The old
        slot is held until the end of the next page, or becomes a checkpoint of the answer.
        """
        held = _held(seq)
        if not self._turns or not seq.shares or seq.own_pages or held.reads != held.own:
            return
        if not held.kept:
            if not self._n_free(self.spare // 2):  # the other half is for prompts
                return
            held.kept = self._allocate()
        held.reads, held.own = held.own, held.kept
        held.writes, held.kept = held.own, held.reads
        held.kept_pages = seq.scheduled // self.pool.page_size
        self._pass(seq, held, [], seq.scheduled)

    def settle(self) -> None:
        """Note that all planned steps are launched: sequences with rows in them now read the slots
        that these steps wrote, and release the slots that only these steps read.
        """
        for seq in list(self._unsettled):
            held = seq.state
            if held is None or seq.scheduled != held.at:
                del self._unsettled[seq]
            if held is None or seq.scheduled == held.at:  # none of its rows is launched
                continue
            held.reads, held.writes = held.writes, held.own
            held.saves = []
            self.pool.release([slot for slot in held.passing if slot != held.reads])
            held.passing = [slot for slot in held.passing if slot == held.reads]
            if held.passing:
                self._pass(seq, held, [], seq.scheduled)

    def publish(self, seq: Sequence) -> None:
        """Publish the checkpoints within the planned rows, so that later prompts find them."""
        held = _held(seq)
        if not seq.shares or not held.passing:
            return
        saves = held.saves
        if held.writes != held.own:
            saves = [*saves, (held.saved, held.writes)]
        for end, slot in saves:
            self._publish(seq, end, slot)

    def _publish(self, seq: Sequence, end: int, slot: int) -> None:
        keys = keys_of(seq, self.pool.page_size, end)
        self.pool.publish(slot, keys[-1], seq.request.tenant)

    def give_back(self, seq: Sequence) -> None:
        """Release all slots of a sequence that leaves its seat. The state after the last full page
        of its answer stays as a checkpoint.
        """
        held = _held(seq)
        n_full = min(seq.scheduled, len(seq.tokens)) // self.pool.page_size
        if seq.shares and held.saved + _LEAST_GAIN <= held.kept_pages <= n_full:
            self._publish(seq, held.kept_pages, held.kept)
        self.pool.release(held.slots())
        self._n_seated -= 1
        seq.state = None

    def claims(self, seated: list[Sequence]) -> dict[str, bool]:
        """See `PageTables.claims`."""
        states = [_held(seq) for seq in seated]
        self.pool.check(held.slots() for held in states)
        written = Counter(slot for held in states for slot in held.written())
        return {
            "every sequence with a seat has a slot": self._n_seated == len(seated),
            "checkpoints leave a slot for each seat": self.pool.used - len(seated) <= self.spare,
            "a slot is written by one sequence, and read by no other then": all(
                written[slot] == 1 for held in states for slot in held.written()
            )
            and all(
                held.reads in (held.own, held.kept) or not written[held.reads] for held in states
            ),
        }


def _held(seq: Sequence) -> HeldSlots:
    held = seq.state
    assert held is not None
    return held
