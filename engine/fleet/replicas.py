"""The replicas of a model: their state, load and predicted wait.

Each replica is polled every `poll_s`: /readyz says whether it takes requests, /metrics gives its
load (if the fleet's key may read it). A replica that does not answer gets no requests until it
does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

import httpx

from jitney.engine.common.requests import JsonDict
from jitney.engine.common.scrape import Scrape

_log = logging.getLogger("jitney.fleet")

#: Timeout of a poll, seconds.
_LOOK_S = 5.0
#: Weight of the old value in the moving average of a request's seconds.
_FADE = 0.9
#: Seconds assumed for a request before one has ended; too high only spreads requests more evenly.
_UNTIMED_S = 10.0
_NOT_HERE = 404

#: "starting": the process was started and does not answer yet. "ready": it takes requests.
#: "unready": it answers but takes no requests (loading, draining, asleep). "gone": no answer.
type ReplicaState = Literal["unknown", "starting", "ready", "unready", "gone"]


@dataclass(eq=False, slots=True)
class Replica:
    """One engine. Times are time.monotonic() unless a field says otherwise."""

    #: Name in logs, metrics and headers; unique in a fleet.
    name: str
    #: Base URL without a trailing slash; empty until the engine is started.
    url: str = ""
    #: API key for the engine; empty: the client's own key is passed on.
    key: str = ""
    state: ReplicaState = "unknown"
    #: Why it is not ready, in one line.
    reason: str = "it was not looked at yet"
    #: time.time() at which it entered its state.
    since: float = field(default_factory=time.time)
    #: When it last answered any request.
    heard_at: float = field(default_factory=time.monotonic)
    #: Names of the models that it serves; the context length of the first one, tokens.
    models: tuple[str, ...] = ()
    context_length: int | None = None
    #: Last values from /metrics: seats (0: unknown), sequences in seats, sequences waiting, those
    #: of both that are background requests, predicted wait in seconds (None: unknown).
    seats: int = 0
    running: float = 0.0
    waiting: float = 0.0
    background: float = 0.0
    wait_s: float | None = None
    #: Requests of this fleet that are open there, now and at the last poll; lines of this fleet's
    #: batches that are open there.
    open: int = 0
    open_then: int = 0
    lines: int = 0
    #: Moving average of a request's seconds; 0 until one has ended.
    request_s: float = 0.0
    #: End of the Retry-After of its last refusal, on `clock`.
    full_until: float = 0.0
    #: Requests sent to it, requests that it answered, and requests that it was lost with.
    given: int = 0
    answered: int = 0
    lost: int = 0
    #: Called after every change of its state or load.
    on_change: Callable[[Replica], None] | None = None
    #: Returns the time in seconds; a simulated fleet passes a virtual clock.
    clock: Callable[[], float] = time.monotonic
    #: Last value of `share_s`; when it was updated; how many requests have shared the engine since.
    _share_s: float = 0.0
    _share_at: float = 0.0
    _sharing: float = 1.0
    #: Deadlines of the open requests there.
    _deadlines: set[asyncio.Timeout] = field(default_factory=set)

    @classmethod
    def at(cls, url: str, key: str) -> Replica:
        """A replica named by its URL."""
        parts = urlsplit(url)
        return cls(parts.netloc + parts.path, url, key)

    @property
    def load(self) -> float:
        """Requests at the replica, those of other clients included, without background requests."""
        return max(self.open, self._told + self.open - self.open_then)

    @property
    def _told(self) -> float:
        """The part of `load` that the replica reported itself."""
        return max(0.0, self.running + self.waiting - self.background)

    @property
    def seat_fill(self) -> float:
        """Requests, lines of our batches included, divided by seats; above 1 if some wait."""
        return (self.load + self.lines) / max(1, self.seats)

    @property
    def is_full(self) -> bool:
        """Whether it refused a request and the refusal's Retry-After has not passed."""
        return self.clock() < self.full_until

    def holds(self, adapter: str) -> bool:
        """Whether it can answer requests for an adapter. Always true if `adapter` is empty."""
        return not adapter or adapter in self.models

    @property
    def predicted_wait(self) -> float:
        """Seconds that one more request would wait for a seat."""
        if self.is_full:
            return self.full_until - self.clock()
        if self.wait_s is None:
            return max(0.0, self.load - max(1, self.seats)) * self._seat_s
        unseated = max(0.0, self.load - max(1, self.seats, self._told))
        return self.wait_s + unseated * self._seat_s

    def routing_wait(self, at_once: float) -> float:
        """`predicted_wait` plus the time of every request sent since the last poll, even if a seat
        is free: prompts wait for the prompts before them. Without these, all requests go to one
        replica until its next poll. at_once: requests that a replica usually runs at the same time.
        """
        if self.is_full or self.wait_s is None:
            return self.predicted_wait
        request_s = (self.request_s or _UNTIMED_S) / max(1.0, min(at_once, self.seats))
        return self.wait_s + max(0.0, self.load - self._told) * request_s

    @property
    def _seat_s(self) -> float:
        """Mean seconds between two requests that end while all seats are taken."""
        return self.request_s / max(1, self.seats)

    def share_s(self) -> float:
        """Engine seconds that a request would have received had it always been there. The engine's
        time is split evenly at each moment among all open requests, of all clients and batches.
        """
        now = self.clock()
        self._share_s += (now - self._share_at) / self._sharing
        self._share_at = now
        self._sharing = max(1.0, self.load + max(self.lines, self.background))
        return self._share_s

    def begin(self, *, background: bool = False) -> EngineShare:
        """Count a request that is sent to it. background: the request is a line of a batch."""
        self.given += 1
        self._count(1, background)
        return EngineShare(self, self.clock(), self.share_s())

    def end(self, took: float | None = None, *, background: bool = False) -> None:
        """Count a request that has ended. took: its seconds; None if it was not answered."""
        if took is not None and not background:
            before = self.request_s or took
            self.request_s = _FADE * before + (1 - _FADE) * took
        self._count(-1, background)

    def _count(self, requests: int, background: bool) -> None:
        if background:
            self.lines += requests
        else:
            self.open += requests
        self.changed()

    def changed(self) -> None:
        """Call `on_change` after a new state or load."""
        self.share_s()
        if self.on_change is not None:
            self.on_change(self)

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Context for a wait on this replica; TimeoutError if `give_up` is called meanwhile."""
        async with asyncio.timeout(None) as deadline:
            self._deadlines.add(deadline)
            try:
                yield
            finally:
                self._deadlines.discard(deadline)

    def refused(self, retry_s: float) -> None:
        """Record that it refused a request because it is full. retry_s: the Retry-After."""
        self.full_until = self.clock() + retry_s
        self.changed()

    def became(self, state: ReplicaState, reason: str = "") -> None:
        """Set the state. A change is logged."""
        if state not in ("gone", "starting"):
            self.heard_at = time.monotonic()
        if state == self.state:
            self.reason = reason
            self.changed()
            return
        level = logging.INFO if state in ("ready", "starting") else logging.WARNING
        _log.log(level, "replica %s is %s%s", self.name, state, f": {reason}" if reason else "")
        self.state, self.reason, self.since = state, reason, time.time()
        self.changed()

    def silent(self, why: str) -> None:
        """Record that it does not answer: the state is "gone", unless it is still starting."""
        if self.state != "starting":
            self.became("gone", why)

    def give_up(self) -> None:
        """End all waits on this replica."""
        now = asyncio.get_running_loop().time()
        for deadline in list(self._deadlines):
            with suppress(RuntimeError):  # the wait has ended already
                deadline.reschedule(now)

    def shown(self) -> JsonDict:
        """The replica's entry in the answer of GET /fleet/replicas."""
        return {
            "name": self.name,
            "url": self.url,
            "state": self.state,
            "reason": self.reason,
            "since": self.since,
            "models": list(self.models),
            "seats": self.seats,
            "load": self.load,
            "open": self.open,
            "background": self.lines,
            "waiting": self.waiting,
            "predicted_wait_s": self.predicted_wait if self.state == "ready" else None,
            "given": self.given,
            "answered": self.answered,
            "lost": self.lost,
        }


