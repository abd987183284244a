"""How smoothly the page draws a large engine: frame times and heap growth in a headless browser.

    python docs/benchmarks/page_frames.py [--seats 1024] [--hz 10] [--seconds 60]

A scripted engine in this process keeps every seat moving; Debian's chromium without a GPU looks at
it. Prints the distribution of the times between animation frames, and the JavaScript heap after a
collection at the start and end.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import threading
import time
from typing import Any

import numpy as np
import uvicorn
from playwright.sync_api import Page, sync_playwright

from jitney.dashboard import Dashboard
from jitney.engine.common.engine_info import (
    DeviceInfo,
    EngineInfo,
    EngineSizes,
    KernelsInfo,
    ModelInfo,
    NumberFormats,
    QueueInfo,
)
from jitney.engine.common.history import History
from jitney.engine.common.messages import SeatMap, SequenceEvent, StepReport
from jitney.engine.common.outputs import SequenceOutput
from jitney.engine.common.records import STEP_DTYPE
from jitney.engine.common.requests import EngineRequest, SamplingParams
from jitney.engine.server.http.settings import ServerSettings
from jitney.engine.server.process.counters import EngineCounters

ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-precise-memory-info",
]
#: Steps a second of the scripted engine.
STEPS_S = 20
FRAMES = """(seconds) => new Promise((resolve) => {
  const times = [];
  let last = performance.now();
  const end = last + 1000 * seconds;
  const frame = () => {
    const now = performance.now();  // not the frame's own time stamp, which hides how late it was
    times.push(now - last);
    last = now;
    if (now < end) requestAnimationFrame(frame); else resolve(times.slice(1));
  };
  requestAnimationFrame(frame);
})"""


class Crowd:
    """An engine of STEPS_S steps a second whose every seat reads a prompt, generates 50 to 400
    tokens, and is refilled at once. It goes on when the feed looks at it."""

    state, progress = "ready", None

    def __init__(self, seats: int):
        self.info = EngineInfo(
            version="0",
            model=ModelInfo(name="scripted", context_length=4096, vocab_size=256),
            formats=NumberFormats(dtype="float32", kv_dtype="float32"),
            device=DeviceInfo(platform="cpu", name="cpu"),
            kernels=KernelsInfo(label="reference"),
            sizes=EngineSizes(
                seats=seats, pages=seats * 8, page_size=16, prefix_cache=True, token_budget=2048
            ),
            queue=QueueInfo(policy="continuous", order="fcfs", max_waiting_requests=4096),
        )
        self.counters, self.history = EngineCounters(), History()
        self.history.core_ready(self.info)
        self.draw = random.Random(1)
        self.left, self.names = [0] * seats, [""] * seats  # tokens to come and request, by seat
        self.steps, self.served, self.began = 0, 0, time.monotonic()
        self.history.take(
            StepReport(
                [], events=[self.board(seat, self.draw.randrange(1, 400)) for seat in range(seats)]
            )
        )

    def board(self, seat: int, output: int) -> SequenceEvent:
        """A new request in this seat."""
        self.served += 1
        name = f"req-{self.served:08x}"
        prompt = self.draw.randrange(20, 400)
        self.history.submit(
            EngineRequest(
                id=name,
                prompt=[0] * prompt,
                sampling=SamplingParams(max_tokens=output),
                arrival=time.monotonic(),
            )
        )
        self.left[seat], self.names[seat] = output, name
        return SequenceEvent("seated", name, 0, seat, self.steps, time.monotonic(), prompt, 0)

    def step(self) -> None:
        seats, outputs, life = len(self.left), [], []
        for seat in range(seats):
            self.left[seat] -= 1
            ends = self.left[seat] == 0
            outputs.append(
                SequenceOutput(
                    request_id=self.names[seat],
                    index=0,
                    tokens=[1],
                    finish="length" if ends else None,
                )
            )
            if ends:
                life.append(self.board(seat, self.draw.randrange(50, 400)))
        record = np.zeros(1, STEP_DTYPE)
        given = {
            "step": self.steps,
            "started": time.monotonic() - 1 / STEPS_S,
            "mixed": 1,
            "bucket_tokens": 2 * seats,
            "bucket_seats": seats,
            "prefill": seats // 2,
            "decode": seats,
            "padding": seats - seats // 2,
            "seats": seats,
            "seats_busy": seats,
            "pages": self.info.sizes.pages,
            "pages_used": seats,
            "waiting": 40,
            "device_s": 1 / STEPS_S - 0.001,
            "gap_s": 0.001,
        }
        for name, value in given.items():
            record[name] = value
        self.steps += 1
        taken = self.history.take(StepReport(outputs, record.tobytes(), events=life))
        self.counters.observe_step(taken)

    def records(self, after_step: int) -> np.ndarray:
        while self.steps < (time.monotonic() - self.began) * STEPS_S:
            self.step()
        return self.history.records.since(after_step)

    async def page_map(self) -> SeatMap:
        held = sum(self.draw.randrange(2, 7) for _ in self.left)
        states = np.zeros(self.info.sizes.pages + 1, np.uint8)
        states[1:held] = 1
        states[1:held:7] = 2
        states[held : held + 200] = 3
        return SeatMap(0, [], states.tobytes())

    def last_step_age(self) -> float:
        return 0.0


@contextlib.contextmanager
def served(app: Any):
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host="127.0.0.1",
            port=0,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)


def heap_mb(page: Page) -> float:
    """Megabytes in use after a full collection."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    return session.send("Runtime.getHeapUsage")["usedSize"] / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seats", type=int, default=1024)
    parser.add_argument("--hz", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--scroll", type=int, default=0, help="pixels to scroll down before measuring"
    )
    parser.add_argument("--picture", help="save what the page looks like at the end")
    args = parser.parse_args()
    app = Dashboard(Crowd(args.seats), ServerSettings(), hz=args.hz).to_mount()  # type: ignore[arg-type]
    with served(app) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(url)
        page.wait_for_selector("[data-state=live]")
        page.mouse.wheel(0, args.scroll)
        page.wait_for_timeout(5000)
        before = heap_mb(page)
        times = np.array(page.evaluate(FRAMES, args.seconds))
        grown = heap_mb(page) - before
        headline = page.locator("#headline").inner_text()
        if args.picture:
            page.screenshot(path=args.picture)
        browser.close()
    p50, p95, p99 = np.percentile(times, (50, 95, 99))
    print(headline)
    print(
        f"{args.seats} seats at {args.hz:g} Hz for {args.seconds:g} s: {len(times)} frames, p50 "
        f"{p50:.1f} ms, "
        f"p95 {p95:.1f} ms, p99 {p99:.1f} ms, longest {times.max():.0f} ms; heap {before:.1f} MB, "
        f"grew {grown:+.2f} MB"
    )


if __name__ == "__main__":
    main()
