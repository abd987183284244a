"""Which sequences compute which rows in a step: decode rows first, then prompt chunks, then newly
boarding sequences, the background last.
"""

from __future__ import annotations

import math

from jitney.engine.core.scheduler.boarding import Boarding
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.decode_rows import DecodeRows
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.open_sequences import OpenSequences
from jitney.engine.core.scheduler.passing import Passing
from jitney.engine.core.scheduler.plan import Draft, Plan
from jitney.engine.core.scheduler.preemption import Preemption
from jitney.engine.core.scheduler.prefill_budget import PrefillBudget
from jitney.engine.core.scheduler.queues import RequestClass
from jitney.engine.core.scheduler.sequence import Sequence

#: Seconds without a live request after which the background may take every seat.
_CALM_S = 10.0
#: While a live request is open, one step in so many may have prompt rows of the background.
_BACKGROUND_EVERY = 8
#: Of the token budget: the most prompt rows that a claimant may have in a step without streams.
_FEW_ROWS = 0.125


class StepPlanner:
    """Fills drafts of steps."""

    def __init__(
        self,
        limits: SchedulerLimits,
        buckets: Buckets,
        sequences: OpenSequences,
        prefill_budget: PrefillBudget,
        passing: Passing,
        preemption: Preemption,
        boarding: Boarding,
    ):
        self._limits = limits
        self._buckets = buckets
        self._sequences = sequences
        self._seats = sequences.seats
        self._pages = sequences.pages
        self._queue = sequences.live.queue
        self._prefill_budget = prefill_budget
        self._passing = passing
        self._preemption = preemption
        self._boarding = boarding
        self._decode = DecodeRows(sequences, preemption, prefill_budget.step_times)
        self._steps = 0
        # Those with prompt rows in the last step; the step being planned may overwrite what lies
        # behind their windows, since the device runs steps in order.
        self._moved: list[Sequence] = []
        #: Those that gave back pages without a step since; the scheduler writes it.
        self.dropped: list[Sequence] = []
        # The last step computed only the prompt of a tenant for which a seat was freed.
        self._claimed_alone = False
        # The last step with prompt rows of the background.
        self._background_prompts_at = 0
        # When a live request was last open, clock seconds.
        self._live_at = -math.inf

    def fill(self, draft: Draft, step: int, now: float, alone: Sequence | None = None) -> None:
        """Decide the step after so many. alone: this sequence only."""
        self._steps = step
        draft.dropped, self.dropped = self.dropped, []
        for seq in self._moved:
            if seq.seated and self._pages.drop_behind(seq):
                draft.dropped.append(seq)
        self._moved = []
        self._pages.settle()
        if self._sequences.live.n_open:
            self._live_at = now
        if alone is not None:
            self._plan_alone(alone, draft, now)
        elif self._seats.holds:
            self._plan_batch(draft, now)
        else:
            self._plan_in_flight(draft, now)

    def _plan_alone(self, seq: Sequence, draft: Draft, now: float) -> None:
        if not seq.seated:
            self._boarding.take_seat(seq, draft, now)
        if seq in self._seats.decoding:
            self._decode.plan(draft, now, alone=True)
        elif seq.seated:
            self._add_chunk(seq, draft, draft.tokens_left)

    def _plan_in_flight(self, draft: Draft, now: float) -> None:
        if self._seats.n_background:
            draft.preempted += self._preemption.for_live(now)
        if self._sequences.stalled:
            draft.preempted += self._preemption.for_stalled(now)
        was_free = bool(self._seats.free)
        claimant = self._boarding.make_way(draft, now)
        alone = claimant is not None and self._goes_alone(claimant)
        if not alone:
            self._decode.plan(draft, now)
        self._claimed_alone = False
        if claimant is not None and self._seat_claimant(
            claimant, draft, now, alone=alone, instead=not was_free
        ):
            self._claimed_alone = alone
            return
        if alone:
            self._decode.plan(draft, now)
        prompts = self._seats.live_prompts
        if prompts or (self._queue.waiting and self._seats.free):
            self._plan_prompts(prompts, draft, now)
        elif not self._queue.waiting:
            self._plan_background(draft, now)

    def _goes_alone(self, claimant: Sequence) -> bool:
        """Whether a claimant's prompt has a step without the streams, which go on in the next one:
        where a step of theirs takes so much longer that they lose little by it.
        """
        few = claimant.wanted_rows <= _FEW_ROWS * self._buckets.token_budget
        if not few or self._claimed_alone:
            return False
        return self._prefill_budget.step_times.far_above_least(self._seats.n_decoding_live)

    def _seat_claimant(
        self, seq: Sequence, draft: Draft, now: float, *, alone: bool, instead: bool
    ) -> bool:
        """Take the seat that is free; it stays free if too few pages are. True where the step
        computes its prompt and no other's: the prompts of the tenant that gave way would make it
        longer. alone: without the streams either, which could take its pages again; else a prompt
        that does not fit shares the step. instead: another sequence lost the seat for it.
        """
        if not self._boarding.take_seat(seq, draft, now, instead=instead):
            return False
        most = min(draft.tokens_left, self._prompt_rows([seq], draft, short=True))
        if not alone and seq.n_left > most:
            return False
        self._add_chunk(seq, draft, draft.tokens_left)
        return True

    def _plan_prompts(self, prompts: list[Sequence], draft: Draft, now: float) -> None:
        """Rows of short prompts that pass longer ones, of the prompts that have boarded, and of
        those that board now.
        """
        rows_first = self._rows_first(prompts)
        passes = self._next_to_pass(prompts, self._passing.longest(rows_first)) is not None
        most = self._prompt_rows(prompts, draft, short=passes or self._first_is_short(prompts))
        draft.tokens_left = min(draft.tokens_left, most)
        rows = draft.rows
        if passes:
            self._plan_passing(prompts, rows_first, draft, now)
            prompts = [seq for seq in prompts if seq not in draft.passed]
        if self._is_brief(prompts, now):
            brief = self._prefill_budget.brief(draft.n_decode, _first_row(prompts))
            draft.tokens_left = min(draft.tokens_left, brief)
        self._plan_prefill(prompts, draft)
        self._plan_boarding(self._sequences.live, self._boarding.allowed(now), draft, now)
        if rows_first > draft.rows - rows:
            self._passing.save(draft.rows - rows)

    def _rows_first(self, prompts: list[Sequence]) -> int:
        """Rows of the prompts that have boarded and of the one that boards next: while they do not
        fit a step, later prompts wait.
        """
        head = self._queue.head()
        return sum([seq.n_left for seq in prompts]) + (head.wanted_rows if head else 0)

    def expects_short(self, now: float) -> bool:
        """Whether a short prompt that comes now should find a seat and pass the prompts before
        it.
        """
        return self._is_brief(self._seats.live_prompts, now)

    def _is_brief(self, prompts: list[Sequence], now: float) -> bool:
        """Whether a short prompt should come soon that finds a seat and passes one of these, or the
        one that boards next.
        """
        if not self._seats.free or self._sequences.lacks_pages:
            return False
        head = self._queue.head()
        rows = [len(seq.tokens) - seq.cached_tokens for seq in prompts]
        return self._passing.expects(max([*rows, head.wanted_rows if head else 0]), now)

    def _prompt_rows(self, prompts: list[Sequence], draft: Draft, *, short: bool) -> int:
        """The most prompt rows of this step, by the prompts that need some: of those that sit, and
        of those for which there is a seat. short: a short one is computed first.
        """
        n_prompts = len(prompts) + min(len(self._queue.waiting), len(self._seats.free))
        budget = self._prefill_budget
        return budget.most(draft.n_decode, _first_row(prompts), n_prompts, short=short)

    def _first_is_short(self, prompts: list[Sequence]) -> bool:
        """Whether the first prompt is: of these, or else of those that wait."""
        first = prompts[0] if prompts else self._queue.head()
        if first is None:
            return True
        whole = len(first.tokens) - first.cached_tokens
        return self._prefill_budget.is_short(first.n_left, whole)

    def _plan_passing(
        self, prompts: list[Sequence], rows_first: int, draft: Draft, now: float
    ) -> None:
        """Rows of short prompts that pass longer ones, see `Passing`."""
        passed = 0
        while draft.rows_left:
            longest = min(self._passing.longest(rows_first) - passed, draft.tokens_left)
            rest = [seq for seq in prompts if seq not in draft.passed]
            seq = self._next_to_pass(rest, longest)
            if seq is None or not (seq.seated or self._boarding.seat(seq, draft, now)):
                break
            draft.passed.add(seq)
            passed += min(seq.n_left, draft.tokens_left)
            self._add_chunk(seq, draft, draft.tokens_left)
        if passed:
            draft.tokens_left = self._passing.spend(passed, draft.tokens_left)

    def _next_to_pass(self, prompts: list[Sequence], longest: int) -> Sequence | None:
        """The next prompt of at most so many rows that passes longer ones: of those with seats,
        but for the first, or else of those that wait. No prompt passes a head of the queue that
        lacks pages or that has lost its seat.
        """
        if longest <= 0:
            return None
        seated = min(prompts[1:], key=lambda seq: seq.n_left, default=None)
        if seated is not None and seated.n_left <= longest:
            return seated
        head = self._queue.head()
        if head is None or head.preemptions or not self._seats.free:
            return None
        if self._sequences.lacks_pages:
            return None
        waiting = self._queue.shortest(longest)
        return None if waiting is head and not prompts else waiting

    def _plan_prefill(self, prompts: list[Sequence], draft: Draft) -> None:
        """Go on with prompts that have boarded, in that order."""
        for seq in prompts:
            if not draft.tokens_left:
                return
            self._add_chunk(seq, draft, self._thrifty(seq, draft))

    def _plan_boarding(
        self, requests: RequestClass, may_board: int, draft: Draft, now: float
    ) -> None:
        """Fill so many seats from a queue, as long as the step can take prompt rows."""
        while may_board > 0 and draft.tokens_left and draft.rows_left:
            seq = self._boarding.seat_next(requests, draft, now)
            if seq is None:
                return
            self._add_chunk(seq, draft, self._thrifty(seq, draft))
            may_board -= 1

    def _thrifty(self, seq: Sequence, draft: Draft) -> int:
        """Rows of a prompt that are worth computing in this step rather than in the next."""
        count = min(seq.n_left, draft.tokens_left)
        if self._limits.encoder or not self._is_last(seq):
            return count
        return self._buckets.thrifty(draft.rows, count, draft.n_decode, len(draft.chunks) + 1)

    def _is_last(self, seq: Sequence) -> bool:
        """True when no other prompt can use the rows that this one leaves in the step."""
        if self._seats.free and self._sequences.class_of(seq).queue.waiting:
            return False
        for other in reversed(self._seats.prefilling):
            if other.background == seq.background:
                return other is seq
        return False

    def _add_chunk(self, seq: Sequence, draft: Draft, most: int) -> None:
        """At most `most` of the next known tokens of a sequence, as the step can take them."""
        start = seq.scheduled
        is_whole = draft.add_chunk(seq, most)
        if self._pages.covers_chunks:
            self._pages.cover(seq, start)
            self._moved.append(seq)
        if is_whole:
            self._seats.start_decoding(seq)

    def _plan_background(self, draft: Draft, now: float) -> None:
        """Prompts of the background, in a step without any other; rarely while live requests are
        open, since the next to come waits for that step's end.
        """
        if not self._seats.prefilling and not self._sequences.background.queue.waiting:
            return
        since = self._steps - self._background_prompts_at
        if self._sequences.live.n_open and since < _BACKGROUND_EVERY:
            return
        rows = draft.rows
        prompts = list(self._seats.prefilling)
        if not self._limits.encoder:  # whose prompts are not cut
            most = self._prefill_budget.most_in_background(draft.n_decode, _first_row(prompts))
            draft.tokens_left = min(draft.tokens_left, most)
        self._plan_prefill(prompts, draft)
        may_board = self._background_seats(now) - self._seats.n_background
        may_board = min(may_board, len(self._seats.free))
        self._plan_boarding(self._sequences.background, may_board, draft, now)
        if draft.rows > rows:
            self._background_prompts_at = self._steps

    def _background_seats(self, now: float) -> int:
        """Seats that the background may have: all, once no live request was open for a while."""
        if self._is_calm(now):
            return self._seats.count
        return self._limits.background_seats or max(1, self._seats.count // 4)

    def _is_calm(self, now: float) -> bool:
        return now - self._live_at >= _CALM_S

    def lets_others_first(self, plan: Plan, now: float) -> bool:
        """Whether no step should be launched behind this one: it is background work and no live
        request is open, so a request that arrives while it runs gets the next step.
        """
        return plan.background and not self._sequences.live.n_open and not self._is_calm(now)

    def _plan_batch(self, draft: Draft, now: float) -> None:
        """One batch after the other: all board, all prompts are computed, all decode until the last
        is done.
        """
        seats = self._seats
        if not seats.prefilling:
            self._decode.plan(draft, now)
            if draft.rows:
                draft.reserved = max(0, seats.batch - draft.rows)
        if not seats.n_taken:
            may_board = self._boarding.allowed(now)
            while may_board and self._boarding.seat_next(self._sequences.live, draft, now):
                may_board -= 1
        if seats.prefilling:
            self._plan_columns(draft)

    def _plan_columns(self, draft: Draft) -> None:
        """The next rows of a batch's prompts, as if each had been padded in front to the longest:
        all end in one step.

        Prompts with more rows left than the others go first, alone; the rows that the others would
        compute meanwhile are padding.
        """
        members = list(self._seats.prefilling)
        longest = max(seq.n_left for seq in members)
        width = min(longest, draft.tokens_left // self._seats.batch)
        for seq in members:
            self._add_chunk(seq, draft, width - longest + seq.n_left)
        computed = longest - max(seq.n_left for seq in members)
        draft.reserved = max(0, self._seats.batch * computed - draft.rows)


def _first_row(prompts: list[Sequence]) -> int:
    """Position of the next row of the first of these prompts, 0 without any."""
    return prompts[0].scheduled if prompts else 0
