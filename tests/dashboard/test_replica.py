"""What deltas rebuild equals the key frames exactly, over random runs of the scheduler on a fake
device.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator

import numpy as np
import pytest
from api_fakes import FakeClient
from history_fakes import INFO, Watched

from jitney.dashboard import remote, snapshot, sse
from jitney.dashboard.replica import ReplicaView, SeatView
from jitney.engine.common.messages import SeatMap


class Mirror(FakeClient):
    """A client whose history is a real core's."""

    def __init__(self, watched: Watched):
        super().__init__(seats=4, page_size=4)
        self.history = watched.history
        self.watched = watched

    def snapshot_now(self) -> snapshot.Snapshot:
        core = self.watched.core
        records = self.history.records.since(-1)
        return snapshot.Snapshot(
            t=self.watched.clock(),
            step=self.history.records.last_step,
            state="ready",
            last_step_age_s=0.0,
            progress=None,
            seats=snapshot.seat_columns(self.history),
            pages=snapshot.PageCells.of(SeatMap(0, [], core.scheduler.pool.states().tobytes())),
            metrics=snapshot._metrics(self, records[-1:], snapshot.Recent()),
            n_events=self.history.events.n,
        )


def as_events(*encoded: bytes) -> list[tuple[str, object]]:
    text = b"".join(encoded)

    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, len(text), 37):  # as a socket may bring them
            yield text[at : at + 37]

    async def collect() -> list[tuple[str, object]]:
        return [sse.decode(event) async for event in remote._whole_events(parts())]

    return asyncio.run(collect())


def rebuilt(now: snapshot.Snapshot) -> ReplicaView:
    """What a viewer knows who has just come."""
    replica = ReplicaView()
    hello = sse.hello(
        INFO,
        run="r",
        hz=10,
        key_frame_s=2,
        needs_key=False,
        shows_text=False,
        history_h=0,
        role="admin",
        t=0,
        unix_time=0,
    )
    for name, data in as_events(hello, sse.encode("key_frame", now.key_frame(4), "r:1")):
        replica.apply(name, data)
    return replica


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pages", [33, 13])
def test_deltas_rebuild_the_key_frame(seed: int, pages: int):
    rng = random.Random(seed)
    watched = Watched(pages=pages)
    client = Mirror(watched)
    before = client.snapshot_now()
    replica = rebuilt(before)
    named = 0
    for number in range(150):
        if rng.random() < 0.3:
            watched.add(
                f"r{number}",
                [rng.randrange(40) for _ in range(rng.randint(1, 20))],
                n=rng.choice((1, 2)),
                max_tokens=rng.randint(1, 30),
                ignore_eos=rng.random() < 0.7,
            )
        if rng.random() < 0.05:
            watched.core.abort(f"r{rng.randrange(number + 1)}")
        for _ in range(rng.randint(0, 4)):  # several steps, or none, between two snapshots
            if watched.core.has_work:
                watched.step()
        now = client.snapshot_now()
        assert now.follows(before)
        change = now.delta(before)
        named += len(change.get("seats", ()))
        for name, data in as_events(sse.encode("delta", change, "r:2")):
            replica.apply(name, data)
        fresh = rebuilt(now)
        assert (
            replica.seats == fresh.seats
            and replica.cells == fresh.cells
            and replica.counts == fresh.counts
        )
        assert json.dumps(replica.metrics, sort_keys=True) == json.dumps(
            fresh.metrics, sort_keys=True
        )
        assert (replica.t, replica.step, replica.n_events) == (fresh.t, fresh.step, fresh.n_events)
        before = now
    assert 0 < named < 150 * 4 * 0.8, "most seats go on without being named"


def test_what_cannot_be_a_delta():
    client = Mirror(Watched())
    one = client.snapshot_now()
    other = client.snapshot_now()
    other.seats = None
    assert not one.follows(None) and not other.follows(one) and not one.follows(other)
    other = client.snapshot_now()
    assert other.follows(one)
    assert other.pages is not None
    other.pages.cells = np.zeros(3, np.uint8)
    assert not other.follows(one)
    other = client.snapshot_now()
    other.step = one.step - 1
    assert not other.follows(one)


def test_a_seat_that_is_not_named_goes_on():
    decoding, reading = (
        SeatView("decode", "a", 0, 5, 7, 3, 9),
        SeatView("prefill", "b", 0, 50, 16, 0, 9),
    )
    decoding.advance(2)
    reading.advance(2)
    assert (decoding.n_output, decoding.n_computed, reading.n_computed) == (5, 9, 16)


def test_notes_and_unknown_events():
    replica = ReplicaView()
    for number in range(30):
        replica.apply("note", {"code": "x", "t": number, "message": "began"})
    replica.apply("note", {"code": "x", "t": 20, "message": "goes on"})
    replica.apply("something new", {})
    assert [note["t"] for note in replica.notes] == list(range(10, 30)) and replica.info == {}
    assert [note["t"] for note in replica.notes if note["message"] == "goes on"] == [20]
