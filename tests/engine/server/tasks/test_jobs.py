"""Jobs: one request each, answered once, told by GET, by events and by webhooks."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_fakes import FakeClient, Script, http_client, make_app, served, until
from batch_files import batch_of
from batch_process import serving_process
from openai import OpenAI
from openai.types import CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from webhook_receiver import receiving

from jitney.engine.common.errors import ErrorInfo, RequestError
from jitney.engine.common.key_file import digest_key
from jitney.engine.common.ports import free_port
from jitney.engine.common.requests import EngineRequest
from jitney.engine.config import ServerSection
from jitney.engine.server.process.client import OutputListener
from jitney.engine.server.tasks import batch_rows, job_rows, webhooks
from jitney.engine.server.tasks.records import Job, Line, LineOutcome
from jitney.engine.server.tasks.store import TaskStore

CHATS = "/v1/chat/completions"
#: Of one receiver.
MANY = 150
OVER = ("completed", "failed", "cancelled", "expired")


@contextmanager
def serving(
    folder: Path, engine: FakeClient | None = None, **settings: Any
) -> Iterator[httpx.Client]:
    with (
        served(make_app(engine, data_dir=folder, **settings)) as (url, _),
        http_client(url) as http,
    ):
        yield http


def asked(text: str = "hi", **fields: Any) -> dict[str, Any]:
    chat = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
    return {"endpoint": CHATS, "body": chat} | fields


def lengthy(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """What is asked with a long answer."""
    job = asked(text)
    return job | {"body": job["body"] | {"max_tokens": 200, "n": 9} | fields}


def begin(http: httpx.Client, body: dict[str, Any] | None = None, **headers: str) -> dict[str, Any]:
    reply = http.post("/v1/jobs", json=body or asked(), headers=headers)
    assert reply.status_code == 202, reply.text
    assert reply.headers["location"] == f"/v1/jobs/{reply.json()['id']}"
    return reply.json()


def look(http: httpx.Client, id: str) -> dict[str, Any]:
    return http.get(f"/v1/jobs/{id}").json()


def ended(http: httpx.Client, id: str) -> dict[str, Any]:
    until(lambda: look(http, id)["status"] in OVER)
    return look(http, id)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


def test_a_job_is_taken_at_once_and_answered_as_its_route_would(folder: Path):
    with serving(folder, FakeClient(Script("some words"))) as http:
        job = begin(http, asked(metadata={"for": "me"}))
        assert (job["object"], job["status"], job["response"]) == ("job", "queued", None)
        job = ended(http, job["id"])
        assert job["status"] == "completed" and job["metadata"] == {"for": "me"}
        assert job["created_at"] <= job["in_progress_at"] <= job["completed_at"]
        direct = http.post(CHATS, json=asked()["body"]).json()
        answer = ChatCompletion.model_validate(job["response"]["body"])
        assert answer.choices[0].message.content == direct["choices"][0]["message"]["content"]
        assert job["response"]["status_code"] == 200


def test_a_job_may_ask_for_vectors(folder: Path):
    engine = FakeClient(embedding_pooling="mean", embedding_size=2)
    with serving(folder, engine) as http:
        body = {"model": "m", "input": ["a", "bcd"]}
        job = ended(http, begin(http, {"endpoint": "/v1/embeddings", "body": body})["id"])
        assert job["status"] == "completed"
        data = CreateEmbeddingResponse.model_validate(job["response"]["body"]).data
        assert [each.embedding for each in data] == [[1.0, 1.0], [1.0, 3.0]]


def test_a_job_of_a_route_that_streams_unasked_is_answered_whole(folder: Path):
    with serving(folder, FakeClient(Script("some words"))) as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        job = ended(http, begin(http, {"endpoint": "/api/chat", "body": body})["id"])
        assert job["status"] == "completed"
        assert job["response"]["body"]["message"]["content"] == "some words"


def test_a_request_that_its_route_refuses_is_a_failed_job(folder: Path):
    with serving(folder) as http:
        job = ended(http, begin(http, asked() | {"body": {"messages": []}})["id"])
        assert (job["status"], job["response"]["status_code"]) == ("failed", 400)
        assert job["response"]["body"]["error"]["param"] == "messages"


def test_a_refusal_of_the_moment_is_waited_for(folder: Path):
    full = ErrorInfo("queue_full", "full", retry_after=0.01)
    engine = FakeClient(Script("some words", error=full))
    with serving(folder, engine) as http:
        job = begin(http)
        until(lambda: len(engine.requests) >= 2)
        assert look(http, job["id"])["status"] == "in_progress"
        engine.script = Script("some words")
        assert ended(http, job["id"])["status"] == "completed"


class _Picky(FakeClient):
    """Full for whoever asks for "first"."""

    #: How often it was.
    refused: int = 0

    def submit(self, request: EngineRequest, listener: OutputListener) -> None:
        if b"first" in bytes(token for token in request.prompt if token < 256):
            self.refused += 1
            raise RequestError("full", code="queue_full", retry_after=0.01)
        super().submit(request, listener)


def test_a_job_that_is_refused_leaves_its_place_to_others(folder: Path):
    """There is one place, and a job for a model without an engine may be refused for hours."""
    engine = _Picky(Script("some words"), seats=1)
    with serving(folder, engine) as http:
        first = begin(http, asked("first"))
        until(lambda: engine.refused >= 2)
        assert ended(http, begin(http)["id"])["status"] == "completed"
        assert look(http, first["id"])["status"] == "in_progress"


def test_bad_jobs(folder: Path):
    bad: list[tuple[dict[str, Any], str]] = [
        ({"body": {}}, "endpoint"),
        ({"endpoint": CHATS}, "body"),
        ({"endpoint": CHATS, "body": []}, "body"),
        ({"endpoint": "/v1/models", "body": {}}, "endpoint"),
        ({"endpoint": "/v1/jobs", "body": {}}, "endpoint"),
        (asked(window="1y"), "window"),
        (asked(window="8d"), "window"),
        (asked(metadata={"a": 5}), "metadata"),
        (asked(webhook_url="http://127.0.0.1:9/x"), "webhook_url"),
        (asked() | {"body": {"stream": True}}, "body.stream"),
    ]
    with serving(folder) as http:
        for body, param in bad:
            reply = http.post("/v1/jobs", json=body)
            assert reply.status_code == 400, reply.text
            assert reply.json()["error"]["param"].startswith(param), body
        assert not http.get("/v1/jobs").json()["data"]


def test_a_request_that_is_sent_again_is_the_same_job(folder: Path):
    engine = FakeClient(Script("some words"))
    with serving(folder, engine) as http:
        first = begin(http, asked("a"), **{"Idempotency-Key": "k1"})
        ended(http, first["id"])
        again = begin(http, asked("a"), **{"Idempotency-Key": "k1"})
        assert again["id"] == first["id"] and again["status"] == "completed"
        assert len(engine.requests) == 1
        other = http.post("/v1/jobs", json=asked("b"), headers={"Idempotency-Key": "k1"})
        assert other.status_code == 409
        assert other.json()["error"]["code"] == "idempotency_key_used"
        assert begin(http, asked("a"), **{"Idempotency-Key": "k2"})["id"] != first["id"]
        for bad in ("", "x" * 256):
            reply = http.post("/v1/jobs", json=asked(), headers={"Idempotency-Key": bad})
            assert reply.json()["error"]["param"] == "idempotency-key"


def test_two_of_the_same_at_once_are_one_job(folder: Path):
    """The second one comes while the first is being written."""
    engine = FakeClient(Script("some words"))
    with serving(folder, engine) as http:
        begin(http)
        ids: list[str] = []

        def send() -> None:
            ids.append(begin(http, asked("a"), **{"Idempotency-Key": "k"})["id"])

        threads = [threading.Thread(target=send) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(ids) == 8 and len(set(ids)) == 1
        ended(http, ids[0])
        assert len(engine.requests) == 2


def test_keys_do_not_see_each_others_jobs(folder: Path):
    keys = tuple(digest_key(key) for key in "ab")
    with serving(folder, api_keys=keys) as http:
        mine, yours = ({"authorization": f"Bearer {key}"} for key in "ab")
        job = begin(http, asked(), **mine, **{"Idempotency-Key": "k"})
        path = f"/v1/jobs/{job['id']}"
        for suffix in ("", "/events"):
            assert http.get(path + suffix, headers=yours).status_code == 404
        assert http.post(path + "/cancel", headers=yours).status_code == 404
        assert not http.get("/v1/jobs", headers=yours).json()["data"]
        other = begin(http, asked(), **yours, **{"Idempotency-Key": "k"})
        assert other["id"] != job["id"]
        [listed] = http.get("/v1/jobs", headers=mine).json()["data"]
        assert listed["id"] == job["id"]


def test_a_job_can_be_cancelled(folder: Path):
    engine = FakeClient(Script(hang=True))
    with serving(folder, engine) as http:
        job = begin(http)
        until(lambda: engine.open)
        reply = http.post(f"/v1/jobs/{job['id']}/cancel").json()
        assert reply["status"] == "cancelled" and reply["response"] is None
        until(lambda: not engine.open)
        engine.script = Script("some words")
        done = ended(http, begin(http)["id"])
        late = http.post(f"/v1/jobs/{done['id']}/cancel")
        assert (late.status_code, late.json()["error"]["code"]) == (400, "job_ended")


def test_a_job_whose_time_is_up_expires(folder: Path):
    with serving(folder, FakeClient(Script(hang=True))) as http:
        job = ended(http, begin(http, asked(window="1s"))["id"])
        assert job["status"] == "expired" and job["expired_at"] >= job["expires_at"]


def test_a_key_has_a_limited_number_under_way(folder: Path):
    with serving(folder, FakeClient(Script(hang=True)), key_jobs=2) as http:
        first = begin(http)
        begin(http)
        reply = http.post("/v1/jobs", json=asked())
        assert reply.status_code == 429 and "retry-after" in reply.headers
        http.post(f"/v1/jobs/{first['id']}/cancel")
        begin(http)


def events(http: httpx.Client, id: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a job's stream of events says, to its end."""
    with http.stream("GET", f"/v1/jobs/{id}/events", timeout=30) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        name = ""
        for text in reply.iter_lines():
            if text.startswith("event: "):
                name = text.removeprefix("event: ")
            elif text.startswith("data: "):
                yield name, json.loads(text.removeprefix("data: "))


