"""Handling of core failures: the cause of an end, the restart policy, the request to blame, and the
requests that are refused for a while. Failures of a single step are in `engine.core.faults`.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import ClassVar, Literal

import msgspec

from jitney.engine.common.errors import RequestError
from jitney.engine.common.requests import EngineRequest
from jitney.engine.server.process.stream import Stream

#: Causes of a core's end: it died or was killed from outside; it reported an error; it was killed
#: because it hung; the leader of its engine ended in order; its process could not be started.
type _Cause = Literal["died", "failed", "hung", "left", "not started"]


@dataclass(frozen=True, slots=True)
class CoreEnd:
    """The end of a core's life."""

    cause: _Cause
    #: One line for the log, and for requests that find the engine dead.
    why: str
    #: The core had been ready.
    ready: bool = False
    #: A request may be the cause: the core was not killed from outside.
    crashed: bool = False
    #: The core refused its model, its settings or this machine.
    refused: bool = False

    @property
    def lost_host(self) -> bool:
        """Whether it lost another host of its engine, or one it shares experts with."""
        return self.cause == "failed" and not self.crashed

    def repeats(self, earlier: CoreEnd | None) -> bool:
        """Whether an earlier core ended in the same way."""
        return earlier is not None and (self.cause, self.crashed) == (
            earlier.cause,
            earlier.crashed,
        )

    @property
    def summary(self) -> str:
        """One line for the page, without text of exceptions."""
        if self.cause == "failed":
            return "the engine process stopped after an error, which the log names"
        return self.why


@dataclass(eq=False)
class RestartPolicy:
    """Decides whether and when a core is started again."""

    #: Restarts are counted within this many seconds.
    window_s: ClassVar[float] = 600.0
    #: After a core has been ready for so many seconds, earlier restarts do not count.
    proven_s: ClassVar[float] = 60.0
    #: First and longest pause in seconds; doubles while cores end alike within `lived_s` of ready.
    backoff_s: ClassVar[tuple[float, float]] = (0.5, 30.0)
    lived_s: ClassVar[float] = 5.0

    #: Most restarts within the window; 0: none.
    max_restarts: int
    #: The engine runs on several hosts, which end together and are restarted from outside.
    several_hosts: bool = False
    #: time.monotonic() of the restarts that count.
    restarts: deque[float] = field(default_factory=deque[float])
    #: Time at which the newest core got ready; None: none has been ready yet.
    ready_at: float | None = None
    _last_end: CoreEnd | None = None
    #: Number of cores in a row that soon ended like the last one.
    _repeats: int = 0

    def core_ready(self) -> None:
        self.ready_at = time.monotonic()

    def delay(self, end: CoreEnd) -> float | None:
        """Seconds to wait before the next start, or None to give up."""
        now, restarts = time.monotonic(), self.restarts
        ready_s = now - self.ready_at if end.ready and self.ready_at is not None else 0.0
        if end.ready and ready_s >= self.proven_s:
            restarts.clear()
        while restarts and now - restarts[0] > self.window_s:
            restarts.popleft()
        hopeless = end.cause == "left" or self._is_hopeless(end)
        if hopeless or len(restarts) >= self.max_restarts:
            return None
        restarts.append(now)
        lived = end.ready and ready_s >= self.lived_s
        self._repeats = 0 if lived or not end.repeats(self._last_end) else self._repeats + 1
        self._last_end = end
        first, longest = self.backoff_s
        return min(first * 2**self._repeats, longest)

    def _is_hopeless(self, end: CoreEnd) -> bool:
        """Whether a next start would fail too: this one refused, hung, or failed twice alike."""
        if self.ready_at is not None or end.ready or end.cause == "died":
            return False
        if end.refused or end.cause == "hung" or self.several_hosts:
            return True
        return self._last_end is not None and self._last_end.why == end.why


class CrashBlame:
    """Finds the request that crashes cores. Requests that were in two crashes are given to the next
    core one by one, each until it has a few more tokens; if the core crashes then, that request is
    to blame. A core killed from outside says nothing about its requests.
    """

    #: A request that was in so many crashes is suspected.
    _SUSPECTED = 2
    #: Tokens after which a suspected request is cleared.
    _ENOUGH_TOKENS = 4

    def __init__(self) -> None:
        #: The only suspected request that the core has.
        self.on_trial: Stream | None = None
        # Suspected requests that the core does not have yet.
        self._waiting: deque[Stream] = deque()
        # Tokens that `on_trial` had when its trial began.
        self._tokens = 0

    def core_crashed(self, streams: list[Stream]) -> Stream | None:
        """Return the request on trial, which is to blame for this crash; without one, count the
        crash against the requests that the core had.
        """
        if self.on_trial in streams:
            for stream in streams:
                stream.crashes = 0
            return self.on_trial
        for stream in streams:
            if stream not in self._waiting:  # suspects that wait were not in the core
                stream.crashes += 1
        return None

    def core_ready(self, streams: Iterable[Stream]) -> list[Stream]:
        """The open requests that a new core gets at once."""
        at_once: list[Stream] = []
        self._waiting.clear()
        for stream in streams:
            if stream.crashes >= self._SUSPECTED:
                self._waiting.append(stream)
            else:
                at_once.append(stream)
        return at_once + self._next()

    def waits(self, stream: Stream) -> bool:
        """Whether a suspected request has not been given to the core yet."""
        return stream in self._waiting

    def progressed(self, stream: Stream) -> list[Stream]:
        """The request on trial got tokens or closed; returns those that the core gets now."""
        if _tokens_of(stream) - self._tokens < self._ENOUGH_TOKENS and not stream.closed:
            return []
        stream.crashes = 0
        return self._next()

    def _next(self) -> list[Stream]:
        """Begin the next trial, if a suspected request waits."""
        self.on_trial = None
        while self._waiting and self.on_trial is None:
            stream = self._waiting.popleft()
            if not stream.closed:
                self.on_trial, self._tokens = stream, _tokens_of(stream)
        return [] if self.on_trial is None else [self.on_trial]


def _tokens_of(stream: Stream) -> int:
    return sum(len(tokens) for tokens in stream.tokens)


class Blocklist:
    """Requests that made the engine fail. Equal requests of any client are refused for a while."""

    #: Seconds that a request is refused; most requests that are remembered.
    _SECONDS, _MOST = 60.0, 256

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        # Digest -> when it is accepted again, in that order.
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, request: EngineRequest) -> None:
        """Refuse equal requests from now on."""
        digest = _digest(request)
        self._until.pop(digest, None)
        self._until[digest] = self._clock() + self._SECONDS
        if len(self._until) > self._MOST:
            self._until.popitem(last=False)

    def check(self, request: EngineRequest) -> None:
        """Raise RequestError request_quarantined if equal requests are refused now."""
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        if not self._until:
            return
        until = self._until.get(_digest(request))
        if until is not None:
            raise RequestError(
                "the engine failed over this request a moment ago, and it is not tried again for "
                f"another {until - now:.0f} s",
                code="request_quarantined",
            )


def _digest(request: EngineRequest) -> bytes:
    """Digest of prompt and parameters, without the seed, which differs by default."""
    sampling = msgspec.structs.replace(request.sampling, seed=None)
    return blake2b(msgspec.msgpack.encode((request.prompt, sampling)), digest_size=16).digest()
