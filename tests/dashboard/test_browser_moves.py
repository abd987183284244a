"""What a person can do on the page, with a pointer and with the keyboard alone."""

from __future__ import annotations

import json

from page_browser import holds_text, press, says, show, state, table_is, visit

MARKUP = "<img src=x onerror=alert(1)>"
FIGURES = {
    "output_tok_s": 10.0,
    "req_s": 1.0,
    "padding_share": 0.5,
    "seat_fill": 0.5,
    "cost_per_million_tokens": None,
    "ttft_s": {"p50": 1.0, "p99": 4.0},
    "itl_s": {"p50": 0.05, "p99": 0.1},
    "e2e_s": {"p99": 9.0},
    "queue_s": {"p99": 3.0},
}
STAYS = {
    "seat": [0, 1],
    "request": ["a", MARKUP],
    "from": [0.0, 0.0],
    "first_token": [0.5, 0.5],
    "to": [2.0, 4.0],
}


def test_a_click_on_a_seat_tells_of_its_request(client, open_page):
    page = open_page.page
    with visit(page, client):
        says(page, "headline", "3 of 4 seats taken, 2 waiting, continuous")
        show(page, "requests")
        page.locator("#seats").click(position={"x": 20, "y": 20})
        page.wait_for_selector("#drawer[open]")
        says(page, "drawer-name", "req-a")
        page.wait_for_selector("#drawer .waterfall li")
        page.click("#drawer .show")
        page.wait_for_selector("#drawer:not([open])", state="attached")
        page.wait_for_function("() => document.activeElement.id === 'timeline'")
    assert open_page.problems == []


def test_the_keyboard_is_enough(client, open_page):
    page = open_page.page
    with visit(page, client):
        says(page, "headline", "3 of 4 seats taken, 2 waiting, continuous")
        press(page, "3")
        page.focus("#seats")
        press(page, "ArrowRight", "ArrowLeft", "ArrowRight", "ArrowRight", "ArrowRight")
        holds_text(page, "seat-read", MARKUP)
        holds_text(page, "seat-read", "3 of at most 4 output tokens")
        press(page, "Enter")
        says(page, "drawer-name", MARKUP)
        press(page, "Escape")
        page.wait_for_function("() => document.activeElement.id === 'seats'")
        table_is(page, "requests", [[MARKUP], ["req-b (1)"], ["req-b"], ["req-a"]])
        page.locator("#requests .sort").first.focus()
        press(page, "Enter")
        page.wait_for_selector("#requests th[aria-sort=ascending]")
        table_is(page, "requests", [[MARKUP], ["req-a"], ["req-b (1)"], ["req-b"]])
        press(page, "Enter")
        page.wait_for_selector("#requests th[aria-sort=descending]")
        page.focus("#requests tbody tr[tabindex='0']")
        press(page, "ArrowDown", "Enter")
        page.wait_for_selector("#drawer[open] .verdict")
        press(page, "Escape")
        page.wait_for_selector("#drawer:not([open])", state="attached")
        press(page, " ")  # the row has the focus again, and Space pauses wherever it is
        state(page, "paused")
        assert page.locator("#drawer[open]").count() == 0
        assert page.locator("img[src=x]").count() == 0
    assert open_page.problems == []


def test_pause_scrub_step_and_replay(client, open_page):
    page = open_page.page
    with visit(page, client):
        show(page, "requests")
        page.click("#seat-details summary")
        table_is(page, "seat-table", [["0", "decode", "req-a", "0", "8", "16"]])
        client.seat(
            0, "decode", "later", n_prompt=5, n_computed=6, n_output=2, max_tokens=9, pages=1
        )
        table_is(page, "seat-table", [["0", "decode", "later", "0", "2", "9"]])
        page.wait_for_timeout(700)
        show(page, "overview")
        page.focus("#timeline")
        press(page, " ")
        state(page, "paused")
        client.seat(
            2, "decode", "unseen", n_prompt=5, n_computed=6, n_output=2, max_tokens=9, pages=1
        )
        table_is(page, "seat-table", [["0", "decode", "later"], ["1"], ["2", "free"]])
        page.wait_for_function(
            """() => {  // back, look by look, until the passenger before is on board again
            if (document.querySelector("#seat-table td:nth-child(3)").textContent === "req-a") return true;
            document.body.dispatchEvent(new KeyboardEvent("keydown", {key: ",", bubbles: true}));
        }""",
            polling=100,
        )
        table_is(page, "seat-table", [["0", "decode", "req-a", "0", "8", "16"]])
        holds_text(page, "headline", "3 of 4 seats taken, 2 waiting, continuous (")
        holds_text(page, "headline", "s ago)")
        press(page, "r", "r")  # four times as fast as it was, so that it catches up
        table_is(page, "seat-table", [["0", "decode", "later"], ["1"], ["2", "decode", "unseen"]])
        state(page, "live")
    assert open_page.problems == []