def test_each_change_is_an_event(folder: Path):
    engine = FakeClient(Script(hang=True), seats=1)
    with serving(folder, engine) as http:
        first, second = begin(http), begin(http)
        until(lambda: engine.open)
        stream = events(http, second["id"])
        assert next(stream)[0] == "job.queued"
        engine.script = Script("some words")
        http.post(f"/v1/jobs/{first['id']}/cancel")
        assert next(stream)[0] == "job.in_progress"
        name, job = next(stream)
        assert name == "job.completed" and job == look(http, second["id"])
        assert next(stream, None) is None, "the stream ends with the job"
        assert [name for name, _ in events(http, first["id"])] == ["job.cancelled"]


def test_a_silent_stream_of_events_shows_that_it_lives_and_ends_with_the_server(folder: Path):
    engine = FakeClient(Script(hang=True))
    with (
        serving(folder, engine, comment_s=0.05) as http,
        http.stream("GET", f"/v1/jobs/{begin(http)['id']}/events") as reply,
    ):
        texts = reply.iter_lines()
        until(lambda: next(texts).startswith(":"))


def test_every_end_is_taken_once_by_a_receiver_that_often_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """The answer comes with it, signed as OpenAI's client checks it."""
    monkeypatch.setattr(webhooks, "_PAUSES_S", (0.05,) * 20)
    engine = FakeClient(Script("some words"), seats=32)
    with receiving(lambda number: number % 3 == 0) as hooks:
        limits: dict[str, Any] = {"webhook_prefixes": (hooks.url,), "webhook_secret": "any text"}
        with serving(folder, engine, **limits) as http:
            ids = [begin(http, asked(f"j{i}", webhook_url=hooks.url))["id"] for i in range(MANY)]
            until(lambda: len(hooks.taken) == MANY, 200)
        assert len({message.key for message in hooks.taken}) == MANY, "none is taken twice"
        assert len(hooks.came) >= MANY * 1.4, "every third came again"
        [trouble] = engine.history.incidents.troubles
        assert trouble.code == "webhook" and trouble.count == len(hooks.came) - MANY
        told = {json.loads(message.body)["data"]["id"] for message in hooks.taken}
        assert told == set(ids)
        last = hooks.taken[-1]
        event = json.loads(last.body)
        assert event["type"] == "job.completed" and event["id"] == last.key
        ChatCompletion.model_validate(event["data"]["response"]["body"])
        client = OpenAI(api_key="none", base_url="http://127.0.0.1")
        client.webhooks.verify_signature(last.body.decode(), last.headers, secret="any text")


