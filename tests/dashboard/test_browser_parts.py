"""The page's modules by themselves, in the browser: deltas, rides, and pixels that must not depend
on how they came.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

import pytest
from api_fakes import until
from page_browser import endpoint


@pytest.fixture
def parts(client, open_page) -> Iterator:
    """Runs a script that may import the page's modules; the page itself stays away."""
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(endpoint(client))
        open_page.page.route("**/favicon.ico", lambda route: route.fulfill(status=204))
        open_page.page.goto(url + "/dashboard/assets/icon.svg")
        yield lambda script: open_page.page.evaluate(script)
        open_page.page.goto("about:blank")
    assert open_page.problems == []


def test_a_delta_moves_what_it_does_not_name(parts):
    seats = parts("""async () => {
        const {Engine} = await import("/dashboard/assets/engine.js"), engine = new Engine();
        engine.hello = {states: ["free", "prefill", "decode", "held"], info: {seats: 4}};
        const columns = {index: [0, 0, 0, 0], n_prompt: [5, 9, 4, 0], n_computed: [7, 3, 6, 0], n_output: [3, 0, 3, 0],
                         max_tokens: [9, 9, 9, 0]};
        const pages = {per_cell: 1, cells: btoa("\\0\\0\\0\\0"), counts: {}};
        engine.key({t: 1, step: 10, state: "ready", s: {worst_s: 1, waiting: 2}, pages,
                    seats: {state: btoa("\\x02\\x01\\x03\\x00"), request: ["a", "b", "c", null], ...columns}});
        engine.delta({t: 2, step: 12, s: {waiting: 1}, seats: [[1, 2, "b", 0, 9, 9, 1, 9], [3, 1, "d", 1, 30, 8, 0, 7]],
                      pages: {runs: [[1, 2, 3]], counts: {free: 2}}});
        const {seats} = engine;
        return [[...seats.state], seats.request, [...seats.n_output], [...seats.n_computed], [...seats.max_tokens],
                [...engine.pages.cells], engine.frame.s, engine.taken];
    }""")
    assert seats == [
        [2, 2, 3, 1],
        ["a", "b", "c", "d"],
        [5, 1, 3, 0],
        [9, 9, 6, 8],
        [9, 9, 9, 7],
        [0, 3, 3, 0],
        {"worst_s": 1, "waiting": 1},
        4,
    ]


def test_what_deltas_rebuild_equals_the_next_key_frame(parts, client):
    """The engine moves while the page listens; then it stands still, and the next key frame must
    say nothing new.
    """
    parts("""async () => {
        const load = (name) => import(`/dashboard/assets/${name}.js`);
        const [{Engine}, {watch}] = [await load("engine"), await load("feed")];
        const engine = new Engine(), stop = new AbortController();
        window.told = {still: false, deltas: 0, compared: 0, different: []};
        const known = () => {
            const {latency, worst_s: worst, ...totals} = engine.frame.s;  // these two are of a time, not of a state
            return JSON.stringify([engine.seats, [...engine.pages.cells], engine.pages.counts, totals]);
        };
        const on = {hello: (news) => { engine.hello = news; }, key: (news) => {
            const before = told.still ? known() : null;
            engine.key(news);
            if (before !== null && ++told.compared && before !== known()) told.different.push([before, known()]);
        }, d: (news) => { told.deltas++; engine.delta(news); }};
        told.stop = () => stop.abort();
        watch("/dashboard/", {event: (name, data) => on[name]?.(data), trouble: () => {}}, stop.signal);
    }""")
    draw, names = random.Random(2), iter(range(1000))
    for _ in range(40):
        seat, kind = draw.randrange(4), draw.random()
        if kind < 0.4:
            client.step(waiting=draw.randrange(5))
        elif kind < 0.7:
            client.seat(
                seat,
                "decode",
                f"r{next(names)}",
                n_prompt=5,
                n_computed=7,
                n_output=3,
                max_tokens=9,
                pages=1,
            )
        else:
            client.seat(
                seat,
                "prefill",
                f"r{next(names)}",
                n_prompt=50,
                n_computed=draw.randrange(50),
                max_tokens=9,
            )
        client.states = bytes([0, *(draw.randrange(4) for _ in range(10))])
        time.sleep(0.05)
    time.sleep(1)  # for the last changes to arrive
    parts("() => { told.still = true; }")
    until(lambda: parts("told.compared") > 0, 10)
    told = parts("() => { told.stop(); return {...told, stop: null}; }")
    assert told["deltas"] > 5 and told["different"] == []


