"""Several replicas at once: what each says of itself, what all viewers are told, and whose page is
where.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from api_fakes import call, run, served
from page_browser import served as served_at
from page_fakes import browser
from page_replicas import FakeReplica, FakeRollouts, engines_app, rollout_of, urls_of

from jitney.dashboard import fleet as fleet_module
from jitney.dashboard import fleet_member, sse
from jitney.dashboard.fleet import Endpoint, FleetView
from jitney.dashboard.fleet_member import ReplicaAddress
from jitney.dashboard.fleet_page import FleetPage
from jitney.dashboard.pulse import _PULSE_VERSION, Pulse, _pulse_of
from jitney.dashboard.remote import RemoteEngine
from jitney.dashboard.sse import SEAT_STATES
from jitney.dashboard.viewers import Viewer
from jitney.engine.common.errors import ConfigError
from jitney.engine.common.key_file import digest_key
from jitney.engine.common.messages import Progress
from jitney.engine.common.ports import free_port
from jitney.engine.server.http.access import EVERYBODY, Identity
from jitney.engine.server.http.routing import Role
from jitney.engine.server.http.settings import ServerSettings

USER = Identity(Role.USER, "somebody")
#: Seconds until a test gives up.
PATIENCE_S = 30


def letters(*seats: tuple[str, int]) -> str:
    """A letter for each (state, level)."""
    return "".join(
        Pulse.seat_code.letters[SEAT_STATES.index(state) * Pulse.seat_code.levels + level]
        for state, level in seats
    )


class Watch:
    """What a viewer of the fleet's feed has been told, as the page keeps it."""

    def __init__(self) -> None:
        self.hello: dict[str, Any] = {}
        self.cards: dict[str, dict[str, Any]] = {}
        self.sums: dict[str, Any] = {}

    def apply(self, event: bytes) -> None:
        name, data = sse.decode(event)
        if name == "hello":
            self.hello = data
        elif name == "fleet":
            self.cards = {card["name"]: card for card in data["replicas"]}
            self.sums = data["sums"]
        elif name == "delta":
            for name, fields in data.get("replicas", {}).items():
                self.cards[name] |= fields
            self.sums |= data.get("sums", {})

    def states(self) -> dict[str, str]:
        return {name: card["state"] for name, card in self.cards.items()}


