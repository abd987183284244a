"""The page of a fleet in a real browser: it shows what the scripted replicas are, and stands still
while they change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from page_browser import faults, holds_text, press, says, served, state, table_is
from page_replicas import FakeReplica, FakeRollouts, engines_app, rollout_of, urls_of

from jitney.dashboard.fleet import Endpoint, FleetView
from jitney.dashboard.fleet_page import FleetPage
from jitney.dashboard.remote import RemoteEngine
from jitney.engine.common.key_file import digest_key
from jitney.engine.common.messages import Progress
from jitney.engine.server.http.settings import ServerSettings

MARKUP = "<img src=x onerror=alert(1)>"
NOWHERE = "http://127.0.0.1:1"


def replicas() -> dict[str, FakeReplica]:
    """Three: half full with somebody waiting, empty, and loading."""
    busy = FakeReplica(4, model=MARKUP)
    busy.take_seat(0, n_prompt=8, n_output=15, max_tokens=30)
    busy.take_seat(2, n_prompt=8, n_output=0, max_tokens=30)
    busy.counters.waiting, busy.counters.predicted_wait = 3, 2.5
    loading = FakeReplica(4)
    loading.state, loading.progress = "loading", Progress("weights", 3, 8)
    return {"r2": FakeReplica(6), "r10": loading, "r1": busy}


@contextlib.contextmanager
def fleet_served(
    clients: Mapping[str, Any],
    settings: ServerSettings | None = None,
    price: float | None = None,
    rollouts: FakeRollouts | None = None,
    **more: str,
) -> Iterator[str]:
    """The page of these and of `more` (URLs by name); yields its URL."""
    with served(engines_app(clients)) as base:
        urls = urls_of(clients, base) | more
        engines = {name: RemoteEngine(url) for name, url in urls.items()}
        fleet = FleetView(engines, price_per_hour=price)
        with served(FleetPage(fleet, settings or ServerSettings(), rollouts).by_itself()) as url:
            yield url


@contextlib.contextmanager
def visit(page, clients: Mapping[str, Any], **options: Any) -> Iterator[str]:
    """The page, live; it leaves before its servers stop."""
    with fleet_served(clients, **options) as url:
        page.goto(url)
        state(page, "live")
        yield url
        page.goto("about:blank")


def cards(page) -> list[list[str]]:
    """Name, state and note of each, as they stand on the page."""
    return page.evaluate("""() => [...document.querySelectorAll(".replica")].map((card) =>
        [...card.querySelectorAll("h3, .word, .note")].map((one) => one.textContent))""")


def card_says(page, name: str, text: str) -> None:
    """Wait until a replica's card has this text."""
    page.wait_for_function(
        """([name, text]) => [...document.querySelectorAll(".replica")].some((card) =>
        card.querySelector("h3").textContent === name && card.textContent.includes(text))""",
        arg=[name, text],
    )


def colour_at(page, name: str, x: int, y: int) -> list[int]:
    """Of a replica's seat map, in CSS pixels: red, green, blue, opacity."""
    return page.evaluate(
        """([name, x, y]) => {
        const card = [...document.querySelectorAll(".replica")]
            .find((one) => one.querySelector("h3").textContent === name);
        const pen = card.querySelector("canvas").getContext("2d");
        return [...pen.getImageData(x * devicePixelRatio, y * devicePixelRatio, 1, 1).data];
    }""",
        [name, x, y],
    )


