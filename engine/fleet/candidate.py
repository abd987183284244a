"""A model with a candidate beside it: keys that stick to an arm, and answers that are measured as
they pass, of which nothing is read twice or kept.

A request of the candidate's that fails before its answer begins is answered by the stable arm: the
failure is counted, and the client need not know.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from jitney.engine.api.errors import ErrorReply, HttpError
from jitney.engine.errors import RequestError
from jitney.engine.fleet.asked import Asked
from jitney.engine.fleet.comparison import ARMS, ArmName, RequestOutcome
from jitney.engine.fleet.forwarding import STREAMS, ProxiedAnswer, is_own_limit
from jitney.engine.fleet.measuring import UsageWatch
from jitney.engine.fleet.models import ReplicatedModel
from jitney.engine.fleet.replicas import Replica
from jitney.engine.fleet.rollout import Action, KeyPlace, Rollout
from jitney.engine.types import JsonDict

#: Routes whose answers are compared, but those that nobody waits for; others go to a key's arm as
#: well.
_COMPARED = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/api/chat",
        "/api/generate",
    }
)
#: Characters of a prompt that are its key where a request names nobody.
_KEY_CHARS = 1024
_HOUR_S = 3600.0
#: Statuses: of a refusal for lack of room, and the first of an engine's and of a client's faults.
_FULL, _SERVER_ERROR, _CLIENT_ERROR = 429, 500, 400
#: How the API ends a stream that went wrong; the last one is a line of its own.
_ERRORS = (b'data: {"error"', b"event: error\n", b"event: response.failed\n", b'\n{"error"')


async def _nowhere() -> None:
    """Nothing is kept."""


@dataclass(slots=True)
class ModelWithCandidate:
    """Two arms under one name."""

    stable: ReplicatedModel
    candidate: ReplicatedModel
    rollout: Rollout
    #: Of one engine of each arm, an hour; in a unit of the operator's.
    prices: Mapping[ArmName, float] = field(default_factory=lambda: dict.fromkeys(ARMS, 1.0))
    #: Seconds.
    clock: Callable[[], float] = time.monotonic
    #: Puts what is known on disk, after a decision.
    keep: Callable[[], Awaitable[None]] = _nowhere
    #: Whether the candidate has been ready since the last decision by hand: until then it is on its
    #: way, and that is no failure.
    _has_begun: bool = False
    _costs: Mapping[ArmName, _CostMeter] = field(
        default_factory=lambda: {arm: _CostMeter() for arm in ARMS}
    )

    @property
    def ready(self) -> bool:
        return self.stable.ready or (self.rollout.share > 0 and self.candidate.ready)

    @property
    def replicas(self) -> Sequence[Replica]:
        """Of both arms."""
        return [*self.stable.replicas, *self.candidate.replicas]

    def arm(self, name: ArmName) -> ReplicatedModel:
        return self.stable if name == "stable" else self.candidate

    def card(self) -> JsonDict:
        return self.stable.card()

    async def keeper_of(self, asked: Asked, path: str) -> Replica | None:
        """See `FleetModel`."""
        for name in ARMS:
            found = await self.arm(name).keeper_of(asked, path)
            if found is not None:
                return found
        return None

    @asynccontextmanager
    async def answer(self, asked: Asked) -> AsyncIterator[ProxiedAnswer]:
        """See `FleetModel`."""
        async with AsyncExitStack() as stack:
            yield await self._answer_of(stack, asked)

    async def _answer_of(self, stack: AsyncExitStack, asked: Asked) -> ProxiedAnswer:
        """What an arm says, to be left with the stack."""
        kept = self._keeping(asked)
        if kept is not None:
            return await stack.enter_async_context(self.arm(kept).answer(asked))
        place = self.rollout.place(_key_of(asked))
        if place.arm == "candidate":
            answer = await self._of_candidate(stack, place, asked)
            if answer is not None:
                return answer
            return await stack.enter_async_context(self.stable.answer(asked))
        answer, _ = await stack.enter_async_context(self._watched(place, asked))
        return answer

    def _keeping(self, asked: Asked) -> ArmName | None:
        """The arm of the only engine that can answer, if there is but one."""
        if not asked.keeper:
            return None
        names = [each.name for each in self.candidate.replicas]
        return "candidate" if asked.keeper in names else "stable"

    async def _of_candidate(
        self, stack: AsyncExitStack, place: KeyPlace, asked: Asked
    ) -> ProxiedAnswer | None:
        """None: the stable arm shall answer."""
        if not self._may_try():
            return None
        if not self.candidate.ready:
            self._observe(place, asked, RequestOutcome(ok=False))
            return None
        own = await stack.enter_async_context(AsyncExitStack())
        try:
            answer, watch = await own.enter_async_context(self._watched(place, asked))
        except (RequestError, HttpError) as error:
            if not _is_failure(ErrorReply.of(error, asked.request_id).status):
                raise
            return None
        if watch.failed:
            await own.aclose()
            return None
        return answer

    async def decide(self, action: Action) -> None:
        """By hand. Engines of a candidate that was rolled back may have ended; they are on their
        way again.
        """
        self.rollout.decide(action)
        self._has_begun = False
        await self.keep()

    def _may_try(self) -> bool:
        """False while the candidate's engines are loading for the first time."""
        self._has_begun = self._has_begun or self.candidate.ready
        return self._has_begun

    @asynccontextmanager
    async def _watched(
        self, place: KeyPlace, asked: Asked
    ) -> AsyncIterator[tuple[ProxiedAnswer, _AnswerWatch]]:
        """An arm's answer; what became of it is observed when it is over."""
        watch, costs = _AnswerWatch(self.clock), self._costs[place.arm]
        begun = costs.begin(self.clock(), self._per_second(place.arm))
        try:
            async with self.arm(place.arm).answer(asked) as answer:
                yield await watch.of(answer), watch
        except (RequestError, HttpError) as error:
            watch.refused(ErrorReply.of(error, asked.request_id).status)
            raise
        finally:
            cost = costs.end(self.clock(), self._per_second(place.arm), begun)
            outcome = watch.outcome(cost)
            if outcome is not None:
                self._observe(place, asked, outcome)

    def _observe(self, place: KeyPlace, asked: Asked, outcome: RequestOutcome) -> None:
        if asked.route in _COMPARED and not asked.background:
            self.rollout.observe(place, outcome)

    def _per_second(self, arm: ArmName) -> float:
        """What an arm's engines cost, those that are ready."""
        ready = sum(replica.state == "ready" for replica in self.arm(arm).replicas)
        return ready * self.prices[arm] / _HOUR_S

    def report(self) -> JsonDict:
        """As `Rollout.report`, with the names of each arm's engines."""
        report = self.rollout.report()
        for name in ARMS:
            replicas = self.arm(name).replicas
            report["arms"][name]["replicas"] = [replica.name for replica in replicas]
        return report


