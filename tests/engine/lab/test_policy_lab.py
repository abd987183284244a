"""The policy lab: what it replays is what came, in a process of its own, and the live engine is
left alone.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
import numpy as np
import pytest
from api_fakes import FakeClient, call, run
from engine_infos import changed
from history_fakes import Watched
from page_fakes import page
from sliced_work import at_once
from starlette.applications import Starlette

from jitney.dashboard import Dashboard, Experiment
from jitney.engine.common.request_record import RequestRecord
from jitney.engine.config.schema import EngineSection
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.lab.policy_lab import Lab, _wanted
from jitney.engine.lab.simulation.replay import (
    RecordedEngine,
    ReplayJob,
    _delivered,
    _seen_until,
    _work,
)
from jitney.engine.server.http.errors import HttpError
from jitney.engine.server.http.settings import ServerSettings

ENGINE = EngineSection(max_seats=4, token_budget=16, page_size=8, prefill_share=1.0)


def served_client(requests: int = 12) -> FakeClient:
    """An engine of four seats that has just served some requests, of 5 prompt tokens and 3, 6, 9
    ... output tokens.
    """
    watched = Watched()
    watched.clock.now = time.monotonic() - 20
    watched.history._started = watched.clock.now
    for number in range(requests):
        watched.add(
            f"r{number}",
            [1, 2, 3, 4, number % 40],
            max_tokens=3 + 3 * (number % 6),
            ignore_eos=True,
        )
        watched.step()
    watched.run()
    client = FakeClient(seats=4, pages=32, page_size=8, context_length=64)
    client.history = watched.history
    return client


def interrupted_client() -> FakeClient:
    """An engine in whose record 24 requests end, 23 of them after a hit of 8 prompt tokens; at its
    end four more sit, two wait, two were refused and one has left the queue."""
    watched = Watched(max_requests=3)
    watched.clock.now = time.monotonic() - 20
    watched.history._started = watched.clock.now
    for number in range(24):
        watched.add(
            f"r{number}",
            [1, 2, 3, 4, 5, 6, 7, 8, number],
            max_tokens=3 + number % 6,
            ignore_eos=True,
        )
        watched.run()
    for number in range(4):
        watched.add(f"long{number}", [7, number], max_tokens=40, ignore_eos=True)
    for _ in range(4):
        watched.step()
    for name in ("queued0", "queued1", "impatient"):
        watched.add(name, [9, 9], max_tokens=30)
    for name in ("refused0", "refused1"):
        watched.add(name, [9, 9], max_tokens=30)
    watched.step()
    watched.core.abort("impatient")
    watched.step()
    client = FakeClient(seats=4, pages=32, page_size=4, context_length=64)
    client.history = watched.history
    return client


def lab_app(client: FakeClient) -> Starlette:
    lab = Lab(client, lambda: ENGINE)  # type: ignore[arg-type]
    return Dashboard(client, ServerSettings(), lab=lab).to_mount()  # type: ignore[arg-type]


def test_an_experiment_over_http():
    async def session() -> dict:
        begun = await call(
            app, "/lab", {"minutes": 5, "policies": ["static", "continuous"], "price_per_hour": 3.6}
        )
        assert begun.status == 202 and begun.json()["state"] == "running"
        busy = await call(app, "/lab", {})
        assert busy.status == 409 and busy.error["code"] == "lab_busy"
        for _ in range(2400):  # as long as an experiment may take
            status = (await call(app, "/lab", method="GET")).json()
            if status["state"] != "running":
                return status
            assert 0 <= status["progress"] <= 1
            await asyncio.sleep(0.05)
        raise AssertionError("it never ended")

    app = lab_app(served_client())
    status = run(asyncio.wait_for(session(), 120))
    assert status["state"] == "done", status["error"]
    result = status["result"]
    assert result["requests"] == 12 and list(result["policies"]) == ["static", "continuous"]
    for name, policy in result["policies"].items():
        figures = policy["figures"]
        assert figures["served"] == 12 and figures["output_tokens"] == sum(
            3 + 3 * (n % 6) for n in range(12)
        ), name
        spent = 3.6 / 3600 * figures["seconds"]
        assert figures["cost_per_million_tokens"] == pytest.approx(
            spent / figures["output_tokens"] * 1e6
        )
        assert len(policy["stays"]["seat"]) == 12 and max(policy["stays"]["seat"]) < 4
        assert all(
            0 <= start < end
            for start, end in zip(policy["stays"]["from"], policy["stays"]["to"], strict=True)
        )
    static, continuous = (result["policies"][name]["figures"] for name in ("static", "continuous"))
    assert continuous["padding_share"] < static["padding_share"]
    measured = result["measured"]
    assert (
        measured["figures"]["output_tokens"] == continuous["output_tokens"]
        and measured["policy"] == "continuous"
    )
    assert measured["figures"].keys() == continuous.keys() and len(measured["stays"]["seat"]) == 12
    # The simulator learned the step times from these very steps, and the traffic was served
    # continuously.
    assert continuous["seconds"] == pytest.approx(measured["figures"]["seconds"], rel=0.2)


def test_other_sizes_are_proposed_for_the_recorded_steps():
    """Steps of 3 and 4 rows ran in programs of 4: with one more size those of 3 need no padding."""
    client = served_client()
    client.info = changed(client.info, seat_buckets=(1, 4), token_buckets=(16,))
    reply = run(call(lab_app(client), "/buckets", method="GET"))
    found, records = reply.json(), client.history.records.since(-1)
    assert found["steps"] == len(records)
    assert (found["seat_buckets_now"], found["token_buckets_now"]) == ([1, 4], [16])
    assert found["rows"] == int((records["bucket_tokens"] - records["padding"]).sum())
    assert found["seat_buckets"][-1] == 4 and found["token_buckets"][-1] == 16
    assert found["executables"] <= 2 * 2 + 1 and found["seconds"] <= found["seconds_now"]
    assert run(call(lab_app(FakeClient()), "/buckets", method="GET")).status == 400


def test_an_encoder_s_traffic_is_not_simulated():
    reply = run(call(lab_app(FakeClient(encoder=True, embedding_pooling="cls")), "/lab", {}))
    assert reply.status == 400 and "encoder" in reply.error["message"]


def work_of(client: FakeClient, experiment: Experiment) -> tuple[dict, dict]:
    """(what is put around the worker's answer, the answer), worked out in this process."""
    job, frame = at_once(Lab(client, lambda: ENGINE)._prepare(experiment))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=ReplayJob) == job
    return frame, _work(job)