@dataclass(frozen=True, slots=True)
class EngineShare:
    """A request's share of a replica's time since the request was sent there."""

    replica: Replica
    #: Start by the replica's clock, seconds; the replica's `share_s` at that time.
    begun: float
    _begun_share_s: float

    @property
    def seconds(self) -> float:
        """Engine seconds of this request; the engine's time is split evenly among its requests."""
        return self.replica.share_s() - self._begun_share_s

    @property
    def load(self) -> float:
        """Requests at the replica meanwhile, this one included: the harmonic mean over time. If an
        engine's speed is shared evenly, a request takes that many times as long as it would alone.
        """
        seconds = self.seconds
        if seconds <= 0:
            return self.replica._sharing
        return (self.replica.clock() - self.begun) / seconds


class Watch:
    """Polls replicas, each in its own task, until it is closed."""

    def __init__(self, client: httpx.AsyncClient, *, poll_s: float, lost_after_s: float):
        self._client = client
        self._poll_s = poll_s
        self._lost_after_s = lost_after_s
        self._tasks: dict[Replica, asyncio.Task[None]] = {}

    def begin(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            self._tasks[replica] = asyncio.create_task(self._look_regularly(replica))

    async def end(self, replica: Replica) -> None:
        task = self._tasks.pop(replica, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        for replica in list(self._tasks):
            await self.end(replica)

    async def _look_regularly(self, replica: Replica) -> None:
        while True:
            await self.look(replica)
            await asyncio.sleep(self._poll_s)

    async def look(self, replica: Replica) -> None:
        """Poll once. Raises nothing but cancellation."""
        try:
            await self._ask(replica)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            silent = time.monotonic() - replica.heard_at
            replica.silent(f"{type(error).__name__}: {error}"[:200])
            replica.models = ()
            if silent > self._lost_after_s:
                replica.give_up()

    async def _ask(self, replica: Replica) -> None:
        answer = await self._get(replica, "/readyz")
        if answer.status_code == _NOT_HERE:  # not a Jitney engine
            answer = await self._get(replica, "/health")
        if answer.status_code >= 300:
            replica.became("unready", _reason(answer))
            return
        if not replica.models:
            await self._ask_models(replica)
        await self._ask_load(replica)
        replica.became("ready")

    async def _ask_models(self, replica: Replica) -> None:
        answer = await self._get(replica, "/v1/models")
        if answer.status_code == 200:
            replica.models, replica.context_length = _models_of(answer)

    async def _ask_load(self, replica: Replica) -> None:
        open_then = replica.open
        answer = await self._get(replica, "/metrics")
        if answer.status_code != 200:  # no access to /metrics: only our own requests are counted
            replica.running, replica.waiting, replica.background = 0.0, 0.0, 0.0
            replica.open_then = 0
            return
        values = _loads(answer.text)
        replica.seats = int(values.get("seats", 0))
        replica.running = values.get("running", 0.0)
        replica.waiting = values.get("waiting", 0.0)
        replica.background = values.get("background", 0.0)
        replica.wait_s = values.get("wait_s")
        # The engine may already count a request that was sent during the poll: do not count it
        # twice.
        replica.open_then = max(open_then, replica.open)

    async def _get(self, replica: Replica, path: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {replica.key}"} if replica.key else {}
        async with asyncio.timeout(_LOOK_S):
            return await self._client.get(replica.url + path, headers=headers)


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return f"it answers {answer.status_code}"


def _models_of(answer: httpx.Response) -> tuple[tuple[str, ...], int | None]:
    try:
        cards = answer.json()["data"]
        length = cards[0].get("max_model_len")
        return tuple(str(card["id"]) for card in cards), length if type(length) is int else None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return (), None


def _loads(text: str) -> dict[str, float]:
    """The load of an engine, read from its metrics in Prometheus' text format: values by the name
    of the field of `Replica`, only those that it reports. vLLM's names are read too, so that vLLM
    engines can be in a fleet; a Jitney engine may report both (`metrics_compat`).
    """
    ours, of_vllm = Scrape(text), Scrape(text, "vllm:")
    loads = {
        "running": of_vllm.value("num_requests_running"),
        "waiting": of_vllm.value("num_requests_waiting"),
    }
    if ours.names():
        loads = {
            "seats": ours.value("seats"),
            "running": ours.value("requests_running"),
            "waiting": ours.value("requests_waiting"),
            "background": ours.value("requests_open", lane="background"),
            "wait_s": ours.value("predicted_wait_seconds"),
        }
    return {name: value for name, value in loads.items() if math.isfinite(value)}
