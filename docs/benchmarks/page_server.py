"""A browser, and clients that keep a server busy, for pictures and measurements of the page."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Iterator

import httpx
from playwright.sync_api import Browser, Page, sync_playwright
from running import READY_S

ARGUMENTS = ["--no-sandbox", "--disable-gpu"]
CHROMIUM = "/usr/bin/chromium"
#: Tokens of prompts and answers.
_PROMPT, _OUTPUT = (20, 120), (24, 120)
#: Seconds before a refused client sends again.
_AGAIN_S = 0.5


class Clients:
    """Clients that send streaming requests again and again, from a thread of their own."""

    def __init__(self, url: str):
        self._url = url + "/v1/completions"
        self._loop = asyncio.new_event_loop()
        self._draw = random.Random(0)
        #: (time.monotonic(), seconds) of first tokens, and of gaps between tokens.
        self.first_tokens: list[tuple[float, float]] = []
        self.gaps: list[tuple[float, float]] = []
        self.refused = 0

    @contextlib.contextmanager
    def asking(self, streams: int) -> Iterator[None]:
        """Keep `streams` streams open while the block runs."""
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
    """Wait until the page shows the engine's live figures."""
    page.wait_for_function(
        """() => document.body.dataset.state === "live"
            && document.querySelector("#figures .value")?.textContent"""
    )
