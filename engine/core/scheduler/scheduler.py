"""The scheduler: decides which sequences compute which rows in the next step, and applies the
results of finished steps.

The scheduler is ordinary Python over counts and uses the clock that it is given; it needs no
device. `plan` decides a step, `commit` applies its result. The host is one step behind: step k is
planned before the tokens of step k - 1 are known, so a sequence that has just ended may have one
more row launched. Its seat and pages are reused at once all the same: the device runs steps in
order, so a row past the end writes to its page before the next owner's rows do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from jitney.engine.common.engine_info import Seat
from jitney.engine.common.errors import ConfigError, ErrorInfo, RequestError
from jitney.engine.common.outputs import FinishReason, SequenceOutput
from jitney.engine.common.requests import EngineRequest, RequestLimits, pooling_of
from jitney.engine.core.faults import StepBlame
from jitney.engine.core.scheduler.admission.control import AdmissionControl
from jitney.engine.core.scheduler.admission.predicted_wait import PredictedWait
from jitney.engine.core.scheduler.boarding import Boarding
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.open_sequences import OpenSequences
from jitney.engine.core.scheduler.page_demand import PageDemand
from jitney.engine.core.scheduler.page_tables import PageTables, least_window_pages
from jitney.engine.core.scheduler.passing import Passing
from jitney.engine.core.scheduler.plan import Chunk, Draft, Occupancy, Plan, StepResult
from jitney.engine.core.scheduler.planner import StepPlanner
from jitney.engine.core.scheduler.policies import make_order, make_policy
from jitney.engine.core.scheduler.preemption import Preemption
from jitney.engine.core.scheduler.prefill_budget import PrefillBudget
from jitney.engine.core.scheduler.results import Results
from jitney.engine.core.scheduler.row_limit import RowLimit
from jitney.engine.core.scheduler.seats import Seats
from jitney.engine.core.scheduler.sequence import Matcher, Sequence
from jitney.engine.core.scheduler.sequence_factory import SequenceFactory
from jitney.engine.core.scheduler.speculation import Speculation
from jitney.engine.core.scheduler.step_times import StepTimeEstimate

_log = logging.getLogger("jitney.core")

_FAILED = ErrorInfo(
    "request_failed", "computing this request failed, also when it was computed alone"
)


class Scheduler:
    """Admits requests, plans steps for their sequences, and applies the results."""

    def __init__(
        self,
        limits: SchedulerLimits,
        buckets: Buckets,
        pages: PageTables,
        clock: Callable[[], float] = time.monotonic,
        eos_ids: Iterable[int] = (),
        vocab_size: int = 2**31 - 1,
    ):
        """clock: returns seconds, for admission; `plan` and `commit` get the time as an argument.
        eos_ids: tokens that end a sequence.
        """
        _check_buckets(buckets, limits.max_seats)
        _check_windows(pages.windows, limits, buckets)
        self.limits = limits
        self.buckets = buckets
        self.clock = clock
        self.pool = pool = pages.pool
        #: Estimate of step times, updated by `observe`.
        self.step_times = StepTimeEstimate(buckets)
        #: Number of plans made so far, which is also the number of the newest plan.
        self.steps = 0
        policy, order = make_policy(limits), make_order(limits.order)
        seats = Seats(limits.max_seats, holds=policy.holds)
        #: All open sequences, each seated, queued, held or leaving.
        self.sequences = sequences = OpenSequences(seats, pages, order.queue)
        self.factory = SequenceFactory(
            pool=pool,
            request_limits=_request_limits(limits, pool, vocab_size),
            eos_ids=frozenset(eos_ids),
            order_key=order.key,
            lengths=sequences.lengths,
        )
        budget = PrefillBudget(self.step_times, limits.prefill_share, limits.target_itl_ms / 1000)
        passing = Passing(buckets.token_budget)
        batch = limits.batch if policy.holds else 0
        predicted_wait = PredictedWait(limits, sequences, budget, passing, batch=batch)
        self._admission = AdmissionControl(limits, sequences, predicted_wait)
        preemption = Preemption(sequences)
        demand = PageDemand(sequences, self.step_times)
        self.boarding = Boarding(limits, policy, sequences, demand, preemption, passing)
        self._planner = StepPlanner(
            limits, buckets, sequences, budget, passing, preemption, self.boarding
        )
        self._speculation: Speculation | None = None
        if limits.max_drafts:
            self._speculation = Speculation(
                limits.max_drafts, buckets, sequences, self.step_times, late=limits.late_drafts
            )
        self._results = Results(sequences)
        self._suspects = StepBlame()
        # The most rows of a step; the limit never falls below what all seats need.
        self._row_limit = RowLimit([bucket.tokens for bucket in buckets.mixed_for(buckets.seats)])
        self._arrivals = 0

    def renewed(self, limits: SchedulerLimits, clock: Callable[[], float]) -> Scheduler:
        """A new scheduler for the same runner, without requests; its sequences end by length."""
        return Scheduler(limits, self.buckets, self.sequences.pages.renewed(), clock)

    @property
    def has_open(self) -> bool:
        """True while any sequence has not had its terminal output."""
        return len(self.sequences.requests) > 0

    @property
    def has_outputs(self) -> bool:
        """True while `take_outputs` has outputs to return."""
        return bool(self.sequences.outputs)

    @property
    def n_waiting(self) -> int:
        """Sequences that wait for a seat."""
        return self.sequences.n_waiting

    @property
    def predicted_wait_s(self) -> float:
        """Expected seconds until a request that arrives now boards, after all waiting requests and
        all prompts that are not computed yet. Costs a few microseconds for each taken seat.
        """
        return self._admission.predicted_wait.behind_all

    @property
    def open_adapters(self) -> set[int]:
        """Numbers of the adapters that open requests ask for."""
        return {siblings.request.adapter for siblings in self.sequences.requests}

    @property
    def has_place(self) -> bool:
        """Whether a request that arrives now would get a seat: one that is left after all waiting
        requests have boarded, one ahead of longer prompts if short prompts are expected, or one of
        another tenant that has more than its share.
        """
        sequences = self.sequences
        if sequences.seats.holds:
            return False
        queue = sequences.live.queue
        if sequences.open_seats > len(queue.waiting) or queue.gives_way(self.limits.max_seats):
            return True
        return self._planner.expects_short(self.clock())

    def serve_adapters(self, numbers: Iterable[int]) -> None:
        """Accept requests for these adapters too."""
        limits = self.factory.request_limits
        adapters = limits.adapters.union(numbers)
        if adapters != limits.adapters:
            self.factory.request_limits = msgspec.structs.replace(limits, adapters=adapters)

    def add(self, request: EngineRequest, new_matcher: Callable[[], Matcher] | None = None) -> None:
        """Put a request into the waiting queue. Raises RequestError, and registers nothing, if the
        request can never run or is not admitted. A request resumed from an earlier core was
        admitted there and is not judged again.

        new_matcher: called for each of its sequences, if a grammar constrains them.
        """
        self.sequences.requests.refuse_duplicate(request)
        if request.background and self.sequences.seats.holds:
            raise RequestError("batches need a server with the policy continuous")
        self._arrivals += 1
        sequences = self.factory.sequences_of(request, self._arrivals)
        if request.resumed is None:
            self._admission.admit(sequences[0], self.clock())
        if new_matcher is not None:
            for seq in sequences:
                seq.matcher = new_matcher()
        self.sequences.add(request, sequences)

    def has_room(self, request: EngineRequest) -> bool:
        """Whether admission control would let a valid request wait now."""
        leader = self.factory.leader(request, self._arrivals + 1)
        return self._admission.has_room(leader, self.clock())

    def abort(
        self, request_id: str, index: int | None = None, reason: FinishReason = "abort"
    ) -> None:
        """End a request (index None) or one of its sequences now. An unknown id is not an error:
        that request has ended already.
        """
        for seq in self.sequences.requests.open_of(request_id):
            if index is None or seq.index == index:
                self.sequences.end(seq, reason)

    def end(self, seq: Sequence, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """End an open sequence between two steps."""
        self.sequences.end(seq, reason, error)

    def plan(self, now: float) -> Plan | None:
        """Plan the next step; None if there is nothing to compute. First ends the requests that are
        past their deadline.
        """
        self._end_expired(now)
        self._admission.predicted_wait.pass_step()
        self._row_limit.pass_time(now)
        draft = Draft(self._row_limit.rows, self.limits.max_seats)
        if self._speculation is not None:
            self._speculation.look_ahead()
        suspect = self._suspects.first
        self._planner.fill(draft, self.steps, now, suspect)
        if self._speculation is not None and suspect is None:
            self._speculation.widen(draft, self._row_limit.rows)
        if not draft.chunks:
            self._planner.dropped += draft.dropped
            return None
        return self._published(draft)

    def _end_expired(self, now: float) -> None:
        for seq in self.sequences.requests.take_expired(now):
            self.sequences.end(seq, "deadline")

    def _published(self, draft: Draft) -> Plan:
        """The finished plan, in the smallest bucket that holds it. Later plans find the pages that
        it fills; this one does not, since no step reads what it writes.
        """
        for chunk in draft.prompt_chunks:
            self.sequences.pages.publish(chunk.seq)
            if chunk.end >= chunk.seq.n_prompt:
                self.sequences.release_siblings(chunk.seq)
        self.steps += 1
        bucket = self.buckets.choose(
            tokens=draft.rows + draft.reserved,
            sequences=len(draft.chunks),
            decode_only=draft.rows == draft.n_decode,
            logit_rows=self.limits.max_seats - draft.rows_left,
        )
        sequences, seats, pool = self.sequences, self.sequences.seats, self.pool
        background = seats.n_background > 0 and all(chunk.seq.background for chunk in draft.chunks)
        occupancy = Occupancy(
            seats_busy=seats.n_taken,
            pages_used=pool.used,
            pages_cached=pool.n_cached,
            waiting=sequences.n_waiting,
            waiting_tokens=sequences.live.backlog.tokens + sequences.background.backlog.tokens,
        )
        return draft.plan(self.steps, bucket, occupancy, background=background)

    def goes_between(self, running: Plan) -> bool:
        """Whether `plan_between` would return a plan now."""
        if self._speculation is not None or self._suspects:
            return False
        return self._planner.goes_between(running)

    def plan_between(self, running: Plan, now: float) -> Plan | None:
        """Plan a step that runs between two segments of the running one: whole short prompts that
        arrived after it was planned. None if there are none. Its result is committed before that of
        the running step, so the two exchange their numbers. First ends requests, as `plan` does.
        """
        self._end_expired(now)
        if not self.goes_between(running):
            return None
        draft = Draft(self._row_limit.rows, self.limits.max_seats)
        self._planner.fill_between(draft, running, now)
        if not draft.chunks:
            return None
        plan = self._published(draft)
        plan.number, running.number = running.number, plan.number
        return plan

    def lets_others_first(self, plan: Plan, now: float) -> bool:
        """Whether to launch no step while this one runs: it is background work, so a request that
        arrives meanwhile gets the next step.
        """
        return self._planner.lets_others_first(plan, now)

    def sit_out(self, chunk: Chunk) -> None:
        """Discard the token of a chunk of the newest plan. A chunk that reads a draft counts as
        rejected. For any other chunk, the grammar mask of the token is not known yet: the sequence
        has no row in later plans until the mask is known, and then computes this row again.
        """
        seq = chunk.seq
        if not seq.seated:
            return  # the sequence was preempted, and computes this row again
        chunk.sits_out = True
        if chunk.draft:
            return
        seq.computed_high = max(seq.computed_high, seq.scheduled)
        seq.scheduled -= 1
        seq.in_flight -= 1
        self.sequences.seats.reorder()

    def commit(self, plan: Plan, result: StepResult, now: float) -> list[SequenceOutput]:
        """Apply the tokens of a step, in the order of planning, and count in `plan` what became of
        its rows.

        Returns all outputs since the last call, including those of aborts and deadlines.
        """
        self._results.commit(plan, result, now)
        if self._speculation is not None:
            self._speculation.learn(plan, result)
        self._judge(plan, now)
        plan.finished, self.sequences.finished = self.sequences.finished, 0
        return self.take_outputs()

    def take_outputs(self) -> list[SequenceOutput]:
        """Return the outputs since the last call."""
        outputs, self.sequences.outputs = self.sequences.outputs, []
        return outputs

    def observe(self, plan: Plan, seconds: float, gap: float = 0.0) -> None:
        """Record that a planned step took `seconds` on the device, after the device had waited
        `gap` seconds for the host. Predictions are based on these times.
        """
        self.step_times.observe(plan.bucket, seconds, plan.work.pairs, plan.rows, gap)

    def pause(self, now: float) -> float:
        """Seconds during which the policy lets all open sequences wait, so that no plan is
        possible; 0 if a plan is possible now.
        """
        return 0.0 if self._suspects else self.boarding.pause(now)

    @property
    def isolating_failure(self) -> bool:
        """Whether a sequence is being computed alone to see if its rows make a step fail. Meanwhile
        no step may be launched before the one before it has ended.
        """
        return bool(self._suspects)

    def step_failed(self, plan: Plan, now: float, *, out_of_memory: bool) -> None:
        """Handle a step whose launch or result failed; the device's state is new.

        All sequences wait again, with the tokens that are known. If memory was short and a smaller
        step is possible, prompts get fewer rows for a while (except for an encoder, whose prompts
        are never split). Otherwise each sequence of the step is computed alone, and the one that
        fails again ends with its request.
        """
        self.sequences.start_all_over(now)
        guilty = self._suspects.on_trial(plan)
        if out_of_memory and not self.limits.encoder and self._row_limit.shrink(now):
            return
        if guilty is None:
            self._suspects.accuse(plan)
            return
        self._suspects.clear()
        if guilty.finish is None:
            _log.error("request %s made a step fail, also alone: it ends", guilty.request_id)
            for seq in self.sequences.requests.open_of(guilty.request_id):
                self.sequences.end(seq, "error", _FAILED)

    def _judge(self, plan: Plan, now: float) -> None:
        """Clear the suspect that this finished step computed, if it had a decode row or ended."""
        seq = self._suspects.on_trial(plan)
        if seq is None or not (plan.chunks[0].decode or seq.finish is not None):
            return
        self._suspects.acquit()
        if seq.seated:
            self.sequences.start_over(seq, now)
        if not self._suspects:
            _log.warning("a step failed, and none of its sequences fails alone")

    def forget_prefixes(self) -> None:
        """Drop the prefix cache: later prompts do not reuse pages of earlier ones."""
        self.sequences.pages.forget()

    def take_unseated(self) -> list[Sequence]:
        """Return the sequences that lost their seat since the last call, except those that a plan
        lists.
        """
        unseated, self.sequences.unseated = self.sequences.unseated, []
        return unseated

    def take_released(self) -> list[int]:
        """Return the seats that a batch had kept and that became free since the last call."""
        return self.sequences.seats.take_released()

    def seat_map(self) -> list[Seat]:
        """Every seat, in order, with its sequence."""
        return self.sequences.seats.map()

    def check(self) -> None:
        """Raise RuntimeError unless every sequence, seat, page and waiting token is accounted for
        exactly once.
        """
        self.sequences.check()


def _check_buckets(buckets: Buckets, seats: int) -> None:
    """Raise ConfigError unless a step has room for all seats and for a prompt's row."""
    if buckets.seats != seats or buckets.token_budget <= seats:
        raise ConfigError(
            f"buckets for {buckets.seats} seats and {buckets.token_budget} rows do not serve "
            f"{seats} seats"
        )


def _check_windows(
    windows: Mapping[int, PagePool], limits: SchedulerLimits, buckets: Buckets
) -> None:
    """Raise ConfigError unless each window's pool has enough pages for all seats."""
    for window, pool in windows.items():
        least = least_window_pages(
            window,
            page_size=pool.page_size,
            seats=limits.max_seats,
            token_budget=buckets.token_budget,
            context_length=limits.context_length,
        )
        if pool.n_pages < least:
            raise ConfigError(
                f"{pool.n_pages} pages for layers with a window of {window} are less than the "
                f"{least} that {limits.max_seats} seats need"
            )


def _request_limits(limits: SchedulerLimits, pool: PagePool, vocab_size: int) -> RequestLimits:
    """Limits of one request on this engine."""
    return RequestLimits(
        vocab_size=vocab_size,
        context_length=limits.context_length,
        pool_tokens=pool.capacity * pool.page_size,
        max_logprobs=limits.max_logprobs,
        pooling=pooling_of(limits.embedding_pooling),
        adapters=limits.adapters,
        encoder=limits.encoder,
    )
