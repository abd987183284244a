"""Sends a request to a replica, and to another one if the first is full, unreachable or lost.

- If a replica is full (429, 502, 503), the next one is tried. If all are full, the client gets the
  refusal with the shortest Retry-After.
- If a replica is lost before the client has received a byte of the answer, the next one answers.
  If all are full, the request waits for one. It was admitted once, so it is not refused now; a
  header tells engines not to refuse it for its predicted wait either.
- If a replica is lost within a stream, another one resumes the stream if it generates the same
  one (`engine.fleet.resume`). Otherwise the stream ends with the API's error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import httpx
import orjson

from jitney.engine.common.errors import RequestError, retry_after_s
from jitney.engine.fleet.replicas import EngineShare, Replica
from jitney.engine.fleet.request import ProxiedRequest, RawHeaders
from jitney.engine.fleet.resume import ReplicaLost, ResumeMismatch, StreamState
from jitney.engine.server import ErrorReply

#: HTTP statuses of a replica that cannot take a request now; and error codes of refusals for the
#: client's own limits, after which no other replica is tried.
_FULL = frozenset({429, 502, 503})
_OWN_LIMITS = frozenset({"rate_limit", "too_many_attempts"})
#: Retry-After assumed for a refusal without one, seconds.
_RETRY_S = 1.0
#: Most bytes of a non-streamed answer that are buffered until it is complete; most bytes of one
#: event.
_KEPT_BYTES, _EVENT_BYTES = 32 << 20, 64 << 20
#: How many times all replicas are tried if none can be reached; seconds between two rounds.
_ROUNDS, _PAUSE_S = 2, 0.3
#: Longest pause between two tries to resume a stream, seconds; a keep-alive follows each.
_LONGEST_PAUSE_S = 5.0
#: Hop-by-hop headers, and headers that the fleet writes itself: not copied from an engine's answer.
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
#: End of a server-sent event (sent alone, it is a keep-alive); end of a JSON line.
_END, _LINE_END = b"\n\n", b"\n"
#: Media type of an answer that is a stream -> the end of its events.
STREAMS = {"text/event-stream": _END, "application/x-ndjson": _LINE_END}
#: Response header with the name of the replica that answered.
_REPLICA_HEADER = b"x-jitney-replica"


@dataclass(slots=True)
class ProxiedAnswer:
    """The answer for the client. Each piece of the body is sent as soon as it is there."""

    status: int
    headers: RawHeaders
    body: AsyncIterator[bytes]
    #: The request's share of the engine that answers; None if no engine answers.
    share: EngineShare | None = None

    @classmethod
    def whole(
        cls, status: int, headers: RawHeaders, body: bytes, share: EngineShare | None = None
    ) -> ProxiedAnswer:
        """An answer whose body is complete."""
        other_headers = [item for item in headers if item[0] != b"content-length"]
        length = (b"content-length", str(len(body)).encode())
        return cls(status, [*other_headers, length], _only(body), share)

    @property
    def media_type(self) -> str:
        """The content type without its parameters; empty if there is none."""
        content_type = dict(self.headers).get(b"content-type", b"").decode("latin-1")
        return content_type.partition(";")[0].strip()

    @property
    def is_stream(self) -> bool:
        """Whether the body is a stream of events or of JSON lines."""
        return self.media_type in STREAMS

    @property
    def replica(self) -> str:
        """Name of the replica that answered; empty if none did."""
        return dict(self.headers).get(_REPLICA_HEADER, b"").decode()


class _ModelReplicas(Protocol):
    """The replicas of a model: orders them for a request and records each attempt's outcome."""

    def order(self, request: ProxiedRequest) -> Iterator[Replica]:
        """Ready replicas, best first."""
        ...

    def taken(self, request: ProxiedRequest, replica: Replica) -> None:
        """Record that this replica answers the request."""
        ...

    def attempted(self, replica: Replica, outcome: str) -> None:
        """Record an attempt's outcome: "answered", "full", "unreachable", "died" or "resumed" (the
        replica continues the stream of a lost one).
        """
        ...


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of retries: `attempts`, `resume_wait_s` of `engine.fleet.sections.FleetSection`."""

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
        """The bytes that end an event of the stream; empty if the answer is not a stream."""
        media_type = self.response.headers.get("content-type", "").partition(";")[0]
        return STREAMS.get(media_type.strip(), b"")

    @property
    def took(self) -> float | None:
        """Seconds since the attempt began; None if the answer is an error."""
        if self.response.status_code != 200:
            return None
        return time.monotonic() - self.started

    def headers(self) -> RawHeaders:
        lower = [(name.lower(), value) for name, value in self.response.headers.raw]
        end_to_end = [item for item in lower if item[0] not in _NOT_PASSED]
        return [*end_to_end, (_REPLICA_HEADER, self.replica.name.encode())]

    async def parts(self) -> AsyncIterator[bytes]:
        """The pieces of the body as they arrive. Raises ReplicaLost."""
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
    """A replica's answer that refuses the request."""

    answer: ProxiedAnswer
    retry_s: float
    #: The client exceeded its own limits, so no other replica is tried.
    final: bool