def test_all_replicas_at_once(open_page):
    page = open_page.page
    with visit(page, replicas(), gone=NOWHERE, price=2.5):
        says(page, "headline", "2 of 4 replicas ready, 2 of 10 seats taken, 3 waiting")
        card_says(page, "gone", "does not answer")
        shown = cards(page)
        assert [card[:2] for card in shown] == [
            ["gone", "gone"],
            ["r1", "ready"],
            ["r2", "ready"],
            ["r10", "loading"],
        ]
        assert shown[0][2].startswith("Gone since ") and shown[3][2] == "Loading: weights 3 of 8."
        card_says(page, "r1", "2 of 4")
        card_says(page, "r1", "2.50 s")
        assert colour_at(page, "r1", 8 + 19, 8)[3] == 0  # free
        halfway = colour_at(page, "r1", 8, 8)
        assert 0 < halfway[0] < 0xCF and 0x72 < halfway[1] < 0xE4 and halfway[3] == 255
        holds_text(page, "fleet-sub", "The longest wait is foreseen at r1.")
        figures = page.locator("#figures").inner_text()
        assert "2 of 4" in figures and "2.50 s" in figures and "A million useful tokens" in figures
        page.click("#replica-details summary")
        table_is(
            page,
            "replica-table",
            [
                ["gone", "gone", "0", "0"],
                ["r1", "ready", "2", "4", "3", "2.50 s"],
                ["r2", "ready", "0", "6", "0", "0 s"],
                ["r10", "loading", "0", "0"],
            ],
        )
        assert page.locator("img[src=x]").count() == 0
        assert page.locator("#replica-table").inner_text().count(MARKUP) == 1
    assert open_page.hosts == {"127.0.0.1"} and open_page.problems == []


def test_cards_follow_their_replicas_and_keep_their_places(open_page):
    page, clients = open_page.page, replicas()
    with visit(page, clients):
        card_says(page, "r2", "0 of 6")
        clients["r2"].take_seat(5, n_prompt=8, n_output=29, max_tokens=30)
        card_says(page, "r2", "1 of 6")
        assert colour_at(page, "r2", 5 * 19 + 8, 8)[3] == 255
        clients["r1"].state, clients["r1"].counters.engine_restarts = "restarting", 2
        card_says(page, "r1", "Restarted 2 times.")
        clients["r10"].state, clients["r10"].progress = "ready", None
        card_says(page, "r10", "0 of 4")
        holds_text(page, "headline", "2 of 3 replicas ready, 1 of 10 seats taken")
        clients["r2"].age = 7.0
        card_says(page, "r2", "Its engine says nothing.")
        assert [name for name, *_ in cards(page)] == ["r1", "r2", "r10"]
    assert open_page.problems == []


def test_a_fleet_that_answers_nobody_is_not_live(open_page):
    page = open_page.page
    told = Endpoint("no engine of any model is ready", ("m",), {"429": 5, "503": 190}, 400)
    starts = Endpoint("no engine of any model is ready", ("m",), starting=frozenset({"a"}))
    now = [told]
    engines = {name: RemoteEngine(NOWHERE) for name in "ab"}
    fleet = FleetView(engines, endpoint=lambda: now[0])
    with served(FleetPage(fleet, ServerSettings()).by_itself()) as url:
        page.goto(url)
        state(page, "unready")
        card_says(page, "b", "does not answer")
        says(page, "headline", "None of 2 replicas is ready")
        holds_text(page, "trouble", "no engine of any model is ready")
        figures = page.locator("#figures").inner_text()
        holds_text(page, "trouble", "5 with 429, 190 with 503")
        assert "195 a minute" in figures and "0 s" not in figures
        assert page.locator(".replica dd").all_inner_texts().count("0 s") == 0
        now[0] = starts
        state(page, "loading")
        card_says(page, "a", "Its process was started")
        now[0] = Endpoint("", ("m",))
        state(page, "live")
        holds_text(page, "trouble", "no engine is ready: m")
        page.goto("about:blank")
    assert open_page.problems == []


