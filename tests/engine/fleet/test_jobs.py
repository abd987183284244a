"""Jobs at a fleet's endpoint: kept there, answered by whichever engine can."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from api_fakes import FakeClient, Script, until
from fleet_engines import (
    CHAT,
    ROUND_ROBIN,
    FakeEngine,
    Served,
    engines,
    fleet_of,
    serving,
    toml,
)
from openai.types.chat import ChatCompletion

from jitney.engine.common.errors import RequestError
from jitney.engine.common.key_file import digest_key
from jitney.engine.server.tasks.concurrency import ConcurrencyLimit

CHATS = "/v1/chat/completions"
OVER = ("completed", "failed", "cancelled", "expired")


def begin(http: httpx.Client, endpoint: str = CHATS, **more: Any) -> str:
    reply = http.post("/v1/jobs", json={"endpoint": endpoint, "body": CHAT} | more)
    assert reply.status_code == 202, reply.text
    return reply.json()["id"]


def ended(http: httpx.Client, id: str) -> dict[str, Any]:
    def look() -> dict[str, Any]:
        return http.get(f"/v1/jobs/{id}").json()

    until(lambda: look()["status"] in OVER)
    return look()


def keyed(served: Served, key: str) -> httpx.Client:
    return served.http(headers={"authorization": f"Bearer {key}"})


def test_a_job_is_answered_as_by_the_route_that_it_names(tmp_path: Path):
    fakes = [FakeEngine(), FakeEngine()]
    with serving(tmp_path, *fakes, model=ROUND_ROBIN, data_dir=tmp_path / "d") as (_, http):
        jobs = [ended(http, begin(http)) for _ in range(4)]
        direct = http.post(CHATS, json=CHAT).json()
    for job in jobs:
        assert (job["status"], job["response"]["status_code"]) == ("completed", 200)
        ChatCompletion.model_validate(job["response"]["body"])
        assert job["response"]["body"]["choices"] == direct["choices"]
    assert all(fake.client.requests for fake in fakes), "both have had some"


def test_a_job_that_its_engine_dies_with_is_answered_by_another(tmp_path: Path):
    fakes = [FakeEngine(dies_after=0), FakeEngine()]
    with serving(tmp_path, *fakes, model=ROUND_ROBIN, data_dir=tmp_path / "d") as (_, http):
        ids = [begin(http) for _ in range(4)]
        assert {ended(http, id)["status"] for id in ids} == {"completed"}
        assert fakes[0].heads, "the first one was asked"


def test_what_no_model_can_answer_is_a_failed_job(tmp_path: Path):
    with serving(tmp_path, FakeEngine(), data_dir=tmp_path / "d") as (_, http):
        job = ended(http, begin(http, body=CHAT | {"model": "none"}))
        assert (job["status"], job["response"]["status_code"]) == ("failed", 404)
        for endpoint in ("/v1/models", "/tokenize", "/v1/files"):
            refused = http.post("/v1/jobs", json={"endpoint": endpoint, "body": CHAT})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "endpoint")


def test_jobs_wait_for_engines_also_over_a_restart(tmp_path: Path):
    with (
        fleet_of(tmp_path, toml(["http://127.0.0.1:1"]), data_dir=tmp_path / "d") as served,
        served.http() as http,
    ):
        ids = [begin(http) for _ in range(3)]
        assert http.get(f"/v1/jobs/{ids[0]}").json()["status"] == "queued"
    with serving(tmp_path, FakeEngine(), data_dir=tmp_path / "d") as (_, http):
        assert {ended(http, id)["status"] for id in ids} == {"completed"}


def test_the_engine_is_asked_with_a_key_of_the_fleets_and_nobody_sees_anothers_job(tmp_path: Path):
    keys = {"admin_keys": (digest_key("own"),)}
    with (
        engines(FakeEngine(settings=keys)) as fakes,
        fleet_of(
            tmp_path,
            toml([fakes[0].url]),
            key="own",
            api_keys=(digest_key("first"), digest_key("second")),
            data_dir=tmp_path / "d",
        ) as served,
        keyed(served, "first") as first,
        keyed(served, "second") as second,
    ):
        served.wait_ready(fakes[0].name)
        id = begin(first)
        assert ended(first, id)["status"] == "completed"
        assert second.get(f"/v1/jobs/{id}").status_code == 404
        assert second.get("/v1/jobs").json()["data"] == []
        assert fakes[0].heads[-1]["authorization"] == "Bearer own"


def test_jobs_have_as_many_places_as_the_engines_have_seats(tmp_path: Path):
    hangs = FakeClient(Script(hang=True), seats=2)
    with serving(tmp_path, FakeEngine(hangs), data_dir=tmp_path / "d") as (_, http):
        for _ in range(8):
            begin(http)
        until(lambda: len(hangs.requests) == 2)
        statuses = [job["status"] for job in http.get("/v1/jobs").json()["data"]]
        assert sorted(statuses) == ["in_progress"] * 2 + ["queued"] * 6
        assert len(hangs.requests) == 2


@dataclass
class Seats:
    """A server whose engines come and go. seats: of those that are there."""

    internal_seats: int
    most_of_key: int = 0

    def unready(self) -> RequestError | None:
        return None if self.internal_seats else RequestError("nobody is there", code="loading")


async def test_places_grow_with_the_engines_and_a_key_has_half_of_its_own():
    host: Any = Seats(2)
    places = ConcurrencyLimit(host)
    waiting = [asyncio.create_task(places.acquire("a")) for _ in range(6)]
    await asyncio.sleep(0.01)
    assert sum(task.done() for task in waiting) == 2
    host.internal_seats = 4
    places.release("a")
    await asyncio.sleep(0.01)
    assert sum(task.done() for task in waiting) == 5, "one has left, two places came"
    for task in waiting:
        task.cancel()
    host = Seats(8, most_of_key=4)
    limited = ConcurrencyLimit(host)
    tasks = [asyncio.create_task(limited.acquire(key)) for key in "aaaab"]
    await asyncio.sleep(0.01)
    assert [task.done() for task in tasks] == [True, True, False, False, True]
    for task in tasks:
        task.cancel()
