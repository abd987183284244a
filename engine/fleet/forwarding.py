"""A request given to a replica, and to another one if the first is full, cannot be reached or dies.

What becomes of it when:
- a replica is full (429, or 503): the next one is asked; if all are, the answer with the shortest
  Retry-After is the client's;
- a replica dies before the client had a byte of its answer: the next one answers;
- one dies in the middle of a stream: another one goes on, where its stream can be repeated
  (`engine.fleet.repeating`); else the stream ends with the API's error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import httpx
import msgspec
import orjson

from jitney.engine.common.errors import RequestError
from jitney.engine.fleet.asked import Asked, RawHeaders
from jitney.engine.fleet.repeating import CannotGoOn, Died, SentStream
from jitney.engine.fleet.replicas import EngineShare, Replica
from jitney.engine.server import ErrorForm, ErrorReply, retry_after_s

#: Statuses of a replica that cannot take a request now; and what one says that refuses for the
#: client's own limits, which no other replica shall be asked to forget.
_FULL = frozenset({429, 502, 503})
_OWN_LIMITS = frozenset({"rate_limit", "too_many_attempts"})
#: Seconds after which to come again where a refusal does not say.
_RETRY_S = 1.0
#: Most bytes of a plain answer that is kept until it is complete, and of one event.
_KEPT_BYTES, _EVENT_BYTES = 32 << 20, 64 << 20
#: Times that all replicas are tried, and seconds between two.
_ROUNDS, _PAUSE_S = 2, 0.3
#: The longest pause of a stream that waits for a place, seconds: a sign of life comes after each.
_LONGEST_PAUSE_S = 5.0
#: Headers of one connection, and those that we write ourselves.
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
#: Of an event; alone it is a sign of life. And of one of a stream of JSON lines.
_END, _LINE_END = b"\n\n", b"\n"
#: Media type of an answer that is a stream -> the end of its events.
STREAMS = {"text/event-stream": _END, "application/x-ndjson": _LINE_END}
#: Says which replica answered.
_REPLICA_HEADER = b"x-jitney-replica"


@dataclass(slots=True)
class ProxiedAnswer:
    """What the client is told; each piece of the body is to be sent at once."""

    status: int
    headers: RawHeaders
    body: AsyncIterator[bytes]
    #: Of the engine that answers; None: no engine does.
    share: EngineShare | None = None

    @property
    def media_type(self) -> str:
        """Without its parameters; empty: it names none."""
        named = dict(self.headers).get(b"content-type", b"").decode("latin-1")
        return named.partition(";")[0].strip()

    @property
    def is_stream(self) -> bool:
        """It is made of events, or of JSON lines."""
        return self.media_type in STREAMS

    @property
    def replica(self) -> str:
        """Its name; empty: none answered."""
        return dict(self.headers).get(_REPLICA_HEADER, b"").decode()


class _Choosing(Protocol):
    """Where a request may go, and who hears of it."""

    def order(self, asked: Asked) -> Iterator[Replica]:
        """Replicas that can be had now, best first."""
        ...

    def taken(self, replica: Replica) -> None:
        """This one answers."""
        ...

    def attempted(self, replica: Replica, outcome: str) -> None:
        """outcome: "answered", "full", "unreachable", "died" or "resumed" (it goes on with what
        another one began).
        """
        ...


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how long is tried; see `engine.fleet.sections.FleetSection`."""

    attempts: int = 3
    resume_wait_s: float = 60.0


@dataclass(slots=True)
class _Attempt:
    """An answer of a replica that is being read."""

    replica: Replica
    response: httpx.Response
    started: float
    share: EngineShare

    @property
    def is_stream(self) -> bool:
        return bool(self.event_end)

    @property
    def event_end(self) -> bytes:
        """Of an event of its stream; empty: it is none."""
        media_type = self.response.headers.get("content-type", "").partition(";")[0]
        return STREAMS.get(media_type.strip(), b"")

    @property
    def took(self) -> float | None:
        """Seconds so far of what is an answer."""
        if self.response.status_code != 200:
            return None
        return time.monotonic() - self.started

    def headers(self) -> RawHeaders:
        lower = [(name.lower(), value) for name, value in self.response.headers.raw]
        kept = [item for item in lower if item[0] not in _NOT_PASSED]
        return [*kept, (_REPLICA_HEADER, self.replica.name.encode())]

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises Died."""
        raw = aiter(self.response.aiter_raw())
        while True:
            try:
                async with self.replica.deadline():
                    part = await anext(raw)
            except StopAsyncIteration:
                return
            except (httpx.TransportError, httpx.StreamError, TimeoutError) as error:
                raise Died(type(error).__name__) from None
            self.replica.heard_at = time.monotonic()
            yield part


@dataclass(slots=True)
class _Refusal:
    """A replica's own answer of why it does not take the request."""

    answer: ProxiedAnswer
    retry_s: float
    #: It is about the client, and no other replica is asked.
    final: bool


