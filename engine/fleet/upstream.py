"""The HTTP client for engines of a fleet."""

from __future__ import annotations

import httpx

#: Seconds until the fleet closes an idle connection; engines close theirs later.
_KEEP_S = 30.0
#: Connect timeout, seconds.
_CONNECT_S = 5.0


def upstream_client(transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """A client with one connection per open request and no timeout for answers. transport: only
    passed by tests.
    """
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=_CONNECT_S),
        headers={"accept-encoding": "identity"},
        transport=transport or _EngineTransport(),
        trust_env=False,
        follow_redirects=False,
    )


class _EngineTransport(httpx.AsyncHTTPTransport):
    """Turns every failed connection into an error of httpx."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_S)
        super().__init__(limits=limits, trust_env=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request. Raises httpx.ConnectError also if an engine ends between accepting the
        connection and reading the request: under uvloop, which Ray uses, the connection then has no
        socket when anyio asks for its peer, and the error is an AttributeError.
        """
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:
            raise httpx.ConnectError("the connection was lost at once", request=request) from error
