"""Files and batches, as OpenAI's own client sees them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api_fakes import FakeClient, Script, call, http_client, make_app, served, until
from batch_files import CHATS, answers, batch_of, begin, client_of, ended, jsonl, line
from openai import OpenAI
from openai.types.chat import ChatCompletion
from webhook_receiver import dripping, receiving

from jitney.engine.common.errors import retry_after_s
from jitney.engine.common.key_file import digest_key
from jitney.engine.server.http.routes import ROUTES
from jitney.engine.server.http.routing import RouteTable
from jitney.engine.server.tasks import batch_rows, webhooks
from jitney.engine.server.tasks.execution import LineExecutor
from jitney.engine.server.tasks.records import Batch, Line, LineOutcome, StoredFile
from jitney.engine.server.tasks.store import StorageFull, TaskStore
from jitney.engine.server.tasks.webhook_targets import is_allowed


@contextmanager
def serving(
    folder: Path, engine: FakeClient | None = None, key: str = "none", **settings: Any
) -> Iterator[OpenAI]:
    """A server with its files in a folder, and a client of it."""
    app = make_app(engine, data_dir=folder, **settings)
    with served(app) as (url, _):
        yield client_of(url, key)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


def test_a_file_is_kept_listed_read_and_deleted(folder: Path):
    content = os.urandom(3 << 20)
    with serving(folder) as client:
        file = client.files.create(file=("../../in.jsonl", content), purpose="batch")
        assert (file.filename, file.bytes, file.purpose) == ("in.jsonl", len(content), "batch")
        assert client.files.retrieve(file.id) == file
        assert [each.id for each in client.files.list()] == [file.id]
        assert client.files.content(file.id).content == content
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
        assert not list((folder / "files").iterdir())


def test_slow_uploads_of_one_key_leave_room_for_others(folder: Path):
    keys = (digest_key("ann"), digest_key("bob"))
    head = (
        b"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ann\r\n"
        b"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 1000\r\n\r\n--x\r\n"
    )
    app = make_app(data_dir=folder, api_keys=keys)
    with served(app) as (url, port):
        ann, bob = client_of(url, "ann"), client_of(url, "bob")
        uploads = app.state.service.internal_requests
        with contextlib.ExitStack() as slow:
            for _ in range(8):
                sock = slow.enter_context(socket.create_connection(("127.0.0.1", port)))
                sock.sendall(head)
            until(lambda: uploads._uploads == 8)
            with pytest.raises(openai.RateLimitError):
                ann.files.create(file=("a", b"x"), purpose="batch")
            assert bob.files.create(file=("a", b"x"), purpose="batch").bytes == 1
        until(lambda: not uploads._uploads)
        assert ann.files.create(file=("a", b"x"), purpose="batch").bytes == 1


def test_lists_come_in_pages(folder: Path):
    with serving(folder) as client:
        ids = [client.files.create(file=(f"{i}", b"x"), purpose="batch").id for i in range(5)]
        assert [file.id for file in client.files.list(limit=2)] == ids[::-1]
        assert [file.id for file in client.files.list(limit=2, order="asc")] == ids
        first = client.files.list(limit=2)
        assert first.has_more and [file.id for file in first.data] == ids[:2:-1]
        assert not client.files.list(after=ids[0]).data
        assert not client.files.list(purpose="batch_output").data


#: The type of a body, the body, and the status and the field of the refusal.
BAD_UPLOADS: tuple[tuple[str, Any, int, str | None], ...] = (
    ("multipart/form-data; boundary=x", b"", 400, None),
    ("multipart/form-data; boundary=x", b"--y\r\n", 400, None),
    ("multipart/form-data; boundary=x", b"--x\r\n\r\n", 400, None),
    ("multipart/form-data", b"--x--\r\n", 415, None),
    ("multipart/form-data;", b"--x--\r\n", 400, None),
    ("application/json", b"{}", 415, None),
    ("FORM", {"purpose": "batch"}, 400, "file"),
    ("FORM", {"purpose": "batch", "file": ("a", b"")}, 400, "file"),
    ("FORM", {"purpose": "assistants", "file": ("a", b"x")}, 400, "purpose"),
    ("FORM", {"file": ("a", b"x")}, 400, "purpose"),
    ("FORM", {"purpose": "batch", "file": ("..", b"x"), "long": "x" * 2000}, 400, "long"),
    (
        "FORM",
        {"purpose": "batch", "file": ("a", b"x"), "expires_after[seconds]": "1"},
        400,
        "expires_after",
    ),
)


def test_bad_uploads(folder: Path):
    with serving(folder) as client, http_client(str(client.base_url)) as http:
        for content_type, body, status, param in BAD_UPLOADS:
            if content_type == "FORM":
                files = {name: value for name, value in body.items() if name == "file"}
                fields = {name: (None, value) for name, value in body.items() if name != "file"}
                reply = http.post("files", files=fields | files)
            else:
                reply = http.post("files", content=body, headers={"content-type": content_type})
            assert reply.status_code == status, (body, reply.text)
            assert reply.json()["error"]["param"] == param, body
            assert not client.files.list().data
            left = list((folder / "files").iterdir()) if folder.exists() else []
            assert not left, "nothing stays of it"


def test_files_are_bounded_in_size_and_number(folder: Path):
    limits: dict[str, Any] = {"file_limit": 100_000, "key_files": 3, "key_file_bytes": 200_000}
    with serving(folder, **limits) as client:
        with pytest.raises(openai.APIStatusError) as refused:
            client.files.create(file=("a", b"x" * 200_000), purpose="batch")
        assert refused.value.status_code == 413
        for _ in range(2):
            client.files.create(file=("a", b"x" * 90_000), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="key_file_bytes"):
            client.files.create(file=("a", b"x" * 90_000), purpose="batch")
        client.files.create(file=("a", b"x"), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="key_files"):
            client.files.create(file=("a", b"x"), purpose="batch")
        assert len(list((folder / "files").iterdir())) == 3


@pytest.mark.parametrize("limit", [20_000, 300_000], ids=["one block", "several"])
def test_the_limit_is_that_of_the_file_and_not_of_the_form(folder: Path, limit: int):
    with serving(folder, file_limit=limit) as client:
        kept = client.files.create(file=("a", b"x" * limit), purpose="batch")
        assert kept.bytes == limit
        with pytest.raises(openai.APIStatusError, match=f"at most {limit} bytes") as refused:
            client.files.create(file=("a", b"x" * (limit + 1)), purpose="batch")
        assert refused.value.status_code == 413 and refused.value.param == "file"
        assert [file.id for file in client.files.list()] == [kept.id]
        assert [path.name for path in (folder / "files").iterdir()] == [kept.id]


def test_a_client_that_leaves_in_the_middle_leaves_nothing(folder: Path, caplog: Any):
    form = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nabc'
    headers = {"content-type": "multipart/form-data; boundary=x"}
    messages = [{"type": "http.request", "body": form, "more_body": True}]

    async def leave() -> int:
        app = make_app(data_dir=folder)
        reply = await call(app, "/v1/files", headers=headers, messages=messages, leave_after=0.01)
        await app.state.service.internal_requests.close()
        return reply.status

    assert asyncio.run(leave()) == 400
    assert not list((folder / "files").iterdir())
    assert "Traceback" not in caplog.text


def test_a_slow_upload_is_not_waited_for(folder: Path):
    def drip() -> Iterator[bytes]:
        yield b"--x\r\n"
        time.sleep(1.5)
        yield b"\r\n"

    with (
        serving(folder, read_timeout_s=0.2) as client,
        http_client(str(client.base_url)) as http,
    ):
        headers = {"content-type": "multipart/form-data; boundary=x"}
        try:
            status = http.post("files", content=drip(), headers=headers).status_code
        except httpx.TransportError:
            status = 408  # the connection was closed while the client still wrote
        assert status == 408


def test_every_line_is_answered_by_the_route_that_it_names(folder: Path):
    engine = FakeClient(Script(text="Hi", numbered=True))
    lines = [line(f"r{i}", CHATS, n=2, max_tokens=9) for i in range(40)]
    with serving(folder, engine) as client:
        batch = begin(client, lines, endpoint=CHATS, metadata={"for": "me"})
        assert batch.status in ("validating", "in_progress") and batch.metadata == {"for": "me"}
        batch = ended(client, batch.id)
        assert batch.status == "completed" and batch.error_file_id is None
        counts = batch.request_counts
        assert counts and (counts.total, counts.completed, counts.failed) == (40, 40, 0)
        assert batch.in_progress_at and batch.finalizing_at and batch.completed_at
        found = answers(client, batch.output_file_id)
        assert list(found) == [f"r{i}" for i in range(40)], "in the order of the file"
        for answer in found.values():
            assert answer["error"] is None and answer["response"]["status_code"] == 200
            body = ChatCompletion(**answer["response"]["body"])
            assert [choice.message.content for choice in body.choices] == ["Hi0", "Hi1"]
        output = client.files.retrieve(batch.output_file_id or "")
        assert output.purpose == "batch_output"
    assert all(request.background for request in engine.requests) and len(engine.requests) == 40


def test_a_bad_line_fails_alone(folder: Path):
    bad: dict[str, tuple[dict[str, Any], int, str]] = {
        "range": (line("range", temperature=7), 400, "temperature"),
        "stream": (line("stream", stream=True), 400, "stream"),
        "model": (line("model", model="other"), 404, "model"),
        "url": (line("url") | {"url": "/admin"}, 400, "url"),
        "no url": (line("no url") | {"url": None}, 400, "url"),
        "chat": (line("chat", CHATS), 400, "url"),
        "get": (line("get") | {"method": "GET"}, 400, "method"),
        "body": (line("body") | {"body": []}, 400, "body"),
    }
    lines = [line("good"), *(each for each, _, _ in bad.values()), line("also good")]
    with serving(folder) as client:
        batch = ended(client, begin(client, lines).id)
        counts = batch.request_counts
        assert batch.status == "completed" and counts
        assert (counts.total, counts.completed, counts.failed) == (10, 2, 8)
        assert set(answers(client, batch.output_file_id)) == {"good", "also good"}
        errors = answers(client, batch.error_file_id)
        for name, (_, status, param) in bad.items():
            response = errors[name]["response"]
            error = response["body"]["error"]
            assert (response["status_code"], error["param"]) == (status, param), error


#: Lines of a file, and the code and the number of each that is at fault.
BAD_FILES: tuple[tuple[list[Any], list[tuple[str, int | None]]], ...] = (
    ([], [("empty_file", None)]),
    ([b"{", line("a"), b"[]", b'{"custom_id": 5}'], [
        ("invalid_json_line", 1), ("invalid_json_line", 3), ("missing_custom_id", 4),
    ]),
    ([line("a"), line("b"), line("a")], [("duplicate_custom_id", 3)]),
    ([b"\xff\xfe"], [("invalid_json_line", 1)]),
    ([line("a", user="x" * 9000)], [("invalid_json_line", 1)]),
    ([line(str(i)) for i in range(30)], [("too_many_lines", None)]),
)  # fmt: skip


def test_a_file_that_is_no_file_of_requests(folder: Path):
    with serving(folder, batch_lines=20, body_limit=2000) as client:
        for lines, faults in BAD_FILES:
            batch = ended(client, begin(client, lines).id)
            assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
            assert batch.errors and batch.errors.data
            assert [(fault.code, fault.line) for fault in batch.errors.data] == faults
            assert all(fault.message for fault in batch.errors.data)


#: Fields of a batch, and the status and the field of the refusal.
BAD_BATCHES: tuple[tuple[dict[str, Any], int, str | None], ...] = (
    ({"input_file_id": "file-none"}, 404, "input_file_id"),
    ({"input_file_id": 5}, 400, "input_file_id"),
    ({"endpoint": "/admin"}, 400, "endpoint"),
    ({"endpoint": "/v1/files"}, 400, "endpoint"),
    ({"completion_window": "soon"}, 400, "completion_window"),
    ({"completion_window": "0h"}, 400, "completion_window"),
    ({"completion_window": "8d"}, 400, "completion_window"),
    ({"metadata": {"a": 5}}, 400, "metadata.a"),
    ({"metadata": {"webhook_url": "http://169.254.169.254/"}}, 400, "metadata.webhook_url"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, None),
)


def test_bad_batches(folder: Path):
    with serving(folder) as client, http_client(str(client.base_url)) as http:
        file = client.files.create(file=("a", b"x"), purpose="batch")
        good = {"input_file_id": file.id, "endpoint": CHATS, "completion_window": "24h"}
        for fields, status, param in BAD_BATCHES:
            reply = http.post("batches", json=good | fields)
            assert reply.status_code == status, (fields, reply.text)
            assert param is None or reply.json()["error"]["param"] == param
        assert not client.batches.list().data


def test_what_belongs_to_another_key_is_not_there(folder: Path):
    keys = tuple(map(digest_key, ("ann", "bob")))
    with serving(folder, key="ann", api_keys=keys) as ann:
        bob = client_of(str(ann.base_url).removesuffix("/v1/"), "bob")
        batch = ended(ann, begin(ann, [line("a")]).id)
        asked = [
            lambda: bob.batches.retrieve(batch.id),
            lambda: bob.batches.cancel(batch.id),
            lambda: bob.files.retrieve(batch.input_file_id),
            lambda: bob.files.content(batch.output_file_id or ""),
            lambda: bob.files.delete(batch.input_file_id),
            lambda: bob.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHATS, completion_window="24h"
            ),
        ]
        for ask in asked:
            with pytest.raises(openai.NotFoundError):
                ask()
        assert not bob.files.list().data and not bob.batches.list().data
        assert len(ann.batches.list().data) == 1 and len(ann.files.list().data) == 2
        nobody = client_of(str(ann.base_url).removesuffix("/v1/"), "eve")
        with pytest.raises(openai.AuthenticationError):
            nobody.files.list()


def test_a_batch_is_cancelled(folder: Path):
    engine = FakeClient(seats=2)
    engine.scripts = [Script(text="a"), Script(text="b")]
    engine.script = Script(hang=True)
    with serving(folder, engine) as client:
        batch = begin(client, [line(f"r{i}") for i in range(6)])
        until(lambda: len(engine.requests) == 4)
        client.batches.cancel(batch.id)
        batch = ended(client, batch.id)
        assert batch.status == "cancelled" and batch.cancelling_at and batch.cancelled_at
        answered = set(answers(client, batch.output_file_id))
        assert len(answered) == 2, "lines that start together reach the engine in any order"
        errors = answers(client, batch.error_file_id)
        assert {name: each["error"]["code"] for name, each in errors.items()} == dict.fromkeys(
            {f"r{i}" for i in range(6)} - answered, "batch_cancelled"
        )
        until(lambda: not engine.open)
        assert client.batches.cancel(batch.id).status == "cancelled"
        done = ended(client, begin(client, []).id)
        with pytest.raises(openai.BadRequestError, match="failed and cannot be cancelled"):
            client.batches.cancel(done.id)


def test_a_batch_expires(folder: Path):
    engine = FakeClient(seats=1)
    engine.scripts = [Script(text="a")]
    engine.script = Script(hang=True)
    with serving(folder, engine) as client:
        lines = [line(f"r{i}") for i in range(3)]
        batch = begin(client, lines, completion_window="1s")
        batch = ended(client, batch.id)
        assert batch.status == "expired" and batch.expired_at
        answered = set(answers(client, batch.output_file_id))
        errors = answers(client, batch.error_file_id)
        assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}
        assert answered <= {"r0"}, "the machine may be too slow even for that one"
        assert set(errors) == {"r0", "r1", "r2"} - answered


def test_a_file_that_is_being_read_stays(folder: Path):
    engine = FakeClient(Script(hang=True))
    with serving(folder, engine) as client:
        batch = begin(client, [line("a")])
        with pytest.raises(openai.BadRequestError, match="still reads"):
            client.files.delete(batch.input_file_id)
        client.batches.cancel(batch.id)
        ended(client, batch.id)
        assert client.files.delete(batch.input_file_id).deleted


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 3.0),
        ({"retry-after-ms": "-5", "retry-after": "1.5"}, 3.0),
        ({}, 3.0),
    ],
)
def test_how_long_a_refusal_of_any_server_is_waited_for(headers: dict[str, str], seconds: float):
    assert retry_after_s(headers, 3.0) == seconds


def test_lines_that_are_refused_again_and_again_come_less_often():
    """Jobs, which somebody waits for, come when they are told to."""
    host = make_app().state.service
    for background, pauses in ((True, [0.5, 1.0, 2.0, 30.0]), (False, [0.5] * 4)):
        executor = LineExecutor(host, RouteTable(ROUTES), background=background)
        assert [executor.pause_s(0.5, tries) for tries in (0, 1, 2, 5000)] == pauses


def test_lines_count_against_the_limits_of_their_key(folder: Path):
    """At most half of what it may have open, so that its other requests find room."""
    most = 0

    class Watching(FakeClient):
        def submit(self, request, listener):
            nonlocal most
            most = max(most, len(self.open) + 1)
            return super().submit(request, listener)

    engine = Watching(Script(text="abcd", delay_s=0.01))
    with serving(folder, engine, key_max_concurrent=4) as client:
        batch = ended(client, begin(client, [line(f"r{i}") for i in range(12)]).id)
        assert batch.request_counts and batch.request_counts.completed == 12
        assert most == 2


def test_a_drain_gives_lines_up_and_the_next_start_goes_on(folder: Path):
    engine = FakeClient(seats=2)
    engine.scripts = [Script(text="a"), Script(text="b")]
    engine.script = Script(hang=True)
    app = make_app(engine, data_dir=folder)
    with served(app) as (url, _):
        client = client_of(url)
        batch = begin(client, [line(f"r{i}") for i in range(8)])
        until(lambda: len(engine.requests) == 4)
        app.state.service.begin_drain()
        assert not app.state.service._open._count, "a drain does not wait for a batch"
        until(lambda: not engine.open)
    again = FakeClient(Script(text="c"))
    with serving(folder, again) as client:
        batch = ended(client, batch.id)
        counts = batch.request_counts
        assert batch.status == "completed" and counts and counts.completed == 8
        assert len(answers(client, batch.output_file_id)) == 8
    assert len(again.requests) == 6, "those that were answered are not asked again"


def test_where_files_cannot_be_kept_the_routes_say_so(folder: Path):
    """There is no folder, another server has it, or others may write to it."""
    shared = folder.with_name("shared")
    shared.mkdir()
    shared.chmod(0o777)
    with serving(folder) as first:
        first.files.create(file=("a", b"x"), purpose="batch")
        for data_dir in (None, folder, shared):
            with served(make_app(data_dir=data_dir)) as (url, _):
                with pytest.raises(openai.InternalServerError) as refused:
                    client_of(url).files.list()
                assert refused.value.status_code == 503 and refused.value.code == "no_store"
    assert not list(shared.iterdir())


@pytest.mark.parametrize("secret", ["whsec_c2VjcmV0IG9mIG91cnM=", "any text"])
def test_the_end_is_told_and_signed(folder: Path, monkeypatch: pytest.MonkeyPatch, secret: str):
    """Again after a failure; OpenAI's client finds the signature right."""
    monkeypatch.setattr(webhooks, "_PAUSES_S", (0.05, 0.05))
    with receiving(lambda number: number == 1) as hooks:
        limits: dict[str, Any] = {"webhook_prefixes": (hooks.url,), "webhook_secret": secret}
        with serving(folder, **limits) as client:
            batch = begin(client, [line("a")], metadata={"webhook_url": hooks.url + "x"})
            ended(client, batch.id)
            until(lambda: len(hooks.came) == 2)
            first, second = hooks.came
            assert first.key == second.key and first.body == second.body
            event = client.webhooks.unwrap(second.body, second.headers, secret=secret)
            assert event.type == "batch.completed"
            assert event.data.id == batch.id
            with pytest.raises(openai.InvalidWebhookSignatureError):
                client.webhooks.unwrap(second.body, second.headers, secret="another")


