"""A model with a candidate beside it: keys that stick to an arm, answers that are measured as they
pass, and a look at both every few seconds.

A request of the candidate's that fails before its answer begins is answered by the stable arm: the
failure is counted, and the client need not know.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import httpx

from jitney.engine.api.errors import ErrorReply, HttpError
from jitney.engine.errors import RequestError
from jitney.engine.fleet.asked import Asked
from jitney.engine.fleet.comparison import ARMS, ArmName, RequestOutcome
from jitney.engine.fleet.forwarding import ProxiedAnswer
from jitney.engine.fleet.measuring import AnswerWatch, CostMeter, is_failure
from jitney.engine.fleet.models import ReplicatedModel
from jitney.engine.fleet.replicas import Replica
from jitney.engine.fleet.rollout import Action, KeyPlace, Rollout
from jitney.engine.types import JsonDict

_log = logging.getLogger("jitney.fleet")

#: Routes whose answers are compared, but those that nobody waits for; others go to a key's arm as
#: well.
_COMPARED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
#: Characters of a prompt that are its key where a request names nobody.
_KEY_CHARS = 1024
#: Seconds between two looks, and that an engine has to say its version.
_LOOK_S, _VERSION_S = 10.0, 5.0
_HOUR_S = 3600.0


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
    _costs: Mapping[ArmName, CostMeter] = field(
        default_factory=lambda: {arm: CostMeter() for arm in ARMS}
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
            if not is_failure(ErrorReply.of(error, asked.request_id).status):
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
    ) -> AsyncIterator[tuple[ProxiedAnswer, AnswerWatch]]:
        """An arm's answer; what became of it is observed when it is over."""
        watch, costs = AnswerWatch(self.clock), self._costs[place.arm]
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


@dataclass(slots=True)
class RolloutKeeper:
    """Looks at one rollout while the fleet runs, asks its engines what they are set to, and keeps
    what is known on disk, if there is a folder for it.
    """

    model: ModelWithCandidate
    client: httpx.AsyncClient
    #: None: a restart of the fleet begins the rollout anew.
    folder: Path | None = None
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Go on where the file says, and look until the context is left."""
        await asyncio.to_thread(self.restore)
        self.model.keep = self.keep
        looking = asyncio.create_task(self._look_on())
        try:
            yield
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking
            await self.keep()

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.look()
            except Exception:
                _log.exception("rollout %s: a look failed", self.model.rollout.model)

    async def look(self) -> None:
        """Once: what the engines are set to, how the arms stand, and to disk with it."""
        for arm in ARMS:
            replicas = [each for each in self.model.arm(arm).replicas if each.state == "ready"]
            told = await asyncio.gather(*map(self._config_of, replicas))
            self.model.rollout.learn(arm, list(filter(None, told)))
        self.model.rollout.look()
        await self.keep()

    async def _config_of(self, replica: Replica) -> str:
        """The digest of an engine's configuration; empty if it does not say."""
        headers = {"authorization": f"Bearer {replica.key}"} if replica.key else {}
        try:
            answer = await self.client.get(
                replica.url + "/version", headers=headers, timeout=_VERSION_S
            )
            told = answer.json()["config_digest"] if answer.status_code == 200 else ""
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return ""
        return told if isinstance(told, str) else ""

    @property
    def file(self) -> Path | None:
        """Where the rollout is kept."""
        if self.folder is None:
            return None
        return self.folder / f"rollout-{quote(self.model.rollout.model, safe='')}.json"

    async def keep(self) -> None:
        """Put what is known on disk. A folder that cannot be written is told of, and nothing else
        is lost.
        """
        if self.file is None:
            return
        async with self._writing:
            saved = self.model.rollout.saved()
            try:
                await asyncio.to_thread(_write, self.file, saved)
            except OSError as error:
                _log.warning("rollout %s cannot be kept: %s", self.model.rollout.model, error)

    def restore(self) -> None:
        """Go on with what the file has; another candidate's is left behind."""
        if self.file is None or not self.file.exists():
            return
        rollout = self.model.rollout
        try:
            goes_on = rollout.restore(json.loads(self.file.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("rollout %s begins anew: its file: %s", rollout.model, error)
            return
        how = f"goes on, {rollout.state}" if goes_on else "begins: the file is another's"
        _log.info("rollout %s: candidate %s %s", rollout.model, rollout.name, how)


def _write(file: Path, saved: JsonDict) -> None:
    """Whole or not at all."""
    part = file.with_suffix(".part")
    file.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(json.dumps(saved))
    os.replace(part, file)
