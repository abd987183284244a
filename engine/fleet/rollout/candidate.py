"""A model with a candidate: each key stays with one arm, and answers are measured as they pass,
without being parsed twice or stored.

If the candidate fails before its answer begins, the stable arm answers: the failure is counted, and
the client does not see it. Failures are errors, bodies that are no answer of the API, and silence
for much longer than the stable arm's engines need. If the candidate refuses the request itself, the
client is at fault if the stable arm refuses it as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from jitney.engine.common.errors import JitneyError, RequestError
from jitney.engine.common.requests import JsonDict
from jitney.engine.fleet.forwarding import (
    ProxiedAnswer,
    is_own_limit,
    joined,
    stream_failure,
)
from jitney.engine.fleet.models import ReplicatedModel
from jitney.engine.fleet.prompt_prefixes import prefix_key
from jitney.engine.fleet.replicas import EngineShare, Replica
from jitney.engine.fleet.request import WRITING, ProxiedRequest
from jitney.engine.fleet.rollout.answer_shape import AnswerShape
from jitney.engine.fleet.rollout.comparison import ARMS, ArmName, RequestOutcome
from jitney.engine.fleet.rollout.measuring import UsageWatch
from jitney.engine.fleet.rollout.rollout import Action, KeyPlace, Rollout
from jitney.engine.server import ErrorReply, HttpError

#: Routes whose speed is compared, except background requests. All routes go to their key's arm, and
#: their failures are compared.
_COMPARED = WRITING - {"/infill"}
#: Characters of a prompt that are its key if a request names no user.
_KEY_CHARS = 1024
_HOUR_S = 3600.0
#: HTTP statuses: of an answer; of a refusal because engines are full; the lowest of server errors;
#: the lowest of client errors; of a body that is no answer of the API, or of no answer in time.
_OK, _FULL, _SERVER_ERROR, _CLIENT_ERROR, _NO_ANSWER = 200, 429, 500, 400, 502
#: A candidate may take this many times the slowest time of the stable arm; that slowest time decays
#: by this factor with each answer (to a third after a hundred). Least seconds after which a client
#: that leaves an overdue answer counts as the candidate's failure.
_TIMES_SLOWER, _FADE, _LEAST_OVERDUE_S = 3.0, 0.99, 1.0
#: Events with which the API ends a failed stream; the last one begins a JSON line.
_ERRORS = (b'data: {"error"', b"event: error\n", b"event: response.failed\n", b'\n{"error"')


async def _nowhere() -> None:
    """Default of `keep`: nothing is saved."""


@dataclass(slots=True)
class ModelWithCandidate:
    """A model of two arms, stable and candidate, under one name."""

    stable: ReplicatedModel
    candidate: ReplicatedModel
    rollout: Rollout
    #: Price of one engine of each arm per hour, in the operator's unit.
    prices: Mapping[ArmName, float] = field(default_factory=lambda: dict.fromkeys(ARMS, 1.0))
    #: Returns the time in seconds.
    clock: Callable[[], float] = time.monotonic
    #: Least timeout of the candidate: seconds without any output.
    timeout_s: float = 10.0
    #: Saves the rollout to disk; called after a decision.
    keep: Callable[[], Awaitable[None]] = _nowhere
    #: Whether the candidate has been ready since the last decision by hand; until then its engines
    #: are starting, which is no failure.
    _has_begun: bool = False
    _pace: _Pace = field(default_factory=lambda: _Pace())

    @property
    def ready(self) -> bool:
        return self.stable.ready or (self.rollout.share > 0 and self.candidate.ready)

    @property
    def replicas(self) -> Sequence[Replica]:
        return [*self.stable.replicas, *self.candidate.replicas]

    def arm(self, name: ArmName) -> ReplicatedModel:
        return self.stable if name == "stable" else self.candidate

    def card(self) -> JsonDict:
        return self.stable.card()

    async def keeper_of(self, request: ProxiedRequest, path: str) -> Replica | None:
        """See `FleetModel`."""
        for name in ARMS:
            replica = await self.arm(name).keeper_of(request, path)
            if replica is not None:
                return replica
        return None

    @asynccontextmanager
    async def answer(self, request: ProxiedRequest) -> AsyncIterator[ProxiedAnswer]:
        """See `FleetModel`."""
        async with AsyncExitStack() as stack:
            yield await self._answer_of(stack, request)

    async def _answer_of(self, stack: AsyncExitStack, request: ProxiedRequest) -> ProxiedAnswer:
        """An arm's answer; closing the stack closes it."""
        only_arm = self._keeping(request)
        if only_arm is not None:
            return await stack.enter_async_context(self.arm(only_arm).answer(request))
        place = self.rollout.place(_key_of(request))
        if place.arm == "candidate" and self._may_try():
            return await self._of_candidate(stack, place, request)
        if place.arm == "candidate":
            return await stack.enter_async_context(self.stable.answer(request))
        answer, _ = await stack.enter_async_context(self._watched(place, request))
        return answer

    def _keeping(self, request: ProxiedRequest) -> ArmName | None:
        """The arm of the only engine that can answer; None if any engine can."""
        if not request.keeper:
            return None
        names = [each.name for each in self.candidate.replicas]
        return "candidate" if request.keeper in names else "stable"

    async def _of_candidate(
        self, stack: AsyncExitStack, place: KeyPlace, request: ProxiedRequest
    ) -> ProxiedAnswer:
        """The candidate's answer, or the stable arm's if the candidate fails."""
        is_refused = False
        if self.candidate.ready:
            own = await stack.enter_async_context(AsyncExitStack())
            try:
                answer, watch = await own.enter_async_context(self._watched(place, request))
                is_refused = not watch.failed
                if watch.is_answer or watch.is_own_limit or (is_refused and not self.stable.ready):
                    return answer
                await own.aclose()
            except (RequestError, HttpError, _Silent) as error:
                is_refused = not _is_failure(_status_of(error))
        else:
            self._observe(place, request, RequestOutcome(ok=False))
        answer = await stack.enter_async_context(self.stable.answer(request))
        if is_refused and answer.status < _CLIENT_ERROR:
            self._observe(place, request, RequestOutcome(ok=False))
        return answer

    async def decide(self, action: Action) -> None:
        """Apply an operator's decision. Engines of a candidate that was rolled back start again."""
        self.rollout.decide(action)
        self._has_begun = False
        await self.keep()

    def _may_try(self) -> bool:
        """False while the candidate's engines are loading for the first time."""
        self._has_begun = self._has_begun or self.candidate.ready
        return self._has_begun

    @asynccontextmanager
    async def _watched(
        self, place: KeyPlace, request: ProxiedRequest
    ) -> AsyncIterator[tuple[ProxiedAnswer, _AnswerWatch]]:
        """An arm's answer; a candidate's only once its first bytes are valid. The outcome is
        recorded when the context is left.
        """
        is_judged = place.arm == "candidate" and self.rollout.state == "running"
        limit_s = self.timeout_s if is_judged else None
        watch = _AnswerWatch(request, self.clock, self._pace, self.prices[place.arm], limit_s)
        try:
            async with AsyncExitStack() as stack:
                async with watch.in_time():
                    answering = self.arm(place.arm).answer(request)
                    answer = await watch.of(await stack.enter_async_context(answering))
                yield answer, watch
        except (RequestError, HttpError, _Silent) as error:
            watch.refused(_status_of(error))
            raise
        finally:
            outcome = watch.end()
            if outcome is not None and not self._is_no_fault(place.arm, watch):
                self._observe(place, request, outcome)

    def _observe(self, place: KeyPlace, request: ProxiedRequest, outcome: RequestOutcome) -> None:
        if request.background or request.route not in _COMPARED:
            outcome = RequestOutcome(outcome.ok)
        self.rollout.observe(place, outcome)

    def _is_no_fault(self, arm: ArmName, watch: _AnswerWatch) -> bool:
        """Whether a refusal does not count against the arm's engines: the busier arm refused, or
        they refused a background request, which yields to others and is sent again.
        """
        if not watch.is_full:
            return False
        other: ArmName = "stable" if arm == "candidate" else "candidate"
        is_busier = self._load(arm) > self._load(other) and self.arm(other).ready
        return is_busier or watch.request.background

    def _load(self, arm: ArmName) -> float:
        """Mean requests at an arm's ready engines."""
        engines = self.arm(arm).engines
        return engines.total / max(1, len(engines.loads))

    def report(self) -> JsonDict:
        """`Rollout.report` with the names of each arm's engines."""
        report = self.rollout.report()
        for name in ARMS:
            replicas = self.arm(name).replicas
            report["arms"][name]["replicas"] = [replica.name for replica in replicas]
        return report


