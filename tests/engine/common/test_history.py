"""The history against the core itself: after every report it knows who sits where, and each token's
step.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest
from fakes import FakeClock, ends_of, make_core, make_request
from history_fakes import INFO, Watched, random_run

from jitney.engine.common import messages
from jitney.engine.common.history import History
from jitney.engine.common.records import RecordRing
from jitney.engine.common.request_record import RequestRecord


def steps_of(request: RequestRecord) -> list[int]:
    """Steps that brought a token: all of a stay from its first token on."""
    return [
        step
        for stay in request.stays
        if stay.first_token is not None
        for step in range(stay.first_step, stay.last_step + 1)
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "core",
    [
        {},
        {"pages": 13},
        {"policy": "static", "batch_size": 3, "static_timeout_ms": 5.0},
        {"policy": "dynamic", "batch_size": 4, "max_wait_ms": 2.0, "pages": 13},
    ],
    ids=["room", "tight", "static", "dynamic"],
)
def test_the_history_knows_what_the_core_knows(seed: int, core: dict[str, Any]):
    watched = random_run(seed, **core)
    ends = ends_of(watched.outputs)
    requests = {
        (request.request_id, request.index): request for request in watched.history.newest()
    }
    assert requests.keys() == ends.keys() and not list(watched.history.open())
    for key, end in ends.items():
        request = requests[key]
        tokens = [out for out in watched.outputs if (out.request_id, out.index) == key]
        assert (
            request.n_output == sum(len(out.tokens) for out in tokens)
            and request.finish == end.finish
        )
        first = next((out for out in tokens if out.tokens), None)
        assert (request.first_token is None) == (first is None)
        if end.finish != "abort":
            assert len(steps_of(request)) == request.n_output, (request.stays, request.n_output)
            computed = sum(chunk.count for chunk in request.chunks if not chunk.recomputed)
            assert computed <= request.n_prompt + request.n_output
        if first is not None and first.queued_s is not None:
            assert request.queue_s is not None and request.queue_s == pytest.approx(
                first.queued_s, abs=0.02
            )
    # Who is preempted while its last token is in flight may have ended before we hear of it.
    assert (
        sum(request.preemptions for request in requests.values())
        <= watched.core.ledger.totals["preempted"]
    )
    assert watched.history.boarded == sum(bool(request.stays) for request in requests.values())


def test_life_is_told_in_order():
    watched = Watched()
    watched.add("a", [1, 2, 3], max_tokens=3, ignore_eos=True)
    while watched.core.has_work:
        watched.step()
    events = watched.history.events.since(0)
    assert [(e.event, e.seat, e.n_in, e.n_out, e.reason) for e in events] == [
        ("queued", -1, 3, 0, ""),
        ("seated", 0, 3, 0, ""),
        ("first_token", 0, 3, 1, ""),
        ("finished", 0, 3, 3, "length"),
    ]
    assert [e.step for e in events[1:]] == [1, 1, 3] and [e.t for e in events] == sorted(
        e.t for e in events
    )
    assert watched.history.events.since(3) == events[3:] and watched.history.events.since(4) == []


def test_refusals_are_no_ends():
    """And the answers that refuse them are counted, not their sequences."""
    watched = Watched(max_requests=1)
    for number in range(8):
        watched.add(f"r{number}", [1, 2], max_tokens=2, ignore_eos=True)
    watched.step()
    assert not watched.history.incidents.rejected
    assert sum(record.refused for record in watched.history.newest()) == 3
    while watched.core.has_work:
        watched.step()
    assert watched.history.finished["length"] == 5 and watched.history.finished["error"] == 0


def test_a_lost_core_ends_every_trip_and_steps_go_on_rising():
    watched = Watched()
    watched.add("a", [1, 2, 3], max_tokens=30, ignore_eos=True)
    for _ in range(5):
        watched.step()
    watched.history.core_lost()
    request = watched.history.find("a", 0)
    assert request is not None and (request.state, request.code) == ("finished", "engine_dead")
    assert watched.history.seats == [None] * 4 and watched.history.n_open == 0
    before = watched.history.records.last_step
    watched.core = make_core(clock=watched.clock)
    watched.history.core_ready(INFO)
    watched.add("b", [1], max_tokens=2, ignore_eos=True)
    while watched.core.has_work:
        watched.step()
    steps = watched.history.records.since(-1)["step"]
    assert steps[-1] > before and np.all(np.diff(steps) > 0)


def test_requests_that_another_core_goes_on_with_wait_meanwhile():
    """Their stays end, their records go on: one request, one record, whatever cores it had."""
    watched = Watched()
    one = make_request("a", [1, 2, 3], max_tokens=9, ignore_eos=True, n=2)
    watched.history.submit(one)
    watched.core.add(one)
    for _ in range(6):
        watched.step()
    records = [watched.history.find("a", index) for index in range(2)]
    had = [watched.outputs_of("a", index) for index in range(2)]
    assert all(record is not None and record.state == "decode" for record in records)
    watched.history.seats_lost()
    assert [record.state for record in records if record] == ["waiting", "waiting"]
    assert watched.history.seats == [None] * 4 and watched.history.n_waiting == 2
    lost = watched.history.events.since(0)[-2:]
    assert [(event.event, event.reason) for event in lost] == [("preempted", "engine_died")] * 2
    watched.core = make_core(clock=watched.clock)
    watched.history.core_ready(INFO)
    watched.core.add(msgspec.structs.replace(one, resumed=had))
    while watched.core.has_work:
        watched.step()
    for record in records:
        assert record is not None and (record.n_output, record.finish) == (9, "length")
        assert len(record.stays) == 2 and record.preemptions == 1
        assert record.stays[0].end is not None and record.stays[0].end <= record.stays[1].start


def test_an_outage_is_over_when_its_streams_flow_again():
    """Another engine has to compute again what each stream had."""
    watched = Watched(budget=8)
    history = watched.history
    for name in ("a", "b", "waits"):
        prompt = list(range(1, 9)) if name != "waits" else [1] * 40
        watched.add(name, prompt, max_tokens=9, ignore_eos=True)
    while not all(watched.outputs_of(name, 0) for name in ("a", "b")):
        watched.step()
    had = {name: [watched.outputs_of(name, 0)] for name in ("a", "b")}
    assert not watched.outputs_of("waits", 0), "no stream of it is under way"
    history.seats_lost()
    history.incidents.outage_began("killed", n_resumed=3, n_lost=0)
    (outage,) = history.incidents.outages
    history.core_ready(INFO)
    assert outage.ready is not None and outage.flowing is None
    watched.core = make_core(clock=watched.clock, budget=8)
    for name in ("a", "b"):
        record = history.find(name, 0)
        assert record is not None
        again = make_request(name, list(range(1, 9)), max_tokens=9, ignore_eos=True)
        watched.core.add(msgspec.structs.replace(again, resumed=had[name]))
    flowed: dict[str, float] = {}
    while len(flowed) < 2:
        assert outage.flowing is None and (outage.n_streams, outage.n_flowing) == (2, len(flowed))
        watched.step()
        for name in ("a", "b"):
            if len(watched.outputs_of(name, 0)) > len(had[name][0]):
                flowed.setdefault(name, history.records.last_ready)
    assert outage.flowing == max(flowed.values()) > outage.ready


def test_an_outage_without_streams_is_over_with_the_next_engine():
    history = History(clock=FakeClock(1.0))
    history.core_ready(INFO)
    history.seats_lost()
    history.incidents.outage_began("killed", n_resumed=0, n_lost=0)
    history.core_ready(INFO)
    assert history.incidents.outages[0].flowing == history.incidents.outages[0].ready is not None


def test_a_stream_that_ends_meanwhile_is_not_waited_for():
    watched = Watched()
    watched.add("a", [1, 2, 3], max_tokens=9, ignore_eos=True)
    while not watched.outputs_of("a", 0):
        watched.step()
    watched.history.seats_lost()
    watched.history.incidents.outage_began("killed", n_resumed=1, n_lost=0)
    watched.history.core_ready(INFO)
    assert watched.history.incidents.outages[0].flowing is None
    watched.history.core_lost()
    assert watched.history.incidents.outages[0].flowing is not None


def test_old_trips_are_forgotten():
    watched = Watched()
    watched.add("old", [1], max_tokens=1)
    while watched.core.has_work:
        watched.step()
    watched.clock.now += History.keep_s + 1
    assert watched.history.find("old", 0) is not None
    watched.add("new", [1], max_tokens=1)
    while watched.core.has_work:
        watched.step()
    assert watched.history.find("old", 0) is None and watched.history.find("new", 0) is not None


def test_what_is_kept_grows_no_more_once_its_time_is_full():
    """A request every ten seconds for an hour: what has no largest number goes by age."""
    watched = Watched()
    kept: list[dict[str, int]] = []
    for number in range(360):
        watched.clock.now += 10.0
        watched.add(f"r{number}", [1, 2], max_tokens=3, ignore_eos=True)
        watched.run()
        if number in (119, 239, 359):
            parts = vars(watched.history)
            kept.append(
                {
                    name: len(part)
                    for name, part in parts.items()
                    if isinstance(part, dict | list | set | deque)
                    and getattr(part, "maxlen", None) is None
                }
            )
    assert kept[0]["_records"] <= History.keep_s / 10 + 1
    assert kept[0] == kept[1] == kept[2]


def test_tokens_are_kept_only_if_asked_for():
    watched = Watched()
    watched.history = History(keep_tokens=True, clock=watched.clock)
    watched.history.core_ready(INFO)
    watched.add("a", [1, 2], max_tokens=3, ignore_eos=True)
    while watched.core.has_work:
        watched.step()
    request = watched.history.find("a", 0)
    assert (
        request is not None
        and request.tokens is not None
        and request.tokens[:2] == [1, 2]
        and len(request.tokens) == 5
    )
    plain = Watched()
    plain.add("a", [1, 2])
    assert (other := plain.history.find("a", 0)) is not None and other.tokens is None


def test_slots_are_answered_after_the_plan():
    """A seat that was just left while somebody waits is taken again when the answer is made."""
    watched = Watched(seats=2, budget=8)
    for number in range(6):
        watched.add(f"r{number}", [1, 2], max_tokens=3, ignore_eos=True)
    looks = []
    while watched.core.has_work:
        waiting = watched.core.scheduler.n_waiting
        watched.core.ask(messages.AskSeatMap(7))
        report = watched.core.step()
        (answer,) = report.answers
        assert answer.ticket == 7 and isinstance(answer, messages.SeatMap)
        if waiting > 2:
            looks.append([seat.state for seat in answer.seats])
    assert len(looks) > 2 and all("free" not in look for look in looks)


def test_the_ring_finds_records_by_step_and_by_time():
    ring, kept = RecordRing(16), []
    core = make_core(clock=FakeClock(0.01))
    for number in range(10):
        core.add(make_request(f"r{number}", [1, 2, 3], max_tokens=9, ignore_eos=True))
    while core.has_work:
        if record := core.step().record:
            kept.append(ring.add(record, 5))
    assert len(kept) > 20 and len(ring) == 16 and ring.last_step == kept[-1]["step"]
    for step in (0, kept[-16]["step"], kept[-9]["step"], kept[-1]["step"], 999):
        assert ring.since(step).tolist() == [
            record.item() for record in kept[-16:] if record["step"] > step
        ]
    records, ready = ring.steps(kept[-5]["step"], kept[-3]["step"])
    assert records["step"].tolist() == [kept[-4]["step"], kept[-3]["step"]] and np.all(
        np.diff(ready) > 0
    )
    within, times = ring.between(ready[0] - 1e-6, ready[1] - 1e-6)
    assert within["step"].tolist() == [kept[-4]["step"]] and times[0] == ready[0]


def test_what_nobody_waits_for_is_in_no_distribution_of_waits():
    watched = Watched()
    watched.add("live", [1, 2, 3], max_tokens=2)
    watched.add("b", [1, 2, 3], max_tokens=2, background=True)
    while watched.core.has_work:
        watched.step()
    history = watched.history
    assert (len(history.waits), len(history.first_tokens), history.boarded) == (1, 1, 2)
    assert [record.background for record in history.oldest()] == [False, True]
