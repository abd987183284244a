"""The step planner chooses the rows of a step: decode rows first, then prompt chunks of seated
sequences, then newly boarding sequences, and background requests last.
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

#: Seconds without a live request after which background requests may take every seat.
_CALM_S = 10.0
#: While a live request is open, one step in this many may have background prompt rows.
_BACKGROUND_EVERY = 8
#: A claimant's prompt gets a step without decode rows only if its rows are at most this share of
#: the token budget.
_FEW_ROWS = 0.125


class StepPlanner:
    """Adds chunks to the draft of each step."""

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
        # Sequences with prompt rows in the last step. The step being planned may overwrite the
        # pages behind their windows, since the device runs steps in order.
        self._moved: list[Sequence] = []
        #: Sequences that gave back pages since the last step; the scheduler adds the ones of a
        #: draft that was empty.
        self.dropped: list[Sequence] = []
        # Whether the last step computed only the prompt of a claimant.
        self._claimed_alone = False
        # Number of the last step with background prompt rows.
        self._background_prompts_at = 0
        # Clock seconds at which a live request was last open.
        self._live_at = -math.inf

    def fill(self, draft: Draft, step: int, now: float, alone: Sequence | None = None) -> None:
        """Fill the draft of the next step. step: number of steps planned so far. alone: compute
        only this sequence.
        """
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
        """Whether a claimant's prompt gets a step without decode rows. This is done only where a
        decode step takes so much longer than the shortest one that the decoding sequences, which go
        on in the next step, lose little.
        """
        few = claimant.wanted_rows <= _FEW_ROWS * self._buckets.token_budget
        if not few or self._claimed_alone:
            return False
        return self._prefill_budget.step_times.far_above_quickest(self._seats.n_decoding_live)

    def _seat_claimant(
        self, seq: Sequence, draft: Draft, now: float, *, alone: bool, instead: bool
    ) -> bool:
        """Give the claimant the free seat; the seat stays free if there are too few pages. Returns
        True if the step computes no other prompt: prompts of the tenant that gave way would make
        the step longer. alone: the step has no decode rows either, which could take the pages
        again; otherwise a prompt that does not fit shares the step. instead: another sequence lost
        its seat to this one.
        """
        if not self._boarding.take_seat(seq, draft, now, instead=instead):
            return False
        most = min(draft.tokens_left, self._prompt_rows([seq], draft, short=True))
        if not alone and seq.n_left > most:
            return False
        self._add_chunk(seq, draft, draft.tokens_left)
        return True

    def _plan_prompts(self, prompts: list[Sequence], draft: Draft, now: float) -> None:
        """Add rows of short prompts that pass longer ones, then of the prompts that have boarded,
        then of those that board now.
        """
        rows_first = self._rows_first(prompts)
        passes = self._next_to_pass(prompts, self._passing.longest(rows_first)) is not None
        most = self._prompt_rows(prompts, draft, short=passes or self._first_is_short(prompts))
        draft.tokens_left = min(draft.tokens_left, most)
        rows = draft.rows
        if passes:
            self._plan_passing(prompts, rows_first, draft, now)
            prompts = [seq for seq in prompts if seq not in draft.passed]
        if self._buckets.most_segments == 1 and self._is_brief(prompts, now):
            brief = self._prefill_budget.brief(draft.n_decode, _first_row(prompts))
            draft.tokens_left = min(draft.tokens_left, brief)
        self._plan_prefill(prompts, draft)
        self._plan_boarding(self._sequences.live, self._boarding.allowed(now), draft, now)
        if rows_first > draft.rows - rows:
            self._passing.save(draft.rows - rows)

    def goes_between(self, running: Plan) -> bool:
        """Whether a waiting short prompt may be computed between two segments of the running step.
        The sequences of this step must all have kept their pages, which it may still write.
        """
        if not self._queue.waiting or not self._seats.free or self._seats.holds:
            return False
        if self._sequences.lacks_pages or self._pages.covers_chunks or self._limits.encoder:
            return False
        if self._next_between(running, self._longest_between(running)) is None:
            return False
        return all([chunk.seq.seated for chunk in running.chunks])

    def fill_between(self, draft: Draft, running: Plan, now: float) -> None:
        """Fill the draft of a step that runs between two segments of the running one."""
        draft.tokens_left = min(draft.tokens_left, self._longest_between(running))
        while draft.rows_left:
            seq = self._next_between(running, draft.tokens_left)
            if seq is None or not self._boarding.seat(seq, draft, now):
                break
            self._add_chunk(seq, draft, draft.tokens_left)
        if draft.rows:
            self._passing.spend_between(draft.rows)

    def _longest_between(self, running: Plan) -> int:
        """The most prompt rows of a step between two segments of the running one."""
        left = sum([seq.n_left for seq in self._seats.live_prompts])
        return self._passing.longest_between(running.work.prompt + left)

    def _next_between(self, running: Plan, longest: int) -> Sequence | None:
        """The next waiting sequence of at most `longest` prompt rows that finds no page that the
        running step writes. Grammars are left out, because their masks may not be known yet, and
        siblings of a sequence whose prompt the running step scores.
        """
        head, seq = self._queue.head(), self._queue.shortest(longest)
        if head is None or head.preemptions or seq is None or seq.in_flight:
            return None
        if seq.matcher is not None or len(seq.prompt_logprobs) <= seq.scored:
            return None
        if not self._seats.free:
            return None
        return None if self._pages.finds_pages_of(running.prompt_chunks, seq) else seq

    def _rows_first(self, prompts: list[Sequence]) -> int:
        """Remaining rows of the boarded prompts and of the one that boards next. Later prompts wait
        while these rows do not fit one step.
        """
        head = self._queue.head()
        return sum([seq.n_left for seq in prompts]) + (head.wanted_rows if head else 0)

    def expects_short(self, now: float) -> bool:
        """Whether a short prompt that arrives now is expected to get a seat and to pass longer
        prompts.
        """
        return self._is_brief(self._seats.live_prompts, now)

    def _is_brief(self, prompts: list[Sequence], now: float) -> bool:
        """Whether steps should be brief: a short prompt is expected soon that gets a seat and
        passes one of these prompts, or the one that boards next.
        """
        if not self._seats.free or self._sequences.lacks_pages:
            return False
        head = self._queue.head()
        rows = [len(seq.tokens) - seq.cached_tokens for seq in prompts]
        return self._passing.expects(max([*rows, head.wanted_rows if head else 0]), now)

    def _prompt_rows(self, prompts: list[Sequence], draft: Draft, *, short: bool) -> int:
        """The most prompt rows of this step. It depends on the number of prompts that need rows:
        the seated ones and the waiting ones that have a free seat. short: the prompt that is
        computed first is short.
        """
        n_prompts = len(prompts) + min(len(self._queue.waiting), len(self._seats.free))
        budget = self._prefill_budget
        return budget.most(draft.n_decode, _first_row(prompts), n_prompts, short=short)

    def _first_is_short(self, prompts: list[Sequence]) -> bool:
        """Whether the first of these prompts is short, or without any the first waiting one."""
        first = prompts[0] if prompts else self._queue.head()
        if first is None:
            return True
        whole = len(first.tokens) - first.cached_tokens
        return self._prefill_budget.is_short(first.n_left, whole)

    def _plan_passing(
        self, prompts: list[Sequence], rows_first: int, draft: Draft, now: float
    ) -> None:
        """Add rows of short prompts that pass longer ones, see `Passing`."""
        while draft.rows_left and draft.tokens_left:
            rest = [seq for seq in prompts if seq not in draft.passed]
            seq = self._next_to_pass(rest, self._passing.longest(rows_first))
            if seq is None or not (seq.seated or self._boarding.seat(seq, draft, now)):
                break
            draft.passed.add(seq)
            if not seq.passes:
                seq.passes = True
                self._passing.pay(seq.n_left)
            self._add_chunk(seq, draft, draft.tokens_left)
        if draft.passed:
            draft.tokens_left = self._passing.left_to_others(draft.tokens_left)

    def _next_to_pass(self, prompts: list[Sequence], longest: int) -> Sequence | None:
        """The next prompt that passes longer ones: one that already does, or one of at most
        `longest` rows: a seated one (but not the first), or else a waiting one. No prompt passes a
        queue head that lacks pages or that has lost its seat.
        """
        for seq in prompts[1:]:
            if seq.passes:
                return seq
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
        """Add rows of boarded prompts, in boarding order."""
        for seq in prompts:
            if not draft.tokens_left:
                return
            self._add_chunk(seq, draft, self._thrifty(seq, draft))

    def _plan_boarding(
        self, requests: RequestClass, may_board: int, draft: Draft, now: float
    ) -> None:
        """Board up to `may_board` sequences from a queue, while the step can take prompt rows."""
        while may_board > 0 and draft.tokens_left and draft.rows_left:
            seq = self._boarding.seat_next(requests, draft, now)
            if seq is None:
                return
            self._add_chunk(seq, draft, self._thrifty(seq, draft))
            may_board -= 1

    def _thrifty(self, seq: Sequence, draft: Draft) -> int:
        """Number of a prompt's rows to compute in this step rather than in the next one."""
        count = min(seq.n_left, draft.tokens_left)
        if self._limits.encoder or not self._is_last(seq):
            return count
        return self._buckets.thrifty(draft.rows, count, draft.n_decode, len(draft.chunks) + 1)

    def _is_last(self, seq: Sequence) -> bool:
        """Whether no other prompt can use the rows that this one leaves in the step."""
        if self._seats.free and self._sequences.class_of(seq).queue.waiting:
            return False
        for other in reversed(self._seats.prefilling):
            if other.background == seq.background:
                return other is seq
        return False

    def _add_chunk(self, seq: Sequence, draft: Draft, most: int) -> None:
        """Add a chunk with at most `most` of a sequence's next known tokens, if they fit."""
        start = seq.scheduled
        is_whole = draft.add_chunk(seq, most)
        if self._pages.covers_chunks:
            self._pages.cover(seq, start)
            self._moved.append(seq)
        if is_whole:
            self._seats.start_decoding(seq)

    def _plan_background(self, draft: Draft, now: float) -> None:
        """Add background prompts, in a step without live prompts. While live requests are open this
        is done rarely, because the next live request waits for the end of that step.
        """
        if not self._seats.prefilling and not self._sequences.background.queue.waiting:
            return
        since = self._steps - self._background_prompts_at
        if self._sequences.live.n_open and since < _BACKGROUND_EVERY:
            return
        rows = draft.rows
        prompts = list(self._seats.prefilling)
        if not self._limits.encoder:  # an encoder's prompts are never split
            most = self._prefill_budget.most_in_background(draft.n_decode, _first_row(prompts))
            draft.tokens_left = min(draft.tokens_left, most)
        self._plan_prefill(prompts, draft)
        may_board = self._background_seats(now) - self._seats.n_background
        may_board = min(may_board, len(self._seats.free))
        self._plan_boarding(self._sequences.background, may_board, draft, now)
        if draft.rows > rows:
            self._background_prompts_at = self._steps

    def _background_seats(self, now: float) -> int:
        """Seats for background requests: all of them once no live request was open for _CALM_S."""
        if self._is_calm(now):
            return self._seats.count
        return self._limits.background_seats or max(1, self._seats.count // 4)

    def _is_calm(self, now: float) -> bool:
        return now - self._live_at >= _CALM_S

    def lets_others_first(self, plan: Plan, now: float) -> bool:
        """Whether no step should be launched after this one before it ends: it is background work
        and no live request is open, so a request that arrives while it runs gets the next step.
        """
        return plan.background and not self._sequences.live.n_open and not self._is_calm(now)

    def _plan_batch(self, draft: Draft, now: float) -> None:
        """Plan a step of a policy that batches: a whole batch boards, all its prompts are computed,
        and all its sequences decode until the last one is done.
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
        """Add the next rows of a batch's prompts, as if each were padded at the front to the length
        of the longest, so that all end in the same step.

        Prompts with more rows left than the others start alone; the rows that the others would
        compute in these steps count as padding.
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
