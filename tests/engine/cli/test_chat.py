"""`jitney chat --url` on a pseudo-terminal: lines, arrows, Ctrl-C, and what a server refuses."""

from __future__ import annotations

import pytest
from api_fakes import FakeClient, Script, make_app, served, until
from pseudo_terminal import PseudoTerminal

from jitney.engine.cli import main


def asked(client: FakeClient) -> str:
    """The newest prompt."""
    return bytes(client.requests[-1].prompt).decode()


def test_a_conversation_with_a_server():
    client = FakeClient(Script(text="so it is " * 2000, delay_s=0.2))
    client.scripts.append(Script(text="aha"))
    command = ("chat", "--system", "be brief", "--max-tokens", "150")
    with (
        served(make_app(client)) as (url, _),
        PseudoTerminal.running(*command, "--url", url) as terminal,
    ):
        terminal.until("> ")
        terminal.press("one \\\r")
        terminal.until(". ")
        terminal.press("two\r")
        terminal.until("aha")
        assert asked(client) == "system: be brief\nuser: one \ntwo\nassistant: "
        terminal.press("three\r")
        terminal.until("so it is")
        terminal.press("\x03")
        terminal.until("> ")
        until(lambda: not client.open)
        assert client.aborts, "it would have gone on"
        client.scripts.append(Script(text="no, four"))
        terminal.press("\x1b[A\x1b[A\x1b[B\r")  # up, up, down: the newest line again
        terminal.until("no, four")
        assert asked(client).endswith("user: three\nassistant: ")
        terminal.press("/exit\r")
        assert terminal.ended() == 0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--url", "URL", "--adapter", "tone"], "--adapter tone: the server has m"),
        (["--url", "URL", "--max-seats", "4"], "--max-seats: leave it out with --url"),
        (["--url", "http://127.0.0.1:1"], "does not answer"),
        (["--key-file", "keys"], "--key-file: give --url too"),
    ],
)
def test_what_does_not_fit_a_server_is_refused(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
):
    with served(make_app(FakeClient())) as (url, _):
        assert main(["chat", *(flag.replace("URL", url) for flag in flags)]) in (1, 2)
    assert told in capsys.readouterr().err
