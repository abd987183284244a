"""Takes pictures for the docs: of every view of the page, and of an engine that is idle, loaded,
overloaded, restarted and dead.

    python docs/benchmarks/page_pictures.py [URL] [--model smollm2-135m] [--out docs/images]

Without a URL it starts a server of its own and clients that keep it busy, and ends within three
minutes if the programs are compiled already. With a URL it takes the views of that server.
"""

from __future__ import annotations

import argparse
import base64
import re
import tempfile
import time
from pathlib import Path

from page_server import CHROMIUM, Clients, browser, wait_live
from playwright.sync_api import Browser, Page, TimeoutError
from running import serving

_SEATS, _WAITING = 24, 8
#: Clients of a loaded engine, and of an overloaded engine that refuses some.
_LOADED, _OVERLOADED = 26, 60
_FLAGS = ("--max-seats", str(_SEATS), "--max-waiting-requests", str(_WAITING))
_FLAGS += ("--max-restarts", "1")
_WIDE = {"width": 1440, "height": 900}
_NARROW = {"width": 390, "height": 844}
_QUESTION = "Name three things that a bus driver checks before leaving, as a list."
#: Charts of a view that fit in the window.
_CHARTS = {
    "performance": ("rate", "queue", "ledger", "latency", "step", "ends"),
    "memory": ("pages", "hits", "tenant-pages"),
}
#: Milliseconds that a view gets to settle, and most milliseconds until it shows figures.
_SETTLE_MS, _PATIENCE_MS = 2500, 30_000
#: Most milliseconds until a killed engine's streams continue.
_RESTART_MS = 180_000
#: WebP quality: letters stay sharp, and a picture stays below 150 kB.
_QUALITY = 85


class Pictures:
    """Writes page-NAME.webp."""

    def __init__(self, out: Path):
        self._out = out

    def take(self, page: Page, name: str) -> None:
        session = page.context.new_cdp_session(page)
        how = {"format": "webp", "quality": _QUALITY}
        shot = session.send("Page.captureScreenshot", how)  # Playwright itself writes no WebP
        session.detach()
        path = self._out / f"page-{name}.webp"
        path.write_bytes(base64.b64decode(shot["data"]))
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB", flush=True)


def _opened(chromium: Browser, url: str) -> Page:
    page = chromium.new_page(viewport=_WIDE)  # type: ignore[arg-type]
    page.set_default_timeout(_PATIENCE_MS)
    page.goto(url + "/dashboard/")
    wait_live(page)
    return page


def _views(page: Page) -> list[str]:
    links = page.eval_on_selector_all("#views a:not([hidden])", "all => all.map(a => a.hash)")
    return [link.removeprefix("#") for link in links]


def _open(page: Page, view: str) -> None:
    """Open a view, and wait until it shows something."""
    page.click(f"#views a[href='#{view}']")
    try:
        if view == "chat":
            page.fill("#prompt", _QUESTION)
            page.keyboard.press("Enter")
            done = "() => document.querySelector('.assistant .buttons').children.length"
            page.wait_for_function(done)
        for chart in _CHARTS.get(view, ()):
            page.wait_for_selector(f"#chart-{chart} .main-svg")
    except TimeoutError:
        print(f"{view} is not done; its picture is taken as it is", flush=True)
    page.wait_for_timeout(_SETTLE_MS)


def _all_views(page: Page, pictures: Pictures) -> None:
    """Every view of an engine under load, the overview also dark and narrow, and one request."""
    others = [view for view in _views(page) if view not in ("overview", "incidents")]
    for view in [*others, "overview"]:  # last, so that it shows a minute of load
        _open(page, view)
        pictures.take(page, "light" if view == "overview" else view)
    page.click("#views a[href='#requests']")
    page.select_option("#request-state", "finished")
    page.locator("#requests tbody tr").first.click()
    page.wait_for_selector("#drawer[open] .verdict")
    pictures.take(page, "request")
    page.keyboard.press("Escape")
    page.emulate_media(color_scheme="dark")
    _open(page, "overview")
    pictures.take(page, "dark")
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(_NARROW)  # type: ignore[arg-type]
    _open(page, "overview")
    pictures.take(page, "narrow")
    page.set_viewport_size(_WIDE)  # type: ignore[arg-type]
    page.wait_for_timeout(_SETTLE_MS)


def _own_server(chromium: Browser, pictures: Pictures, model: str) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(model, Path(folder), *_FLAGS) as server,
    ):
        page = _opened(chromium, server.url)
        pictures.take(page, "idle")
        with Clients(server.url).asking(_LOADED):
            page.wait_for_timeout(4 * _SETTLE_MS)
            _all_views(page, pictures)
        with Clients(server.url).asking(_OVERLOADED):
            page.wait_for_timeout(2 * _SETTLE_MS)
            pictures.take(page, "overloaded")
            server.core().kill()
            # A button of the incident's line, or of the trouble line.
            page.wait_for_function(
                "() => /flowed again/.test(document.body.textContent)", timeout=_RESTART_MS
            )
            page.wait_for_timeout(_SETTLE_MS)
            pictures.take(page, "restarted")
            _open(page, "incidents")
            pictures.take(page, "incidents")
            _open(page, "overview")
            server.core().kill()
            page.wait_for_selector("[data-state=dead], [data-state=stale]")
            pictures.take(page, "dead")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", nargs="?", help="a running server's")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--chromium", default=CHROMIUM)
    args = parser.parse_args()
    began = time.monotonic()
    with browser(args.chromium) as chromium:
        pictures = Pictures(args.out)
        if args.url:
            _all_views(_opened(chromium, re.sub(r"/+$", "", args.url)), pictures)
        else:
            _own_server(chromium, pictures, args.model)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
