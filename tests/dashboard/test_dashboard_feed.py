"""The feed: what it says equals the engine's arrays, it costs nothing unwatched, and slow viewers harm nobody."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
import pytest

from jitney.dashboard import frames
from jitney.dashboard.feed import QUEUE, Feed, TooManyViewers, Viewer
from jitney.engine.errors import RequestError
from jitney.engine.ledger import ROW_KINDS
from jitney.engine.wire import Progress


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


def watch(feed: Feed, number: int) -> list[tuple[str, Any]]:
    async def session() -> list[tuple[str, Any]]:
        with feed.viewer() as viewer:
            return await asyncio.wait_for(take(viewer, number), 5)

    return asyncio.run(session())


def test_a_key_frame_is_the_engines_own_arrays(client):
    (_, hello), (name, key) = watch(Feed(client), 2)
    assert name == "key" and key["step"] == 2 and key["state"] == "ready" and key["progress"] is None
    states = [hello["states"][code] for code in base64.b64decode(key["seats"]["state"])]
    assert states == [slot.state for slot in client.seats]
    assert key["seats"]["request"] == [slot.request_id for slot in client.seats]
    for name in hello["seat_columns"]:
        assert key["seats"][name] == [getattr(slot, name) for slot in client.seats]
    assert base64.b64decode(key["pages"]["cells"]) == client.page_states[1:]  # page 0 is nobody's
    assert key["pages"]["counts"] == {"free": 1, "held": 4, "shared": 2, "cached": 3}
    assert key["s"]["rows"] == {kind: sum(int(record[kind]) for record in client.kept) for kind in ROW_KINDS}
    assert key["s"]["steps"] == {"decode": 0, "mixed": 3}
    assert (key["s"]["waiting"], key["s"]["waiting_tokens"], key["s"]["seats_busy"]) == (2, 64, 3)
    assert key["s"]["step_s"] == pytest.approx(0.063, abs=1e-6) and key["s"]["gap_s"] == pytest.approx(0.003, abs=1e-6)


def test_hello_says_what_runs(client):
    ((name, hello),) = watch(Feed(client, keys=True), 1)
    assert name == "hello" and hello["info"]["model"] == "scripted" and hello["info"]["seats"] == 4
    assert hello["keys"] is True and hello["hz"] == 5.0


def test_the_longest_step_is_of_those_since_the_frame_before(client):
    async def session() -> list[Any]:
        with Feed(client, hz=100).viewer() as viewer:
            first = await take(viewer, 2)
            client.step(device_s=0.5, gap_s=0.25)
            client.step(device_s=0.1)
            return [*first, *await take(viewer, 2)]

    events = [data for name, data in asyncio.run(session()) if name == "key"]
    assert [event["s"]["worst_s"] for event in events] == [None, 0.75, None]


def test_loading_then_ready_says_hello_again(client):
    info, client.info, client.state = client.info, None, "loading"
    client.progress = Progress("compile", 3, 8)

    async def session() -> list[tuple[str, Any]]:
        with Feed(client, hz=100).viewer() as viewer:
            before = await take(viewer, 2)
            assert client.asked == 0
            client.info, client.state = info, "ready"
            return [*before, *await take(viewer, 2)]

    hello, key, again, after = asyncio.run(session())
    assert hello[1]["info"] is None and again[0] == "hello" and again[1]["info"]["model"] == "scripted"
    assert key[1]["state"] == "loading" and key[1]["progress"]["done"] == 3 and key[1]["seats"] is None
    assert after[1]["state"] == "ready" and after[1]["progress"] is None


def test_an_engine_that_does_not_answer_leaves_the_seats_out(client):
    async def no_answer():
        raise RequestError("busy", code="internal_error")

    client.slots = no_answer
    key = watch(Feed(client), 2)[1][1]
    assert key["seats"] is None and key["pages"] is None and key["s"]["waiting"] == 2


def test_a_dead_engine_ends_the_feed(client):
    client.state = "dead"
    events = watch(Feed(client), 9)
    assert [name for name, _ in events] == ["hello", "key", "bye"]
    assert events[1][1]["state"] == "dead"


def test_a_failing_sampler_ends_the_feed_and_is_logged(client, caplog):
    client.records = lambda after: 1 / 0
    assert [name for name, _ in watch(Feed(client), 9)] == ["hello", "bye"]
    assert "division by zero" in caplog.text


def test_nobody_watches_nothing_happens(client):
    async def session() -> None:
        feed = Feed(client, hz=200)
        await asyncio.sleep(0.03)
        assert client.asked == 0 and not feed.sampling
        for _ in range(2):  # a viewer who comes right after the last one left finds a sampler, too
            with feed.viewer() as viewer:
                await asyncio.wait_for(take(viewer, 4), 5)
        asked = client.asked
        await asyncio.sleep(0.03)
        assert client.asked == asked and not feed.sampling and feed.viewers == 0

    asyncio.run(session())


def test_all_viewers_get_the_same_bytes_of_one_look(client):
    async def session() -> None:
        feed = Feed(client, hz=50)
        with feed.viewer() as one, feed.viewer() as other:
            assert await take(one, 3) == await take(other, 3)
            assert client.asked == 2

    asyncio.run(session())


def test_the_viewer_too_many_is_refused(client):
    async def session() -> None:
        feed = Feed(client, max_viewers=1)
        with feed.viewer():
            with pytest.raises(TooManyViewers), feed.viewer():
                pass
            assert feed.viewers == 1
        with feed.viewer():
            pass

    asyncio.run(session())


def test_a_slow_viewer_loses_the_oldest_frames_but_not_the_hello():
    async def session() -> None:
        viewer = Viewer(frames.event("hello", {}))
        for number in range(20):
            viewer.put(frames.event("key", number, number))
        viewer.close(frames.bye("done"))
        viewer.put(frames.event("key", 99))
        events = await take(viewer, 99)
        assert [data for name, data in events if name == "key"] == list(range(20 - (QUEUE - 2), 20))
        assert events[0][0] == "hello" and events[-1][0] == "bye" and len(events) == QUEUE
        assert viewer.dropped == 22 - QUEUE

    asyncio.run(session())


def test_a_large_pool_shows_what_most_pages_of_a_cell_are():
    rng = np.random.default_rng(0)
    states = rng.integers(0, 4, 3 * frames.MAX_PAGE_CELLS - 5, np.uint8)
    shown = frames.pages(bytes([9]) + states.tobytes())
    cells = list(base64.b64decode(shown["cells"]))
    groups = [list(states[at:at + 3]) for at in range(0, len(states), 3)]
    assert shown["per_cell"] == 3 and len(cells) == len(groups)
    assert cells == [min(range(4), key=lambda code: (-group.count(code), code)) for group in groups]
    assert list(shown["counts"].values()) == [int(np.sum(states == code)) for code in range(4)]


def test_record_columns_are_the_newest_records(client, monkeypatch):
    monkeypatch.setattr(frames, "MAX_RECORDS", 2)
    told = json.loads(frames.record_columns(client.records(-1), 5.0))
    assert told["left_out"] == 1 and told["columns"]["step"] == [1, 2] and told["t"] == 5.0
    for name in client.kept[0].dtype.names:
        assert told["columns"][name] == pytest.approx([record[name].item() for record in client.kept[1:]], abs=1e-6)
