"""The client that engines of a fleet are asked with."""

from __future__ import annotations

import httpx

#: Seconds that an idle connection to an engine is kept: shorter than engines keep theirs.
_KEEP_S = 30.0
#: Seconds that an engine has to take a connection.
_CONNECT_S = 5.0


def upstream_client(transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """One connection for each open request, and no limit of time for an answer: a replica that is
    silent is given up by the watch. transport: of a test.
    """
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=_CONNECT_S),
        headers={"accept-encoding": "identity"},
        transport=transport or _EngineTransport(),
        trust_env=False,
        follow_redirects=False,
    )


class _EngineTransport(httpx.AsyncHTTPTransport):
    """Every connection that cannot be used is one of httpx's errors."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_S)
        super().__init__(limits=limits, trust_env=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises httpx.ConnectError also for an engine that ends between taking the connection and
        the request: under uvloop, which Ray uses, that connection has no socket any more when anyio
        asks it for its peer, and the error would be nobody's.
        """
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:
            raise httpx.ConnectError("the connection was lost at once", request=request) from error
