"""The feed: what it says equals the engine's arrays, it costs nothing unwatched, and slow viewers
harm nobody.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from typing import Any

import numpy as np
import pytest
from api_fakes import FakeClient, Script, call, make_app
from engine_infos import changed
from page_fakes import viewers_of
from sliced_work import at_once

from jitney.dashboard import feed as feed_module
from jitney.dashboard import snapshot, sse, timeline
from jitney.dashboard.feed import Feed
from jitney.dashboard.viewers import _QUEUE, TooManyViewers, Viewer
from jitney.engine.common.engine_info import KernelProof, Seat
from jitney.engine.common.errors import ErrorInfo, RequestError
from jitney.engine.common.messages import Progress, SeatMap, SequenceEvent, StepReport
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.records import ROW_KINDS

#: A request of the scripted engine, which has a stream under way.
MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture(autouse=True)
def key_frames_only_when_needed(monkeypatch: pytest.MonkeyPatch):
    """On a machine that stalls for seconds, a key frame that is due would come where a test waits
    for a delta.
    """
    monkeypatch.setattr(feed_module, "_KEY_FRAME_S", 3600.0)


def parse(event: bytes) -> tuple[str, Any]:
    head, _, data = event.decode().partition("data: ")
    assert data.endswith("\n\n") and "\n" not in data[:-2]
    return head.splitlines()[0].removeprefix("event: "), json.loads(data)


async def take(viewer: Viewer, number: int) -> list[tuple[str, Any]]:
    events = []
    async for event in viewer:
        events.append(parse(event))
        if len(events) == number:
            break
    return events


async def watch(feed: Feed, number: int) -> list[tuple[str, Any]]:
    """The first events of a new viewer."""
    with feed.viewer() as viewer:
        return await asyncio.wait_for(take(viewer, number), 60)


async def test_a_key_frame_is_the_engines_own_arrays(client):
    (_, hello), (name, key) = await watch(Feed(client), 2)
    assert (
        name == "key_frame"
        and key["step"] == 2
        and key["state"] == "ready"
        and key["progress"] is None
    )
    states = [hello["seat_states"][code] for code in base64.b64decode(key["seats"]["state"])]
    assert states == [seat.state for seat in client.seats]
    assert key["seats"]["request"] == [seat.request_id for seat in client.seats]
    for name in (*hello["seat_numbers"], "pages"):
        assert key["seats"][name] == [getattr(seat, name) for seat in client.seats]
    assert base64.b64decode(key["pages"]["cells"]) == client.states[1:]  # page 0 is nobody's
    assert key["pages"]["counts"] == {"free": 1, "held": 4, "shared": 2, "cached": 3}
    assert key["metrics"]["rows"] == {
        kind: sum(int(record[kind]) for record in client.kept) for kind in ROW_KINDS
    }
    assert key["metrics"]["steps"] == {"decode": 0, "mixed": 3} and key["metrics"]["boarded"] == 3
    assert (
        key["metrics"]["waiting"],
        key["metrics"]["waiting_tokens"],
        key["metrics"]["seats_busy"],
    ) == (2, 64, 3)
    assert key["metrics"]["step_s"] == pytest.approx(0.063, abs=1e-6) and key["metrics"][
        "gap_s"
    ] == pytest.approx(0.003, abs=1e-6)
    assert (
        key["n_events"] == client.history.events.n and key["histograms"]["wait"]["counts"][0] == 3
    )


async def test_hello_says_what_runs(client):
    ((name, hello),) = await watch(Feed(client, needs_key=True), 1)
    assert name == "hello" and hello["info"]["model"] == "scripted" and hello["info"]["seats"] == 4
    assert (
        hello["needs_key"] is True
        and hello["shows_text"] is False
        and hello["hz"] == 10.0
        and hello["version"] == 4
    )
    assert hello["seat_states"] == ["free", "prefill", "decode", "held"]


async def test_a_delta_says_what_changed_and_nothing_else(client):
    with Feed(client, hz=100).viewer() as viewer:
        await take(viewer, 2)
        client.seat(2, "prefill", "req-c", n_prompt=9, n_computed=4, max_tokens=5)
        client.states = bytes([0, 1, 1, 1, 1, 2, 2, 1, 1, 3, 1])
        client.step(seats_busy=4, waiting=2, waiting_tokens=64, pages_used=6, decode=2)
        [(events, delta)] = [await take(viewer, 2)]
    assert events[0] == "events"
    assert [event[2:8] for event in events[1]["events"]] == [
        ["queued", "req-c", 0, -1, 9, 0],
        ["seated", "req-c", 0, 2, 9, 0],
    ]
    name, change = delta
    assert (
        name == "delta"
        and change["step"] == 3
        and change.keys()
        <= {"t", "step", "n_events", "last_step_age_s", "seats", "metrics", "pages"}
    )
    # One step later each decoding seat is expected to have a token more; these have not, so they
    # are named.
    assert change["seats"] == [
        [0, 2, "req-a", 0, 5, 12, 8, 16],
        [2, 1, "req-c", 0, 9, 4, 0, 5],
        [3, 2, client.seats[3].request_id, 0, 7, 9, 3, 4],
    ]
    assert {"rows", "steps", "boarded", "step_s"} <= change[
        "metrics"
    ].keys() and "preemptions" not in change["metrics"]


def test_page_changes_come_as_runs():
    rng = np.random.default_rng(1)
    for _ in range(50):
        before, now = rng.integers(0, 4, (2, 40), np.uint8)
        now = np.where(rng.random(40) < 0.5, before, now).astype(np.uint8)
        rebuilt = before.copy()
        for first, count, state in snapshot._page_runs(before, now):
            assert count >= 1 and not np.any(before[first : first + count] == state)
            rebuilt[first : first + count] = state
        assert np.array_equal(rebuilt, now)


async def test_the_longest_step_is_of_those_since_the_frame_before(client):
    with Feed(client, hz=100).viewer() as viewer:
        events = await take(viewer, 2)
        client.step(device_s=0.5, gap_s=0.25)
        client.step(device_s=0.1)
        events += await take(viewer, 2)
    frames = [data for name, data in events if name in ("key_frame", "delta")]
    assert [data["metrics"]["longest_step_s"] for data in frames] == [None, 0.75, None]


async def test_key_frames_come_again_and_again(client, monkeypatch):
    monkeypatch.setattr(feed_module, "_KEY_FRAME_S", 0.01)
    events = await watch(Feed(client, hz=50), 4)
    assert [name for name, _ in events] == ["hello", "key_frame", "key_frame", "key_frame"]


async def test_an_idle_engine_is_told_of_once_a_second(client):
    with Feed(client, hz=200).viewer() as viewer:
        await take(viewer, 2)
        ((name, beat),) = await asyncio.wait_for(take(viewer, 1), 60)
    assert name == "delta" and "seats" not in beat and "rows" not in beat.get("metrics", {})


async def test_loading_then_ready_says_hello_again(client):
    info, client.info, client.state = client.info, None, "loading"
    client.progress = Progress("compile", 3, 8)

    with Feed(client, hz=100).viewer() as viewer:
        before = await take(viewer, 2)
        assert client.asked == 0
        client.info, client.state = info, "ready"
        hello, key, again, after = [*before, *await take(viewer, 2)]
    assert (
        hello[1]["info"] is None and again[0] == "hello" and again[1]["info"]["model"] == "scripted"
    )
    assert (
        key[1]["state"] == "loading" and key[1]["progress"]["done"] == 3 and key[1]["seats"] is None
    )
    assert after[0] == "key_frame" and after[1]["state"] == "ready" and after[1]["progress"] is None


async def test_an_engine_that_does_not_answer_leaves_the_pages_out(client):
    async def no_answer():
        raise RequestError("busy", code="internal_error")

    client.seat_map = no_answer
    key = (await watch(Feed(client), 2))[1][1]
    assert (
        key["pages"] is None
        and key["seats"]["request"][0] == "req-a"
        and key["metrics"]["waiting"] == 2
    )


async def test_a_dead_engine_ends_the_feed(client):
    client.state = "dead"
    events = await watch(Feed(client), 9)
    assert [name for name, _ in events] == ["hello", "key_frame", "bye"]
    assert events[1][1]["state"] == "dead"


async def test_a_failing_sampler_ends_the_feed_and_is_logged(client, caplog):
    client.history.records.since = lambda after: 1 / 0
    assert [name for name, _ in await watch(Feed(client), 9)] == ["hello", "bye"]
    assert "division by zero" in caplog.text


async def test_nobody_watches_nothing_happens(client):
    feed = Feed(client, hz=200)
    await asyncio.sleep(0.03)
    assert client.asked == 0 and not feed.sending
    for _ in range(2):  # a viewer who comes right after the last one left finds a sampler, too
        with feed.viewer() as viewer:
            await asyncio.wait_for(take(viewer, 3), 60)
    asked = client.asked
    await asyncio.sleep(0.6)  # longer than from one look at the pages to the next
    assert client.asked == asked and not feed.sending and viewers_of(feed) == 0


async def test_all_viewers_get_the_same_bytes_of_one_look(client):
    feed = Feed(client, hz=50)
    with feed.viewer() as one, feed.viewer() as other:
        assert (await take(one, 2))[1] == (await take(other, 2))[1]
        client.step()
        assert await take(one, 1) == await take(other, 1)
        assert client.asked == 1
        with feed.viewer() as late:
            name, key = (await take(late, 2))[1]
            assert name == "key_frame" and key["step"] == 3


async def test_who_comes_back_gets_what_was_missed(client):
    async def first(viewer: Viewer, number: int):
        async for event in viewer:
            yield event
            number -= 1
            if not number:
                return

    feed = Feed(client, hz=100)
    with feed.viewer() as steady:
        with feed.viewer() as viewer:
            await take(viewer, 2)
            client.step()
            (event,) = [event async for event in first(viewer, 1)]
            last_id = event.split(b"id: ")[1].split(b"\n")[0].decode()
        client.step()
        missed = await take(steady, 4)
        client.step()
        with feed.viewer(last_id) as back:
            again = await take(back, 3)
        assert again[0][0] == "hello" and again[1] == missed[-1] and again[2][1]["step"] == 5
        with feed.viewer("other:7") as stranger:
            assert [name for name, _ in await take(stranger, 2)] == ["hello", "key_frame"]


async def test_the_viewer_too_many_is_refused(client):
    feed = Feed(client)
    feed._max_viewers = 1
    with feed.viewer():
        with pytest.raises(TooManyViewers), feed.viewer():
            pass
        assert viewers_of(feed) == 1
    with feed.viewer():
        pass


async def test_a_slow_viewer_starts_again_from_a_key_frame(client):
    feed = Feed(client, hz=1000)
    with feed.viewer() as slow, feed.viewer() as quick:
        await take(quick, 2)
        while not slow.dropped:
            client.step()
            await take(quick, 1)
        client.step()
        await take(quick, 2)
        first, second, *_ = await take(slow, 3)
        assert first[0] == "hello" and second[0] == "key_frame" and slow.dropped == _QUEUE


async def test_the_end_of_a_feed_is_not_lost_with_the_rest():
    viewer = Viewer([sse.encode("hello", {})])
    for number in range(_QUEUE + 5):
        viewer.put(sse.encode("delta", number))
    assert viewer.lost
    viewer.close(sse.bye("done"))
    viewer.put(sse.encode("delta", 99))
    events = await take(viewer, 99)
    assert events[0][0] == "hello" and events[-1][0] == "bye" and ("delta", 99) not in events


def test_a_large_pool_shows_what_most_pages_of_a_cell_are():
    rng = np.random.default_rng(0)
    states = rng.integers(0, 4, 3 * snapshot._MAX_PAGE_CELLS - 5, np.uint8)
    shown = snapshot.PageCells.of(SeatMap(0, [], bytes([9]) + states.tobytes())).shown()
    cells = list(base64.b64decode(shown["cells"]))
    groups = [list(states[at : at + 3]) for at in range(0, len(states), 3)]
    assert shown["per_cell"] == 3 and len(cells) == len(groups)
    assert cells == [min(range(4), key=lambda code: (-group.count(code), code)) for group in groups]
    assert list(shown["counts"].values()) == [int(np.sum(states == code)) for code in range(4)]


def test_record_columns_are_the_newest_records(client, monkeypatch):
    monkeypatch.setattr(timeline, "_MAX_RECORDS", 2)
    shown = at_once(timeline.record_columns(client.history, -1, 99, 5.0))
    assert shown["left_out"] == 1 and shown["columns"]["step"] == [1, 2] and shown["t"] == 5.0
    for name in client.kept[0].dtype.names:
        assert shown["columns"][name] == pytest.approx(
            [record[name].item() for record in client.kept[1:]], abs=1e-6
        )
    assert shown["columns"]["ready"] == pytest.approx([0.04, 0.06], abs=1e-6)


@pytest.mark.parametrize(
    "fields, code", [({"compiled": 1}, "compile"), ({"preempted": 9}, "preemption_storm")]
)
async def test_notes_of_what_steps_did(client, fields, code):
    with Feed(client, hz=100).viewer() as viewer:
        await take(viewer, 2)
        client.step(**fields)
        client.step()
        (name, note), (_, delta) = await take(viewer, 2)
    assert (
        name == "note" and note["code"] == code and note["level"] == "warn" and delta["step"] == 4
    )


async def test_notes_of_the_end(client):
    with Feed(client, hz=100).viewer() as viewer:
        await take(viewer, 2)
        client.history.incidents.outage_began("killed by SIGKILL", n_resumed=3, n_lost=1)
        client.state = "dead"
        events = await take(viewer, 4)
    assert [data["code"] for name, data in events if name == "note"] == ["outage", "dead"]
    told = next(data for name, data in events if name == "note")["message"]
    assert "killed by SIGKILL" in told and "went on: 3" in told and "an error: 1" in told
    assert [name for name, _ in events][-2:] == ["key_frame", "bye"]


async def next_note(viewer: Viewer) -> dict[str, Any]:
    while True:
        ((name, data),) = await take(viewer, 1)
        if name == "note":
            return data


async def test_refusals_are_told_from_the_first_with_their_number_and_reason(client):
    """One note that is renewed; another one after a calm time; who comes later knows them all."""
    clock = [1000.0]
    client.history.incidents._clock = lambda: clock[0]

    notes = []
    with Feed(client, hz=100).viewer() as viewer:
        await take(viewer, 2)
        for seconds, status, code, number in (
            (0.0, 429, "queue_full", 1),
            (4.0, 429, "queue_full", 38),
            (29.0, 503, "restarting", 2),
            (31.0, 429, "rate_limit", 1),
        ):
            clock[0] += seconds
            for _ in range(number):
                client.history.incidents.refused(status, code, 2.5)
            notes.append(await asyncio.wait_for(next_note(viewer), 30))
    first, more, other, later = notes
    assert {note["code"] for note in (first, more, other, later)} == {"refusals"}
    assert first["t"] == more["t"] == other["t"] == 1000.0 and later["t"] == 1064.0
    assert first["message"].startswith("1 request") and "429 queue_full" in first["message"]
    assert "2.5 s" in first["message"]
    assert more["message"].startswith("39 requests") and "39 x 429 queue_full" in more["message"]
    assert "39 x 429 queue_full" in other["message"] and "2 x 503 restarting" in other["message"]
    assert later["message"].startswith("1 request") and "429 rate_limit" in later["message"]
    kept = (await watch(Feed(client), 2))[1][1]["notes"]
    assert kept == [other, later]


async def test_every_refused_request_counts_once_whoever_refuses_it():
    """Seven by the limit of their key, one with two sequences by the engine."""
    gate = threading.Event()
    client = FakeClient()
    client.scripts = [Script(gate=gate), Script(error=ErrorInfo("queue_full", "full"))]
    app = make_app(client, key_max_concurrent=2)
    history, began = client.history, client.history.clock()

    async def ask() -> int:
        body = {"model": "m", "prompt": "Hi", "max_tokens": 4, "n": 2}
        return (await call(app, "/v1/completions", body)).status

    first = asyncio.create_task(ask())
    while not client.requests:
        await asyncio.sleep(0.001)
    assert [await ask() for _ in range(7)] == [429] * 7
    gate.set()
    assert [await first, await ask()] == [200, 429]
    _, (_, frame) = await watch(Feed(client), 2)
    assert frame["metrics"]["rejected"] == {"rate_limit": 7, "queue_full": 1}
    assert [note["hit"] for note in frame["notes"]] == [{"refused": 8}]
    bins = at_once(timeline.Window(history, began, history.clock()).binned(3))
    assert sum(bins["refused"]) == 8


async def test_kernels_taken_out_are_told_once_for_each_engine(client):
    wrong = KernelProof(kernel="attention", error=0.7, limit=0.01)
    client.info = changed(client.info, proofs=[wrong])
    client.history.core_ready(client.info)
    ready_at = client.history.ready_at
    feed = Feed(client, hz=100)

    with feed.viewer() as viewer:
        (_, (_, key_frame)) = await take(viewer, 2)
        client.history.ready_at += 1.0  # another one
        notes = [*key_frame["notes"], await asyncio.wait_for(next_note(viewer), 30)]
    assert [note["code"] for note in notes] == ["kernels_out", "kernels_out"]
    assert notes[0]["t"] == pytest.approx(ready_at, abs=1e-3) and "attention" in notes[0]["message"]
    assert len((await watch(feed, 2))[1][1]["notes"]) == 2, "who looks later finds them too"


async def until_notes(viewer: Viewer, number: int) -> list[tuple[str, Any]]:
    """All events until so many notes have come, and the frame behind them."""
    events: list[tuple[str, Any]] = []
    async with asyncio.timeout(120):
        while sum(name == "note" for name, _ in events) < number:
            events += await take(viewer, 1)
        return events + await take(viewer, 1)


def goes_on(client, stream: str, seat: int) -> None:
    """A stream boards again and has its next token."""
    boards = SequenceEvent("seated", stream, 0, seat, 3, 0.0, 0, 0)
    client.history.take(StepReport([], events=[boards]))
    client.history.take(StepReport([SequenceOutput(request_id=stream, index=0, tokens=[1])]))


async def test_a_full_disk_is_told_of_each_time_that_it_gets_full(client):
    client.history.incidents.disk_full()
    feed = Feed(client, hz=100)

    with feed.viewer() as viewer:
        (_, (_, key_frame)) = await take(viewer, 2)
        client.history.incidents.troubles[0].newest -= 60.0
        client.history.incidents.disk_full()
        notes = [*key_frame["notes"], await asyncio.wait_for(next_note(viewer), 30)]
    assert [(note["level"], note["code"]) for note in notes] == [("error", "disk_full")] * 2
    assert len((await watch(feed, 2))[1][1]["notes"]) == 2


async def test_an_outage_is_told_from_its_begin_to_its_end(client):
    """A core that dies before it is ready makes it longer, and it is over when streams flow again;
    who comes later knows it too.
    """

    with Feed(client, hz=100).viewer() as viewer:
        await take(viewer, 2)
        client.state = "restarting"
        client.history.seats_lost()
        client.history.incidents.outage_began("killed by SIGKILL", n_resumed=3, n_lost=0)
        events = await until_notes(viewer, 1)
        client.history.incidents.outage_began("ended with status 1", n_resumed=3, n_lost=1)
        client.history.core_ready(client.info)
        client.state = "ready"
        events += await until_notes(viewer, 1)
        for seat, stream in enumerate(("req-a", MARKUP)):
            goes_on(client, stream, seat)
            events += await until_notes(viewer, 1)
        events = events
    notes = [data for name, data in events if name == "note"]
    assert [note["code"] for note in notes] == ["outage"] * 4
    assert len({note["t"] for note in notes}) == 1, "each takes the place of the one before"
    assert ["streams flowed again" in note["message"] for note in notes] == [False] * 3 + [True]
    assert "0 of 2 go on" in notes[1]["message"] and "1 of 2 go on" in notes[2]["message"]
    (began,) = next(data["outages"] for name, data in events if "outages" in data)
    (ended,) = [data["outages"] for name, data in events if "outages" in data][-1]
    assert (began["cause"], began["restart"], began["ready"]) == ("killed by SIGKILL", 1, None)
    assert (ended["cause"], ended["restart"], ended["n_lost"]) == ("ended with status 1", 2, 1)
    assert ended["began"] == began["began"] <= ended["ready"] <= ended["flowing"]
    assert (began["flowing"], ended["n_streams"], ended["n_flowing"]) == (None, 2, 2)
    assert (await watch(Feed(client), 2))[1][1]["outages"] == [ended]
    now = ended["ready"]
    shown = at_once(timeline.Window(client.history, now - 9, now).timeline(9, now))
    assert shown["outages"] == [ended]


async def test_a_held_seat_is_told(client):
    client.history.held_seats.add(3)
    key = (await watch(Feed(client), 2))[1][1]
    assert list(base64.b64decode(key["seats"]["state"])) == [2, 1, 0, 3]
    assert Seat(seat=0, state="held").state in sse.SEAT_STATES
