"""Files and batches at a fleet's endpoint: kept there, their lines answered in the background by
whichever engine can.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from api_fakes import FakeClient, Script, until
from batch_files import CHATS, answers, begin, client_of, ended, line
from fleet_engines import CHAT, FakeEngine, Served, engines, fleet_of, toml
from openai import OpenAI
from openai.types.chat import ChatCompletion

from jitney.engine.common.errors import ErrorInfo
from jitney.engine.common.key_file import digest_key

LINES = [line(f"r{number}", CHATS, max_tokens=20) for number in range(60)]


@contextmanager
def serving(
    folder: Path,
    *fakes: FakeEngine,
    model: str = "",
    fleet: str = "",
    key: str = "",
    **settings: Any,
) -> Iterator[tuple[Served, OpenAI]]:
    """A fleet over these engines, and a client of it. model, fleet: more lines of its file."""
    text = toml([fake.url for fake in fakes], model, fleet)
    given: dict[str, Any] = {"data_dir": folder / "data"} | settings
    with fleet_of(folder, text, key, **given) as served:
        served.wait_ready(*(fake.name for fake in fakes))
        yield served, client_of(served.url)


def asked(*fakes: FakeEngine) -> int:
    """Requests that these engines had."""
    return sum(len(fake.client.requests) for fake in fakes)


def test_a_batch_is_answered_by_all_engines_in_the_background(tmp_path: Path):
    with (
        engines(FakeEngine(), FakeEngine()) as fakes,
        serving(tmp_path, *fakes) as (served, client),
    ):
        batch = begin(client, LINES, endpoint=CHATS, metadata={"for": "me"})
        assert batch.status in ("validating", "in_progress") and batch.metadata == {"for": "me"}
        batch = ended(client, batch.id)
        assert batch.status == "completed" and batch.error_file_id is None
        counts = batch.request_counts
        assert counts and (counts.total, counts.completed, counts.failed) == (60, 60, 0)
        found = answers(client, batch.output_file_id)
        assert list(found) == [each["custom_id"] for each in LINES], "in the order of the file"
        for answer in found.values():
            assert answer["error"] is None and answer["response"]["status_code"] == 200
            body = ChatCompletion.model_validate(answer["response"]["body"])
            assert body.choices[0].message.content == "Hello, wörld!"
        first_bytes = "jitney_fleet_first_byte_seconds_count"
        assert first_bytes not in served.fleet.metrics.render().decode(), "nobody waited"
    assert asked(*fakes) == 60
    for fake in fakes:
        assert fake.client.requests, "both have had some"
        assert all(request.background for request in fake.client.requests)
        assert {head["x-jitney-background"] for head in fake.heads} == {"1"}


def test_an_engine_that_dies_in_the_middle_loses_no_line(tmp_path: Path):
    gate = threading.Event()
    slow = FakeEngine(FakeClient(Script("slowly", gate=gate), seats=4))
    with engines(slow, FakeEngine()) as fakes, serving(tmp_path, *fakes) as (served, client):
        batch = begin(client, LINES, endpoint=CHATS)
        until(lambda: bool(slow.client.open))
        slow.dies_after = 0
        gate.set()
        batch = ended(client, batch.id)
        assert batch.status == "completed" and batch.error_file_id is None
        assert len(answers(client, batch.output_file_id)) == 60
        assert served.replicas()[slow.name].lost


def test_an_engine_that_drains_gives_its_lines_to_others(tmp_path: Path):
    """At once, and that is no death of its."""
    going = FakeEngine(FakeClient(Script(hang=True), seats=4))
    with engines(going, FakeEngine()) as fakes, serving(tmp_path, *fakes) as (served, client):
        batch = begin(client, LINES, endpoint=CHATS)
        until(lambda: len(going.client.open) == 4)
        going.service.begin_drain()
        batch = ended(client, batch.id)
        assert batch.request_counts and batch.request_counts.completed == 60
        assert not served.replicas()[going.name].lost


def test_lines_wait_for_engines_and_a_restart_goes_on(tmp_path: Path):
    """Those that are answered are not asked again."""
    fake = FakeEngine(FakeClient(seats=2))
    fake.client.scripts = [Script("a"), Script("b")]
    fake.client.script = Script(hang=True)
    again = FakeEngine()
    with engines(fake, again):
        with serving(tmp_path, fake) as (served, client):
            batch = begin(client, LINES[:8], endpoint=CHATS)
            until(lambda: len(fake.client.requests) == 4)
            served.fleet.begin_drain()
            assert not served.fleet._open._count, "a drain does not wait for a batch"
            until(lambda: not fake.client.open)
        with fleet_of(tmp_path, toml(["http://127.0.0.1:1"]), data_dir=tmp_path / "data") as served:
            client = client_of(served.url)
            assert client.batches.retrieve(batch.id).status == "in_progress"
        with serving(tmp_path, again) as (_, client):
            batch = ended(client, batch.id)
            assert batch.status == "completed"
            assert len(answers(client, batch.output_file_id)) == 8
    assert len(again.client.requests) == 6


def test_a_batch_is_cancelled(tmp_path: Path):
    fake = FakeEngine(FakeClient(Script(hang=True), seats=2))
    fake.client.scripts = [Script("a"), Script("b")]
    with engines(fake) as fakes, serving(tmp_path, *fakes) as (served, client):
        batch = begin(client, LINES[:6], endpoint=CHATS)
        until(lambda: len(fake.client.requests) == 4)
        assert len(fake.client.open) == 2, "as many at a time as there are seats"
        client.batches.cancel(batch.id)
        batch = ended(client, batch.id)
        assert batch.status == "cancelled"
        assert set(answers(client, batch.output_file_id)) == {"r0", "r1"}
        errors = answers(client, batch.error_file_id)
        assert {name: each["error"]["code"] for name, each in errors.items()} == dict.fromkeys(
            ("r2", "r3", "r4", "r5"), "batch_cancelled"
        )
        until(lambda: not fake.client.open)
        until(lambda: not served.replicas()[fake.name].lines)


def test_people_are_answered_while_lines_fill_every_seat(tmp_path: Path):
    """And what engines say of lines is said of no person's request."""
    fakes = [FakeEngine(FakeClient(Script(hang=True), seats=2)) for _ in range(2)]
    with engines(*fakes), serving(tmp_path, *fakes) as (served, client), served.http() as http:
        begin(client, LINES[:20], endpoint=CHATS)
        until(lambda: asked(*fakes) == 4)
        replicas = served.replicas()
        assert [each.lines for each in replicas.values()] == [2, 2], "where seats are left"
        for fake in fakes:
            fake.client.script = Script("Here.")
        for _ in range(5):
            answer = http.post(CHATS, json=CHAT)
            assert answer.json()["choices"][0]["message"]["content"] == "Here."
        for replica in replicas.values():
            until(lambda here=replica: not here.open)
            assert (replica.load, replica.open, replica.predicted_wait) == (0, 0, 0.0)
        assert [request.background for fake in fakes for request in fake.client.requests].count(
            False
        ) == 5
        shown = http.get("/fleet/replicas").json()["models"]["m"]
        assert [(each["load"], each["background"]) for each in shown] == [(0, 2), (0, 2)]


