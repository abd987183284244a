"""Checks figures and cost of the page under load, beside /metrics and the clients' measurements.

    python docs/benchmarks/page_checks.py [--model smollm2-135m] [--clients 132] [--seconds 30]

Starts `jitney serve` and `--clients` clients, more than seats. Measures the first paint with live
figures and the bytes until then; figures of the page beside /metrics and clients over the same
seconds; CPU time of the server with five viewers and without; how soon the page shows 39 refusals;
whether a page opened an hour later (the store's times are moved back by an hour) shows when the
core was killed, and which requests had which seats; and how soon Escape in the chat frees a seat
beside clients that take all other seats. Run it on an otherwise idle machine. --only: of paint,
figures, viewers, refusals, hour and stop.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
from page_server import Clients, browser, wait_live
from playwright.sync_api import Browser, Page
from running import Server, serving

from jitney.engine.common.machine import cpu_name

_SEATS, _VIEWERS, _REFUSED = 24, 5, 39
#: Seconds in which refused requests are refused.
_TOLD_S = 1.0
#: Number of times that the page is opened, and of chats that are stopped.
_OPENED, _CHATS = 7, 30
_WARM_UP_S, _EVERY_S = 40.0, 0.5
_HOUR_S, _SOON_MS = 3600.0, 100
_WIDE = {"width": 1440, "height": 900}
_WATCH = """
import socket, sys, threading
def read():
    s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    s.sendall(b"GET /dashboard/feed HTTP/1.1\\r\\nhost: localhost\\r\\n\\r\\n")
    while s.recv(1 << 16): pass
for _ in range(int(sys.argv[2])): threading.Thread(target=read, daemon=True).start()
sys.stdin.read()
"""
#: JavaScript that returns the page's figures by their names.
_FIGURES = """() => {
    const text = (box, part) => box.querySelector(part).textContent;
    const boxes = [...document.querySelectorAll("#figures .figure")];
    return Object.fromEntries(boxes.map((box) => [text(box, "dt"), text(box, ".value")]));
}"""


#: JavaScript that checks that the figures that a loaded engine always has are on the screen.
_ALL_LIVE = """() => document.body?.dataset.state === "live"
    && [...document.querySelectorAll("#figures .value")].slice(0, 5)
        .every((one) => one.textContent !== "–")"""


def first_paint(chromium: Browser, url: str) -> None:
    """Print the time until the page shows live figures, over several openings, and the bytes."""
    opened = [open_once(chromium, url) for _ in range(_OPENED)]
    times, sizes = zip(*opened, strict=True)
    each = ", ".join(f"{seconds:.2f}" for seconds in times)
    print(
        f"first paint with live figures: median {np.median(times):.2f} s, {max(times):.2f} s at "
        f"most ({each}), {max(sizes) / 1000:.0f} kB"
    )


def open_once(chromium: Browser, url: str) -> tuple[float, float]:
    """Seconds until a page without a cache shows live figures, and the bytes until then."""
    page = chromium.new_page(viewport=_WIDE)  # type: ignore[arg-type]
    page.set_default_timeout(60_000)
    session = page.context.new_cdp_session(page)
    sizes: list[float] = []
    session.on("Network.dataReceived", lambda event: sizes.append(event["encodedDataLength"]))
    session.send("Network.enable")
    began = time.monotonic()
    page.goto(url + "/dashboard/", wait_until="commit")
    page.wait_for_function(_ALL_LIVE)
    seconds = time.monotonic() - began
    page.close()
    return seconds, sum(sizes)


def opened(chromium: Browser, server: Server) -> Page:
    page = chromium.new_page(viewport=_WIDE)  # type: ignore[arg-type]
    page.goto(server.url + "/dashboard/")
    wait_live(page)
    return page


def metrics(url: str) -> dict[str, float]:
    """Samples of /metrics, by name with labels."""
    text = httpx.get(url + "/metrics", trust_env=False).text
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def number(text: str) -> float:
    """A figure of the page as a number: in seconds, tokens, or percent."""
    match = re.match(r"([\d.,]+)\s*(µs|ms|s|min)?", text.replace("\xa0", " "))
    if match is None:
        return float("nan")
    scale = {"µs": 1e-6, "ms": 1e-3, "min": 60.0}.get(match[2] or "", 1.0)
    return float(match[1].replace(",", "")) * scale


def compare(chromium: Browser, server: Server, clients: Clients, seconds: float) -> None:
    """Print figures of the page beside /metrics or the clients, over the same seconds."""
    page = opened(chromium, server)
    before, began = metrics(server.url), time.monotonic()
    shown: list[dict[str, float]] = []
    gauges: list[dict[str, float]] = []
    while time.monotonic() - began < seconds:
        figures = page.evaluate(_FIGURES)
        shown.append({name: number(value) for name, value in figures.items()})
        gauges.append(metrics(server.url))
        time.sleep(_EVERY_S)
    after, ended = metrics(server.url), time.monotonic()
    rows = [f'jitney_rows_total{{kind="{kind}"}}' for kind in ("decode", "accepted")]
    rate = sum(after.get(row, 0) - before.get(row, 0) for row in rows) / (ended - began)
    first = [value for t, value in clients.first_tokens if began < t <= ended]

    def mean(name: str) -> float:
        return float(np.nanmean([one[name] for one in shown]))

    def gauge(name: str) -> float:
        return float(np.mean([one[name] for one in gauges]))

    table = {
        "Output tok/s": (mean("Output tok/s"), rate, "/metrics"),
        "Waiting": (mean("Waiting"), gauge("jitney_requests_waiting"), "/metrics"),
        "KV pages": (
            mean("KV pages"),
            100 * gauge("jitney_kv_pages_used") / gauge("jitney_kv_pages"),
            "/metrics",
        ),
        "First token": (shown[-1]["First token"], float(np.median(first or [np.nan])), "clients"),
    }
    for name, (ours, theirs, whose) in table.items():
        apart = 100 * (ours / theirs - 1) if theirs else 0.0
        print(f"{name}: page {ours:.3g}, {whose} {theirs:.3g}: {apart:+.1f} %")
    page.close()


@contextlib.contextmanager
def viewers(url: str, count: int) -> Iterator[None]:
    command = [sys.executable, "-c", _WATCH, url.rpartition(":")[2], str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as watching:
        time.sleep(2.0)
        yield
        assert watching.stdin is not None
        watching.stdin.close()


def cpu_share(server: Server, seconds: float) -> float:
    """CPU seconds per second of the server's own process."""
    before = server.cpu_s()
    time.sleep(seconds)
    return (server.cpu_s() - before) / seconds


