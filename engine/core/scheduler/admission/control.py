"""Admission control decides whether a request may wait, by the waiting work and by its predicted
wait. A refused request gets a time at which to retry.

If seats are free for a request, it is refused only for its predicted wait, which prompts ahead of
it can make too long. An idle engine refuses no request.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import EngineRequest
from jitney.engine.core.scheduler.admission.predicted_wait import PredictedWait, Prediction
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.open_sequences import OpenSequences
from jitney.engine.core.scheduler.sequence import Sequence

#: Bounds of Retry-After, in seconds.
SHORTEST_RETRY, LONGEST_RETRY = 0.1, 1800.0
#: Refused requests return this many times their predicted work time apart, so that the queue has
#: room for each. Random delay: at most this many seconds, and at most this share of the wait.
_SPARSE, _JITTER_S, _JITTER_SHARE = 1.05, 0.5, 0.05
#: A request is refused for its deadline only if it would miss it even with this share of the
#: predicted wait.
_HOPE = 0.5
#: The first refused request returns when the queue is down to this share of a bound, or to less if
#: less may be filled now: the rest is a buffer, because places do not become free evenly.
_CALM = 0.6
#: Share of the longest predicted wait that may be filled while all seats are taken: the prediction
#: is a mean, and one request in a hundred waits longer. Then the share in the first seconds of a
#: crowd, and that number of seconds: a crowd slows the engine down, on two cores to half its speed,
#: while the prediction is based on earlier steps.
_SURE, _AT_FIRST, _FIRST_S = 0.9, 0.5, 3.0
#: Share of each bound that new requests may fill while refused ones are expected to return; the
#: rest is reserved for those. Then how many seconds too early a request may return.
_FOR_NEW, _EARLY_S = 0.5, 0.5
#: Number of the latest refused requests that are recognised when they return.
_MOST_RECOGNISED = 1 << 14
#: The most verdicts stored; more are never open, since the requests of a group arrive one after the
#: other.
_MOST_VERDICTS = 64


class _Work(NamedTuple):
    """The work of a request and of all other requests of its group."""

    #: Number of sequences, each of which needs a seat.
    sequences: int
    #: Prompt tokens, each prompt counted once, and expected output tokens.
    tokens: int

    @classmethod
    def of(cls, leader: Sequence) -> _Work:
        request, group = leader.request, leader.request.group
        n_requests = group.requests if group else 1
        prompts = group.prompt_tokens if group else leader.n_prompt
        n = n_requests * request.sampling.n
        return cls(n, prompts + n * leader.expected)


class _Bound(NamedTuple):
    """One of the bounds on the waiting work."""

    #: Level including the new request, and the highest level allowed.
    level: float
    most: float
    #: Seconds in which the level falls by one if no request arrives.
    falls_in: float
    #: Error message for the client.
    reason: str
    #: Factor on `most` for a tenant that finds the queue filled by others.
    overflow: float = 2.0
    #: Share of `most` that may be filled now.
    now: float = 1.0

    @property
    def excess(self) -> float:
        """Difference between the level and the one at which the first refused request returns."""
        return self.level - min(_CALM, self.now) * self.most

    def for_a_modest_tenant(self) -> _Bound:
        """The bound for a tenant that finds the queue filled by others."""
        if self.overflow == 1.0:
            return self
        return self._replace(most=self.overflow * self.most, now=1.0)


@dataclass(slots=True)
class _Verdict:
    """The decision on a group of requests that arrived together."""

    #: Number of its requests that are not judged yet.
    to_come: int
    #: The error for all of them; None if they are admitted.
    refusal: RequestError | None = None


class ReturnTimes:
    """Spreads the returns of refused requests over time: each returns when those refused before it
    should have been served. No place is reserved for them, but requests that return in time are
    recognised.
    """

    def __init__(self, seed: int = 0):
        self._random = random.Random(seed)
        # Clock seconds until which returning requests should keep the engine busy.
        self._busy_until = -math.inf
        # Clock seconds at which refused requests should return, by digest; the latest refusal last.
        self._due: OrderedDict[bytes, float] = OrderedDict()
        # The request that was looked up last, and its digest, which is needed again if it is
        # refused.
        self._last: tuple[EngineRequest | None, bytes] = None, b""

    def clear(self) -> None:
        """Forget all refused requests; called when a request finds free seats, because the refused
        ones have then been served or do not return.
        """
        self._busy_until = -math.inf
        self._due.clear()
        self._last = None, b""

    def expects_any(self, now: float) -> bool:
        """Whether refused requests are still expected to return."""
        return self._busy_until > now

    def is_due(self, request: EngineRequest, now: float) -> bool:
        """Whether a request was refused before and does not return too early."""
        if not self._due:
            return False
        return self._due.get(self._digest(request), math.inf) <= now + _EARLY_S

    def next(self, request: EngineRequest, now: float, free_in: float, work_s: float) -> float:
        """Seconds after which a refused request should return.

        free_in: seconds until there is room if no request comes. work_s: seconds that its work
        takes.
        """
        wait = max(self._busy_until - now, free_in, 0.0)
        if wait > LONGEST_RETRY:
            return LONGEST_RETRY * self._random.uniform(0.5, 1.0)
        self._busy_until = now + wait + _SPARSE * work_s
        jitter = self._random.uniform(0.0, min(_JITTER_S, _JITTER_SHARE * wait))
        wait = max(SHORTEST_RETRY, wait + jitter)
        digest = self._digest(request)
        self._due[digest] = now + wait
        self._due.move_to_end(digest)
        if len(self._due) > _MOST_RECOGNISED:
            self._due.popitem(last=False)
        return wait

    def _digest(self, request: EngineRequest) -> bytes:
        """The request's digest, computed once while it is judged."""
        if self._last[0] is not request:
            self._last = request, _digest_of(request)
        return self._last[1]


