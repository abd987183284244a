"""The page as an ASGI application: HTML, assets, live feed, seats and step records."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jitney.dashboard import request_detail, sse
from jitney.dashboard.drawing import Drawings
from jitney.dashboard.engine_routes import ENGINE_ROUTES
from jitney.dashboard.feed import Feed
from jitney.dashboard.feed_endpoint import FeedEndpoint
from jitney.dashboard.history_log import HistoryLog
from jitney.dashboard.incident_log import IncidentLog
from jitney.dashboard.lab import LabHandlers, PolicyLab
from jitney.dashboard.memory import memory
from jitney.dashboard.notes import Notes
from jitney.dashboard.page_files import accepts_gzip, zipped
from jitney.dashboard.programs import programs
from jitney.dashboard.pulse import Pulses
from jitney.dashboard.report import ReportData
from jitney.dashboard.routes import PageRoutes
from jitney.dashboard.snapshot import PageCells, core_seat_lists
from jitney.dashboard.tenants import tenants
from jitney.dashboard.timeline import Window, Work, own_columns, record_columns, stay_columns
from jitney.dashboard.view import View
from jitney.dashboard.viewers import TooManyViewers
from jitney.dashboard.work import WorkList, adapters
from jitney.engine.common.database import StoreUnavailable
from jitney.engine.common.errors import RequestError
from jitney.engine.common.history import History
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.common.requests import REQUEST_MOST, JsonDict
from jitney.engine.common.slices import TimeSlices
from jitney.engine.server import (
    ApiKeys,
    EngineClient,
    HttpError,
    Identity,
    PageLine,
    ServerSettings,
    Service,
    StreamingResponse,
    in_runs,
    json_answer,
)

#: Most long answers that are built at the same time.
_MOST_ANSWERS = 16
#: Seconds of history embedded in the page.
_FIRST_S = 60
#: Most bins of a timeline.
_MAX_BINS = 600
#: States by which requests can be listed.
_STATES = ("all", "open", "waiting", "prefill", "decode", "finished", "refused")
#: States of ended requests -> whether those are refused ones; None: either.
_KEPT_STATES = {"all": None, "finished": False, "refused": True}
#: Numbers in a query: one beyond every limit, and the most digits.
_ANY = 2**62
_MOST_DIGITS = 18
#: Most incidents in an answer.
_MOST_INCIDENTS = 500
#: Compression level of answers: takes a millisecond for 64 kB.
_FAST = 1
#: Bytes of a piece of a report.
_BLOCK = 1 << 16
_JSON = {"content-type": "application/json"}
#: Token ids to text.
_Decode = Callable[[list[int]], str]
#: The handler of one path.
type _Handler = Callable[[Request], Awaitable[Response | StreamingResponse]]


class Dashboard(PageRoutes):
    """The page of one engine: the handlers of its routes, and what they share.

    lab: simulates recorded traffic; None: /lab answers 404. decode: token ids to text, if prompts
    and answers may be shown. keys: the accepted ones; None: those of the settings. service: of the
    endpoint around the page; None: there is none, and batches, limits of keys and settings are not
    shown.
    """

    def __init__(
        self,
        client: EngineClient,
        settings: ServerSettings,
        *,
        lab: PolicyLab | None = None,
        decode: _Decode | None = None,
        keys: ApiKeys | None = None,
        service: Callable[[], Service] | None = None,
    ):
        super().__init__(settings, keys)
        self.client = client
        self.decode = decode
        self.service = service
        self.work = WorkList(lambda: service().internal_requests if service is not None else None)
        self.slices = TimeSlices(_MOST_ANSWERS)
        self.drawings = Drawings()
        self.notes = Notes(client)
        self.incident_log = IncidentLog(self.notes, settings.data_dir)
        hours = settings.server.history_hours
        self.history_log = HistoryLog(client, settings.data_dir, hours)
        self.lab = LabHandlers(lab)
        self.feed = Feed(
            client,
            needs_key=self.sessions.needed,
            shows_text=decode is not None,
            history_h=hours,
            notes=self.notes,
        )

    def to_mount(self) -> Starlette:
        app = super().to_mount()
        app.state.feed = self.feed
        return app

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            if self.history_log.hours:
                await stack.enter_async_context(self.history_log.at_work())
            await stack.enter_async_context(self.incident_log.at_work())
            yield

    def lines(self) -> list[PageLine]:
        lines = self.page_lines()
        lines.append(PageLine(Route("/feed", FeedEndpoint(self.feed), methods=["GET"])))
        lines.append(PageLine(Route("/pulse", FeedEndpoint(Pulses(self.client)), methods=["GET"])))
        lines.append(PageLine(Route("/engines", self.engines)))
        handlers = self._handlers()
        for route in ENGINE_ROUTES:
            handler = handlers[route.path]
            lines.append(PageLine(Route(route.path, handler, methods=route.methods), route.role))
        return lines

    def _handlers(self) -> dict[str, _Handler]:
        """The handlers by the paths of `ENGINE_ROUTES`."""
        return {
            "/slots": self.seats,
            "/frames": self.step_records,
            "/timeline": self.timeline,
            "/history": self.history,
            "/stays": self.stays,
            "/trace": self.trace,
            "/requests": self.requests,
            "/request/{id}": self.request,
            "/incidents": self.incidents,
            "/tenants": self.tenants,
            "/memory": self.memory,
            "/work": self.list_work,
            "/work/{id}": self.cancel_work,
            "/programs": self.programs,
            "/buckets": self.lab.buckets,
            "/settings": self.show_settings,
            "/report": self.report,
            "/lab": self.lab.experiment,
        }

    async def page(self, request: Request) -> Response:
        """The page, see `PageRoutes.page`, with the current figures embedded."""
        return await self.page_file(request, self.index, partial(self._first, request))

    async def _first(self, request: Request) -> bytes:
        """Data embedded in the page: engines, first events of the feed, /timeline of the last
        minute.
        """
        identity = self.sessions.of_request(request.scope)
        first: JsonDict = {"engines": self._engines(), "events": [], "past": None}
        with contextlib.suppress(TooManyViewers, RequestError):  # the page will ask again
            events = await self.feed.first_events(identity)
            end = sse.decode(events[-1])[1].get("t", time.monotonic())
            window = Window.shown(self.client.history, end - _FIRST_S, end, end, self.client.info)
            work = window.timeline(_FIRST_S, end, identity=identity)
            first["events"] = [event.decode() for event in events]
            first["past"] = await self.slices.result(work)
        return msgspec.json.encode(first)

    async def engines(self, request: Request) -> Response:
        """The engines that this page can show: one, at its own path."""
        return json_answer(self._engines())

    def _engines(self) -> JsonDict:
        info, state = self.client.info, self.client.state
        name = info.model.name if info is not None else ""
        engine = {"name": name, "url": "", "base": "", "state": state}
        return self.engine_list([engine], standalone=False)

    async def seats(self, request: Request) -> Response:
        """Seats and pages as they are now, in the key frame's form. RequestError while there is no
        engine.
        """
        seat_map = await self.client.seat_map()
        pages = PageCells.of(seat_map).shown() if seat_map.page_states else None
        view = View(self.client.history, Identity.of(request.scope))
        seats = core_seat_lists([view.seat(seat) for seat in seat_map.seats])
        return json_answer({"t": time.monotonic(), "seats": seats, "pages": pages})

    async def step_records(self, request: Request) -> StreamingResponse:
        """Step records after step `from` up to step `to` (default: all that are kept), at most
        `timeline._MAX_RECORDS`; to a user its own rows of them, and totals of all steps.
        """
        query = _Query(request)
        after = query.whole("from", -1)
        until = query.whole("to", 2**62)
        history, now = self.client.history, time.monotonic()
        identity = Identity.of(request.scope)
        if identity.is_admin:
            return await self._answer(request, record_columns(history, after, until, now))
        return await self._answer(request, own_columns(history, after, until, now, identity))

    async def timeline(self, request: Request) -> StreamingResponse:
        """Bins and stays between two times, see `Window.timeline`."""
        now = time.monotonic()
        bins = _Query(request).whole("bins", 120, 1, _MAX_BINS)
        window = self._window(request, now)
        return await self._answer(
            request, window.timeline(bins, now, identity=Identity.of(request.scope))
        )

    async def history(self, request: Request) -> Response:
        """The engine over hours, in coarse bins, see `HistoryLog.bins`. 404 without a history."""
        now = time.monotonic()
        query = _Query(request)
        bins = query.whole("bins", 300, 1, _MAX_BINS)
        end = min(now, query.seconds("to", now))
        start = query.seconds("from", end - 3600)
        return json_answer({"now": now, "bins": await self.history_log.bins(start, end, bins)})

    async def stays(self, request: Request) -> StreamingResponse:
        """The stays in seats in at most ten minutes of the history of hours, in the form of
        /timeline. 404 without a history.
        """
        query, now = _Query(request), time.monotonic()
        end = min(now, query.seconds("to", now))
        start = max(query.seconds("from", end - 60), end - History.keep_s)
        stays, kept_from = await self.history_log.stays(start, end)
        columns = await self.slices.result(stay_columns(stays, Identity.of(request.scope)))
        answer = {"from": start, "to": end, "kept_from": kept_from, "stays_left_out": 0}
        return self._sent(request, answer | {"stays": columns})

    async def trace(self, request: Request) -> StreamingResponse:
        """A Chrome trace of a time span, as a file to save."""
        now = time.monotonic()
        window = self._window(request, now)
        model = self.client.info.model.name if self.client.info is not None else "engine"
        return StreamingResponse(
            self.slices.blocks(window.trace(now, model)),
            _JSON | {"content-disposition": 'attachment; filename="jitney-trace.json"'},
        )

    async def _answer(self, request: Request, work: Work) -> StreamingResponse:
        return self._sent(request, await self.slices.result(work))

    def _sent(self, request: Request, value: JsonDict) -> StreamingResponse:
        """A JSON response; lists are written in runs; compressed if the client accepts that."""
        blocks = self.slices.blocks(in_runs(value))
        if not accepts_gzip(request.scope):
            return StreamingResponse(blocks, _JSON)
        headers = _JSON | {"content-encoding": "gzip", "vary": "accept-encoding"}
        return StreamingResponse(zipped(blocks, _FAST), headers)

    def _window(self, request: Request, now: float) -> Window:
        query = _Query(request)
        end = query.seconds("to", now)
        start = query.seconds("from", end - 60)
        return Window.shown(self.client.history, start, end, now, self.client.info)

    async def requests(self, request: Request) -> StreamingResponse:
        """Sequences, the newest first, see `request_detail.listing`; to a user its own. The history
        of hours goes on where the engine's own ends; its cursors are negative.
        """
        query = _Query(request)
        state = query.word("state", _STATES)
        limit = query.whole("limit", 100, 1, 1000)
        cursor = query.whole("cursor", 2**53)
        search = request.query_params.get("search", "")
        identity = Identity.of(request.scope)
        work = request_detail.listing(
            self.client.history,
            state,
            limit,
            max(0, cursor),
            time.monotonic(),
            search=search,
            identity=identity,
        )
        listing = await self.slices.result(work)
        room = limit - len(listing["requests"])
        if listing["next"] is None and room and state in _KEPT_STATES and self.history_log.is_kept:
            before = -cursor if cursor < 0 else _ANY
            with contextlib.suppress(StoreUnavailable):
                page_rows, older = await self.history_log.older(
                    room, before, _KEPT_STATES[state], search.lower(), identity
                )
                rows = request_detail.rows_of((one.record, one.adapter) for one in page_rows)
                listing["requests"] += await self.slices.result(rows)
                listing["next"] = None if older is None else -older
        return self._sent(request, listing)

    async def request(self, request: Request) -> Response | StreamingResponse:
        """One sequence in full, see `request_detail.detail`. 404 if it is unknown, forgotten, or of
        another key.
        """
        identity = Identity.of(request.scope)
        index = _Query(request).whole("index", 0, 0, REQUEST_MOST.n)
        record = self.client.history.find(request.path_params["id"], index)
        if record is None:
            return json_answer(await self._kept_request(request.path_params["id"], index, identity))
        if not identity.may_see(record.tenant):
            raise _no_request()
        work = request_detail.detail(self.client.history, record, time.monotonic(), identity)
        detail = await self.slices.result(work)
        text = await self._text(record) if identity.is_admin else None
        return self._sent(request, detail | {"text": text})

    async def _kept_request(self, id: str, index: int, identity: Identity) -> JsonDict:
        """A sequence from the history of hours. Raises HttpError 404 and 503."""
        stored = await self.history_log.named(id, index) if self.history_log.is_kept else None
        if stored is None or not identity.may_see(stored.record.tenant):
            raise _no_request()
        return request_detail.kept_detail(stored.record, stored.adapter) | {"text": None}

    async def _text(self, record: RequestRecord) -> dict[str, str] | None:
        """Prompt and answer, if texts are shown."""
        if self.decode is None or record.tokens is None:
            return None
        prompt, answer = record.tokens[: record.n_prompt], record.tokens[record.n_prompt :]
        return {
            "prompt": await run_in_threadpool(self.decode, prompt),
            "answer": await run_in_threadpool(self.decode, answer),
        }

    async def incidents(self, request: Request) -> Response:
        """Incidents of the last day, the newest first; `before`: an incident's id, for older ones.
        They name no request, so users see all of them.
        """
        query = _Query(request)
        limit = query.whole("limit", 100, 1, _MOST_INCIDENTS)
        before = query.whole("before", _ANY, 1)
        page = await self.incident_log.page(limit, before)
        return json_answer({"incidents": page, "more": len(page) == limit})

    async def tenants(self, request: Request) -> StreamingResponse:
        """Tenants in the last minutes, see `tenants.tenants`; to a user its own row."""
        quotas = None if self.service is None else self.service().quotas
        identity = Identity.of(request.scope)
        return await self._answer(
            request, tenants(self.client.history, time.monotonic(), identity, quotas)
        )

    async def memory(self, request: Request) -> StreamingResponse:
        """KV pages by tenant, and depths of the prefix cache, see `memory.memory`; to a user of its
        own requests.
        """
        info = self.client.info
        page_size = 1 if info is None else info.sizes.page_size
        identity = Identity.of(request.scope)
        return await self._answer(
            request, memory(self.client.history, time.monotonic(), page_size, identity)
        )

    async def list_work(self, request: Request) -> Response:
        """Batches, jobs, files and adapters, see `work`; to a user its own."""
        identity, info = Identity.of(request.scope), self.client.info
        names = {} if info is None else info.model.adapters
        listing = await self.work.listing(identity)
        return json_answer(listing | {"adapters": adapters(self.client.history, names, identity)})

    async def cancel_work(self, request: Request) -> Response:
        """Cancel a batch or job (DELETE), and list all work."""
        await self.work.cancel(request.path_params["id"], Identity.of(request.scope))
        return await self.list_work(request)

    async def programs(self, request: Request) -> Response:
        """Compiled sizes and parts of the steps of the last minutes, see `programs.programs`."""
        records = self.client.history.records.since(-1)
        return json_answer(await run_in_threadpool(programs, records, self.client.info))

    async def show_settings(self, request: Request) -> Response:
        """All settings with value and origin, like /config."""
        if self.service is None:
            raise HttpError(404, "this page has no server around it", code="not_found")
        return json_answer(self.service().config_report())

    async def report(self, request: Request) -> StreamingResponse:
        """The last minutes as a self-contained HTML file."""
        minutes = _Query(request).seconds("minutes", 1.0)
        History.check_minutes(minutes)
        now, wall = time.monotonic(), time.time()
        work = ReportData.collect(self.client, minutes, self.notes.newest, now, wall)
        page = await self.drawings.draw(await self.slices.result(work))
        headers = {"content-type": "text/html; charset=utf-8"}
        return StreamingResponse(self.slices.blocks(_blocks_of(page)), headers)


def _no_request() -> HttpError:
    return HttpError(404, "no such request, or it ended too long ago", code="not_found")


def _blocks_of(page: bytes) -> Generator[bytes, None, None]:
    for start in range(0, len(page), _BLOCK):
        yield page[start : start + _BLOCK]


@dataclass(frozen=True, slots=True)
class _Query:
    """Parameters in the URL of a request. Methods raise RequestError that names the parameter."""

    request: Request

    def whole(self, name: str, default: int, low: int = -_ANY, high: int = _ANY) -> int:
        """A whole number."""
        text = self.request.query_params.get(name)
        if text is None:
            return default
        value = _number(text)
        if value is None or not low <= value <= high:
            limits = f" from {low} to {high}" if low > -_ANY or high < _ANY else ""
            raise _must_be(name, f"a whole number{limits}")
        return value

    def seconds(self, name: str, default: float) -> float:
        """A time or a span in seconds."""
        with contextlib.suppress(ValueError):
            value = float(self.request.query_params.get(name, default))
            if math.isfinite(value):
                return value
        raise _must_be(name, "a number of seconds")

    def word(self, name: str, choices: Sequence[str]) -> str:
        """One of `choices`, the first by default."""
        value = self.request.query_params.get(name, choices[0])
        if value not in choices:
            raise _must_be(name, f"one of: {', '.join(choices)}")
        return value


def _number(text: str) -> int | None:
    digits = text.removeprefix("-")
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS
    return int(text) if is_number else None


def _must_be(name: str, what: str) -> RequestError:
    return RequestError(f"{name} must be {what}", param=name)
