"""The page in a real browser: what it shows equals what the scripted engine said, and nothing else happens."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import uvicorn
from api_fakes import ByteTokenizer, until

from jitney.dashboard import create_dashboard, dashboard_routes
from jitney.engine.api import ServerSettings, create_app
from jitney.engine.api.settings import digest_key
from jitney.engine.types import Slot
from jitney.engine.wire import Progress

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = "/usr/bin/chromium"
pytestmark = pytest.mark.skipif(not shutil.which(CHROMIUM), reason="chromium is not installed")
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync"]
MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, env={**os.environ})
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium) -> Iterator[SimpleNamespace]:
    """A page whose console and requests are kept."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    seen = SimpleNamespace(page=page, problems=[], hosts=set())
    page.on("console", lambda message: message.type == "error" and seen.problems.append(message.text))
    page.on("pageerror", lambda error: seen.problems.append(str(error)))
    page.on("request", lambda request: seen.hosts.add(re.sub(r"^\w+://([^:/]*).*", r"\1", request.url)))
    page.set_default_timeout(10_000)
    yield seen
    context.close()


@contextlib.contextmanager
def served(app) -> Iterator[str]:
    """A real server in a thread; it does not wait long for open feeds when it stops. Yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False,
                                           timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def endpoint(client):
    settings = ServerSettings()
    routes = dashboard_routes(client, settings)
    return served(create_app(client, ByteTokenizer(), settings, client.info.model, routes))  # type: ignore[arg-type]


@contextlib.contextmanager
def visit(page, client) -> Iterator[str]:
    """The page, opened; it leaves before its server stops. Yields the server's URL."""
    with endpoint(client) as url:
        page.goto(url + "/dashboard")
        yield url
        page.goto("about:blank")


def drawn(page) -> None:
    """Wait until the feed is live and the last chart is there."""
    page.wait_for_selector("[data-state=live]")
    page.wait_for_selector("#chart-ledger .barlayer .bars", state="attached")


def headline(page, text: str) -> None:
    """Wait until the page says so."""
    page.wait_for_function("(text) => document.getElementById('headline').textContent === text", arg=text)


def figures(page) -> dict[str, str]:
    return dict(zip(page.locator("#figures dt").all_inner_texts(), page.locator("#figures dd").all_inner_texts(),
                    strict=True))


def colour_at(page, seat: int) -> list[int]:
    """The canvas's colour near the right end of a seat's cell, red, green, blue."""
    return page.evaluate("""(seat) => {
        const canvas = document.getElementById("seats"), ratio = devicePixelRatio;
        const columns = 4, width = Math.min(76 * 2.4, (canvas.clientWidth + 5) / columns - 5);
        const x = (seat % columns) * (width + 5) + width - 40;
        return [...canvas.getContext("2d").getImageData(x * ratio, 25 * ratio, 1, 1).data.slice(0, 3)];
    }""", seat)


def test_the_page_shows_the_engines_own_numbers(client, open_page):
    page = open_page.page
    with visit(page, client):
        drawn(page)
        assert page.locator("#headline").inner_text() == "3 of 4 seats taken, 2 waiting"
        shown = figures(page)
        assert (shown["Seats taken"], shown["Waiting"], shown["Pages used"]) == ("3 of 4", "2", "60 %")
        facts = page.locator("#facts").inner_text()
        assert all(word in facts for word in ("scripted", "cpu", "reference", "continuous"))
        page.click("#seat-details summary")
        page.wait_for_selector("#seat-table td")
        rows = [row.split("\t") for row in page.locator("#seat-table tbody").inner_text().splitlines()]
        assert rows[0] == ["0", "decode", "req-a", "0", "5", "8", "16", "2"]
        assert rows[1] == ["1", "prefill", "req-b", "1", "40", "0", "9", "3"]
        assert rows[2][:2] == ["2", "free"] and rows[3][2] == MARKUP
        legend = page.locator("#page-legend").inner_text()
        assert all(text in legend for text in ("1 free", "4 held", "2 shared", "3 cached"))
        assert colour_at(page, 0) == [0xCF, 0xE4, 0xF1] and colour_at(page, 2) == [0, 0, 0]  # half done; free
        assert page.locator("#empty").is_hidden() and page.locator("img[src=x]").count() == 0
        page.focus("#seats")
        for key in ("ArrowRight", "ArrowLeft", "ArrowRight", "ArrowRight", "ArrowRight"):
            page.keyboard.press(key)
        assert MARKUP in page.locator("#seat-read").inner_text()
        assert "3 of at most 4 output tokens" in page.locator("#seat-read").inner_text()
    assert open_page.hosts == {"127.0.0.1"}
    assert open_page.problems == []


