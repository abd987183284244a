"""Batches that are killed in the middle; files of requests that are answered without a server."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from api_fakes import FakeClient, Script, make_app, until
from batch_files import (
    CHATS,
    COMPLETIONS,
    answers,
    begin,
    client_of,
    ended,
    jsonl,
    line,
)
from batch_process import serving_process
from openai import OpenAI

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.ports import free_port
from jitney.engine.server.tasks.offline import OfflineBatch, _Counts


@contextmanager
def server(folder: Path, port: int) -> Iterator[tuple[OpenAI, subprocess.Popen[bytes]]]:
    """A server process and a client of it."""
    with serving_process(folder, port) as process:
        yield client_of(f"http://127.0.0.1:{port}"), process


def answered(client: OpenAI, id: str) -> int:
    counts = client.batches.retrieve(id).request_counts
    assert counts is not None
    return counts.completed


def test_killed_in_the_middle_each_line_is_answered_once(tmp_path: Path):
    port, folder = free_port(), tmp_path / "data"
    names = [f"r{number}" for number in range(120)]
    with server(folder, port) as (client, process):
        batch = begin(client, [line(name) for name in names])
        until(lambda: answered(client, batch.id) >= 20)
        process.send_signal(signal.SIGKILL)
    with server(folder, port) as (client, process):
        before = answered(client, batch.id)
        assert before >= 20
        until(lambda: answered(client, batch.id) > before)
        process.send_signal(signal.SIGKILL)
    with server(folder, port) as (client, _):
        batch = ended(client, batch.id, 60)
        assert batch.status == "completed" and batch.error_file_id is None
        assert list(answers(client, batch.output_file_id)) == names


def offline(
    path: Path, out: Path, engine: FakeClient, in_flight: int = 4, stop_after: int = 0
) -> _Counts:
    """Run a file; stop_after: be interrupted after so many answers."""
    work = OfflineBatch(path, out, 10_000)

    async def run() -> None:
        service = make_app(engine).state.service
        task: asyncio.Task[None]

        def on_answer(counts: _Counts) -> None:
            if counts.answered == stop_after:
                task.cancel()

        task = asyncio.create_task(work.run(service, in_flight, on_answer))
        await asyncio.wait((task,), timeout=60)
        assert task.done()
        service.close()

    asyncio.run(run())
    return work.counts


def written(out: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    return found


def test_a_file_is_answered_without_a_server(tmp_path: Path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(jsonl([line("a"), line("b", CHATS), line("c", n=0), line("d")]))
    engine = FakeClient(Script(text="words"))
    assert offline(path, out, engine) == _Counts(4, 4, 1)
    found = written(out)
    assert set(found) == {"a", "b", "c", "d"}
    assert found["a"]["response"]["body"]["object"] == "text_completion"
    assert found["b"]["response"]["body"]["object"] == "chat.completion"
    assert found["c"]["response"]["body"]["error"]["param"] == "n"
    assert not any(request.background for request in engine.requests)
    assert offline(path, out, FakeClient()) == _Counts(4, 4, 1), "an error stays one"


def test_a_run_goes_on_where_it_stopped(tmp_path: Path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(jsonl([line(f"r{number}") for number in range(20)]))
    first = FakeClient(Script(text="words", delay_s=0.01))
    assert offline(path, out, first, in_flight=1, stop_after=7).answered == 7
    with out.open("ab") as file:
        file.write(b'{"custom_id": "r7", "resp')  # it was killed while it wrote
    second = FakeClient(Script(text="words"))
    assert offline(path, out, second) == _Counts(20, 20, 0)
    assert set(written(out)) == {f"r{number}" for number in range(20)}
    assert len(second.requests) == 13
    third = FakeClient()
    assert offline(path, out, third) == _Counts(20, 20, 0) and not third.requests


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no lines"),
        (b"{}\n[]\n", "line 1 needs a custom_id.*line 2 is not a JSON object"),
        (jsonl([line("a"), line("a")]), "line 2 has the custom_id of a line before it"),
        (None, "cannot be read"),
    ],
)
def test_files_that_are_none_of_requests(tmp_path: Path, content: bytes | None, reason: str):
    path = tmp_path / "in.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        OfflineBatch(path, tmp_path / "out.jsonl", 10_000)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a letter\n", "no file of answers"),
        (b'{"custom_id": "z", "response": {"status_code": 200}}\n', "answers to other lines"),
        (b'{"custom_id": "a"}\n', "no file of answers"),
    ],
)
def test_files_of_somebody_elses_are_not_written_to(tmp_path: Path, content: bytes, reason: str):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(jsonl([line("a", COMPLETIONS)]))
    out.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        OfflineBatch(path, out, 10_000)
    assert out.read_bytes() == content