def test_a_refusal_of_the_moment_is_waited_for_and_is_no_news_for_people(tmp_path: Path):
    fake = FakeEngine(FakeClient(Script("ok")))
    full = ErrorInfo("queue_full", "too much waits in the background", retry_after=0.05)
    gone = ErrorInfo("restarting", "a new engine is being started", retry_after=0.05)
    fake.client.scripts = [Script(error=full), Script(error=gone)]
    with engines(fake) as fakes, serving(tmp_path, *fakes) as (served, client):
        batch = ended(client, begin(client, LINES[:1], endpoint=CHATS).id)
        assert batch.request_counts and batch.request_counts.completed == 1
        assert len(fake.client.requests) == 3
        assert served.replicas()[fake.name].full_until == 0.0


def test_a_model_without_engines_keeps_no_other_waiting(tmp_path: Path):
    lost = '[models.lost]\nurls = ["http://127.0.0.1:1"]'
    fake = FakeEngine(FakeClient(seats=2))
    with engines(fake) as fakes, serving(tmp_path, *fakes, model=lost) as (_, client):
        lines = [line(f"r{number}", CHATS, model="lost") for number in range(8)]
        first = begin(client, lines, endpoint=CHATS)
        until(lambda: client.batches.retrieve(first.id).status == "in_progress")
        batch = ended(client, begin(client, LINES[:8], endpoint=CHATS).id)
        assert batch.request_counts and batch.request_counts.completed == 8
        counts = client.batches.retrieve(first.id).request_counts
        assert counts and (counts.completed, counts.failed) == (0, 0)


