"""The event loop comes round while the page's long answers are made."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from api_fakes import FakeClient, run
from history_fakes import long_history
from loop_lag import lag_of_loop
from page_fakes import browser, page

from jitney.dashboard.lab import Experiment
from jitney.engine.common.history import History
from jitney.engine.config.schema import EngineSection
from jitney.engine.lab.policy_lab import Lab
from jitney.engine.lab.simulation.replay import ReplayJob

#: Seconds of computing; all at once the trace took 0.1 to 0.9, by machine and load.
_LONGEST = 0.03
_REQUESTS, _STEPS, _SEATS = 4000, 8000, 8


@pytest.fixture(scope="module")
def app():
    client = FakeClient(seats=_SEATS)
    client.history = long_history(_REQUESTS, _STEPS, _SEATS)
    return page(client)


async def ask(app, path: str) -> tuple[httpx.Response, float]:
    async with browser(app) as web:
        await web.get("/timeline?bins=1&from=0&to=1")
        async with lag_of_loop() as lag:
            answer = await web.get(path, timeout=30)
        return answer, lag.longest


@pytest.mark.parametrize(
    "path",
    [
        "/trace?from=0",
        "/timeline?from=0&bins=600",
        "/requests?limit=1000",
        "/requests?state=open",
        "/frames",
        "/report?minutes=10",
    ],
)
def test_long_answers_do_not_hold_the_loop(app, path):
    answer, longest = run(ask(app, path))
    assert answer.status_code == 200 and answer.content
    assert longest < _LONGEST


def test_a_long_trace_has_every_request_and_every_step(app):
    answer, _ = run(ask(app, "/trace?from=0"))
    assert "content-length" not in answer.headers
    events = answer.json()["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len([span for span in spans if span["name"].startswith("prefill")]) == _REQUESTS
    steps = [span["args"]["step"] for span in spans if span["pid"] == 2]
    assert steps == list(range(_STEPS))


def test_a_long_timeline_is_whole(app):
    shown = json.loads(run(ask(app, "/timeline?from=0&bins=600"))[0].content)
    assert {len(column) for column in shown["stays"].values()} == {_REQUESTS}
    assert sum(shown["bins"]["steps"]) == _STEPS


def test_an_experiment_is_prepared_without_holding_the_loop(monkeypatch: pytest.MonkeyPatch):
    """All but the one message to its process."""
    client = FakeClient(seats=_SEATS)
    client.history = long_history(_REQUESTS, _STEPS, _SEATS)
    monkeypatch.setattr(History, "kept_from", property(lambda history: 0.0))
    lab = Lab(client, EngineSection)
    sent: list[ReplayJob] = []

    async def keep(job: ReplayJob, basis: dict[str, object]) -> None:
        sent.append(job)

    monkeypatch.setattr(lab, "_run", keep)

    async def session() -> float:
        async with lag_of_loop() as lag:
            await lab.start(Experiment(minutes=10))
        await asyncio.sleep(0)
        return lag.longest

    assert run(session()) < _LONGEST
    assert len(sent[0].arrivals) == len(sent[0].requests) == _REQUESTS


async def test_answers_beyond_the_limit_are_refused(app):
    async with browser(app) as web:
        asking = [web.get("/trace?from=0", timeout=60) for _ in range(20)]
        statuses = [answer.status_code for answer in await asyncio.gather(*asking)]
    assert sorted(set(statuses)) == [200, 503] and statuses.count(200) == 16
