"""Requests, request_detail, bins and traces, against runs of the scheduler on a fake device and
hand-made cases.
"""

from __future__ import annotations

import json
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from api_fakes import FakeClient
from fakes import FakeClock, make_request
from history_fakes import Watched, random_run
from page_fakes import get, page
from sliced_work import at_once

from jitney.dashboard import latency, request_detail, timeline
from jitney.engine.common.errors import ErrorInfo
from jitney.engine.common.history import History
from jitney.engine.common.messages import StepReport
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.records import ROW_KINDS, STEP_DTYPE
from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.server.http.access import Identity
from jitney.engine.server.http.routing import Role


def serve(watched: Watched):
    """The page of a history; its clock and ours differ, so times in queries are always given."""
    client = FakeClient()
    client.history = watched.history
    return page(client)


def two_in_one_seat() -> Watched:
    """One seat, two requests: the second waits for the first."""
    watched = Watched(seats=1, budget=8)
    watched.add("first", [1, 2, 3], max_tokens=5, ignore_eos=True)
    watched.add("second", list(range(12)), max_tokens=4, ignore_eos=True)
    watched.run()
    return watched


def detail_of(watched: Watched, request_id: str, index: int = 0) -> dict:
    request = watched.history.find(request_id, index)
    assert request is not None
    return json.loads(
        json.dumps(at_once(request_detail.detail(watched.history, request, watched.clock())))
    )


def test_who_sat_in_its_seat_while_it_waited_is_told_to_whom_it_concerns():
    watched = two_in_one_seat()
    history = watched.history
    first, second = history.find("first", 0), history.find("second", 0)
    assert first is not None and second is not None and first.finished is not None
    (sitter,) = detail_of(watched, "second")["sitters"]
    assert (sitter["request"], sitter["index"]) == ("first", 0)
    assert sitter["to"] == pytest.approx(first.finished, abs=1e-3)
    assert detail_of(watched, "first")["sitters"] == []
    first.tenant, second.tenant = "ann", "ben"
    ben = Identity(Role.USER, "ben")
    detail = at_once(request_detail.detail(history, second, watched.clock(), ben))
    assert [one["request"] for one in detail["sitters"]] == [""]


def test_a_row_has_the_route_the_account_and_the_adapter_and_a_story_the_parameters():
    client = FakeClient()
    client.history.adapters[3] = "pirate"
    request = make_request("a", [1], temperature=0.5, seed=7, tenant="c" * 64)
    request = msgspec.structs.replace(request, route="/v1/completions", adapter=3)
    client.history.submit(request)
    app = page(client)
    (row,) = get(app, "/requests").json()["requests"]
    named = [row["route"], row["account"], row["adapter"]]
    assert named == ["/v1/completions", "key cccccccc", "pirate"]
    told = get(app, "/request/a").json()["parameters"]
    assert "temperature 0.5" in told and "seed 7" in told and "top_p" not in told


def test_a_detail_told_by_hand():
    watched = two_in_one_seat()
    detail = detail_of(watched, "second")
    assert [phase["kind"] for phase in detail["phases"]] == ["queue", "prefill", "decode"]
    assert [chunk["count"] for chunk in detail["chunks"]] == [8, 4]
    assert [chunk["start"] for chunk in detail["chunks"]] == [0, 8]
    assert [chunk["shared_with"] for chunk in detail["chunks"]] == [0, 0]
    assert len(detail["cadence"]["t"]) == 4 == detail["n_output"] and detail["finish"] == "length"
    assert detail["phases"][0]["to"] == detail["phases"][1]["from"] == detail["seated"]
    assert detail["phases"][2]["to"] == detail["finished"] and detail["phases"][1]["steps"] == 2
    assert {"queue", "prefill", "decode"} <= {cause["code"] for cause in detail["causes"]}


