"""h11's connection, with targets in absolute form and HTTP/1.0's keep-alive."""

from __future__ import annotations

import re

import h11

#: RFC 9112, 3.2.2: a target in absolute form; its authority, path and query.
_ABSOLUTE = re.compile(rb"https?://([^/?]*)(.*)", re.IGNORECASE | re.DOTALL)
_OLD = b"1.0"
_CONNECTION = b"connection"
_KEEP = b"keep-alive"


class HttpConnection(h11.Connection):
    """A server's connection. Its requests have targets in origin form."""

    #: The answer that is being sent is a stream of events.
    sends_events = False
    #: The body of the answer is sent in chunks (RFC 9112, 7.1).
    sends_chunks = False

    @staticmethod
    def chunk(data: bytes) -> bytes:
        """A part of a body framed in chunks, as `send` frames it; `data` must not be empty."""
        return b"%x\r\n%b\r\n" % (len(data), data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        if event.http_version == _OLD and _connection_options(event) == {_KEEP}:
            # h11 has just noted that HTTP/1.0 ends with the answer; states follow only later.
            self._cstate.keep_alive = True
        return _in_origin_form(event)

    def _clean_up_response_headers_for_sending(self, response: h11.Response) -> h11.Response:
        """Tell an HTTP/1.0 client that the connection is kept. Without a length it must close."""
        response = super()._clean_up_response_headers_for_sending(response)
        headers = dict(response.headers)
        self.sends_events = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self.sends_chunks = headers.get(b"transfer-encoding") == b"chunked"
        is_kept = self._cstate.keep_alive and _CONNECTION not in headers
        if self.their_http_version != _OLD or not is_kept:
            return response
        return h11.Response(
            status_code=response.status_code,
            headers=[*response.headers, (_CONNECTION, _KEEP)],
            http_version=response.http_version,
            reason=response.reason,
        )


def _connection_options(request: h11.Request) -> set[bytes]:
    values = [value for name, value in request.headers if name == _CONNECTION]
    return {option.strip().lower() for value in values for option in value.split(b",")}


def _in_origin_form(request: h11.Request) -> h11.Request:
    """The request with an origin-form target; an absolute host replaces Host (RFC 9112, 3.2.2)."""
    match = _ABSOLUTE.fullmatch(request.target)
    if match is None or request.method == b"CONNECT":
        return request
    host, target = match.groups()
    headers = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        target=target if target.startswith(b"/") else b"/" + target,
        headers=[(b"host", host), *headers],
        http_version=request.http_version,
    )
