"""The history of hours: what is kept of figures and requests, over restarts and damage."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from api_fakes import ByteTokenizer, FakeClient, http_client, served, until
from fakes import make_request

from jitney.dashboard import Dashboard, history_log
from jitney.dashboard.history_log import HistoryLog, HistoryTables, Search
from jitney.engine.common.history import History
from jitney.engine.common.messages import SequenceEvent, StepReport
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.records import ROW_KINDS
from jitney.engine.config import ServerSection
from jitney.engine.server import EVERYBODY, Identity, Role, create_app
from jitney.engine.server.http.settings import ServerSettings


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HistoryLog, "PAUSE_S", 0.05)
    monkeypatch.setattr(history_log, "_SLACK_S", 0.2)
    monkeypatch.setattr(history_log, "_BIN_S", 0.2)


@contextmanager
def serving(client: Any, folder: Path, hours: float = 24.0) -> Iterator[httpx.Client]:
    """A server whose page nobody opens."""
    server = ServerSection(history_hours=hours)
    settings = ServerSettings(data_dir=folder, server=server)
    routes = Dashboard(client, settings).mounted("/dashboard")
    app = create_app(client, ByteTokenizer(), settings, "m", routes)  # type: ignore[arg-type]
    with served(app) as (url, _), http_client(url) as http:
        yield http


def bins(http: httpx.Client, seconds: float = 3600) -> dict[str, Any]:
    now = time.monotonic()
    query = {"from": now - seconds, "to": now, "bins": 60}
    return http.get("/dashboard/history", params=query).json()["bins"]


def requests(http: httpx.Client, **query: Any) -> dict[str, Any]:
    return http.get("/dashboard/requests", params=query).json()


def ask(client: Any, name: str, *, waited: float = 1.0, **fields: Any) -> None:
    """A request that boarded after `waited` seconds, preempted once, has ended now."""
    now = time.monotonic()
    request = make_request(name, [1] * 7, arrival=now - 4.0)
    client.history.submit(msgspec.structs.replace(request, **fields))

    def event(kind: str, ago: float) -> None:
        what = SequenceEvent(kind, name, 0, 2, client.history.records.last_step, now - ago, 7, 0)  # type: ignore[arg-type]
        client.history.take(StepReport([], events=[what]))

    event("seated", 4.0 - waited)
    client.history.take(StepReport([SequenceOutput(request_id=name, index=0, tokens=[5])]))
    end = SequenceOutput(request_id=name, index=0, tokens=[6], finish="length")
    client.history.take(StepReport([end]))


def test_hours_and_requests_are_there_after_a_restart(
    client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As columns that the page adds to its own, and as the story of one request by its phases."""
    before, after, now = type(client)(), type(client)(), time.time
    with serving(before, tmp_path) as http:
        until(lambda: bins(http)["steps"] == [0])
        before.step(started=time.monotonic(), seats_busy=3, waiting=5, pages_used=7)
        until(lambda: sum(bins(http)["steps"]) == 1)
        ask(before, "req-old", user="Ada", tenant="a key")
        live = http.get("/dashboard/request/req-old").json()
    with serving(after, tmp_path) as http:
        until(lambda: "steps" in bins(http))
        kept = bins(http)
        ask(after, "req-new")
        [new, old] = requests(http)["requests"]
        found = requests(http, search="ADA")["requests"]
        assert requests(http, search="nobody")["requests"] == []
        first = requests(http, limit=1)
        assert [row["request"] for row in first["requests"]] == ["req-new"]
        # The engine's own history still has what was written last; that takes no other's place.
        database = sqlite3.connect(tmp_path / "history/history.sqlite3")
        until(lambda: database.execute("SELECT MAX(number) FROM requests").fetchone() == (2,))
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: now() + 0.1)
            second = requests(http, limit=1, cursor=first["next"] or -(2**53))["requests"]
        story = http.get("/dashboard/request/req-old").json()
        assert http.get("/dashboard/request/req-old", params={"index": 1}).status_code == 404
    assert sum(kept["steps"]) == 1 and max(kept["waiting"]) == 5 and max(kept["pages_used"]) == 7
    assert max(kept["seats_busy"]) == 3 and sum(kept["rows"]["prefill"]) > 0
    assert set(kept["rows"]) == set(ROW_KINDS), "a new kind needs a column, in a new version"
    assert new["request"] == "req-new" and old["user"] == "Ada"
    for page in (found, second):
        assert [row["request"] for row in page] == [old["request"]] == ["req-old"]
    for name in ("arrival", "seated", "finished", "queued_s", "n_prompt", "n_output", "finish"):
        assert story[name] == pytest.approx(live[name], abs=0.05)
    seconds = {cause["code"]: cause["seconds"] for cause in story["causes"]}
    assert sum(seconds.values()) == pytest.approx(story["e2e_s"], abs=1e-3)
    assert seconds["queue"] == pytest.approx(story["queued_s"], abs=1e-3)


def full(tables: HistoryTables, count: int, now: float) -> None:
    """Requests as a server writes them: one a second, each tenth of another key and refused."""
    client = FakeClient()
    log = HistoryLog(client, None, 24.0)  # type: ignore[arg-type]
    history = History()
    for number in range(count):
        history.submit(make_request(f"req-{number:06d}", [1, 2, 3], arrival=float(number)))
        record = history.find(f"req-{number:06d}", 0)
        assert record is not None
        record.finished, record.tenant = float(number), "b" if number % 10 == 0 else "a"
        if number % 10 == 0:
            record.finish, record.code = "error", "queue_full"
        log._ended.append(record)
        if number % 1000 == 999:
            for _ in log._make_rows(now - count):
                pass
            tables.put([], list(log._rows), now - 86400)
            log._rows.clear()