@pytest.mark.parametrize(("number", "name"), [(0, ""), (2, "de")])
def test_a_detail_names_the_adapter(number: int, name: str):
    watched = two_in_one_seat()
    client = FakeClient(adapters=("fr", "de"))
    asked = EngineRequest(
        id="third", prompt=[1], sampling=SamplingParams(), arrival=0.0, adapter=number
    )
    client.history.submit(asked)
    request = client.history.find("third", 0)
    assert request is not None
    detail = at_once(request_detail.detail(client.history, request, watched.clock()))
    assert detail["adapter"] == name


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pages", [33, 13])
def test_causes_add_up_to_the_time_it_took(seed: int, pages: int):
    watched = random_run(seed, pages=pages)
    for request in watched.history.newest():
        detail = detail_of(watched, request.request_id, request.index)
        assert sum(cause["seconds"] for cause in detail["causes"]) == pytest.approx(
            detail["e2e_s"], abs=2e-3
        )
        assert [c["seconds"] for c in detail["causes"]] == sorted(
            (c["seconds"] for c in detail["causes"]), reverse=True
        )
        assert len(detail["cadence"]["t"]) == request.n_output
        assert detail["cadence"]["t"] == sorted(detail["cadence"]["t"])
        edges = [edge for phase in detail["phases"] for edge in (phase["from"], phase["to"])]
        assert edges == sorted(edges) and edges[-1] == pytest.approx(detail["finished"], abs=2e-3)
        if request.preemptions and len(request.stays) > 1:
            assert "preemption" in {cause["code"] for cause in detail["causes"]}


def test_those_who_share_are_the_other_seats_of_the_step():
    watched = Watched()
    for name in "abc":
        watched.add(name, [1, 2, 3], max_tokens=6, ignore_eos=True)
    watched.run()
    detail = detail_of(watched, "a")
    assert detail["chunks"][0]["shared_with"] == 2 and detail["shared"]["max"] == 2
    assert detail["shared"]["prefill_rows_of_others"] == 6


def test_a_slow_step_is_named():
    """A history fed by hand: 5 steps of 10 ms, but the third compiles for a second."""
    history, clock = History(clock=FakeClock()), 0.0
    watched = Watched()
    history = watched.history
    watched.add("a", [1, 2, 3], max_tokens=5, ignore_eos=True)
    for number in range(6):
        report = watched.core.step()
        record = np.frombuffer(report.record, STEP_DTYPE).copy() if report.record else None
        if record is not None:
            slow = number == 3
            record["started"], record["device_s"], record["compiled"] = (
                clock,
                1.0 if slow else 0.01,
                slow,
            )
            for name in ("plan_s", "batch_s", "launch_s", "gap_s"):
                record[name] = 0
            clock += 1.0 if slow else 0.01
        history.take(
            StepReport(
                report.outputs,
                record.tobytes() if record is not None else b"",
                report.events,
                report.chunks,
            )
        )
    detail = detail_of(watched, "a")
    assert detail["cadence"]["slowest"]["cause"] == "compile"
    assert detail["cadence"]["gap_max"] == pytest.approx(1.0, abs=1e-3)
    assert detail["causes"][0]["code"] == "compile" and detail["shared"]["compiles"] == 1
    assert detail["cadence"]["gap_p50"] == pytest.approx(0.01, abs=1e-3)


def test_an_open_request_is_told_as_far_as_it_has_come():
    watched = Watched(seats=1, budget=8)
    watched.add("on board", [1, 2, 3], max_tokens=50, ignore_eos=True)
    watched.add("waits", [1, 2, 3], max_tokens=5, ignore_eos=True)
    for _ in range(6):
        watched.step()
    detail, waits = detail_of(watched, "on board"), detail_of(watched, "waits")
    assert (
        detail["state"] == "decode"
        and detail["e2e_s"] is None
        and detail["phases"][-1]["to"] is None
    )
    assert waits["phases"] == [
        {
            "kind": "queue",
            "seat": -1,
            "from": waits["arrival"],
            "to": None,
            "step_from": -1,
            "step_to": -1,
            "steps": 0,
        }
    ]
    assert [cause["code"] for cause in waits["causes"]] == ["queue"] and waits["cadence"][
        "slowest"
    ] is None


