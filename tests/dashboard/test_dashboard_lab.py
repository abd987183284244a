"""The policy lab: what it replays is what came, in a process of its own, and the live engine is left alone."""

from __future__ import annotations

import asyncio
import time

import pytest
from api_fakes import FakeClient, call, run
from journal_fakes import Watched
from page_fakes import get, page
from starlette.applications import Starlette

from jitney.dashboard import create_dashboard
from jitney.dashboard.lab import SETTINGS, Lab, Wish, arrivals, checked
from jitney.engine.api import ServerSettings
from jitney.engine.api.errors import HttpError
from jitney.engine.config import EngineSection
from jitney.engine.errors import RequestError

ENGINE = EngineSection(max_seats=4, token_budget=16, page_size=8, prefill_share=1.0)


def served_client(requests: int = 12) -> FakeClient:
    """An engine of four seats that has just served some requests, of 5 prompt tokens and 3, 6, 9 ... output tokens."""
    watched = Watched()
    watched.clock.now = time.monotonic() - 20
    watched.journal._started = watched.clock.now
    for number in range(requests):
        watched.add(f"r{number}", [1, 2, 3, 4, number % 40], max_tokens=3 + 3 * (number % 6), ignore_eos=True)
        watched.step()
    watched.run()
    client = FakeClient(seats=4, pages=32, page_size=8, context_length=64)
    client.journal = watched.journal
    return client


def lab_app(client: FakeClient) -> Starlette:
    return create_dashboard(client, ServerSettings(), engine=ENGINE)  # type: ignore[arg-type]


def test_an_experiment_over_http():
    async def session() -> dict:
        begun = await call(app, "/lab", {"minutes": 5, "policies": ["static", "continuous"], "price_per_hour": 3.6})
        assert begun.status == 202 and begun.json()["state"] == "running"
        busy = await call(app, "/lab", {})
        assert busy.status == 409 and busy.error["code"] == "lab_busy"
        for _ in range(600):
            told = (await call(app, "/lab", method="GET")).json()
            if told["state"] != "running":
                return told
            assert 0 <= told["progress"] <= 1
            await asyncio.sleep(0.05)
        raise AssertionError("it never ended")

    app = lab_app(served_client())
    told = run(asyncio.wait_for(session(), 40))
    assert told["state"] == "done", told["error"]
    result = told["result"]
    assert result["requests"] == 12 and list(result["policies"]) == ["static", "continuous"]
    for name, policy in result["policies"].items():
        figures = policy["figures"]
        assert figures["served"] == 12 and figures["output_tokens"] == sum(3 + 3 * (n % 6) for n in range(12)), name
        spent = 3.6 / 3600 * figures["seconds"]
        assert figures["cost_per_million_tokens"] == pytest.approx(spent / figures["output_tokens"] * 1e6)
        assert len(policy["rides"]["seat"]) == 12 and max(policy["rides"]["seat"]) < 4
        assert all(0 <= start < end for start, end in zip(policy["rides"]["from"], policy["rides"]["to"], strict=True))
    static, continuous = (result["policies"][name]["figures"] for name in ("static", "continuous"))
    assert continuous["padding_share"] < static["padding_share"]
    measured = result["measured"]
    assert measured["figures"]["output_tokens"] == continuous["output_tokens"] and measured["policy"] == "continuous"
    assert measured["figures"].keys() == continuous.keys() and len(measured["rides"]["seat"]) == 12
    # The simulator learned the step times from these very steps, and the traffic was served continuously.
    assert continuous["seconds"] == pytest.approx(measured["figures"]["seconds"], rel=0.2)


def test_the_status_before_any_experiment(client):
    told = get(page(client), "/lab").json()
    assert told["state"] == "idle" and told["result"] is None and told["settings"] == {}
    told = get(lab_app(served_client()), "/lab").json()
    assert told["arrivals"] == 12 and told["settings"].keys() == set(SETTINGS) and told["settings"]["pages"] == 32
    assert {"static", "dynamic", "continuous"} == set(told["policies"])


@pytest.mark.parametrize("wish, param", [
    ({"minutes": 0}, "minutes"), ({"minutes": 11}, "minutes"), ({"speed": 11}, "speed"),
    ({"price_per_hour": 0}, "price_per_hour"), ({"policies": []}, "policies"),
    ({"policies": ["static", "static"]}, "policies"), ({"policies": ["best"]}, "policies"),
    ({"settings": {"kernels": "x"}}, "settings"), ({"settings": {"batch_size": 99}}, "settings"),
    ({"settings": {"max_seats": "4"}}, "max_seats"), ({"settings": {"prefill_share": 2}}, "prefill_share"),
    ({"minutes": "5"}, "body"), ({"other": 1}, "body")])
def test_wishes_that_make_no_sense(wish, param):
    reply = run(call(lab_app(served_client(1)), "/lab", wish))
    assert reply.status == 400 and reply.error["param"] == param, reply.error


def test_an_experiment_is_json_and_short():
    app = lab_app(served_client(1))
    plain = run(call(app, "/lab", b"{}", headers={"content-type": "text/plain"}))
    assert plain.status == 415, "a page elsewhere could send this unasked"
    assert run(call(app, "/lab", b" " * 5000)).status == 413


def test_nothing_to_replay(client):
    reply = run(call(create_dashboard(FakeClient(), ServerSettings(), engine=ENGINE), "/lab", {}))  # type: ignore[arg-type]
    assert reply.status == 400 and "no traffic" in reply.error["message"]
    assert run(call(page(client), "/lab", {})).status == 503, "without the engine's settings the lab is closed"


def test_a_running_experiment_can_be_stopped_and_has_its_time():
    async def session() -> None:
        lab = Lab(served_client(), ENGINE)
        lab.start(Wish())
        await asyncio.sleep(0)
        with pytest.raises(HttpError):
            lab.start(Wish())
        await lab.stop()
        assert lab.status()["state"] == "idle"
        hasty = Lab(served_client(), ENGINE, limit_s=0.05)
        hasty.start(Wish())
        assert hasty._task is not None
        await hasty._task
        assert hasty.status()["state"] == "failed" and "0.05 s" in hasty.status()["error"]

    run(session())


def test_traffic_is_lengths_and_times_alone():
    journal = served_client().journal
    trips = sorted(journal.ended(0), key=lambda trip: trip.arrival)
    traffic = arrivals(trips, trips[0].arrival, 2.0)
    assert [a.n_output for a in traffic] == [trip.n_output for trip in trips] and traffic[0].at == 0
    assert traffic[-1].at == pytest.approx((trips[-1].arrival - trips[0].arrival) / 2)
    assert {a.tenant for a in traffic} == {"0"}


def test_changes_are_checked_like_the_configuration():
    assert checked(Wish(settings={"batch_size": 2}), ENGINE)["batch_size"] == 2
    with pytest.raises(RequestError, match="batch_size"):
        checked(Wish(settings={"batch_size": -1}), ENGINE)
