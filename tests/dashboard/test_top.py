"""`jitney top`: what it prints equals what the engine has, over the real feed; and its manners when
there is none.
"""

from __future__ import annotations

import asyncio
import io
import os
import stat

import numpy as np
import pytest
from api_fakes import ByteTokenizer, FakeClient, served
from engine_infos import changed
from pseudo_terminal import PseudoTerminal
from rich.console import Console

from jitney.dashboard import Dashboard, top
from jitney.dashboard.remote import RemoteEngine, Unreachable, _base_of
from jitney.dashboard.replica import ReplicaView, SeatView
from jitney.engine.cli import main
from jitney.engine.common.errors import ConfigError
from jitney.engine.common.key_file import digest_key
from jitney.engine.common.messages import SequenceEvent, StepReport
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.records import ROW_KINDS, STEP_DTYPE
from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.server.app import create_app
from jitney.engine.server.http.settings import ServerSettings


def busy_client() -> FakeClient:
    """Eight seats: one half through its answer, one that reads its prompt."""
    client = FakeClient()
    for name in ("writer", "reader"):
        sampling = SamplingParams(max_tokens=8)
        client.history.submit(
            EngineRequest(id=name, prompt=[1] * 5, sampling=sampling, arrival=0.0)
        )
    record = np.zeros(1, STEP_DTYPE)
    record["step"], record["bucket_tokens"], record["decode"], record["padding"] = 1, 8, 6, 2
    life = [
        SequenceEvent("seated", name, 0, seat, 1, 0.0, 5, 0)
        for seat, name in enumerate(("writer", "reader"))
    ]
    client.history.take(StepReport([], events=life))
    taken = client.history.take(
        StepReport([SequenceOutput(request_id="writer", index=0, tokens=[1] * 4)], record.tobytes())
    )
    client.counters.observe_step(taken)
    client.counters.waiting = 3
    return client


def app_of(client: FakeClient, *keys: str):
    settings = ServerSettings(
        admin_keys=tuple(map(digest_key, keys)), public_prefixes=("/dashboard/",)
    )
    routes = Dashboard(client, settings).mounted("/dashboard")  # type: ignore[arg-type]
    return create_app(client, ByteTokenizer(), settings, "m", routes)  # type: ignore[arg-type]