def _key_of(request: ProxiedRequest) -> bytes:
    """The key that decides the arm: the user that the request names (`user`, `safety_identifier`,
    `metadata.user_id`), else its conversation (`prompt_cache_key`, the header x-session-id), else
    the beginning of its prompt.
    """
    fields = request.fields
    metadata = fields.get("metadata")
    users = [fields.get("user"), fields.get("safety_identifier")]
    if isinstance(metadata, dict):
        users.append(metadata.get("user_id"))
    for user in users:
        if isinstance(user, str) and user:
            return b"user\0" + user.encode(errors="replace")
    return prefix_key(request, _KEY_CHARS)


def _is_failure(status: int) -> bool:
    """Whether a status is the engine's fault; a full engine counts."""
    return status == _FULL or status >= _SERVER_ERROR


def _status_of(error: Exception) -> int:
    return _NO_ANSWER if isinstance(error, _Silent) else ErrorReply.of(error, "").status


class _Silent(JitneyError):
    """The candidate has sent nothing for too long."""


class _Wait(NamedTuple):
    """A kind of wait; waits of the same kind take about the same time."""

    #: "first": for an answer's first bytes (all of it without streaming). "next": for more.
    what: Literal["first", "next"]
    route: str
    streams: bool
    background: bool

    @property
    def next(self) -> _Wait:
        return self._replace(what="next")


