"""uvicorn's h11 protocol with what it lacks: a time limit for headers, our form of error, limits
for slow clients and TLS handshakes, answers for clients that have ended their side, and an end that
does not take the answer with it. What h11 cannot parse is answered here.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import sys
import time
import uuid
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from jitney.engine.server.http.access import Identity
from jitney.engine.server.http.connections import Connections
from jitney.engine.server.http.context import Context
from jitney.engine.server.http.errors import ErrorReply, HttpError
from jitney.engine.server.http.http_connection import HttpConnection
from jitney.engine.server.http.middleware import HeaderLimits
from jitney.engine.server.http.settings import ServerSettings
from jitney.engine.server.http.streaming import StreamingWriter

#: Bytes and seconds for the rest of a request that was answered before all of it came. A close with
#: unread bytes resets the connection, and the client may lose its answer.
_DISCARDED_BYTES = 64 << 20
_DISCARDING_S = 5.0
#: The same for input that is not HTTP.
_LINGER_S = 0.5
#: Seconds until received bytes are certainly read.
_SOON_S = 0.5
#: Pauses between checks of a half-closed client: the first, and the longest (doubling).
_LOOK_S, _LONGEST_LOOK_S = 0.05, 2.0
#: Longest wait for the answer to such a client over HTTP/1.0, which has no interim responses.
_OLD_PATIENCE_S = 5.0


def http_protocol(settings: ServerSettings, connections: Connections) -> type[asyncio.Protocol]:
    """The protocol class for these limits, as uvicorn wants it. connections: hears of each."""

    class LimitedProtocol(_BoundedProtocol):
        header_timeout_s = settings.server.read_timeout_s
        all_open = connections

    return LimitedProtocol


def over_tls(
    protocol: Callable[..., asyncio.BaseProtocol], context: ssl.SSLContext
) -> Callable[..., asyncio.BaseProtocol]:
    """Wrap a protocol of `http_protocol` in TLS, for a server whose asyncio TLS is off."""

    def made(**options: Any) -> asyncio.BaseProtocol:
        inner = protocol(**options)
        assert isinstance(inner, _BoundedProtocol)
        inner.handshake = _Handshake(inner, context)
        return inner.handshake

    return made


class _Handshake(SSLProtocol):
    """A TLS handshake that counts as a connection from its beginning. asyncio's own reports it
    after the handshake, for a minute: clients that begin none could use up all open files.
    """

    #: No response is written during a handshake, and all input is read at once.
    written = waiting = 0
    has_unread = False
    key = ""
    _bare: asyncio.Transport

    def __init__(self, inner: _BoundedProtocol, context: ssl.SSLContext):
        super().__init__(
            asyncio.get_running_loop(),
            inner,
            context,
            None,  # type: ignore[arg-type]  # its end is not awaited
            server_side=True,
            ssl_handshake_timeout=inner.header_timeout_s,  # type: ignore[arg-type]
        )
        self._all_open = inner.all_open

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._bare = transport
        self._all_open.opened(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._all_open.closed(self)
        super().connection_lost(exc)

    def drop(self) -> None:
        self._bare.abort()

    def give_way(self) -> None:
        self.drop()

    def leave(self) -> None:
        self.drop()


def _send_at_once(sock: socket.socket | None) -> None:
    """Set TCP_NODELAY, which asyncio does not on accepted sockets: parts would wait 40 ms."""
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class _Outbound:
    """Transport given to uvicorn: counts written bytes, and leaves closing to the protocol."""

    def __init__(self, transport: asyncio.Transport, protocol: _BoundedProtocol):
        self.written = 0
        self._transport = transport
        #: None once the connection is lost.
        self._protocol: _BoundedProtocol | None = protocol

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def close(self) -> None:
        if self._protocol is not None:
            self._protocol.close()

    def let_go(self) -> None:
        """Break the reference cycle with the protocol, which otherwise waits for a full
        collection.
        """
        self._protocol = None
        # A broken connection still holds its methods as callbacks; a close drops them.
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _BoundedProtocol(H11Protocol):
    """A connection whose request head must be complete within `header_timeout_s` of its start."""

    header_timeout_s = 10.0
    all_open: Connections
    #: The TLS handshake that counts as this connection; None: there is none, or it is over.
    handshake: _Handshake | None = None
    #: Bytes of further input that are discarded before the connection is closed.
    _discarding = False
    _left_to_discard = _DISCARDED_BYTES
    _head_timer: asyncio.TimerHandle | None = None
    #: time.monotonic() at which something last came.
    _heard_at = 0.0
    #: time.monotonic() at which the client ended its side (RFC 9112, 9.6) with an answer due.
    _half_closed_at: float | None = None
    _bare: asyncio.Transport
    _outbound: _Outbound

    def __init__(self, config: Config, *args: Any, **kw: Any):
        super().__init__(config, *args, **kw)
        self._http = HttpConnection(h11.SERVER, self.conn._max_incomplete_event_size)
        self.conn = self._http

    @property
    def written(self) -> int:
        return self._outbound.written

    @property
    def waiting(self) -> int:
        return self._bare.get_write_buffer_size()

    @property
    def has_unread(self) -> bool:
        return not self._discarding and self._has(select.POLLIN)

    def _has(self, events: int) -> bool:
        """Whether poll() reports one of these events for the socket, or an error."""
        poll = select.poll()
        poll.register(self._bare.get_extra_info("socket"), events)
        return bool(poll.poll(0))

    @property
    def key(self) -> str:
        identity: Identity | None = self._noted("jitney.identity")
        return "" if identity is None else identity.key

    def leave(self) -> None:
        cycle = self.cycle
        has_begun = cycle is not None and cycle.response_started and not cycle.response_complete
        context: Context | None = self._noted("jitney")
        if has_begun and (context is None or context.end is None):
            self.drop()
        else:
            self.shutdown()

    def _noted(self, name: str) -> Any:
        """A value that our application has put into the scope of the newest request; None: none."""
        scope: Any = {} if self.cycle is None else self.cycle.scope
        return scope.get(name)

    def drop(self) -> None:
        self._bare.abort()

    def give_way(self) -> None:
        """Close at once; over TLS notify the client without waiting for its answer."""
        self._bare.close()
        self._bare.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._bare = transport
        self._outbound = _Outbound(transport, self)
        _send_at_once(transport.get_extra_info("socket"))
        super().connection_made(self._outbound)  # type: ignore[arg-type]
        if self.handshake is not None:
            self.all_open.closed(self.handshake)
            self.handshake = None
        self.all_open.opened(self)
        self.app_state = {**self.app_state, StreamingWriter.DIRECT: self}
        self._watch_head()

    @property
    def takes_chunk(self) -> bool:
        """See `DirectWriter`."""
        cycle = self.cycle
        if cycle is None or cycle.disconnected or self.flow.write_paused:
            return False
        # As h11's `our_state` has it, which takes a microsecond.
        return self._http.sends_chunks and cycle.response_started and not cycle.response_complete

    def write_chunk(self, data: bytes) -> None:
        self._outbound.write(self._http.chunk(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.all_open.closed(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._outbound.let_go()
        # Both refer to this object, as a `DirectWriter`.
        self.app_state, self.scope = {}, None  # type: ignore[assignment]
        self.cycle = None  # type: ignore[assignment]  # which calls us when its answer is complete

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            self._left_to_discard -= len(data)
            if self._left_to_discard < 0:
                self._bare.close()
            return
        self._heard_at = time.monotonic()
        crowded = not self.all_open.has_place(self)
        if crowded != self.app_state.get(HeaderLimits.CROWDED, False):
            self.app_state = {**self.app_state, HeaderLimits.CROWDED: crowded}
        super().data_received(data)
        self._watch_head()
        self._say_state()

    def _say_state(self) -> None:
        """Report the connection's state to `Connections`."""
        if self.timeout_keep_alive_task is not None:
            self.all_open.is_kept(self)
        elif self._discarding or self._bare.is_closing() or self.conn.their_state is h11.IDLE:
            self.all_open.is_awaited(self)
        else:
            self.all_open.works(self)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: it has left, or has half-closed the connection and still reads.
        Only a write can tell (`_look_at_client`). A reader of an event stream counts as gone, to
        free its seat early; clients that half-close do so right after their request.
        """
        if self._discarding or not self._owes_answer or self.scheme == "https":
            return False
        is_stream = self.conn.our_state is h11.SEND_BODY and self._http.sends_events
        if is_stream and time.monotonic() - self._heard_at > _SOON_S:
            return False
        if self._half_closed_at is None:
            self._half_closed_at = time.monotonic()
            self.loop.call_later(_LOOK_S, self._look_at_client, _LOOK_S)
        return True

    @property
    def _owes_answer(self) -> bool:
        """A whole request has come, and its answer is not complete."""
        is_open = self.cycle is not None and not self.cycle.response_complete
        return is_open and self.conn.their_state is not h11.SEND_BODY

    def _look_at_client(self, pause_s: float) -> None:
        """Disconnect a half-closed client that has in fact left: its system answers a write with a
        reset. Before there is a response to write, an interim response is sent for that purpose,
        which every HTTP/1.1 client ignores (RFC 9110, 15.2).
        """
        if self._bare.is_closing() or not self._owes_answer or self._half_closed_at is None:
            return
        is_late = time.monotonic() - self._half_closed_at > _OLD_PATIENCE_S
        awaits_answer = self.conn.our_state is h11.SEND_RESPONSE
        is_old = self.conn.their_http_version != b"1.1"
        if self._has(0) or (awaits_answer and is_old and is_late):
            self.drop()
            return
        if awaits_answer and not is_old:
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self._outbound.write(self.conn.send(interim))
        self.loop.call_later(pause_s, self._look_at_client, min(2 * pause_s, _LONGEST_LOOK_S))

    def on_response_complete(self) -> None:
        """End a connection answered before its body came, or whose client has ended its side."""
        if self.conn.their_state is h11.SEND_BODY:
            self.close()
            return
        super().on_response_complete()
        self._say_state()
        if self._half_closed_at is not None and not self._owes_answer:
            self.close()

    def close(self) -> None:
        """Close once all written bytes have left; the rest of a body is read first."""
        if self.conn.their_state is h11.SEND_BODY and not self._discarding:
            self._close_slowly(_DISCARDING_S)
        elif not self._discarding:
            self._bare.close()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection unless a request has arrived: unread bytes would reset it."""
        if self.has_unread:
            self.timeout_keep_alive_task = self.loop.call_later(
                _SOON_S, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    def _close_slowly(self, seconds: float) -> None:
        self._discarding = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        self._say_state()
        self.flow.resume_reading()
        if self._bare.is_closing():
            return
        if self._bare.can_write_eof():
            self._bare.write_eof()
        self.loop.call_later(seconds, self._bare.close)

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn while it handles h11's error, whose status is 431 for a head too
        large.
        """
        if getattr(sys.exception(), "error_status_hint", 400) == 431:
            self._refuse(HttpError(431, "the request head is too large", close=True))
        else:
            self._refuse(HttpError(400, "not a valid HTTP request", close=True))

    def _watch_head(self) -> None:
        """Run the header timer while a request head is incomplete; uvicorn's runs between
        requests.
        """
        is_awaited = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if self._discarding or not is_awaited:
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.header_timeout_s, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        message = f"the request head did not arrive within {self.header_timeout_s:g} s"
        self._refuse(HttpError(408, message, close=True))

    def _refuse(self, error: HttpError) -> None:
        """Send an error response, if none has begun for this request, and close."""
        may_answer = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        if not may_answer or self._bare.is_closing():
            self._bare.close()
            return
        self._write(error)
        self._close_slowly(_LINGER_S)

    def _write(self, error: HttpError) -> None:
        request_id = uuid.uuid4().hex
        response = ErrorReply.of(error, request_id).response()
        headers = [*response.raw_headers, (b"x-request-id", request_id.encode())]
        events = (
            h11.Response(status_code=response.status_code, headers=headers),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        )
        for event in events:
            self._outbound.write(self.conn.send(event) or b"")