def test_listing_pages_through_all_and_filters():
    watched = random_run(1)
    watched.add("new", [1, 2], n=2)
    app, seen, cursor = serve(watched), [], ""
    while True:
        answer = get(app, f"/requests?limit=7{cursor}").json()
        seen += [(row["request"], row["index"]) for row in answer["requests"]]
        assert len(answer["requests"]) <= 7
        if answer["next"] is None:
            break
        cursor = f"&cursor={answer['next']}"
    assert seen == [
        (request.request_id, request.index) for request in watched.history.newest()
    ] and seen[0] == ("new", 1)
    waiting = get(app, "/requests?state=waiting").json()["requests"]
    assert [row["request"] for row in waiting] == ["new", "new"]
    assert len(get(app, "/requests?state=finished&limit=1000").json()["requests"]) == len(seen) - 2
    assert get(app, "/requests?state=open").json()["requests"] == waiting


def refused(watched: Watched, name: str, error: ErrorInfo) -> None:
    """A request that the engine does not let in."""
    watched.history.submit(make_request(name, [1, 2], arrival=watched.clock()))
    output = SequenceOutput(request_id=name, index=0, finish="error", error=error)
    watched.history.take(StepReport([output]))


def test_a_refused_request_is_said_to_be_refused_and_never_to_have_waited():
    watched = Watched()
    watched.add("served", [1, 2], max_tokens=2, ignore_eos=True)
    watched.run()
    refused(watched, "full", ErrorInfo("queue_full", "too many wait", retry_after=2.25))
    refused(watched, "wrong", ErrorInfo("invalid_value", "no"))
    app = serve(watched)
    rows = {row["request"]: row for row in get(app, "/requests").json()["requests"]}
    told = {
        name: (row["state"], row.get("status"), row["retry_s"], row["message"])
        for name, row in rows.items()
    }
    assert told == {
        "served": ("finished", None, None, ""),
        "full": ("refused", 429, 2.25, "too many wait"),
        "wrong": ("refused", 400, None, "no"),
    }
    detail = get(app, "/request/full").json()
    assert (detail["state"], detail["causes"], detail["phases"]) == ("refused", [], [])
    for state, names in (("finished", ["served"]), ("refused", ["wrong", "full"])):
        listed = get(app, f"/requests?state={state}").json()["requests"]
        assert [row["request"] for row in listed] == names


def test_ones_own_rows_are_those_of_the_steps():
    """Where all requests are one user's, its rows are all there are."""
    watched = Watched(seats=3, budget=8)
    for number in range(6):
        prompt = list(range(1, 4 + 5 * number))
        watched.add(f"r{number}", prompt, max_tokens=3 + number, ignore_eos=True)
    watched.run()
    identity = Identity(Role.USER, "")
    own = at_once(timeline.own_columns(watched.history, -1, 2**62, watched.clock(), identity))
    records = watched.history.records.since(-1)
    shown = own["columns"]
    by_step = {record["step"]: record for record in records}
    for place, step in enumerate(shown["step"]):
        record = by_step[step]
        for kind in ("prefill", "recomputed", "decode"):
            assert shown[kind][place] == record[kind], (step, kind)
    for kind in ("prefill", "decode"):
        assert sum(shown[kind]) == records[kind].sum() > 0
    assert own["totals"]["padding"] == records["padding"].sum()
    stranger = Identity(Role.USER, "somebody else")
    none = at_once(timeline.own_columns(watched.history, -1, 2**62, watched.clock(), stranger))
    assert none["columns"]["step"] == [] and none["totals"] == own["totals"]


@pytest.mark.parametrize(
    "path, param",
    [
        ("/requests?limit=0", "limit"),
        ("/requests?limit=1001", "limit"),
        ("/requests?state=odd", "state"),
        ("/requests?cursor=x", "cursor"),
        ("/timeline?bins=601", "bins"),
        ("/timeline?from=nan", "from"),
        ("/timeline?to=inf", "to"),
        ("/trace?from=x", "from"),
        ("/request/a?index=-1", "index"),
        ("/frames?to=1.5", "to"),
    ],
)
def test_bad_queries_are_named(client, path: str, param: str):
    answer = get(page(client), path)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_a_request_that_nobody_knows(client):
    answer = get(page(client), "/request/nobody")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"
    assert get(page(client), "/request/req-b?index=1").json()["state"] == "prefill"