class _Pace:
    """Measures the stable arm's waits in seconds, which determine the candidate's timeout."""

    def __init__(self) -> None:
        self._slowest: dict[_Wait, float] = {}
        #: Kind of wait -> answer of the stable arm -> start of its current wait, the oldest first.
        self._open: dict[_Wait, dict[object, float]] = {}

    def begin(self, wait: _Wait, answer: object, now: float) -> None:
        """Record that a wait on an answer of the stable arm begins."""
        self._open.setdefault(wait, {})[answer] = now

    def end(self, wait: _Wait, answer: object) -> None:
        """Record that the wait on an answer of the stable arm has ended."""
        self._open[wait].pop(answer, None)

    def took(self, wait: _Wait, seconds: float) -> None:
        self._slowest[wait] = max(seconds, _FADE * self._slowest.get(wait, 0.0))

    def limit(self, wait: _Wait, now: float, least_s: float) -> float:
        """The candidate's timeout; it rises while an answer of the stable arm is overdue, too."""
        oldest = next(iter(self._open.get(wait, {}).values()), now)
        slowest = max(now - oldest, self._slowest.get(wait, 0.0))
        return max(least_s, _TIMES_SLOWER * slowest)

    def knows(self, wait: _Wait) -> bool:
        """Whether a wait of this kind on the stable arm was measured."""
        return wait in self._slowest


