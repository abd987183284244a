"""Who computes what in the next step: decode rows first, then prompt chunks, then whoever may board.

Ordinary Python over counts, on whatever clock it is given; no device is needed. `plan` decides a step, `commit` takes
in what it brought. The host is one step behind: step k is planned before the tokens of step k - 1 are known, so a
sequence that has just ended may have one more row launched. Seats and pages are handed on at once all the same: the
device runs steps in order, so a row past the end writes to its page before the next owner's rows do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from jitney.engine.admission import Admission, SchedulerLimits
from jitney.engine.buckets import Buckets
from jitney.engine.commit import Committer
from jitney.engine.errors import ConfigError
from jitney.engine.pages import PagePool
from jitney.engine.plan import Chunk, Load, Plan, StepResult
from jitney.engine.policies import Situation, make_order, make_policy
from jitney.engine.prefix import publish, shareable_keys
from jitney.engine.roster import Roster
from jitney.engine.sequence import Sequence
from jitney.engine.types import EngineRequest, FinishReason, SequenceOutput, Slot

__all__ = ["Scheduler", "SchedulerLimits"]


@dataclass(slots=True)
class Draft:
    """A plan in the making. tokens_left, rows_left: token rows and logit rows the step can still take."""

    tokens_left: int
    rows_left: int
    chunks: list[Chunk] = field(default_factory=list)
    n_decode: int = 0
    plain: bool = True
    boarded: list[Sequence] = field(default_factory=list)
    preempted: int = 0
    cached_tokens: int = 0


class Scheduler:
    """Plans steps for the sequences of its roster. clock: seconds, for admission; plan and commit are told the time."""

    def __init__(self, limits: SchedulerLimits, buckets: Buckets, pool: PagePool,
                 clock: Callable[[], float] = time.monotonic, eos_ids: Iterable[int] = (), vocab_size: int = 2**31 - 1):
        if buckets.seats != limits.max_seats or buckets.token_budget <= limits.max_seats:
            raise ConfigError(f"buckets for {buckets.seats} seats and {buckets.token_budget} rows do not serve "
                              f"{limits.max_seats} seats")
        self.limits, self.buckets, self.pool, self.clock = limits, buckets, pool, clock
        self.roster = Roster(limits, pool)
        self._policy, self._class_of = make_policy(limits.policy), make_order(limits.order)
        self._admission = Admission(limits, pool, eos_ids, vocab_size)
        self._committer = Committer(self.roster, pool)
        self._arrivals = self._steps = 0

    @property
    def has_open(self) -> bool:
        """True while any sequence lacks its terminal output."""
        return bool(self.roster.groups)

    @property
    def has_outputs(self) -> bool:
        """True while `drain` has something to hand out."""
        return self.roster.has_outputs

    def add(self, request: EngineRequest) -> None:
        """Let a request wait; raises RequestError (nothing is registered then) if it can or may not."""
        self.roster.refuse_duplicate(request)
        self._arrivals += 1
        sequences = self._admission.sequences(request, self._class_of(request), self._arrivals)
        self.roster.add(request, sequences, self.clock())

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = "abort") -> None:
        """End a request (index None) or one of its sequences now; unknown ids have ended already and are no error."""
        self.roster.abort(request_id, index, reason)

    def plan(self, now: float) -> Plan | None:
        """The next step, or None if there is nothing to compute; ends whoever is past its deadline first."""
        self.roster.expire(now)
        draft = Draft(self.buckets.token_budget, self.buckets.seats)
        self._plan_decode(draft)
        self._plan_prefill(draft)
        self._plan_boarding(draft, now)
        if not draft.chunks:
            return None
        self._share_prompts(draft)
        return self._plan_of(draft)

    def commit(self, plan: Plan, result: StepResult, now: float) -> list[SequenceOutput]:
        """Take in the tokens of a step, in order of planning, and say what became of its rows (in `plan`).

        Returns all outputs since the last call, those of aborts and deadlines included.
        """
        self._committer.commit(plan, result, now)
        plan.finished, self.roster.finished = self.roster.finished, 0
        return self.drain()

    def drain(self) -> list[SequenceOutput]:
        """Outputs that have not been handed out yet."""
        return self.roster.drain()

    def slots(self) -> list[Slot]:
        """Every seat, in order, with who sits in it."""
        return self.roster.slots()

    def check(self) -> None:
        """Raise RuntimeError unless every sequence, seat, page and waiting token is accounted for exactly once."""
        self.roster.check()

    def _plan_decode(self, draft: Draft) -> None:
        """One row for each sequence that decodes, unless its last token is already in flight; long contexts first.

        Kernels that work in groups of rows then give short contexts to short ones' groups.
        """
        rows = self._decode_ready(draft)
        rows.sort(key=context_of, reverse=True)
        for seq in rows:
            start = seq.scheduled
            draft.chunks.append(Chunk(seq, start, 1, True, True, 0, int(start < seq.computed_high)))
            seq.scheduled = end = start + 1
            seq.in_flight += 1
            if end > seq.computed_high:
                seq.computed_high = end
            if not seq.plain:
                draft.plain = False
        draft.n_decode = len(rows)
        draft.tokens_left -= len(rows)
        draft.rows_left -= len(rows)

    def _decode_ready(self, draft: Draft) -> list[Sequence]:
        """Decoding sequences with a page to write to; those whose last token is in flight leave."""
        page_size = self.pool.page_size
        rows, needy, done = [], [], []
        for seq in self.roster.decoding:
            if seq.scheduled + 1 >= seq.limit:
                done.append(seq)
                continue
            rows.append(seq)
            if seq.scheduled >= len(seq.pages) * page_size:
                needy.append(seq)
        for seq in done:
            self.roster.leave_early(seq)
        if needy:
            self._feed(needy, draft)
        return rows if not draft.preempted else [seq for seq in rows if seq.seat >= 0]

    def _feed(self, needy: list[Sequence], draft: Draft) -> None:
        """Give each one more page; while there are too few, preempt the youngest of the last class.

        The oldest of the first class is preempted last, and alone it fits the pool (checked at admission): so it always
        goes on, and everybody becomes the oldest some day.
        """
        if len(needy) > self.pool.available:
            ranked = sorted((*self.roster.decoding, *self.roster.prefilling), key=lambda seq: seq.rank)
            while sum(seq.seat >= 0 for seq in needy) > self.pool.available:
                self.roster.preempt(ranked.pop())
                draft.preempted += 1
            needy = [seq for seq in needy if seq.seat >= 0]
        for seq, page in zip(needy, self.pool.allocate(len(needy)) or (), strict=True):
            seq.pages.append(page)

    def _plan_prefill(self, draft: Draft) -> None:
        """Go on with the prompts that have boarded, in that order."""
        for seq in list(self.roster.prefilling):
            if not draft.tokens_left:
                return
            self._add_chunk(seq, draft)

    def _plan_boarding(self, draft: Draft, now: float) -> None:
        """Fill free seats from the queue, strictly in its order: whoever does not fit yet holds up those behind.

        Nor does one board whose token is in flight since its preemption: it would be sampled a second time.
        """
        roster = self.roster
        head = roster.queue.head()
        if head is None:
            return
        may_board = self._policy.boarders(Situation(now, len(roster.free_seats), roster.n_seated, len(roster.queue),
                                                    head.request.arrival))
        while may_board > 0 and draft.tokens_left and draft.rows_left:
            seq = roster.queue.head()
            if seq is None or seq.in_flight or not self._take_pages(seq, draft):
                return
            roster.seat(seq, now)
            draft.boarded.append(seq)
            self._add_chunk(seq, draft)
            may_board -= 1

    def _take_pages(self, seq: Sequence, draft: Draft) -> bool:
        """Pages for all known tokens of a sequence, as many as possible shared; False if there are too few.

        Each seated sequence is left one page to grow into; otherwise the newcomer would soon be preempted for it.
        """
        pool = self.pool
        shared = [] if must_score(seq) else pool.match(shareable_keys(seq, pool.page_size))
        fresh = pool.pages_for(len(seq.tokens)) - len(shared)
        if fresh + self.roster.n_seated > pool.available:
            pool.release(shared)
            return False
        seq.pages = shared + (pool.allocate(fresh) or [])
        seq.published = len(shared)
        seq.scheduled = start = len(shared) * pool.page_size
        found = max(0, min(start, seq.n_prompt) - seq.computed_high)
        seq.cached_tokens += found
        draft.cached_tokens += found
        seq.computed_high = max(seq.computed_high, start)
        return True

    def _add_chunk(self, seq: Sequence, draft: Draft) -> None:
        """As many of the next known tokens as the step can take; the last one's logits are sampled."""
        start, known = seq.scheduled, len(seq.tokens)
        count, scored = self._chunk_size(seq, draft)
        if not count:
            return
        end = start + count
        chunk = Chunk(seq, start, count, False, end == known, scored, max(0, min(end, seq.computed_high) - start))
        draft.chunks.append(chunk)
        draft.tokens_left -= count
        draft.rows_left -= chunk.logit_rows
        draft.plain = draft.plain and seq.plain
        seq.scored += scored
        seq.scheduled = end
        seq.computed_high = max(seq.computed_high, end)
        if chunk.sample:
            seq.in_flight += 1
            self.roster.start_decoding(seq)

    def _chunk_size(self, seq: Sequence, draft: Draft) -> tuple[int, int]:
        """(rows, rows of them that are scored) of a sequence's next chunk."""
        start, left = seq.scheduled, len(seq.tokens) - seq.scheduled
        count = min(left, draft.tokens_left)
        if not must_score(seq):
            if self._is_last(seq):
                count = self.buckets.thrifty(self.buckets.token_budget - draft.tokens_left, count, draft.n_decode)
            # Without a logit row for its last token a chunk stops before it.
            return (count if count < left or draft.rows_left else count - 1), 0
        if start < seq.scored:  # again after a preemption: these positions were scored before it
            return min(count, seq.scored - start), 0
        count = min(count, draft.rows_left)  # every row wants logits, the last prompt token's to sample from
        return count, min(count, seq.n_prompt - 1 - start)

    def _is_last(self, seq: Sequence) -> bool:
        """True when no other prompt can use the rows that this one leaves in the step."""
        roster = self.roster
        return next(reversed(roster.prefilling)) is seq and not (roster.free_seats and len(roster.queue))

    def _share_prompts(self, draft: Draft) -> None:
        """Publish the full pages that this step computes; only later plans see them: no step reads what it writes."""
        for chunk in draft.chunks[draft.n_decode :]:
            publish(chunk.seq, self.pool)
            if chunk.end >= chunk.seq.n_prompt:
                self.roster.release_siblings(chunk.seq)

    def _plan_of(self, draft: Draft) -> Plan:
        self._steps += 1
        roster, rows = self.roster, self.buckets.token_budget - draft.tokens_left
        bucket = self.buckets.choose(tokens=rows, sequences=len(draft.chunks), decode_only=rows == draft.n_decode,
                                     logit_rows=self.buckets.seats - draft.rows_left)
        load = Load(roster.n_seated, self.pool.used, self.pool.n_cached, roster.n_waiting, roster.backlog.tokens)
        return Plan(self._steps, draft.chunks, bucket, draft.plain, draft.boarded, draft.preempted,
                    draft.cached_tokens, load)


def context_of(seq: Sequence) -> int:
    """Positions a decoding sequence attends to."""
    return seq.scheduled


def must_score(seq: Sequence) -> bool:
    """True while prompt positions must still be computed for their log-probabilities, found in pages or not."""
    return seq.request.sampling.prompt_logprobs is not None and seq.scored < seq.n_prompt - 1