def test_from_the_fleet_to_one_replica_and_back(open_page):
    page = open_page.page
    with visit(page, replicas()) as url:
        page.get_by_role("link", name="r1", exact=True).click()
        page.wait_for_url(f"{url}/r/r1/")
        says(page, "headline", "2 of 4 seats taken, 3 waiting, continuous")
        assert (
            page.locator("#views a[href='#chat']").is_hidden()
            and page.locator("#engine option").count() == 3
        )
        page.select_option("#engine", "../r2/")
        page.wait_for_url(f"{url}/r/r2/")
        says(page, "headline", "Idle: all 6 seats free, continuous")
        page.click("#fleet")
        page.wait_for_url(f"{url}/")
        says(page, "headline", "2 of 3 replicas ready, 2 of 10 seats taken, 3 waiting")
    assert open_page.problems == []


def test_the_keyboard_is_enough_for_a_fleet(open_page):
    page = open_page.page
    at = "document.activeElement.textContent"
    with visit(page, {f"r{i}": FakeReplica(2) for i in range(9)}) as url:
        card_says(page, "r8", "0 of 2")
        page.focus(".replica a")
        press(page, "ArrowRight", "ArrowRight", "ArrowLeft")
        assert page.evaluate(at) == "r1"
        press(page, "ArrowDown")
        below = page.evaluate(at)
        assert below not in ("r1", "r2")
        press(page, "ArrowUp", "End", "ArrowRight")
        assert page.evaluate(at) == "r8"
        press(page, "Home", "/")
        page.keyboard.type("r7 ready")
        says(page, "found", "1 of 9 shown")
        press(page, "Tab", "Enter")
        page.wait_for_url(f"{url}/r/r7/")
    assert open_page.problems == []


def test_a_server_that_is_gone_makes_the_fleets_page_stale(open_page):
    page = open_page.page
    clients = replicas()
    with served(engines_app(clients)) as base:
        engines = {name: RemoteEngine(url) for name, url in urls_of(clients, base).items()}
        page_app = FleetPage(FleetView(engines), ServerSettings()).by_itself()
        with served(page_app) as url:
            page.goto(url)
            state(page, "live")
            card_says(page, "r1", "2 of 4")
        state(page, "stale")
        holds_text(page, "trouble", "No news from the server for")
        holds_text(page, "trouble", "The last values are shown.")
        card_says(page, "r1", "2 of 4")
        port = int(url.rpartition(":")[2])
        engines = {name: RemoteEngine(one) for name, one in urls_of(clients, base).items()}
        with served(FleetPage(FleetView(engines), ServerSettings()).by_itself(), port):
            state(page, "live")
            page.goto("about:blank")


def test_a_user_sees_the_fleet_and_not_the_pages_of_its_replicas(open_page):
    page = open_page.page
    settings = ServerSettings(
        api_keys=(digest_key("a user's key"),), admin_keys=(digest_key("the operator's"),)
    )
    with fleet_served(replicas(), settings=settings) as url:
        page.goto(url)
        page.fill("#key", "a user's key")
        page.click("button")
        state(page, "live")
        card_says(page, "r1", "2 of 4")
        assert page.locator(".replica a").count() == 0
        page.goto(f"{url}/r/r1/")
        page.wait_for_url(f"{url}/")
        state(page, "live")
        page.click("#sign-out")
        page.fill("#key", "the operator's")
        page.click("button")
        state(page, "live")
        page.wait_for_selector(".replica a")
        page.goto("about:blank")
    assert [one for one in open_page.problems if "401" not in one] == []


@pytest.mark.parametrize(("n", "looked_at"), [(3, 360), (30, 768), (60, 1440)])
def test_a_fleets_page_is_accessible(open_to_axe, axe, n: int, looked_at: int):
    """With cards of every size; it fits every screen."""
    clients = replicas() | {f"s{i}": FakeReplica(8, seed=i) for i in range(n - 3)}
    clients["r2"].state = "draining"
    for client in clients.values():
        client.move()
    page = open_to_axe.page
    with visit(page, clients, gone=NOWHERE, price=1.0):
        card_says(page, "gone", "does not answer")
        card_says(page, "r10", "Loading: weights 3 of 8.")
        for width in (360, 768, 1440):
            fit(page, width)
            for scheme in ("light", "dark") if width == looked_at else ():
                assert (scheme, faults(page, axe, scheme)) == (scheme, {})
    assert open_to_axe.problems == []