@dataclass(slots=True)
class Exchange:
    """One request, from the first attempt at a replica to the end of the answer."""

    client: httpx.AsyncClient
    replicas: _ModelReplicas
    request: ProxiedRequest
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    #: The part of the stream that the client has received.
    _sent: StreamState = field(default_factory=StreamState)
    #: Whether the client has received a part of the stream.
    _touched: bool = False
    #: Replicas that were lost while they had this request; one entry per loss.
    _lost: list[Replica] = field(default_factory=list)
    _attempt: _Attempt | None = None

    @asynccontextmanager
    async def answer(self) -> AsyncIterator[ProxiedAnswer]:
        """The answer for the client, to be read inside this context: leaving the context closes
        the open response of a replica. Raises RequestError if no replica can be reached, or if too
        many were lost with this request.
        """
        try:
            yield await self._begin()
        finally:
            await self._leave()

    async def _begin(self) -> ProxiedAnswer:
        while True:
            attempt = await self._open_any_or_wait()
            if isinstance(attempt, _Refusal):
                return attempt.answer
            if attempt.is_stream:
                return ProxiedAnswer(
                    attempt.response.status_code,
                    attempt.headers(),
                    self._stream(attempt),
                    attempt.share,
                )
            try:
                return await self._whole(attempt)
            except ReplicaLost:
                self._count_loss(attempt.replica)

    async def _whole(self, attempt: _Attempt) -> ProxiedAnswer:
        """The answer of a replica that does not stream, read to its end. Raises ReplicaLost."""
        body_so_far = bytearray()
        parts = attempt.parts()
        status, headers = attempt.response.status_code, attempt.headers()
        async for part in parts:
            body_so_far += part
            if len(body_so_far) > _KEPT_BYTES:
                # If its replica is lost now, the client sees the answer cut off.
                body = joined([bytes(body_so_far)], parts)
                return ProxiedAnswer(status, headers, body, attempt.share)
        self.replicas.attempted(attempt.replica, "answered")
        return ProxiedAnswer.whole(status, headers, bytes(body_so_far), attempt.share)

    async def _stream(self, attempt: _Attempt) -> AsyncIterator[bytes]:
        """Whole events of the stream, up to its end or to the error event that ends it."""
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
        partial_event = b""
        as_it_is = not self._touched
        async for part in attempt.parts():
            events, partial_event = _split_events(partial_event + part, attempt.event_end)
            if len(partial_event) > _EVENT_BYTES:
                raise ResumeMismatch("an event of the stream is too long")
            if self.request.repeatable:
                events = self._sent.new_of(events, as_it_is=as_it_is)
            if events:
                self._touched = True
                yield events
        if self.request.repeatable and not self._sent.is_whole:
            raise ReplicaLost("its stream has no end")
        if partial_event:
            yield partial_event

    def _check_repeatable(self) -> None:
        if self._touched and not self.request.repeatable:
            raise ResumeMismatch(
                "the engine died, and what it had said cannot be said again by another"
            )

    async def _wait_for_replica(self) -> AsyncIterator[bytes]:
        """Wait until another replica has the request; yields keep-alives. Raises RequestError."""
        deadline = time.monotonic() + self.retries.resume_wait_s
        while True:
            pause = _LONGEST_PAUSE_S
            try:
                attempt = await self._open_any()
                if isinstance(attempt, _Attempt):
                    return
                pause = min(attempt.retry_s, _LONGEST_PAUSE_S)
                problem = RequestError("the engine died, and all others are full", code="busy")
            except RequestError as error:
                if self._is_given_up:
                    raise
                problem, pause = error, _RETRY_S
            if time.monotonic() + pause > deadline:
                raise problem
            yield _END
            await asyncio.sleep(pause)

    def _resumed(self) -> _Attempt:
        """The attempt that resumes the stream. Raises ResumeMismatch if its answer is no stream."""
        attempt = self._attempt
        assert attempt is not None  # set by _wait_for_replica
        if not attempt.is_stream or attempt.response.status_code != 200:
            raise ResumeMismatch("another replica does not answer what one answered that died")
        self._sent.begin_again()
        if self._touched:
            self.replicas.attempted(attempt.replica, "resumed")
        return attempt

    async def _open_any_or_wait(self) -> _Attempt | _Refusal:
        """Like `_open_any`, but waits for a free replica after a loss. Raises RequestError."""
        try:
            attempt = await self._open_any()
        except RequestError:
            if not self._lost or self._is_given_up:
                raise
        else:
            if isinstance(attempt, _Attempt) or attempt.final or not self._lost:
                return attempt
        async for _ in self._wait_for_replica():
            pass
        assert self._attempt is not None  # set by _wait_for_replica
        return self._attempt

    @property
    def _is_given_up(self) -> bool:
        """Whether too many replicas were lost: one request must not crash all engines."""
        return len(self._lost) >= self.retries.attempts

    async def _open_any(self) -> _Attempt | _Refusal:
        """The attempt at the first replica that accepts; if all refuse, the refusal with the
        shortest Retry-After. Raises RequestError if no replica can be reached.
        """
        for turn in range(_ROUNDS):
            if turn:
                await asyncio.sleep(_PAUSE_S)
            refusals: list[_Refusal] = []
            for replica in self._order():
                attempt = await self._open(replica)
                if isinstance(attempt, _Attempt) or (attempt is not None and attempt.final):
                    return attempt
                if attempt is not None:
                    refusals.append(attempt)
            if refusals:
                return min(refusals, key=lambda refusal: refusal.retry_s)
        raise RequestError("no engine of this model can be reached", code="restarting")

    def _order(self) -> Iterator[Replica]:
        """The replicas of the model; those that were lost with this request come last."""
        lost_before: list[Replica] = []
        for replica in self.replicas.order(self.request):
            if replica in self._lost:
                lost_before.append(replica)
            else:
                yield replica
        yield from sorted(lost_before, key=self._lost.count)

    async def _open(self, replica: Replica) -> _Attempt | _Refusal | None:
        """Send the request to a replica; None if it cannot be reached. Raises RequestError if too
        many replicas were lost with this request.
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
        """Send the request. Raises httpx.TransportError, or TimeoutError once the replica counts
        as lost.
        """
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
        """Record a failed connection. Raises RequestError if too many replicas were lost."""
        self.replicas.attempted(replica, "unreachable")
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            replica.became("gone", f"{type(error).__name__}: {error}"[:200])
        else:  # the replica may have read the request
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
            # A replica that refuses a batch line may still have room for other requests.
            if not self.request.background:
                replica.refused(refusal.retry_s)
            self.replicas.attempted(replica, "full")
        return refusal

    def _count_loss(self, replica: Replica) -> None:
        """Count a lost replica. Raises RequestError if too many are lost."""
        self.replicas.attempted(replica, "died")
        self._lost.append(replica)
        if self._is_given_up:
            raise RequestError(
                f"{len(self._lost)} times an engine went away while it had this request, which is "
                "not tried again",
                code="request_failed",
            )

    async def _leave(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.replica.end(attempt.took, background=self.request.background)
            await attempt.response.aclose()


def stream_failure(error: Exception, request: ProxiedRequest) -> bytes:
    """The event with which the API ends a stream that failed."""
    if isinstance(error, ResumeMismatch):
        error = RequestError(str(error), code="engine_dead")
    return ErrorReply.of(error, request.request_id).stream_end(request.route)


async def _only(body: bytes) -> AsyncIterator[bytes]:
    if body:
        yield body


async def joined(held: Sequence[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A body whose first parts were read already: those, then the rest."""
    for part in held:
        yield part
    async for part in rest:
        yield part


def _split_events(data: bytes, end: bytes) -> tuple[bytes, bytes]:
    """(whole events, the start of the next one). end: the bytes that end an event."""
    cut = data.rfind(end) + len(end)
    return (data[:cut], data[cut:]) if cut >= len(end) else (b"", data)


def is_own_limit(body: bytes) -> bool:
    """Whether a refusal is for the client's own limits, not for a full replica."""
    try:
        return orjson.loads(body)["error"]["code"] in _OWN_LIMITS
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return False