def _digest_of(request: EngineRequest) -> bytes:
    """Digest by which a returning request is recognised: account, prompt and lengths, without the
    seed, which differs each time unless the client gave one.
    """
    sampling, together = request.sampling, request.group.requests if request.group else 1
    salt, adapter = request.cache_salt, request.adapter
    parts = (request.account, salt, adapter, sampling.n, sampling.max_tokens, together)
    digest = blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=16)
    digest.update(array("i", request.prompt).tobytes())
    return digest.digest()


class AdmissionControl:
    """Admits requests, or refuses them with a Retry-After."""

    def __init__(
        self, limits: SchedulerLimits, sequences: OpenSequences, predicted_wait: PredictedWait
    ):
        self.limits = limits
        self.predicted_wait = predicted_wait
        self._sequences = sequences
        self._backlog = sequences.live.backlog
        self._returns = ReturnTimes()
        # Clock seconds at which the present crowd began; None without a crowd.
        self._crowded_since: float | None = None
        # Verdicts on groups whose requests have not all arrived, by the group's id.
        self._verdicts: OrderedDict[str, _Verdict] = OrderedDict()

    def admit(self, leader: Sequence, now: float) -> None:
        """Raise RequestError queue_full or deadline_unreachable unless the leader's request may
        wait. The first request of a group is judged for the whole group.
        """
        group = leader.request.group
        if group is None or leader.request.background:
            self._judge(leader, now)
            return
        verdict = self._verdicts.get(group.id)
        if verdict is None:
            verdict = self._verdicts[group.id] = _Verdict(group.requests)
            if len(self._verdicts) > _MOST_VERDICTS:
                self._verdicts.popitem(last=False)
            try:
                self._judge(leader, now)
            except RequestError as error:
                verdict.refusal = error
        verdict.to_come -= 1
        if not verdict.to_come:
            del self._verdicts[group.id]
        if verdict.refusal is not None:
            raise verdict.refusal

    def has_room(self, leader: Sequence, now: float) -> bool:
        """Whether `admit` would admit a request without a deadline."""
        if leader.request.background:
            return self._background_has_room(leader)
        work, prediction = _Work.of(leader), self.predicted_wait.prediction_for(leader)
        bounds = self._bounds(work, prediction, self._share(leader, now), now)
        return self._refusal(bounds, leader, work) is None

    def _judge(self, leader: Sequence, now: float) -> None:
        if leader.request.background:
            self._judge_background(leader)
            return
        work, prediction = _Work.of(leader), self.predicted_wait.prediction_for(leader)
        _check_deadline(leader.request.deadline, prediction, now)
        share = self._share(leader, now)
        bounds = self._bounds(work, prediction, share, now)
        refusal = self._refusal(bounds, leader, work)
        if refusal is None:
            if self._finds_seats(work):
                self._returns.clear()
            return
        free_in = max(bound.excess * bound.falls_in for bound in bounds)
        work_s = work.tokens * self._seconds_per_token(prediction)
        retry = self._returns.next(leader.request, now, free_in, work_s)
        if share < 1.0:
            refusal += "; half of the room is for requests that were refused before"
        raise RequestError(
            f"{refusal}; retry in {retry:.1f} s", code="queue_full", retry_after=retry
        )

    def _judge_background(self, leader: Sequence) -> None:
        if not self._background_has_room(leader):
            raise RequestError(
                "too many requests wait in the background already",
                code="queue_full",
                retry_after=SHORTEST_RETRY,
            )

    def _background_has_room(self, leader: Sequence) -> bool:
        """Whether a background request may wait; these have a bound of their own."""
        waiting = self._sequences.background.backlog.sequences
        most = self.limits.max_waiting_requests
        return not waiting or waiting + leader.request.sampling.n <= most

    def _finds_seats(self, work: _Work) -> bool:
        return self._backlog.sequences + work.sequences <= self._sequences.open_seats

    def _share(self, leader: Sequence, now: float) -> float:
        """Share of each bound that a request may fill if it finds no open seats."""
        if leader.request.admitted or not self._returns.expects_any(now):
            return 1.0
        if self._returns.is_due(leader.request, now):
            return 1.0
        return _FOR_NEW

    def _bounds(self, work: _Work, prediction: Prediction, most: float, now: float) -> list[_Bound]:
        """The bounds that apply to this request, with the levels that it would reach. A request
        with too many tokens may wait if no other waits.

        most: share of each bound that it may fill if it finds no open seats.
        """
        if not self._sequences.live.n_open:
            return []
        finds_seats = self._finds_seats(work)
        bounds = [] if finds_seats else self._bounds_of_waiting(work, prediction, most)
        wait, longest = prediction.wait_s, prediction.longest_wait_s
        if longest:
            share = _SURE if self._crowd_s(now) >= _FIRST_S else _AT_FIRST
            share = 1.0 if finds_seats else min(share, most)
            shown = longest if wait > longest else share * longest
            reason = (
                f"about {wait:.1f} s of waiting are ahead, and at most {shown:g} are allowed; "
                f"sequences waiting: {self._backlog.sequences}"
            )
            # A predicted wait falls by a second in a second.
            bounds.append(_Bound(wait, longest, 1.0, reason, overflow=1.0, now=share))
        return bounds

    def _crowd_s(self, now: float) -> float:
        """Seconds since the crowd began: sequences wait and no seat is open."""
        if not self._sequences.crowded:
            self._crowded_since = None
            return 0.0
        if self._crowded_since is None:
            self._crowded_since = now
        return now - self._crowded_since

    def _bounds_of_waiting(self, work: _Work, prediction: Prediction, share: float) -> list[_Bound]:
        """The bounds on the number of waiting sequences and tokens. share: share of each bound that
        may be filled.
        """
        backlog, limits = self._backlog, self.limits
        most = limits.max_waiting_requests
        bounds = [
            _Bound(
                backlog.sequences + work.sequences - self._sequences.open_seats,
                most,
                self._seconds_per_place(prediction),
                f"too many sequences are waiting: {backlog.sequences}, of at most {most}",
                now=share,
            )
        ]
        if backlog.sequences:
            most = limits.max_waiting_tokens
            reason = (
                f"too many tokens are waiting to be computed: {backlog.work}, of at most {most}"
            )
            level = backlog.work + work.tokens
            falls_in = self._seconds_per_token(prediction)
            bounds.append(_Bound(level, most, falls_in, reason, now=share))
        return bounds

    def _refusal(self, bounds: list[_Bound], leader: Sequence, work: _Work) -> str | None:
        """The reason why a request may not wait; None if it may."""
        refusal = _first_over(bounds)
        if refusal is None or not self._may_overflow(leader, work):
            return refusal
        return _first_over([bound.for_a_modest_tenant() for bound in bounds])

    def _may_overflow(self, leader: Sequence, work: _Work) -> bool:
        """Whether a request may exceed the bounds: in the order "fair", a tenant with less than its
        share of the queue is not refused because others have filled it.
        """
        if self.limits.order != "fair":
            return False
        accounts = self._backlog.accounts
        own = accounts[leader.request.account] + work.sequences
        return own * (len(accounts) + 1) <= self.limits.max_waiting_requests

    def _seconds_per_token(self, prediction: Prediction) -> float:
        backlog = self._backlog
        tokens = prediction.answer_tokens
        if backlog.sequences:
            tokens = backlog.work / backlog.sequences
        return self._seconds_per_place(prediction) / max(1.0, tokens)

    def _seconds_per_place(self, prediction: Prediction) -> float:
        """Mean seconds between two seats becoming free: an answer's time divided by the seats."""
        return prediction.answer_s / self._sequences.working_seats


def _first_over(bounds: list[_Bound]) -> str | None:
    """The reason of the first bound that is exceeded."""
    for bound in bounds:
        if bound.level > bound.now * bound.most:
            return bound.reason
    return None


def _check_deadline(deadline: float | None, prediction: Prediction, now: float) -> None:
    """Raise RequestError deadline_unreachable if the first token could not come in time."""
    wait = prediction.wait_s
    if deadline is None or now + _HOPE * wait + prediction.prefill_s <= deadline:
        return
    raise RequestError(
        f"the first token could not come before the request's deadline; about {wait:.1f} s of "
        "waiting are ahead",
        code="deadline_unreachable",
        retry_after=max(wait, SHORTEST_RETRY),
    )