def test_a_server_that_is_killed_goes_on_with_its_jobs(folder: Path):
    port = free_port()
    with http_client(f"http://127.0.0.1:{port}") as http:
        with serving_process(folder, port) as process:
            ids = [begin(http, asked(f"j{i}"))["id"] for i in range(40)]
            process.send_signal(signal.SIGKILL)
            process.wait(120)
        with serving_process(folder, port):
            jobs = [ended(http, id) for id in ids]
    assert {job["status"] for job in jobs} == {"completed"}


def test_an_answer_has_a_largest_size(folder: Path):
    """One that is longer ends its job with an error, and is not kept in memory to its end."""
    engine = FakeClient(Script("some words " * 400))
    with serving(folder, engine, answer_limit=2000) as http:
        job = ended(http, begin(http, lengthy())["id"])
        assert (job["status"], job["response"]["status_code"]) == ("failed", 400)
        assert job["response"]["body"]["error"]["code"] == "answer_too_large"
        engine.script = Script("some words")
        assert ended(http, begin(http)["id"])["status"] == "completed"


def test_lists_have_no_answers(folder: Path):
    """They are not read either: together they may be longer than the memory."""
    with serving(folder, FakeClient(Script("some words"))) as http:
        ids = [begin(http)["id"] for _ in range(3)]
        jobs = [ended(http, id) for id in ids]
        listed = http.get("/v1/jobs").json()["data"]
        for job in jobs:
            assert job.pop("response")["status_code"] == 200
        assert listed == jobs[::-1]
    store = TaskStore(folder / "batches.sqlite3")
    page, _ = store.page(Job, page_owner(store), after="", limit=9)
    assert len(page) == 3 and all(job.answer is None for job in page)


