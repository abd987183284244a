"""Who may see what: every route without a key, with a user's and with an administrator's; and that
users see of others that a seat is taken, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
import pytest
from api_fakes import ByteTokenizer, call, run
from page_fakes import browser, viewers_of

from jitney.dashboard import Dashboard, sse
from jitney.dashboard.engine_routes import ENGINE_ROUTES
from jitney.dashboard.remote import RemoteEngine
from jitney.dashboard.standalone import Standalone
from jitney.engine.common.key_file import digest_key
from jitney.engine.common.messages import PromptChunk, SequenceEvent, StepReport
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.server.app import create_app
from jitney.engine.server.http.routes import ROUTES
from jitney.engine.server.http.routing import Role
from jitney.engine.server.http.settings import ServerSettings

ANN, BEN, ROOT = "ann's key", "ben's key", "the operator's key"
SETTINGS = ServerSettings(
    api_keys=(digest_key(ANN), digest_key(BEN)),
    admin_keys=(digest_key(ROOT),),
    public_prefixes=("/dashboard/",),
    public_paths=frozenset({"/dashboard"}),
)
#: What each kind of caller is answered by a route that needs the role; None: let in.
EXPECTED = {
    Role.ANYBODY: {None: None, ANN: None, ROOT: None},
    Role.USER: {None: 401, ANN: None, ROOT: None},
    Role.ADMIN: {None: 401, ANN: 403, ROOT: None},
}
#: The page's routes beside ENGINE_ROUTES.
PAGE_ROUTES = [
    ("POST", "/sign-in", Role.ANYBODY),
    ("POST", "/sign-out", Role.ANYBODY),
    ("GET", "/assets/page.js", Role.ANYBODY),
    ("GET", "/engines", Role.USER),
    ("GET", "/feed", Role.USER),
    ("GET", "/pulse", Role.USER),
    ("GET", "/nowhere", Role.USER),
    *[
        (method, route.path.replace("{id}", "ann-0"), route.role)
        for route in ENGINE_ROUTES
        for method in route.methods
    ],
]


def app_of(client):
    """The whole HTTP side."""
    page = Dashboard(
        client,
        SETTINGS,
        decode=lambda ids: "".join(map(chr, ids)),
        service=lambda: app.state.service,
    )
    app = create_app(client, ByteTokenizer(), SETTINGS, "m", page.mounted("/dashboard"))  # type: ignore[arg-type]
    return app


@pytest.fixture
def shared(client):
    """An engine that Ann's and Ben's requests use: one of each sits, one of each has ended, and one
    of Ben's waits.
    """
    client.history.keep_tokens = True
    client.history.core_ready(client.info)
    for number, (name, seat, ends) in enumerate(
        [("ann", 0, False), ("ben", 1, False), ("ann-old", 2, True), ("ben-old", 3, True)]
    ):
        tenant = digest_key(ANN if name.startswith("ann") else BEN)
        sit(client, f"{name}-0", tenant, seat, ends, n_prompt=10 + number)
    client.history.submit(request("ben-waits-0", digest_key(BEN), 17))
    return client


def request(name: str, tenant: str, n_prompt: int) -> EngineRequest:
    sampling = SamplingParams(max_tokens=31)
    return EngineRequest(
        id=name, prompt=[65] * n_prompt, sampling=sampling, arrival=0.0, tenant=tenant
    )


def sit(client, name: str, tenant: str, seat: int, ends: bool, n_prompt: int) -> None:
    client.history.submit(request(name, tenant, n_prompt))
    seated = SequenceEvent("seated", name, 0, seat, 0, 0.0, 0, 0)
    finish = "length" if ends else None
    output = SequenceOutput(request_id=name, index=0, tokens=[66] * 5, finish=finish)
    client.history.take(StepReport([output], events=[seated]))
    record = client.history.find(name, 0)
    record.tokens = [65] * n_prompt + [66] * 5


async def sign_in(web: httpx.AsyncClient, key: str) -> None:
    assert (await web.post("/dashboard/sign-in", json={"key": key})).status_code == 204


def ask_as(app, key: str | None, *paths: str) -> list[httpx.Response]:
    async def session() -> list[httpx.Response]:
        async with browser(app) as web:
            if key is not None:
                await sign_in(web, key)
            return [await web.get(f"/dashboard{path}") for path in paths]

    return run(session())


@pytest.mark.parametrize("key", [None, ANN, ROOT])
def test_every_route_of_the_endpoint_lets_in_whom_its_line_says(shared, key):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    app = app_of(shared)
    for route in ROUTES:
        path = route.path.replace("{model:path}", "m")
        wanted = EXPECTED[route.role][key]
        reply = run(call(app, path, b"{}", method=route.method, headers=headers))
        assert reply.status == wanted if wanted else reply.status not in (401, 403), path
        if wanted == 403:
            assert reply.error["code"] == "admin_key_needed"
            assert "admin_keys" in reply.error["message"]


@pytest.mark.parametrize("key", [None, ANN, ROOT])
async def test_every_route_of_the_page_lets_in_whom_its_line_says(shared, key):
    app = app_of(shared)
    for method, path, role in PAGE_ROUTES:
        wanted = EXPECTED[role][key]
        cookie = ""
        if key is not None:
            reply = await call(app, "/dashboard/sign-in", {"key": key})
            cookie = reply.headers["set-cookie"].partition(";")[0]
        reply = await call(
            app,
            f"/dashboard{path}",
            {"key": ROOT} if path == "/sign-in" else {"minutes": 99},
            method=method,
            headers={"cookie": cookie},
            leave_on_chunk=1,
        )
        assert reply.status == wanted if wanted else reply.status not in (401, 403), path


def test_the_page_has_only_what_its_reader_may_see_in_it(shared):
    (anns,) = ask_as(app_of(shared), ANN, "/")
    (roots,) = ask_as(app_of(shared), ROOT, "/")
    (nobodys,) = ask_as(app_of(shared), None, "/")
    assert "ann-0" in roots.text and "ben-0" in roots.text
    assert "ann-0" in anns.text and "ben" not in anns.text
    assert nobodys.status_code == 401 and 'id="first"' not in nobodys.text


def test_the_table_says_who_needs_what():
    """What decision 65 promises: a change of it is a change here."""
    admin = {route.path for route in ROUTES if route.role is Role.ADMIN}
    anybody = {route.path for route in ROUTES if route.role is Role.ANYBODY}
    engine = {"/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping"}
    assert admin == {"/metrics", "/slots", "/config", "/admin/reload"} | engine
    probes = {route.path for route in ROUTES if route.is_probe}
    assert probes == {"/livez", "/readyz", "/health", "/ping", "/startupz", "/metrics"}
    assert anybody == probes - {"/metrics"} | {"/", "/docs"}, (
        "where to go on, and the routes, which hold no data"
    )
    page = {route.path for route in ENGINE_ROUTES if route.role is Role.ADMIN}
    assert page == {"/trace", "/report", "/lab", "/programs", "/buckets", "/settings"}
    assert all(route.role is not Role.ANYBODY for route in ENGINE_ROUTES)


def test_a_key_in_both_lists_is_an_administrators():
    both = ServerSettings(api_keys=(digest_key(ROOT),), admin_keys=(digest_key(ROOT),))
    app = create_app(None, ByteTokenizer(), both, "m")  # type: ignore[arg-type]
    headers = {"authorization": f"Bearer {ROOT}"}
    assert run(call(app, "/slots", method="GET", headers=headers)).status != 403


def test_without_keys_everybody_is_an_administrator(shared):
    app = create_app(shared, ByteTokenizer(), ServerSettings(), "m")  # type: ignore[arg-type]
    for path in ("/slots", "/metrics"):
        assert run(call(app, path, method="GET")).status == 200


def test_a_user_finds_its_own_requests_and_nobody_elses(shared):
    app = app_of(shared)
    listing, own, other, missing = ask_as(
        app, ANN, "/requests", "/request/ann-0", "/request/ben-0", "/request/nobody"
    )
    assert {row["request"] for row in listing.json()["requests"]} == {"ann-0", "ann-old-0"}
    assert own.json()["n_prompt"] == 10 and own.json()["text"] is None
    assert other.status_code == 404
    assert other.content == missing.content, "another's request is as one that never was"
    everything, text = ask_as(app, ROOT, "/requests", "/request/ben-0")
    assert len(everything.json()["requests"]) >= 5
    assert text.json()["text"] == {"prompt": "A" * 11, "answer": "BBBBB"}


def test_of_tenants_and_memory_a_user_has_its_own_row(shared):
    app = app_of(shared)
    for tenant in (digest_key(ANN), digest_key(BEN), digest_key(BEN)):
        shared.history.incidents.refused(429, "rate_limit", 1.0, tenant)
    mine, memory = ask_as(app, ANN, "/tenants", "/memory")
    (row,) = mine.json()["tenants"]
    assert (row["requests"], row["seats"], row["waiting"], row["refused"]) == (2, 1, 0, 1)
    assert (row["prompt_tokens"], row["output_tokens"]) == (10 + 12, 2 * 5)
    assert row["search"] == digest_key(ANN) and row["fair_share"] is None
    assert digest_key(BEN)[:8] not in mine.text + memory.text
    (line,) = memory.json()["tenants"]
    assert line["name"] == row["name"] and sum(d["prompts"] for d in memory.json()["depths"]) == 2
    (everything,) = ask_as(app, ROOT, "/tenants")
    rows = {row["search"]: row for row in everything.json()["tenants"]}
    assert set(rows) == {digest_key(ANN), digest_key(BEN), "user "}
    assert rows[digest_key(BEN)]["waiting"] == 1 and rows[digest_key(BEN)]["refused"] == 2
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    assert {row["fair_share"] for row in rows.values()} == {1 / 3}


def test_pages_of_a_list_hold_ones_own_alone(shared):
    first = ask_as(app_of(shared), BEN, "/requests?limit=2")[0].json()
    second = ask_as(app_of(shared), BEN, f"/requests?limit=2&cursor={first['next']}")[0].json()
    names = [row["request"] for row in (*first["requests"], *second["requests"])]
    assert names == ["ben-waits-0", "ben-old-0", "ben-0"] and second["next"] is None


def test_of_others_a_user_sees_that_seats_are_taken(shared):
    (line,) = ask_as(app_of(shared), ANN, "/timeline?from=-1e9")
    stays = line.json()["stays"]
    rows = list(zip(stays["seat"], stays["request"], stays["n_prompt"], strict=True))
    assert (0, "ann-0", 10) in rows and (1, "", 0) in rows
    assert {name for _, name, _ in rows} <= {"ann-0", "ann-old-0", ""}
    assert all(n_prompt == 0 for _, name, n_prompt in rows if not name)
    (all_of_it,) = ask_as(app_of(shared), ROOT, "/timeline?from=-1e9")
    assert all_of_it.json()["stays"]["seat"] == stays["seat"]
    assert "ben-0" in all_of_it.json()["stays"]["request"]
    assert "ben" not in line.text
    (slots,) = ask_as(app_of(shared), ANN, "/slots")
    assert "ben" not in slots.text and "req-" not in slots.text


def test_of_steps_a_user_sees_totals_and_its_own_rows(shared):
    for number in range(3):
        shared.step(prefill=7, cached_tokens=5, waiting=2)
        name = ("ann-0", "ben-0", "ann-0")[number]
        chunk = PromptChunk(name, 0, 0, 4 + number, 0)
        shared.history.take(StepReport([], chunks=[chunk]))
    mine, everything = (
        ask_as(app_of(shared), ANN, "/frames")[0],
        ask_as(app_of(shared), ROOT, "/frames")[0],
    )
    told, steps = mine.json(), everything.json()["columns"]
    assert set(told["columns"]) == {"step", "ready", "prefill", "recomputed", "decode"}
    first = steps["step"][-3]
    prefill = dict(zip(told["columns"]["step"], told["columns"]["prefill"], strict=True))
    assert (prefill[first], prefill[first + 2]) == (4, 6) and not prefill.get(first + 1)
    assert told["totals"]["prefill"] == sum(steps["prefill"]) and "pairs" not in mine.text
    (later,) = ask_as(app_of(shared), ANN, f"/frames?from={first}")
    assert min(later.json()["columns"]["step"]) > first
    assert later.json()["totals"] == told["totals"]


def test_bins_of_a_users_timeline_are_not_steps(shared):
    (mine,) = ask_as(app_of(shared), ANN, "/timeline?from=-1e9&bins=600")
    now = mine.json()["now"]
    (mine,) = ask_as(app_of(shared), ANN, f"/timeline?from={now - 3}&to={now}&bins=600")
    (all_of_it,) = ask_as(app_of(shared), ROOT, f"/timeline?from={now - 3}&to={now}&bins=600")
    assert len(mine.json()["bins"]["t"]) == 3 and len(all_of_it.json()["bins"]["t"]) == 600


def feed_of(app, key: str, chunks: int) -> tuple[list[tuple[str, Any]], bytes]:
    async def session():
        cookie = (await call(app, "/dashboard/sign-in", {"key": key})).headers["set-cookie"]
        return await call(
            app,
            "/dashboard/feed",
            method="GET",
            headers={"cookie": cookie.partition(";")[0]},
            leave_on_chunk=chunks,
        )

    reply = run(session())
    return [sse.decode(chunk) for chunk in reply.chunks if chunk], reply.body


def test_a_users_feed_names_nobody_else(shared):
    (hello, frame), text = feed_of(app_of(shared), ANN, 2)
    assert hello[1]["role"] == "user" and hello[1]["shows_text"] is False
    seats = frame[1]["seats"]
    assert seats["request"] == ["ann-0", None, None, None]
    assert seats["n_prompt"] == [10, 0, 0, 0] and seats["max_tokens"] == [31, 0, 0, 0]
    assert frame[1]["metrics"]["waiting"] is not None and b"ben" not in text
    (hello, frame), _ = feed_of(app_of(shared), ROOT, 2)
    assert hello[1]["role"] == "admin" and hello[1]["shows_text"] is True
    assert frame[1]["seats"]["request"][:2] == ["ann-0", "ben-0"]
    states = [frame[1]["seats"]["state"], seats["state"]]
    assert states[0] == states[1], "seats are taken for everybody alike"


async def test_deltas_and_events_name_nobody_else(shared):
    """Two viewers of one feed, and what happens while they watch."""
    from jitney.dashboard.feed import Feed
    from jitney.engine.server.http.access import Identity

    async def take(viewer, until: str) -> list[tuple[str, Any]]:
        got = []
        async for event in viewer:
            got.append(sse.decode(event))
            if got[-1][0] == until:
                return got
        return got

    feed = Feed(shared, hz=100)
    ann = Identity(Role.USER, digest_key(ANN))
    root = Identity(Role.ADMIN, digest_key(ROOT))
    with feed.viewer(identity=ann) as hers, feed.viewer(identity=root) as all_of_it:
        await take(hers, "key_frame")
        await take(all_of_it, "key_frame")
        sit(shared, "ben-new-0", digest_key(BEN), 2, False, n_prompt=21)
        sit(shared, "ann-new-0", digest_key(ANN), 3, False, n_prompt=22)
        hers, everything = await take(hers, "delta"), await take(all_of_it, "delta")
    for got, named in ((hers, {"ann-new-0", ""}), (everything, {"ann-new-0", "ben-new-0"})):
        events = next(data for name, data in got if name == "events")
        assert {row[3] for row in events["events"]} == named
        assert len(events["events"]) == 6, "queued, seated and first token, twice"
    rows = {row[0]: row for row in hers[-1][1]["seats"]}
    assert rows[2][2:] == [None, 0, 0, 0, 0, 0] and rows[3][2] == "ann-new-0"
    assert "ben" not in json.dumps(hers)
    both = {row[0]: row[2] for row in everything[-1][1]["seats"]}
    assert both[2] == "ben-new-0" and both[3] == "ann-new-0"


async def test_no_user_takes_all_places_of_the_feed(shared):
    from jitney.dashboard.feed import Feed
    from jitney.dashboard.viewers import TooManyViewers
    from jitney.engine.server.http.access import Identity

    feed = Feed(shared)
    ann, ben = (Identity(Role.USER, digest_key(key)) for key in (ANN, BEN))
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(feed.viewer(identity=ann))
        with pytest.raises(TooManyViewers, match="all 8"):
            stack.enter_context(feed.viewer(identity=ann))
        stack.enter_context(feed.viewer(identity=ben))
        for _ in range(20):
            stack.enter_context(feed.viewer())
        assert viewers_of(feed) == 29


async def test_a_page_elsewhere_shows_what_its_key_may_see(shared):
    """With a user's key it is a user's page; its visitors need the same key."""
    engine = app_of(shared)
    settings = ServerSettings(admin_keys=(digest_key(ANN),))
    remote = RemoteEngine("http://engine", ANN, httpx.ASGITransport(engine))

    async with browser(Standalone(remote, settings).by_itself()) as web:
        assert (await web.get("/engines/0/requests")).status_code == 401
        assert (await web.post("/sign-in", json={"key": ROOT})).status_code == 401
        assert (await web.post("/sign-in", json={"key": ANN})).status_code == 204
        listing = await web.get("/engines/0/requests")
        listing, lab = listing, await web.get("/engines/0/lab")
    assert {row["request"] for row in listing.json()["requests"]} == {"ann-0", "ann-old-0"}
    assert lab.status_code == 403 and lab.json()["error"]["code"] == "admin_key_needed"
