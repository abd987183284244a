"""The page in a real browser: what it shows equals what the scripted engine said, and nothing else
happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest
from api_fakes import until
from page_browser import (
    endpoint,
    faults,
    figures,
    holds_text,
    press,
    says,
    served,
    show,
    state,
    table_is,
    visit,
)

from jitney.dashboard import Dashboard, history_log
from jitney.dashboard.incident_log import KINDS, IncidentTable
from jitney.engine.common.engine_info import KernelProof, Seat
from jitney.engine.common.errors import ErrorInfo
from jitney.engine.common.key_file import digest_key
from jitney.engine.common.messages import CanaryFinding, Progress, StepReport
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.ports import free_port
from jitney.engine.common.request_record import RequestRecord, Stay
from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.common.row_kinds import ROW_KIND_TABLE
from jitney.engine.lab.policy_lab import Lab
from jitney.engine.server.http.settings import ServerSettings

MARKUP = "<img src=x onerror=alert(1)>"


def colour_at(page, seat: int) -> list[int]:
    """The canvas's colour near the right end of a seat's cell, red, green, blue."""
    return page.evaluate(
        """(seat) => {
        const canvas = document.getElementById("seats"), ratio = devicePixelRatio, gap = 5;
        const width = Math.floor(Math.min(76 * 2.4, (canvas.clientWidth + gap) / 4 - gap));
        const x = seat * (width + gap) + width - 40;
        return [...canvas.getContext("2d").getImageData(x * ratio, 25 * ratio, 1, 1).data.slice(0, 3)];
    }""",
        seat,
    )


def test_the_page_shows_the_engines_own_numbers(client, open_page):
    page = open_page.page
    with visit(page, client):
        says(page, "headline", "3 of 4 seats taken, 2 waiting, continuous")
        holds_text(page, "page-legend", "3 cached")
        shown = figures(page)
        assert (shown["Waiting"], shown["KV pages"]) == ("2", "60\u00a0%")
        holds_text(page, "queue", "1 · ")
        show(page, "settings")
        facts = page.locator("#facts").inner_text()
        assert all(word in facts for word in ("scripted", "cpu", "reference", "continuous", "fcfs"))
        show(page, "requests")
        page.click("#seat-details summary")
        table_is(
            page,
            "seat-table",
            [
                ["0", "decode", "req-a", "0", "8", "16"],
                ["1", "prefill", "req-b", "1", "10", "40"],
                ["2", "free"],
                ["3", "decode", MARKUP, "0", "3", "4"],
            ],
        )
        legend = page.locator("#page-legend").inner_text()
        assert all(text in legend for text in ("1 free", "4 held", "2 shared", "3 cached"))
        assert colour_at(page, 0) == [0xCF, 0xE4, 0xF1]  # half done, so not yet dark here
        assert colour_at(page, 2) == [0xFF, 0xFF, 0xFF]
        assert page.locator("#empty").is_hidden() and page.locator("img[src=x]").count() == 0
        show(page, "performance")
        page.wait_for_selector("#chart-rate .scatterlayer .trace", state="attached")
    assert open_page.hosts == {"127.0.0.1"}
    assert open_page.problems == []


def test_kernels_that_were_wrong_at_start_are_told_above_all(client, open_page):
    proofs = [
        KernelProof("attention", 3.4567, 0.125),
        KernelProof("norm", 0.01, 0.125),
        KernelProof("head", float("inf"), 0.125, "RuntimeError: <b>no</b>"),
    ]
    page = open_page.page
    with visit(page, type(client)(kernels="native", proofs=proofs)):
        holds_text(
            page, "kernels-out", "of the native kernels attention is off by 3.5, head could not run"
        )
        holds_text(page, "kernels-out", "<b>no</b>")
        assert "norm" not in page.locator("#kernels-out").inner_text()
    assert open_page.problems == []


def test_the_configurations_digest_is_small_until_one_looks(client, open_page):
    page = open_page.page
    digest = "0123456789abcdef" * 4
    with visit(page, type(client)(config_digest=digest)):
        show(page, "settings")
        cut, whole = page.locator(".config code"), page.locator("#config-digest")
        cut.wait_for(state="visible")
        assert cut.inner_text() == "0123456789ab" and whole.is_hidden()
        cut.focus()
        whole.wait_for(state="visible")
        assert whole.inner_text() == digest
        cut.blur()
        whole.wait_for(state="hidden")
        cut.hover()
        whole.wait_for(state="visible")
        box = whole.bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= page.viewport_size["width"]
    with visit(page, client):
        says(page, "headline", "3 of 4 seats taken, 2 waiting, continuous")
        assert page.locator(".config").count() == 0
    assert open_page.problems == []


def test_the_canary_counts_on_the_page(client, open_page):
    page = open_page.page
    with visit(page, client):
        says(page, "headline", "3 of 4 seats taken, 2 waiting, continuous")
        show(page, "incidents")
        assert page.locator("#kernels-out").is_hidden() and page.locator("#canary").is_hidden()
    watched = type(client)(canary_every=50)
    watched.step()
    with visit(page, watched):
        holds_text(
            page,
            "canary",
            "one request in 50 is computed again with the reference kernels; 0 checked",
        )
        watched.counters.observe_canary([CanaryFinding(0.1, True), CanaryFinding(3.0, False)])
        watched.step()
        holds_text(page, "canary", "1 of 2 came out otherwise")
        holds_text(page, "notes", "so many answers came out otherwise: 1")
    assert open_page.problems == []


def test_who_comes_now_is_told_how_long_it_should_wait(client, open_page):
    page = open_page.page
    client.counters.predicted_wait = 3.25
    with visit(page, client):
        says(page, "queue-text", "2 waiting; a new request should wait 3.25 s")
        client.counters.predicted_wait = 0.0
        says(page, "queue-text", "2 waiting")
    assert open_page.problems == []


def test_a_scripted_trip_is_shown_look_by_look(client, open_page):
    page = open_page.page
    with visit(page, client):
        page.click("#time-details summary")
        show(page, "requests")
        page.click("#seat-details summary")
        for output in (1, 2, 7, 9):
            client.seat(
                2,
                "decode",
                "one",
                n_prompt=3,
                n_computed=2 + output,
                n_output=output,
                max_tokens=9,
                pages=1,
            )
            table_is(
                page, "seat-table", [["0"], ["1"], ["2", "decode", "one", "0", str(output), "9"]]
            )
        client.seat(2, "prefill", "two", n_prompt=64, n_computed=32, max_tokens=9, pages=2)
        table_is(page, "seat-table", [["0"], ["1"], ["2", "prefill", "two", "0", "32", "64"]])
        says(page, "headline", "Full: all 4 seats taken, 2 waiting, continuous")
        table_is(page, "time-table", [["two", "0", "2"], ["one", "0", "2"]])
        client.seats = [Seat(seat=seat, state="free") for seat in range(4)]
        client.step(waiting=0, seats_busy=0, pages_used=0)
        says(page, "headline", "Idle: all 4 seats free, continuous")
        table_is(page, "seat-table", [[str(seat), "free"] for seat in range(4)])
    assert open_page.problems == []


#: Whether anything is drawn in the gap above a seat's cell.
ABOVE = """([seat, drawn]) => {
    const canvas = document.getElementById("seats"), gap = 5;
    const width = Math.floor(Math.min(76 * 2.4, (canvas.clientWidth + gap) / 4 - gap));
    const x = (seat * (width + gap) + width / 2) * devicePixelRatio;
    const {data} = canvas.getContext("2d").getImageData(x, 2 * devicePixelRatio, 1, 1);
    return (data[3] > 0) === drawn;
}"""


def test_a_seat_that_got_several_tokens_in_a_step_jumps(client, open_page):
    page = open_page.page
    with visit(page, client):
        show(page, "requests")
        for output in (1, 5):
            tokens = {"n_prompt": 3, "n_computed": 2 + output, "n_output": output}
            client.seat(2, "decode", "one", max_tokens=9, pages=1, **tokens)
            says(page, "headline", "Full: all 4 seats taken, 2 waiting, continuous")
            page.wait_for_function(ABOVE, arg=[2, output > 1])
        page.wait_for_function(ABOVE, arg=[2, False])
    assert open_page.problems == []


def test_rates_are_differences(client, open_page):
    page = open_page.page
    with visit(page, client):

        def flowing() -> bool:
            client.step(waiting=0, decode=60, padding=0, bucket_tokens=83)
            page.wait_for_timeout(100)
            return int(figures(page)["Output tok/s"].replace("–", "0")) >= 50

        # Steps until it is seen: one alone may be past before a busy browser looks.
        until(flowing)
        until(lambda: page.wait_for_timeout(50) or figures(page)["Output tok/s"] == "0")
        show(page, "performance")
        page.click("#chart-details summary")
        page.wait_for_function("""() => [...document.querySelectorAll("#chart-table td:nth-child(2)")]
            .some((cell) => Number(cell.textContent) >= 60)""")
    assert open_page.problems == []


def test_loading_stale_draining_and_dead(client, open_page):
    page, info = open_page.page, client.info
    with endpoint(client) as url:
        client.info, client.state, client.progress = None, "loading", Progress("compile", 3, 8)
        page.goto(url + "/dashboard/")
        state(page, "loading")
        says(page, "headline", "Loading: compile 3 of 8")
        assert page.locator("#progress").get_attribute("value") == "3"
        client.info, client.state = info, "ready"
        state(page, "live")
        client.age = 7.0
        state(page, "stale")
        holds_text(page, "trouble", "silent for 7 s")
        client.age, client.state = 0.0, "draining"
        state(page, "draining")
        client.state = "dead"
        state(page, "dead")
        says(page, "headline", "The engine is dead")
        page.goto("about:blank")


def test_an_engine_that_died_is_shown_as_gone_and_its_time_in_red(client, open_page):
    page, info = open_page.page, client.info
    with visit(page, client):
        show(page, "requests")
        page.click("#seat-details summary")
        table_is(page, "seat-table", [["0", "decode", "req-a"]])
        page.wait_for_timeout(500)
        client.state, client.progress = "restarting", Progress("weights", 108, 182)
        client.history.incidents.outage_began("it was killed by SIGKILL", n_resumed=4, n_lost=0)
        state(page, "restarting")
        holds_text(page, "headline", "The engine died ")
        holds_text(page, "headline", "Restart 1: loading: weights 108 of 182")
        holds_text(page, "trouble", "No engine: it was killed by SIGKILL; restart 1 under way.")
        table_is(page, "seat-table", [["0", "gone"], ["1", "gone"], ["2", "gone"], ["3", "gone"]])
        assert colour_at(page, 0) == colour_at(page, 2) == [0xFD, 0xEA, 0xDD]
        page.wait_for_timeout(1200)
        client.history.core_ready(info)
        client.state = "ready"
        state(page, "live")
        page.wait_for_timeout(700)
        assert page.locator("#trouble").is_hidden()
        assert colour_at(page, 0) == colour_at(page, 2) == [0xFF, 0xFF, 0xFF]
        holds_text(page, "notes", "Restart 1: streams flowed again after")
        show(page, "overview")
        box = page.locator("#timeline").bounding_box()
        reds = """() => {
            const canvas = document.getElementById("timeline"), pen = canvas.getContext("2d");
            const {data} = pen.getImageData(0, 4, canvas.width, 1);
            const red = (x) => data[4 * x] === 0xFD && data[4 * x + 1] === 0xEA;
            return [...Array(canvas.width).keys()].filter(red).map((x) => x / devicePixelRatio);
        }"""

        def point_until(column: Callable[[list[float]], float], y: float, text: str) -> None:
            """Point at a column of the red ones until the page holds_text this: they move with time."""
            for _ in range(40):
                columns = page.evaluate(reds)
                page.mouse.move(box["x"] + column(columns), y)
                page.wait_for_timeout(250)
                if text in page.text_content("#time-read"):
                    return
            raise AssertionError(f"never told: {text}")

        top, bottom = box["y"] + 8, box["y"] + box["height"] - 23
        ready = "it was killed by SIGKILL; restart 1: streams flowed again after"
        point_until(lambda columns: columns[len(columns) // 2], top, ready)
        holds_text(page, "time-read", "Requests that went on: 4; that were lost: 0.")
        died = "it was killed by SIGKILL. Restart 1: streams flowed again after"
        point_until(lambda columns: columns[0] - 1, bottom, died)
    assert open_page.problems == []


def test_a_server_that_is_gone_makes_the_page_stale_until_it_is_back(client, open_page):
    page, port = open_page.page, free_port()
    with endpoint(client, port) as url:
        page.goto(url + "/dashboard/")
        says(page, "headline", "3 of 4 seats taken, 2 waiting, continuous")
    state(page, "stale")
    holds_text(page, "trouble", "No news from the server")
    says(page, "headline", "3 of 4 seats taken, 2 waiting, continuous")
    with endpoint(client, port):
        state(page, "live")
        assert page.locator("#trouble").is_hidden()
        page.goto("about:blank")


def test_a_server_that_answers_late_is_waited_for(client, open_page):
    """The page's clock runs before it knows which engine it shows."""
    page = open_page.page

    def late(route) -> None:
        page.wait_for_timeout(1500)
        route.continue_()

    page.route("**/engines", late)
    with endpoint(client) as url:
        page.goto(url + "/dashboard/")
        state(page, "live")
        page.goto("about:blank")
    assert open_page.problems == []