def page_owner(store: TaskStore) -> str:
    return store.db.execute("SELECT owner FROM jobs").fetchone()[0]


def test_jobs_and_their_answers_count_in_the_bytes_of_their_key(folder: Path):
    """The oldest that are over make room for new ones; where files are in the way, nothing does."""
    engine = FakeClient(Script("some words " * 200))
    with serving(folder, engine, key_file_bytes=12_000) as http:
        ids = [begin(http, lengthy())["id"]]
        size = len(json.dumps(ended(http, ids[0])["response"]))
        assert 2_000 < size < 6_000
        for _ in range(6):
            ids.append(begin(http, lengthy())["id"])
            assert ended(http, ids[-1])["status"] == "completed"
        kept = [job["id"] for job in http.get("/v1/jobs").json()["data"]]
        assert kept == ids[: -len(kept) - 1 : -1] and 2 <= len(kept) < 6
        taken = size * len(kept)
        form = {"purpose": (None, "batch"), "file": ("a", b"x" * 11_000)}
        reply = http.post("/v1/files", files=form)
        assert reply.json()["error"]["code"] == "storage_full", "answers count for files too"
        room = 12_000 - taken - size // 2
        form["file"] = ("a", b"x" * room)
        assert http.post("/v1/files", files=form).status_code == 200


def test_what_is_to_be_told_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(webhooks, "_LONG_BYTES", 50)
    monkeypatch.setattr(webhooks, "_LONG_BYTES_AT_ONCE", 150)
    store = TaskStore(tmp_path / "s.sqlite3")
    for number in range(3):
        _add(store, f"job_{number}")
        assert job_rows.finish(store, f"job_{number}", "completed", b"9" * 100, 4)
    under_way = webhooks._Sending()
    assert [each.id for each in webhooks._due(store, 9.0, under_way)] == ["job_0", "job_1"]
    assert not webhooks._due(store, 9.0, under_way)
    del under_way["job_0"]
    assert [each.id for each in webhooks._due(store, 9.0, under_way)] == ["job_0"]


def _add(store: TaskStore, id: str) -> None:
    job = Job(id, "me", CHATS, {}, "https://example.org", 1, 9)
    job_rows.add(store, job, ServerSection(), body=b"{}", repeat_key=None, digest="d")


def test_a_job_ends_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job_rows, "_KEPT_JOBS", 0)
    store = TaskStore(tmp_path / "s.sqlite3")
    _add(store, "job_1")
    assert job_rows.begin(store, "job_1", 2) == b"{}" == job_rows.begin(store, "job_1", 3)
    assert job_rows.finish(store, "job_1", "completed", b"{}", 4)
    assert not job_rows.finish(store, "job_1", "cancelled", None, 5)
    assert job_rows.begin(store, "job_1", 6) is None
    found = store.find(Job, "job_1", "me")
    assert found and found.status == "completed" and found.answer == b"{}"
    assert store.find(Job, "job_1", "you") is None and not store.unfinished()
    [due] = webhooks._due(store, 9.0, webhooks._Sending())
    assert (due.id, due.lane) == ("job_1", ("me", "example.org"))
    _add(store, "job_2")
    assert store.find(Job, "job_1", "me"), "its end has not been told"
    webhooks._tried(store, due, None)
    _add(store, "job_3")
    assert store.find(Job, "job_1", "me") is None


def test_tables_of_before_get_what_is_missing(tmp_path: Path):
    store = TaskStore(tmp_path / "s.sqlite3")
    batch = batch_of("b")
    store.insert(batch)
    batch_rows.add_lines(store, "b", [Line(1, "one", 0, 1)])
    assert batch_rows.answer(store, batch, 1, LineOutcome.COMPLETED, b"12345")
    store.db.executescript(
        "DROP TABLE jobs; ALTER TABLE batches DROP COLUMN answer_bytes; PRAGMA user_version = 1"
    )
    store.close()
    store = TaskStore(tmp_path / "s.sqlite3")
    assert [task.id for task in store.unfinished()] == ["b"] and store.n_bytes("me") == 5