def _key_of(asked: Asked) -> bytes:
    """What sticks to an arm: who asks, by the request's own word (`user`, `safety_identifier`,
    `metadata.user_id`), else its conversation (`prompt_cache_key`, the header x-session-id), else
    the beginning of its prompt.
    """
    fields = asked.fields
    metadata = fields.get("metadata")
    users = [fields.get("user"), fields.get("safety_identifier")]
    if isinstance(metadata, dict):
        users.append(metadata.get("user_id"))
    for user in users:
        if isinstance(user, str) and user:
            return b"user\0" + user.encode(errors="replace")
    return asked.prefix_key(_KEY_CHARS)


def _is_failure(status: int) -> bool:
    """True for answers that are the engine's fault, lack of room included."""
    return status == _FULL or status >= _SERVER_ERROR


@dataclass(slots=True)
class _AnswerWatch:
    """One answer on its way to the client. Seconds of `clock`."""

    clock: Callable[[], float]
    begun: float = field(init=False)
    #: Of the answer; 0: there was none.
    _status: int = 0
    _is_stream: bool = False
    _first: float | None = None
    _usage: UsageWatch = field(default_factory=UsageWatch)
    #: It says itself that it failed.
    _broken: bool = False
    #: All of it came.
    _whole: bool = False

    def __post_init__(self) -> None:
        self.begun = self.clock()

    async def of(self, answer: ProxiedAnswer) -> ProxiedAnswer:
        """The same answer, watched."""
        if answer.status == _FULL:
            return await self._refusal(answer)
        self._status = answer.status
        kind = dict(answer.headers).get(b"content-type", b"")
        self._is_stream = kind.decode("latin-1").partition(";")[0] in STREAMS
        return ProxiedAnswer(answer.status, answer.headers, self._watched(answer.body))

    async def _refusal(self, answer: ProxiedAnswer) -> ProxiedAnswer:
        """A client that asks for more than its due says nothing of the engine."""
        body = b"".join([part async for part in answer.body])
        self._status = _CLIENT_ERROR if is_own_limit(body) else _FULL
        return ProxiedAnswer(answer.status, answer.headers, _parts(body))

    @property
    def failed(self) -> bool:
        """As far as is known now."""
        return _is_failure(self._status)

    def refused(self, status: int) -> None:
        """There is no answer but an error of this status."""
        self._status = status

    async def _watched(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for part in body:
            self._see(part)
            yield part
        self._whole = True

    def _see(self, part: bytes) -> None:
        pieces = self._usage.see(part)
        if not self._is_stream:
            return
        if pieces and self._first is None:
            self._first = self.clock()
        self._broken = self._broken or any(error in b"\n" + part for error in _ERRORS)

    @property
    def _tokens(self) -> int:
        """Of a plain answer by its usage alone: its text is one piece."""
        return self._usage.tokens if self._is_stream else self._usage.output or 0

    def outcome(self, cost: float) -> RequestOutcome | None:
        """How it went; None: it says nothing of the engine, since the client left, or sent what
        cannot be answered.
        """
        if _is_failure(self._status):
            return RequestOutcome(ok=False)
        if self._status >= _CLIENT_ERROR or not (self._whole or self._broken):
            return None
        if self._broken:
            return RequestOutcome(ok=False)
        first = None if self._first is None else self._first - self.begun
        return RequestOutcome(True, self._tokens, self.clock() - self.begun, first, cost)


async def _parts(body: bytes) -> AsyncIterator[bytes]:
    yield body


@dataclass(slots=True)
class _CostMeter:
    """Splits what an arm's engines cost among the requests that are open there, evenly at each
    moment. Time without any is nobody's.
    """

    #: Requests that are open.
    open: int = 0
    #: What one request would have cost that was always there.
    _each: float = 0.0
    _at: float = 0.0

    def begin(self, now: float, per_second: float) -> float:
        """A request comes; the value goes to `end`. per_second: what all engines cost."""
        self._advance(now, per_second)
        self.open += 1
        return self._each

    def end(self, now: float, per_second: float, begun: float) -> float:
        """A request goes; what it cost."""
        self._advance(now, per_second)
        self.open -= 1
        return self._each - begun

    def _advance(self, now: float, per_second: float) -> None:
        if self.open:
            self._each += (now - self._at) * per_second / self.open
        self._at = now