SHOWN = """() => getComputedStyle(document.getElementById("chart-rate"), "::before").content"""


def test_what_is_not_there_never_claims_to_be_on_its_way(client, open_page):
    """Charts and requests are drawn and asked for where they can be seen."""
    page = open_page.page
    waiting = []
    page.route("**/plotly.min.js", lambda route: waiting.append(route))
    with visit(page, client):
        shown = SHOWN
        assert "on the screen" in page.evaluate(shown) and "load" not in page.evaluate(shown)
        says(page, "headline", "3 of 4 seats taken, 2 waiting, continuous")
        assert "on the screen" in page.text_content("#request-note")
        assert not waiting  # the first screen needs no chart library
        show(page, "performance")
        until(lambda: page.wait_for_timeout(50) or bool(waiting))
        for route in waiting:
            route.continue_()
        page.wait_for_selector("#chart-rate .scatterlayer .trace", state="attached")
        assert page.evaluate(shown) == "none"
        show(page, "requests")
        holds_text(page, "request-note", "4 newest")
        page.select_option("#request-state", "refused")
        says(page, "request-note", "There are none.")
    assert open_page.problems == []


def test_a_chart_that_cannot_be_drawn_says_so(client, open_page):
    page = open_page.page
    page.route("**/plotly.min.js", lambda route: route.fulfill(status=404))
    with visit(page, client):
        show(page, "performance")
        page.wait_for_selector("#chart-rate.failed", state="attached")
        assert "could not be loaded" in page.evaluate(SHOWN)
    assert all("404" in problem or "plotly" in problem for problem in open_page.problems)