def test_one_of_many_is_found_and_a_user_finds_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(history_log, "_MOST_REQUESTS", 9_000)
    tables, now = HistoryTables(tmp_path / "db"), 1e9
    full(tables, 10_000, now)

    def find(words: str, identity: Identity, **changes: Any) -> list[str]:
        search = Search(500, 2**62, 1e10, None, words, identity)._replace(**changes)
        return [one.record.request_id for one in tables.find(search)]

    assert find("req-004321", EVERYBODY) == ["req-004321"]
    assert find("req-000500", EVERYBODY) == [], "the oldest have made room"
    user = Identity(Role.USER, "b")
    assert find("req-00999", user) == ["req-009990"]
    assert find("req-00998", EVERYBODY, refused=True) == ["req-009980"]
    assert len(find("", user, refused=False)) == 0
    assert find("", EVERYBODY, limit=2, before=9_000) == ["req-008998", "req-008997"]
    tables.put([], [], now - 500)
    assert len(find("", EVERYBODY)) == 500 == len(find("", EVERYBODY, limit=9999))
    tables.close()


def stays(http: httpx.Client, seconds: float) -> dict[str, Any]:
    now = time.monotonic()
    return http.get("/dashboard/stays", params={"from": now - seconds, "to": now}).json()


def test_who_sat_where_is_known_after_a_restart(client, tmp_path: Path):
    before, after = type(client)(), type(client)()
    with serving(before, tmp_path) as http:
        until(lambda: "steps" in bins(http))
        ask(before, "req-old", waited=1.5)
        until(lambda: stays(http, 60)["stays"]["seat"] == [2])
    with serving(after, tmp_path) as http:
        until(lambda: "stays" in stays(http, 60))
        answer = stays(http, 60)
        boarded = time.monotonic() - answer["stays"]["from"][0]
        assert stays(http, 600)["stays"] == answer["stays"]
        assert stays(http, boarded - 10)["stays"]["seat"] == []
    assert answer["stays"]["request"] == ["req-old"] and answer["stays"]["end"] == ["length"]
    assert 2.5 < boarded < 30.0
    assert answer["from"] < answer["kept_from"] <= answer["to"]


def test_what_an_older_version_wrote_is_still_told_and_the_newest_of_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(HistoryTables, "VERSIONS", HistoryTables.VERSIONS[:1])
    HistoryTables(tmp_path / "db").close()
    monkeypatch.undo()
    database = sqlite3.connect(tmp_path / "db")
    columns = "t, name, place, tenant, refused, words, adapter, shift, record"
    client = FakeClient()
    log = HistoryLog(client, None, 24.0)  # type: ignore[arg-type]
    for number in range(5):
        ask(client, f"req-{number}")
        row = log._row(log._ended[-1], 1000.0 * number)[:9]
        marks = ", ".join("?" * len(row))
        database.execute(f"INSERT INTO requests ({columns}) VALUES ({marks})", row)
    database.commit()
    tables, now = HistoryTables(tmp_path / "db"), time.monotonic()
    tables.put([dict.fromkeys(history_log._COLUMNS) | {"t": now - 100.0}], [], 0.0)
    found, kept_from = tables.seated(now - 10.0, now + 2010.0)
    assert kept_from == now - 100.0
    assert [one.record.request_id for one in found][::-1] == [f"req-{n}" for n in range(5)]
    monkeypatch.setattr(history_log, "_MOST_SEATED", 2)
    found, kept_from = tables.seated(now - 10.0, now + 9999.0)
    assert [one.record.request_id for one in found] == ["req-4", "req-3"]
    assert kept_from == pytest.approx(now + 3000.0, abs=60)
    tables.close()


def test_a_damaged_history_costs_the_history_alone(client, tmp_path: Path):
    path = tmp_path / "history/history.sqlite3"
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"no database at all" * 1000)
    with serving(client, tmp_path) as http:
        until(lambda: bins(http)["steps"] == [0])
        until(lambda: http.get("/dashboard/incidents").json()["incidents"])
        notes = http.get("/dashboard/incidents").json()["incidents"]
    assert [(note["code"], note["hit"]) for note in notes] == [("store", {"failures": 1})]
    assert "history were damaged" in notes[0]["message"]
    assert list(path.parent.glob("damaged-*"))


def test_without_hours_there_is_no_file(client, tmp_path: Path):
    with serving(client, tmp_path, hours=0.0) as http:
        assert http.get("/dashboard/history").status_code == 404
        assert http.get("/dashboard/stays").status_code == 404
        assert requests(http, search="long ago")["requests"] == []
    assert not (tmp_path / "history").exists()


def test_a_look_that_is_cancelled_loses_no_bin(client, monkeypatch: pytest.MonkeyPatch):
    """As at a server's end: the look that is under way ends between two slices."""
    monkeypatch.setattr(history_log, "_SLACK_S", 0.0)
    log = HistoryLog(client, None, 24.0)
    client.step(started=time.monotonic(), seats_busy=3)
    until(lambda: time.monotonic() > log.client.history.records.last_ready)
    cancelled = log._make_bin(0.0)
    next(cancelled)
    cancelled.close()
    for _ in log._make_bin(0.0):
        pass
    assert [kept["steps"] for kept in log._bins] == [1]