def cost_of_viewers(server: Server, seconds: float) -> None:
    """Print the CPU cost of viewers, beside the same time before and after without any."""
    alone = cpu_share(server, seconds)
    with viewers(server.url, _VIEWERS):
        watched = cpu_share(server, seconds)
    alone = (alone + cpu_share(server, seconds)) / 2
    print(
        f"{_VIEWERS} viewers: {100 * (watched - alone):+.1f} % of a core "
        f"({100 * alone:.1f} % alone)"
    )


def refusals(chromium: Browser, server: Server) -> None:
    """Print how soon the page shows refused requests."""
    page = opened(chromium, server)
    refused: list[float] = []

    def ask() -> None:
        body = {"prompt": "One", "max_tokens": 8}
        url = server.url + "/v1/completions"
        if httpx.post(url, json=body, timeout=300, trust_env=False).status_code == 429:
            refused.append(time.monotonic())

    with ThreadPoolExecutor(_REFUSED) as pool:
        for _ in range(_REFUSED):
            pool.submit(ask)
        page.wait_for_function("() => /turned away/.test(document.body.textContent)")
        time.sleep(_TOLD_S)  # the others are refused meanwhile, or board
        page.wait_for_function(
            """(least) => Number(/(\\d+) requests? w\\w+ turned away/.exec(
                document.body.textContent)?.[1] ?? 0) >= least""",
            arg=len(refused),
        )
        seconds = time.monotonic() - refused[0]
        print(f"{len(refused)} refusals on the page: within {seconds:.2f} s of the first")
    page.close()


