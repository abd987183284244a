"""The journal against the core itself: after every report it knows who sits where, and each token's
step.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fakes import FakeClock, device_of, ends_of, make_core, make_request
from journal_fakes import INFO, Watched, random_run

from jitney.engine import messages
from jitney.engine.core import EngineCore
from jitney.engine.records import RecordRing
from jitney.engine.telemetry.history import KEEP_S
from jitney.engine.telemetry.request_record import Trip


def steps_of(trip: Trip) -> list[int]:
    """Steps that brought a token: all of a stay from its first token on."""
    return [
        step
        for ride in trip.rides
        if ride.first_token is not None
        for step in range(ride.first_step, ride.last_step + 1)
    ]


@pytest.mark.parametrize("seed", range(6))
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
def test_the_journal_knows_what_the_core_knows(seed: int, core: dict[str, Any]):
    watched = random_run(seed, **core)
    ends = ends_of(watched.outputs)
    trips = {(trip.request, trip.index): trip for trip in watched.journal.newest()}
    assert trips.keys() == ends.keys() and not list(watched.journal.open())
    for key, end in ends.items():
        trip = trips[key]
        tokens = [out for out in watched.outputs if (out.request_id, out.index) == key]
        assert trip.n_output == sum(len(out.tokens) for out in tokens) and trip.finish == end.finish
        first = next((out for out in tokens if out.tokens), None)
        assert (trip.first_token is None) == (first is None)
        if end.finish != "abort":
            assert len(steps_of(trip)) == trip.n_output, (trip.rides, trip.n_output)
            computed = sum(chunk.count for chunk in trip.chunks if not chunk.recomputed)
            assert computed <= trip.n_prompt + trip.n_output
        if first is not None and first.queued_s is not None:
            assert trip.queued_s is not None and trip.queued_s == pytest.approx(
                first.queued_s, abs=0.02
            )
    # Who is preempted while its last token is in flight may have ended before we hear of it.
    assert (
        sum(trip.preemptions for trip in trips.values()) <= watched.core.ledger.totals["preempted"]
    )
    assert watched.journal.boarded == sum(bool(trip.rides) for trip in trips.values())


@pytest.mark.usefixtures("rash")
def test_tight_runs_do_preempt():
    assert random_run(0, pages=13).core.ledger.totals["preempted"] > 0


def test_rides_of_a_seat_never_overlap():
    watched = random_run(3, pages=13)
    rides = sorted((ride.seat, ride.start, ride.end) for _, ride in watched.journal.rides(-1, 1e9))
    assert len(rides) > 20
    for (seat, _, end), (other, start, _) in pairwise(rides):
        assert seat != other or end is None or end <= start


def test_life_is_told_in_order():
    watched = Watched()
    watched.add("a", [1, 2, 3], max_tokens=3, ignore_eos=True)
    while watched.core.has_work:
        watched.step()
    events = watched.journal.life_since(0)
    assert [(e.event, e.seat, e.n_in, e.n_out, e.reason) for e in events] == [
        ("queued", -1, 3, 0, ""),
        ("seated", 0, 3, 0, ""),
        ("first_token", 0, 3, 1, ""),
        ("finished", 0, 3, 3, "length"),
    ]
    assert [e.step for e in events[1:]] == [1, 1, 3] and [e.t for e in events] == sorted(
        e.t for e in events
    )
    assert watched.journal.life_since(3) == events[3:] and watched.journal.life_since(4) == []


def test_refusals_are_counted_apart():
    watched = Watched(max_requests=1)
    for number in range(8):
        watched.add(f"r{number}", [1, 2], max_tokens=2, ignore_eos=True)
    watched.step()
    assert watched.journal.rejected == {"queue_full": 3}
    while watched.core.has_work:
        watched.step()
    assert watched.journal.finished["length"] == 5 and watched.journal.finished["error"] == 0


def test_a_lost_core_ends_every_trip_and_steps_go_on_rising():
    watched = Watched()
    watched.add("a", [1, 2, 3], max_tokens=30, ignore_eos=True)
    for _ in range(5):
        watched.step()
    watched.journal.core_lost("engine_dead")
    trip = watched.journal.trip("a", 0)
    assert trip is not None and (trip.state, trip.code) == ("finished", "engine_dead")
    assert watched.journal.seats == [None] * 4 and watched.journal.n_open == 0
    before = watched.journal.records.last_step
    watched.core = make_core(clock=watched.clock)
    watched.journal.core_ready(INFO)
    watched.add("b", [1], max_tokens=2, ignore_eos=True)
    while watched.core.has_work:
        watched.step()
    steps = watched.journal.records.since(-1)["step"]
    assert steps[-1] > before and np.all(np.diff(steps) > 0)


def test_old_trips_are_forgotten():
    watched = Watched()
    watched.add("old", [1], max_tokens=1)
    while watched.core.has_work:
        watched.step()
    watched.clock.now += KEEP_S + 1
    assert watched.journal.trip("old", 0) is not None
    watched.add("new", [1], max_tokens=1)
    while watched.core.has_work:
        watched.step()
    assert watched.journal.trip("old", 0) is None and watched.journal.trip("new", 0) is not None


def test_tokens_are_kept_only_if_asked_for():
    watched = Watched()
    watched.journal._keep_tokens = True
    watched.add("a", [1, 2], max_tokens=3, ignore_eos=True)
    while watched.core.has_work:
        watched.step()
    trip = watched.journal.trip("a", 0)
    assert (
        trip is not None
        and trip.tokens is not None
        and trip.tokens[:2] == [1, 2]
        and len(trip.tokens) == 5
    )
    plain = Watched()
    plain.add("a", [1, 2])
    assert (other := plain.journal.trip("a", 0)) is not None and other.tokens is None


def test_slots_are_answered_after_the_plan():
    """A seat that was just left while somebody waits is taken again when the answer is made."""
    watched = Watched(seats=2, budget=8)
    for number in range(6):
        watched.add(f"r{number}", [1, 2], max_tokens=3, ignore_eos=True)
    looks = []
    while watched.core.has_work:
        waiting = watched.core.scheduler.roster.n_waiting
        watched.core.ask(messages.AskSlots(7))
        report = watched.core.step()
        (answer,) = report.answers
        assert answer.ticket == 7
        if waiting > 2:
            looks.append([slot.state for slot in answer.slots])
    assert len(looks) > 2 and all("free" not in look for look in looks)


def test_pages_alone_are_answered_without_the_seats():
    core: EngineCore = make_core()
    assert (
        core.slots(1, seats=False).slots == [] and len(core.slots(1, seats=False).page_states) == 33
    )
    assert device_of(core).page_size == 4


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
