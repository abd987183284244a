"""Incidents are recorded though nobody watches, and outlive the server; trouble with the disk costs
only them.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_fakes import ByteTokenizer, http_client, served, until

from jitney.dashboard import Dashboard, incident_log
from jitney.dashboard.incident_log import KINDS, IncidentTable
from jitney.engine.server import create_app
from jitney.engine.server.http.settings import ServerSettings

PATH = "/dashboard/incidents"
FILE = "incidents/incidents.sqlite3"


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incident_log.IncidentLog, "PAUSE_S", 0.02)


@contextmanager
def serving(client: Any, folder: Path | None) -> Iterator[httpx.Client]:
    """A server whose page nobody opens."""
    settings = ServerSettings(data_dir=folder)
    routes = Dashboard(client, settings).mounted("/dashboard")
    app = create_app(client, ByteTokenizer(), settings, "m", routes)  # type: ignore[arg-type]
    with served(app) as (url, _), http_client(url) as http:
        yield http


def codes(http: httpx.Client, **query: int) -> list[str]:
    return [one["code"] for one in http.get(PATH, params=query).json()["incidents"]]


def test_incidents_are_kept_over_a_restart(client, tmp_path: Path):
    """A renewed incident is one, and the end of the server is not the engine's death."""
    incidents, began = client.history.incidents, time.time()
    with serving(client, tmp_path) as http:
        incidents.outage_began("killed by SIGKILL", n_resumed=3, n_lost=1)
        until(lambda: codes(http) == ["outage"])
        client.history.core_ready(client.info)
        client.state = "sleeping"
        until(lambda: codes(http) == ["sleep", "outage"])
        client.state = "ready"
        for _ in range(39):
            incidents.refused(429, "queue_full", 2.0)
        until(lambda: http.get(PATH).json()["incidents"][0]["hit"] == {"refused": 39})
        incidents.drain_began(n_open=5)
        client.state = "dead"
    with serving(type(client)(), tmp_path) as http:
        kept = http.get(PATH).json()
        drain, refusals, sleep, outage = kept["incidents"]
        assert codes(http, limit=2) == ["drain", "refusals"]
        assert codes(http, limit=2, before=refusals["id"]) == ["sleep", "outage"]
        assert http.get(PATH, params={"limit": 501}).json()["error"]["param"] == "limit"
    assert not kept["more"] and drain["hit"] == {"open": 5}
    assert "killed by SIGKILL" in outage["message"] and outage["hit"] == {"resumed": 3, "lost": 1}
    assert began - 1 < outage["t"] < time.time() and outage["advice"] == KINDS["outage"]
    [told] = incidents.outages
    assert outage["silence_s"] == pytest.approx(told.flowing - told.began, abs=1e-3)
    assert "slept" in sleep["message"] and sleep["silence_s"] > 0
    assert "39 requests were turned away" in refusals["message"]


def row(code: str, number: int, t: float, message: str = "") -> dict[str, Any]:
    name = f"{code} {number}"
    common = {"level": "warn", "message": message, "hit": "{}", "silence_s": None}
    return common | {"name": name, "code": code, "t": t}


def test_old_incidents_and_crowds_of_one_kind_make_room(tmp_path: Path):
    table, now = IncidentTable(tmp_path / "db"), 1e9
    table.put([row("outage", 1, now - 80_000), row("nan", 1, now - 86_000)], now - 80_000)
    crowd = [row("compile", number, now, "x" * 1000) for number in range(3000)]
    for first in range(0, 3000, 300):
        table.put(crowd[first : first + 300], now)
    table.put([row("outage", 1, now, "renewed")], now + 500)
    kept = table.page(9999, 2**62, 0.0)
    outage = kept.pop()
    assert (outage.code, outage.message, outage.t) == ("outage", "renewed", now - 80_000)
    assert len(kept) == incident_log._MOST_OF_KIND and {one.code for one in kept} == {"compile"}
    table.close()
    assert (tmp_path / "db").stat().st_size < 4 << 20


def test_a_damaged_file_is_set_aside(client, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / FILE
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"no database at all" * 1000)
    with serving(client, tmp_path) as http:
        until(lambda: http.get(PATH).status_code == 200)
        client.history.incidents.refused(429, "queue_full", None)
        until(lambda: codes(http) == ["refusals", "store"])
    [aside] = path.parent.glob("damaged-*")
    assert (aside / path.name).read_bytes().startswith(b"no database")
    assert sum(record.levelno >= logging.WARNING for record in caplog.records) == 1


def test_what_a_full_disk_refused_is_written_later(
    client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(*_: Any) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    with serving(client, tmp_path) as http:
        with monkeypatch.context() as patch:
            patch.setattr(IncidentTable, "put", full)
            client.history.incidents.refused(429, "queue_full", None)
            until(lambda: "disk is full" in caplog.text)
            time.sleep(0.2)
            assert http.get("/health").status_code == 200 and codes(http) == []
        until(lambda: sorted(codes(http)) == ["refusals", "store"])
    assert sum(record.levelno >= logging.WARNING for record in caplog.records) == 1


def test_a_second_server_of_a_folder_keeps_its_own(client, tmp_path: Path):
    with serving(client, tmp_path) as http, serving(type(client)(), tmp_path) as second:
        client.history.incidents.refused(429, "queue_full", None)
        until(lambda: codes(http) == ["refusals"])
        assert codes(second) == []