def an_hour_passes(folder: Path) -> None:
    """Move the stored times of the server back by an hour."""
    for name in ("incidents", "history"):
        with contextlib.closing(sqlite3.connect(folder / f"data/{name}/{name}.sqlite3")) as store:
            tables = ("incidents",) if name == "incidents" else ("bins", "requests")
            for table in tables:
                # In two updates, since times are unique.
                store.execute(f"UPDATE {table} SET t = -t - ?", (-_HOUR_S,))
                store.execute(f"UPDATE {table} SET t = -t")
            if name == "history":
                store.execute(
                    "UPDATE requests SET shift = shift - ?, began = began - ?", (_HOUR_S, _HOUR_S)
                )
            store.commit()


def look_back(chromium: Browser, server: Server) -> None:
    """Print what a page opened an hour later shows of the killed core."""
    page = chromium.new_page(viewport=_WIDE)  # type: ignore[arg-type]
    page.goto(server.url + "/dashboard/#incidents")
    line = page.locator("#kept li", has_text="outage").first
    print("an hour later:", " | ".join(line.inner_text().splitlines()))
    line.locator("a").click()
    page.wait_for_function(
        "() => / h .* ago/.test(document.getElementById('headline').textContent)"
    )
    page.click("#time-details summary")
    page.wait_for_selector("#time-table tbody tr")
    seats = page.locator("#time-table tbody td:nth-child(3)").all_inner_texts()
    print("an hour later:", page.locator("#headline").inner_text())
    print(f"an hour later: the newest {len(seats)} stays before it were in {len(set(seats))} seats")
    page.close()


def stop_chats(chromium: Browser, server: Server) -> None:
    """Print how soon stopped chats leave their seats. The server has the clock of this process."""
    page = chromium.new_page(viewport=_WIDE)  # type: ignore[arg-type]
    page.goto(server.url + "/dashboard/#chat")
    address = server.url + "/dashboard/requests?limit=1000&search=chat-"
    times: list[float] = []
    for number in range(_CHATS):
        page.fill("#prompt", "Tell a long story about the sea.")
        page.keyboard.press("Enter")
        page.wait_for_function(
            """(number) => document.querySelectorAll(".assistant .text")[number]
                ?.textContent.length > 40""",
            arg=number,
        )
        began = time.monotonic()
        page.keyboard.press("Escape")
        ended: list[float] = []
        while len(ended) <= number:
            page.wait_for_timeout(1000)  # each poll takes time from the step
            rows = httpx.get(address, trust_env=False).json()["requests"]
            ended = [one["finished"] for one in rows if one["finished"] is not None]
        times.append(1e3 * (max(ended) - began))
    late = sum(each > _SOON_MS for each in times)
    print(
        f"Escape frees the seat after {np.median(times):.0f} ms, {max(times):.0f} ms at most, of "
        f"{len(times)}; {late} after more than {_SOON_MS} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=132)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--only", nargs="+", default=[])
    args = parser.parse_args()

    def has(*parts: str) -> bool:
        return not args.only or bool(set(parts) & set(args.only))

    print(cpu_name())
    waiting = max(1, args.clients - _SEATS)
    flags = ("--max-seats", str(_SEATS), "--max-waiting-requests", str(waiting))
    flags += ("--max-predicted-wait-s", "0")
    with tempfile.TemporaryDirectory() as name, browser() as chromium:
        folder = Path(name)
        if has("paint", "figures", "viewers", "refusals", "hour"):
            with serving(args.model, folder, *flags) as server:
                clients = Clients(server.url)
                with clients.asking(args.clients):
                    time.sleep(_WARM_UP_S)
                    if has("paint"):
                        first_paint(chromium, server.url)
                    if has("figures"):
                        compare(chromium, server, clients, args.seconds)
                    if has("viewers"):
                        cost_of_viewers(server, args.seconds / 2)
                    if has("refusals"):
                        refusals(chromium, server)  # last: refused clients retry without end
                    server.core().kill()
                    time.sleep(_WARM_UP_S)
            an_hour_passes(folder)
        if has("hour", "stop"):
            with serving(args.model, folder, *flags) as server:
                if has("hour"):
                    look_back(chromium, server)
                if has("stop"):
                    with Clients(server.url).asking(_SEATS - 2):
                        stop_chats(chromium, server)


if __name__ == "__main__":
    main()