@pytest.mark.usefixtures("rash")
def test_everybody_is_counted():
    client = interrupted_client()
    frame, found = work_of(client, Experiment())
    assert sum(frame["counted"].values()) == frame["requests"] == 24 + 4 + 5
    assert frame["counted"] == {"ended": 24, "running": 4, "waiting": 2, "refused": 2, "left": 1}
    for policy, simulated in found["policies"].items():
        assert simulated["figures"]["requests"] == frame["requests"], policy
        assert sum(simulated["figures"]["finish"].values()) == frame["requests"]
    requests = list(client.history.newest())
    assert found["measured"]["output_tokens"] == sum(request.n_output for request in requests)
    assert found["measured"]["finish"] == {
        "length": 24,
        "decode": 4,
        "waiting": 2,
        "error": 2,
        "abort": 1,
    }


def test_the_length_of_an_answer_that_nobody_saw_is_that_of_another():
    requests = sorted(interrupted_client().history.newest(), key=lambda request: request.arrival)
    lengths = np.array(
        sorted(request.n_output for request in requests if request.finish in ("stop", "length"))
    )
    for request in requests:
        asked = _wanted(request, lengths)
        if request.finished is None:
            assert request.n_output < asked <= request.max_tokens
        elif not request.stays:
            assert asked in lengths.tolist() or asked == request.max_tokens
        else:
            assert asked == max(1, request.n_output)


def test_the_prediction_tells_its_error():
    frame, found = work_of(served_client(40), Experiment(policies=["static", "continuous"]))
    assert frame["measured"]["policy"] == "continuous" and set(found["errors"]) == {"continuous"}
    assert abs(found["errors"]["continuous"]["output_tok_s"]) < 0.2
    assert "predictions of continuous were off by up to" in found["verdict"]
    _, few = work_of(served_client(12), Experiment(policies=["static", "continuous"]))
    assert few["errors"]["continuous"] == {} and "the error is unknown" in few["verdict"]


def test_clients_that_wait_are_replayed_as_such():
    watched = Watched()
    watched.clock.now = time.monotonic() - 20
    watched.history._started = watched.clock.now
    for number in range(40):
        while len(watched.core.scheduler.sequences.requests) >= 3:
            watched.step()
        watched.add(
            f"r{number}", [1, 2, number % 40], max_tokens=3 + 3 * (number % 6), ignore_eos=True
        )
    watched.run()
    client = FakeClient(seats=4, pages=32, page_size=8, context_length=64)
    client.history = watched.history
    _, found = work_of(client, Experiment(policies=["static", "continuous"]))
    assert found["closed_loop"] == 3
    static = found["policies"]["static"]["figures"]
    assert static["served"] == 40 and static["queue_s"]["max"] < 0.5 * static["seconds"], (
        "nobody sends ahead"
    )
    assert work_of(served_client(40), Experiment(policies=["continuous"]))[1]["closed_loop"] == 0


