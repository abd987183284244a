"""The page's modules by themselves, in the browser: deltas, stays, and pixels that must not depend
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
        engine.hello = {seat_states: ["free", "prefill", "decode", "held"], info: {seats: 4}};
        const columns = {index: [0, 0, 0, 0], n_prompt: [5, 9, 4, 0], n_computed: [7, 3, 6, 0], n_output: [3, 0, 3, 0],
                         max_tokens: [9, 9, 9, 0]};
        const pages = {per_cell: 1, cells: btoa("\\0\\0\\0\\0"), counts: {}};
        engine.applyKeyFrame({t: 1, step: 10, state: "ready", metrics: {longest_step_s: 1, waiting: 2}, pages,
                    seats: {state: btoa("\\x02\\x01\\x03\\x00"), request: ["a", "b", "c", null], ...columns}});
        engine.applyDelta({t: 2, step: 12, metrics: {waiting: 1}, seats: [[1, 2, "b", 0, 9, 9, 1, 9], [3, 1, "d", 1, 30, 8, 0, 7]],
                      pages: {runs: [[1, 2, 3]], counts: {free: 2}}});
        const {seats} = engine;
        return [[...seats.state], seats.request, [...seats.n_output], [...seats.n_computed], [...seats.max_tokens],
                [...engine.pages.cells], engine.frame.metrics, engine.taken];
    }""")
    assert seats == [
        [2, 2, 3, 1],
        ["a", "b", "c", "d"],
        [5, 1, 3, 0],
        [9, 9, 6, 8],
        [9, 9, 9, 7],
        [0, 3, 3, 0],
        {"longest_step_s": 1, "waiting": 1},
        4,
    ]


def test_the_device_says_its_shares_and_what_is_not_known(parts):
    shown = parts("""async () => {
        const {showDevice} = await import("/dashboard/assets/device.js");
        const list = document.createElementNS("http://www.w3.org/1999/xhtml", "dl");
        const read = () => [...list.querySelectorAll("dd")].map((one) =>
            [one.textContent, one.querySelector("meter").hidden]);
        const known = {busy: 0.5, bytes_s: 5e9, operations_s: 2e11, ceiling_bytes_s: 20e9, ceiling_operations_s: 1e12,
                       bandwidth: 0.25, operations: 0.2};
        const told = [];
        for (const use of [known, {...known, bandwidth: null, ceiling_bytes_s: null},
                           {busy: 0, bytes_s: null, ceiling_bytes_s: 20e9}, undefined]) {
            showDevice(list, use);
            told.push(read());
        }
        return told;
    }""")
    known, alone, idle, nothing = shown
    assert known == [
        ["50\u00a0%", False],
        ["25\u00a0% of 20.0\u00a0GB/s", False],
        ["20\u00a0% of 1.00\u00a0TFLOP/s", False],
    ]
    assert alone[1][0].startswith("5.00\u00a0GB/s, share unknown") and alone[1][1]
    assert idle[1] == ["no step of late", True] and idle[2][0].startswith("unknown")
    assert [hidden for _, hidden in nothing] == [True] * 3


