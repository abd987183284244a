"""The page at a fleet's endpoint: it finds the engines, and decides about the candidates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_fakes import ByteTokenizer, until
from fleet_engines import FakeEngine, Served, engines, fleet_of, toml

from jitney.dashboard import Dashboard
from jitney.engine.common.key_file import digest_key
from jitney.engine.fleet import ingress
from jitney.engine.fleet.fleet import RefusalCounts
from jitney.engine.fleet.page import fleet_page_routes
from jitney.engine.server.app import create_app
from jitney.engine.server.http.settings import ServerSettings

ADMIN, USER, ENGINE = "the operator's key", "a user's key", "the engines' key"
KEYS = {"admin_keys": (digest_key(ADMIN),), "api_keys": (digest_key(USER),)}
PATH = "/dashboard"


def engine() -> FakeEngine:
    """One with a page, whose key only the fleet knows."""
    fake = FakeEngine()
    settings = ServerSettings(admin_keys=(digest_key(ENGINE),)).with_page(PATH)
    routes = Dashboard(fake.client, settings).mounted(PATH)  # type: ignore[arg-type]
    fake._inner = create_app(fake.client, ByteTokenizer(), settings, "m", routes)  # type: ignore[arg-type]
    return fake


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A fleet of two engines and a candidate's, with its page, as `jitney fleet serve` makes it."""
    create = ingress.create_ingress

    def with_a_page(fleet: ingress.Fleet, settings: ServerSettings) -> Any:
        page = fleet_page_routes(fleet, settings, PATH, price_per_hour=2.0)
        return create(fleet, settings.with_page(PATH), extra_routes=page)

    monkeypatch.setattr("fleet_engines.create_ingress", with_a_page)
    with engines(engine(), engine(), engine()) as fakes:
        urls = [fake.url for fake in fakes]
        text = toml(urls[:2], f'[models.m.candidate]\nname = "v2"\nurls = ["{urls[2]}"]')
        with fleet_of(tmp_path, text, ENGINE, **KEYS) as served:
            served.wait_ready(*(fake.name for fake in fakes))
            yield served


@contextmanager
def signed_in(served: Served, key: str) -> Iterator[httpx.Client]:
    with served.http() as http:
        assert http.post(f"{PATH}/sign-in", json={"key": key}).status_code == 204
        yield http


def ready_replicas(http: httpx.Client, n: int) -> list[str]:
    """Their names as the page has them, once so many are ready."""
    states: dict[str, str] = {}
    with http.stream("GET", f"{PATH}/feed") as answer:
        event = ""
        for line in answer.iter_lines():
            event = line.removeprefix("event: ") if line.startswith("event: ") else event
            if not line.startswith("data: "):
                continue
            data = json.loads(line.removeprefix("data: "))
            if event == "hello":
                assert data["compares"] is True and data["price_per_hour"] == 2.0
            elif event == "fleet":
                states = {card["name"]: card["state"] for card in data["replicas"]}
            elif event == "delta":
                changed = data.get("replicas", {}).items()
                states |= {name: card["state"] for name, card in changed if "state" in card}
            if list(states.values()).count("ready") == n:
                return sorted(states)
    raise AssertionError(states)


def test_the_page_shows_the_fleets_engines(served: Served):
    names = sorted(served.replicas())
    with signed_in(served, ADMIN) as http:
        assert ready_replicas(http, 3) == names
        one = names[0]
        slots = http.get(f"{PATH}/r/{one}/slots")
        assert slots.status_code == 200 and len(slots.json()["seats"]["request"]) == 2
        assert "<title>Jitney</title>" in http.get(f"{PATH}/r/{one}/").text
    with signed_in(served, USER) as http:
        assert http.get(f"{PATH}/").status_code == 200
        assert http.get(f"{PATH}/r/{names[0]}/slots").status_code == 403


def sums_once(http: httpx.Client, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What the page is told of the whole fleet, as soon as that holds."""
    sums: dict[str, Any] = {}
    with http.stream("GET", f"{PATH}/feed") as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                sums |= json.loads(line.removeprefix("data: ")).get("sums", {})
            if sums and condition(sums):
                return sums
    raise AssertionError(sums)


def test_the_page_and_readyz_say_the_same(served: Served):
    with signed_in(served, ADMIN) as http:
        ready_replicas(http, 3)
        assert http.get("/readyz").status_code == 200
        assert sums_once(http, lambda sums: sums["ready"] == 3)["unready"] == ""
        key = {"authorization": f"Bearer {USER}"}
        body = {"model": "m", "prompt": "Where to?"}
        assert http.post("/v1/completions", json={"max_tokens": 1}, headers=key).status_code == 400
        served.fleet.begin_drain()
        answers = [http.post("/v1/completions", json=body, headers=key) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [503] * 3
        said = http.get("/readyz")
        # Each is counted after its answer has been sent.
        sums = sums_once(http, lambda sums: sums["unready"] and sums["refused_ever"] == 3)
        assert (said.status_code, said.json()["error"]["message"]) == (503, sums["unready"])
        assert sums["refused"] == {"503": 3}
        assert sums["unready_models"] == []


def test_a_fault_of_the_fleet_itself_is_counted_with_the_refusals(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    def fail(name: object) -> str:
        raise RuntimeError("a fault")

    monkeypatch.setattr(served.fleet, "model_name", fail)
    with served.http() as http:
        key = {"authorization": f"Bearer {USER}"}
        body = {"model": "m", "prompt": "Where to?"}
        assert http.post("/v1/completions", json=body, headers=key).status_code == 500
    # It is counted after the answer has been sent.
    until(lambda: served.fleet.refusals.lately() == {"500": 1})


def test_refusals_of_the_last_minute_are_counted_by_status():
    now = [100.0]
    counts = RefusalCounts(lambda: now[0])
    for status in (200, 404, 429, 503, 503):
        counts.note(status)
    now[0] += 59
    counts.note(504)
    assert counts.lately() == {"429": 1, "503": 2, "504": 1} and counts.total == 4
    now[0] += 2
    assert counts.lately() == {"504": 1} and counts.total == 4


def test_the_page_decides_about_a_candidate(served: Served):
    with signed_in(served, USER) as http:
        assert http.get(f"{PATH}/rollouts").status_code == 403
        promote = {"action": "promote"}
        assert http.post(f"{PATH}/rollouts/m", json=promote).status_code == 403
    with signed_in(served, ADMIN) as http:
        (report,) = http.get(f"{PATH}/rollouts").json()["rollouts"]
        assert (report["model"], report["candidate"], report["state"]) == ("m", "v2", "running")
        (name,) = report["arms"]["candidate"]["replicas"]
        assert name in served.replicas()
        answer = http.post(f"{PATH}/rollouts/m", json={"action": "roll_back"})
        assert answer.json()["rollouts"][0]["state"] == "rolled_back"
        wrong = http.post(f"{PATH}/rollouts/m", json={"action": "x"})
        assert wrong.status_code == 400 and "roll_back" in wrong.json()["error"]["message"]
        assert http.post(f"{PATH}/rollouts/n", json={"action": "promote"}).status_code == 404


def test_the_way_to_the_page(served: Served):
    with served.http() as http:
        assert http.get(f"{PATH}/").status_code == 401
        assert http.get(PATH).headers["location"] == "dashboard/"
        front = http.get("/", headers={"accept": "text/html"})
        assert front.headers["location"] == "dashboard/"
        assert http.get("/v1/models").status_code == 401
        assert http.get(f"{PATH}/feed").status_code == 401
