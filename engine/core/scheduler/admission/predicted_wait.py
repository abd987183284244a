"""Predicts the wait of a newly arrived request from the open sequences, their expected answer
lengths and the step times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jitney.engine.common.lengths import LengthEstimate
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.open_sequences import OpenSequences
from jitney.engine.core.scheduler.passing import Passing
from jitney.engine.core.scheduler.prefill_budget import PrefillBudget
from jitney.engine.core.scheduler.sequence import Sequence
from jitney.engine.core.scheduler.step_times import StepTimeEstimate

#: The most groups into which the prompts ahead are divided.
_GROUPS = 16
#: Assumed seconds of a step before one was measured.
_FIRST_STEP_S = 0.02
#: Number of future times at which the number of running answers is computed.
_TIMES = 48


class _Endings:
    """Expected ends of the running answers.

    The same share of them ends with each token: one of 32 ends soon, although each is expected to
    run for long.
    """

    def __init__(self, running: Iterable[Sequence], lengths: LengthEstimate):
        answers: list[tuple[float, float]] = []
        for seq in running:
            seq.counted = lengths.progress(seq.kind, seq.counted, seq.n_output)
            answers.append((_most_left(seq), lengths.mean(seq.kind)))
        #: Number of answers that run now.
        self.n = len(answers)
        most_left, means = np.array(answers, np.float64).reshape(-1, 2).T
        longest = most_left.max(initial=1.0)
        spread = np.geomspace(1.0, max(2.0, longest), _TIMES)
        spread = spread[spread < longest - 1]
        #: Steps from now, from 0 to the end of the last one by length, float64 [T], ascending.
        self._steps = np.concatenate(([0.0], spread, (longest - 1, longest)))
        steps = self._steps[:, None]
        alive = np.where(steps < most_left, np.exp(-steps / means), 0.0)
        #: Expected number of running answers at these times, float64 [T], falling from n to 0.
        self._running = alive.sum(axis=1)

    def steps_until(self, n: int) -> float:
        """Expected steps until `n` of the answers (1 to all) have ended; at least 1.

        With memoryless lengths, the n-th of N ends on average when about n - n/2N are expected to
        have ended; this is assumed here.
        """
        ended = n * (1 - 0.5 / self.n)
        # Reversed, because the interpolation needs ascending x.
        steps = np.interp(self.n - ended, self._running[::-1], self._steps[::-1])
        return max(1.0, float(steps))

    @property
    def tokens(self) -> float:
        """Expected number of tokens that all of them together still generate."""
        return float(np.trapezoid(self._running, self._steps))


def _most_left(seq: Sequence) -> int:
    """Tokens after which a sequence ends by length, at least 1."""
    return max(1, seq.limit - seq.n_prompt - seq.n_output)


class Prediction(NamedTuple):
    """Predictions for a new request, from the open sequences and the step times."""

    #: The longest predicted wait in seconds for which it is admitted; 0: any.
    longest_wait_s: float
    #: Expected seconds until it boards; 0 if no setting or deadline needs the prediction.
    wait_s: float
    #: Shortest time in seconds for the prompt rows that are not found in pages; 0 without a
    #: deadline.
    prefill_s: float
    #: Expected number of output tokens.
    answer_tokens: int
    #: Seconds for which one answer takes a seat, by the expected lengths of the waiting sequences.
    answer_s: float


class PredictedWait:
    """Predicts the wait of a newcomer, a newly arrived request; 0 before a step was measured.

    A newcomer waits for a seat and for the prompt rows before its own. The prediction counts the
    steps with prompt rows, and the further decode steps until a seat is free; each kind is assumed
    to take as long as its recent steps did, including the gaps between them.
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
        # A copy, because with a target_itl each call of `PrefillBudget.most` counts as a step.
        self.prefill_budget = replace(prefill_budget)
        self.passing = passing
        self.step_times: StepTimeEstimate = prefill_budget.step_times
        #: Sequences per batch where seats are kept; 0 where they are refilled at once.
        self.batch = batch
        # Computed on first use after each step; None until then.
        self._endings: _Endings | None = None

    def pass_step(self) -> None:
        """Note that a step is planned, which moves the running answers one token on."""
        self._endings = None

    def prediction_for(self, newcomer: Sequence) -> Prediction:
        """All predictions that admission control needs for a newcomer."""
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
        """Expected seconds until a newcomer boards; 0 before a step was measured."""
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
        """Expected seconds until a request boards that arrives after all waiting ones. This is the
        published predicted wait.
        """
        ahead = self._live.n_waiting
        return self._behind(ahead, self._rows_ahead(ahead))

    def _behind(self, ahead: int, rows: int) -> float:
        """Expected seconds until `ahead` sequences and then the newcomer have boarded, and `rows`
        prompt rows are computed.
        """
        if self.step_times.step is None:
            return 0.0
        steps = self._batch_steps(ahead) if self.batch else self._seat_steps(ahead)
        prompt_steps, prompt_s = self._prompt_steps(ahead, rows)
        seconds = prompt_s + max(0.0, steps - prompt_steps) * self._decode_s(ahead)
        return self.step_times.stretch * seconds

    def _decode_s(self, ahead: int) -> float:
        """Seconds of a decode step of the seated sequences and `ahead` more."""
        seated = min(self.limits.max_seats, max(1, self._seats.n_live + ahead))
        return self.step_times.decode(seated) or self.step_times.step or _FIRST_STEP_S

    def _rows_until_it_passes(self, rows: int) -> float:
        """Rows that are computed before a prompt of `rows` rows passes longer ones; inf if it does
        not pass or gets no seat.
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
        """Prompt rows of the boarded sequences and of `ahead` waiting ones."""
        boarded = sum([seq.n_left for seq in self._seats.live_prompts])
        share = min(1.0, ahead / max(1, self._live.n_waiting))
        return boarded + int(share * self._live.queue.rows.total())

    def _seat_steps(self, ahead: int) -> float:
        """Expected steps until `ahead` sequences, and then the newcomer, have got a seat.

        The k-th seat becomes free when k running sequences have ended. If more seats are needed
        than sequences run, all tokens to generate are spread over the working seats, less the
        half-done answers that still run then.
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
        """Expected steps until the running batch and the full batches before the newcomer's one are
        done.
        """
        endings = self._endings_now()
        running = endings.steps_until(endings.n) if endings.n else 0.0
        return running + ahead // self.batch * self._mean_expected()

    def _endings_now(self) -> _Endings:
        """The expected ends of the seated live sequences.

        They are computed once for all requests that arrive between two steps, because this takes
        about a millisecond at 1,024 seats.
        """
        if self._endings is None:
            seated = (seq for seq in self._seats.taken if not seq.background)
            self._endings = _Endings(seated, self._sequences.lengths)
        return self._endings

    def _mean_expected(self) -> float:
        """Mean of the output tokens that waiting sequences are expected to generate."""
        backlog, queue = self._live.backlog, self._live.queue
        if backlog.sequences:
            return backlog.expected / backlog.sequences
        return queue.expected / len(queue.waiting) if queue.waiting else 1.0

    def _prompt_steps(self, ahead: int, rows: int) -> tuple[float, float]:
        """(number of steps for the prompt rows ahead, their seconds in all).

        Prompts are computed one after the other, or in groups if there are many. Each then decodes
        beside the next ones, for as many steps as its answer has expected tokens. The more
        sequences decode and the fewer prompts wait, the fewer prompt rows a step has.
        """
        count = max(1, len(self._seats.live_prompts) + ahead)
        groups = min(count, _GROUPS)
        mean, weight = rows // count, count / groups
        most_wanting = max(1, self._sequences.open_seats) + 1
        decoding = min(self._seats.n_decoding_live, self.limits.max_seats - 1)
        if rows < self._prompt_step(decoding, min(count + 1, most_wanting), mean)[0]:
            return 0.0, 0.0
        endings = self._endings_now()
        # (number of decoding sequences, steps from now at which they end).
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
        """(prompt rows of a step, its seconds) beside `decoding` sequences, with `wanting` prompts
        of `mean` rows that need rows.
        """
        times, budget = self.step_times, self.prefill_budget
        short = budget.is_short(mean, mean)
        most = max(1, budget.most(decoding, mean // 2, wanting, short=short))
        beside = times.buckets.mixed_for(decoding + 1)
        bucket = next((b for b in beside if decoding + most <= b.tokens), beside[-1])
        seconds = times.mixed_at_least(bucket, min(bucket.tokens, decoding + most))
        return most, (seconds or _FIRST_STEP_S) + times.per_pair * most * mean / 2
