"""Pictures of every view of a running engine's page, for the docs.

jitney serve &  # and some load
python docs/benchmarks/page_pictures.py http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

_VIEWS = (
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
_ARGUMENTS = ["--no-sandbox", "--disable-gpu"]
_QUESTION = "Name three things that a bus driver checks before leaving, as a list."


def main() -> None:
    """Write page-VIEW.png for each view, and the overview dark and narrow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="the server's")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    args = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=_ARGUMENTS)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(120_000)
        page.goto(args.url + "/dashboard/")
        page.wait_for_selector("[data-state=live]")
        for view in _VIEWS:
            _open(page, view)
            page.screenshot(path=args.out / f"page-{view}.png")
        _story(page, args.out)
        page.emulate_media(color_scheme="dark")
        _open(page, "overview")
        page.screenshot(path=args.out / "page-dark.png")
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 390, "height": 844})
        _open(page, "overview")
        page.screenshot(path=args.out / "page-narrow.png")
        browser.close()


def _open(page: Page, view: str) -> None:
    """Go to a view, and wait until it shows something."""
    page.click(f"#views a[href='#{view}']")
    if view == "chat":
        page.fill("#prompt", _QUESTION)
        page.keyboard.press("Enter")
        page.wait_for_function(
            "() => document.querySelector('.assistant .buttons').children.length"
        )
    if view in ("memory", "performance"):
        page.wait_for_selector(f"#view-{view} .main-svg")
    page.wait_for_timeout(4000)


def _story(page: Page, out: Path) -> None:
    """The story of the newest request that ended."""
    page.click("#views a[href='#requests']")
    page.select_option("#request-state", "finished")
    page.locator("#requests tbody tr").first.click()
    page.wait_for_selector("#drawer[open] .verdict")
    page.screenshot(path=out / "page-request.png")
    page.keyboard.press("Escape")


if __name__ == "__main__":
    main()