def test_the_policy_lab_compares(client, open_page):
    page, lab = (
        open_page.page,
        {
            "state": "idle",
            "id": None,
            "progress": None,
            "error": None,
            "result": None,
            "arrivals": 80,
            "minutes": 5.0,
            "settings": {"batch_size": 0, "order": "fcfs", "target_itl_ms": None},
        },
    )
    runs = {
        "static": {"figures": FIGURES, "seats": 2, "stays": STAYS, "seconds": 4.0},
        "continuous": {
            "figures": FIGURES | {"output_tok_s": 25.0},
            "seats": 2,
            "stays": STAYS,
            "seconds": 4.0,
        },
    }
    asked = []

    def answer(route):
        if route.request.method == "POST":
            asked.append(json.loads(route.request.post_data))
            lab.update(
                state="done",
                id="1",
                result={
                    "requests": 80,
                    "policies": runs,
                    "counted": {"ended": 77, "running": 0, "refused": 3},
                    "closed_loop": 0,
                    "cached_tokens": 64,
                    "on_board_before": 2,
                    "verdict": "By simulation continuous makes 2.50x the tokens of static, ±8 %.",
                    "measured": {
                        "policy": "continuous",
                        "figures": FIGURES | {"output_tok_s": 24.0},
                    },
                },
            )
        route.fulfill(json=lab)

    page.route("**/lab", answer)
    with visit(page, client):
        show(page, "lab")
        holds_text(page, "lab-note", "80 requests of the last 5.0 minutes")
        page.uncheck("[value=dynamic]")
        page.click("#lab summary")
        page.fill("[name=batch_size]", "2")
        page.fill("#lab-price", "2.5")
        page.click("#lab-run")
        holds_text(page, "lab-result", "continuous makes 2.50x the tokens of static, ±8 %.")
        holds_text(
            page,
            "lab-result",
            "80 requests were played again (when the record ended: 77 ended, 3 refused).",
        )
        holds_text(page, "lab-result", "64 prompt tokens are found cached")
        assert asked == [
            {
                "minutes": 5,
                "speed": 1,
                "policies": ["static", "continuous"],
                "settings": {"batch_size": 2},
                "price_per_hour": 2.5,
            }
        ]
        table_is(page, "lab-figures", [["Output tok/s", "10", "25", "24"]])
        assert page.locator("#lab-result canvas").count() == 2
    assert open_page.problems == []


def test_incidents_take_room_from_the_seats_not_from_the_screen(client, open_page):
    page = open_page.page
    client.__init__(seats=24)
    page.set_viewport_size({"width": 1440, "height": 900})
    client.step(seats_busy=1)
    client.seat(0, "decode", "req-a", n_prompt=5, n_output=8, max_tokens=16)
    with visit(page, client):
        page.wait_for_function("() => document.getElementById('timeline').height > 500")
        high = page.locator("#timeline").bounding_box()["height"]
        for number in range(3):
            client.history.incidents.outage_began(f"killed {number}", n_resumed=0, n_lost=2)
            client.history.core_ready(client.info)
        holds_text(page, "incidents", "killed 2")
        page.wait_for_function(
            "(high) => document.getElementById('timeline').clientHeight < high", arg=high
        )
        assert incidents_are_on_the_screen(page)
        client.age = 7.0
        holds_text(page, "trouble", "silent for 7 s")
        assert incidents_are_on_the_screen(page)
    assert open_page.problems == []


def incidents_are_on_the_screen(page) -> bool:
    """Whether they end above the bar with the time."""
    return page.evaluate(
        """() => document.getElementById("incidents").getBoundingClientRect().bottom
            <= document.querySelector(".timebar").getBoundingClientRect().top"""
    )


def test_a_phone_shows_the_overview_on_two_screens(client, open_page):
    page = open_page.page
    page.set_viewport_size({"width": 390, "height": 844})
    with visit(page, client):
        says(page, "headline", "3 of 4 seats taken, 2 waiting, continuous")
        assert page.evaluate("document.documentElement.scrollHeight") <= 2 * 844
    assert open_page.problems == []


def test_it_fits_narrow_and_wide_screens(client, open_page):
    page = open_page.page
    page.emulate_media(reduced_motion="reduce")
    with visit(page, client):
        says(page, "headline", "3 of 4 seats taken, 2 waiting, continuous")
        for width in (360, 768, 1440):
            page.set_viewport_size({"width": width, "height": 800})
            for view in ("overview", "chat", "requests", "settings"):
                show(page, view)
                page.wait_for_function(
                    "(width) => document.documentElement.scrollWidth === width", arg=width
                )
        # Whoever cannot see a canvas has its name, and its numbers as a table.
        assert page.locator("canvas:not([aria-label])").count() == 0
        assert page.evaluate("matchMedia('(prefers-reduced-motion: reduce)').matches")
    assert open_page.problems == []
