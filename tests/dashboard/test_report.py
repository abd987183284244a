"""The snapshot needs nothing but itself and shows what the engine has; the Grafana board names
metrics that exist.
"""

from __future__ import annotations

import json
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest
from api_fakes import FakeClient
from history_fakes import random_run
from metric_names import metric_names, named_in
from page_fakes import get, page
from sliced_work import at_once

from jitney.dashboard import report, timeline
from jitney.dashboard.routes import _REPORT_POLICY
from jitney.engine.common.row_kinds import ROW_KIND_TABLE


class Reader(HTMLParser):
    """Tags with their attributes, the cells of tables, and the contents of scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.scripts: list[str] = []
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = tag
        if tag in ("td", "th"):
            self.cells.append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in in ("td", "th"):
            self.cells[-1] += data
        if self._in == "script":
            self.scripts[-1] += data


def snapshot(client: FakeClient, minutes: float = 1.0) -> tuple[Reader, dict[str, Any]]:
    clock = client.history.clock()
    notes = [{"level": "warn", "code": "x", "t": 0.0, "message": "<b>note</b>"}]
    data = at_once(report.ReportData.collect(client, minutes, notes, clock, 0.0))  # type: ignore[arg-type]
    reader = Reader(data.drawn())
    figures = json.loads(reader.scripts[1])
    return reader, dict(zip(report._TITLES, figures, strict=True))


def test_a_report_is_one_file_and_its_numbers_are_the_engines():
    watched = random_run(2)
    client = FakeClient(seats=4)
    client.history = watched.history
    reader, charts = snapshot(client)
    assert not [
        tag
        for tag, attributes in reader.tags
        if {"src", "href"} & attributes.keys() or tag in ("link", "img")
    ]
    assert len(reader.scripts) == 3
    assert "plotly.js v" in reader.scripts[0][:300]
    labels = [
        attributes["aria-label"] for _, attributes in reader.tags if "data-chart" in attributes
    ]
    assert labels == [title for title, _ in report._TITLES.values()]
    records = watched.history.records.since(-1)
    now = watched.clock.now
    window = timeline.Window.shown(watched.history, now - 60, now, now)
    width = (window.end - window.start) / report._BINS
    for trace in charts["ledger"]["data"]:
        kind = next(kind.name for kind in ROW_KIND_TABLE.values() if kind.label == trace["name"])
        assert sum(trace["y"]) * width == pytest.approx(int(records[kind].sum()), rel=0.02, abs=0.5)
    drawn = sum(sum(trace["x"]) for trace in charts["seats"]["data"])
    stays = [stay for record in watched.history.oldest() for stay in record.stays]
    assert drawn == pytest.approx(sum((stay.end or 0) - stay.start for stay in stays), rel=0.01)
    assert any(request.request_id + " 0" in reader.cells for request in watched.history.newest())


def test_markup_stays_text(client):
    reader, charts = snapshot(client)
    assert "img" not in {tag for tag, _ in reader.tags} and "<b>note</b>" in reader.cells
    texts = [text for trace in charts["seats"]["data"] for text in trace["hovertext"]]
    assert any("&lt;img" in text for text in texts) and not any("<img" in text for text in texts)


def test_the_report_over_http(client):
    answer = get(page(client), "/report")
    assert (
        answer.headers["content-security-policy"] == _REPORT_POLICY and "sandbox" in _REPORT_POLICY
    )
    assert "allow-same-origin" not in _REPORT_POLICY and "scripted" in answer.text
    assert answer.text.count("</script>") == 3, "nothing closes a script early"
    for wrong in ("0", "11", "x"):
        assert get(page(client), f"/report?minutes={wrong}").json()["error"]["param"] == "minutes"


def test_the_grafana_board_names_metrics_that_exist():
    board = json.loads((files("jitney.dashboard") / "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    expressions += [
        variable["query"]["query"]
        for variable in board["templating"]["list"]
        if variable["type"] == "query"
    ]
    named = named_in(" ".join(expressions))
    assert len(named) > 20 and not named - metric_names()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(taken)) == len(taken) and all(
        p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in board["panels"]
    )