def test_changes_arrive_and_rates_are_differences(client, open_page):
    page = open_page.page
    with visit(page, client):
        page.wait_for_selector("[data-state=live]")
        for seat in range(4):
            client.seat(seat, "decode", f"new-{seat}", n_prompt=1, n_computed=9, n_output=8, max_tokens=9, pages=1)
        headline(page, "Full: all 4 seats taken, 2 waiting")
        client.step(waiting=0, decode=300, padding=0, bucket_tokens=323)
        page.wait_for_function("() => Number(document.querySelector('#figures dd').textContent) >= 100")
        page.click("#time-details summary")
        page.wait_for_selector("#time-table td")
        rides = page.locator("#time-table").inner_text()
        assert all(f"new-{seat}" in rides for seat in range(4)) and "req-b" in rides and MARKUP in rides
        client.seats = [Slot(seat=seat, state="free") for seat in range(4)]
        headline(page, "Idle: all 4 seats are free")
    assert open_page.problems == []


def test_loading_stale_and_dead(client, open_page):
    page, info = open_page.page, client.info
    with endpoint(client) as url:
        client.info, client.state, client.progress = None, "loading", Progress("compile", 3, 8)
        page.goto(url + "/dashboard/")
        page.wait_for_selector("[data-state=loading]")
        headline(page, "Loading: compile 3 of 8")
        assert page.locator("#progress").get_attribute("value") == "3"
        client.info, client.state = info, "ready"
        page.wait_for_selector("[data-state=live]")
        client.age = 7.0
        page.wait_for_selector("[data-state=stale]")
        assert "silent for 7 s" in page.locator("#trouble").inner_text()
        client.age, client.state = 0.0, "draining"
        page.wait_for_selector("[data-state=draining]")
        client.state = "dead"
        page.wait_for_selector("[data-state=dead]")
        assert page.locator("#headline").inner_text() == "The engine is dead"


def test_a_server_that_is_gone_makes_the_page_stale(client, open_page):
    page = open_page.page
    with endpoint(client) as url:
        page.goto(url + "/dashboard/")
        page.wait_for_selector("[data-state=live]")
    page.wait_for_selector("[data-state=stale]")
    assert "No news from the server" in page.locator("#trouble").inner_text()
    assert figures(page)["Seats taken"] == "3 of 4"


def test_empty_shows_a_line_to_copy(client, open_page):
    page = open_page.page
    client.__init__(model="it's")
    with visit(page, client) as url:
        page.wait_for_selector("#empty:not([hidden])")
        line = page.locator("#curl").inner_text()
        assert line.startswith(f"curl {url}/v1/completions ") and """{"model":"it'\\''s",""" in line
    assert open_page.problems == []


def test_trying_it_streams_an_answer(client, open_page):
    page = open_page.page
    with visit(page, client):
        page.wait_for_selector("#try:not([hidden])")
        page.click("#try button[type=submit]")
        page.wait_for_function("() => document.getElementById('answer').textContent === 'Hello, wörld!'")
        page.click("#crowd")
        until(lambda: len(client.requests) == 5)
        assert sorted(request.sampling.n for request in client.requests) == [1, 4, 4, 4, 4]
    assert open_page.problems == []


def test_signing_in_with_a_key(client, open_page):
    page = open_page.page
    settings = ServerSettings(api_keys=(digest_key("the key"),))
    with served(create_dashboard(client, settings)) as url:
        page.goto(url)
        for key in ("wrong", "the key"):
            page.fill("#key", key)
            page.click("button")
            if key == "wrong":
                page.wait_for_selector("#refused:not([hidden])")
        page.wait_for_selector("[data-state=live]")
        assert page.locator("#try").is_hidden()
        assert page.evaluate("document.cookie") == "" and "key" not in page.url
        page.goto("about:blank")


def test_it_fits_narrow_and_wide_screens(client, open_page):
    page = open_page.page
    with visit(page, client):
        drawn(page)
        for width, scheme in ((360, "light"), (768, "dark"), (1440, "light")):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 800})
            page.wait_for_function("(width) => document.querySelector('#chart-rate svg').clientWidth < width",
                                   arg=width)
            assert page.evaluate("document.documentElement.scrollWidth") == width
    assert open_page.problems == []