def test_the_engine_is_replayed_with_the_buckets_it_has():
    settings = ENGINE.model_dump(mode="json")
    engine = RecordedEngine(settings, 64, 32, (2, 4), (12, 16), on_device=True)
    own = engine.shape({}).buckets
    assert [str(bucket) for bucket in own.all()] == ["decode-2", "decode-4", "mixed-12", "mixed-16"]
    wide = RecordedEngine(settings | {"max_seats": 16, "token_budget": 64}, 64, 32)
    sizes = {"seat_buckets": (4, 16), "token_buckets": (8, 16, 64)}
    small = msgspec.structs.replace(wide, **sizes).shape({}).buckets
    compiled = Buckets.of(
        max_seats=16, token_budget=64, seat_sizes=(4, 16), token_sizes=(8, 16, 64)
    )
    assert small == compiled, "with no more rows than seats a bucket has a seat for four rows"
    assert [bucket.seats for bucket in small.mixed] == [2, 4, 16]
    free = msgspec.structs.replace(engine, padding_is_free=True)
    for changes in ({}, {"max_seats": 8, "token_budget": 64}):
        assert free.shape(changes).buckets.padding_is_free
        assert not engine.shape(changes).buckets.padding_is_free
    more = engine.shape({"max_seats": 8, "token_budget": 64}).buckets
    assert [b.seats for b in more.decode] == [1, 4, 8], "those of a device, not of a CPU"
    client = served_client()
    assert client.info is not None
    client.info = changed(client.info, seat_buckets=(4,), token_buckets=(16,), platform="gpu")
    job, _ = at_once(Lab(client, lambda: ENGINE)._prepare(Experiment()))
    assert (job.engine.seat_buckets, job.engine.token_buckets, job.engine.on_device) == (
        (4,),
        (16,),
        True,
    )


def test_a_request_that_runs_on_has_brought_what_it_has():
    request = RequestRecord(
        number=0,
        n_prompt=4,
        n_output=11,
        arrival=0.0,
        boarded=0.0,
        first_token=2.0,
        finished=12.0,
        finish="length",
    )
    tokens = [_delivered(request, end) for end in (1.0, 2.0, 7.0, 12.0, 50.0)]
    assert tokens == [0.0, 1.0, 6.0, 11, 11]
    seen = _seen_until([request], 7.0)
    assert seen["output_tokens"] == 6 and seen["ttft_s"]["max"] == 2.0 and seen["e2e_s"] is None


@pytest.mark.parametrize(
    "experiment, param",
    [
        ({"minutes": 0}, "minutes"),
        ({"minutes": 11}, "minutes"),
        ({"speed": 11}, "speed"),
        ({"price_per_hour": 0}, "price_per_hour"),
        ({"policies": []}, "policies"),
        ({"policies": ["static", "static"]}, "policies"),
        ({"policies": ["best"]}, "policies"),
        ({"settings": {"kernels": "x"}}, "settings"),
        ({"settings": {"batch_size": 99}}, "settings"),
        ({"settings": {"max_seats": "4"}}, "max_seats"),
        ({"settings": {"prefill_share": 2}}, "prefill_share"),
        ({"minutes": "5"}, "body"),
        ({"other": 1}, "body"),
    ],
)
def test_wishes_that_make_no_sense(experiment, param):
    reply = run(call(lab_app(served_client(1)), "/lab", experiment))
    assert reply.status == 400 and reply.error["param"] == param, reply.error


def test_an_experiment_is_json_and_short():
    app = lab_app(served_client(1))
    plain = run(call(app, "/lab", b"{}", headers={"content-type": "text/plain"}))
    assert plain.status == 415, "a page elsewhere could send this unasked"
    assert run(call(app, "/lab", b" " * 5000)).status == 413


def test_nothing_to_replay():
    client = FakeClient()
    reply = run(call(lab_app(FakeClient()), "/lab", {}))
    assert reply.status == 400 and "no traffic" in reply.error["message"]
    without_settings = Dashboard(client, ServerSettings(), lab=Lab(client, None))
    assert run(call(without_settings.to_mount(), "/lab", {})).status == 503
    assert run(call(page(client), "/lab", {})).status == 404


async def test_a_running_experiment_can_be_stopped_and_has_its_time():
    lab = Lab(served_client(), lambda: ENGINE)
    await lab.start(Experiment())
    await asyncio.sleep(0)
    with pytest.raises(HttpError):
        await lab.start(Experiment())
    await lab.stop()
    assert lab.status()["state"] == "idle"
    hasty = Lab(served_client(), lambda: ENGINE, limit_s=0.05)
    await hasty.start(Experiment())
    assert hasty._task is not None
    await hasty._task
    assert hasty.status()["state"] == "failed" and "0.05 s" in hasty.status()["error"]