def test_an_incident_stays_on_the_first_screen_until_it_was_seen(client, open_page):
    page = open_page.page
    incidents = page.locator("#incidents li")
    with endpoint(client) as url:
        page.goto(url + "/dashboard")
        state(page, "live")
        assert page.locator("#incidents").is_hidden()
        client.history.incidents.refused(429, "queue_full", 2.5)
        holds_text(page, "incidents", "1 request was turned away: 1 x 429 queue_full")
        for _ in range(38):
            client.history.incidents.refused(429, "queue_full", 3.5)
        holds_text(page, "incidents", "39 requests were turned away")
        client.history.incidents.outage_began("killed by SIGKILL", n_resumed=0, n_lost=2)
        client.history.core_ready(client.info)
        holds_text(page, "incidents", "killed by SIGKILL")
        assert incidents.count() == 2
        box = page.locator("#incidents").bounding_box()
        assert box and box["y"] + box["height"] < page.viewport_size["height"]
        page.reload()
        state(page, "live")
        holds_text(page, "incidents", "39 requests were turned away")
        incidents.filter(has_text="turned away").get_by_role("button", name="Seen").click()
        client.history.incidents.refused(429, "queue_full", 1.5)
        holds_text(page, "notes", "40 requests were turned away")
        assert incidents.count() == 1 and "SIGKILL" in incidents.inner_text()
        incidents.get_by_role("button", name="Seen").focus()
        press(page, "Enter")
        page.wait_for_selector("#incidents", state="hidden")
        page.reload()
        state(page, "live")
        holds_text(page, "notes", "40 requests were turned away")
        assert page.locator("#incidents").is_hidden()
        page.goto("about:blank")
    assert open_page.problems == []


