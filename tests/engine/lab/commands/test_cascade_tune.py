"""`jitney cascade tune` against two servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_fakes import FakeClient, Script, make_app, served

from jitney.engine.cli import main


@pytest.fixture
def servers() -> Iterator[tuple[str, str]]:
    """Two models. A token's log-probability is minus a thousandth of its byte."""
    small, large = FakeClient(), FakeClient(Script("a"))
    small.scripts = [Script(text) for text in ("a.", "ÿÿÿÿ", "A", "a")]
    with served(make_app(small, "tiny")) as (first, _), served(make_app(large, "big")) as (last, _):
        yield f"{first}/tiny", f"{last}/v1/big"


@pytest.fixture
def requests_file(tmp_path: Path) -> Path:
    file = tmp_path / "requests.jsonl"
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    lines = [chat, chat, {"body": {"prompt": "hello"}}, {"prompt": "hello", "stream": True}]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_it_prints_the_table_and_the_threshold(
    servers: tuple[str, str], requests_file: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["cascade", "tune", str(requests_file), "--small", servers[0], "--large", servers[1]]
    assert main([*words, "--cost", "tokens", "--agreement", "0.9"]) == 0
    shown = capsys.readouterr().out
    assert "Each measure's cheapest for 90.0%" in shown
    assert "chosen" in shown
    assert "in fleet.toml:" in shown


def test_a_server_that_refused_a_connection_is_tried_again(
    servers: tuple[str, str],
    requests_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    send, refused = httpx.AsyncClient.send, iter([True])

    async def not_at_once(client: httpx.AsyncClient, request: httpx.Request, **how: Any):
        if next(refused, False):
            raise httpx.ConnectError("refused", request=request)
        return await send(client, request, **how)

    monkeypatch.setattr(httpx.AsyncClient, "send", not_at_once)
    words = ["cascade", "tune", str(requests_file), "--small", servers[0], "--large", servers[1]]
    main([*words, "--cost", "tokens", "--json", "-"])
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["refused"]) == (4, [])


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (["--agreement", "1.5"], "--agreement must be over 0"),
        (["--measure", "least:0"], "--measure must be mean or least:WINDOW"),
        (["--cost", "price"], "--cost price needs"),
        (["--at-once", "0"], "--at-once must be at least 1"),
    ],
)
def test_bad_flags_are_one_line(
    requests_file: Path, flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
):
    words = ["cascade", "tune", str(requests_file)]
    words += ["--small", "http://127.0.0.1:9/a", "--large", "http://127.0.0.1:9/b"]
    assert main([*words, *flags]) == 2
    assert complaint in capsys.readouterr().err