@dataclass(slots=True)
class Exchange:
    """One request, from the first replica that is asked to the end of its answer."""

    client: httpx.AsyncClient
    choosing: _Choosing
    asked: Asked
    patience: Patience = field(default_factory=Patience)
    #: What of a stream the client has.
    _sent: SentStream = field(default_factory=SentStream)
    _touched: bool = False
    #: Replicas that died with it, each time they did.
    _dead: list[Replica] = field(default_factory=list)
    _attempt: _Attempt | None = None

    @asynccontextmanager
    async def answer(self) -> AsyncIterator[ProxiedAnswer]:
        """What to tell the client, to be read inside of this context: leaving it ends what is open
        at a replica. Raises RequestError where no replica can be reached, or all died with it.
        """
        try:
            yield await self._begin()
        finally:
            await self._leave()

    async def _begin(self) -> ProxiedAnswer:
        while True:
            found = await self._open_any()
            if isinstance(found, _Refusal):
                return found.answer
            if found.is_stream:
                return ProxiedAnswer(
                    found.response.status_code, found.headers(), self._stream(found), found.share
                )
            try:
                return await self._whole(found)
            except Died:
                self._count_death(found.replica)

    async def _whole(self, attempt: _Attempt) -> ProxiedAnswer:
        """A plain answer, kept until it is complete: until then another replica may give it. Raises
        Died.
        """
        kept = bytearray()
        parts = attempt.parts()
        status, headers = attempt.response.status_code, attempt.headers()
        async for part in parts:
            kept += part
            if len(kept) > _KEPT_BYTES:
                body = _broken_off(bytes(kept), parts)
                return ProxiedAnswer(status, headers, body, attempt.share)
        self.choosing.attempted(attempt.replica, "answered")
        return _complete(status, headers, bytes(kept), attempt.share)

    async def _stream(self, attempt: _Attempt) -> AsyncIterator[bytes]:
        """Whole events, to the end or to the error that ends it."""
        try:
            while True:
                try:
                    async for data in self._events(attempt):
                        yield data
                    self.choosing.attempted(attempt.replica, "answered")
                    return
                except Died:
                    self._count_death(attempt.replica)
                self._check_repeatable()
                async for sign_of_life in self._wait_for_place():
                    yield sign_of_life
                attempt = self._resumed()
        except (RequestError, CannotGoOn) as error:
            yield stream_failure(error, self.asked)

    async def _events(self, attempt: _Attempt) -> AsyncIterator[bytes]:
        """Those of one replica that the client does not have. Raises Died or CannotGoOn."""
        left = b""
        as_it_is = not self._touched
        async for part in attempt.parts():
            events, left = _split_events(left + part, attempt.event_end)
            if len(left) > _EVENT_BYTES:
                raise CannotGoOn("an event of the stream is too long")
            if self.asked.repeatable:
                events = self._sent.new_of(events, as_it_is=as_it_is)
            if events:
                self._touched = True
                yield events
        if self.asked.repeatable and not self._sent.is_whole:
            raise Died("its stream has no end")
        if left:
            yield left

    def _check_repeatable(self) -> None:
        if self._touched and not self.asked.repeatable:
            raise CannotGoOn(
                "the engine died, and what it had said cannot be said again by another"
            )

    async def _wait_for_place(self) -> AsyncIterator[bytes]:
        """Until another replica has the request; gives signs of life. Raises RequestError."""
        until = time.monotonic() + self.patience.resume_wait_s
        while True:
            pause = _LONGEST_PAUSE_S
            try:
                found = await self._open_any()
                if isinstance(found, _Attempt):
                    return
                pause = min(found.retry_s, _LONGEST_PAUSE_S)
                problem = RequestError("the engine died, and all others are full", code="busy")
            except RequestError as error:
                problem, pause = error, _RETRY_S
            if time.monotonic() + pause > until:
                raise problem
            yield _END
            await asyncio.sleep(pause)

    def _resumed(self) -> _Attempt:
        """The attempt that goes on. Raises CannotGoOn for an answer that is no stream."""
        attempt = self._attempt
        assert attempt is not None  # it was waited for
        if not attempt.is_stream or attempt.response.status_code != 200:
            raise CannotGoOn("another replica does not answer what one answered that died")
        self._sent.begin_again()
        if self._touched:
            self.choosing.attempted(attempt.replica, "resumed")
        return attempt

    async def _open_any(self) -> _Attempt | _Refusal:
        """The first replica that takes the request, else the refusal with the shortest wait. Raises
        RequestError.
        """
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
        """Those that died with it come last."""
        died_with_it: list[Replica] = []
        for replica in self.choosing.order(self.asked):
            if replica in self._dead:
                died_with_it.append(replica)
            else:
                yield replica
        yield from sorted(died_with_it, key=self._dead.count)

    async def _open(self, replica: Replica) -> _Attempt | _Refusal | None:
        """What a replica makes of the request; None: it cannot be reached. Raises RequestError for
        one that too many died with.
        """
        await self._leave()
        started = time.monotonic()
        share = replica.begin(background=self.asked.background)
        try:
            response = await self._send(replica)
        except BaseException as error:
            replica.end(background=self.asked.background)
            if not isinstance(error, httpx.TransportError | TimeoutError):
                raise
            self._cannot_reach(replica, error)
            return None
        self._attempt = _Attempt(replica, response, started, share)
        if response.status_code in _FULL:
            return await self._refused(self._attempt)
        self.choosing.taken(replica)
        return self._attempt

    async def _send(self, replica: Replica) -> httpx.Response:
        """Raises httpx.TransportError, or TimeoutError when the replica is given up."""
        request = self.client.build_request(
            self.asked.method,
            replica.url + self.asked.path,
            headers=self.asked.headers_for(replica.key),
            content=self.asked.body or None,
        )
        async with replica.deadline():
            response = await self.client.send(request, stream=True)
        replica.heard_at = time.monotonic()
        return response

    def _cannot_reach(self, replica: Replica, error: BaseException) -> None:
        """Raises RequestError if too many died with the request."""
        self.choosing.attempted(replica, "unreachable")
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            replica.became("gone", f"{type(error).__name__}: {error}"[:200])
        else:  # it may have read the request
            self._count_death(replica)

    async def _refused(self, attempt: _Attempt) -> _Refusal:
        try:
            body = await attempt.response.aread()
        except httpx.TransportError:
            body = b""
        replica, response = attempt.replica, attempt.response
        refusal = _Refusal(
            _complete(response.status_code, attempt.headers(), body),
            retry_after_s(response.headers, _RETRY_S),
            is_own_limit(body),
        )
        await self._leave()
        if not refusal.final:
            if not self.asked.background:  # it may have room for people all the same
                replica.refused(refusal.retry_s)
            self.choosing.attempted(replica, "full")
        return refusal

    def _count_death(self, replica: Replica) -> None:
        """Raises RequestError if this is one too many: a request that ends engines must not end all
        of them.
        """
        self.choosing.attempted(replica, "died")
        self._dead.append(replica)
        if len(self._dead) >= self.patience.attempts:
            raise RequestError(
                f"{len(self._dead)} times an engine went away while it had this request, which is "
                "not tried again",
                code="request_failed",
            )

    async def _leave(self) -> None:
        """End what is open at a replica."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.replica.end(attempt.took, background=self.asked.background)
            await attempt.response.aclose()


def stream_failure(error: Exception, asked: Asked) -> bytes:
    """How the API ends a stream that went wrong."""
    if isinstance(error, CannotGoOn):
        error = RequestError(str(error), code="engine_dead")
    path, reply = asked.route, ErrorReply.of(error, asked.request_id)
    form = ErrorForm.of(path)
    if form is ErrorForm.OLLAMA:
        return reply.json(form) + _LINE_END
    if form is ErrorForm.ANTHROPIC:
        return b"event: error\ndata: " + reply.json(form) + _END
    if path.startswith("/v1/responses"):
        told = msgspec.structs.replace(reply.openai().error, type="error")
        return b"event: error\ndata: " + msgspec.json.encode(told) + _END
    return reply.event() + _DONE


def _complete(
    status: int, headers: RawHeaders, body: bytes, share: EngineShare | None = None
) -> ProxiedAnswer:
    """An answer that is there already."""
    kept = [item for item in headers if item[0] != b"content-length"]
    length = (b"content-length", str(len(body)).encode())
    return ProxiedAnswer(status, [*kept, length], _only(body), share)


async def _only(body: bytes) -> AsyncIterator[bytes]:
    if body:
        yield body


async def _broken_off(begun: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """An answer that is too long to be kept. If its replica dies it ends without its end, which the
    client sees.
    """
    yield begun
    async for part in rest:
        yield part


def _split_events(data: bytes, end: bytes) -> tuple[bytes, bytes]:
    """(whole events, the beginning of the next one). end: of an event."""
    cut = data.rfind(end) + len(end)
    return (data[:cut], data[cut:]) if cut >= len(end) else (b"", data)


def is_own_limit(body: bytes) -> bool:
    """True for a refusal that is about the client, not about the engine."""
    return _code(body) in _OWN_LIMITS


def _code(body: bytes) -> str | None:
    """Of an error, in OpenAI's form."""
    try:
        code = orjson.loads(body)["error"]["code"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return code if isinstance(code, str) else None
