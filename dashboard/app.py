"""The page as an ASGI application: HTML, assets, live feed, seats and step records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from jitney.dashboard import report, request_detail, sse, timeline
from jitney.dashboard.auth import Guard, LiveFeed
from jitney.dashboard.feed import Feed
from jitney.dashboard.lab import Lab, Wish
from jitney.dashboard.queries import seconds, whole, word
from jitney.dashboard.routes import HANDLERS, Front, read_body, read_json, to_json
from jitney.dashboard.snapshot import page_cells
from jitney.engine.api.errors import HttpError
from jitney.engine.config.schema import EngineSection
from jitney.engine.errors import RequestError
from jitney.engine.process.client import EngineClient
from jitney.engine.telemetry.history import KEEP_S
from jitney.engine.telemetry.request_record import RequestRecord
from jitney.engine.types import MAX_N

#: Token ids to text.
Decode = Callable[[list[int]], str]


class Settings(Protocol):
    """What the page must know of the server's settings. api_keys: digests
    (`jitney.engine.api.settings.digest_key`).
    """

    @property
    def api_keys(self) -> tuple[str, ...]: ...


class Dashboard(Front):
    """The handlers of one engine's routes, and what they share."""

    def __init__(
        self,
        client: EngineClient,
        settings: Settings,
        hz: float,
        engine: EngineSection | None,
        decode: Decode | None,
    ):
        super().__init__(settings.api_keys)
        self.client, self.decode = client, decode
        self.lab = Lab(client, engine)
        self.feed = Feed(client, hz=hz, keys=self.sessions.needed, text=decode is not None)

    def routes(self) -> list[BaseRoute]:
        return [
            *self.front_routes(),
            Route("/engines", self.engines),
            Route("/slots", self.slots),
            Route("/frames", self.frames),
            Route("/timeline", self.timeline),
            Route("/trace", self.trace),
            Route("/requests", self.requests),
            Route("/request/{id}", self.request),
            Route("/lab", self.experiment, methods=["GET", "POST", "DELETE"]),
            Route("/report", self.report),
            Route("/feed", LiveFeed(self.feed), methods=["GET"]),
        ]

    async def engines(self, request: Request) -> Response:
        """The engines that this page can show: one, at its own path."""
        info = self.client.info
        return to_json(
            {
                "standalone": False,
                "engines": [
                    {
                        "name": info.model if info else "",
                        "url": "",
                        "base": "",
                        "state": self.client.state,
                    }
                ],
            }
        )

    async def slots(self, request: Request) -> Response:
        """Seats and pages as they are now, in the key frame's form. RequestError while there is no
        engine.
        """
        seat_map = await self.client.seat_map()
        cells = sse.pages(page_cells(seat_map.page_states)) if seat_map.page_states else None
        return to_json({"t": time.monotonic(), "seats": sse.seats(seat_map.seats), "pages": cells})

    async def frames(self, request: Request) -> Response:
        """Step records after step `from` up to step `to` (default: all that are kept), at most
        `sse.MAX_RECORDS`.
        """
        after, until = whole(request, "from", -1), whole(request, "to", 2**62)
        return to_json(
            sse.record_columns(*self.client.history.records.steps(after, until), time.monotonic())
        )

    async def timeline(self, request: Request) -> Response:
        """Bins and stays between two times, see `timeline.timeline`."""
        now = time.monotonic()
        start, end = self._window(request, now)
        return to_json(
            timeline.timeline(
                self.client.history,
                start,
                end,
                whole(request, "bins", 120, 1, timeline.MAX_BINS),
                now,
            )
        )

    async def trace(self, request: Request) -> Response:
        """The same time as a Chrome trace, to be saved as a file."""
        now = time.monotonic()
        start, end = self._window(request, now)
        model = self.client.info.model if self.client.info else "engine"
        return Response(
            timeline.trace(self.client.history, start, end, now, model),
            media_type="application/json",
            headers={"content-disposition": 'attachment; filename="jitney-trace.json"'},
        )

    def _window(self, request: Request, now: float) -> tuple[float, float]:
        end = seconds(request, "to", now)
        return timeline.window(self.client.history, seconds(request, "from", end - 60), end, now)

    async def requests(self, request: Request) -> Response:
        """Sequences, the newest first, see `request_detail.listing`."""
        return to_json(
            request_detail.listing(
                self.client.history,
                word(request, "state", request_detail.STATES),
                whole(request, "limit", 100, 1, 1000),
                whole(request, "cursor", 2**53, 0),
                time.monotonic(),
            )
        )

    async def request(self, request: Request) -> Response:
        """The story of one sequence, see `request_detail.story`. 404 when it is not known, or not
        any more.
        """
        record = self.client.history.find(
            request.path_params["id"], whole(request, "index", 0, 0, MAX_N)
        )
        if record is None:
            raise HttpError(404, "no such request, or it ended too long ago", code="not_found")
        return to_json(
            request_detail.story(self.client.history, record, time.monotonic())
            | {"text": await self._text(record)}
        )

    async def _text(self, record: RequestRecord) -> dict[str, str] | None:
        """Prompt and answer, if they may be shown."""
        if self.decode is None or record.tokens is None:
            return None
        parts = {
            "prompt": record.tokens[: record.n_prompt],
            "answer": record.tokens[record.n_prompt :],
        }
        in_thread, decode = asyncio.get_running_loop().run_in_executor, self.decode
        return {name: await in_thread(None, decode, ids) for name, ids in parts.items()}

    async def report(self, request: Request) -> Response:
        """The last minutes as a self-contained HTML file."""
        minutes = seconds(request, "minutes", 1.0)
        if not 0 < minutes <= KEEP_S / 60:
            raise RequestError(
                f"minutes must be more than 0 and at most {KEEP_S / 60:g}", param="minutes"
            )
        now, wall = time.monotonic(), time.time()
        snapshot = report.collect(self.client, minutes, self.feed.notes, now, wall)
        loop = asyncio.get_running_loop()
        return HTMLResponse(await loop.run_in_executor(None, report.render, snapshot))

    async def experiment(self, request: Request) -> Response:
        """The policy lab: how it stands (GET), a new experiment (POST `lab.Wish`), an end to it
        (DELETE).
        """
        if request.method == "POST":
            wish = read_json(
                await read_body(request),
                Wish,
                "an experiment is JSON with minutes (a number), policies "
                "(a list of names), settings (an object) and speed (a number)",
                "body",
            )
            self.lab.start(wish)
        elif request.method == "DELETE":
            await self.lab.stop()
        return to_json(self.lab.status(), 202 if request.method == "POST" else 200)