def test_bins_add_up_and_stays_cover_the_seats():
    watched = random_run(2, pages=13)
    history, end = watched.history, watched.clock()
    shown = json.loads(json.dumps(at_once(timeline.Window(history, 0.0, end).timeline(37, end))))
    records = history.records.since(-1)
    bins = shown["bins"]
    assert sum(bins["steps"]) == len(records) and len(bins["t"]) == 37
    for kind in ROW_KINDS:
        assert sum(bins["rows"][kind]) == int(records[kind].sum())
    for name in ("boarded", "finished", "preempted"):
        assert sum(bins[name]) == int(records[name].sum())
    assert max(value for value in bins["longest_step_s"] if value is not None) == pytest.approx(
        float((records["device_s"] + records["gap_s"]).max()), abs=1e-6
    )
    assert max(v for v in bins["waiting"] if v is not None) == int(records["waiting"].max())
    known = [value is not None for value in bins["itl_p95"]]
    assert any(known)
    assert [value is not None for value in bins["itl_p50"]] == known
    stays = shown["stays"]
    assert len(stays["seat"]) == sum(len(request.stays) for request in history.newest())
    assert len(set(map(len, stays.values()))) == 1 and stays["from"] == sorted(stays["from"])
    assert set(stays["end"]) <= {"stop", "length", "abort", "preempted"}


def test_a_bin_holds_its_own_steps_only():
    watched = random_run(4)
    history, end = watched.history, watched.clock()
    records, ready = history.records.between(0, end)
    shown = at_once(timeline.Window(history, 0.0, end).binned(10))
    for number in range(10):
        low, high = number * end / 10, (number + 1) * end / 10
        inside = records[(ready > low) & (ready <= high)]
        assert shown["steps"][number] == len(inside)
        assert shown["rows"]["decode"][number] == int(inside["decode"].sum())


def test_percentiles_are_the_least_value_that_enough_do_not_exceed():
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1, 97, 2])
    assert latency._percentiles(values, weights) == {"p50": 1.0, "p95": 1.0, "p99": 2.0}
    assert latency._percentiles(np.zeros(0), np.zeros(0, np.int64)) is None


def test_gaps_between_tokens_are_those_of_the_streams():
    """Against the tokens' own times: the gaps of all sequences, counted one by one."""
    watched = random_run(5)
    gaps = sorted(
        round(gap, 6)
        for request in watched.history.newest()
        if request.finish != "abort"
        for gap in np.diff(detail_of(watched, request.request_id, request.index)["cadence"]["t"])
    )
    latencies = latency.Latencies.between(watched.history, 0, 1e9)
    _, values, weights = latencies.samples()["itl"]
    assert int(weights.sum()) == pytest.approx(len(gaps), rel=0.05)  # aborted streams had some, too
    assert float(np.repeat(values, weights).mean()) == pytest.approx(float(np.mean(gaps)), rel=0.05)
    histogram = latencies.histograms()["itl"]
    assert (
        sum(histogram["counts"]) == int(weights.sum())
        and len(histogram["counts"]) == len(histogram["bounds"]) + 1
    )


def test_the_trace_is_one_that_chrome_reads():
    watched = two_in_one_seat()
    pieces = timeline.Window(watched.history, 0, 1e9).trace(watched.clock(), "m")
    events = json.loads(b"".join(pieces))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert [(span["name"], span["tid"]) for span in spans] == [
        ("prefill first", 0),
        ("decode first", 0),
        ("prefill second", 0),
        ("decode second", 0),
    ]
    for before, after in pairwise(spans):
        assert before["ts"] + before["dur"] <= after["ts"] + 1
    steps = [event for event in events if event["ph"] == "X" and event["pid"] == 2]
    assert [event["args"]["step"] for event in steps] == watched.history.records.since(-1)[
        "step"
    ].tolist()
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} >= {
        "seat 0",
        "step loop",
        "m: seats",
    }


def test_engines_are_one(client):
    assert get(page(client), "/engines").json() == {
        "standalone": False,
        "signed_in": False,
        "fleet": "",
        "engines": [{"name": "scripted", "url": "", "base": "", "state": "ready"}],
    }
