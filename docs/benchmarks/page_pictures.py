"""Pictures of every view of the page, and of an engine that is idle, loaded, overloaded, restarted
and dead, for the docs.

    python docs/benchmarks/page_pictures.py [URL] [--model smollm2-135m] [--out docs/images]

Without a URL it starts a server of its own and clients that keep it busy, and ends within three
minutes where programs are compiled already. With one it takes the views of that server as they are.
A PNG has at most 256 colours, so that it stays below 150 kB.
"""

from __future__ import annotations

import argparse
import base64
import re
import struct
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
from page_server import CHROMIUM, Clients, browser, core_of, page_server, wait_live
from playwright.sync_api import Browser, Page, TimeoutError

_SEATS, _WAITING = 24, 8
#: Clients of a loaded engine, and of one that refuses some.
_LOADED, _OVERLOADED = 26, 60
_FLAGS = ("--max-seats", str(_SEATS), "--max-waiting-requests", str(_WAITING))
_FLAGS += ("--max-restarts", "1")
_WIDE = {"width": 1440, "height": 900}
_NARROW = {"width": 390, "height": 844}
_QUESTION = "Name three things that a bus driver checks before leaving, as a list."
#: Milliseconds until a view shows figures of its own.
_SETTLE_MS, _PATIENCE_MS = 2500, 30_000
_COLOURS = 256
_PIXELS = """async (png) => {
    const image = new Image();
    image.src = "data:image/png;base64," + png;
    await image.decode();
    const canvas = new OffscreenCanvas(image.width, image.height);
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    const {data} = context.getImageData(0, 0, image.width, image.height);
    let text = "";
    for (let i = 0; i < data.length; i += 32768) {
        text += String.fromCharCode(...data.subarray(i, i + 32768));
    }
    return [image.width, image.height, btoa(text)];
}"""


class Pictures:
    """Writes page-NAME.png."""

    def __init__(self, chromium: Browser, out: Path):
        self._reader = chromium.new_page()
        self._out = out

    def take(self, page: Page, name: str) -> None:
        shot = base64.b64encode(page.screenshot()).decode()
        width, height, data = self._reader.evaluate(_PIXELS, shot)
        pixels = np.frombuffer(base64.b64decode(data), np.uint8).reshape(height, width, 4)[..., :3]
        path = self._out / f"page-{name}.png"
        path.write_bytes(_png(*_with_palette(pixels)))
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB", flush=True)


def _with_palette(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint8[height, width, 3] -> places in the palette (uint8[height, width]) and the palette
    (uint8[colours, 3]): the commonest colours; each other one becomes that nearest to it.
    """
    codes = (pixels.astype(np.uint32) * (65536, 256, 1)).sum(axis=-1)
    colours, inverse, counts = np.unique(codes, return_inverse=True, return_counts=True)
    values = np.stack((colours >> 16, colours >> 8 & 255, colours & 255), axis=-1).astype(np.int32)
    palette = values[np.argsort(-counts)[:_COLOURS]]
    nearest = [
        ((part[:, None] - palette) ** 2).sum(axis=-1).argmin(axis=-1)
        for part in np.array_split(values, max(1, len(values) // 1024))
    ]
    places = np.concatenate(nearest).astype(np.uint8)
    return places[inverse].reshape(pixels.shape[:2]), palette.astype(np.uint8)


def _png(places: np.ndarray, palette: np.ndarray) -> bytes:
    """A PNG with a palette (https://www.w3.org/TR/png-3/)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    height, width = places.shape
    lines = np.pad(places, ((0, 0), (1, 0))).tobytes()  # each line begins with its filter: none
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            chunk(b"PLTE", palette.tobytes()),
            chunk(b"IDAT", zlib.compress(lines, 9)),
            chunk(b"IEND", b""),
        )
    )


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
    """Go to a view, and wait until it shows something."""
    page.click(f"#views a[href='#{view}']")
    try:
        if view == "chat":
            page.fill("#prompt", _QUESTION)
            page.keyboard.press("Enter")
            done = "() => document.querySelector('.assistant .buttons').children.length"
            page.wait_for_function(done)
        if view == "performance":
            page.wait_for_selector(f"#view-{view} .main-svg")
    except TimeoutError:
        print(f"{view} is not done; its picture is taken as it is", flush=True)
    page.wait_for_timeout(_SETTLE_MS)


def _all_views(page: Page, pictures: Pictures) -> None:
    """Every view of an engine under load, the overview also dark and narrow, and one story."""
    for view in _views(page):
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


def _own_server(chromium: Browser, pictures: Pictures, model: str, port: int) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        page_server(model, port, Path(folder), *_FLAGS) as server,
    ):
        page = _opened(chromium, server.url)
        pictures.take(page, "idle")
        with Clients(server.url).asking(_LOADED):
            page.wait_for_timeout(4 * _SETTLE_MS)
            _all_views(page, pictures)
        with Clients(server.url).asking(_OVERLOADED):
            page.wait_for_timeout(2 * _SETTLE_MS)
            pictures.take(page, "overloaded")
            core_of(server).kill()
            # On the incident's line, or on that of trouble.
            page.wait_for_function(
                "() => /flowed again/.test(document.body.textContent)", timeout=2 * _PATIENCE_MS
            )
            page.wait_for_timeout(_SETTLE_MS)
            pictures.take(page, "restarted")
            core_of(server).kill()
            page.wait_for_selector("[data-state=dead], [data-state=stale]")
            pictures.take(page, "dead")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", nargs="?", help="a running server's")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--port", type=int, default=8199)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--chromium", default=CHROMIUM)
    args = parser.parse_args()
    began = time.monotonic()
    with browser(args.chromium) as chromium:
        pictures = Pictures(chromium, args.out)
        if args.url:
            _all_views(_opened(chromium, re.sub(r"/+$", "", args.url)), pictures)
        else:
            _own_server(chromium, pictures, args.model, args.port)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