def test_an_end_that_was_not_told_is_told_after_a_restart(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(webhooks, "_PAUSES_S", (1.0, 0.05))
    with receiving(lambda number: number == 1) as hooks:
        limits: dict[str, Any] = {"webhook_prefixes": (hooks.url,), "webhook_secret": "s"}
        with serving(folder, **limits) as client:
            batch = begin(client, [], metadata={"webhook_url": hooks.url})
            until(lambda: len(hooks.came) == 1)
        with serving(folder, **limits) as client:
            until(lambda: len(hooks.came) == 2)
            told = hooks.came[1]
            event = client.webhooks.unwrap(told.body, told.headers, secret="s")
            assert event.type == "batch.failed"
            assert event.data.id == batch.id


def test_a_receiver_that_drips_keeps_nobody_waiting(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither another receiver of the same key, nor the end of the server."""
    monkeypatch.setattr(webhooks, "_TIMEOUT_S", 120.0)
    with dripping() as slow, receiving(lambda number: False) as hooks:
        limits: dict[str, Any] = {
            "webhook_prefixes": (slow.url, hooks.url),
            "webhook_secret": "s",
            "key_batches": 1000,
        }
        with serving(folder, **limits) as client:
            file = client.files.create(file=("in.jsonl", jsonl([])), purpose="batch")

            def begin_batch(url: str) -> None:
                client.batches.create(
                    input_file_id=file.id,
                    endpoint=CHATS,
                    completion_window="24h",
                    metadata={"webhook_url": url},
                )

            for number in range(70):
                begin_batch(f"{slow.url}{number}")
            until(lambda: slow.came > 0)
            for number in range(8):
                begin_batch(f"{hooks.url}{number}")
            until(lambda: len(hooks.taken) == 8)
            assert not slow.ended


def test_a_receiver_that_drips_is_cut_off_and_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(webhooks, "_TIMEOUT_S", 0.3)
    monkeypatch.setattr(webhooks, "_PAUSES_S", (0.05,))
    with dripping() as slow:
        limits: dict[str, Any] = {"webhook_prefixes": (slow.url,), "webhook_secret": "s"}
        with serving(folder, **limits) as client:
            begin(client, [], metadata={"webhook_url": slow.url})
            until(lambda: slow.came == slow.ended == 2)


def message(id: str, key: str, receiver: str, size: int = 100) -> webhooks._Message:
    return webhooks._Message(Batch, id, (key, receiver), size)


def test_each_key_has_a_lane_to_each_receiver():
    sending = webhooks._Sending()
    for lane in (("ann", "slow"), ("ann", "fast"), ("bob", "slow")):
        begun = [sending.add(message(f"{lane} {number}", *lane)) for number in range(10)]
        assert begun == [True] * webhooks._OF_LANE + [False] * (10 - webhooks._OF_LANE)
    [first, second, *_] = sending.values()
    del sending[first.id]
    assert not sending.add(second), "it is being sent"
    assert sending.add(first)
    for number in range(webhooks._AT_ONCE):
        sending.add(message(f"{number}", "ann", f"{number}"))
    assert sending.is_full and len(sending) == webhooks._AT_ONCE


def test_long_messages_wait_for_long_ones_and_short_ones_do_not():
    sending = webhooks._Sending()
    size = webhooks._LONG_BYTES_AT_ONCE // 2
    begun = [sending.add(message(f"{n}", "ann", f"{n}", size)) for n in range(4)]
    assert begun == [True, True, False, False]
    assert sending.add(message("short", "bob", "fast"))
    del sending["0"]
    assert sending.add(message("3", "ann", "3", size))


def test_where_ends_may_be_told():
    prefixes = (
        "https://hooks.example.org/jitney/",
        "http://127.0.0.1:9/x",
        "https://Other.example.org:443",
    )
    for good in (
        "https://hooks.example.org/jitney/",
        "https://hooks.example.org/jitney/a?b=c",
        "https://HOOKS.example.org/jitney/a",
        "https://hooks.example.org:443/jitney/a",
        "https://hooks.example.org/jitney/a/../b",
        "https://hooks.example.org/jitney/a;v=1/%c3%a9%20%2fb",
        "https://other.example.org/any",
        "http://127.0.0.1:9/x",
        "http://127.0.0.1:9/x/y",
    ):
        assert is_allowed(good, prefixes), good
    for bad in (
        "http://hooks.example.org/jitney/a",
        "https://hooks.example.org/jitneys",
        "https://hooks.example.org/",
        "https://hooks.example.org:444/jitney/a",
        "https://hooks.example.org.evil.org/jitney/a",
        "https://hooks.example.org@evil.org/jitney/a",
        "https://me@hooks.example.org/jitney/a",
        "https://hooks.example.org/jitney/../admin",
        "https://hooks.example.org/jitney/%2e%2E/admin",
        "https://hooks.example.org/jitney/.%2e/admin",
        "https://hooks.example.org/jitney/..%2fadmin",
        "https://hooks.example.org/jitney/a%2f..%2F..%2fadmin",
        "https://hooks.example.org/jitney/%252e%252e/admin",
        "https://hooks.example.org/jitney/%25252e%25252e%25252fadmin",
        "https://hooks.example.org/jitney/..;/admin",
        "https://hooks.example.org/jitney/..;a=b/admin",
        "https://hooks.example.org/jitney/..%3b/admin",
        "https://hooks.example.org/jitney/..%5cadmin",
        "https://hooks.example.org/jitney/%c0%ae%c0%ae/admin",
        "https://hooks.example.org/jitney/%ef%bc%8e%ef%bc%8e/admin",
        "https://hooks.example.org/jitney/..%20/admin",
        "https://hooks.example.org/jitney/..%00/admin",
        "https://hooks.example.org/jitney%2fa",
        "https://hooks.example.org:80/jitney/a",
        "https://hooks.example.org\\@evil.org/jitney/",
        "https://hooks.example.org/jitney/ a",
        "https://hooks.example.org/jitney/#a",
        "http://127.0.0.1:9/xy",
        "http://127.0.0.1:99999/x",
        "http://169.254.169.254/",
        "file:///etc/passwd",
        "x",
    ):
        assert not is_allowed(bad, prefixes), bad
    assert not is_allowed("https://hooks.example.org/", ())


BATCH = batch_of("b")


def stored(folder: Path) -> TaskStore:
    store = TaskStore(folder / "s.sqlite3")
    store.insert(StoredFile("file-1", "me", "batch", "in", 1, 1))
    store.insert(BATCH)
    batch_rows.add_lines(store, BATCH.id, [Line(n + 1, str(n), 0, 1) for n in range(3)])
    assert batch_rows.start(store, BATCH.id, 3) and not batch_rows.start(store, BATCH.id, 3)
    return store


def test_a_line_keeps_its_first_answer(tmp_path: Path):
    store = stored(tmp_path)
    assert batch_rows.answer(store, BATCH, 2, LineOutcome.COMPLETED, b"first")
    assert not batch_rows.answer(store, BATCH, 2, LineOutcome.FAILED, b"second")
    assert [each.number for each in batch_rows.open_lines(store, "b", 0, 9)] == [1, 3]
    store.close()
    store = TaskStore(tmp_path / "s.sqlite3")
    batch = store.find(Batch, "b")
    assert batch and (batch.total, batch.completed, batch.failed) == (3, 1, 0)
    assert [each.answer for each in batch_rows.answers(store, "b", 0, 9)] == [b"", b"first", b""]
    batch_rows.finish(store, "b", "expired", None, None, 4)
    assert not batch_rows.answer(store, BATCH, 1, LineOutcome.COMPLETED, b"late")
    assert not store.unfinished() and store.find(Batch, "b", "you") is None


def test_answers_of_lines_count_in_the_bytes_of_their_key(tmp_path: Path):
    store = stored(tmp_path)
    before = store.n_bytes("me")
    assert batch_rows.answer(store, BATCH, 1, LineOutcome.COMPLETED, b"x" * 100, before + 100)
    assert store.n_bytes("me") == before + 100
    with pytest.raises(StorageFull):
        batch_rows.answer(store, BATCH, 2, LineOutcome.COMPLETED, b"x" * 100, before + 199)
    assert [each.number for each in batch_rows.open_lines(store, "b", 0, 9)] == [2, 3]
    output = StoredFile("out", "me", "batch_output", "out", 101, 4)
    batch_rows.finish(store, "b", "completed", output, None, 4)
    assert store.n_bytes("me") == before + 101, "they are in a file now"


def test_answers_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch_rows, "_READ_BYTES", 150)
    store = stored(tmp_path)
    for number in (1, 2, 3):
        batch_rows.answer(store, BATCH, number, LineOutcome.COMPLETED, b"x" * 100)
    assert [each.number for each in batch_rows.answers(store, "b", 0, 9)] == [1, 2]
    assert [each.number for each in batch_rows.answers(store, "b", 2, 9)] == [3]


def test_a_line_without_room_for_its_answer_fails_and_says_so(folder: Path):
    engine = FakeClient(Script("some words " * 100), seats=1)
    lines = [line(f"r{i}", CHATS, max_tokens=200) for i in range(40)]
    limits: dict[str, Any] = {"key_file_bytes": 20_000, "answer_limit": 10_000}
    with serving(folder, engine, **limits) as client:
        batch = ended(client, begin(client, lines, endpoint=CHATS).id)
        counts = batch.request_counts
        assert batch.status == "completed" and counts and counts.completed and counts.failed
        assert counts.completed + counts.failed == 40
        for answer in answers(client, batch.error_file_id).values():
            assert answer["response"]["body"]["error"]["code"] == "storage_full"


def test_batches_that_are_over_are_forgotten_beyond_a_number(tmp_path: Path):
    store = stored(tmp_path)
    for number in range(4):
        store.insert(batch_of(f"b{number}"))
        batch_rows.finish(store, f"b{number}", "expired", None, None, 4)
    store.forget_ended(Batch, "me", 2)
    kept, more = store.page(Batch, "me", after="", limit=9)
    assert [batch.id for batch in kept] == ["b3", "b2", "b"] and not more