def fit(page, width: int) -> None:
    """Have the screen so wide, and wait until nothing is wider."""
    page.set_viewport_size({"width": width, "height": 800})
    page.wait_for_function("(width) => document.documentElement.scrollWidth === width", arg=width)


def test_a_hundred_replicas_are_few_elements(open_page):
    page = open_page.page
    clients = {f"r{i}": FakeReplica(64, seed=i) for i in range(100)}
    for client in clients.values():
        client.move()
    with visit(page, clients):
        holds_text(page, "headline", "All 100 replicas ready")
        assert page.evaluate("document.querySelectorAll('*').length") < 3500
        assert page.locator(".replica canvas").count() == 100
        heights = page.evaluate(
            "[...document.querySelectorAll('.replica canvas')].map((one) => one.clientHeight)"
        )
        assert max(heights[:10]) <= 40
    assert open_page.problems == []


def test_a_candidate_is_compared_promoted_and_rolled_back(open_page):
    page = open_page.page
    rollouts = FakeRollouts(
        small=rollout_of("small", MARKUP, slower=1.5, requests=400),
        large=rollout_of("large", "v2", slower=1.0, requests=40),
    )
    clients = {"stable-0": FakeReplica(4), "candidate-0": FakeReplica(4)}
    with visit(page, clients, rollouts=rollouts):
        page.wait_for_selector(".rollout")
        first, second = page.locator(".rollout").all()
        assert f"Candidate {MARKUP} of small" in first.inner_text()
        speed = first.locator("tbody tr").first.inner_text()
        assert "50" in speed and "34" in speed and "0.67" in speed and "worse" in speed
        assert "no difference seen yet" in second.inner_text()
        assert (
            first.locator("svg.interval")
            .first.get_attribute("aria-label")
            .startswith("Tokens a second, of a request: 0.67")
        )
        assert page.locator(".arm:visible").count() == 1
        card_says(page, "candidate-0", "candidate")
        first.get_by_role("button", name="Roll back").click()
        says(page, "confirm-question", f"Give {MARKUP} no more requests for small?")
        press(page, "Escape")
        assert rollouts.decided == []
        first.get_by_role("button", name="Roll back").click()
        page.click("#confirm .sure")
        page.wait_for_selector(".rollout[data-state=rolled_back]")
        assert rollouts.decided == [("small", "roll_back")]
        assert "Rolled back at" in first.inner_text() and "by hand" in first.inner_text()
        assert first.get_by_role("button", name="Roll back").is_disabled()
        second.get_by_role("button", name="Promote").focus()
        press(page, "Enter", "Shift+Tab", "Enter")
        page.wait_for_selector(".rollout[data-state=promoted]")
        assert rollouts.decided[1:] == [("large", "promote")]
        assert page.locator("img[src=x]").count() == 0
    assert open_page.problems == []


def test_the_comparison_of_a_candidate_is_accessible(open_to_axe, axe):
    rollouts = FakeRollouts(
        a=rollout_of("a", "v2", slower=1.5, requests=300),
        b=rollout_of("b", "v3", slower=0.6, requests=300),
        c=rollout_of("c", "v4", slower=1.0, requests=3),
    )
    rollouts.rollouts["a"].decide("roll_back")
    page = open_to_axe.page
    with visit(page, replicas(), rollouts=rollouts):
        page.wait_for_selector(".rollout")
        for width, scheme in ((360, "light"), (1440, "dark")):
            fit(page, width)
            assert (scheme, faults(page, axe, scheme)) == (scheme, {})
        page.get_by_role("button", name="Promote").first.click()
        for scheme in ("light", "dark"):
            assert (scheme, faults(page, axe, scheme)) == (scheme, {})
    assert open_to_axe.problems == []