def shown(renderable, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(renderable)
    return out.getvalue()


def test_once_prints_the_seats(capsys):
    with served(app_of(busy_client())) as (url, _):
        assert main(["top", url, "--once"]) == 0
    printed = capsys.readouterr().out
    assert (
        "2 of 8 seats taken, 3 waiting" in printed and "fake" in printed and "continuous" in printed
    )
    assert "   0  ▅»······" in printed


def test_a_name_that_would_take_over_the_terminal_is_shown_instead(capsys):
    client = busy_client()
    client.info = changed(client.info, model="\x1b]0;owned\x07\x1b[2Jm\x9b31m")
    client.history.incidents.refused(429, "\x1b[31mfull", None)
    with served(app_of(client)) as (url, _):
        assert main(["top", url, "--once"]) == 0
    printed = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\x9b"} & set(printed)
    assert "\\x1b]0;owned" in printed and "\\x9b31m" in printed and "\\x1b[31mfull" in printed


def test_once_signs_in_with_a_key_from_the_environment_or_a_file(capsys, monkeypatch, tmp_path):
    with served(app_of(busy_client(), "a key")) as (url, _):
        assert main(["top", url, "--once"]) == 1
        assert "an API key is needed" in capsys.readouterr().err
        monkeypatch.setenv("JITNEY_ENGINE_KEY", "wrong")
        assert main(["top", url, "--once"]) == 1
        assert "does not accept" in capsys.readouterr().err
        file = tmp_path / "keys"
        file.write_text("a key\n")
        os.chmod(file, stat.S_IRUSR)
        assert main(["top", url, "--once", "--key-file", str(file)]) == 0
        assert "2 of 8 seats" in capsys.readouterr().out


def test_nobody_there(capsys):
    assert main(["top", "127.0.0.1:1", "--once"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_a_server_that_is_something_else(capsys):
    async def other(scope, receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    with served(other) as (url, _):
        assert main(["top", url, "--once"]) == 1
    assert "is this a Jitney engine?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["ftp://host", "http://", "http://key@host", "http://host?key=1", "http://host#x"]
)
def test_urls_that_are_refused(url: str):
    with pytest.raises(ConfigError):
        _base_of(url)


@pytest.mark.parametrize(
    "url", ["host:8000", "http://host:8000", "http://host:8000/", "http://host:8000/dashboard/"]
)
def test_urls_of_an_engine(url: str):
    assert _base_of(url) == "http://host:8000/dashboard"


def test_a_feed_that_ends_is_an_end():
    async def session() -> list[bytes]:
        engine = RemoteEngine(url)
        try:
            return [part async for part in engine.feed()]
        finally:
            await engine.close()

    client = busy_client()
    client.state = "dead"
    with served(app_of(client)) as (url, _):
        assert b"event: bye" in b"".join(asyncio.run(session()))
    with pytest.raises(Unreachable):
        asyncio.run(session())


def replica_with(*seats: SeatView, **metrics) -> ReplicaView:
    totals = {
        "rows": dict.fromkeys(ROW_KINDS, 0),
        "steps": {"decode": 0, "mixed": 0},
        "step_s": 0.0,
        "waiting": 0,
        "latency": {"wait": {"p95": 0.25}, "ttft": {"p95": 2.5}, "itl": None},
    }
    return ReplicaView(t=1.0, seats=list(seats), metrics=totals | metrics, state="ready")


def test_every_seat_is_one_character_in_rows_that_fit():
    seats = [SeatView("decode", "r", n_output=n % 9, max_tokens=8) for n in range(100)]
    lines = shown(top._SeatGrid(seats), width=60).splitlines()
    assert all(len(line) <= 60 for line in lines) and len(lines) == 3
    assert sum(len(line[6:].replace(" ", "")) for line in lines) == 100
    assert [line[:4].strip() for line in lines] == ["0", "48", "96"]


@pytest.mark.parametrize("output, glyph", [(0, "▁"), (4, "▅"), (8, "█"), (99, "█")])
def test_a_decoding_seat_shows_how_far_it_has_come(output: int, glyph: str):
    assert top._seat_cell(SeatView("decode", "r", n_output=output, max_tokens=8))[0] == glyph
    assert top._seat_cell(SeatView("held", "r"))[0] == "×"


def test_rates_are_differences_over_the_window():
    rates, rows = top._Rates(), dict.fromkeys(ROW_KINDS, 0)
    for second in range(6):
        replica = replica_with(
            rows=rows | {"decode": 100 * second, "padding": 50 * second},
            steps={"decode": 10 * second, "mixed": 0},
            step_s=0.5 * second,
        )
        replica.t = float(second)
        rates.add(replica)
    assert (
        rates.per_second("decode") == 100
        and rates.step_ms() == 50
        and rates.rows()["padding"] == 150
    )
    printed = shown(top._picture(replica, rates, "http://x"))
    assert (
        "generated 67%" in printed
        and "padding 33%" in printed
        and "250 ms" in printed
        and "2.5 s" in printed
    )
    replica.t = 0.0  # another server
    rates.add(replica)
    assert rates.per_second("decode") is None


def test_full_and_loading_are_said_in_words():
    full = replica_with(SeatView("decode", "a"), SeatView("held", "b"), waiting=5)
    assert top._headline(full) == "Full: all 2 seats taken, 5 waiting"
    loading = ReplicaView(
        state="loading", progress={"stage": "compile", "done": 3, "total": 8, "detail": ""}
    )
    assert top._headline(loading) == "compile 3 of 8"
    assert "loading" in shown(top._picture(loading, top._Rates(), "u"))


def test_watching_goes_on_until_the_engine_was_never_there():
    with pytest.raises(Unreachable):
        asyncio.run(top._watch("127.0.0.1:1", ""))


def test_keys_show_views_and_only_what_changed_is_written():
    client = busy_client()
    client.history.incidents.refused(429, "\x1b[31mfull", None)
    with served(app_of(client)) as (url, _), PseudoTerminal.running("top", url) as terminal:
        terminal.until("2 of 8 seats taken")
        terminal.press("2")
        terminal.until("writer")
        terminal.press("3")
        terminal.until("1 request was turned away")
        terminal.press("1")
        terminal.until("2 of 8 seats taken")
        shown = len(terminal.shown)
        client.counters.waiting = 4
        terminal.until("2 of 8 seats taken, 4 waiting")
        assert "first token" not in terminal.shown[shown:], "lines that stay are not written again"
        terminal.press("q")
        assert terminal.ended() == 0
    assert "\\x1b[31mfull" in terminal.shown and "\x1b[31mfull" not in terminal.shown


def test_an_answer_that_is_refused_is_said():
    watched = top._Watched("127.0.0.1:1", "")
    assert "does not answer" in asyncio.run(watched.ask("tenants"))["trouble"]
    view = top._VIEWS["4"]
    row = {"name": "key 1a2b", "seats": 3, "share": 0.5, "wait_s": {"p95": 0.25}}
    printed = shown(top._listed(view, {"tenants": [row]}, ""))
    assert "key 1a2b" in printed and "50%" in printed and "250 ms" in printed
    assert "there are none" in shown(top._listed(view, {"tenants": []}, ""))
