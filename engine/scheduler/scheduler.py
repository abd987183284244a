"""Who computes what in the next step: decode rows first, then prompt chunks, then whoever may
board.

Ordinary Python over counts, on whatever clock it is given; no device is needed. `plan` decides a
step, `commit` takes in what it brought. The host is one step behind: step k is planned before the
tokens of step k - 1 are known, so a sequence that has just ended may have one more row launched.
Seats and pages are handed on at once all the same: the device runs steps in order, so a row past
the end writes to its page before the next owner's rows do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from jitney.engine.errors import ConfigError, RequestError
from jitney.engine.scheduler.admission import Admission, SchedulerLimits
from jitney.engine.scheduler.buckets import Buckets
from jitney.engine.scheduler.estimates import PrefillBudget, StepTimeEstimate
from jitney.engine.scheduler.kv_pages import PagePool, publish, shareable_keys
from jitney.engine.scheduler.page_demand import PageDemand
from jitney.engine.scheduler.plan import Chunk, Draft, Occupancy, Plan, StepResult, StepWork
from jitney.engine.scheduler.policies import Situation, make_order, make_policy
from jitney.engine.scheduler.predicted_wait import PredictedWait
from jitney.engine.scheduler.prompt_scores import PromptScores
from jitney.engine.scheduler.results import Results
from jitney.engine.scheduler.sequence import Sequence
from jitney.engine.scheduler.state import SchedulerState
from jitney.engine.types import EngineRequest, FinishReason, Seat, SequenceOutput

__all__ = ["Scheduler", "SchedulerLimits"]

#: Seconds after which one who lost its seat to a lack of pages takes another's.
STALL_S = 1.2
#: Seconds and tokens that a seat is good for before it can be taken so: no turn passes without
#: progress.
TURN_S, TURN_TOKENS = 1.0, 16


class Scheduler:
    """Plans steps for the sequences of its state. clock: seconds, for admission; plan and commit
    are told the time.

    window: positions that the model sees at most, if all its layers have a window, else 0.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        buckets: Buckets,
        pool: PagePool,
        clock: Callable[[], float] = time.monotonic,
        eos_ids: Iterable[int] = (),
        vocab_size: int = 2**31 - 1,
        window: int = 0,
    ):
        if buckets.seats != limits.max_seats or buckets.token_budget <= limits.max_seats:
            raise ConfigError(
                f"buckets for {buckets.seats} seats and {buckets.token_budget} rows do not serve "
                f"{limits.max_seats} seats"
            )
        self.limits, self.buckets, self.pool, self.clock = limits, buckets, pool, clock
        self.step_times = StepTimeEstimate(buckets)
        self._policy = make_policy(limits.policy, limits.batches)
        #: Whether anybody can still come before somebody who is here has ended; written by whoever
        #: knows.
        self.more_to_come = True
        order = make_order(limits.order)
        self.state = SchedulerState(
            limits, pool, order.queue(), holds=self._policy.holds, window=window
        )
        self._admission = Admission(
            limits, pool, eos_ids, vocab_size, order.key, self.state.lengths
        )
        self._prefill_budget = PrefillBudget(
            self.step_times, limits.prefill_share, limits.target_itl_ms / 1000
        )
        self._predicted_wait = PredictedWait(
            limits,
            self.state,
            self._prefill_budget,
            pool,
            batch=limits.batch if self._policy.holds else 0,
        )
        self._demand = PageDemand(pool, self.state.lengths)
        if window:
            self._demand.most_each = self.state.window_pages
        self._turned_away: tuple[Sequence | None, int] = (
            None,
            0,
        )  # for lack of pages: whom, after how many departures
        self._scores = PromptScores(pool.page_size)
        self._results = Results(self.state, pool, self._scores)
        self._arrivals = self._steps = 0

    @property
    def has_open(self) -> bool:
        """True while any sequence lacks its terminal output."""
        return bool(self.state.groups)

    @property
    def steps(self) -> int:
        """Plans made so far; also the number of the newest."""
        return self._steps

    @property
    def has_outputs(self) -> bool:
        """True while `drain` has something to hand out."""
        return self.state.has_outputs

    def add(self, request: EngineRequest) -> None:
        """Let a request wait; raises RequestError (nothing is registered then) if it can or may
        not.
        """
        self.state.refuse_duplicate(request)
        self._arrivals += 1
        sequences, now = self._admission.sequences(request, self._arrivals), self.clock()
        self._predicted_wait.admit(sequences[0], now)
        self.state.add(request, sequences, now)

    def check_request(self, request: EngineRequest) -> None:
        """Raise RequestError if a request can never run here, however idle the engine; `add` checks
        the same.
        """
        self._admission.request_limits.check(request)

    def has_room(self, request: EngineRequest) -> bool:
        """Whether a request that can run here may wait now."""
        leader = self._admission.sequences(request, self._arrivals + 1)[0]
        try:
            self._predicted_wait.admit(leader, self.clock())
        except RequestError:
            return False
        return max(self.state.backlog.excess(leader.n_prompt, len(self.state.free_seats))) <= 0

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = "abort"
    ) -> None:
        """End a request (index None) or one of its sequences now; unknown ids have ended already
        and are no error.
        """
        self.state.abort(request_id, index, reason)

    def plan(self, now: float) -> Plan | None:
        """The next step, or None if there is nothing to compute; ends whoever is past its deadline
        first.
        """
        self.state.expire(now)
        draft = self._plan_batch(now) if self._policy.holds else self._plan_in_flight(now)
        if not draft.chunks:
            return None
        if draft.rows > draft.n_decode:
            self._share_prompts(draft)
        return self._plan_of(draft)

    def commit(self, plan: Plan, result: StepResult, now: float) -> list[SequenceOutput]:
        """Take in the tokens of a step, in order of planning, and say what became of its rows (in
        `plan`).

        Returns all outputs since the last call, those of aborts and deadlines included.
        """
        self._results.commit(plan, result, now)
        plan.finished, self.state.finished = self.state.finished, 0
        return self.drain()

    def drain(self) -> list[SequenceOutput]:
        """Outputs that have not been handed out yet."""
        return self.state.drain()

    def observe(self, plan: Plan, seconds: float) -> None:
        """A planned step took so long on the device; what is foreseen and promised rests on
        this.
        """
        self.step_times.observe(plan.bucket, seconds, plan.work.pairs)

    def pause(self, now: float) -> float:
        """Seconds in which no plan can come of who is here, because the policy lets everybody wait;
        0 if one can.
        """
        if self.state.n_seated or not self.state.queue:
            return 0.0
        wakes = min(self._policy.boards_at(self._situation(now)), self.state.next_deadline)
        return max(0.0, wakes - now)

    def take_released(self) -> list[int]:
        """Seats that a batch had kept and that have become free since the last call."""
        released, self.state.released = self.state.released, []
        return released

    def seat_map(self) -> list[Seat]:
        """Every seat, in order, with who sits in it."""
        return self.state.seat_map()

    def check(self) -> None:
        """Raise RuntimeError unless every sequence, seat, page and waiting token is accounted for
        exactly once.
        """
        self.state.check()

    def _plan_in_flight(self, now: float) -> Draft:
        """Whoever decodes, then the prompts that have boarded, then whoever may board."""
        relieved = self._relieve(now) if self.state.stalled else []
        claimant, displaced = self._make_way(now)
        draft = self._plan_decode(now)
        draft.preempted += relieved + displaced
        if claimant is not None:
            self._seat_claimant(claimant, draft, now)
        if self.state.prefilling or self.state.queue:
            first = next(iter(self.state.prefilling), None)
            draft.tokens_left = self._prefill_budget.most(
                draft.n_decode, first.scheduled if first else 0, self._prompts()
            )
            self._plan_prefill(draft)
            self._plan_boarding(draft, now)
        return draft

    def _prompts(self) -> int:
        """Prompts that want rows in the next step: of those who sit, and of those for whom there is
        a seat.
        """
        state = self.state
        return len(state.prefilling) + min(len(state.queue), len(state.free_seats))

    def _plan_batch(self, now: float) -> Draft:
        """One batch after the other: all board, all prompts are computed, all decode until the last
        is done.
        """
        state = self.state
        if state.prefilling:
            draft = Draft(self.buckets.token_budget, self.limits.max_seats)
        else:
            draft = self._plan_decode(now)
            draft.reserved = max(0, state.batch - draft.rows) if draft.rows else 0
        if not state.n_seated:
            self._seat_batch(draft, now)
        if state.prefilling:
            self._plan_columns(draft)
        return draft

    def _plan_decode(self, now: float) -> Draft:
        """One row for each sequence that decodes, unless its last token is already in flight; long
        contexts first.

        Kernels that work in groups of rows then give short contexts to short ones' groups.
        """
        rows, fed, dropped, preempted = self._decode_ready(now)
        count, chunks, keys, plain = len(rows), [], 0, True
        for seq in rows:
            start = seq.scheduled
            chunks.append(
                Chunk(seq, start, 1, True, True, 0, 1 if start < seq.computed_high else 0)
            )
            seq.scheduled = end = start + 1
            seq.in_flight += 1
            keys += end
            if not seq.plain:
                plain = False
        return Draft(
            self.buckets.token_budget - count,
            self.limits.max_seats - count,
            count,
            chunks,
            count,
            plain,
            fed=fed,
            dropped=dropped,
            preempted=preempted,
            keys=keys,
            longest=rows[0].scheduled if rows else 0,
        )

    def _decode_ready(
        self, now: float
    ) -> tuple[list[Sequence], list[Sequence], list[Sequence], list[Sequence]]:
        """(decoding sequences with a page to write to, those of them that just got it, those of
        these that gave back pages behind the window, those preempted), long contexts first.

        Those whose last token is in flight leave.
        """
        page_size = self.pool.page_size
        rows, needy, done = [], [], []
        for seq in self.state.longest_first():
            start = seq.scheduled
            if start + 1 >= seq.limit:
                done.append(seq)
                continue
            rows.append(seq)
            if (
                start % page_size == 0
            ):  # its pages are full: those of the prompt, and one for as many tokens since
                needy.append(seq)
        for seq in done:
            self.state.leave_early(seq)
        dropped = [seq for seq in needy if self.state.drop_behind(seq)] if self.state.window else []
        preempted = self._make_room(needy, now)
        if preempted:
            rows, needy, dropped = (
                [seq for seq in found if seq.seat >= 0] for found in (rows, needy, dropped)
            )
        for seq, page in zip(needy, self.pool.allocate(len(needy)) or (), strict=True):
            seq.pages.append(page)
        return rows, needy, dropped, preempted

    def _make_room(self, needy: list[Sequence], now: float) -> list[Sequence]:
        """Preempt by `sacrifice` until there is a page for each one that needs it; returns those.

        The last one in that order is never preempted, and alone it fits the pool (checked at
        admission): so it always goes on. Whoever lost its seat boards before anybody new, so that
        everybody gets there some day.
        """
        preempted: list[Sequence] = []
        if len(needy) > self.pool.available:
            ranked = sorted((*self.state.decoding, *self.state.prefilling), key=sacrifice)
            while sum(seq.seat >= 0 for seq in needy) > self.pool.available:
                preempted.append(ranked.pop())
                self.state.preempt(preempted[-1], now)
        return preempted

    def _relieve(self, now: float) -> list[Sequence]:
        """Preempt for whoever lost its seat longest ago, if that is too long ago; returns those.

        In a pool full of answers that all have far to go nobody may leave for seconds: then they
        take turns.
        """
        head, state = self.state.queue.head(), self.state
        if head is None or not too_long_stalled(head, now):
            return []
        missing = self.pool.pages_for(len(head.tokens)) + state.n_seated - self.pool.available
        if missing <= 0:
            return []
        ready = [
            seq
            for seq in (*state.decoding, *state.prefilling)
            if had_its_turn(seq, now) and seq.n_pages >= missing and seq.rank[0] >= head.rank[0]
        ]
        if not ready:
            return []
        other = min(ready, key=lambda seq: seq.n_pages)
        state.preempt(other, now)
        return [other]

    def _make_way(self, now: float) -> tuple[Sequence | None, list[Sequence]]:
        """(who may take a seat now though none was free, who was preempted for it).

        Streams that have begun keep their seats before those that have not; then whoever has most
        to compute again. Each gives way once at most, and boards again before anybody new.
        """
        state, seats = self.state, self.limits.max_seats
        if state.free_seats or not state.queue:
            return None, []
        seq = state.queue.claimant(seats)
        if seq is None or seq.in_flight:
            return None, []
        missing = self.pool.pages_for(len(seq.tokens)) + state.n_seated - self.pool.available
        crowding = state.queue.crowding(seats)
        ready = [
            other
            for other in (*state.prefilling, *state.decoding)
            if other.request.account in crowding
            and not other.preemptions
            and other.n_pages >= missing
        ]
        if not ready:
            return None, []
        other = max(ready, key=sacrifice)
        state.preempt(other, now)
        return seq, [other]

    def _seat_claimant(self, seq: Sequence, draft: Draft, now: float) -> None:
        """Take the seat that was made free; it stays free if too few pages are."""
        if self._take_pages(seq, draft, now, instead=True):
            self.state.seat(seq, now)
            draft.boarded.append(seq)

    def _plan_prefill(self, draft: Draft) -> None:
        """Go on with the prompts that have boarded, in that order."""
        for seq in list(self.state.prefilling):
            if not draft.tokens_left:
                return
            self._add_chunk(seq, draft, self._thrifty(seq, draft))

    def _plan_boarding(self, draft: Draft, now: float) -> None:
        """Fill free seats from the queue, as long as the step can take prompt rows."""
        may_board = self._policy.boarders(self._situation(now)) if self.state.queue else 0
        while may_board > 0 and draft.tokens_left and draft.rows_left:
            seq = self._seat_next(draft, now)
            if seq is None:
                return
            self._add_chunk(seq, draft, self._thrifty(seq, draft))
            may_board -= 1

    def _seat_batch(self, draft: Draft, now: float) -> None:
        """Let a whole batch board, or as many of it as find pages."""
        may_board = self._policy.boarders(self._situation(now)) if self.state.queue else 0
        while may_board > 0 and self._seat_next(draft, now) is not None:
            may_board -= 1

    def _situation(self, now: float) -> Situation:
        state = self.state
        arrivals = (seq.request.arrival for seq in state.queue.members())
        # Who is about to end may be followed by somebody: a closed loop's next request comes then.
        more = self.more_to_come or bool(state.leaving)
        return Situation(now, len(state.free_seats), state.batch, len(state.queue), arrivals, more)

    def _seat_next(self, draft: Draft, now: float) -> Sequence | None:
        """The head of the queue takes a seat; None if it cannot yet, and then it holds up those
        behind.

        Nor does one board whose token is in flight since its preemption: it would be sampled a
        second time.
        """
        state = self.state
        seq = state.queue.head()
        if seq is None or seq.in_flight or not self._take_pages(seq, draft, now):
            return None
        state.seat(seq, now)
        draft.boarded.append(seq)
        return seq

    def _plan_columns(self, draft: Draft) -> None:
        """The next rows of a batch's prompts, as if each had been padded in front to the longest:
        all end in one step.

        Whoever has more rows left than the others goes first, alone; the rows that the others would
        compute meanwhile are padding.
        """
        members = list(self.state.prefilling)
        longest = max(len(seq.tokens) - seq.scheduled for seq in members)
        width = min(longest, self.buckets.token_budget // self.state.batch)
        for seq in members:
            self._add_chunk(seq, draft, width - longest + len(seq.tokens) - seq.scheduled)
        computed = longest - max(len(seq.tokens) - seq.scheduled for seq in members)
        draft.reserved = max(0, self.state.batch * computed - draft.rows)

    def _take_pages(
        self, seq: Sequence, draft: Draft, now: float, *, instead: bool = False
    ) -> bool:
        """Pages for all known tokens of a sequence, as many as possible shared; False if there are
        too few. instead: of somebody who gave way, so that one more is not one more.

        Each seated sequence is left one page to grow into, and pages should last until all have
        ended; otherwise the newcomer would soon be preempted for them.
        """
        pool = self.pool
        keys = shareable_keys(seq, pool.page_size)
        if seq.must_score:
            self._find_scores(seq, keys)
            # The row before the first score that is missing brings it: it must be computed, hence
            # its whole page.
            keys = keys[: seq.scored // pool.page_size]
        shared = pool.match(keys)
        fresh = pool.pages_for(len(seq.tokens)) - len(shared)
        enough = fresh + self.state.n_seated <= pool.available
        if not enough or not (instead or self._pages_last(seq, fresh, now)):
            pool.release(shared)
            return False
        seq.pages = shared + (pool.allocate(fresh) or [])
        seq.published = seq.shared = len(shared)
        seq.scheduled = start = len(shared) * pool.page_size
        found = max(0, min(start, seq.n_prompt) - seq.computed_high)
        seq.cached_tokens += found
        draft.cached_tokens += found
        return True

    def _pages_last(self, seq: Sequence, fresh: int, now: float) -> bool:
        """Whether the pool should last until the end of all who ride if a sequence, in need of
        fresh pages, rides too.

        Certainly if it lasts though all get as long as they may, or if nobody else rides. Whoever
        was turned away is not looked at again before somebody has left: those who go on only come
        to need more.
        """
        state = self.state
        if not state.n_seated or state.most_pages + state.most_of(seq) <= self.pool.capacity:
            return True
        if too_long_stalled(seq, now):
            return True
        if self._turned_away == (seq, state.departures):
            return False
        if self.step_times.pays(state.n_seated) and self._demand.fits(
            (*state.prefilling, *state.decoding), seq, fresh
        ):
            return True
        self._turned_away = seq, state.departures
        return False

    def _find_scores(self, seq: Sequence, keys: list[bytes]) -> None:
        """A prompt that is to be scored boards for the first time: take over what is known of its
        first pages.
        """
        most = seq.request.sampling.prompt_logprobs
        if seq.scored or most is None:
            return
        found = self._scores.find(keys, most)
        if found:
            seq.prompt_logprobs = found
            seq.scored = len(found) - 1

    def _add_chunk(self, seq: Sequence, draft: Draft, most: int) -> None:
        """At most `most` of the next known tokens, as the step can take them; the last one's logits
        are sampled.
        """
        if self.state.window and self.state.drop_behind(seq):
            draft.dropped.append(seq)
        start, known = seq.scheduled, len(seq.tokens)
        count = min(known - start, most, draft.tokens_left)
        if count <= 0:
            return
        end = start + count
        # Positions before seq.scored have been scored: before a preemption, or by whoever had the
        # same first pages.
        scored = max(0, min(end, seq.n_prompt - 1) - seq.scored) if seq.must_score else 0
        recomputed = max(0, min(end, seq.computed_high) - start)
        chunk = Chunk(seq, start, count, False, end == known, scored, recomputed, seq.scored)
        draft.chunks.append(chunk)
        draft.rows += count
        draft.pairs += count * (start + end + 1) // 2
        draft.tokens_left -= count
        draft.rows_left -= chunk.logit_rows
        draft.plain = draft.plain and seq.plain
        seq.scored += scored
        seq.scheduled = end
        if chunk.sample:
            seq.in_flight += 1
            self.state.start_decoding(seq)

    def _thrifty(self, seq: Sequence, draft: Draft) -> int:
        """Rows of a prompt that are worth computing in this step rather than in the next."""
        count = min(len(seq.tokens) - seq.scheduled, draft.tokens_left)
        if not self._is_last(seq):
            return count
        return self.buckets.thrifty(draft.rows, count, draft.n_decode)

    def _is_last(self, seq: Sequence) -> bool:
        """True when no other prompt can use the rows that this one leaves in the step."""
        state = self.state
        return next(reversed(state.prefilling)) is seq and not (
            state.free_seats and len(state.queue)
        )

    def _share_prompts(self, draft: Draft) -> None:
        """Publish the full pages that this step computes; only later plans see them: no step reads
        what it writes.
        """
        for chunk in draft.chunks[draft.n_decode :]:
            publish(chunk.seq, self.pool)
            if chunk.end >= chunk.seq.n_prompt:
                self.state.release_siblings(chunk.seq)

    def _plan_of(self, draft: Draft) -> Plan:
        self._steps += 1
        state = self.state
        bucket = self.buckets.choose(
            tokens=draft.rows + draft.reserved,
            sequences=len(draft.chunks),
            decode_only=draft.rows == draft.n_decode,
            logit_rows=self.limits.max_seats - draft.rows_left,
        )
        occupancy = Occupancy(
            state.n_seated,
            self.pool.used,
            self.pool.n_cached,
            state.n_waiting,
            state.backlog.tokens,
        )
        work = StepWork(
            draft.n_decode, draft.rows - draft.n_decode, draft.keys, draft.longest, draft.pairs
        )
        return Plan(
            self._steps,
            draft.chunks,
            bucket,
            draft.plain,
            work,
            draft.boarded,
            draft.fed,
            draft.dropped,
            draft.preempted,
            draft.cached_tokens,
            draft.reserved,
            occupancy,
        )


def too_long_stalled(seq: Sequence, now: float) -> bool:
    """Whether a waiting sequence lost its seat longer ago than a stream should stand still."""
    return seq.preemptions > 0 and now - seq.unseated_at >= STALL_S


def had_its_turn(seq: Sequence, now: float) -> bool:
    """Whether a seated sequence may give way to one that has stood still for too long."""
    return now - seq.sat_at >= TURN_S and len(seq.tokens) - seq.sat_with >= TURN_TOKENS


def sacrifice(seq: Sequence) -> tuple[float, bool, int, int, int]:
    """The order in which seated sequences keep their seats when pages run out, the last one loses
    it first.

    The first class before the last; streams that began before those that did not, whose clients see
    no stall; then those with most rows to compute again; then the oldest.
    """
    group, number, index = seq.rank
    return group, seq.first_token_at is None, -seq.scheduled, number, index
