"""Who computes what in the next step: decode rows first, then prompt chunks, then whoever may
board.

Ordinary Python over counts, on whatever clock it is given; no device is needed. `plan` decides a
step, `commit` takes in what it brought. The host is one step behind: step k is planned before the
tokens of step k - 1 are known, so a sequence that has just ended may have one more row launched.
Seats and pages are handed on at once all the same: the device runs steps in order, so a row past
the end writes to its page before the next owner's rows do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import msgspec

from jitney.engine.common.engine_info import Seat
from jitney.engine.common.errors import ConfigError, ErrorInfo, RequestError
from jitney.engine.common.outputs import FinishReason, SequenceOutput
from jitney.engine.common.requests import EngineRequest, RequestLimits, pooling_of
from jitney.engine.core.faults import StepBlame
from jitney.engine.core.scheduler.admission.control import AdmissionControl
from jitney.engine.core.scheduler.admission.predicted_wait import PredictedWait
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.estimates import PrefillBudget, StepTimeEstimate
from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.page_demand import PageDemand
from jitney.engine.core.scheduler.passing import Passing
from jitney.engine.core.scheduler.plan import Chunk, Draft, Occupancy, Plan, StepResult
from jitney.engine.core.scheduler.policies import Situation, make_order, make_policy
from jitney.engine.core.scheduler.preemption import Preemption
from jitney.engine.core.scheduler.prompt_scores import PromptScores
from jitney.engine.core.scheduler.queues import RequestClass, RequestWork
from jitney.engine.core.scheduler.results import Results
from jitney.engine.core.scheduler.row_limit import RowLimit
from jitney.engine.core.scheduler.sequence import Matcher, Sequence
from jitney.engine.core.scheduler.sequence_factory import SequenceFactory
from jitney.engine.core.scheduler.state import SchedulerState

_log = logging.getLogger("jitney.core")

#: Seconds without a live request after which the background may take every seat.
_CALM_S = 10.0
#: While a live request is open, one step in so many may have prompt rows of the background.
_BACKGROUND_EVERY = 8
#: Prompt rows that one counts for whose log-probabilities are wanted, while somebody decodes: the
#: output head and the best of all tokens take as long as the layers of a small model (1.7 to 2.2
#: times a row's time with 49,152 tokens), and more with more tokens.
_SCORED_ROW = 3
#: Of the token budget: the most prompt rows that a claimant may have in a step without streams.
_FEW_ROWS = 0.125
_FAILED = ErrorInfo(
    "request_failed", "computing this request failed, also when it was computed alone"
)

__all__ = ["Scheduler", "SchedulerLimits"]


class Scheduler:
    """Plans steps for the sequences of its state, and takes in what they brought."""

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
        """clock: seconds, for admission; plan and commit are told the time. eos_ids end a sequence.
        window: positions that the model sees at most, if all its layers have a window, else 0.
        """
        _check_buckets(buckets, limits.max_seats)
        self.limits = limits
        self.buckets = buckets
        self.pool = pool
        self.clock = clock
        #: How long steps take; `observe` feeds it.
        self.step_times = StepTimeEstimate(buckets)
        #: Whether anybody can still come before somebody who is here has ended; written by whoever
        #: knows.
        self.more_to_come = True
        order = make_order(limits.order)
        self._policy = make_policy(limits)
        #: Every open sequence, in the one place where it is.
        self.state = SchedulerState(
            limits, pool, order.queue, holds=self._policy.holds, window=window
        )
        lengths = self.state.lengths
        self._factory = SequenceFactory(
            pool=pool,
            request_limits=_request_limits(limits, pool, vocab_size),
            eos_ids=frozenset(eos_ids),
            class_of=order.key,
            lengths=lengths,
        )
        self._prefill_budget = PrefillBudget(
            self.step_times, limits.prefill_share, limits.target_itl_ms / 1000
        )
        batch = limits.batch if self._policy.holds else 0
        self._passing = Passing(buckets.token_budget)
        predicted_wait = PredictedWait(
            limits, self.state, self._prefill_budget, pool, self._passing, batch=batch
        )
        self._admission = AdmissionControl(limits, self.state, predicted_wait)
        self._preemption = Preemption(self.state, pool, limits.max_seats)
        self._demand = PageDemand(pool, lengths)
        if window:
            self._demand.most_each = self.state.window_pages
        # Who was turned away for lack of pages last, after how many departures.
        self._turned_away: tuple[Sequence | None, int] = (None, 0)
        self._scores = PromptScores(pool.page_size)
        self._results = Results(self.state, pool, self._scores)
        self._suspects = StepBlame()
        # Rows that a step has at most, never fewer than all seats need.
        self._row_limit = RowLimit([bucket.tokens for bucket in buckets.mixed_for(buckets.seats)])
        self._arrivals = 0
        self._steps = 0
        # The last step was a claimant's alone.
        self._claimed_alone = False
        # The last step with prompt rows that nobody waits for.
        self._background_prompts_at = 0

    @property
    def has_open(self) -> bool:
        """True while any sequence lacks its terminal output."""
        return bool(self.state.groups)

    @property
    def predicted_wait_s(self) -> float:
        """Seconds until a request that comes now should board, behind all that wait and all prompts
        that are not computed yet. Takes some microseconds for each seat that is taken.
        """
        return self._admission.predicted_wait.of_last

    @property
    def steps(self) -> int:
        """Plans made so far; also the number of the newest."""
        return self._steps

    @property
    def n_waiting(self) -> int:
        """Sequences that wait for a seat."""
        return self.state.n_waiting

    @property
    def has_outputs(self) -> bool:
        """True while `drain` has something to hand out."""
        return self.state.has_outputs

    def add(self, request: EngineRequest, new_matcher: Callable[[], Matcher] | None = None) -> None:
        """Let a request wait; raises RequestError (nothing is registered then) if it can or may
        not. One that an earlier core had was let in there and may wait here.

        new_matcher: called for each of its sequences, if they are held to a grammar.
        """
        self.state.refuse_duplicate(request)
        self._refuse_background(request)
        self._arrivals += 1
        leader = self._factory.leader(request, self._arrivals)
        if request.resumed is None:
            self._admission.admit(leader, self.clock())
        sequences = [leader, *self._factory.siblings(leader)]
        if new_matcher is not None:
            for seq in sequences:
                seq.matcher = new_matcher()
        if request.resumed is not None:
            sequences = self._factory.continued(sequences, request.resumed)
        work = RequestWork(len(sequences), len(request.prompt), len(sequences) * leader.expected)
        self.state.add(request, sequences, work)

    def _refuse_background(self, request: EngineRequest) -> None:
        """Where a batch keeps its seats to its end, nobody in it could give way."""
        if request.background and self._policy.holds:
            raise RequestError("batches need a server with the policy continuous")

    def serve_adapters(self, numbers: Iterable[int]) -> None:
        """Let requests choose from these adapters, too."""
        limits = self.request_limits
        adapters = limits.adapters.union(numbers)
        if adapters != limits.adapters:
            self._factory.request_limits = msgspec.structs.replace(limits, adapters=adapters)

    @property
    def open_adapters(self) -> set[int]:
        """Numbers of the adapters that open requests ask for."""
        return {group.request.adapter for group in self.state.groups.values()}

    @property
    def request_limits(self) -> RequestLimits:
        """What a request is checked against."""
        return self._factory.request_limits

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        return self._factory.eos_ids

    @property
    def has_place(self) -> bool:
        """Whether somebody who came now would find a seat: free, behind all who wait or, as a short
        prompt is expected to, before longer ones; or as another tenant's share.
        """
        if self._policy.holds:
            return False
        state, queue = self.state, self.state.queue
        if state.open_seats > len(queue) or queue.gives_way(self.limits.max_seats):
            return True
        return self._expects_short(state.live_prompts, self.clock())

    def check_request(self, request: EngineRequest) -> None:
        """Raise RequestError if a request can never run here, however idle the engine; `add` checks
        the same.
        """
        self._factory.check(request)

    def has_room(self, request: EngineRequest) -> bool:
        """Whether a request that can run here may wait now."""
        leader = self._factory.leader(request, self._arrivals + 1)
        return self._admission.has_room(leader, self.clock())

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = "abort"
    ) -> None:
        """End a request (index None) or one of its sequences now; unknown ids have ended already
        and are no error.
        """
        self.state.abort(request_id, index, reason)

    def end(self, seq: Sequence, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """End an open sequence between two steps."""
        self.state.end(seq, reason, error)

    def sit_out(self, chunk: Chunk) -> None:
        """The token of a chunk of the newest plan does not count, since nobody knows yet by what it
        is chosen. Its sequence has no row in a plan until that is known, and then the last one
        again.
        """
        seq = chunk.seq
        if not seq.seated:
            return  # the token is stale anyway (`Replay`)
        chunk.sits_out = True
        seq.computed_high = max(seq.computed_high, seq.scheduled)
        seq.scheduled -= 1
        seq.in_flight -= 1
        self.state.reorder()

    def plan(self, now: float) -> Plan | None:
        """The next step, or None if there is nothing to compute; ends whoever is past its deadline
        first.
        """
        self.state.expire(now)
        self._admission.predicted_wait.pass_step()
        if self.state.live.requests:
            self.state.live_at = now
        self._row_limit.pass_time(now)
        draft = Draft(self._row_limit.rows, self.limits.max_seats)
        suspect = self._suspects.first
        if suspect is not None:
            self._plan_alone(suspect, draft, now)
        elif self._policy.holds:
            self._plan_batch(draft, now)
        else:
            self._plan_in_flight(draft, now)
        self.state.places.step(now, crowded=self.state.crowded)
        if not draft.chunks:
            return None
        self._share_prompts(draft)
        return self._plan_of(draft)

    def commit(self, plan: Plan, result: StepResult, now: float) -> list[SequenceOutput]:
        """Take in the tokens of a step, in order of planning, and say what became of its rows (in
        `plan`).

        Returns all outputs since the last call, those of aborts and deadlines included.
        """
        self._results.commit(plan, result, now)
        self._judge(plan, now)
        plan.finished, self.state.finished = self.state.finished, 0
        return self.take_outputs()

    def take_outputs(self) -> list[SequenceOutput]:
        """Outputs that have not been handed out yet."""
        return self.state.take_outputs()

    def observe(self, plan: Plan, seconds: float, gap: float = 0.0) -> None:
        """A planned step took so long on the device, which had waited for the host for `gap`
        seconds before; what is foreseen and promised rests on this.
        """
        self.step_times.observe(plan.bucket, seconds, plan.work.pairs, plan.rows, gap)

    def pause(self, now: float) -> float:
        """Seconds in which no plan can come of who is here, because the policy lets everybody wait;
        0 if one can.
        """
        if self.state.n_seated or not self.state.queue or self._suspects:
            return 0.0
        wakes = min(self._policy.boards_at(self._situation(now)), self.state.next_deadline)
        return max(0.0, wakes - now)

    @property
    def isolating_failure(self) -> bool:
        """Somebody is computed alone, to see whether its rows make a step fail: no step may be
        launched behind another one.
        """
        return bool(self._suspects)

    def step_failed(self, plan: Plan, now: float, *, out_of_memory: bool) -> None:
        """A step could not be launched or brought nothing, and the device's state is new.

        Everybody waits again, with the tokens that are known. Where memory was short and a smaller
        step is possible, prompts get fewer rows for a while (not those of an encoder, which are
        never cut); else each sequence of the step is computed alone, and the one that fails again
        ends with its request.
        """
        self.state.unseat_all(now)
        guilty = self._suspects.on_trial(plan)
        if out_of_memory and not self.limits.encoder and self._row_limit.shrink(now):
            return
        if guilty is None:
            self._suspects.accuse(plan)
            return
        self._suspects.clear()
        if guilty.finish is None:
            _log.error("request %s made a step fail, also alone: it ends", guilty.request_id)
            for seq in self.state.open_of(guilty.request_id):
                self.state.end(seq, "error", _FAILED)

    def _judge(self, plan: Plan, now: float) -> None:
        """A step has come back: a suspect with a decode row in it, or that ended in it, passes."""
        seq = self._suspects.on_trial(plan)
        if seq is None or not (plan.chunks[0].decode or seq.finish is not None):
            return
        self._suspects.acquit()
        if seq.seated:
            self.state.start_over(seq, now)
        if not self._suspects:
            _log.warning("a step failed, and none of its sequences fails alone")

    def forget_prefixes(self) -> None:
        """Let no later prompt find what was computed for an earlier one."""
        self.pool.clear()
        self._scores.clear()

    def take_unseated(self) -> list[Sequence]:
        """Who has lost its seat since the last call, other than for a plan."""
        unseated, self.state.unseated = self.state.unseated, []
        return unseated

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

    def _plan_in_flight(self, draft: Draft, now: float) -> None:
        """Whoever decodes, then the prompts that have boarded, then whoever may board; the
        background last.
        """
        if self.state.background.n_seated:
            draft.preempted += self._preemption.for_live(now)
        if self.state.stalled:
            draft.preempted += self._preemption.for_stalled(now)
        claimant = self._make_way(draft, now)
        alone = claimant is not None and self._goes_alone(claimant)
        if not alone:
            self._plan_decode(draft, now)
        self._claimed_alone = False
        if claimant is not None and self._seat_claimant(claimant, draft, now):
            self._claimed_alone = alone
            return
        if alone:
            self._plan_decode(draft, now)
        prompts = self.state.live_prompts
        if prompts or self.state.n_seatable:
            self._plan_prompts(prompts, draft, now)
        elif not self.state.queue and (self.state.prefilling or self.state.background.queue):
            self._plan_background(draft, now)

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
        if self._expects_short(prompts, now):
            brief = self._prefill_budget.brief(draft.n_decode)
            draft.tokens_left = min(draft.tokens_left, brief)
        self._plan_prefill(prompts, draft)
        self._plan_boarding(self.state.live, self._may_board(now), draft, now)
        if rows_first > draft.rows - rows:
            self._passing.save(draft.rows - rows)

    def _rows_first(self, prompts: list[Sequence]) -> int:
        """Rows of the prompts that have boarded and of the one that boards next: while they do not
        fit a step, whoever comes after them waits.
        """
        head = self.state.queue.head()
        return sum([seq.n_left for seq in prompts]) + (head.wanted_rows if head else 0)

    def _expects_short(self, prompts: list[Sequence], now: float) -> bool:
        """Whether a short prompt should come soon that finds a seat and passes one of these, or the
        one that boards next.
        """
        state = self.state
        if not state.free_seats or state.lacks_pages:
            return False
        head = state.queue.head()
        rows = [len(seq.tokens) - seq.cached_tokens for seq in prompts]
        return self._passing.expects(max([*rows, head.wanted_rows if head else 0]), now)

    def _plan_passing(
        self, prompts: list[Sequence], rows_first: int, draft: Draft, now: float
    ) -> None:
        """Rows of short prompts that pass longer ones, see `Passing`."""
        passed = 0
        while draft.rows_left:
            longest = min(self._passing.longest(rows_first) - passed, draft.tokens_left)
            rest = [seq for seq in prompts if seq not in draft.passed]
            seq = self._next_to_pass(rest, longest)
            if seq is None or not (seq.seated or self._board(seq, draft, now)):
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
        state = self.state
        seated = min(prompts[1:], key=_n_left, default=None)
        if seated is not None and seated.n_left <= longest:
            return seated
        head = state.queue.head()
        if head is None or head.preemptions or state.lacks_pages or not state.free_seats:
            return None
        waiting = state.queue.shortest(longest)
        return None if waiting is head and not prompts else waiting

    def _plan_background(self, draft: Draft, now: float) -> None:
        """Prompts that nobody waits for, in a step without any other; rarely while somebody is
        here, since whoever comes next waits for that step's end.
        """
        state = self.state
        if state.live.requests and self._steps - self._background_prompts_at < _BACKGROUND_EVERY:
            return
        rows = draft.rows
        prompts = list(state.prefilling)
        if not self.limits.encoder:  # whose prompts are not cut
            most = self._prefill_budget.most_in_background(draft.n_decode, _first_row(prompts))
            draft.tokens_left = min(draft.tokens_left, most)
        self._plan_prefill(prompts, draft)
        may_board = min(
            self._background_seats(now) - state.background.n_seated, len(state.free_seats)
        )
        self._plan_boarding(state.background, may_board, draft, now)
        if draft.rows > rows:
            self._background_prompts_at = self._steps

    def _is_calm(self, now: float) -> bool:
        return now - self.state.live_at >= _CALM_S

    def lets_others_first(self, plan: Plan, now: float) -> bool:
        """Nothing is to be launched behind this step, because nobody waits for it, nor for the next
        one: whoever comes while it runs then has the next one.
        """
        return plan.background and not self.state.live.requests and not self._is_calm(now)

    def _background_seats(self, now: float) -> int:
        """Seats that the background may have: all, once nobody else has been here for a while."""
        if self._is_calm(now):
            return self.limits.max_seats
        return self.limits.background_seats or max(1, self.limits.max_seats // 4)

    def _plan_alone(self, seq: Sequence, draft: Draft, now: float) -> None:
        """The next rows of one sequence, with nobody beside it."""
        if not seq.seated and self._take_pages(seq, draft, now):
            self.state.seat(seq, now)
            draft.boarded.append(seq)
        if seq in self.state.decoding:
            self._plan_decode(draft, now)
        elif seq.seated:
            self._add_chunk(seq, draft, draft.tokens_left)

    def _plan_batch(self, draft: Draft, now: float) -> None:
        """One batch after the other: all board, all prompts are computed, all decode until the last
        is done.
        """
        state = self.state
        if not state.prefilling:
            self._plan_decode(draft, now)
            if draft.rows:
                draft.reserved = max(0, state.batch - draft.rows)
        if not state.n_seated:
            self._seat_batch(draft, now)
        if state.prefilling:
            self._plan_columns(draft)

    def _make_way(self, draft: Draft, now: float) -> Sequence | None:
        """Who may take a seat though none was free: somebody else has just lost one for it."""
        if self.state.free_seats or not self.state.queue:
            return None
        claimant = self.state.queue.claimant(self.limits.max_seats)
        if claimant is None or claimant.in_flight:
            return None
        displaced = self._preemption.for_claimant(claimant, now)
        draft.preempted += displaced
        return claimant if displaced else None

    def _seat_claimant(self, seq: Sequence, draft: Draft, now: float) -> bool:
        """Take the seat that was made free; it stays free if too few pages are. True where the
        step computes its whole prompt and no other's: the prompts of the tenant that gave way
        would make it longer.
        """
        if not self._take_pages(seq, draft, now, instead=True):
            return False
        self.state.seat(seq, now)
        draft.boarded.append(seq)
        if seq.n_left > min(draft.tokens_left, self._prompt_rows([seq], draft, short=True)):
            return False
        self._add_chunk(seq, draft, draft.tokens_left)
        return True

    def _goes_alone(self, claimant: Sequence) -> bool:
        """Whether a claimant's prompt has a step without the streams, which go on in the next one:
        where a step of theirs takes so much longer that they lose little by it.
        """
        few = claimant.wanted_rows <= _FEW_ROWS * self.buckets.token_budget
        if not few or self._claimed_alone:
            return False
        return self.step_times.far_above_least(self.state.n_decoding_live)

    def _plan_decode(self, draft: Draft, now: float) -> None:
        """One row for each sequence that decodes, unless its last token is already in flight; long
        contexts first.

        Kernels that work in groups of rows then give short contexts to short ones' groups.
        """
        rows = self._decoding(draft, now)
        if not rows:
            return
        chunks = draft.chunks
        keys, greedy_only = 0, True
        for seq in rows:
            start = seq.scheduled
            recomputed = 1 if start < seq.computed_high else 0
            row = Chunk(seq, start, 1, decode=True, sample=True, recomputed=recomputed)
            chunks.append(row)
            seq.scheduled = start + 1
            seq.in_flight += 1
            keys += start + 1
            if not seq.greedy_only:
                greedy_only = False
                draft.masked |= seq.matcher is not None
        draft.greedy_only = greedy_only
        draft.keys = keys
        draft.longest = rows[0].scheduled
        draft.rows = draft.n_decode = len(rows)
        draft.tokens_left -= len(rows)
        draft.rows_left -= len(rows)

    def _decoding(self, draft: Draft, now: float) -> list[Sequence]:
        """Those who decode and have a page to write to, long contexts first.

        Those whose last token is in flight leave; some may lose their seat to a lack of pages.
        """
        rows: list[Sequence] = []
        needy: list[Sequence] = []
        done: list[Sequence] = []
        room = self._background_rows()
        page_size = self.pool.page_size
        for seq in self.state.longest_first():
            start = seq.scheduled
            if start + 1 >= seq.limit:
                done.append(seq)
                continue
            if seq.background:
                room -= 1
                if room < 0:
                    self.state.reorder()
                    continue
            if seq.matcher is not None and seq.matcher.late:
                self.state.reorder()
                continue
            rows.append(seq)
            # Its pages are full: those of the prompt, and one for as many tokens since.
            if start % page_size == 0 and start == len(seq.pages) * page_size:
                needy.append(seq)
        for seq in done:
            self.state.leave_early(seq)
        if not needy:
            return rows
        if self.state.window:
            draft.dropped = [seq for seq in needy if self.state.drop_behind(seq)]
        preempted = self._preemption.for_pages(needy, now)
        if preempted:
            draft.preempted += preempted
            rows, needy, draft.dropped = _seated(rows), _seated(needy), _seated(draft.dropped)
        pages = self.pool.allocate(len(needy)) or []
        for seq, page in zip(needy, pages, strict=True):
            seq.pages.append(page)
        draft.fed = needy
        return rows

    def _background_rows(self) -> int:
        """Rows that decode in this step and that nobody waits for, at most: none beside a live
        prompt, and beside live streams as many as do not slow them down.
        """
        if not self.state.background_decodes:
            return 0
        live = self.state.n_decoding_live
        return self.step_times.rows_beside(live) if live else self.limits.max_seats

    def _prompt_rows(self, prompts: list[Sequence], draft: Draft, *, short: bool) -> int:
        """The most prompt rows of this step, by the prompts that want some: of those who sit, and
        of those for whom there is a seat. short: a short one is computed first.
        """
        wanting = len(prompts) + self.state.n_seatable
        budget = self._prefill_budget
        return budget.most(draft.n_decode, _first_row(prompts), wanting, short=short)

    def _first_is_short(self, prompts: list[Sequence]) -> bool:
        """Whether the first prompt is: of these, or else of those who wait."""
        first = prompts[0] if prompts else self.state.queue.head()
        if first is None:
            return True
        whole = len(first.tokens) - first.cached_tokens
        return self._prefill_budget.is_short(first.n_left, whole)

    def _plan_prefill(self, prompts: list[Sequence], draft: Draft) -> None:
        """Go on with prompts that have boarded, in that order."""
        for seq in prompts:
            if not draft.tokens_left:
                return
            self._add_chunk(seq, draft, self._thrifty(seq, draft))

    def _plan_boarding(self, lane: RequestClass, may_board: int, draft: Draft, now: float) -> None:
        """Fill so many seats from a queue, as long as the step can take prompt rows."""
        while may_board > 0 and draft.tokens_left and draft.rows_left:
            seq = self._seat_next(lane, draft, now)
            if seq is None:
                return
            self._add_chunk(seq, draft, self._thrifty(seq, draft))
            may_board -= 1

    def _seat_batch(self, draft: Draft, now: float) -> None:
        """Let a whole batch board, or as many of it as find pages."""
        may_board = self._may_board(now)
        while may_board > 0 and self._seat_next(self.state.live, draft, now) is not None:
            may_board -= 1

    def _may_board(self, now: float) -> int:
        """How many of those who wait the policy lets board now."""
        return self._policy.boarders(self._situation(now)) if self.state.queue else 0

    def _situation(self, now: float) -> Situation:
        state = self.state
        arrivals = (seq.request.arrival for seq in state.queue.members())
        # Who is about to end may be followed by somebody: a closed loop's next request comes then.
        more = self.more_to_come or bool(state.leaving)
        return Situation(
            now,
            free_seats=len(state.free_seats),
            busy_seats=state.batch,
            waiting=len(state.queue),
            arrivals=arrivals,
            more_to_come=more,
        )

    def _seat_next(self, lane: RequestClass, draft: Draft, now: float) -> Sequence | None:
        """The head of a queue takes a seat; None if it cannot yet, and then it holds up those
        behind.

        Nor does one board whose token is in flight since its preemption: it would be sampled a
        second time.
        """
        seq = lane.queue.head()
        if seq is None or seq.in_flight:
            return None
        if self.limits.encoder and len(seq.tokens) > draft.tokens_left:
            return None  # the next step takes it whole
        boards = self._board(seq, draft, now)
        if not seq.background:
            self.state.short_of_pages = not boards
        return seq if boards else None

    def _board(self, seq: Sequence, draft: Draft, now: float) -> bool:
        """Whether a waiting sequence finds pages and takes a seat."""
        if seq.in_flight or not self._take_pages(seq, draft, now):
            return False
        self.state.seat(seq, now)
        draft.boarded.append(seq)
        if not seq.background:
            self._passing.board(seq.n_left, now)
        return True

    def _plan_columns(self, draft: Draft) -> None:
        """The next rows of a batch's prompts, as if each had been padded in front to the longest:
        all end in one step.

        Whoever has more rows left than the others goes first, alone; the rows that the others would
        compute meanwhile are padding.
        """
        members = list(self.state.prefilling)
        longest = max(seq.n_left for seq in members)
        width = min(longest, self._row_limit.rows // self.state.batch)
        for seq in members:
            self._add_chunk(seq, draft, width - longest + seq.n_left)
        computed = longest - max(seq.n_left for seq in members)
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
        keys = pool.shareable_keys(seq)
        if seq.must_score:
            self._find_scores(seq, keys)
            # The row before the first score that is missing brings it: it must be computed, hence
            # its whole page.
            keys = keys[: seq.scored // pool.page_size]
        if seq.request.pooling == "mean":
            keys = []  # every row is part of the vector, from the first on
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

        Certainly if it lasts though all get as long as they may, or if nobody else rides. Where it
        takes several to fill a larger bucket, only if it lasts for all of these. Whoever was turned
        away is not looked at again before somebody has left: those who go on only come to need
        more.
        """
        state = self.state
        n_riders, most_pages = state.live.n_seated, state.live.most_pages
        if seq.background:
            n_riders += state.background.n_seated
            most_pages += state.background.most_pages
        if not n_riders or most_pages + state.most_of(seq) <= self.pool.capacity:
            return True
        if self._preemption.too_long_stalled(seq, now):
            return True
        if self._turned_away == (seq, state.departures):
            return False
        needed = self.step_times.needed_to_pay(n_riders)
        if needed is not None and self._fit(seq, fresh, needed):
            return True
        self._turned_away = seq, state.departures
        return False

    def _fit(self, seq: Sequence, fresh: int, count: int) -> bool:
        """Whether so many have seats, and the pool should last beside who sits: the sequence, and
        those behind it. The background gives way to a live one.
        """
        queue = self.state.class_of_request(seq).queue
        others = queue.following(seq, count - 1) if count > 1 else []
        if len(others) < count - 1 or count > len(self.state.free_seats):
            return False
        newcomers = [(seq, fresh)]
        newcomers += [(other, self.pool.pages_for(len(other.tokens))) for other in others]
        riders, yielding = self.state.seated, list[Sequence]()
        if not seq.background and self.state.background.n_seated:
            yielding = [rider for rider in riders if rider.background]
            riders = [rider for rider in riders if not rider.background]
        return self._demand.fits(riders, newcomers, yielding)

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
        cost = _SCORED_ROW if seq.must_score and draft.n_decode else 1
        if cost > 1:
            unscored = max(0, seq.scored - start)
            count = min(count, unscored + max(1, (draft.tokens_left - unscored) // cost))
        end = start + count
        # Positions before seq.scored have been scored: before a preemption, or by whoever had the
        # same first pages.
        scored = max(0, min(end, seq.n_prompt - 1) - seq.scored) if seq.must_score else 0
        recomputed = max(0, min(end, seq.computed_high) - start)
        is_last = end == known
        sample = is_last and seq.request.pooling is None
        chunk = Chunk(
            seq,
            start,
            count,
            decode=False,
            sample=sample,
            scored=scored,
            recomputed=recomputed,
            score_start=seq.scored,
        )
        draft.chunks.append(chunk)
        draft.rows += count
        draft.pairs += chunk.pairs
        draft.tokens_left = max(0, draft.tokens_left - count - scored * (cost - 1))
        draft.rows_left -= chunk.logit_rows
        draft.greedy_only = draft.greedy_only and seq.greedy_only
        draft.masked |= seq.matcher is not None
        seq.scored += scored
        seq.scheduled = end
        if is_last:
            # A vector that is wanted instead of a token is on its way like one.
            seq.in_flight += 1
            self.state.start_decoding(seq)

    def _thrifty(self, seq: Sequence, draft: Draft) -> int:
        """Rows of a prompt that are worth computing in this step rather than in the next."""
        count = min(seq.n_left, draft.tokens_left)
        if self.limits.encoder or not self._is_last(seq):
            return count
        return self.buckets.thrifty(draft.rows, count, draft.n_decode, len(draft.chunks) + 1)

    def _is_last(self, seq: Sequence) -> bool:
        """True when no other prompt can use the rows that this one leaves in the step."""
        state = self.state
        if state.free_seats and state.class_of_request(seq).queue:
            return False
        last = next(
            other for other in reversed(state.prefilling) if other.background == seq.background
        )
        return last is seq

    def _share_prompts(self, draft: Draft) -> None:
        """Publish the full pages that this step computes; only later plans see them: no step reads
        what it writes.
        """
        for chunk in draft.prompt_chunks:
            self.pool.publish_known(chunk.seq)
            if chunk.end >= chunk.seq.n_prompt:
                self.state.release_siblings(chunk.seq)

    def _plan_of(self, draft: Draft) -> Plan:
        """The finished plan, in the smallest bucket that holds it."""
        self._steps += 1
        bucket = self.buckets.choose(
            tokens=draft.rows + draft.reserved,
            sequences=len(draft.chunks),
            decode_only=draft.rows == draft.n_decode,
            logit_rows=self.limits.max_seats - draft.rows_left,
        )
        return Plan(
            number=self._steps,
            chunks=draft.chunks,
            bucket=bucket,
            greedy_only=draft.greedy_only,
            work=draft.work,
            boarded=draft.boarded,
            fed=draft.fed,
            dropped=draft.dropped,
            preempted=draft.preempted,
            cached_tokens=draft.cached_tokens,
            background=self.state.background.n_seated > 0
            and all(chunk.seq.background for chunk in draft.chunks),
            reserved=draft.reserved,
            occupancy=self._occupancy(),
            masked=draft.masked_rows,
        )

    def _occupancy(self) -> Occupancy:
        return Occupancy(
            seats_busy=self.state.n_seated,
            pages_used=self.pool.used,
            pages_cached=self.pool.n_cached,
            waiting=self.state.n_waiting,
            waiting_tokens=self.state.waiting_tokens,
        )


def _first_row(prompts: list[Sequence]) -> int:
    """Position of the next row of the first of these prompts, 0 without any."""
    return prompts[0].scheduled if prompts else 0


def _n_left(seq: Sequence) -> int:
    return seq.n_left


def _seated(sequences: list[Sequence]) -> list[Sequence]:
    """Those of them that have a seat."""
    return [seq for seq in sequences if seq.seated]


def _check_buckets(buckets: Buckets, seats: int) -> None:
    """Raise ConfigError unless a step has room for all seats and for a prompt's row."""
    if buckets.seats != seats or buckets.token_budget <= seats:
        raise ConfigError(
            f"buckets for {buckets.seats} seats and {buckets.token_budget} rows do not serve "
            f"{seats} seats"
        )


def _request_limits(limits: SchedulerLimits, pool: PagePool, vocab_size: int) -> RequestLimits:
    """What one request may ask of this engine."""
    return RequestLimits(
        vocab_size=vocab_size,
        context_length=limits.context_length,
        pool_tokens=pool.capacity * pool.page_size,
        max_logprobs=limits.max_logprobs,
        pooling=pooling_of(limits.embedding_pooling),
        adapters=limits.adapters,
        encoder=limits.encoder,
    )