async def until_told(viewer: Viewer, watch: Watch, condition: Any) -> None:
    """Take in events until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        async for event in viewer:
            watch.apply(event)
            if condition():
                return
    raise AssertionError("the feed has ended")


def fleet_of(urls: dict[str, str], **options: Any) -> FleetView:
    return FleetView({name: RemoteEngine(url) for name, url in urls.items()}, **options)


@contextlib.asynccontextmanager
async def watched(fleet: FleetView, identity: Identity = EVERYBODY) -> AsyncIterator[Any]:
    """A viewer of the fleet and what it was told; the fleet is closed behind it."""
    with fleet.viewer(identity=identity) as viewer:
        yield viewer, Watch()
    await fleet.close()


@contextlib.asynccontextmanager
async def showing(
    replicas: dict[str, FakeReplica], identity: Identity = EVERYBODY, **options: Any
) -> AsyncIterator[Any]:
    """A fleet of these, a viewer of it, and what it was told."""
    with served(engines_app(replicas)) as (base, _):
        fleet = fleet_of(urls_of(replicas, base) | options.pop("more", {}), **options)
        async with watched(fleet, identity) as (viewer, watch):
            yield fleet, viewer, watch


def busy_replica(seats: int = 4) -> FakeReplica:
    """Two seats taken: one halfway through its answer, one at its prompt."""
    replica = FakeReplica(seats)
    replica.take_seat(0, n_prompt=8, n_output=15, max_tokens=30)
    replica.take_seat(2, n_prompt=8, n_output=0, max_tokens=30)
    return replica


def test_a_pulse_says_what_the_seats_are_and_of_whom_nothing():
    replica = busy_replica()
    replica.counters.waiting, replica.counters.predicted_wait = 3, 1.23456
    pulse = _pulse_of(replica, "run", 5.0, with_levels=True)  # type: ignore[arg-type]
    free = ("free", 0)
    assert pulse.seats == letters(("decode", 7), free, ("prefill", 0), free)
    assert (pulse.waiting, pulse.predicted_wait_s, pulse.model) == (3, 1.235, "scripted")
    dim = _pulse_of(replica, "run", 5.0, with_levels=False)  # type: ignore[arg-type]
    assert dim.seats == letters(("decode", 0), free, ("prefill", 0), free)
    assert b"r1" not in msgspec.json.encode(pulse)


def test_an_engine_that_loads_has_no_seats_and_says_how_far_it_is():
    replica = FakeReplica()
    replica.state, replica.progress = "loading", Progress("weights", 3, 8)
    pulse = _pulse_of(replica, "run", 5.0, with_levels=True)  # type: ignore[arg-type]
    assert pulse.seats == "" and pulse.progress is not None
    assert (pulse.progress.stage, pulse.progress.done, pulse.progress.total) == ("weights", 3, 8)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("http://gpu:8000", ("gpu:8000", "http://gpu:8000")),
        ("gpu:8000/", ("gpu:8000", "gpu:8000/")),
        ("a=http://gpu:8000", ("a", "http://gpu:8000")),
        ("https://gpu/x/y", ("gpu-x-y", "https://gpu/x/y")),
        ("http://[::1]:80", ("1-:80", "http://[::1]:80")),
    ],
)
def test_a_replica_is_called_as_it_is_told_or_after_its_place(text: str, expected: tuple[str, str]):
    name, address = ReplicaAddress.read(text, "")
    assert (name, address.url) == expected


@pytest.mark.parametrize("name", ["", "a b", "..", "<b>", "x" * 64])
def test_what_cannot_be_in_a_path_is_no_name(name: str):
    with pytest.raises(ConfigError, match="cannot name a replica"):
        ReplicaAddress.read(f"{name}=http://gpu", "")


def test_replicas_stand_in_the_order_of_their_names():
    names = ["r10", "r2", "b", "r1", "a-3"]
    fleet = fleet_of({name: f"http://127.0.0.1:1/{name}" for name in names})
    assert list(fleet.members) == ["a-3", "b", "r1", "r2", "r10"]


async def test_the_feed_tells_of_all_and_of_what_they_are_together():
    replicas = {"a": busy_replica(), "b": FakeReplica(2), "c": FakeReplica(4)}
    replicas["a"].counters.waiting, replicas["a"].counters.predicted_wait = 3, 2.5
    replicas["c"].state = "draining"

    gone = {"gone": "http://127.0.0.1:1"}
    async with showing(replicas, more=gone, price_per_hour=3.6) as (_, viewer, watch):
        await until_told(viewer, watch, lambda: watch.sums and watch.sums["ready"] == 2)
        for _ in range(3):
            replicas["a"].write(0, 2)
            await asyncio.sleep(0.3)
        await until_told(viewer, watch, lambda: watch.sums["output_rate"] > 0)
    assert watch.states() == {"a": "ready", "b": "ready", "c": "draining", "gone": "gone"}
    assert watch.hello["price_per_hour"] == 3.6 and watch.hello["levels"] == Pulse.seat_code.levels
    sums = watch.sums
    assert (sums["replicas"], sums["ready"], sums["seats"], sums["taken"]) == (4, 2, 10, 2)
    assert (sums["waiting"], sums["predicted_wait_s"], sums["worst"]) == (3, 2.5, "a")
    # 3 engines at 3.60 an hour are 0.003 a second.
    useful = watch.cards["a"]["output_rate"]
    assert watch.cards["a"]["price"] == pytest.approx(0.001 / useful * 1e6, rel=0.1)
    assert sums["price"] == pytest.approx(0.003 / useful * 1e6, rel=0.1)
    waits = {name: card["predicted_wait_s"] for name, card in watch.cards.items()}
    assert waits == {"a": 2.5, "b": 0.0, "c": None, "gone": None}
    assert (sums["unready"], sums["refused"]) == ("", None)
    assert "does not answer" in watch.cards["gone"]["trouble"]
    assert abs(watch.cards["gone"]["since"] - time.time()) < PATIENCE_S


async def test_the_page_says_what_the_endpoint_says_of_itself():
    """A replica whose process was started is no lost one; without an endpoint nobody knows."""
    told = Endpoint("no engine is ready", ("m",), {"503": 195}, 200, frozenset({"a"}))

    gone = {name: RemoteEngine("http://127.0.0.1:1") for name in "ab"}
    async with watched(FleetView(gone, endpoint=lambda: told)) as (viewer, watch):
        both = {"a": "starting", "b": "gone"}
        await until_told(viewer, watch, lambda: watch.states() == both)
        assert watch.sums["unready"] == "no engine is ready"
        assert watch.sums["unready_models"] == ["m"]
        assert (watch.sums["refused"], watch.sums["refused_ever"]) == ({"503": 195}, 200)
        assert watch.cards["a"]["since"] is None and watch.cards["a"]["trouble"] == ""
    async with watched(fleet_of({"b": "http://127.0.0.1:1"})) as (viewer, watch):
        await until_told(viewer, watch, lambda: watch.states() == {"b": "gone"})
        assert watch.sums["unready"] == "no replica is ready"


def test_a_new_process_that_answers_the_endpoint_first_is_not_gone():
    """The page connects a moment after the endpoint does, and had failed while it started."""
    now = [Endpoint(starting=frozenset({"a"}))]
    view = FleetView({"a": RemoteEngine("http://127.0.0.1:1")}, endpoint=lambda: now[0])

    def state() -> str:
        [card] = view.frame()["replicas"]
        return card["state"]

    view.frame()
    view.members["a"].lost("it does not answer")
    assert state() == "starting"
    now[0] = Endpoint()
    assert state() == "connecting" == state()
    view.members["a"].lost("it does not answer")
    assert state() == "gone"


async def test_a_replica_that_goes_keeps_its_last_figures_and_comes_back():
    replica = busy_replica()
    replica.counters.engine_restarts = 1

    app, port = engines_app({"a": replica}), free_port()

    async with watched(fleet_of({"a": f"http://127.0.0.1:{port}/a"})) as (viewer, watch):

        async def until(state: str) -> dict[str, Any]:
            await until_told(viewer, watch, lambda: watch.states().get("a") == state)
            return watch.cards["a"]

        with served_at(app, port):
            card = await until("ready")
            assert card["taken"] == 2 and card["restarts"] == 1
        card = await until("gone")
        assert card["taken"] == 2 and card["since"] is not None
        assert watch.sums["seats"] == 0 and watch.sums["ready"] == 0
        assert watch.sums["predicted_wait_s"] is None
        with served_at(engines_app({"a": replica}), port):
            card = await until("ready")
            # Another server: one restart more, beside those that both say they had.
            assert card["restarts"] == 3 and card["since"] is None


async def test_what_deltas_make_is_what_a_newcomer_is_told():
    replicas = {f"r{i}": FakeReplica(8, seed=i) for i in range(6)}
    async with showing(replicas) as (fleet, viewer, watch):
        await until_told(viewer, watch, lambda: watch.sums and watch.sums["ready"] == 6)
        for _ in range(6):
            for replica in replicas.values():
                replica.move()
            await asyncio.sleep(0.2)
        deltas = 0
        while deltas < 4:
            event = await anext(aiter(viewer))
            deltas += event.startswith(b"event: delta")
            watch.apply(event)
        with fleet.viewer() as newcomer:
            late = Watch()
            await until_told(newcomer, late, lambda: bool(late.cards))
            for event in list(viewer._events):
                watch.apply(event)
            assert late.cards == watch.cards and late.sums == watch.sums


async def test_a_user_is_not_told_how_far_others_have_come():
    replica, free = busy_replica(), ("free", 0)
    async with showing({"a": replica}, USER) as (_, viewer, watch):
        await until_told(viewer, watch, lambda: watch.sums and watch.sums["ready"] == 1)
        dim = letters(("decode", 0), free, ("prefill", 0), free)
        assert watch.hello["role"] == "user" and watch.cards["a"]["seats"] == dim
        replica.take_seat(1, n_prompt=4, n_output=9, max_tokens=10)
        await until_told(viewer, watch, lambda: watch.cards["a"]["taken"] == 3)
        dim = letters(("decode", 0), ("decode", 0), ("prefill", 0), free)
        assert watch.cards["a"]["seats"] == dim


def test_a_large_frame_is_followed_by_a_long_pause(monkeypatch: pytest.MonkeyPatch):
    """With as many bytes as there may be, the feed keeps to its share of them."""
    monkeypatch.setattr(fleet_module, "_MOST_BYTES_PER_S", 20_000)
    fleet = fleet_of({f"r{i}": f"http://127.0.0.1:1/{i}" for i in range(40)})
    sent, started = 0, time.monotonic()

    async def session() -> tuple[int, float]:
        nonlocal sent
        async with watched(fleet) as (viewer, _):
            for task in fleet._following.values():
                task.cancel()
            count = 0
            async for event in viewer:
                # Every replica is another at each frame: all seats change.
                count += 1
                letter = Pulse.seat_code.letters[count % len(Pulse.seat_code.letters)]
                for member in fleet.members.values():
                    member.take(
                        Pulse(_PULSE_VERSION, "r", float(count), "ready", "m", letter * 500)
                    )
                sent += len(event) if event.startswith(b"event: delta") else 0
                if count == 5:
                    return sent, time.monotonic() - started
        raise AssertionError

    n_bytes, seconds = run(session())
    assert n_bytes > 40_000 and n_bytes / seconds < 20_000 * 1.3


def says(*events: bytes) -> RemoteEngine:
    async def body() -> AsyncIterator[bytes]:
        for event in events:
            yield event
        await asyncio.sleep(PATIENCE_S)

    async def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=body())

    return RemoteEngine("http://engine", "", httpx.MockTransport(answer))


@pytest.mark.parametrize(
    "pulse",
    [
        b"{}",
        b"[]",
        b"{",
        b'{"version":99,"run":"r","t":1,"state":"ready"}',
        b'{"version":1,"run":"r","t":1,"state":"ready","waiting":-1}',
        b'{"version":1,"run":"r","t":1,"state":"ready","waiting":1e99}',
        b'{"version":1,"run":"r","t":1,"state":"ready","seats":"<b>"}',
        b'{"version":1,"run":"r","t":1,"state":"ready","model":' + b'"x"' * 999 + b"}",
    ],
)
def test_what_is_no_pulse_makes_a_replica_gone_and_says_why(pulse: bytes):
    async def session() -> str:
        fleet = FleetView({"a": says(b"event: pulse\ndata: " + pulse + b"\n\n")})
        async with watched(fleet) as (viewer, watch):
            gone = lambda: watch.states().get("a") == "gone"  # noqa: E731
            await until_told(viewer, watch, gone)
            return watch.cards["a"]["trouble"]

    assert run(session()) == "http://engine is of another version than this page"


def test_silence_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fleet_member, "_SILENCE_S", 0.2)
    pulse = sse.encode("pulse", Pulse(_PULSE_VERSION, "r", 1.0, "ready"))

    async def session() -> str:
        async with watched(FleetView({"a": says(pulse)})) as (viewer, watch):
            gone = lambda: watch.states().get("a") == "gone"  # noqa: E731
            await until_told(viewer, watch, gone)
            return watch.cards["a"]["trouble"]

    assert "says nothing any more" in run(session())


async def test_replicas_come_and_go_while_somebody_looks():
    replicas = {"a": FakeReplica(2), "b": FakeReplica(4)}
    with served(engines_app(replicas)) as (base, _):
        urls = urls_of(replicas, base)
        fleet = fleet_of({"a": urls["a"]})
        async with watched(fleet) as (viewer, watch):
            await until_told(viewer, watch, lambda: watch.states() == {"a": "ready"})
            kept = fleet.members["a"]
            fleet.set_replicas({name: RemoteEngine(url) for name, url in urls.items()})
            both = {"a": "ready", "b": "ready"}
            await until_told(viewer, watch, lambda: watch.states() == both)
            assert fleet.members["a"] is kept
            fleet.set_replicas({"b": RemoteEngine(urls["b"])})
            await until_told(viewer, watch, lambda: watch.states() == {"b": "ready"})


async def test_nobody_looks_and_nobody_is_asked():
    async with showing({"a": FakeReplica(2)}) as (fleet, viewer, watch):
        await until_told(viewer, watch, lambda: watch.states() == {"a": "ready"})
    assert not fleet._following and not fleet.sending
    assert fleet.members["a"].state == "connecting"


ADMIN, ORDINARY = "the operator's key", "a user's key"
SETTINGS = ServerSettings(
    admin_keys=(digest_key(ADMIN),), api_keys=(digest_key(ORDINARY),), allowed_hosts=("localhost",)
)


#: Path, and the status without a key, with a user's and with an administrator's.
PAGES = (
    ("/", (401, 200, 200)),
    ("/assets/fleet.js", (200, 200, 200)),
    ("/r/a/", (401, 307, 200)),
    ("/r/a", (307, 307, 307)),
    ("/r/a/assets/page.js", (200, 200, 200)),
    ("/r/a/engines", (401, 403, 200)),
    ("/r/a/slots", (401, 403, 200)),
    ("/r/a/requests", (401, 403, 200)),
    ("/r/a/lab", (401, 403, 200)),
    ("/r/b/", (404, 404, 404)),
    ("/r/b/slots", (401, 403, 404)),
    ("/r/a/pulse", (401, 403, 404)),
    ("/r/a/request/../../v1/models", (401, 403, 404)),
    ("/nowhere", (401, 404, 404)),
)


def test_whose_page_is_where(client):
    async def session(url: str) -> None:
        for at, key in enumerate((None, ORDINARY, ADMIN)):
            app = FleetPage(fleet_of({"a": f"{url}/a"}), SETTINGS).by_itself()
            async with browser(app) as web:
                if key is not None:
                    assert (await web.post("/sign-in", json={"key": key})).status_code == 204
                for path, expected in PAGES:
                    answer = await web.get(path)
                    policy = answer.headers["content-security-policy"]
                    assert policy.startswith("default-src 'none'")
                    assert (path, answer.status_code) == (path, expected[at])

    with served(engines_app({"a": client})) as (url, _):
        run(session(url))


def test_a_replicas_page_knows_the_others(client):
    async def session(url: str) -> Any:
        app = FleetPage(
            fleet_of({"a": f"{url}/a", "b": "http://127.0.0.1:1"}), SETTINGS
        ).by_itself()
        async with browser(app) as web:
            await web.post("/sign-in", json={"key": ADMIN})
            return (await web.get("/r/a/engines")).json()

    with served(engines_app({"a": client})) as (url, _):
        listing = run(session(url))
        assert listing["fleet"] == "../../" and listing["standalone"] is True
        assert [(one["name"], one["base"], one["state"]) for one in listing["engines"]] == [
            ("a", "", "ready"),
            ("b", "../b/", "gone"),
        ]


def test_strangers_hosts_and_pages_of_other_sites_are_refused():
    app = FleetPage(fleet_of({"a": "http://127.0.0.1:1"}), SETTINGS).by_itself()
    elsewhere = run(call(app, "/", method="GET", headers={"host": "elsewhere"}))
    assert elsewhere.status == 421
    site = {"host": "localhost", "sec-fetch-site": "cross-site"}
    assert run(call(app, "/feed", method="GET", headers=site)).status == 403


@pytest.mark.parametrize("key, expected", [(None, 401), (ORDINARY, 403), (ADMIN, 200)])
async def test_administrators_see_candidates_and_decide(key: str | None, expected: int):
    rollouts = FakeRollouts(m=rollout_of("m", "v2", slower=1.0, requests=40))
    app = FleetPage(fleet_of({"a": "http://127.0.0.1:1"}), SETTINGS, rollouts).by_itself()

    async def refusals(web: httpx.AsyncClient) -> None:
        wrong = await web.post("/rollouts/m", json={"action": "explode"})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "action"
        assert (await web.post("/rollouts/m", json={"act": 1})).status_code == 400
        assert (await web.post("/rollouts/nobody", json={"action": "promote"})).status_code == 404
        site = {"sec-fetch-site": "cross-site"}
        other = await web.post("/rollouts/m", json={"action": "restart"}, headers=site)
        assert other.status_code == 403

    async with browser(app) as web:
        if key is not None:
            await web.post("/sign-in", json={"key": key})
        assert (await web.get("/rollouts")).status_code == expected
        answer = await web.post("/rollouts/m", json={"action": "promote"})
        assert answer.status_code == expected
        if expected == 200:
            assert answer.json()["rollouts"][0]["state"] == "promoted"
            await refusals(web)
    assert rollouts.decided == ([("m", "promote")] if expected == 200 else [])


def test_without_candidates_nothing_answers_for_them():
    app = FleetPage(fleet_of({"a": "http://127.0.0.1:1"}), ServerSettings()).by_itself()
    assert run(call(app, "/rollouts", method="GET")).status == 404


async def test_replicas_are_found_where_they_are_now():
    """One that moves is the same replica: its restarts are counted on."""
    replica = FakeReplica(2)
    places: dict[str, ReplicaAddress] = {}

    async with watched(FleetView(find=lambda: places)) as (viewer, watch):
        await until_told(viewer, watch, lambda: watch.sums.get("replicas") == 0)
        for restarts in (0, 1):
            with served_at(engines_app({"a": replica})) as url:
                places["a"] = ReplicaAddress(f"{url}/a")
                ready = lambda: watch.states() == {"a": "ready"}  # noqa: E731
                here = lambda: ready() and watch.cards["a"]["url"] == f"{url}/a"  # noqa: B023, E731
                await until_told(viewer, watch, here)
                assert watch.cards["a"]["restarts"] == restarts
        places.clear()
        await until_told(viewer, watch, lambda: watch.states() == {})
