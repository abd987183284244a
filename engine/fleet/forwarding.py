"""Sends a request to a replica, and to another one if the first is full, unreachable or lost.

- A replica is full (429, 502, 503): the next one is tried; if all are full, the client gets the
  refusal with the shortest Retry-After.
- A replica is lost before the client had a byte of its answer: the next one answers. If all
  are full, the request waits for one: it was admitted once and is not refused now, least of all
  for its predicted wait, which engines are told.
- A replica is lost within a stream: another one resumes it if its stream is the same
  (`engine.fleet.resume`); else the stream ends with the API's error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import httpx
import msgspec
import orjson

from jitney.engine.common.errors import RequestError
from jitney.engine.fleet.replicas import EngineShare, Replica
from jitney.engine.fleet.request import ProxiedRequest, RawHeaders
from jitney.engine.fleet.resume import ReplicaLost, ResumeMismatch, StreamState
from jitney.engine.server import ErrorForm, ErrorReply, retry_after_s

#: Statuses of a replica that cannot take a request now; codes of refusals for the client's own
#: limits, which no other replica is tried for.
_FULL = frozenset({429, 502, 503})
_OWN_LIMITS = frozenset({"rate_limit", "too_many_attempts"})
#: Retry-After of a refusal that has none, seconds.
_RETRY_S = 1.0
#: Most bytes of a plain answer that is held until it is complete, and of one event.
_KEPT_BYTES, _EVENT_BYTES = 32 << 20, 64 << 20
#: How often all replicas are tried if none can be reached, and seconds between two rounds.
_ROUNDS, _PAUSE_S = 2, 0.3
#: Longest pause between two tries to resume a stream, seconds; a keep-alive follows each.
_LONGEST_PAUSE_S = 5.0
#: Headers of one connection, and those that the fleet writes itself.
_NOT_PASSED = frozenset(
    {
        b"connection",
        b"date",
        b"keep-alive",
        b"openai-processing-ms",
        b"proxy-authenticate",
        b"request-id",
        b"server",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-request-id",
        b"x-session-id",
    }
)
_DONE = b"data: [DONE]\n\n"
#: End of an event, alone a keep-alive; end of an event in a stream of JSON lines.
_END, _LINE_END = b"\n\n", b"\n"
#: Media type of an answer that is a stream -> the end of its events.
STREAMS = {"text/event-stream": _END, "application/x-ndjson": _LINE_END}
#: Names the replica that answered.
_REPLICA_HEADER = b"x-jitney-replica"


@dataclass(slots=True)
class ProxiedAnswer:
    """The answer for the client; each piece of the body is to be sent at once."""

    status: int
    headers: RawHeaders
    body: AsyncIterator[bytes]
    #: Use of the engine that answers; None: no engine does.
    share: EngineShare | None = None

    @classmethod
    def whole(
        cls, status: int, headers: RawHeaders, body: bytes, share: EngineShare | None = None
    ) -> ProxiedAnswer:
        """An answer whose body is complete."""
        kept = [item for item in headers if item[0] != b"content-length"]
        length = (b"content-length", str(len(body)).encode())
        return cls(status, [*kept, length], _only(body), share)

    @property
    def media_type(self) -> str:
        """The content type without its parameters; empty: none is named."""
        named = dict(self.headers).get(b"content-type", b"").decode("latin-1")
        return named.partition(";")[0].strip()

    @property
    def is_stream(self) -> bool:
        """The body is events, or JSON lines."""
        return self.media_type in STREAMS

    @property
    def replica(self) -> str:
        """Name of the replica that answered; empty: none did."""
        return dict(self.headers).get(_REPLICA_HEADER, b"").decode()


class _ModelReplicas(Protocol):
    """The replicas of a model, best first for a request, which learn the outcome."""

    def order(self, request: ProxiedRequest) -> Iterator[Replica]:
        """Ready replicas, best first."""
        ...

    def taken(self, request: ProxiedRequest, replica: Replica) -> None:
        """This replica answers."""
        ...

    def attempted(self, replica: Replica, outcome: str) -> None:
        """outcome: "answered", "full", "unreachable", "died" or "resumed" (it continues a stream of
        a lost one).
        """
        ...


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """See `attempts` and `resume_wait_s` of `engine.fleet.sections.FleetSection`."""

    attempts: int = 3
    resume_wait_s: float = 60.0


@dataclass(slots=True)
class _Attempt:
    replica: Replica
    response: httpx.Response
    started: float
    share: EngineShare

    @property
    def is_stream(self) -> bool:
        return bool(self.event_end)

    @property
    def event_end(self) -> bytes:
        """End of an event of its stream; empty: it is no stream."""
        media_type = self.response.headers.get("content-type", "").partition(";")[0]
        return STREAMS.get(media_type.strip(), b"")

    @property
    def took(self) -> float | None:
        """Seconds so far; None: it is an error."""
        if self.response.status_code != 200:
            return None
        return time.monotonic() - self.started

    def headers(self) -> RawHeaders:
        lower = [(name.lower(), value) for name, value in self.response.headers.raw]
        kept = [item for item in lower if item[0] not in _NOT_PASSED]
        return [*kept, (_REPLICA_HEADER, self.replica.name.encode())]

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises ReplicaLost."""
        raw = aiter(self.response.aiter_raw())
        while True:
            try:
                async with self.replica.deadline():
                    part = await anext(raw)
            except StopAsyncIteration:
                return
            except (httpx.TransportError, httpx.StreamError, TimeoutError) as error:
                raise ReplicaLost(type(error).__name__) from None
            self.replica.heard_at = time.monotonic()
            yield part


