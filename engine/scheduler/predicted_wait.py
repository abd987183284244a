"""How long a newcomer will wait, from who is there, how long their answers should get, and how fast
steps go.
"""

from __future__ import annotations

from jitney.engine.errors import RequestError
from jitney.engine.scheduler.estimates import PrefillBudget, StepTimeEstimate
from jitney.engine.scheduler.kv_pages import PagePool, shareable_keys
from jitney.engine.scheduler.limits import SchedulerLimits
from jitney.engine.scheduler.queues import advised
from jitney.engine.scheduler.sequence import Sequence
from jitney.engine.scheduler.state import SchedulerState

#: A deadline is given up only if it would be missed even with this share of the predicted wait.
_HOPE = 0.5


class PredictedWait:
    """Refuses what would wait too long; before a step was measured it refuses nothing.

    Steps until a newcomer boards are counted, each taken to last as long as recent ones did, prompt
    rows and all.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        state: SchedulerState,
        prefill_budget: PrefillBudget,
        pool: PagePool,
        *,
        batch: int = 0,
    ):
        self.limits = limits
        self.state = state
        self.prefill_budget = prefill_budget
        self.pool = pool
        self.step_times: StepTimeEstimate = prefill_budget.step_times
        #: Sequences per batch where seats are kept; 0 where they are refilled at once.
        self.batch = batch

    def admit(self, leader: Sequence, now: float) -> None:
        """Raise RequestError queue_full or deadline_unreachable, each with seconds after which to
        try again.
        """
        limit, deadline = self.limits.max_predicted_wait_s, leader.request.deadline
        if not limit and deadline is None:
            return
        wait = self.wait(leader)
        if limit and wait > limit:
            retry = advised(wait - limit)
            raise RequestError(
                f"about {wait:.1f} s of waiting are ahead, and at most {limit:g} are allowed; "
                "retry in "
                f"{retry:.1f} s",
                code="queue_full",
                retry_after=retry,
            )
        if deadline is not None and now + _HOPE * wait + self._prefill(leader) > deadline:
            raise RequestError(
                f"the first token could not come before the request's deadline; about {wait:.1f} s "
                "of "
                "waiting are ahead",
                code="deadline_unreachable",
                retry_after=advised(wait),
            )

    def wait(self, newcomer: Sequence) -> float:
        """Seconds it should wait for a seat; 0 before anything was measured."""
        if self.step_times.step is None:
            return 0.0
        ahead = self.state.n_ahead(newcomer)
        steps = self._batch_steps(ahead) if self.batch else self._seat_steps(ahead)
        return self.step_times.step * max(steps, self._prompt_steps(ahead)) if steps else 0.0

    def _seat_steps(self, ahead: int) -> float:
        """Steps until so many who are ahead, and then the newcomer, have found a seat.

        For the k-th seat to become free the k-th shortest rest must run. Beyond one round of all
        seats: what is to be generated ahead, spread over the seats, less the half-done answers that
        run on at that time.
        """
        left = self._rests()
        wanted = ahead + 1 - len(self.state.free_seats)
        if wanted <= 0:
            return 0.0
        if wanted <= len(left):
            return sorted(left)[wanted - 1]
        mean, seats = self._mean_expected(), self.limits.max_seats
        return max(1.0, (sum(left) + mean * (ahead - (seats - 1) / 2)) / seats)

    def _batch_steps(self, ahead: int) -> float:
        """Steps until the running batch and the full ones before the newcomer's are done."""
        return max(self._rests(), default=0) + ahead // self.batch * self._mean_expected()

    def _rests(self) -> list[int]:
        """Output tokens that each seated sequence is still expected to generate."""
        return [max(1, seq.expected - seq.n_output) for seq in self.state.seated]

    def _mean_expected(self) -> float:
        queue = self.state.queue
        return queue.expected / len(queue) if queue else 1.0

    def _prompt_steps(self, ahead: int) -> float:
        """Steps that the prompts ahead take, at the most rows that they may have beside running
        streams.
        """
        state = self.state
        waiting = min(ahead + 1, self.limits.max_seats)
        rows = (
            self.prefill_budget.share_beside(len(state.decoding), waiting)
            * self.step_times.buckets.token_budget
        )
        share = min(1.0, ahead / max(1, self.state.n_waiting))
        return share * self.state.backlog.tokens / max(1.0, rows)

    def _prefill(self, leader: Sequence) -> float:
        """The least seconds for the rows of the prompt that are not found in pages now."""
        found = self.pool.count(shareable_keys(leader, self.pool.page_size)) * self.pool.page_size
        return self.step_times.fastest_prefill(leader.n_prompt - found)