KEYS: dict[str, Any] = {"api_keys": (digest_key("user"),), "admin_keys": (digest_key("boss"),)}


def test_only_a_key_of_an_administrators_brings_lines_to_an_engine(tmp_path: Path):
    fake = FakeEngine(settings=KEYS)
    with engines(fake) as fakes:
        with serving(tmp_path, *fakes, key="boss") as (_, client):
            batch = ended(client, begin(client, LINES[:2], endpoint=CHATS).id)
            assert batch.request_counts and batch.request_counts.completed == 2
        with serving(tmp_path, *fakes, key="user") as (_, client):
            batch = ended(client, begin(client, LINES[:2], endpoint=CHATS).id)
            for error in answers(client, batch.error_file_id).values():
                assert error["response"]["status_code"] == 403
                assert error["response"]["body"]["error"]["code"] == "admin_key_needed"
    assert len(fake.client.requests) == 2
    assert {head["authorization"] for head in fake.heads[:2]} == {"Bearer boss"}


def test_a_client_cannot_put_its_requests_into_the_background(tmp_path: Path):
    fake = FakeEngine()
    with (
        engines(fake) as fakes,
        serving(tmp_path, *fakes, **KEYS) as (served, _),
        served.http(headers={"x-jitney-background": "1"}) as http,
    ):
        for key, status in (("user", 403), ("boss", 200)):
            headers = {"authorization": f"Bearer {key}"}
            assert http.post(CHATS, json=CHAT, headers=headers).status_code == status
        assert [request.background for request in fake.client.requests] == [True]


def test_lines_count_against_the_limits_of_their_key(tmp_path: Path):
    """At most half of what it may have open at all engines together."""
    fakes = [FakeEngine(FakeClient(Script(hang=True), seats=8)) for _ in range(2)]
    limit = "key_max_concurrent = 6"
    with engines(*fakes), serving(tmp_path, *fakes, fleet=limit) as (_, client):
        batch = begin(client, LINES[:12], endpoint=CHATS)
        until(lambda: asked(*fakes) == 3)
        client.batches.cancel(batch.id)
        ended(client, batch.id)
    assert asked(*fakes) == 3


COMPOSED = """
[models.smart]
kind = "cascade"
small = "m"
large = "m"
threshold = 0.999

[models.panel]
kind = "ensemble"
models = ["m", "smart"]

[models.notes]
kind = "pipeline"
[[models.notes.stages]]
kind = "generate"
name = "draft"
model = "m"
prompt = "Notes on {{ question }}:"
[[models.notes.stages]]
kind = "generate"
name = "answer"
model = "smart"
prompt = "{{ draft.text }}|{{ question }}"
"""


@pytest.mark.parametrize("name", ["smart", "panel", "notes"])
def test_models_of_models_answer_lines_and_all_their_parts_give_way(tmp_path: Path, name: str):
    lines = [line(f"r{number}", CHATS, model=name) for number in range(5)]
    with (
        engines(FakeEngine(), FakeEngine()) as fakes,
        serving(tmp_path, *fakes, model=COMPOSED) as (_, client),
    ):
        batch = ended(client, begin(client, lines, endpoint=CHATS).id)
        assert batch.status == "completed" and batch.error_file_id is None
        for answer in answers(client, batch.output_file_id).values():
            assert answer["response"]["body"]["jitney"]["kind"]
    assert asked(*fakes) >= 10
    assert all(request.background for fake in fakes for request in fake.client.requests)
