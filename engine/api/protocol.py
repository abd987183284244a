"""uvicorn's h11 protocol with the two things it lacks: a time limit for headers, and our form of
error.

Give `http_protocol(settings)` to `uvicorn.Config(http=...)`. What h11 cannot parse never reaches
the application, so it is answered here.
"""

from __future__ import annotations

import asyncio
import sys
import uuid

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jitney.engine.api.errors import HttpError, error_response
from jitney.engine.api.middleware import LINGER_S
from jitney.engine.api.settings import ServerSettings


def http_protocol(settings: ServerSettings) -> type[asyncio.Protocol]:
    """The protocol class for these limits (uvicorn wants a class, and makes the instances
    itself).
    """

    class LimitedProtocol(_BoundedProtocol):
        header_timeout_s = settings.header_timeout_s

    return LimitedProtocol


class _BoundedProtocol(H11Protocol):
    """A connection whose request head must be complete within `header_timeout_s` of its start."""

    header_timeout_s = 10.0
    _refused = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        self._watch_head()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this while handling h11's error, which knows whether the head was too large
        (431).
        """
        if getattr(sys.exception(), "error_status_hint", 400) == 431:
            self._refuse(HttpError(431, "the request head is too large", close=True))
        else:
            self._refuse(HttpError(400, "not a valid HTTP request", close=True))

    def _watch_head(self) -> None:
        """Start the timer while a head is awaited; stop it once one is there. Between requests
        uvicorn's own runs.
        """
        is_awaited = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if self._refused or not is_awaited:
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
        """Answer, if nothing has been answered on this turn yet, and close.

        A close with unread bytes resets the connection, and the answer is lost with it: so what
        still comes is thrown away for a moment first.
        """
        self._refused = True
        self._stop_timer()
        may_answer = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        if not may_answer or self.transport.is_closing():
            self.transport.close()
            return
        self._write(error)
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _write(self, error: HttpError) -> None:
        request_id = uuid.uuid4().hex
        response = error_response(error, request_id)
        headers = [*response.raw_headers, (b"x-request-id", request_id.encode())]
        events = (
            h11.Response(status_code=response.status_code, headers=headers),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