def test_rides_follow_life_events_and_ignore_what_the_account_had(parts):
    rides = parts("""async () => {
        const {Rides} = await import("/dashboard/assets/rides.js"), rides = new Rides(8);
        rides.seed({kept_from: 0, rides: {
            seat: [0, 1], request: ["a", "b"], index: [0, 0], from: [1, 2], first_token: [1.5, null],
            to: [null, null], end: ["", ""], n_in: [4, 4], n_out: [1, 0]}});
        const live = (t, ev, request, seat, reason = "") => rides.live([t, 0, ev, request, 0, seat, 4, 9, reason]);
        live(1, "seated", "a", 0);
        live(3, "first_token", "b", 1);
        live(4, "finished", "a", 0, "stop");
        live(4, "seated", "c", 0);
        live(5, "preempted", "c", 0);
        live(6, "seated", "c", 2);
        live(7, "queued", "d", -1);
        return rides.newest(9).reverse().map((i) => [rides.request[i], rides.seat[i], rides.from[i], rides.first[i],
                                                     String(rides.to[i]), rides.end[i], rides.hue[i]]);
    }""")
    assert rides == [
        ["a", 0, 1, 1.5, "4", "stop", 0],
        ["b", 1, 2, 3, "Infinity", "", 1],
        ["c", 0, 4, 5, "5", "preempted", 2],
        ["c", 2, 6, float("inf"), "Infinity", "", 2],
    ]


def test_a_timeline_that_moved_on_equals_one_drawn_anew(parts):
    """300 looks at random rides, news of them up to half a second late; every pixel is compared."""
    different = parts("""async () => {
        const load = (name) => import(`/dashboard/assets/${name}.js`);
        const [{Rides}, {Raster}] = [await load("rides"), await load("raster")];
        const style = {"--idle": "#ffffff", "--idle-line": "#eeeeee", "--line": "#cccccc", "--stripe": "#fafafa"};
        for (let i = 0; i < 8; i++) style[`--hue-${i}`] = `#${(0x102030 * (i + 1)).toString(16).padStart(6, "0")}`;
        for (const [name, value] of Object.entries(style)) document.documentElement.style.setProperty(name, value);
        let seed = 1;
        const random = () => (seed = seed * 16807 % 2147483647) / 2147483647;
        const rides = new Rides(512), moving = new Raster(), seats = 6, ends = new Array(6).fill(0);
        rides.knownFrom = 100;
        moving.size(400, seats * 7);
        moving.readColours();
        let different = 0, t = 100;
        for (let look = 0; look < 300; look++) {
            t += 0.1;
            for (let seat = 0; seat < seats; seat++) {
                const number = rides.open.get(seat), i = number % 512, at = t - 0.4 * random(), chance = random();
                const name = number === undefined ? `r${look}` : rides.request[i];
                const tell = (time, ev) => rides.live([time, 0, ev, name, 0, seat, 1, 1, "stop"]);
                if (number === undefined) { if (chance < 0.2) tell(Math.max(at, ends[seat]), "seated"); }
                else if (rides.first[i] === Infinity) {
                    if (chance < 0.3) tell(Math.max(at, rides.from[i]), "first_token");
                } else if (chance < 0.1) tell(ends[seat] = Math.max(at, rides.first[i]), "finished");
            }
            const view = {right: t, span: 20, row: 7, seats, now: t, key: "k"};
            moving.paint(rides, view);
            const anew = new Raster();
            anew.size(400, seats * 7);
            anew.readColours();
            anew.paint(rides, view);
            for (let i = 0; i < anew.pixels.length; i++) if (anew.pixels[i] !== moving.pixels[i]) different++;
        }
        return [different, new Set(moving.pixels).size > 8];
    }""")
    assert different == [0, True]


def test_what_was_seen_can_be_found_again(parts):
    found = parts("""async () => {
        const load = (name) => import(`/dashboard/assets/${name}.js`);
        const [{Recorder}, {Rides}] = [await load("recorder"), await load("rides")];
        const recorder = new Recorder(2, ["free", "prefill", "decode", "held"]), rides = new Rides();
        rides.live([0.5, 0, "seated", "a", 0, 1, 9, 0, ""]);
        rides.live([0.8, 0, "first_token", "a", 0, 1, 9, 1, ""]);
        for (const [t, reached] of [[1, 5], [1.1, 6], [1.2, 7]]) {
            recorder.look(t, {count: 2, state: [0, 2], reached: () => reached, end: () => 9}, 3);
        }
        const show = (t) => {
            const moment = recorder.moment(t, rides);
            return [[...moment.state], moment.request(0), moment.request(1), moment.reached(1), moment.waiting];
        };
        return [show(1.15), show(0.6), show(0.9), recorder.neighbour(1.15, -1), recorder.neighbour(1.15, 1),
                recorder.neighbour(1.2, 1)];
    }""")
    assert found == [
        [[0, 2], None, "a", 6, 3],
        [[0, 1], None, "a", 0, None],
        [[0, 2], None, "a", 0, None],
        1.1,
        1.2,
        None,
    ]