def create_dashboard(
    client: EngineClient,
    settings: Settings,
    *,
    hz: float = 10.0,
    engine: EngineSection | None = None,
    decode: Decode | None = None,
) -> Starlette:
    """The page of one engine, to be mounted under a path of its own.

    It checks for itself who may look (see `sign_in`), so what is in front must not ask for a bearer
    key. hz: frames a second. engine: what the engine was started with, for the policy lab, which is
    closed without it. decode: token ids to text, if prompts and answers may be shown."""
    dashboard = Dashboard(client, settings, hz, engine, decode)
    app = Starlette(
        routes=dashboard.routes(),
        middleware=[Middleware(Guard, sessions=dashboard.sessions)],
        exception_handlers=HANDLERS,
    )
    app.router.redirect_slashes = False
    app.state.feed = dashboard.feed
    return app


def dashboard_routes(
    client: EngineClient,
    settings: Settings,
    path: str = "/dashboard",
    engine: EngineSection | None = None,
    decode: Decode | None = None,
) -> list[BaseRoute]:
    """The page mounted at `path`, and a redirect for those who leave out the slash at its end.

    The redirect is relative, because an absolute one would repeat the client's Host header.
    """

    async def add_slash(request: Request) -> Response:
        return RedirectResponse(path.rpartition("/")[2] + "/")

    return [
        Route(path, add_slash),
        Mount(path, app=create_dashboard(client, settings, engine=engine, decode=decode)),
    ]