def test_what_deltas_rebuild_equals_the_next_key_frame(parts, client):
    """The engine moves while the page listens; then it stands still, and the next key frame must
    say nothing new.
    """
    parts("""async () => {
        const load = (name) => import(`/dashboard/assets/${name}.js`);
        const [{Engine}, {watch}] = [await load("engine"), await load("feed")];
        const engine = new Engine(), stop = new AbortController();
        window.seen = {still: false, deltas: 0, compared: 0, different: []};
        const known = () => {
            const {latency, longest_step_s: longest, ...totals} = engine.frame.metrics;  // these two are of a time, not of a state
            return JSON.stringify([engine.seats, [...engine.pages.cells], engine.pages.counts, totals]);
        };
        const on = {hello: (hello) => { engine.hello = hello; }, key_frame: (frame) => {
            const before = seen.still ? known() : null;
            engine.applyKeyFrame(frame);
            if (before !== null && ++seen.compared && before !== known()) seen.different.push([before, known()]);
        }, delta: (delta) => { seen.deltas++; engine.applyDelta(delta); }};
        seen.stop = () => stop.abort();
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
    parts("() => { seen.still = true; }")
    until(lambda: parts("seen.compared") > 0)
    seen = parts("() => { seen.stop(); return {...seen, stop: null}; }")
    assert seen["deltas"] > 5 and seen["different"] == []


def test_stays_follow_events_and_ignore_what_the_account_had(parts):
    stays = parts("""async () => {
        const {Stays} = await import("/dashboard/assets/stays.js"), stays = new Stays(8);
        stays.load({kept_from: 0, stays: {
            seat: [0, 1], request: ["a", "b"], index: [0, 0], from: [1, 2], first_token: [1.5, null],
            to: [null, null], end: ["", ""], n_prompt: [4, 4], n_output: [1, 0]}});
        const live = (t, event, request, seat, reason = "") =>
            stays.apply({t, event, request, index: 0, seat, n_prompt: 4, n_output: 9, reason});
        live(1, "seated", "a", 0);
        live(3, "first_token", "b", 1);
        live(4, "finished", "a", 0, "stop");
        live(4, "seated", "c", 0);
        live(5, "preempted", "c", 0);
        live(6, "seated", "c", 2);
        live(7, "queued", "d", -1);
        return stays.newest(9).reverse().map((i) => [stays.request[i], stays.seat[i], stays.from[i], stays.first[i],
                                                     String(stays.to[i]), stays.end[i], stays.hue[i]]);
    }""")
    assert stays == [
        ["a", 0, 1, 1.5, "4", "stop", 0],
        ["b", 1, 2, 3, "Infinity", "", 1],
        ["c", 0, 4, 5, "5", "preempted", 2],
        ["c", 2, 6, float("inf"), "Infinity", "", 2],
    ]


def test_a_timeline_that_moved_on_equals_one_drawn_anew(parts):
    """300 looks at random stays, events of them up to half a second late; every pixel is compared."""
    different = parts("""async () => {
        const load = (name) => import(`/dashboard/assets/${name}.js`);
        const [{Stays}, {Raster}] = [await load("stays"), await load("raster")];
        const style = {"--idle": "#ffffff", "--idle-line": "#eeeeee", "--line": "#cccccc", "--stripe": "#fafafa"};
        for (let i = 0; i < 8; i++) style[`--hue-${i}`] = `#${(0x102030 * (i + 1)).toString(16).padStart(6, "0")}`;
        for (const [name, value] of Object.entries(style)) document.documentElement.style.setProperty(name, value);
        let seed = 1;
        const random = () => (seed = seed * 16807 % 2147483647) / 2147483647;
        const stays = new Stays(512), moving = new Raster(), seats = 6, ends = new Array(6).fill(0);
        stays.knownFrom = 100;
        moving.size(400, seats * 7);
        moving.readColours();
        let different = 0, t = 100;
        for (let look = 0; look < 300; look++) {
            t += 0.1;
            for (let seat = 0; seat < seats; seat++) {
                const number = stays.open.get(seat), i = number % 512, at = t - 0.4 * random(), chance = random();
                const name = number === undefined ? `r${look}` : stays.request[i];
                const tell = (t, event) => stays.apply(
                    {t, event, request: name, index: 0, seat, n_prompt: 1, n_output: 1, reason: "stop"});
                if (number === undefined) { if (chance < 0.2) tell(Math.max(at, ends[seat]), "seated"); }
                else if (stays.first[i] === Infinity) {
                    if (chance < 0.3) tell(Math.max(at, stays.from[i]), "first_token");
                } else if (chance < 0.1) tell(ends[seat] = Math.max(at, stays.first[i]), "finished");
            }
            const view = {right: t, span: 20, row: 7, seats, now: t, key: "k"};
            moving.paint(stays, view);
            const anew = new Raster();
            anew.size(400, seats * 7);
            anew.readColours();
            anew.paint(stays, view);
            for (let i = 0; i < anew.pixels.length; i++) if (anew.pixels[i] !== moving.pixels[i]) different++;
        }
        return [different, new Set(moving.pixels).size > 8];
    }""")
    assert different == [0, True]


def test_what_was_seen_can_be_found_again(parts):
    found = parts("""async () => {
        const load = (name) => import(`/dashboard/assets/${name}.js`);
        const [{Recorder}, {Stays}] = [await load("recorder"), await load("stays")];
        const recorder = new Recorder(2, ["free", "prefill", "decode", "held"]), stays = new Stays();
        const event = {request: "a", index: 0, seat: 1, n_prompt: 9, n_output: 0, reason: ""};
        stays.apply({...event, t: 0.5, event: "seated"});
        stays.apply({...event, t: 0.8, event: "first_token", n_output: 1});
        for (const [t, reached] of [[1, 5], [1.1, 6], [1.2, 7]]) {
            recorder.record(t, {count: 2, state: [0, 2], reached: () => reached, end: () => 9}, 3);
        }
        const show = (t) => {
            const moment = recorder.moment(t, stays);
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