@dataclass(eq=False, slots=True)
class _AnswerWatch:
    """Measures one answer on its way to the client. Times are seconds of `clock`."""

    request: ProxiedRequest
    clock: Callable[[], float]
    pace: _Pace
    #: Price of one of the arm's engines per hour.
    price: float
    #: Least timeout of a candidate's answer, seconds; its body is passed on once the first bytes
    #: are valid. None: an answer of the stable arm, without timeout.
    limit_s: float | None = None
    begun: float = field(init=False)
    shape: AnswerShape = field(init=False)
    #: The current wait, its start, and the longest wait for a further piece.
    _wait: _Wait = field(init=False)
    _since: float = field(init=False)
    _longest_s: float = 0.0
    #: Checks the timeout of the current wait.
    _timer: asyncio.TimerHandle | None = None
    #: HTTP status of the answer; 0 without an answer.
    _status: int = 0
    _is_stream: bool = False
    #: Seconds until the first token; mean requests at the engine until then.
    _first_s: float | None = None
    _first_load: float | None = None
    _share: EngineShare | None = None
    _usage: UsageWatch = field(default_factory=UsageWatch)
    #: Whether an event had the form of its route.
    _is_proven: bool = False
    #: Whether the stream contains an error event or is no answer of its route.
    _broken: bool = False
    #: Whether the body was read to its end.
    _whole: bool = False
    #: The last events that hold data.
    _last: bytes = b""
    #: Whether it is a refusal by full engines, or for the client's own limits.
    is_full: bool = False
    is_own_limit: bool = False

    def __post_init__(self) -> None:
        self.begun = self._since = self.clock()
        self.shape = AnswerShape.of(self.request)
        self._wait = _Wait("first", self.request.route, self.shape.streams, self.request.background)
        if self.limit_s is None:
            self.pace.begin(self._wait, self, self.begun)

    async def of(self, answer: ProxiedAnswer) -> ProxiedAnswer:
        """The same answer, measured while it is read."""
        self._status, self._share = answer.status, answer.share
        self._is_stream = answer.status == _OK and answer.is_stream
        if answer.status == _OK and not self.shape.is_of_its_kind(answer.media_type):
            self._status = _NO_ANSWER
        if not self._is_stream:
            return await self._plain(answer)
        body = self._watched(answer.body)
        return replace(answer, body=body if self.limit_s is None else await self._proven(body))

    async def _plain(self, answer: ProxiedAnswer) -> ProxiedAnswer:
        """An answer that is no stream. Its first part is all of it, unless it is very long."""
        body = aiter(answer.body)
        first = await anext(body, b"")
        self._hear()
        length = dict(answer.headers).get(b"content-length", b"")
        is_all = length == str(len(first)).encode()
        if answer.status == _FULL:
            self.is_own_limit = is_own_limit(first)
            self.is_full = not self.is_own_limit
            self._status = _CLIENT_ERROR if self.is_own_limit else _FULL
        elif answer.status == _OK:
            is_fit = not is_all or self.shape.fits(first)
            self._status = self._status if is_fit else _NO_ANSWER
        elif answer.status < _SERVER_ERROR and not self.shape.is_error(first):
            self._status = _NO_ANSWER
        return replace(answer, body=self._watched(joined([first] if first else [], body)))

    async def _proven(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The body of a stream, once its first event is known to be valid or not."""
        held: list[bytes] = []
        async for part in body:
            held.append(part)
            if self._is_proven or self._broken:
                break
        return joined(held, body)

    @property
    def is_answer(self) -> bool:
        """Whether it is a valid answer so far."""
        return self._status == _OK and not self._broken

    @property
    def failed(self) -> bool:
        return self._broken or _is_failure(self._status)

    def refused(self, status: int) -> None:
        """Record an error with this status instead of an answer."""
        self._status = status

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Context for a wait. For the candidate it raises _Silent after its timeout without output;
        for the stable arm it has no timeout.
        """
        if self.limit_s is None:
            yield
            return
        try:
            async with asyncio.timeout(None) as deadline:
                self._check(deadline, self.limit_s)
                yield
        except TimeoutError:
            if not deadline.expired():
                raise
            waited_s = self.clock() - self._since
            raise _Silent(f"the engine has said nothing for {waited_s:.0f} s") from None
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _check(self, deadline: asyncio.Timeout, limit_s: float) -> None:
        """End the wait if its timeout has passed; otherwise check again when it may have."""
        loop = asyncio.get_running_loop()
        left_s = self._left_s(limit_s)
        if left_s > 0:
            self._timer = loop.call_later(left_s, self._check, deadline, limit_s)
        else:
            deadline.reschedule(loop.time())

    def _left_s(self, least_s: float) -> float:
        """Seconds left until the candidate's timeout."""
        now = self.clock()
        return self._since + self.pace.limit(self._wait, now, least_s) - now

    def _hear(self) -> None:
        """Record output: the current wait ends, and the wait for the next piece begins."""
        now = self.clock()
        if self.limit_s is None:
            self.pace.end(self._wait, self)
            if self._wait.what == "first":
                self.pace.took(self._wait, now - self._since)
            else:
                self._longest_s = max(self._longest_s, now - self._since)
            self.pace.begin(self._wait.next, self, now)
        self._wait, self._since = self._wait.next, now

    async def _watched(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            while (part := await self._next(body)) is not None:
                self._see(part)
                yield part
        except _Silent as error:
            self._broken = True
            yield stream_failure(RequestError(str(error), code="engine_dead"), self.request)
            return
        self._whole = True
        if self._is_stream and not self.shape.ends(self._last):
            self._broken = True

    async def _next(self, body: AsyncIterator[bytes]) -> bytes | None:
        """The next part; None at the end. Raises _Silent in the middle of a stream; before its
        first event, the caller's `in_time` does.
        """
        if not self._is_proven:
            return await anext(body, None)
        async with self.in_time():
            return await anext(body, None)

    def _see(self, part: bytes) -> None:
        pieces = self._usage.see(part)
        if not self._is_stream or not self.shape.has_data(part):
            return
        if not self._is_proven:
            self._is_proven = self.shape.fits_events(part) is True
            self._broken = not self._is_proven
        self._broken = self._broken or any(error in b"\n" + part for error in _ERRORS)
        self._last = part
        self._hear()
        if pieces and self._first_s is None:
            self._first_s = self._since - self.begun
            self._first_load = self._share.load if self._share else None

    @property
    def _tokens(self) -> int:
        """Output tokens. Without streaming only the usage counts, since the text is one piece."""
        return self._usage.tokens if self._is_stream else self._usage.output or 0

    def end(self) -> RequestOutcome | None:
        """The outcome at the end; None if it says nothing about the engine."""
        if self.limit_s is None:
            self.pace.end(self._wait, self)
            if self._longest_s:
                self.pace.took(self._wait, self._longest_s)
        if self.failed:
            return RequestOutcome(ok=False)
        if self._status >= _CLIENT_ERROR:
            return None
        if not self._whole:
            return RequestOutcome(ok=False) if self._was_overdue else None
        share, total_s = self._share, self.clock() - self.begun
        if share is None:
            return RequestOutcome(True, self._tokens, total_s, self._first_s, load=None)
        cost = self.price / _HOUR_S * share.seconds
        return RequestOutcome(
            True, self._tokens, total_s, self._first_s, cost, share.load, self._first_load
        )

    @property
    def _was_overdue(self) -> bool:
        """Whether the client left after waiting much longer than the stable arm takes."""
        if self.limit_s is None or self._whole:
            return False
        is_known = self.pace.knows(self._wait)
        return self._left_s(_LEAST_OVERDUE_S if is_known else self.limit_s) <= 0