def test_incidents_are_read_after_a_restart_by_a_page_that_was_not_open(
    client, open_page, tmp_path
):
    page, incidents = open_page.page, client.history.incidents
    with endpoint(client, data_dir=tmp_path) as url:
        incidents.outage_began("killed by SIGKILL", n_resumed=3, n_lost=1)
        client.history.core_ready(client.info)
        until(lambda: httpx.get(url + "/dashboard/incidents", verify=False).json()["incidents"])
    with endpoint(type(client)(), data_dir=tmp_path) as url:
        page.goto(url + "/dashboard#incidents")
        holds_text(page, "kept", "killed by SIGKILL")
        holds_text(page, "kept", "3 resumed · 1 lost")
        holds_text(page, "kept", KINDS["outage"])
        line = page.locator("#kept li")
        assert line.count() == 1 and line.locator("time").inner_text().count(":") == 2
        assert page.locator("#notes").is_hidden() and page.locator("#older").is_hidden()
        page.goto("about:blank")
    assert open_page.problems == []


def test_an_hour_ago_is_looked_up_from_its_incident(client, open_page, tmp_path):
    page, then = open_page.page, time.time() - 3660
    for folder in ("history", "incidents"):
        (tmp_path / folder).mkdir(mode=0o700)
    known = {
        "seconds": 10,
        "steps": 40,
        "seats_busy": 3,
        "waiting": 5,
        "rows_decode": 1200,
        "ttft_p50": 0.25,
    }
    bins = [
        dict.fromkeys(history_log._COLUMNS) | known | {"t": then + 10 * place}
        for place in range(-6, 6)
    ]
    sat = RequestRecord(number=1, n_prompt=7, arrival=then - 30, request_id="req-then")
    sat.stays.append(Stay(2, 0, then - 20, first_token=then - 10, end=then + 20, how="length"))
    sat.boarded, sat.finished, sat.finish = then - 20, then + 20, "length"
    rows = [history_log.HistoryLog(client, None, 24.0)._row(sat, 0.0)]
    tables = history_log.HistoryTables(tmp_path / "history/history.sqlite3")
    tables.put(bins, rows, 0.0)
    tables.close()
    incident = {"code": "outage", "level": "error", "message": "killed by SIGKILL", "t": then}
    table = IncidentTable(tmp_path / "incidents/incidents.sqlite3")
    table.put([incident | {"name": "one", "hit": "{}", "silence_s": 2.5}], then)
    table.close()
    with endpoint(client, data_dir=tmp_path) as url:
        page.goto(url + "/dashboard#incidents")
        page.locator("#kept a").click()
        holds_text(page, "headline", "3 of 4 seats taken, 5 waiting")
        holds_text(page, "headline", "1 h 1 min ago")
        holds_text(page, "figures", "250 ms")
        holds_text(page, "figures", "120")
        assert page.locator("#reach").input_value() == "21600"
        page.click("#time-details summary")
        holds_text(page, "time-table", "req-then")
        holds_text(page, "time-table", "on board")
        page.focus("#timeline")
        press(page, "ArrowRight", "ArrowRight")  # its mark is a tenth from the right end
        box = page.locator("#timeline").bounding_box()
        texts = []
        for x in range(int(box["width"]) - 10, int(box["width"]) // 2, -6):
            page.hover("#timeline", position={"x": x, "y": box["height"] - 25})
            texts.append(page.inner_text("#time-read"))
        assert any("killed by SIGKILL" in text for text in texts)
        page.locator("#reach").select_option("600")
        holds_text(page, "headline", "10 min")
        page.goto("about:blank")
    assert open_page.problems == []


def test_an_engine_that_is_back_says_how_many_streams_go_on(client, open_page):
    page = open_page.page
    with visit(page, client):
        client.history.seats_lost()
        client.history.incidents.outage_began("killed by SIGKILL", n_resumed=3, n_lost=0)
        client.history.core_ready(client.info)
        holds_text(page, "trouble", "0 of 2 streams go on")
        state(page, "live")
        for seat, stream in enumerate(("req-a", MARKUP)):
            client.seat(seat, "decode", stream, n_prompt=5, n_output=12, max_tokens=16)
        page.wait_for_selector("#trouble", state="hidden")
        holds_text(page, "incidents", "streams flowed again after")
    assert open_page.problems == []


def test_a_refused_request_is_called_so_in_its_row_and_in_its_story(client, open_page):
    client.history.submit(
        EngineRequest(id="full-0", prompt=[1], sampling=SamplingParams(), arrival=time.monotonic())
    )
    error = ErrorInfo("queue_full", "too many <b>wait</b>", retry_after=2.5)
    output = SequenceOutput(request_id="full-0", index=0, finish="error", error=error)
    client.history.take(StepReport([output]))
    page = open_page.page
    with visit(page, client):
        show(page, "requests")
        table_is(page, "requests", [["full-0", "refused (429), retry in 2.50 s"]])
        page.locator("#requests tbody tr").first.click()
        page.wait_for_selector("#drawer[open] .verdict")
        story = page.text_content("#drawer .body")
        assert "Refused (429)" in story and "too many <b>wait</b>" in story
        assert "waiting for a seat" not in story and page.locator("#drawer .causes").count() == 0
    assert open_page.problems == []


def test_seats_that_are_free_while_a_prompt_is_read_are_no_waste(client, open_page):
    page = open_page.page
    with visit(page, client):
        holds_text(page, "why", "A seat is free while 2 wait")
        holds_text(page, "why", "a prompt of 40 tokens (30 to go)")
        assert page.locator("#why").is_visible()
        blank_becomes(page, client, 2, [0xFD, 0xF4, 0xDE], prefill=20)
        client.seat(1, "decode", "req-b", index=1, n_prompt=40, n_output=2, max_tokens=9)
        client.step(waiting=2, seats_busy=3)
        page.wait_for_selector("#why", state="hidden")
        blank_becomes(page, client, 2, [0xF7, 0xE4, 0xF0], prefill=0, recomputed=0)
    assert open_page.problems == []


@pytest.mark.parametrize(
    ("policy", "held", "reason"),
    [
        ("static", 2, "under static batching a batch boards together"),
        ("continuous", 10, "KV pages are short, 0 of 10 are left"),
        ("continuous", 2, ""),
    ],
)
def test_other_reasons_for_free_seats_are_said_where_they_are_known(
    client, open_page, policy: str, held: int, reason: str
):
    page = open_page.page
    full = type(client)(policy=policy)
    full.seat(0, "decode", "req-a", n_prompt=5, n_output=8, max_tokens=16)
    full.states = bytes([0, *[1] * held, *[0] * (10 - held)])
    full.step(waiting=2, seats_busy=1, prefill=0, recomputed=0)
    with visit(page, full):
        holds_text(page, "headline", "1 of 4 seats taken, 2 waiting")
        if reason:
            holds_text(page, "why", f"3 seats are free while 2 wait: {reason}")
        else:
            page.wait_for_timeout(1500)
            assert page.locator("#why").is_hidden()
    assert open_page.problems == []


def blank_becomes(page, client, seat: int, colour: list[int], **rows: int) -> None:
    """Steps with such rows, while two wait, until a free seat's line in the timeline ends so."""
    ends_so = """([seat, colour]) => {
        const canvas = document.getElementById("timeline"), pen = canvas.getContext("2d");
        const row = (canvas.clientHeight - 20) / 4; // under the rows is the axis, at the right end are the cells
        const y = Math.round((seat + 0.3) * row * devicePixelRatio);
        const from = canvas.width - Math.round(164 * devicePixelRatio);
        const {data} = pen.getImageData(from, y, 60, 1);
        const is = (x) => colour.every((value, i) => data[4 * x + i] === value);
        return [...Array(60).keys()].some(is);
    }"""
    for _ in range(80):
        client.step(waiting=2, seats_busy=3, **rows)
        page.wait_for_timeout(100)
        if page.evaluate(ends_so, [seat, colour]):
            return
    raise AssertionError(f"no blank of {colour}")


VIEWS = (
    "overview",
    "chat",
    "requests",
    "tenants",
    "work",
    "memory",
    "performance",
    "incidents",
    "lab",
    "settings",
)


def test_every_view_is_accessible(client, open_to_axe, axe):
    """Also with a request's detail open."""
    page = open_to_axe.page
    with visit(page, client):
        for view in VIEWS:
            show(page, view)
            if view == "performance":
                page.wait_for_selector("#chart-rate .main-svg", state="attached")
            for width, scheme in ((1440, "light"), (390, "light"), (1440, "dark"), (390, "dark")):
                page.set_viewport_size({"width": width, "height": 844})
                found = faults(page, axe, scheme)
                assert (view, width, scheme, found) == (view, width, scheme, {})
        page.set_viewport_size({"width": 1440, "height": 844})
        show(page, "requests")
        page.focus("#seats")
        press(page, "ArrowRight", "Enter")
        page.wait_for_selector("#drawer[open] .verdict")
        for scheme in ("light", "dark"):
            assert (scheme, faults(page, axe, scheme)) == (scheme, {})


def test_empty_shows_a_line_to_copy(client, open_page):
    page = open_page.page
    client.__init__(model="it's")
    with visit(page, client) as url:
        page.wait_for_selector("#empty:not([hidden])")
        line = page.locator("#curl").inner_text()
        assert line.startswith(f"curl {url}/v1/completions ") and """{"model":"it'\\''s",""" in line
    assert open_page.problems == []


def test_the_ledger_chart_has_the_colours_of_the_row_kinds(client, open_page):
    page = open_page.page
    shown = """() => document.getElementById("chart-ledger").data
        ?.map((trace) => [trace.name, trace.fillcolor, trace.fillpattern.shape])"""
    kinds = list(ROW_KIND_TABLE.values())
    with visit(page, client):
        show(page, "performance")
        page.wait_for_function(shown)
        assert page.evaluate(shown) == [[kind.label, kind.light, kind.pattern] for kind in kinds]
        page.emulate_media(color_scheme="dark")
        page.wait_for_function(f"() => ({shown})()[0][1] === '{kinds[0].dark}'")
        assert page.evaluate(shown) == [[kind.label, kind.dark, kind.pattern] for kind in kinds]
    assert open_page.problems == []


def test_a_user_sees_its_own_and_signs_out(client, open_page):
    """Somebody else's seats are taken and nothing more; what computes for all is not offered."""
    page = open_page.page
    settings = ServerSettings(
        api_keys=(digest_key("a user's key"),), admin_keys=(digest_key("the operator's"),)
    )
    with served(Dashboard(client, settings, lab=Lab(client, None)).to_mount()) as url:
        page.goto(url)
        page.fill("#key", "wrong")
        page.click("button")
        page.wait_for_selector("#refused:not([hidden])")
        page.fill("#key", "a user's key")
        page.click("button")
        state(page, "live")
        assert page.evaluate("document.cookie") == "" and "key" not in page.url
        says(page, "headline", "3 of 4 seats taken, 2 waiting, continuous")
        for id in ("report", "trace"):
            page.wait_for_function(f"document.getElementById('{id}').hidden")
        assert page.locator("#views a[href='#lab']").is_hidden()
        show(page, "requests")
        page.click("#seat-details summary")
        table_is(page, "seat-table", [["0", "decode"], ["1", "prefill"], ["2", "free"]])
        assert "req-" not in page.content()
        page.click("#sign-out")
        page.wait_for_selector("#key")
        page.fill("#key", "the operator's")
        page.click("button")
        state(page, "live")
        show(page, "requests")
        page.click("#seat-details summary")
        table_is(page, "seat-table", [["0", "decode", "req-a"], ["1", "prefill", "req-b"]])
        show(page, "lab")
        assert page.locator("#lab").is_visible() and page.locator("#sign-out").is_visible()
        page.goto("about:blank")
    problems = [one for one in open_page.problems if "401" not in one]
    assert problems == []
