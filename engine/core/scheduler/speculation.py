"""Speculation: decides how many drafts decoding sequences check in a step. It chooses the number
that should pay off, by how often their drafts were right recently and by the step times.

The device drafts tokens (`engine.core.executor.seat_tokens`); each draft that a sequence checks is
one more decode row. The host learns one step late how many were accepted, so the position of a
sequence's next row may be up to `Sequence.drafting` after `Sequence.scheduled`.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.open_sequences import OpenSequences
from jitney.engine.core.scheduler.plan import REJECTED, Chunk, Draft, Plan, StepResult
from jitney.engine.core.scheduler.sequence import Sequence
from jitney.engine.core.scheduler.step_times import StepTimeEstimate

#: Weight of a new token in a sequence's exponential mean, and in that of a class of sequences.
_NEWEST, _NEWEST_OF_ALL = 0.2, 0.02
#: Sequences whose drafts are right less often than this get no pages for drafts.
_LEAST_RIGHT = 0.2
#: Number of classes of sequences, by how often their drafts were right.
_CLASSES = 10
#: Each second that drafts add to a step must give this many times the tokens per second without
#: drafts; all drafts of a step must give at least this many tokens per decoding sequence.
_PAYS, _LEAST_GAIN = 1.05, 0.05


class _Acceptance:
    """Measured frequencies of right drafts."""

    def __init__(self, most: int):
        # Frequency by class and by the number of right drafts before it in the same step; the
        # initial value is the middle of the class.
        self._right = [[(own + 0.5) / _CLASSES] * most for own in range(_CLASSES)]

    def chances(self, seq: Sequence) -> list[float]:
        """The probability of each of a sequence's next drafts to be accepted."""
        return list(accumulate(self._of(seq), mul))

    def observe(self, seq: Sequence, before: int, *, right: bool) -> None:
        """Record whether a draft was right. before: number of right drafts before it."""
        own = self._of(seq)
        own[before] += _NEWEST_OF_ALL * (right - own[before])
        seq.right_drafts += _NEWEST * (right - seq.right_drafts)

    def _of(self, seq: Sequence) -> list[float]:
        return self._right[min(int(_CLASSES * seq.right_drafts), _CLASSES - 1)]


class Speculation:
    """Adds draft rows to steps."""

    def __init__(
        self,
        most: int,
        buckets: Buckets,
        sequences: OpenSequences,
        step_times: StepTimeEstimate,
        *,
        late: bool = False,
    ):
        """most: the most drafts of a sequence in a step, without those in flight. late: see
        `SchedulerLimits.late_drafts`.
        """
        self._late = late
        # So the drafts of two steps never need more than one page beyond the current one.
        self._most = min(most, sequences.pages.pool.page_size // 2)
        self._buckets = buckets
        self._seats = sequences.seats
        self._pool = sequences.pages.pool
        self._step_times = step_times
        self._acceptance = _Acceptance(self._most)

    def look_ahead(self) -> None:
        """Decide before a plan for how many drafts each sequence gets pages. No draft is the last
        token of a sequence, so that no row is beyond its last needed position. Drafts take no page
        that other sequences may need.
        """
        spare = self._pool.available > self._seats.n_taken
        for seq in self._seats.decoding:
            seq.lookahead = 0
            if spare and seq.right_drafts >= _LEAST_RIGHT and self._may_draft(seq):
                left = seq.limit - 3 - seq.scheduled - seq.drafting
                seq.lookahead = max(0, min(self._most, left))

    def _may_draft(self, seq: Sequence) -> bool:
        """Whether a sequence may check drafts. With a grammar, the host must know the drafts, now
        or in time, to compute their masks, and the grammar must be fast enough.
        """
        if seq.matcher is None:
            return True
        return (self._late or bool(seq.drafts)) and seq.matcher.checks_drafts

    def widen(self, draft: Draft, most_rows: int) -> None:
        """Add draft rows to a step, up to `most_rows` rows in all."""
        decoding = draft.chunks[: draft.n_decode]
        if draft.reserved or not decoding:
            return
        if draft.rows == draft.n_decode:
            room = min(self._buckets.decode[-1].seats, most_rows) - draft.rows
        else:
            room = min(self._buckets.seats - len(draft.chunks), most_rows - draft.rows)
        if room > 0:
            likeliest = self._likeliest(decoding)[:room]
            widths = self._worthwhile(draft, likeliest)
            if widths:
                draft.add_drafts(widths)

    def _likeliest(self, decoding: list[Chunk]) -> list[tuple[float, Sequence]]:
        """(probability of being accepted, sequence) of every draft that has room, the likeliest
        first.
        """
        drafts: list[tuple[float, Sequence]] = []
        for chunk in decoding:
            seq = chunk.seq
            if seq.lookahead:
                chances = self._acceptance.chances(seq)
                drafts += [(chance, seq) for chance in chances[: self._room(chunk)]]
        drafts.sort(key=_chance, reverse=True)
        return drafts

    def _room(self, chunk: Chunk) -> int:
        """Number of drafts that a sequence has pages for after its planned row, at the row's latest
        possible position.
        """
        seq = chunk.seq
        if chunk.start < len(seq.tokens):
            return 0  # the row's token comes from the host, which has no drafts
        held = len(seq.pages) * self._pool.page_size
        return max(0, min(seq.lookahead, held - 1 - chunk.start - seq.drafting))

    def _worthwhile(
        self, draft: Draft, drafts: list[tuple[float, Sequence]]
    ) -> dict[Sequence, int]:
        """The number of drafts for each sequence with the largest gain: expected tokens minus the
        tokens that the added seconds would give without drafts. Empty if no number gains enough.
        """
        usual, alone = self._seconds(draft, 0), self._step_times.decode(draft.n_decode)
        if not drafts or not usual or not alone:
            return {}
        per_second = _PAYS * draft.n_decode / alone
        best, most = 0, _LEAST_GAIN * draft.n_decode
        tokens = 0.0
        for count, (chance, _) in enumerate(drafts, 1):
            tokens += chance
            # A size without a measured time counts as free, so that it is tried.
            seconds = self._seconds(draft, count) or usual
            gain = tokens - per_second * max(0.0, seconds - usual)
            if gain > most:
                best, most = count, gain
        widths: dict[Sequence, int] = {}
        for _, seq in drafts[:best]:
            widths[seq] = widths.get(seq, 0) + 1
        return widths

    def _seconds(self, draft: Draft, drafts: int) -> float | None:
        """Typical seconds of the step with `drafts` draft rows; None: not measured."""
        rows = draft.rows + drafts
        if draft.rows == draft.n_decode:
            return self._step_times.decode(rows)
        sequences = len(draft.chunks) + drafts
        bucket = self._buckets.choose(
            tokens=rows, sequences=sequences, decode_only=False, logit_rows=sequences
        )
        return self._step_times.mixed(bucket, rows)

    def learn(self, plan: Plan, result: StepResult) -> None:
        """Record which drafts of a finished step were right, whether checked or not."""
        assert result.guessed is not None  # every step of an engine that speculates returns it
        for row, chunk in enumerate(plan.chunks[: plan.n_decode]):
            counts = result.tokens[row] != REJECTED and not chunk.sits_out
            if counts and chunk.draft < self._most:
                self._acceptance.observe(chunk.seq, chunk.draft, right=result.guessed[row])


def _chance(draft: tuple[float, Sequence]) -> float:
    return draft[0]
