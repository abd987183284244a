"""The dashboard without a server, for tests."""

from __future__ import annotations

import httpx
from api_fakes import FakeClient, run
from starlette.applications import Starlette

from jitney.dashboard import Dashboard
from jitney.dashboard.feed import Feed
from jitney.dashboard.relay import Relay
from jitney.engine.common.key_file import digest_key
from jitney.engine.server.http.settings import ServerSettings


def page(client: FakeClient, *keys: str) -> Starlette:
    """The dashboard of an engine; `keys` are its administrators' keys."""
    return Dashboard(client, ServerSettings(admin_keys=tuple(map(digest_key, keys)))).to_mount()  # type: ignore[arg-type]


def viewers_of(feed: Feed | Relay) -> int:
    """The number of current viewers."""
    return len(feed._viewers)


def browser(app, url: str = "http://localhost") -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=url)


def get(app, path: str, **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with browser(app) as web:
            return await web.get(path, headers=headers)

    return run(ask())
