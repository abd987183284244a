"""The HTTP client for engines of a fleet."""

from __future__ import annotations

import httpx

#: Seconds until an idle connection is closed: less than engines take.
_KEEP_S = 30.0
#: Connect timeout, seconds.
_CONNECT_S = 5.0


def upstream_client(transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """One connection per open request; answers have no timeout. transport: of a test."""
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
        """Raises httpx.ConnectError also for an engine that ends between taking the connection and
        the request: under uvloop, which Ray uses, that connection has no socket any more when anyio
        asks it for its peer, and the error would not be one of httpx.
        """
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:
            raise httpx.ConnectError("the connection was lost at once", request=request) from error