@dataclass(slots=True)
class _Refusal:
    """A replica's answer that it does not take the request."""

    answer: ProxiedAnswer
    retry_s: float
    #: For the client's own limits: no other replica is tried.
    final: bool


@dataclass(slots=True)
class Exchange:
    """One request, from the first replica that is tried to the end of its answer."""

    client: httpx.AsyncClient
    replicas: _ModelReplicas
    request: ProxiedRequest
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    #: The stream as the client has it.
    _sent: StreamState = field(default_factory=StreamState)
    #: The client has some of it.
    _touched: bool = False
    #: Replicas that were lost with it, each time.
    _lost: list[Replica] = field(default_factory=list)
    _attempt: _Attempt | None = None

    @asynccontextmanager
    async def answer(self) -> AsyncIterator[ProxiedAnswer]:
        """The answer for the client, to be read inside this context: leaving it ends what is open
        at a replica. Raises RequestError where no replica can be reached or all were lost with it.
        """
        try:
            yield await self._begin()
        finally:
            await self._leave()

    async def _begin(self) -> ProxiedAnswer:
        while True:
            found = await self._open_any_or_wait()
            if isinstance(found, _Refusal):
                return found.answer
            if found.is_stream:
                return ProxiedAnswer(
                    found.response.status_code, found.headers(), self._stream(found), found.share
                )
            try:
                return await self._whole(found)
            except ReplicaLost:
                self._count_loss(found.replica)

    async def _whole(self, attempt: _Attempt) -> ProxiedAnswer:
        """A plain answer, held until it is complete. Raises ReplicaLost."""
        kept = bytearray()
        parts = attempt.parts()
        status, headers = attempt.response.status_code, attempt.headers()
        async for part in parts:
            kept += part
            if len(kept) > _KEPT_BYTES:
                # If its replica is lost now, the client sees the answer cut off.
                body = joined([bytes(kept)], parts)
                return ProxiedAnswer(status, headers, body, attempt.share)
        self.replicas.attempted(attempt.replica, "answered")
        return ProxiedAnswer.whole(status, headers, bytes(kept), attempt.share)

    async def _stream(self, attempt: _Attempt) -> AsyncIterator[bytes]:
        """Whole events, to the end or to the error that ends it."""
        try:
            while True:
                try:
                    async for data in self._events(attempt):
                        yield data
                    self.replicas.attempted(attempt.replica, "answered")
                    return
                except ReplicaLost:
                    self._count_loss(attempt.replica)
                self._check_repeatable()
                async for keep_alive in self._wait_for_replica():
                    yield keep_alive
                attempt = self._resumed()
        except (RequestError, ResumeMismatch) as error:
            yield stream_failure(error, self.request)

    async def _events(self, attempt: _Attempt) -> AsyncIterator[bytes]:
        """The events of one replica that the client lacks. Raises ReplicaLost, ResumeMismatch."""
        left = b""
        as_it_is = not self._touched
        async for part in attempt.parts():
            events, left = _split_events(left + part, attempt.event_end)
            if len(left) > _EVENT_BYTES:
                raise ResumeMismatch("an event of the stream is too long")
            if self.request.repeatable:
                events = self._sent.new_of(events, as_it_is=as_it_is)
            if events:
                self._touched = True
                yield events
        if self.request.repeatable and not self._sent.is_whole:
            raise ReplicaLost("its stream has no end")
        if left:
            yield left

    def _check_repeatable(self) -> None:
        if self._touched and not self.request.repeatable:
            raise ResumeMismatch(
                "the engine died, and what it had said cannot be said again by another"
            )

    async def _wait_for_replica(self) -> AsyncIterator[bytes]:
        """Wait until another replica has the request; yields keep-alives. Raises RequestError."""
        until = time.monotonic() + self.retries.resume_wait_s
        while True:
            pause = _LONGEST_PAUSE_S
            try:
                found = await self._open_any()
                if isinstance(found, _Attempt):
                    return
                pause = min(found.retry_s, _LONGEST_PAUSE_S)
                problem = RequestError("the engine died, and all others are full", code="busy")
            except RequestError as error:
                if self._is_given_up:
                    raise
                problem, pause = error, _RETRY_S
            if time.monotonic() + pause > until:
                raise problem
            yield _END
            await asyncio.sleep(pause)

    def _resumed(self) -> _Attempt:
        """The attempt that resumes the stream. Raises ResumeMismatch for one that is no stream."""
        attempt = self._attempt
        assert attempt is not None  # it was waited for
        if not attempt.is_stream or attempt.response.status_code != 200:
            raise ResumeMismatch("another replica does not answer what one answered that died")
        self._sent.begin_again()
        if self._touched:
            self.replicas.attempted(attempt.replica, "resumed")
        return attempt

    async def _open_any_or_wait(self) -> _Attempt | _Refusal:
        """As `_open_any`, but after a loss it waits for a replica. Raises RequestError."""
        try:
            found = await self._open_any()
        except RequestError:
            if not self._lost or self._is_given_up:
                raise
        else:
            if isinstance(found, _Attempt) or found.final or not self._lost:
                return found
        async for _ in self._wait_for_replica():
            pass
        assert self._attempt is not None  # it was waited for
        return self._attempt

    @property
    def _is_given_up(self) -> bool:
        """A request that kills engines must not kill all of them."""
        return len(self._lost) >= self.retries.attempts

    async def _open_any(self) -> _Attempt | _Refusal:
        """The first replica that accepts, else the shortest refusal. Raises RequestError."""
        for turn in range(_ROUNDS):
            if turn:
                await asyncio.sleep(_PAUSE_S)
            refusals: list[_Refusal] = []
            for replica in self._order():
                found = await self._open(replica)
                if isinstance(found, _Attempt) or (found is not None and found.final):
                    return found
                if found is not None:
                    refusals.append(found)
            if refusals:
                return min(refusals, key=lambda refusal: refusal.retry_s)
        raise RequestError("no engine of this model can be reached", code="restarting")

    def _order(self) -> Iterator[Replica]:
        """The replicas of the model, those that were lost with it last."""
        lost_before: list[Replica] = []
        for replica in self.replicas.order(self.request):
            if replica in self._lost:
                lost_before.append(replica)
            else:
                yield replica
        yield from sorted(lost_before, key=self._lost.count)

    async def _open(self, replica: Replica) -> _Attempt | _Refusal | None:
        """A replica's answer to the request; None: it cannot be reached. Raises RequestError if too
        many were lost with it.
        """
        await self._leave()
        started = time.monotonic()
        share = replica.begin(background=self.request.background)
        try:
            response = await self._send(replica)
        except BaseException as error:
            replica.end(background=self.request.background)
            if not isinstance(error, httpx.TransportError | TimeoutError):
                raise
            self._cannot_reach(replica, error)
            return None
        self._attempt = _Attempt(replica, response, started, share)
        if response.status_code in _FULL:
            return await self._refused(self._attempt)
        self.replicas.taken(self.request, replica)
        return self._attempt

    async def _send(self, replica: Replica) -> httpx.Response:
        """Raises httpx.TransportError, or TimeoutError if the replica is given up."""
        request = self.client.build_request(
            self.request.method,
            replica.url + self.request.path,
            headers=self.request.headers_for(replica.key, admitted=bool(self._lost)),
            content=self.request.content or None,
        )
        async with replica.deadline():
            response = await self.client.send(request, stream=True)
        replica.heard_at = time.monotonic()
        return response

    def _cannot_reach(self, replica: Replica, error: BaseException) -> None:
        """Raises RequestError if too many were lost with the request."""
        self.replicas.attempted(replica, "unreachable")
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            replica.became("gone", f"{type(error).__name__}: {error}"[:200])
        else:  # it may have read the request
            self._count_loss(replica)

    async def _refused(self, attempt: _Attempt) -> _Refusal:
        try:
            body = await attempt.response.aread()
        except httpx.TransportError:
            body = b""
        replica, response = attempt.replica, attempt.response
        refusal = _Refusal(
            ProxiedAnswer.whole(response.status_code, attempt.headers(), body),
            retry_after_s(response.headers, _RETRY_S),
            is_own_limit(body),
        )
        await self._leave()
        if not refusal.final:
            if not self.request.background:  # it may have room for people all the same
                replica.refused(refusal.retry_s)
            self.replicas.attempted(replica, "full")
        return refusal

    def _count_loss(self, replica: Replica) -> None:
        """Raises RequestError if this is one too many."""
        self.replicas.attempted(replica, "died")
        self._lost.append(replica)
        if self._is_given_up:
            raise RequestError(
                f"{len(self._lost)} times an engine went away while it had this request, which is "
                "not tried again",
                code="request_failed",
            )

    async def _leave(self) -> None:
        """End what is open at a replica."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.replica.end(attempt.took, background=self.request.background)
            await attempt.response.aclose()


def stream_failure(error: Exception, request: ProxiedRequest) -> bytes:
    """The event with which the API ends a stream that failed."""
    if isinstance(error, ResumeMismatch):
        error = RequestError(str(error), code="engine_dead")
    path, reply = request.route, ErrorReply.of(error, request.request_id)
    form = ErrorForm.of(path)
    if form is ErrorForm.OLLAMA:
        return reply.json(form) + _LINE_END
    if form is ErrorForm.ANTHROPIC:
        return b"event: error\ndata: " + reply.json(form) + _END
    if path.startswith("/v1/responses"):
        told = msgspec.structs.replace(reply.openai().error, type="error")
        return b"event: error\ndata: " + msgspec.json.encode(told) + _END
    return reply.event() + _DONE


async def _only(body: bytes) -> AsyncIterator[bytes]:
    if body:
        yield body


async def joined(held: Sequence[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A body of which some was read before."""
    for part in held:
        yield part
    async for part in rest:
        yield part


def _split_events(data: bytes, end: bytes) -> tuple[bytes, bytes]:
    """(whole events, the start of the next one). end: of an event."""
    cut = data.rfind(end) + len(end)
    return (data[:cut], data[cut:]) if cut >= len(end) else (b"", data)


def is_own_limit(body: bytes) -> bool:
    """Whether a refusal is for the client's own limits, not for lack of room."""
    try:
        return orjson.loads(body)["error"]["code"] in _OWN_LIMITS
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return False
