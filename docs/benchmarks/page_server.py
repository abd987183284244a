"""A server with a page and clients that keep it busy, for pictures and measurements of the page."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
from batch import READY_S, Server, serving
from playwright.sync_api import Browser, Page, sync_playwright

ARGUMENTS = ["--no-sandbox", "--disable-gpu"]
CHROMIUM = "/usr/bin/chromium"
#: Tokens of prompts and answers.
_PROMPT, _OUTPUT = (20, 120), (24, 120)
#: Seconds before a refused client comes again.
_AGAIN_S = 0.5
_CORE = "jitney.engine.server.process.main"


@contextlib.contextmanager
def page_server(model: str, port: int, folder: Path, *flags: str) -> Iterator[Server]:
    """A server that is ready, with everything it writes but compiled programs in `folder`."""
    with serving(Namespace(model=model, port=port, serve_flags=flags), folder) as server:
        with ThreadPoolExecutor(1) as apart:  # the browser's loop runs on this thread
            apart.submit(asyncio.run, server.ready()).result()
        yield server


def core_of(server: Server) -> psutil.Process:
    """The process of the engine's core. Raises LookupError while there is none."""
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.Error):
            if _CORE in child.cmdline():
                return child
    raise LookupError("no core runs")


class Clients:
    """Streams that ask again and again, from a thread of their own."""

    def __init__(self, url: str):
        self._url = url + "/v1/completions"
        self._loop = asyncio.new_event_loop()
        self._draw = random.Random(0)
        #: (when, seconds) of first tokens, and between tokens; time.monotonic().
        self.first_tokens: list[tuple[float, float]] = []
        self.gaps: list[tuple[float, float]] = []
        self.refused = 0

    @contextlib.contextmanager
    def asking(self, streams: int) -> Iterator[None]:
        """So many streams are open as long as the block runs."""
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        work = asyncio.run_coroutine_threadsafe(self._ask_all(streams), self._loop)
        try:
            yield
        finally:
            work.cancel()
            with contextlib.suppress(BaseException):
                work.result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(10)

    async def _ask_all(self, streams: int) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=READY_S, limits=limits, trust_env=False) as http:
            await asyncio.gather(*(self._ask(http, number) for number in range(streams)))

    async def _ask(self, http: httpx.AsyncClient, number: int) -> None:
        while True:
            body = {
                "prompt": [self._draw.randrange(100, 40_000) for _ in range(self._length(_PROMPT))],
                "max_tokens": self._length(_OUTPUT),
                "ignore_eos": True,
                "stream": True,
                "user": f"user {number % 7}",
            }
            with contextlib.suppress(httpx.HTTPError):
                await self._read(http, body)
            await asyncio.sleep(0)

    def _length(self, within: tuple[int, int]) -> int:
        return self._draw.randint(*within)

    async def _read(self, http: httpx.AsyncClient, body: dict[str, object]) -> None:
        last, is_first = time.monotonic(), True
        async with http.stream("POST", self._url, json=body) as reply:
            if reply.status_code != 200:
                self.refused += 1
                await asyncio.sleep(_AGAIN_S)
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    (self.first_tokens if is_first else self.gaps).append((now, now - last))
                    last, is_first = now, False


@contextlib.contextmanager
def browser(executable: str = CHROMIUM) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield chromium
        chromium.close()


def wait_live(page: Page) -> None:
    """Until the page shows the engine's figures of now."""
    page.wait_for_function(
        """() => document.body.dataset.state === "live"
            && document.querySelector("#figures .value")?.textContent"""
    )
