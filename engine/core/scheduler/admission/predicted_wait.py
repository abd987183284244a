"""The predicted wait of a newcomer, from the open sequences, how long their answers should get, and
how long steps take.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jitney.engine.core.scheduler.lengths import LengthEstimate
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.open_sequences import OpenSequences
from jitney.engine.core.scheduler.passing import Passing
from jitney.engine.core.scheduler.prefill_budget import PrefillBudget
from jitney.engine.core.scheduler.sequence import Sequence
from jitney.engine.core.scheduler.step_times import StepTimeEstimate

#: Groups in which the prompts ahead are looked at, at most.
_GROUPS = 16
#: Seconds of a step before one was measured.
_FIRST_STEP_S = 0.02
#: Times at which the number of running answers is computed.
_TIMES = 48


class _Endings:
    """How many of some running answers still run after so many steps.

    With each token the same share of them ends: one of 32 ends soon though each is expected to run
    on for long.
    """

    def __init__(self, running: Iterable[Sequence], lengths: LengthEstimate):
        answers: list[tuple[float, float]] = []
        for seq in running:
            seq.counted = lengths.progress(seq.kind, seq.counted, seq.n_output)
            answers.append((_most_left(seq), lengths.mean(seq.kind)))
        #: Answers that run now.
        self.n = len(answers)
        most_left, means = np.array(answers, np.float64).reshape(-1, 2).T
        longest = most_left.max(initial=1.0)
        spread = np.geomspace(1.0, max(2.0, longest), _TIMES)
        spread = spread[spread < longest - 1]
        #: Steps from now, rising from 0 to where the last one ends by length, f8 [T].
        self._steps = np.concatenate(([0.0], spread, (longest - 1, longest)))
        steps = self._steps[:, None]
        alive = np.where(steps < most_left, np.exp(-steps / means), 0.0)
        #: How many are expected to run then, falling from n to 0, f8 [T].
        self._running = alive.sum(axis=1)

    def steps_until(self, n: int) -> float:
        """Steps until so many of them, 1 to all, should have ended; at least 1.

        Were lengths memoryless, the n-th of N would end on average when about n - n/2N are expected
        to have ended; that is taken for all.
        """
        ended = n * (1 - 0.5 / self.n)
        # A rising x for the interpolation: from the end to now.
        steps = np.interp(self.n - ended, self._running[::-1], self._steps[::-1])
        return max(1.0, float(steps))

    @property
    def tokens(self) -> float:
        """Tokens that all of them together should still generate."""
        return float(np.trapezoid(self._running, self._steps))


def _most_left(seq: Sequence) -> int:
    """Tokens after which it ends by length, at least 1."""
    return max(1, seq.limit - seq.n_prompt - seq.n_output)


class Prediction(NamedTuple):
    """Of a newcomer, by the open sequences and how long steps take."""

    #: The longest predicted wait in seconds that it is not refused for; 0: any.
    longest_wait_s: float
    #: Seconds until it should board; 0 if no setting or deadline needs it.
    wait_s: float
    #: The least seconds for the rows of its prompt that are not found in pages now; 0 if it has no
    #: deadline.
    prefill_s: float
    #: Output tokens that it is expected to have.
    answer_tokens: int
    #: Seconds that a seat is taken by one answer, going by those that wait.
    answer_s: float


class PredictedWait:
    """Predicts a newcomer's wait; none before a step was measured.

    A newcomer waits for a seat and for the prompt rows that go before its own. Steps with prompt
    rows are counted, and beyond them those that only decode until a seat is free; each kind is
    taken to last as long as its recent ones did, the gaps between them included.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        sequences: OpenSequences,
        prefill_budget: PrefillBudget,
        passing: Passing,
        *,
        batch: int = 0,
    ):
        self.limits = limits
        self._sequences = sequences
        self._seats = sequences.seats
        self._live = sequences.live
        # Its own: to ask for the rows of a step counts where there is a target_itl.
        self.prefill_budget = replace(prefill_budget)
        self.passing = passing
        self.step_times: StepTimeEstimate = prefill_budget.step_times
        #: Sequences per batch where seats are kept; 0 where they are refilled at once.
        self.batch = batch
        # Of this step; None until asked for.
        self._endings: _Endings | None = None

    def pass_step(self) -> None:
        """A step is planned: the running answers will be one token further."""
        self._endings = None

    def prediction_for(self, newcomer: Sequence) -> Prediction:
        """All that admission control asks about a newcomer."""
        hurried = newcomer.request.deadline is not None
        longest = 0.0 if newcomer.request.admitted else self.limits.max_predicted_wait_s
        tokens = self._mean_expected() if self._live.backlog.sequences else newcomer.expected
        wait = prefill = 0.0
        if longest or hurried:
            wait = self.wait(newcomer)
        if hurried:
            rows = newcomer.n_prompt - self._sequences.pages.found(newcomer)
            prefill = self.step_times.fastest_prefill(rows)
        return Prediction(
            longest_wait_s=longest,
            wait_s=wait,
            prefill_s=prefill,
            answer_tokens=newcomer.expected,
            answer_s=tokens * (self.step_times.step or _FIRST_STEP_S),
        )

    def wait(self, newcomer: Sequence) -> float:
        """Seconds until it should board; 0 before anything was measured."""
        ahead = self._sequences.n_ahead(newcomer)
        rows = self._rows_ahead(ahead)
        passing = self._rows_until_it_passes(
            newcomer.n_prompt - self._sequences.pages.found(newcomer)
        )
        if passing < rows:
            return self._behind(0, int(passing))
        return self._behind(ahead, rows)

    @property
    def behind_all(self) -> float:
        """Seconds until a request should board that comes after all that wait now: the published
        predicted wait.
        """
        ahead = self._live.n_waiting
        return self._behind(ahead, self._rows_ahead(ahead))

    def _behind(self, ahead: int, rows: int) -> float:
        """Seconds until so many sequences and then the newcomer have boarded, and so many prompt
        rows are computed.
        """
        if self.step_times.step is None:
            return 0.0
        steps = self._batch_steps(ahead) if self.batch else self._seat_steps(ahead)
        prompt_steps, prompt_s = self._prompt_steps(ahead, rows)
        seconds = prompt_s + max(0.0, steps - prompt_steps) * self._decode_s(ahead)
        return self.step_times.stretch * seconds

    def _decode_s(self, ahead: int) -> float:
        """Seconds of a step in which those in seats and so many more decode, and nothing else."""
        seated = min(self.limits.max_seats, max(1, self._seats.n_live + ahead))
        return self.step_times.decode(seated) or self.step_times.step or _FIRST_STEP_S

    def _rows_until_it_passes(self, rows: int) -> float:
        """Rows that are computed before a prompt of so many passes longer ones; inf if it does not
        or finds no seat.
        """
        if not self._sequences.open_seats:
            return math.inf
        queue = self._live.queue
        head = queue.head()
        first = sum([seq.n_left for seq in self._seats.live_prompts])
        first += head.wanted_rows if head else 0
        size = rows.bit_length()
        shorter = sum([waiting for other, waiting in queue.rows.items() if other <= size])
        return self.passing.rows_until(rows, first, shorter)

    def _rows_ahead(self, ahead: int) -> int:
        """Rows of the prompts that have boarded and of so many that wait."""
        boarded = sum([seq.n_left for seq in self._seats.live_prompts])
        share = min(1.0, ahead / max(1, self._live.n_waiting))
        return boarded + int(share * self._live.queue.rows.total())

    def _seat_steps(self, ahead: int) -> float:
        """Steps until so many that are ahead, and then the newcomer, have found a seat.

        For the k-th seat to become free k of those that run must end. Beyond one round of all
        seats: what is to be generated ahead, spread over the working seats, less the half-done
        answers that run on at that time.
        """
        n_seats_needed = ahead + 1 - self._sequences.open_seats
        if n_seats_needed <= 0:
            return 0.0
        endings = self._endings_now()
        if n_seats_needed <= endings.n:
            return endings.steps_until(n_seats_needed)
        mean, seats = self._mean_expected(), self._sequences.working_seats
        return max(1.0, (endings.tokens + mean * (ahead - (seats - 1) / 2)) / seats)

    def _batch_steps(self, ahead: int) -> float:
        """Steps until the running batch and the full ones before the newcomer's are done."""
        endings = self._endings_now()
        running = endings.steps_until(endings.n) if endings.n else 0.0
        return running + ahead // self.batch * self._mean_expected()

    def _endings_now(self) -> _Endings:
        """When the live sequences in seats should end.

        Computed once for all requests that come between two steps: it costs about a millisecond at
        1,024 seats.
        """
        if self._endings is None:
            seated = (seq for seq in self._seats.taken if not seq.background)
            self._endings = _Endings(seated, self._sequences.lengths)
        return self._endings

    def _mean_expected(self) -> float:
        """Output tokens that a waiting sequence is expected to generate, on average."""
        backlog, queue = self._live.backlog, self._live.queue
        if backlog.sequences:
            return backlog.expected / backlog.sequences
        return queue.expected / len(queue.waiting) if queue.waiting else 1.0

    def _prompt_steps(self, ahead: int, rows: int) -> tuple[float, float]:
        """(steps that are full of the prompt rows ahead, seconds of all of them).

        One prompt is computed after the other, or one group after the other where there are many.
        Each then decodes beside the next ones, for as many steps as its answer is expected to have
        tokens; and the more streams decode and the fewer prompts wait, the fewer rows a step has.
        """
        count = max(1, len(self._seats.live_prompts) + ahead)
        groups = min(count, _GROUPS)
        mean, weight = rows // count, count / groups
        most_wanting = max(1, self._sequences.open_seats) + 1
        decoding = min(self._seats.n_decoding_live, self.limits.max_seats - 1)
        if rows < self._prompt_step(decoding, min(count + 1, most_wanting), mean)[0]:
            return 0.0, 0.0
        endings = self._endings_now()
        # So many streams, until so many steps from now.
        streams: list[tuple[float, float]] = [(decoding, endings.tokens / max(1, endings.n))]
        steps = seconds = 0.0
        for group in range(groups):
            decoding = int(sum([many for many, until in streams if until > steps]))
            decoding = min(decoding, self.limits.max_seats - 1)
            wanting = min(int(count - group * weight) + 1, most_wanting)
            most, step_s = self._prompt_step(decoding, wanting, mean)
            more = rows / groups / most
            steps += more
            seconds += more * step_s
            streams.append((weight, steps + self._mean_expected()))
        return steps, seconds

    def _prompt_step(self, decoding: int, wanting: int, mean: int) -> tuple[int, float]:
        """(prompt rows of a step, its seconds) beside so many streams, of so many prompts of `mean`
        rows.
        """
        times, budget = self.step_times, self.prefill_budget
        short = budget.is_short(mean, mean)
        most = max(1, budget.most(decoding, mean // 2, wanting, short=short))
        beside = times.buckets.mixed_for(decoding + 1)
        bucket = next((b for b in beside if decoding + most <= b.tokens), beside[-1])
        seconds = times.mixed(bucket, min(bucket.tokens, decoding + most))
        if seconds is None:
            seconds = times.step or _FIRST_STEP_S
        return most, seconds + times.per_pair * most * mean / 2
